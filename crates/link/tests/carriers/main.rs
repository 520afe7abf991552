//! The carriers, black box: over the loopback, and over cables between namespaces where they can be
//! made.

mod cable;
mod ethernet;
mod groups;
mod packets;
mod quiet;
mod tcp;
mod udp;
mod xdp;

#[global_allocator]
static ALLOCATOR: sawmill_sys::CountingAllocator = sawmill_sys::CountingAllocator;
