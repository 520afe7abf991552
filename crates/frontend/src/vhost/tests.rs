//! The pure parts, and the in-flight region at every step at which a process can die.

use proptest::prelude::*;
use sawmill_device::{BlockDevice, MemoryDevice};

use super::inflight::{Inflight, InflightQueue};
use super::memory::{GuestRange, pieces};
use super::message::{Area, HEADER_BYTES, Header, InflightShape, Message, Region, Reply};
use super::protocol::{
    CONFIG_BYTES, CacheMode, Parts, config_of, feature, features_of, understand,
};

fn region() -> std::sync::Arc<Inflight> {
    std::sync::Arc::new(Inflight::create(2, 16).expect("memory"))
}

fn queue(region: &std::sync::Arc<Inflight>) -> InflightQueue {
    region.queue(1, 16).expect("there are two")
}

/// The requests that the next process would execute again.
fn recovered(region: &std::sync::Arc<Inflight>, used: u16) -> Vec<u16> {
    let file = region.file().expect("a descriptor");
    let next = std::sync::Arc::new(Inflight::open(file, region.shape()).expect("the same memory"));
    queue(&next).recover(used).0
}

#[test]
fn what_was_taken_and_not_answered_comes_again_in_the_order_it_was_taken() {
    let region = region();
    let queue = queue(&region);
    for (counter, head) in [7u16, 3, 12, 0].into_iter().enumerate() {
        queue.take(head, counter as u64);
    }
    assert_eq!(recovered(&region, 0), [7, 3, 12, 0]);
    queue.begin_answer(3);
    queue.end_answer(3, 1);
    assert_eq!(recovered(&region, 1), [7, 12, 0]);
    // The counter continues after the highest one.
    assert_eq!(queue.recover(1), (vec![7, 12, 0], 4));
}

#[test]
fn a_process_may_die_between_any_two_steps_of_an_answer() {
    // The guest can see `used` answers; the process dies after so many steps.
    for (steps, used, expected) in
        [(1, 1, vec![5, 9]), (2, 1, vec![5, 9]), (3, 2, vec![9]), (4, 2, vec![9])]
    {
        let region = region();
        let queue = queue(&region);
        [2u16, 5, 9].into_iter().zip(0..).for_each(|(head, counter)| queue.take(head, counter));
        queue.begin_answer(2);
        queue.end_answer(2, 1);
        if steps >= 2 {
            queue.begin_answer(5);
        }
        // Step 3 writes the index of the used ring, which is in guest memory and not in the region.
        if steps >= 4 {
            queue.end_answer(5, 2);
        }
        assert_eq!(recovered(&region, used), expected, "after step {steps}");
    }
}

#[test]
fn a_region_that_was_never_used_recovers_to_nothing_wherever_the_ring_stands() {
    for used in [0, 1, 15, 16, 17, u16::MAX] {
        assert_eq!(queue(&region()).recover(used), (vec![], 0));
    }
}

#[test]
fn a_region_of_another_shape_is_refused() {
    let region = region();
    let shape = region.shape();
    let open = |shape| Inflight::open(region.file().expect("a descriptor"), shape).is_err();
    assert!(!open(shape));
    let area = Area { size_bytes: u64::MAX, ..shape.area };
    for wrong in [
        InflightShape { queues: 3, ..shape },
        InflightShape { queues: 0, ..shape },
        InflightShape { queue_size: 8, ..shape },
        InflightShape { queue_size: 32768, queues: u16::MAX, area },
        InflightShape { area: Area { offset: 4096, ..shape.area }, ..shape },
        InflightShape { area: Area { offset: u64::MAX, ..shape.area }, ..shape },
    ] {
        assert!(open(wrong), "{wrong:?}");
    }
    assert!(region.queue(2, 16).is_none() && region.queue(0, 32).is_none());
}

#[test]
fn each_field_of_a_vhost_user_message_is_read_at_its_offset() {
    let words =
        |words: &[u64]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>();
    assert_eq!(Message::parse(2, &words(&[5])).unwrap(), Message::SetFeatures(5));
    let region = Region { guest: 1, size_bytes: 2, user: 3, file_offset: 4 };
    assert_eq!(Message::parse(37, &words(&[0, 1, 2, 3, 4])).unwrap(), Message::AddRegion(region));
    // One region, then padding: two numbers of 32 bits.
    assert_eq!(
        Message::parse(5, &words(&[1, 1, 2, 3, 4])).unwrap(),
        Message::SetMemTable(vec![region])
    );
    let reply = Reply::Number(9).to_bytes(15);
    assert_eq!(reply[..4], 15u32.to_ne_bytes());
    assert_eq!(reply[4..8], 5u32.to_ne_bytes());
    assert_eq!(reply[8..], [&8u32.to_ne_bytes()[..], &9u64.to_ne_bytes()].concat());
}

#[test]
fn the_longest_request_of_a_guest_fits_the_device() {
    for request_bytes_max in [4096, 64 << 10, 500 << 10, 1 << 20, 4 << 20, 32 << 20] {
        let mut geometry = MemoryDevice::new(1 << 30).geometry();
        geometry.request_bytes_max = request_bytes_max;
        let config = config_of(&geometry, 1, CacheMode::Writeback);
        let number = |at: usize| {
            u32::from_le_bytes([config[at], config[at + 1], config[at + 2], config[at + 3]])
        };
        assert!(number(8) >= 4096 && number(8) * number(12) <= request_bytes_max);
    }
}

#[test]
fn a_read_only_device_offers_nothing_that_changes_it() {
    let mut geometry = MemoryDevice::new(1 << 20).geometry();
    assert_eq!(features_of(&geometry) & feature::RO, 0);
    geometry.read_only = true;
    let features = features_of(&geometry);
    assert_ne!(features & feature::RO, 0);
    assert_eq!(features & (feature::DISCARD | feature::WRITE_ZEROES), 0);
}

proptest! {
    #[test]
    fn no_bytes_make_the_message_parser_panic(
        request in 0u32..50, payload in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let _ = Message::parse(request, &payload);
    }

    #[test]
    fn no_bytes_make_the_header_parser_panic(bytes in any::<[u8; HEADER_BYTES]>()) {
        let _ = Header::parse(&bytes);
    }

    #[test]
    fn no_bytes_make_the_request_parser_panic(
        header in any::<[u8; 16]>(),
        kind in 0u8..20,
        payload_bytes: u64,
        data_bytes: u64,
        range: Option<[u8; 16]>,
    ) {
        let mut header = header;
        header[..4].copy_from_slice(&[kind, 0, 0, 0]);
        let _ = understand(
            &header,
            &Parts { payload_bytes, range, data_bytes },
            u64::MAX,
            CacheMode::Writethrough,
        );
    }

    #[test]
    fn pieces_cover_exactly_what_is_asked_for(
        lengths in prop::collection::vec(1u32..100, 0..10), offset in 0u64..500,
        length in 0usize..500,
    ) {
        let mut next = 0;
        let ranges: Vec<GuestRange> = lengths.iter().map(|length| {
            next += 1000;
            GuestRange { address: next, length: *length }
        }).collect();
        let bytes_of = |s: GuestRange| s.address..s.address + u64::from(s.length);
        let bytes: Vec<u64> = ranges.iter().flat_map(|range| bytes_of(*range)).collect();
        let from = (offset as usize).min(bytes.len());
        let to = (from + length).min(bytes.len());
        let found: Vec<u64> = pieces(&ranges, offset, length).flat_map(bytes_of).collect();
        prop_assert_eq!(&found, &bytes[from..to]);
    }

    /// Recovery of a stale or corrupt region ends, and returns each head once.
    #[test]
    fn no_region_hangs_or_panics(used: u16, bytes in prop::collection::vec(any::<u8>(), 256)) {
        let region = region();
        let file = region.file().expect("a descriptor");
        let start = region.shape().area.size_bytes / 2;
        // The head's version and size stay; everything after them is arbitrary.
        rustix::io::pwrite(&file, &bytes, start + 12).expect("memory");
        let (heads, _) = queue(&region).recover(used);
        let distinct: std::collections::BTreeSet<u16> = heads.iter().copied().collect();
        prop_assert!(distinct.len() == heads.len() && heads.iter().all(|head| *head < 16));
    }
}

#[test]
fn the_configuration_space_is_as_long_as_the_specification_says() {
    assert_eq!(CONFIG_BYTES, 60);
}
