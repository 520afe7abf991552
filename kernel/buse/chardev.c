// SPDX-License-Identifier: GPL-2.0
/*
 * Ports: the character devices /dev/buse<N>-w<i> and /dev/buse<N>-r<i>.
 *
 * Invariants: a port has one opener at a time. Every length and number that
 * user space gives is checked; a wrong one is an error of the call and leaves
 * the device as it was. A port lives until its last file is closed, and after
 * the end of its device it only says BUSE_END.
 *
 * Not here: what packets mean (deliver.c, read.c), which ports must be open
 * (life.c).
 */
#include <linux/blkdev.h>
#include <linux/fs.h>
#include <linux/idr.h>
#include <linux/module.h>
#include <linux/poll.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "buse.h"
#include "compat.h"

static dev_t buse_first_port;
static struct class *buse_class;
static DEFINE_IDA(buse_minors);

static int buse_port_open(struct inode *inode, struct file *file)
{
	struct buse_port *port = container_of(inode->i_cdev, struct buse_port,
					      cdev);
	int err = buse_life_bind(port);

	if (err)
		return err;
	file->private_data = port;
	/* No file position: pread() and lseek() are errors. */
	return stream_open(inode, file);
}

static int buse_port_close(struct inode *inode, struct file *file)
{
	buse_life_unbind(file->private_data);
	return 0;
}

static ssize_t buse_fetch_write(struct buse_queue *queue, bool may_block,
				char __user *buffer)
{
	struct buse_write_packet packet;
	int err = 0;

	if (may_block)
		err = wait_event_interruptible(queue->write_wait,
					       buse_deliver_write(queue, &packet));
	else if (!buse_deliver_write(queue, &packet))
		err = -EAGAIN;
	if (err)
		return err;
	if (copy_to_user(buffer, &packet, sizeof(packet))) {
		buse_deliver_undo(queue, le64_to_cpu(packet.shm_offset));
		return -EFAULT;
	}
	return sizeof(packet);
}

static ssize_t buse_fetch_read(struct buse_queue *queue, bool may_block,
			       char __user *buffer)
{
	struct buse_read_packet packet;
	int err = 0;

	if (may_block)
		err = wait_event_interruptible(queue->read_wait,
					       buse_read_deliver(queue, &packet));
	else if (!buse_read_deliver(queue, &packet))
		err = -EAGAIN;
	if (err)
		return err;
	if (copy_to_user(buffer, &packet, sizeof(packet))) {
		buse_read_undo(queue, le64_to_cpu(packet.shm_offset));
		return -EFAULT;
	}
	return sizeof(packet);
}

static ssize_t buse_port_read(struct file *file, char __user *buffer,
			      size_t count, loff_t *position)
{
	struct buse_port *port = file->private_data;
	bool may_block = !(file->f_flags & O_NONBLOCK);

	if (port->is_read) {
		if (count != sizeof(struct buse_read_packet))
			return -EINVAL;
		return buse_fetch_read(port->queue, may_block, buffer);
	}
	if (count != sizeof(struct buse_write_packet))
		return -EINVAL;
	return buse_fetch_write(port->queue, may_block, buffer);
}

static ssize_t buse_port_write(struct file *file, const char __user *buffer,
			       size_t count, loff_t *position)
{
	struct buse_port *port = file->private_data;
	blk_status_t status = BLK_STS_OK;
	struct buse_ack ack = {};
	u32 error;
	int err;

	if (count != (READ_ONCE(port->has_errno) ? sizeof(ack) :
						   sizeof(ack.token)))
		return -EINVAL;
	if (copy_from_user(&ack, buffer, count))
		return -EFAULT;
	error = le32_to_cpu(ack.error);
	if (error > MAX_ERRNO || ack.reserved)
		return -EINVAL;
	if (error)
		status = errno_to_blk_status(-(int)error);
	if (port->is_read)
		err = buse_read_ack(port->queue, le64_to_cpu(ack.token),
				    status);
	else
		err = buse_deliver_ack(port->queue, le64_to_cpu(ack.token),
				       status);
	/* What rmdir has given up is no fault of the daemon. */
	if (err && READ_ONCE(port->queue->device->is_forced))
		err = -ENODEV;
	return err ? err : count;
}

static __poll_t buse_port_poll(struct file *file, poll_table *table)
{
	struct buse_port *port = file->private_data;
	struct buse_queue *queue = port->queue;
	bool has;

	poll_wait(file, port->is_read ? &queue->read_wait : &queue->write_wait,
		  table);
	has = port->is_read ? buse_read_has(queue) :
			      buse_deliver_has_write(queue);
	/* Acknowledging never waits. */
	return EPOLLOUT | EPOLLWRNORM | (has ? EPOLLIN | EPOLLRDNORM : 0);
}

static long buse_port_ioctl(struct file *file, unsigned int command,
			    unsigned long argument)
{
	struct buse_port *port = file->private_data;
	u32 value;

	if (command != BUSE_ACK_WITH_ERRNO)
		return -ENOTTY;
	if (get_user(value, (u32 __user *)argument))
		return -EFAULT;
	if (value > 1)
		return -EINVAL;
	WRITE_ONCE(port->has_errno, value);
	return 0;
}

static int buse_port_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct buse_port *port = file->private_data;

	return buse_memory_map(port->is_read ? &port->queue->read_memory :
					       &port->queue->write_memory, vma);
}

static const struct file_operations buse_port_ops = {
	.owner = THIS_MODULE,
	.open = buse_port_open,
	.release = buse_port_close,
	.read = buse_port_read,
	.write = buse_port_write,
	.poll = buse_port_poll,
	.unlocked_ioctl = buse_port_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.mmap = buse_port_mmap,
};

static void buse_port_release(struct device *dev)
{
	struct buse_port *port = container_of(dev, struct buse_port, dev);

	ida_free(&buse_minors, MINOR(dev->devt));
	buse_device_put(port->queue->device);
	kfree(port);
}

static int buse_port_create(struct buse_queue *queue, bool is_read)
{
	struct buse_device *device = queue->device;
	struct buse_port *port = kzalloc(sizeof(*port), GFP_KERNEL);
	int minor, err;

	if (!port)
		return -ENOMEM;
	minor = ida_alloc_max(&buse_minors, BUSE_PORTS_MAX - 1, GFP_KERNEL);
	if (minor < 0) {
		kfree(port);
		return minor;
	}
	port->queue = queue;
	port->is_read = is_read;
	buse_device_get(device);
	device_initialize(&port->dev);
	port->dev.class = buse_class;
	port->dev.devt = MKDEV(MAJOR(buse_first_port), minor);
	port->dev.release = buse_port_release;
	cdev_init(&port->cdev, &buse_port_ops);
	port->cdev.owner = THIS_MODULE;
	err = dev_set_name(&port->dev, "buse%u-%c%u", device->index,
			   is_read ? 'r' : 'w', queue->index);
	/* Before it can be opened. */
	if (is_read)
		queue->read_port = port;
	else
		queue->write_port = port;
	if (!err)
		err = cdev_device_add(&port->cdev, &port->dev);
	if (!err)
		return 0;
	if (is_read)
		queue->read_port = NULL;
	else
		queue->write_port = NULL;
	put_device(&port->dev);
	return err;
}

static void buse_port_remove(struct buse_port *port)
{
	if (!port)
		return;
	cdev_device_del(&port->cdev, &port->dev);
	put_device(&port->dev);
}

int buse_ports_create(struct buse_device *device)
{
	int err = 0;
	u32 n;

	for (n = 0; n < device->layout.queues && !err; n++) {
		err = buse_port_create(&device->queues[n], false);
		if (!err)
			err = buse_port_create(&device->queues[n], true);
	}
	if (err) {
		/* Who has opened one already shall not wait forever. */
		buse_life_end_queues(device);
		buse_ports_remove(device);
	}
	return err;
}

/* The names go away at once, the ports with their last files. */
void buse_ports_remove(struct buse_device *device)
{
	struct buse_queue *queue;
	u32 n;

	for (n = 0; n < device->layout.queues; n++) {
		queue = &device->queues[n];
		buse_port_remove(queue->write_port);
		buse_port_remove(queue->read_port);
		queue->write_port = NULL;
		queue->read_port = NULL;
	}
}

int buse_chardev_init(void)
{
	int err = alloc_chrdev_region(&buse_first_port, 0, BUSE_PORTS_MAX,
				      "buse");

	if (err)
		return err;
	buse_class = buse_class_create("buse");
	if (IS_ERR(buse_class)) {
		unregister_chrdev_region(buse_first_port, BUSE_PORTS_MAX);
		return PTR_ERR(buse_class);
	}
	return 0;
}

void buse_chardev_exit(void)
{
	class_destroy(buse_class);
	unregister_chrdev_region(buse_first_port, BUSE_PORTS_MAX);
	ida_destroy(&buse_minors);
}
