//! The FUSE door with the real kernel: its file, its folder, loop devices, deaths and hand-offs.
//! Needs root, `/dev/fuse` and loop devices; where these are missing the tests say so and pass.

#[path = "../door/conformance.rs"]
mod conformance;
mod contract;
#[path = "../nbd/devices.rs"]
mod devices;
mod file;
#[path = "../door/file_user.rs"]
mod file_user;
mod folder;
mod loops;
mod process;
mod quiet;
mod setting;
mod survival;
