/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Stands in for the kernel and KUnit when "make check" compiles hazard.c and
 * hazard_test.c as a program.
 *
 * Not here: anything that the module uses.
 */
#ifndef BUSE_HAZARD_HOST_H
#define BUSE_HAZARD_HOST_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef uint64_t u64;
typedef uint32_t u32;

static inline u64 div64_u64(u64 dividend, u64 divisor)
{
	return dividend / divisor;
}

struct kunit {
	int failures;
};

struct kunit_case {
	void (*run_case)(struct kunit *test);
	const char *name;
};

#define KUNIT_CASE(function) { function, #function }
#define KUNIT_EXPECT_TRUE(test, condition)				\
	do {								\
		if (!(condition)) {					\
			(test)->failures++;				\
			printf("%s:%d: %s\n", __func__, __LINE__,	\
			       #condition);				\
		}							\
	} while (0)
#define KUNIT_EXPECT_FALSE(test, condition)				\
	KUNIT_EXPECT_TRUE(test, !(condition))
#define KUNIT_EXPECT_EQ(test, a, b) KUNIT_EXPECT_TRUE(test, (a) == (b))

#endif
