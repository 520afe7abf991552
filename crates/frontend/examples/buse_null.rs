//! Serves a null device as `/dev/buseN`: measures the cost of the door itself.
//!
//! `cargo run --release -p sawmill-frontend --example buse_null` prints `ready` and the node, and
//! serves it until its standard input ends. It needs the module (`kernel/buse`), and root.

use std::io::Read;
use std::sync::Arc;

use sawmill_device::NullDevice;
use sawmill_frontend::buse::{BuseDoor, BuseOptions};
use sawmill_frontend::{Door, Stop};

const SIZE_BYTES: u64 = 1 << 30;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Arc::new(NullDevice::new(SIZE_BYTES));
    let door = BuseDoor::open(BuseOptions::new("the null device"), device)?;
    println!("ready {}", door.address());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    door.stop(Stop::Drained);
    println!("{:?}", door.counts());
    Ok(())
}
