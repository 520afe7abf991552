//! Serves a null and a memory device over NBD on a Unix socket or TCP: measures the cost of the
//! door itself.
//!
//! `cargo run --release -p sawmill-frontend --example nbd_null -- /tmp/null.sock` serves the
//! exports `null` (also under the empty name) and `memory`, 1 GiB each, until its standard input
//! ends. Instead of the path, `tcp:127.0.0.1:10809` listens on TCP; on a non-loopback address, any
//! machine that reaches it may connect.

use std::io::Read;
use std::sync::Arc;

use sawmill_device::{MemoryDevice, NullDevice};
use sawmill_frontend::nbd::{Export, Listen, NbdOptions, NbdServer};
use sawmill_frontend::{Door, Stop};

const SIZE_BYTES: u64 = 1 << 30;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let place = std::env::args().nth(1).ok_or("usage: nbd_null SOCKET_PATH|tcp:ADDRESS:PORT")?;
    let listen = match place.strip_prefix("tcp:") {
        Some(address) => Listen::Tcp(address.parse()?),
        None => Listen::Unix(place.into()),
    };
    let server = NbdServer::start(NbdOptions { insecure_listen: true, ..NbdOptions::new(listen) })?;
    let description = String::new();
    let null = Arc::new(NullDevice::new(SIZE_BYTES));
    server.add_export(Export {
        name: "null".into(),
        description: description.clone(),
        device: null,
    })?;
    let memory = Arc::new(MemoryDevice::new(SIZE_BYTES));
    server.add_export(Export { name: "memory".into(), description, device: memory })?;
    println!("{}\n{}", server.uri("null"), server.uri("memory"));
    std::io::stdin().read_to_end(&mut Vec::new())?;
    server.stop(Stop::Drained);
    println!("{:#?}", server.metrics());
    Ok(())
}
