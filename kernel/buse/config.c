// SPDX-License-Identifier: GPL-2.0
/*
 * The directory /sys/kernel/config/buse/<N> and its attributes.
 *
 * Invariants: a value is kept as written and judged when the power goes on.
 * While it is on, only size (upward) and what to do without a daemon may
 * change. rmdir ends a device that has power, without waiting for a daemon,
 * and returns when it is gone.
 *
 * Not here: what values are good (settings.c).
 */
#define pr_fmt(fmt) "buse: " fmt

#include <linux/configfs.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "buse.h"

static struct buse_config *buse_config_of(struct config_item *item)
{
	return container_of(item, struct buse_config, item);
}

static u64 *buse_number_at(struct buse_config *config, size_t offset)
{
	return (u64 *)((u8 *)&config->settings + offset);
}

static ssize_t buse_number_show(struct config_item *item, char *page,
				size_t offset)
{
	struct buse_config *config = buse_config_of(item);
	u64 value;

	mutex_lock(&config->lock);
	value = *buse_number_at(config, offset);
	mutex_unlock(&config->lock);
	return sysfs_emit(page, "%llu\n", value);
}

static ssize_t buse_number_store(struct config_item *item, const char *page,
				 size_t count, size_t offset)
{
	struct buse_config *config = buse_config_of(item);
	u64 value;
	int err = kstrtou64(page, 0, &value);

	if (err)
		return err;
	mutex_lock(&config->lock);
	if (config->device)
		err = -EBUSY;
	else
		*buse_number_at(config, offset) = value;
	mutex_unlock(&config->lock);
	return err ? err : count;
}

#define BUSE_NUMBER_STORE(name)						\
static ssize_t buse_##name##_store(struct config_item *item,		\
				   const char *page, size_t count)	\
{									\
	return buse_number_store(item, page, count,			\
				 offsetof(struct buse_settings, name));	\
}

#define BUSE_NUMBER_SHOW(name)						\
static ssize_t buse_##name##_show(struct config_item *item, char *page)	\
{									\
	return buse_number_show(item, page,				\
				offsetof(struct buse_settings, name));	\
}

BUSE_NUMBER_SHOW(blocksize)
BUSE_NUMBER_STORE(blocksize)
CONFIGFS_ATTR(buse_, blocksize);

BUSE_NUMBER_SHOW(io_min)
BUSE_NUMBER_STORE(io_min)
CONFIGFS_ATTR(buse_, io_min);

BUSE_NUMBER_SHOW(io_opt)
BUSE_NUMBER_STORE(io_opt)
CONFIGFS_ATTR(buse_, io_opt);

BUSE_NUMBER_SHOW(collision_area_size)
BUSE_NUMBER_STORE(collision_area_size)
CONFIGFS_ATTR(buse_, collision_area_size);

BUSE_NUMBER_SHOW(write_chunk_size)
BUSE_NUMBER_STORE(write_chunk_size)
CONFIGFS_ATTR(buse_, write_chunk_size);

BUSE_NUMBER_SHOW(write_shm_size)
BUSE_NUMBER_STORE(write_shm_size)
CONFIGFS_ATTR(buse_, write_shm_size);

BUSE_NUMBER_SHOW(read_shm_size)
BUSE_NUMBER_STORE(read_shm_size)
CONFIGFS_ATTR(buse_, read_shm_size);

BUSE_NUMBER_SHOW(queue_depth)
BUSE_NUMBER_STORE(queue_depth)
CONFIGFS_ATTR(buse_, queue_depth);

BUSE_NUMBER_SHOW(no_scheduler)
BUSE_NUMBER_STORE(no_scheduler)
CONFIGFS_ATTR(buse_, no_scheduler);

BUSE_NUMBER_SHOW(can_write_same)
BUSE_NUMBER_STORE(can_write_same)
CONFIGFS_ATTR(buse_, can_write_same);

BUSE_NUMBER_SHOW(can_write_zeroes)
BUSE_NUMBER_STORE(can_write_zeroes)
CONFIGFS_ATTR(buse_, can_write_zeroes);

BUSE_NUMBER_SHOW(can_discard)
BUSE_NUMBER_STORE(can_discard)
CONFIGFS_ATTR(buse_, can_discard);

BUSE_NUMBER_SHOW(can_secure_erase)
BUSE_NUMBER_STORE(can_secure_erase)
CONFIGFS_ATTR(buse_, can_secure_erase);

BUSE_NUMBER_SHOW(chunk_age_ms)
BUSE_NUMBER_STORE(chunk_age_ms)
CONFIGFS_ATTR(buse_, chunk_age_ms);

/* With power, how many queues there really are. */
static ssize_t buse_hw_queues_show(struct config_item *item, char *page)
{
	struct buse_config *config = buse_config_of(item);
	u64 queues;

	mutex_lock(&config->lock);
	queues = config->device ? config->device->layout.queues :
				  config->settings.hw_queues;
	mutex_unlock(&config->lock);
	return sysfs_emit(page, "%llu\n", queues);
}
BUSE_NUMBER_STORE(hw_queues)
CONFIGFS_ATTR(buse_, hw_queues);

static int buse_size_grow(struct buse_config *config, u64 size)
{
	int err = buse_size_check(config->index, &config->settings, size);

	if (err)
		return err;
	if (buse_life_is_stopping(config->device))
		return -EBUSY;
	if (size < config->settings.size) {
		pr_err("buse%u: size=%llu is below %llu: a disk with power only grows\n",
		       config->index, size, config->settings.size);
		return -EINVAL;
	}
	buse_device_resize(config->device, size);
	return 0;
}

BUSE_NUMBER_SHOW(size)
static ssize_t buse_size_store(struct config_item *item, const char *page,
			       size_t count)
{
	struct buse_config *config = buse_config_of(item);
	u64 size;
	int err = kstrtou64(page, 0, &size);

	if (err)
		return err;
	mutex_lock(&config->lock);
	if (config->device)
		err = buse_size_grow(config, size);
	if (!err)
		config->settings.size = size;
	mutex_unlock(&config->lock);
	return err ? err : count;
}
CONFIGFS_ATTR(buse_, size);

/* With config->lock: a policy holds at once, with power or without. */
static void buse_policy_set(struct buse_config *config,
			    enum buse_on_death on_death, u64 timeout_ms)
{
	config->settings.on_death = on_death;
	config->settings.death_timeout_ms = timeout_ms;
	if (config->device)
		buse_life_set_policy(config->device, on_death, timeout_ms);
}

BUSE_NUMBER_SHOW(death_timeout_ms)
static ssize_t buse_death_timeout_ms_store(struct config_item *item,
					   const char *page, size_t count)
{
	struct buse_config *config = buse_config_of(item);
	u32 timeout_ms;
	int err = kstrtou32(page, 0, &timeout_ms);

	if (err)
		return err;
	if (timeout_ms > BUSE_TIME_MS_MAX)
		return -EINVAL;
	mutex_lock(&config->lock);
	buse_policy_set(config, config->settings.on_death, timeout_ms);
	mutex_unlock(&config->lock);
	return count;
}
CONFIGFS_ATTR(buse_, death_timeout_ms);

static const char *const buse_on_death_names[] = {
	[BUSE_ON_DEATH_WAIT] = "wait",
	[BUSE_ON_DEATH_FAIL] = "fail",
};

static ssize_t buse_on_death_show(struct config_item *item, char *page)
{
	struct buse_config *config = buse_config_of(item);
	enum buse_on_death on_death = READ_ONCE(config->settings.on_death);

	return sysfs_emit(page, "%s\n", buse_on_death_names[on_death]);
}

static ssize_t buse_on_death_store(struct config_item *item, const char *page,
				   size_t count)
{
	struct buse_config *config = buse_config_of(item);
	int on_death = sysfs_match_string(buse_on_death_names, page);

	if (on_death < 0)
		return on_death;
	mutex_lock(&config->lock);
	buse_policy_set(config, on_death, config->settings.death_timeout_ms);
	mutex_unlock(&config->lock);
	return count;
}
CONFIGFS_ATTR(buse_, on_death);

static ssize_t buse_state_show(struct config_item *item, char *page)
{
	struct buse_config *config = buse_config_of(item);
	const char *state;

	mutex_lock(&config->lock);
	state = config->device ? buse_life_state(config->device) : "off";
	mutex_unlock(&config->lock);
	return sysfs_emit(page, "%s\n", state);
}
CONFIGFS_ATTR_RO(buse_, state);

static ssize_t buse_power_show(struct config_item *item, char *page)
{
	struct buse_config *config = buse_config_of(item);
	bool is_on;

	mutex_lock(&config->lock);
	is_on = config->device;
	mutex_unlock(&config->lock);
	return sysfs_emit(page, "%d\n", is_on);
}

static int buse_power_on(struct buse_config *config)
{
	struct buse_device *device;
	int err = 0;

	mutex_lock(&config->lock);
	if (config->device) {
		err = buse_life_is_stopping(config->device) ? -EBUSY : -EINVAL;
	} else {
		device = buse_device_create(config);
		if (IS_ERR(device))
			err = PTR_ERR(device);
		else
			config->device = device;
	}
	mutex_unlock(&config->lock);
	return err;
}

/*
 * Waits for the end of the device. Being killed ends only the waiting: a
 * daemon that switches its own power off may have to die for the end to come.
 * Other signals do not: a repeated call would find the power off already.
 */
static int buse_power_off(struct buse_config *config)
{
	struct buse_device *device;
	int err;

	mutex_lock(&config->lock);
	device = config->device;
	if (device)
		buse_device_get(device);
	mutex_unlock(&config->lock);
	if (!device)
		return -EINVAL;
	buse_life_stop(device, false);
	err = wait_for_completion_killable(&device->stopped);
	buse_device_put(device);
	return err ? -EINTR : 0;
}

static ssize_t buse_power_store(struct config_item *item, const char *page,
				size_t count)
{
	struct buse_config *config = buse_config_of(item);
	bool must_be_on;
	int err = kstrtobool(page, &must_be_on);

	if (!err)
		err = must_be_on ? buse_power_on(config) :
				   buse_power_off(config);
	return err ? err : count;
}
CONFIGFS_ATTR(buse_, power);

static struct configfs_attribute *buse_attributes[] = {
	&buse_attr_size,
	&buse_attr_blocksize,
	&buse_attr_io_min,
	&buse_attr_io_opt,
	&buse_attr_collision_area_size,
	&buse_attr_write_chunk_size,
	&buse_attr_write_shm_size,
	&buse_attr_read_shm_size,
	&buse_attr_hw_queues,
	&buse_attr_queue_depth,
	&buse_attr_no_scheduler,
	&buse_attr_can_write_same,
	&buse_attr_can_write_zeroes,
	&buse_attr_can_discard,
	&buse_attr_can_secure_erase,
	&buse_attr_chunk_age_ms,
	&buse_attr_death_timeout_ms,
	&buse_attr_on_death,
	&buse_attr_state,
	&buse_attr_power,
	NULL,
};

static void buse_config_release(struct config_item *item)
{
	kfree(buse_config_of(item));
}

static struct configfs_item_operations buse_item_ops = {
	.release = buse_config_release,
};

static const struct config_item_type buse_item_type = {
	.ct_item_ops = &buse_item_ops,
	.ct_attrs = buse_attributes,
	.ct_owner = THIS_MODULE,
};

static struct config_item *buse_make_item(struct config_group *group,
					  const char *name)
{
	struct buse_config *config;
	char canonical[16];
	u32 index;
	int err = kstrtou32(name, 10, &index);

	if (err)
		return ERR_PTR(err);
	/* 007 would be another directory of the same device. */
	snprintf(canonical, sizeof(canonical), "%u", index);
	if (strcmp(name, canonical))
		return ERR_PTR(-EINVAL);
	config = kzalloc(sizeof(*config), GFP_KERNEL);
	if (!config)
		return ERR_PTR(-ENOMEM);
	config->index = index;
	mutex_init(&config->lock);
	buse_settings_init(&config->settings);
	config_item_init_type_name(&config->item, name, &buse_item_type);
	return &config->item;
}

/* rmdir. No attribute is in use any more. */
static void buse_drop_item(struct config_group *group, struct config_item *item)
{
	struct buse_config *config = buse_config_of(item);
	struct buse_device *device;

	mutex_lock(&config->lock);
	device = config->device;
	if (device)
		buse_device_get(device);
	mutex_unlock(&config->lock);
	if (device) {
		buse_life_stop(device, true);
		wait_for_completion(&device->stopped);
		buse_device_put(device);
	}
	config_item_put(item);
}

static struct configfs_group_operations buse_group_ops = {
	.make_item = buse_make_item,
	.drop_item = buse_drop_item,
};

static const struct config_item_type buse_group_type = {
	.ct_group_ops = &buse_group_ops,
	.ct_owner = THIS_MODULE,
};

static struct configfs_subsystem buse_subsystem = {
	.su_group = {
		.cg_item = {
			.ci_namebuf = "buse",
			.ci_type = &buse_group_type,
		},
	},
};

int buse_config_init(void)
{
	config_group_init(&buse_subsystem.su_group);
	mutex_init(&buse_subsystem.su_mutex);
	return configfs_register_subsystem(&buse_subsystem);
}

void buse_config_exit(void)
{
	configfs_unregister_subsystem(&buse_subsystem);
}
