//! How many packets one core seals and opens: `seal [SECONDS]` prints one JSON object for each kind
//! of security and size of body. Both ends are in one thread; each packet is written anew, sealed
//! and opened.

use std::hint::black_box;
use std::time::{Duration, Instant};

use sawmill_link::session::{
    Greeting, HEADER_BYTES, PreSharedKey, ReplayWindow, Seals, Security, TAIL_BYTES, answer,
};

/// Packets between two looks at the clock.
const BURST: u64 = 256;

fn both_ends(security: &Security) -> (Seals, Seals) {
    let (mut hello, mut reply) = ([0; 64], [0; 64]);
    let (mut greeting, bytes) =
        Greeting::new(security, b"bench", b"", &mut hello).expect("a greeting");
    let (target, bytes) =
        answer(security, b"bench", &hello[..bytes], |_| Vec::new(), &mut reply).expect("an answer");
    (greeting.finish(&reply[..bytes]).expect("a connection").0, target)
}

/// Nanoseconds to seal one packet and, if `is_opened`, to open and accept it.
fn measure(security: &Security, body_bytes: usize, is_opened: bool, at_least: Duration) -> f64 {
    let (initiator, target) = both_ends(security);
    let mut window = ReplayWindow::new();
    let mut packet = vec![0x5a; HEADER_BYTES + body_bytes + TAIL_BYTES];
    let (mut number, start) = (0u64, Instant::now());
    while start.elapsed() < at_least {
        for _ in 0..BURST {
            packet[16..24].copy_from_slice(&number.to_le_bytes());
            initiator.seal(&mut packet).expect("sealed");
            if is_opened {
                black_box(target.open(&mut packet).expect("opened"));
                assert!(window.take(number));
            }
            number += 1;
        }
    }
    start.elapsed().as_nanos() as f64 / number as f64
}

/// Microseconds that a stranger makes a target waste with a greeting that does not prove the key.
fn refuse(security: &Security, at_least: Duration) -> f64 {
    let (mut hello, mut reply) = ([0; 64], [0; 64]);
    let (_, bytes) = Greeting::new(security, b"other", b"", &mut hello).expect("a greeting");
    let (start, mut count) = (Instant::now(), 0u64);
    while start.elapsed() < at_least {
        assert!(answer(security, b"bench", &hello[..bytes], |_| Vec::new(), &mut reply).is_err());
        count += 1;
    }
    start.elapsed().as_micros() as f64 / count as f64
}

fn main() {
    // `cargo bench` adds an argument of its own.
    let seconds = std::env::args().find_map(|word| word.parse().ok()).unwrap_or(0.5);
    let at_least = Duration::from_secs_f64(seconds);
    let key = PreSharedKey::random().expect("a key");
    for (name, security) in [("key", Security::Key(key)), ("insecure", Security::Insecure)] {
        for body_bytes in [64, 1400, 8900] {
            let seal_ns = measure(&security, body_bytes, false, at_least);
            let both_ns = measure(&security, body_bytes, true, at_least);
            let (packets_s, gb_s) = (1e9 / both_ns, body_bytes as f64 / both_ns);
            print!(r#"{{"security":"{name}","body_bytes":{body_bytes},"seal_ns":{seal_ns:.0},"#);
            println!(
                r#""seal_open_ns":{both_ns:.0},"packets_s":{packets_s:.0},"gb_s":{gb_s:.2}}}"#
            );
        }
        let (start, mut count) = (Instant::now(), 0);
        while start.elapsed() < at_least {
            black_box(both_ends(&security));
            count += 1;
        }
        let us = start.elapsed().as_micros() as f64 / f64::from(count);
        let refused_us = refuse(&security, at_least);
        println!(r#"{{"security":"{name}","handshake_us":{us:.1},"refused_us":{refused_us:.1}}}"#);
    }
}
