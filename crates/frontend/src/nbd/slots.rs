//! Slots for connections: some for clients that have chosen their export, others for those in
//! their handshake. No peer can take all of either.
//!
//! A peer may have three times as many slots as are left: a single peer gets three quarters, the
//! next one three quarters of the rest, and the last slots are for new peers. Among handshakes,
//! the oldest one of the peer with most of them is evicted for the next.
//!
//! Invariant: pure; the registry holds the state. Not here: identifying peers (`origin`).

use super::origin::Origin;

/// A peer may have at most this many times the number of free slots.
const SLOTS_PER_FREE_SLOT_MAX: usize = 3;

/// Whether a peer gets one more slot, with `taken` slots in use; `origins` are the peers of the
/// current clients.
pub(super) fn has_slot(
    newcomer: Origin,
    origins: impl Iterator<Item = Origin>,
    slots: usize,
) -> bool {
    let (mut all, mut own) = (0, 0);
    for origin in origins {
        all += 1;
        own += usize::from(origin == newcomer);
    }
    // One peer alone gets three quarters of the slots, and the last slots go to peers that have
    // none (decision 0035).
    own < SLOTS_PER_FREE_SLOT_MAX * slots.saturating_sub(all)
}

/// The handshake (listed oldest first) that is evicted for a new one; `None` while there is room.
pub(super) fn evicted(newcomer: Origin, haggling: &[(u64, Origin)], slots: usize) -> Option<u64> {
    if haggling.len() < slots {
        return None;
    }
    let count = |origin: Origin| {
        haggling.iter().filter(|(_, other)| *other == origin).count()
            + usize::from(origin == newcomer)
    };
    let max_count = haggling.iter().map(|(_, origin)| count(*origin)).max()?;
    // If the newcomer would have most, its own oldest handshake is evicted.
    let is_own = count(newcomer) >= max_count;
    haggling
        .iter()
        .find(|(_, origin)| if is_own { *origin == newcomer } else { count(*origin) == max_count })
        // A newcomer without a handshake in the list may count as the one with most, if all have
        // one each. Then the oldest of all goes.
        .or(haggling.first())
        .map(|(id, _)| *id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admitted(origins: &mut Vec<Origin>, origin: Origin, slots: usize) -> bool {
        let has_slot = has_slot(origin, origins.iter().copied(), slots);
        if has_slot {
            origins.push(origin);
        }
        has_slot
    }

    #[test]
    fn no_peer_takes_all_places_and_the_last_are_for_peers_that_have_none() {
        let mut origins = Vec::new();
        let mut counts = Vec::new();
        for user in 0..20 {
            let origin = Origin::User(user);
            while admitted(&mut origins, origin, 256) {}
            counts.push(origins.iter().filter(|other| **other == origin).count());
        }
        assert_eq!(counts[..4], [192, 48, 12, 3], "{counts:?}");
        assert_eq!(origins.len(), 256, "the last slots are not wasted");
        for slots in [1, 2] {
            let mut origins = Vec::new();
            while admitted(&mut origins, Origin::Unknown, slots) {}
            assert_eq!(origins.len(), slots, "few slots are not shared");
        }
    }

    #[test]
    fn the_peer_with_most_unfinished_handshakes_makes_room() {
        let (many, one, new) = (Origin::User(1), Origin::User(2), Origin::User(3));
        let haggling = [(1, one), (2, many), (3, many), (4, many)];
        assert_eq!(evicted(new, &haggling, 5), None);
        assert_eq!(evicted(new, &haggling, 4), Some(2));
        assert_eq!(evicted(many, &haggling, 4), Some(2));
        assert_eq!(evicted(one, &haggling, 4), Some(2), "two are less than three");
        let even = [(1, one), (2, many)];
        assert_eq!(evicted(one, &even, 2), Some(1), "the peer that would have most gives way");
        assert_eq!(evicted(new, &even, 2), Some(1));
    }
}
