//! Both ends with real carriers and threads: the contract of a block device, from one process to
//! itself.

mod bytes;
mod conformance;
mod ending;
mod pair;
mod quiet;
mod trouble;

#[global_allocator]
static ALLOCATOR: sawmill_sys::CountingAllocator = sawmill_sys::CountingAllocator;
