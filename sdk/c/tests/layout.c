/* The layouts that both headers promise, checked by the compiler; and tables that the library must
 * accept or refuse. */
#include <assert.h>
#include <bdus.h>
#include <sawmill.h>
#include <stdio.h>
#include <string.h>

#define AT(type, field, place) \
    static_assert(offsetof(struct type, field) == place, #type "." #field)

static_assert(sizeof(struct bdus_ctx) == 56 && sizeof(struct bdus_ops) == 96, "");
static_assert(sizeof(struct bdus_attrs) == 40, "");
static_assert(sizeof(struct bdus_version) == 12 && bdus_abort == INT_MIN, "");
AT(bdus_ctx, id, 0);
AT(bdus_ctx, path, 8);
AT(bdus_ctx, ops, 16);
AT(bdus_ctx, attrs, 24);
AT(bdus_ctx, is_rerun, 32);
AT(bdus_ctx, private_data, 40);
AT(bdus_ctx, major, 48);
AT(bdus_ctx, minor, 52);
AT(bdus_ops, initialize, 0);
AT(bdus_ops, on_device_available, 8);
AT(bdus_ops, terminate, 16);
AT(bdus_ops, read, 24);
AT(bdus_ops, write, 32);
AT(bdus_ops, write_same, 40);
AT(bdus_ops, write_zeros, 48);
AT(bdus_ops, fua_write, 56);
AT(bdus_ops, flush, 64);
AT(bdus_ops, discard, 72);
AT(bdus_ops, secure_erase, 80);
AT(bdus_ops, ioctl, 88);
AT(bdus_attrs, logical_block_size, 0);
AT(bdus_attrs, physical_block_size, 4);
AT(bdus_attrs, size, 8);
AT(bdus_attrs, max_concurrent_callbacks, 16);
AT(bdus_attrs, max_read_write_size, 20);
AT(bdus_attrs, max_write_same_size, 24);
AT(bdus_attrs, max_write_zeros_size, 28);
AT(bdus_attrs, max_discard_erase_size, 32);
AT(bdus_attrs, disable_partition_scanning, 36);
AT(bdus_attrs, recoverable, 37);
AT(bdus_attrs, dont_daemonize, 38);
AT(bdus_attrs, log, 39);
AT(sawmill_driver, struct_bytes, 0);
AT(sawmill_driver, abilities, 8);
AT(sawmill_driver, read, 16);
AT(sawmill_driver, write, 24);
AT(sawmill_driver, flush, 32);
AT(sawmill_driver, discard, 40);
AT(sawmill_driver, write_zeroes, 48);
AT(sawmill_driver, write_chunk, 56);
AT(sawmill_driver, flush_queue, 64);
AT(sawmill_driver, attached, 72);
AT(sawmill_driver, ready, 80);
static_assert(sizeof(struct sawmill_driver) == 88, "");
AT(sawmill_chunk, bytes, 0);
AT(sawmill_chunk, length, 8);
AT(sawmill_chunk, metadata_bytes, 16);
AT(sawmill_chunk, entries, 24);
AT(sawmill_chunk, horizon, 32);
AT(sawmill_chunk, floor, 40);
AT(sawmill_chunk, queue, 48);
AT(sawmill_chunk, again, 52);
static_assert(sizeof(struct sawmill_chunk) == 56, "");
AT(sawmill_chunk_entry, sector, 0);
AT(sawmill_chunk_entry, sectors, 8);
AT(sawmill_chunk_entry, write_number, 16);
AT(sawmill_chunk_entry, flag, 24);
static_assert(sizeof(struct sawmill_chunk_entry) == 32, "");

int main(void)
{
    struct sawmill_driver driver = {0};
    driver.struct_bytes = sizeof driver - 8;
    /* A table of another size belongs to another library version. */
    if (sawmill_serve(&driver, NULL, NULL) != -22 ||
        strstr(sawmill_error(), "struct_bytes") == NULL)
        return puts(sawmill_error()), 1;
    driver.struct_bytes = sizeof driver;
    if (sawmill_serve(&driver, NULL, NULL) != -22 || strstr(sawmill_error(), "read()") == NULL)
        return puts(sawmill_error()), 2;
    if (sawmill_serve(NULL, NULL, NULL) != -22)
        return 3;
    if (bdus_get_libbdus_version()->patch != 2 || strcmp(sawmill_version(), "0.1.0") != 0)
        return 4;
    return sawmill_parse_size("64M") == 64 << 20 && sawmill_parse_size("64X") == 0 ? 0 : 5;
}
