//! Packets that can be identified and checked, and their way through a carrier.

use std::time::Duration;

use sawmill_link::carrier::{Burst, PACKET_BYTES_MIN, Peer, Receiver, Sender, WakeReasons};

/// How long a test waits for something that must arrive.
pub(crate) const ANSWER_TIME_MAX: Duration = Duration::from_secs(20);

/// The most bytes in flight at a time.
const ROW_BYTES_MAX: usize = 132_000;

/// Writes packet `number` over all of `bytes`.
pub(crate) fn fill(number: u32, bytes: &mut [u8]) {
    let length = u32::try_from(bytes.len()).expect("a packet's length");
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = (i as u32 ^ number.wrapping_mul(0x9E37)) as u8;
    }
    bytes[..4].copy_from_slice(&number.to_le_bytes());
    bytes[4..8].copy_from_slice(&length.to_le_bytes());
}

/// Packet `number`, of this length.
pub(crate) fn packet(number: u32, packet_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![0; packet_bytes];
    fill(number, &mut bytes);
    bytes
}

/// The number of a packet that is intact.
pub(crate) fn number_of(bytes: &[u8]) -> u32 {
    let number = u32::from_le_bytes(bytes[..4].try_into().expect("four bytes"));
    assert_eq!(bytes, packet(number, bytes.len()), "packet {number} arrived changed");
    number
}

/// A burst of these sizes, numbered from `first`.
pub(crate) fn burst_of(first: u32, sizes: &[usize]) -> Burst {
    let mut burst = Burst::new(sizes.len(), sizes.iter().sum());
    for (number, &size) in (first..).zip(sizes) {
        fill(number, &mut burst.space()[..size]);
        burst.commit(size);
    }
    burst
}

/// Receives once. Expects at least one packet, numbered from `first` on, in order.
fn expect_some(receiver: &mut dyn Receiver, first: u32) -> WakeReasons {
    let mut next = first;
    let woken = receiver.receive(Some(ANSWER_TIME_MAX), false, &mut |_, bytes| {
        assert_eq!(number_of(bytes), next);
        next += 1;
    });
    let woken = woken.expect("the carrier lives");
    assert_ne!(woken, WakeReasons::default(), "packet {next} did not come");
    woken
}

/// Receives until `count` packets arrived. Expects them numbered from `first` on, in order.
pub(crate) fn expect_in_order(
    receiver: &mut dyn Receiver,
    first: u32,
    count: usize,
) -> WakeReasons {
    let mut sum = WakeReasons::default();
    while sum.packets < count {
        let woken = expect_some(receiver, first + sum.packets as u32);
        sum.packets += woken.packets;
        sum.malformed += woken.malformed;
    }
    assert_eq!(sum.packets, count);
    sum
}

/// Sizes from the shortest to the longest: single, in rows of equal size, mixed.
fn sizes_up_to(packet_bytes_max: usize) -> Vec<Vec<usize>> {
    let min = PACKET_BYTES_MIN;
    let mut rows = vec![
        vec![min],
        vec![packet_bytes_max],
        vec![min; 200],
        vec![packet_bytes_max; 70],
        vec![
            packet_bytes_max,
            packet_bytes_max,
            min,
            min,
            min + 1,
            packet_bytes_max / 2,
            packet_bytes_max,
        ],
    ];
    let small = (min..min + 100).collect::<Vec<_>>();
    let all = (min..=packet_bytes_max).step_by(97).collect::<Vec<_>>();
    let near_max = (packet_bytes_max - 40..=packet_bytes_max).rev().collect::<Vec<_>>();
    rows.push(small);
    rows.push(near_max);
    rows.extend(all.chunks(40).map(<[usize]>::to_vec));
    rows
}

/// These rows, cut to what the receiving socket of a user other than root holds.
fn cut(rows: Vec<Vec<usize>>) -> Vec<Vec<usize>> {
    let mut cut: Vec<Vec<usize>> = Vec::new();
    for row in rows {
        let mut room = 0;
        for size in row {
            if room < size {
                cut.push(Vec::new());
                room = ROW_BYTES_MAX;
            }
            room -= size;
            cut.last_mut().expect("pushed").push(size);
        }
    }
    cut
}

/// Checks that packets of all sizes that the carrier accepts arrive, intact and in order, while
/// nothing else is in flight.
pub(crate) fn all_sizes_arrive(
    sender: &dyn Sender,
    to: &Peer,
    receiver: &mut dyn Receiver,
    sender_too: &mut dyn Receiver,
) {
    let mut first = 0;
    for sizes in cut(sizes_up_to(sender.packet_bytes_max(to))) {
        let burst = burst_of(first, &sizes);
        let mut sent = 0;
        while sent < burst.len() {
            let sent_now = sender.send(to, &burst, sent).expect("sent");
            let mut received = 0;
            while received < sent_now {
                // The last may have been accepted in part: the sender's receiver sends the rest.
                sender_too.receive(Some(Duration::ZERO), true, &mut |_, _| ()).expect("lives");
                received += expect_some(receiver, first + (sent + received) as u32).packets;
            }
            assert_eq!(received, sent_now);
            sent += sent_now;
        }
        first += burst.len() as u32;
    }
    assert!(first > 400, "only {first} packets");
}

/// Sends this burst repeatedly until the carrier accepts no more. Returns the number of accepted
/// packets.
pub(crate) fn send_until_full(sender: &dyn Sender, to: &Peer, burst: &Burst) -> usize {
    let mut sent_count = 0;
    for _ in 0..100_000 {
        match sender.send(to, burst, 0).expect("full is no error") {
            0 => return sent_count,
            count => sent_count += count,
        }
    }
    panic!("{sent_count} packets and still not full");
}

/// Waits for room to send.
pub(crate) fn wait_for_room(receiver: &mut dyn Receiver) {
    while !receiver.receive(Some(ANSWER_TIME_MAX), true, &mut |_, _| ()).expect("lives").writable {}
}
