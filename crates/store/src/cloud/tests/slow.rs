//! Slow links: a relay before the server passes a limited number of bytes a second, shared evenly
//! by the connections that send. Sizes, rates and patience are scaled down alike.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::channel;
use std::time::Duration;

use super::*;
use crate::cloud::Cloud;
use crate::location::{self, Location};
use crate::progress::SilenceLimits;
use crate::{Bodies, ObjectStore, Put};

const OBJECT_BYTES: usize = 256 << 10;
const OBJECTS: usize = 8;
/// One object a second.
const NETWORK_BYTES_PER_S: u64 = 256 << 10;
const CHUNK_BYTES: usize = 4 << 10;

/// What went up through the relay.
#[derive(Default)]
struct SlowNetwork {
    sending: AtomicUsize,
    sent_bytes: AtomicU64,
}

fn relay(upstream: u16, network: &Arc<SlowNetwork>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // The kernel's buffer is not part of the network.
    rustix::net::sockopt::set_socket_recv_buffer_size(&listener, 8 << 10).unwrap();
    let port = listener.local_addr().unwrap().port();
    let network = Arc::clone(network);
    std::thread::spawn(move || {
        for near in listener.incoming().flatten() {
            let far = TcpStream::connect(("127.0.0.1", upstream)).unwrap();
            let (mut answers, mut back) = (far.try_clone().unwrap(), near.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut answers, &mut back);
                let _ = back.shutdown(std::net::Shutdown::Both);
            });
            let network = Arc::clone(&network);
            std::thread::spawn(move || carry(&network, near, far));
        }
    });
    port
}

/// Ends when either side does.
fn carry(network: &SlowNetwork, mut near: TcpStream, mut far: TcpStream) {
    let mut chunk = vec![0; CHUNK_BYTES];
    network.sending.fetch_add(1, Relaxed);
    while let Ok(count @ 1..) = near.read(&mut chunk) {
        network.sent_bytes.fetch_add(count as u64, Relaxed);
        let share = NETWORK_BYTES_PER_S / network.sending.load(Relaxed).max(1) as u64;
        std::thread::sleep(Duration::from_micros(count as u64 * 1_000_000 / share));
        if far.write_all(&chunk[..count]).is_err() {
            break;
        }
    }
    network.sending.fetch_sub(1, Relaxed);
    let _ = far.shutdown(std::net::Shutdown::Write);
}

#[test]
fn every_object_arrives_over_a_network_that_carries_one_in_the_time_of_many() {
    let server = server();
    let network = Arc::new(SlowNetwork::default());
    let port = relay(server.port, &network);
    let url = format!("s3://bucket/some/prefix?endpoint=http://127.0.0.1:{port}");
    let Location::Cloud(place) = location::parse(&url).unwrap() else { panic!("a cloud") };
    let backend = Box::new(Cloud::new(&place, &keys()).unwrap());
    // A limit in all would be 3 s here: silence, and the time that one object needs alone.
    let silence_limits =
        SilenceLimits { silence_max: Duration::from_secs(2), unseen_bytes_per_s: 32 << 10 };
    let client = Client::with_silence_limits(
        "slow".to_owned(),
        backend,
        &StoreOptions::default(),
        silence_limits,
    );
    let (sender, receiver) = channel();
    for number in 0..OBJECTS {
        let body = bytes::Bytes::from(vec![number as u8; OBJECT_BYTES]);
        let put = Put {
            key: format!("segment/{number}"),
            body,
            class: Class::Upload,
            bodies: Bodies::Whole,
        };
        let sender = sender.clone();
        client.put(put, Box::new(move |outcome| sender.send(outcome).unwrap()));
    }
    for _ in 0..OBJECTS {
        assert_eq!(receiver.recv().unwrap().unwrap(), PutOutcome::Created);
    }
    let (sent, all) = (network.sent_bytes.load(Relaxed), (OBJECTS * OBJECT_BYTES) as u64);
    assert!(sent <= all * 3 / 2, "{sent} bytes were sent for {all}");
    let body = Blocking(&*client).get("segment/7", None, Class::Read).unwrap();
    assert!(body.len() == OBJECT_BYTES && body.iter().all(|byte| *byte == 7));
}
