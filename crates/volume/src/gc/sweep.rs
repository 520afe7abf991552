//! Finds the live data of victims: one pass over the object map, in address order, so that
//! rewritten data lies in address order too.
//!
//! Holes of up to [`HOLE_BYTES_MAX`] between two live pieces of victims are plugged: if other
//! segments hold them, their data is moved along, so that a stretch of the disk lies in one piece
//! again (LSVD §3.5).
//!
//! Invariant: a plan only records what was live when it was made, and need not be complete or up to
//! date: what has died or moved since is left out when the plan is carried out, and again when the
//! map is changed.
//!
//! Not here: which segments are victims (`policy`), the bytes (`gather`), and changing the map
//! (`recovery::apply`).

use crate::limits::GC_HOLE_BYTES_MAX as HOLE_BYTES_MAX;
use crate::map::{GROUP_BYTES, Location, MapExtent, ObjectMap};

/// Live pieces to be moved, in address order, and how far that has come.
pub(crate) struct MovePlan {
    pieces: Vec<MapExtent>,
    next: usize,
}

impl MovePlan {
    /// The live pieces of the segments that `is_victim` names, and of those that `may_plug` names
    /// in small holes between them; at most about `bytes_max` of them, from the lowest address on.
    pub(crate) fn make(
        map: &ObjectMap,
        is_victim: &dyn Fn(u32) -> bool,
        may_plug: &dyn Fn(u32) -> bool,
        bytes_max: u64,
    ) -> MovePlan {
        let mut sweep = Sweep { pieces: Vec::new(), bytes: 0, plugs: Vec::new(), end: None };
        for group in map.groups() {
            map.lookup(group * GROUP_BYTES, GROUP_BYTES, &mut |piece| {
                if let Some(Location { sequence, data_offset }) = piece.location {
                    let (address, length) = (piece.address, piece.length);
                    let piece = MapExtent { address, length, sequence, data_offset };
                    let kind = match (is_victim(sequence), may_plug(sequence)) {
                        (true, _) => MoveKind::Victim,
                        (false, true) => MoveKind::Plug,
                        (false, false) => MoveKind::Other,
                    };
                    sweep.visit(piece, kind);
                }
            });
            if sweep.bytes >= bytes_max {
                break;
            }
        }
        MovePlan { pieces: sweep.pieces, next: 0 }
    }

    /// Bytes not carried out yet.
    pub(crate) fn bytes_left(&self) -> u64 {
        self.pieces[self.next..].iter().map(|piece| piece.length).sum()
    }

    pub(crate) fn is_done(&self) -> bool {
        self.next >= self.pieces.len()
    }

    /// Puts pieces that could not be carried out back to the front of the plan.
    pub(crate) fn put_back(&mut self, pieces: Vec<MapExtent>) {
        self.pieces.splice(..self.next, pieces);
        self.next = 0;
    }

    /// Takes the next pieces that are still live, up to `bytes_max` bytes and `extents_max` pieces.
    pub(crate) fn take_live(
        &mut self,
        map: &ObjectMap,
        bytes_max: u64,
        extents_max: usize,
    ) -> Vec<MapExtent> {
        let (mut live_pieces, mut bytes) = (Vec::<MapExtent>::new(), 0);
        while let Some(piece) = self.pieces.get_mut(self.next) {
            let room = bytes_max - bytes;
            if room == 0 || live_pieces.len() >= extents_max {
                break;
            }
            let part = MapExtent { length: piece.length.min(room), ..*piece };
            if part.length < piece.length {
                piece.address += part.length;
                piece.data_offset += part.length as u32;
                piece.length -= part.length;
            } else {
                self.next += 1;
            }
            map.lookup(part.address, part.length, &mut |found| {
                let into = found.address - part.address;
                let data_offset = part.data_offset + into as u32;
                if found.location == Some(Location { sequence: part.sequence, data_offset }) {
                    let (address, length) = (found.address, found.length);
                    live_pieces.push(MapExtent {
                        address,
                        length,
                        sequence: part.sequence,
                        data_offset,
                    });
                    bytes += length;
                }
            });
        }
        live_pieces
    }
}

/// What a plan may do with a piece.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MoveKind {
    Victim,
    /// It moves along if it lies in a small hole between pieces of victims.
    Plug,
    Other,
}

struct Sweep {
    pieces: Vec<MapExtent>,
    bytes: u64,
    /// Pieces after the last piece of a victim that would plug a hole.
    plugs: Vec<MapExtent>,
    /// Where the last piece of a victim ends.
    end: Option<u64>,
}

impl Sweep {
    fn visit(&mut self, piece: MapExtent, kind: MoveKind) {
        let near = self.end.is_some_and(|end| piece.address - end <= HOLE_BYTES_MAX);
        if kind == MoveKind::Victim {
            if near {
                self.bytes += self.plugs.iter().map(|plug| plug.length).sum::<u64>();
                self.pieces.append(&mut self.plugs);
            }
            self.plugs.clear();
            self.bytes += piece.length;
            self.end = Some(piece.address + piece.length);
            self.pieces.push(piece);
        } else if near && kind == MoveKind::Plug {
            self.plugs.push(piece);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pieces: &[(u64, u64, u32)]) -> ObjectMap {
        let map = ObjectMap::new(1 << 20);
        for (address, length, sequence) in pieces {
            map.insert(*address, *length, *sequence, *address as u32, &mut |_, _| {});
        }
        map
    }

    fn taken(map: &ObjectMap, plan: &mut MovePlan) -> Vec<(u64, u64, u32)> {
        let pieces = plan.take_live(map, u64::MAX, usize::MAX);
        pieces.iter().map(|piece| (piece.address, piece.length, piece.sequence)).collect()
    }

    fn plan(map: &ObjectMap) -> MovePlan {
        MovePlan::make(map, &|sequence| sequence == 1, &|sequence| sequence != 9, u64::MAX)
    }

    #[test]
    fn small_holes_are_plugged_and_large_ones_are_not() {
        let hole = HOLE_BYTES_MAX;
        let far = 100 + hole + 10 + hole + 1;
        let map = map(&[
            (0, 100, 1),
            (100, hole, 2),
            (100 + hole, 10, 1),
            (110 + hole, hole + 1, 2),
            (far, 10, 1),
        ]);
        let expected = [(0, 100, 1), (100, hole, 2), (100 + hole, 10, 1), (far, 10, 1)];
        assert_eq!(taken(&map, &mut plan(&map)), expected);
    }

    #[test]
    fn what_must_not_be_moved_plugs_no_hole() {
        let map = map(&[(0, 100, 1), (100, 10, 9), (110, 10, 1)]);
        assert_eq!(taken(&map, &mut plan(&map)), [(0, 100, 1), (110, 10, 1)]);
    }

    #[test]
    fn what_was_written_since_is_left_out() {
        let map = map(&[(0, 100, 1), (200, 100, 1)]);
        let mut plan = plan(&map);
        map.insert(50, 170, 5, 0, &mut |_, _| {});
        assert_eq!(taken(&map, &mut plan), [(0, 50, 1), (220, 80, 1)]);
        assert!(plan.is_done());
    }

    #[test]
    fn a_plan_is_carried_out_in_portions_and_cuts_long_pieces() {
        let map = map(&[(0, 100, 1), (200, 100, 1)]);
        let mut plan = plan(&map);
        assert_eq!(plan.bytes_left(), 200);
        let first = plan.take_live(&map, 130, usize::MAX);
        assert_eq!(
            first.iter().map(|piece| (piece.address, piece.length)).collect::<Vec<_>>(),
            [(0, 100), (200, 30)]
        );
        assert_eq!(plan.bytes_left(), 70);
        assert_eq!(
            plan.take_live(&map, 1000, 1)[0],
            MapExtent { address: 230, length: 70, sequence: 1, data_offset: 230 }
        );
        assert!(plan.is_done());
    }
}
