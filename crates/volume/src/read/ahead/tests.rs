//! Readers of each kind, and what is fetched ahead of them.

use super::*;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const SIZE_BYTES: u64 = 1 << 30;
const FAR: Bounds = Bounds { pipe_bytes: 12 * MIB, room_bytes: 12 * MIB, size_bytes: SIZE_BYTES };

/// Streams with a far store, which a reader of `length` reads.
struct Reader {
    streams: Streams,
    length: u64,
    waits: bool,
}

impl Reader {
    fn new(length: u64) -> Self {
        Reader { streams: Streams::new(32 * MIB), length, waits: true }
    }

    fn read(&self, address: u64) -> Vec<(u64, u64)> {
        self.read_of(SIZE_BYTES, address)
    }

    fn read_of(&self, size_bytes: u64, address: u64) -> Vec<(u64, u64)> {
        let read = ReadSpan { address, length: self.length, waits: self.waits };
        self.streams.note(read, Bounds { size_bytes, ..FAR })
    }

    /// The ranges ahead of each of `count` reads that are `step` apart.
    fn row(&self, from: u64, step: i64, count: i64) -> Vec<Vec<(u64, u64)>> {
        (0..count).map(|number| self.read((from as i64 + number * step) as u64)).collect()
    }
}

#[test]
fn nothing_is_fetched_before_two_reads_have_followed_the_first() {
    let reader = Reader::new(4 * KIB);
    assert_eq!(reader.read(0), []);
    assert_eq!(reader.read(1 << 29), []);
    assert_eq!(reader.read(4 * KIB), []);
    assert_eq!(reader.read(8 * KIB), [(12 * KIB, 24 * KIB)], "twice what was read");
}

#[test]
fn a_reader_that_waits_gets_twice_as_much_up_to_what_fills_the_way_to_the_store() {
    let reader = Reader::new(128 * KIB);
    let mut asked_to = 0;
    for (number, ranges) in (1..).zip(reader.row(0, 128 * KIB as i64, 64)) {
        for (from, length) in ranges {
            assert!(from >= number * 128 * KIB && from >= asked_to, "each range once");
            asked_to = from + length;
            assert!(asked_to - number * 128 * KIB <= 12 * MIB);
        }
    }
    assert!(asked_to > 64 * 128 * KIB + 10 * MIB, "the window has grown: {asked_to}");
}

#[test]
fn a_large_random_read_that_arrives_in_pieces_fetches_twice_itself_beyond_at_most() {
    let reader = Reader::new(128 * KIB);
    let mut beyond_bytes = 0;
    for burst in 0..20 {
        // No answer comes between the pieces: each of them waits.
        let from = burst * 40 * MIB;
        let ranges = reader.row(from, 128 * KIB as i64, 8).concat();
        let asked_to = ranges.iter().map(|(start, length)| start + length).max().unwrap();
        beyond_bytes += asked_to - (from + MIB);
    }
    assert!(beyond_bytes <= 20 * 2 * MIB, "{beyond_bytes} beside {} that were wanted", 20 * MIB);
}

#[test]
fn all_windows_together_fit_the_memory_and_the_last_reader_gets_it_back() {
    let reader = Reader::new(128 * KIB);
    let bounds = Bounds { pipe_bytes: 32 * MIB, room_bytes: 32 * MIB, size_bytes: SIZE_BYTES };
    let read = |address| {
        let read = ReadSpan { address, length: 128 * KIB, waits: true };
        let ranges = reader.streams.note(read, bounds);
        ranges.last().map_or(0, |(from, length)| from + length - (read.address + 128 * KIB))
    };
    let block = |stream: u64, number: u64| stream * 100 * MIB + number * 128 * KIB;
    for number in 0..256 {
        for stream in 0..4 {
            assert!(read(block(stream, number)) <= 8 * MIB + if number < 8 { MIB } else { 0 });
        }
    }
    let alone = (256..512).map(|number| read(block(0, number))).max().unwrap();
    assert!(alone > 30 * MIB, "{alone}");
}

#[test]
fn a_reader_that_never_waits_keeps_its_window() {
    let mut reader = Reader::new(128 * KIB);
    reader.waits = false;
    let ranges = reader.row(0, 128 * KIB as i64, 64).concat();
    let (from, length) = ranges[ranges.len() - 1];
    assert!(from + length <= 64 * 128 * KIB + MIB);
}

#[test]
fn nothing_is_fetched_past_either_end_of_the_volume() {
    let reader = Reader::new(4 * KIB);
    let end = 2 * MIB - 4 * KIB;
    for address in [end - 8 * KIB, end - 4 * KIB, end] {
        assert_eq!(reader.read_of(2 * MIB, address), []);
    }
    let ranges: Vec<_> = (0..64).rev().flat_map(|block| reader.read(block * 4 * KIB)).collect();
    assert_eq!(ranges.iter().map(|(_, length)| length).sum::<u64>(), 61 * 4 * KIB);
    assert_eq!(ranges.last().map(|range| range.0), Some(0));
}

#[test]
fn a_backward_reader_gets_what_lies_before_it() {
    let reader = Reader::new(128 * KIB);
    let ranges = reader.row(512 * MIB, -(128 * KIB as i64), 64);
    let mut lowest = 512 * MIB - 2 * 128 * KIB;
    for (from, length) in ranges.into_iter().flatten() {
        assert_eq!(from + length, lowest);
        lowest = from;
    }
    assert!(lowest < 512 * MIB - 64 * 128 * KIB - 10 * MIB);
}

#[test]
fn a_reader_by_steps_gets_the_steps_and_not_what_lies_between() {
    for step in [512 * KIB as i64, -(512 * KIB as i64)] {
        let reader = Reader::new(128 * KIB);
        let ranges = reader.row(512 * MIB, step, 40).concat();
        let mut next = 512 * MIB as i64 + 4 * step;
        for (from, length) in ranges {
            assert_eq!((from as i64, length), (next, 128 * KIB));
            next = from as i64 + step;
        }
        let steps_ahead = (next - 512 * MIB as i64) / step - 40;
        assert!((32..=RANGES_MAX as i64).contains(&steps_ahead), "{steps_ahead}");
    }
}

#[test]
fn random_reads_fetch_nothing_ahead() {
    for range_bytes in [8 * MIB, SIZE_BYTES] {
        let reader = Reader::new(16 * KIB);
        let mut dice = sawmill_testkit::Dice::new(7);
        let fetched = (0..10_000)
            .map(|_| reader.read(dice.below(range_bytes / (16 * KIB)) * 16 * KIB))
            .filter(|ranges| !ranges.is_empty());
        assert!(fetched.count() <= 100, "of 10,000 reads of {range_bytes} bytes");
    }
}

#[test]
fn a_stream_is_found_among_random_reads() {
    let reader = Reader::new(64 * KIB);
    let mut dice = sawmill_testkit::Dice::new(3);
    let mut fetched = 0;
    for block in 0..64 {
        fetched += reader.read(block * 64 * KIB).len();
        reader.read(MIB * (100 + dice.below(900)));
    }
    assert!(fetched > 4, "{fetched}");
}

#[test]
fn reads_of_a_row_that_arrive_out_of_order_are_one_stream() {
    let reader = Reader::new(128 * KIB);
    let mut asked_to = 0;
    for pair in 0..32 {
        // After a first row in order, each two are exchanged.
        for number in if pair < 24 { [0, 1] } else { [1, 0] } {
            for (from, length) in reader.read((2 * pair + number) * 128 * KIB) {
                assert!(from >= asked_to, "each range once");
                asked_to = from + length;
            }
        }
    }
    assert!(asked_to >= 64 * 128 * KIB + 10 * MIB, "{asked_to}");
}

#[test]
fn a_disabled_budget_fetches_nothing() {
    let streams = Streams::new(0);
    for block in 0..10 {
        let read = ReadSpan { address: block * 4096, length: 4096, waits: true };
        assert_eq!(streams.note(read, FAR), []);
    }
}

#[test]
fn where_there_is_no_room_a_stream_waits_and_leaves_nothing_out() {
    let streams = Streams::new(32 * MIB);
    let read = |block: u64, room_bytes| {
        let read = ReadSpan { address: block * 128 * KIB, length: 128 * KIB, waits: true };
        streams.note(read, Bounds { room_bytes, ..FAR })
    };
    assert!((0..16).all(|block| read(block, 0).is_empty()));
    assert_eq!(read(16, MIB), [(17 * 128 * KIB, MIB)]);
    assert_eq!(read(17, 4096), [], "too little for a long request");
    assert_eq!(read(18, 2 * MIB), [(25 * 128 * KIB, 2 * MIB)]);
}

#[test]
fn two_readers_do_not_take_the_same_room() {
    let fetcher = fetch::Fetcher::new(0, std::sync::Arc::default());
    let mut first = fetcher.take_room(3 * MIB, 4 * MIB);
    let second = fetcher.take_room(3 * MIB, 4 * MIB);
    assert_eq!((first.bytes, second.bytes), (3 * MIB, MIB));
    assert_eq!(fetcher.room_ahead(4 * MIB, 32 * MIB), 0);
    first.grow_to(4 * MIB, 4 * MIB);
    assert_eq!(first.bytes, 3 * MIB);
    drop(second);
    first.grow_to(4 * MIB, 4 * MIB);
    assert_eq!(first.bytes, 4 * MIB);
    drop(first);
    assert_eq!(fetcher.room_ahead(4 * MIB, 32 * MIB), 4 * MIB);
}

#[test]
fn nothing_is_fetched_ahead_of_readers_that_wait_for_as_much_by_themselves() {
    let fetcher = fetch::Fetcher::new(0, std::sync::Arc::default());
    let room = || fetcher.room_ahead(32 * MIB, 24 * MIB);
    let second = |number| std::time::Duration::from_secs(number);
    let few = fetcher.awaits(8 * MIB, second(1));
    assert_eq!(room(), 24 * MIB);
    let more = fetcher.awaits(8 * MIB, second(1));
    assert_eq!(room(), 0);
    drop((few, more));
    assert_eq!(room(), 0, "they have waited for that much lately");
    drop(fetcher.awaits(MIB, second(2)));
    assert_eq!(room(), 0);
    drop(fetcher.awaits(MIB, second(3)));
    assert_eq!(room(), 24 * MIB);
}
