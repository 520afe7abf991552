//! How fast each carrier moves packets between two namespaces, and the CPU time that this costs.
//!
//! `cargo bench -p sawmill-link --bench carriers [SECONDS]`, as root. The cable is a veth pair with
//! MTU 9000. It favors UDP and TCP, because a veth passes 64 KiB on as one packet: on other lines,
//! the kernel segments UDP first. Not here: claims; a figure holds for its machine and moment.

#[expect(dead_code, reason = "the tests use more of it")]
#[path = "../tests/carriers/cable.rs"]
mod cable;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use sawmill_link::carrier::{
    Burst, Peer, Receiver, Sender, StreamListener, UdpOptions, connect, open_ethernet, open_udp,
};

use cable::{Cable, End};

const MTU_BYTES: usize = 9000;
/// Enough for the system calls to cost little, few enough for every queue.
const BURST_PACKETS: usize = 56;
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);

type Halves = (Box<dyn Sender>, Box<dyn Receiver>);

struct Ends {
    near: Halves,
    far: Halves,
    /// The peer of `near`, and the peer of `far`.
    to: Peer,
    back: Peer,
}

fn burst_of(packets: usize, packet_bytes: usize) -> Burst {
    let mut burst = Burst::new(packets, packets * packet_bytes);
    let length = u32::try_from(packet_bytes).expect("short");
    while !burst.space().is_empty() {
        burst.space()[4..8].copy_from_slice(&length.to_le_bytes());
        burst.commit(packet_bytes);
    }
    burst
}

fn cpu_s() -> f64 {
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    spent.tv_sec as f64 + spent.tv_nsec as f64 / 1e9
}

/// Measures one direction for this long, while a thread of its own reads at the far end.
fn stream(name: &str, ends: &mut Ends, packet_bytes: usize, seconds: f64) {
    let burst = burst_of(BURST_PACKETS, packet_bytes);
    let is_over = AtomicBool::new(false);
    let (sender, own) = &mut ends.near;
    let receiver = &mut ends.far.1;
    let (begin, cpu) = (Instant::now(), cpu_s());
    let (sent_count, received) = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            let mut packet_count = 0u64;
            while !is_over.load(Ordering::Relaxed) {
                let wait = Some(Duration::from_millis(10));
                let woken = receiver.receive(wait, false, &mut |_, bytes| {
                    std::hint::black_box(bytes.len());
                });
                packet_count += woken.expect("the carrier lives").packets as u64;
            }
            packet_count
        });
        let (mut sent_count, mut at) = (0u64, 0);
        while begin.elapsed().as_secs_f64() < seconds {
            match sender.send(&ends.to, &burst, at).expect("sent") {
                0 => {
                    own.receive(Some(ANSWER_TIME_MAX), true, &mut |_, _| ())
                        .expect("the carrier lives");
                }
                count => (sent_count, at) = (sent_count + count as u64, (at + count) % burst.len()),
            }
        }
        is_over.store(true, Ordering::Relaxed);
        (sent_count, receiving.join().expect("it received"))
    });
    let (wall, cpu) = (begin.elapsed().as_secs_f64(), cpu_s() - cpu);
    let gigabytes = received as f64 * packet_bytes as f64 / 1e9;
    let lost_percent = 100.0 * (1.0 - received as f64 / sent_count as f64).max(0.0);
    println!(
        "{name:<28} {packet_bytes:>5} B {:>9.0} packets/s {:>6.2} GB/s {:>6.2} CPU s/GB  lost \
        {lost_percent:.1} %",
        received as f64 / wall,
        gigabytes / wall,
        cpu / gigabytes,
    );
}

/// Sends one packet there and one back, repeatedly.
fn ping_pong(name: &str, ends: &mut Ends, seconds: f64) {
    let burst = burst_of(1, 64);
    let is_over = AtomicBool::new(false);
    let (begin, mut trips) = (Instant::now(), Vec::new());
    let (answerer, receiver) = &mut ends.far;
    let (sender, own) = &mut ends.near;
    std::thread::scope(|scope| {
        let (burst, back, is_over) = (&burst, &ends.back, &is_over);
        scope.spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                let wait = Some(Duration::from_millis(100));
                let woken =
                    receiver.receive(wait, false, &mut |_, _| ()).expect("the carrier lives");
                for _ in 0..woken.packets {
                    answerer.send(back, burst, 0).expect("sent");
                }
            }
        });
        while begin.elapsed().as_secs_f64() < seconds {
            let trip = Instant::now();
            sender.send(&ends.to, burst, 0).expect("sent");
            while own
                .receive(Some(ANSWER_TIME_MAX), false, &mut |_, _| ())
                .expect("it lives")
                .packets
                == 0
            {
                assert!(trip.elapsed() < ANSWER_TIME_MAX, "no answer");
            }
            trips.push(trip.elapsed());
        }
        is_over.store(true, Ordering::Relaxed);
    });
    trips.sort();
    let (median, late) = (trips[trips.len() / 2], trips[trips.len() * 99 / 100]);
    println!("{name:<28} round trip of 64 B: median {median:?}, 99 of 100 within {late:?}");
}

fn udp(cable: &Cable, segmentation: bool) -> io::Result<Ends> {
    let open = |end, local: &str| {
        let local = local.parse().expect("an address");
        cable.at(end, || open_udp(&UdpOptions { segmentation, ..UdpOptions::on(local) }))
    };
    let (near, far) = (open(End::A, "10.97.0.1:0")?, open(End::B, "10.97.0.2:0")?);
    let (to, back) = (Peer::Udp(far.0.local()?), Peer::Udp(near.0.local()?));
    Ok(Ends { near: boxed(near), far: boxed(far), to, back })
}

fn tcp(cable: &Cable) -> io::Result<Ends> {
    let local = "10.97.0.2:0".parse().expect("an address");
    let listener = cable.at(End::B, || StreamListener::open(local, None))?;
    let to = listener.local()?;
    let near = cable.at(End::A, || connect(to, None, ANSWER_TIME_MAX))?;
    let (sender, receiver, _) = listener.accept(Some(ANSWER_TIME_MAX))?.expect("it connected");
    Ok(Ends {
        near: boxed(near),
        far: boxed((sender, receiver)),
        to: Peer::Stream,
        back: Peer::Stream,
    })
}

fn ethernet(cable: &Cable) -> io::Result<Ends> {
    let near = cable.at(End::A, || open_ethernet("cable"))?;
    let far = cable.at(End::B, || open_ethernet("cable"))?;
    let (to, back) = (far.0.own(), near.0.own());
    Ok(Ends { near: boxed(near), far: boxed(far), to, back })
}

fn boxed((sender, receiver): (impl Sender + 'static, impl Receiver + 'static)) -> Halves {
    (Box::new(sender), Box::new(receiver))
}

fn main() -> io::Result<()> {
    let seconds = std::env::args().find_map(|word| word.parse().ok()).unwrap_or(2.0);
    let Some(cable) = Cable::of_mtu(MTU_BYTES) else { return Ok(()) };
    for packet_bytes in [MTU_BYTES - 28, 4096 + 64, 1400, 64] {
        stream("UDP, segments", &mut udp(&cable, true)?, packet_bytes, seconds);
        cable.link(End::A, &["gso_max_segs", "1"]);
        stream("UDP, segments, cut in kernel", &mut udp(&cable, true)?, packet_bytes, seconds);
        cable.link(End::A, &["gso_max_segs", "65535"]);
        stream("UDP, one by one", &mut udp(&cable, false)?, packet_bytes, seconds);
        stream("TCP", &mut tcp(&cable)?, packet_bytes, seconds);
        stream("Ethernet", &mut ethernet(&cable)?, packet_bytes, seconds);
    }
    ping_pong("UDP", &mut udp(&cable, true)?, seconds);
    ping_pong("TCP", &mut tcp(&cable)?, seconds);
    ping_pong("Ethernet", &mut ethernet(&cable)?, seconds);
    Ok(())
}
