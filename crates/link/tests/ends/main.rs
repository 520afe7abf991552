//! Both ends with real carriers and threads: the contract of a block device, from one process to
//! itself.

mod attaching;
mod conformance;
mod ending;
mod packed_writes;
mod pair;
mod quiet;

#[global_allocator]
static ALLOCATOR: sawmill_sys::CountingAllocator = sawmill_sys::CountingAllocator;
