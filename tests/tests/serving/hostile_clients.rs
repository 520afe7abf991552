//! A hundred hostile connections at the NBD door: memory stays below its limit, and a legitimate
//! client is served. How fast is for `bench/hostile.py`.

use std::io::{Read, Write};
use std::net::TcpStream;

use sawmill_tests::machine::wait_for;
use sawmill_tests::server::Server;
use sawmill_tests::store;
use sawmill_tests::test_bed::{TestBed, field};

const LIMIT: u64 = 160 << 20;
/// What a server takes beside the memory of its clients.
const REST: u64 = 96 << 20;
const EACH: usize = 25;

/// A connection that has read the greeting, and perhaps chosen the export.
fn connection(address: &str, chosen: bool) -> Option<TcpStream> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.read_exact(&mut [0; 18]).ok()?;
    if chosen {
        let mut bytes = 3_u32.to_be_bytes().to_vec();
        bytes.extend_from_slice(b"IHAVEOPT");
        bytes.extend_from_slice(&1_u32.to_be_bytes());
        bytes.extend_from_slice(&4_u32.to_be_bytes());
        bytes.extend_from_slice(b"disk");
        stream.write_all(&bytes).ok()?;
        stream.read_exact(&mut [0; 10]).ok()?;
    }
    Some(stream)
}

/// Asks for 128 MiB and takes nothing of it.
fn greedy(address: &str) -> Option<TcpStream> {
    let mut stream = connection(address, true)?;
    for cookie in 0..64_u64 {
        let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
        request.extend_from_slice(&[0; 4]);
        request.extend_from_slice(&cookie.to_be_bytes());
        request.extend_from_slice(&0_u64.to_be_bytes());
        request.extend_from_slice(&(2_u32 << 20).to_be_bytes());
        stream.write_all(&request).ok()?;
    }
    Some(stream)
}

fn nbd_memory(server: &Server, name: &str) -> u64 {
    let status = server.status();
    let memory =
        field(&status, "nbd_memory").unwrap_or_else(|| panic!("no word of it: {status:#}"));
    memory[name].as_u64().unwrap_or_else(|| panic!("no {name}: {memory:#}"))
}

#[test]
fn a_hundred_hostile_connections_stay_within_the_memory_and_a_client_is_served() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "1G", &[]);
    let options = ["--nbd-memory-max", "160M", "--admin", "127.0.0.1:0", "--cache-bytes", "0"];
    let server = bed.serve("disk").at("tcp:127.0.0.1:0").with(&options).start();
    let address = server.uri().trim_start_matches("nbd://").trim_end_matches("/disk").to_owned();
    assert_eq!(nbd_memory(&server, "bytes_max"), LIMIT);
    let half_open: Vec<_> = (0..EACH).filter_map(|_| connection(&address, false)).collect();
    let idle: Vec<_> = (0..EACH).filter_map(|_| connection(&address, true)).collect();
    let greedy: Vec<_> = (0..EACH).filter_map(|_| greedy(&address)).collect();
    assert_eq!((half_open.len(), idle.len(), greedy.len()), (EACH, EACH, EACH));
    wait_for("the memory is short", || (nbd_memory(&server, "waiting") > 0).then_some(()));
    let client = server.connect();
    for round in 0..200_u64 {
        if round % 8 == 0
            && let Some(mut garbage) = connection(&address, false)
        {
            let _ = garbage.write_all(&[0x5a; 64]);
        }
        let data = vec![round as u8; 64 << 10];
        client.write(round << 16, &data).expect("served");
        assert_eq!(client.read(round << 16, 64 << 10), Ok(data));
        assert!(nbd_memory(&server, "bytes") <= LIMIT);
        let resident = server.resident_bytes();
        assert!(resident <= LIMIT + REST, "{resident} bytes are resident");
    }
    drop((half_open, idle, greedy));
    wait_for("it is free again", || (nbd_memory(&server, "bytes") <= 2 << 20).then_some(()));
    drop(client);
    let _ = server.stop().ok();
}
