//! Runs of areas as pieces of the volume. Invariant: pieces follow one another without a gap, holes
//! included, and two that continue each other are one. Not here: which runs there are (`object`).

use super::runs::MapRun;
use super::{Location, MapPiece};

/// Turns mapped runs in order into pieces: fills the holes and joins what continues.
pub(super) struct MapPieces<'a> {
    /// Everything before this has been visited or is pending.
    at: u64,
    pending: Option<(u64, u64, Location)>,
    visit: &'a mut dyn FnMut(MapPiece),
}

impl<'a> MapPieces<'a> {
    /// The pieces from `address` on.
    pub(super) fn from(address: u64, visit: &'a mut dyn FnMut(MapPiece)) -> MapPieces<'a> {
        MapPieces { at: address, pending: None, visit }
    }

    /// `run` of the area that begins at `base` follows.
    pub(super) fn mapped(&mut self, base: u64, run: MapRun) {
        let address = base + u64::from(run.start);
        let length = u64::from(run.length);
        match &mut self.pending {
            Some((start, bytes, location))
                if *start + *bytes == address
                    && location.sequence == run.location.sequence
                    && u64::from(location.data_offset) + *bytes
                        == u64::from(run.location.data_offset) =>
            {
                *bytes += length;
            }
            _ => {
                self.flush(address);
                self.pending = Some((address, length, run.location));
            }
        }
        self.at = address + length;
    }

    /// Visits what is pending and the hole up to `until`.
    fn flush(&mut self, until: u64) {
        if let Some((address, length, location)) = self.pending.take() {
            (self.visit)(MapPiece { address, length, location: Some(location) });
        }
        if self.at < until {
            (self.visit)(MapPiece { address: self.at, length: until - self.at, location: None });
        }
    }

    /// Nothing follows up to `end`.
    pub(super) fn finish(mut self, end: u64) {
        self.flush(end);
    }
}
