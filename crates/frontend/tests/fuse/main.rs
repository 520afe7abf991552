//! The FUSE door with the real kernel: its file, its folder, loop devices, deaths and hand-offs.
//! Needs root, `/dev/fuse` and loop devices; where these are missing the tests say so and pass.

#[path = "../nbd/devices.rs"]
mod devices;
mod file;
mod folder;
mod loops;
mod process;
mod quiet;
mod setting;
mod survival;
