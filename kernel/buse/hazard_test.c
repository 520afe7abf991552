// SPDX-License-Identifier: GPL-2.0
/*
 * Tests of hazard.c: under KUnit as the module buse_test, or as a program
 * ("make check") where the kernel has no KUnit.
 *
 * Not here: tests that need a disk (tests/vm/buse).
 */
#ifdef __KERNEL__
#include <kunit/test.h>
#include <linux/module.h>
#endif
#include "hazard.h"

static struct buse_extent extent(u64 sector, u64 sectors)
{
	return (struct buse_extent){ sector, sectors };
}

static void extents_overlap_only_where_both_have_sectors(struct kunit *test)
{
	struct buse_extent a = extent(8, 8), b = extent(16, 8);
	struct buse_extent c = extent(15, 1), none = extent(10, 0);
	struct buse_extent end = extent(~0ULL - 1, 1), all = extent(0, ~0ULL);

	KUNIT_EXPECT_FALSE(test, buse_extents_overlap(&a, &b));
	KUNIT_EXPECT_FALSE(test, buse_extents_overlap(&b, &a));
	KUNIT_EXPECT_TRUE(test, buse_extents_overlap(&a, &c));
	KUNIT_EXPECT_TRUE(test, buse_extents_overlap(&c, &a));
	KUNIT_EXPECT_TRUE(test, buse_extents_overlap(&a, &a));
	KUNIT_EXPECT_FALSE(test, buse_extents_overlap(&a, &none));
	KUNIT_EXPECT_FALSE(test, buse_extents_overlap(&none, &a));
	KUNIT_EXPECT_FALSE(test, buse_extents_overlap(&none, &none));
	KUNIT_EXPECT_TRUE(test, buse_extents_overlap(&end, &all));
}

static void pieces_end_at_borders_of_areas(struct kunit *test)
{
	struct buse_extent left = extent(5, 20), piece;
	u64 expected[] = { 3, 8, 8, 1 }, sector = 5;
	u64 count = buse_pieces_count(&left, 8), n;

	KUNIT_EXPECT_EQ(test, count, 4);
	for (n = 0; n < 4; n++) {
		piece = buse_first_piece(&left, 8);
		KUNIT_EXPECT_EQ(test, piece.sector, sector);
		KUNIT_EXPECT_EQ(test, piece.sectors, expected[n]);
		sector += piece.sectors;
		left.sector += piece.sectors;
		left.sectors -= piece.sectors;
	}
	KUNIT_EXPECT_EQ(test, left.sectors, 0);
}

static void a_piece_at_a_border_touches_one_area(struct kunit *test)
{
	struct buse_extent whole = extent(8, 8), none = extent(8, 0);
	struct buse_extent two = extent(15, 2), odd = extent(23, 1);

	KUNIT_EXPECT_EQ(test, buse_pieces_count(&whole, 8), 1);
	KUNIT_EXPECT_EQ(test, buse_pieces_count(&none, 8), 0);
	KUNIT_EXPECT_EQ(test, buse_pieces_count(&two, 8), 2);
	/* Areas need not be powers of two. */
	KUNIT_EXPECT_EQ(test, buse_first_piece(&odd, 24).sectors, 1);
	KUNIT_EXPECT_EQ(test, buse_area_index(24, 24, ~0ULL), 1);
}

static void areas_share_places_only_on_large_disks(struct kunit *test)
{
	KUNIT_EXPECT_EQ(test, buse_areas_slots(1 << 20, 4096, 1 << 20), 256);
	KUNIT_EXPECT_EQ(test, buse_areas_slots(4097, 4096, 1 << 20), 2);
	KUNIT_EXPECT_EQ(test, buse_areas_slots(512, 4096, 1 << 20), 1);
	KUNIT_EXPECT_EQ(test, buse_areas_slots(1ULL << 60, 4096, 1 << 20),
			1 << 20);
	KUNIT_EXPECT_EQ(test, buse_area_index(8 * 256, 8, 255), 0);
}

static void a_chunk_has_one_record_per_block(struct kunit *test)
{
	KUNIT_EXPECT_EQ(test, buse_records_max(2 << 20, 512), 4096);
	KUNIT_EXPECT_EQ(test, buse_chunk_data_bytes(2 << 20, 512),
			(2 << 20) - 4096 * 32);
	KUNIT_EXPECT_EQ(test, buse_chunk_data_bytes(8192, 4096), 8192 - 64);
}

static void the_longest_discard_fits_wherever_it_begins(struct kunit *test)
{
	u64 longest = buse_range_sectors_max(16, 8, 1 << 22), sector;

	KUNIT_EXPECT_EQ(test, longest, 15 * 8);
	for (sector = 0; sector < 8; sector++) {
		struct buse_extent e = extent(sector, longest);

		KUNIT_EXPECT_TRUE(test, buse_pieces_count(&e, 8) <= 16);
	}
	KUNIT_EXPECT_EQ(test, buse_range_sectors_max(16, 1ULL << 40, 99), 99);
	KUNIT_EXPECT_EQ(test, buse_range_sectors_max(1, 8, 99), 0);
}

static void tokens_are_neither_offsets_nor_the_end(struct kunit *test)
{
	u64 numbers[] = { 0, 1, 1ULL << 32, (1ULL << 63) - 2, 1ULL << 63, ~0ULL };
	unsigned int n;

	for (n = 0; n < sizeof(numbers) / sizeof(*numbers); n++)
		KUNIT_EXPECT_TRUE(test, buse_is_flush_token(buse_flush_token(numbers[n])));
	KUNIT_EXPECT_FALSE(test, buse_is_flush_token(1ULL << 32));
	KUNIT_EXPECT_FALSE(test, buse_is_flush_token(~0ULL));
	KUNIT_EXPECT_FALSE(test, buse_flush_token(7) == buse_flush_token(8));
}

static struct kunit_case hazard_cases[] = {
	KUNIT_CASE(extents_overlap_only_where_both_have_sectors),
	KUNIT_CASE(pieces_end_at_borders_of_areas),
	KUNIT_CASE(a_piece_at_a_border_touches_one_area),
	KUNIT_CASE(areas_share_places_only_on_large_disks),
	KUNIT_CASE(a_chunk_has_one_record_per_block),
	KUNIT_CASE(the_longest_discard_fits_wherever_it_begins),
	KUNIT_CASE(tokens_are_neither_offsets_nor_the_end),
	{}
};

#ifdef __KERNEL__
static struct kunit_suite hazard_suite = {
	.name = "buse_hazard",
	.test_cases = hazard_cases,
};
kunit_test_suite(hazard_suite);

MODULE_DESCRIPTION("Tests of BUSE's arithmetic");
MODULE_LICENSE("GPL");
#else
int main(void)
{
	struct kunit test = { 0 };
	struct kunit_case *each;

	for (each = hazard_cases; each->run_case; each++)
		each->run_case(&test);
	printf("hazard: %d failures\n", test.failures);
	return !!test.failures;
}
#endif
