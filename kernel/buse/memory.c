// SPDX-License-Identifier: GPL-2.0
/*
 * Memory that the kernel and a daemon share.
 *
 * Invariants: it is zeroed once, so no bytes of the kernel leak. Its pages
 * lie near the processors of their queue. A mapping holds its own references
 * to the pages and may outlive everything else here. The kernel never trusts
 * what it reads from it.
 *
 * Not here: what lies where in it (chunk.c, read.c).
 */
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include "buse.h"

int buse_memory_create(struct buse_memory *memory, u64 bytes, int node)
{
	unsigned long count = DIV_ROUND_UP(bytes, PAGE_SIZE);
	struct page *page;

	memory->pages = kvcalloc(count, sizeof(*memory->pages), GFP_KERNEL);
	if (!memory->pages)
		return -ENOMEM;
	while (memory->pages_count < count) {
		/* Rather fail than have another process killed for it. */
		page = alloc_pages_node(node, GFP_KERNEL | __GFP_ZERO |
					__GFP_NOWARN | __GFP_RETRY_MAYFAIL, 0);
		if (!page)
			goto fail;
		memory->pages[memory->pages_count++] = page;
		cond_resched();
	}
	memory->address = vmap(memory->pages, count, VM_MAP, PAGE_KERNEL);
	if (!memory->address)
		goto fail;
	return 0;
fail:
	buse_memory_destroy(memory);
	return -ENOMEM;
}

void buse_memory_destroy(struct buse_memory *memory)
{
	vunmap(memory->address);
	while (memory->pages_count)
		put_page(memory->pages[--memory->pages_count]);
	kvfree(memory->pages);
	*memory = (struct buse_memory){};
}

int buse_memory_map(struct buse_memory *memory, struct vm_area_struct *vma)
{
	/* A private copy would never show what the kernel writes. */
	if (!(vma->vm_flags & VM_SHARED))
		return -EINVAL;
	return vm_map_pages(vma, memory->pages, memory->pages_count);
}
