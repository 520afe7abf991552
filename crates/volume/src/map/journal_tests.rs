//! The journal map against models: by bytes, by stretches between chosen addresses, and under
//! threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use proptest::prelude::*;

use super::JournalMap;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// (address, length, position and value) of every piece.
type PieceList = Vec<(u64, u64, Option<(u64, u32)>)>;

fn pieces(map: &JournalMap<Arc<u32>>, address: u64, length: u64) -> PieceList {
    let mut list = Vec::new();
    map.lookup(address, length, &mut |piece| {
        list.push((
            piece.address,
            piece.length,
            piece.entry.map(|(position, value)| (position, **value)),
        ));
    });
    list
}

/// Joins neighbors of one entry, as pieces are cut at areas.
fn joined(pieces: PieceList) -> PieceList {
    let mut list: PieceList = Vec::new();
    for piece in pieces {
        match list.last_mut() {
            Some(last) if last.2 == piece.2 => {
                assert_eq!(last.0 + last.1, piece.0);
                assert!(piece.2.is_some(), "two holes in a row at {}", piece.0);
                last.1 += piece.1;
            }
            _ => list.push(piece),
        }
    }
    list
}

/// The entries between neighboring cuts: exact, since every range begins and ends at a cut. Long
/// entries and the others do not displace each other, so an entry under a newer one of the other
/// kind becomes visible again when that one is removed.
struct Model {
    cuts: Vec<u64>,
    newest: [Vec<Option<(u64, u32)>>; 2],
}

impl Model {
    fn new(cuts: Vec<u64>) -> Model {
        let newest = [vec![None; cuts.len() - 1], vec![None; cuts.len() - 1]];
        Model { cuts, newest }
    }

    fn insert(&mut self, from: usize, to: usize, position: u64, value: u32) {
        let kind = usize::from(self.cuts[to] - self.cuts[from] > 16 * MIB);
        for newest in &mut self.newest[kind][from..to] {
            if newest.is_none_or(|(at, _)| at < position) {
                *newest = Some((position, value));
            }
        }
    }

    fn remove(&mut self, from: usize, to: usize, position: u64) {
        for newest in self.newest.iter_mut().flat_map(|kind| &mut kind[from..to]) {
            newest.take_if(|(at, _)| *at == position);
        }
    }

    fn is_empty(&self) -> bool {
        self.newest.iter().flatten().all(Option::is_none)
    }

    fn pieces(&self, from: usize, to: usize) -> PieceList {
        let mut list: PieceList = Vec::new();
        for index in from..to {
            let entry = self.newest[0][index].max(self.newest[1][index]);
            let (start, length) = (self.cuts[index], self.cuts[index + 1] - self.cuts[index]);
            match list.last_mut() {
                Some(last) if last.2 == entry => last.1 += length,
                _ => list.push((start, length, entry)),
            }
        }
        list
    }
}

#[derive(Clone, Debug)]
enum Step {
    Insert(usize, usize),
    /// Removes the `usize`th entry inserted: all of it, or from its first cut to the given share of
    /// its cuts.
    Remove(usize, Option<usize>),
    Lookup(usize, usize),
}

fn steps(cuts: usize) -> impl Strategy<Value = Vec<(Step, u64)>> {
    let range = move || {
        (0..cuts, 0..cuts).prop_filter_map("empty", |(a, b)| (a != b).then(|| (a.min(b), a.max(b))))
    };
    let step = prop_oneof![
        4 => range().prop_map(|(from, to)| Step::Insert(from, to)),
        2 => (0usize..100, prop::option::of(1usize..8))
            .prop_map(|(which, part)| Step::Remove(which, part)),
        3 => range().prop_map(|(from, to)| Step::Lookup(from, to)),
    ];
    prop::collection::vec((step, any::<u64>()), 1..100)
}

/// Positions are unique and in any order: a shuffled count, as of writers that overtake one
/// another.
fn check(cuts: Vec<u64>, steps: Vec<(Step, u64)>) {
    let map = JournalMap::new();
    let mut model = Model::new(cuts.clone());
    let mut inserted: Vec<(usize, usize, u64)> = Vec::new();
    for (turn, (step, key)) in steps.into_iter().enumerate() {
        match step {
            Step::Insert(from, to) => {
                let position = (key % 1000) << 10 | turn as u64;
                map.insert(cuts[from], cuts[to] - cuts[from], position, Arc::new(turn as u32));
                model.insert(from, to, position, turn as u32);
                inserted.push((from, to, position));
            }
            Step::Remove(_, _) if inserted.is_empty() => {}
            Step::Remove(which, part) => {
                let (from, to, position) = inserted[which % inserted.len()];
                let to = part.map_or(to, |part| to.min(from + part));
                map.remove(cuts[from], cuts[to] - cuts[from], position);
                model.remove(from, to, position);
            }
            Step::Lookup(from, to) => {
                let seen = joined(pieces(&map, cuts[from], cuts[to] - cuts[from]));
                assert_eq!(seen, model.pieces(from, to));
            }
        }
        assert_eq!(map.is_empty(), model.is_empty());
    }
    let last = cuts.len() - 1;
    assert_eq!(joined(pieces(&map, cuts[0], cuts[last] - cuts[0])), model.pieces(0, last));
    for (from, to, position) in inserted {
        map.remove(cuts[from], cuts[to] - cuts[from], position);
    }
    assert_eq!((map.entries(), map.is_empty()), (0, true));
}

/// Cuts on both sides of every border that means something, up to sizes that go to the wide layer.
fn border_cuts() -> Vec<u64> {
    let mut cuts = vec![0, 1, 4096, 8192];
    for border in [MIB, 2 * MIB, 16 * MIB, 17 * MIB, 16 * GIB, 16 * GIB + MIB, 16 * GIB + 16 * MIB]
    {
        cuts.extend([border - 4096, border - 1, border, border + 1, border + 4096]);
    }
    cuts.sort_unstable();
    cuts
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn journal_map_agrees_with_a_model_of_every_byte(steps in steps(200)) {
        check((MIB - 100..MIB + 100).collect(), steps);
    }

    #[test]
    fn newest_position_wins_across_areas_and_layers(steps in steps(border_cuts().len())) {
        check(border_cuts(), steps);
    }
}

#[test]
fn narrow_entry_newer_than_a_wide_one_shows_and_an_older_one_does_not() {
    let map = JournalMap::new();
    map.insert(0, 40 * MIB, 5, Arc::new(5));
    map.insert(10, 10, 3, Arc::new(3));
    map.insert(30, 10, 7, Arc::new(7));
    let seen = pieces(&map, 0, 100);
    assert_eq!(seen, [(0, 30, Some((5, 5))), (30, 10, Some((7, 7))), (40, 60, Some((5, 5)))]);
    map.remove(0, 40 * MIB, 5);
    let seen = pieces(&map, 0, 100);
    assert_eq!(
        seen,
        [
            (0, 10, None),
            (10, 10, Some((3, 3))),
            (20, 10, None),
            (30, 10, Some((7, 7))),
            (40, 60, None)
        ]
    );
}

#[test]
fn terabytes_cost_entries_by_their_count() {
    let map = JournalMap::new();
    map.insert(0, 2 << 40, 1, Arc::new(1));
    assert_eq!(map.entries(), 128);
    assert_eq!(pieces(&map, 1 << 40, 4096), [(1 << 40, 4096, Some((1, 1)))]);
    map.remove(1 << 40, 4096, 1);
    assert_eq!(pieces(&map, 1 << 40, 4096), [(1 << 40, 4096, None)]);
    map.remove(0, 2 << 40, 1);
    assert!(map.is_empty());
}

#[test]
fn values_are_let_go_when_replaced_or_removed() {
    let map = JournalMap::new();
    let values: Vec<_> = (0..4).map(Arc::new).collect();
    map.insert(0, 8192, 1, values[0].clone());
    map.insert(4096, 3 * MIB, 2, values[1].clone());
    map.insert(0, 8192, 3, values[2].clone());
    map.insert(0, 8192, 0, values[3].clone());
    assert_eq!(Arc::strong_count(&values[0]), 1);
    assert_eq!(Arc::strong_count(&values[3]), 1);
    map.remove(4096, 3 * MIB, 2);
    map.remove(0, 8192, 3);
    assert!(values.iter().all(|value| Arc::strong_count(value) == 1));
}

#[test]
fn threads_leave_the_greatest_position_at_every_byte() {
    const BYTES: u64 = 3 * MIB;
    const UNIT: u64 = 512;
    let map = JournalMap::new();
    let positions = AtomicU64::new(1);
    let logs: Vec<Vec<(u64, u64, u64)>> = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4u64)
            .map(|writer| {
                let (map, positions) = (&map, &positions);
                scope.spawn(move || {
                    let mut state = writer;
                    let mut log = Vec::new();
                    for turn in 0..4000 {
                        state = state
                            .wrapping_mul(6364136223846793005)
                            .wrapping_add(1442695040888963407);
                        let start = (state >> 33) % (BYTES / UNIT);
                        let length = (1 + (state >> 20) % 64).min(BYTES / UNIT - start);
                        let position = positions.fetch_add(1, Ordering::Relaxed);
                        if turn % 3 == 0 {
                            std::thread::yield_now();
                        }
                        map.insert(
                            start * UNIT,
                            length * UNIT,
                            position,
                            Arc::new(position as u32),
                        );
                        log.push((start, length, position));
                    }
                    log
                })
            })
            .collect();
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    let mut model = Model::new((0..=BYTES / UNIT).map(|unit| unit * UNIT).collect());
    for &(start, length, position) in logs.iter().flatten() {
        model.insert(start as usize, (start + length) as usize, position, position as u32);
    }
    assert_eq!(joined(pieces(&map, 0, BYTES)), model.pieces(0, (BYTES / UNIT) as usize));
}

#[test]
fn byte_that_always_has_an_entry_is_never_a_hole_and_never_goes_back() {
    let map = JournalMap::new();
    map.insert(0, 4 * MIB, 1, Arc::new(0));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut newest = 0;
                while !done.load(Ordering::Relaxed) {
                    map.lookup(2 * MIB, 4096, &mut |piece| {
                        let (position, _) = piece.entry.unwrap();
                        assert!(position >= newest && piece.length == 4096);
                        newest = position;
                    });
                }
            });
        }
        let mut position = 1;
        // Each takes over from the one before, narrow from wide and wide from narrow.
        for _ in 0..20_000 {
            map.insert(0, 64 * MIB, position + 1, Arc::new(0));
            map.remove(0, 4 * MIB, position);
            map.insert(2 * MIB, 4096, position + 2, Arc::new(0));
            map.remove(0, 64 * MIB, position + 1);
            map.insert(0, 4 * MIB, position + 3, Arc::new(0));
            map.remove(2 * MIB, 4096, position + 2);
            position += 3;
        }
        done.store(true, Ordering::Relaxed);
    });
    map.remove(0, 4 * MIB, 60_001);
    assert!(map.is_empty());
}
