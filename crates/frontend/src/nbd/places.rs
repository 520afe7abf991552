//! Places for connections: some for clients that have chosen their export, others for those that still
//! haggle. Nobody can take all of either.
//!
//! A peer's share of the places is three times what is left of them: one alone has three quarters, the next
//! has three quarters of what is left, and the last places are for those who have none yet. Of those who
//! haggle the oldest of the peer with most of them makes room for the next.
//!
//! Invariant: pure; the registry is the truth. Not here: who a peer is (`origin`).

use super::origin::Origin;

/// A peer has at most this many times the places that are left.
const SHARE: usize = 3;

/// Whether a peer that has places for `taken` of all the clients gets one more; `origins` are those of the
/// clients there are.
pub(super) fn has_place(newcomer: Origin, origins: impl Iterator<Item = Origin>, places: usize) -> bool {
    let (mut all, mut own) = (0, 0);
    for origin in origins {
        all += 1;
        own += usize::from(origin == newcomer);
    }
    own < SHARE * places.saturating_sub(all)
}

/// Which of those who haggle, oldest first, makes room for a newcomer; `None` while there is room.
pub(super) fn evicted(newcomer: Origin, haggling: &[(u64, Origin)], slots: usize) -> Option<u64> {
    if haggling.len() < slots {
        return None;
    }
    let count = |origin: Origin| {
        haggling.iter().filter(|(_, other)| *other == origin).count() + usize::from(origin == newcomer)
    };
    let most = haggling.iter().map(|(_, origin)| count(*origin)).max()?;
    // Whoever is about to have most gives way himself.
    let own = count(newcomer) >= most;
    haggling
        .iter()
        .find(|(_, origin)| if own { *origin == newcomer } else { count(*origin) == most })
        .or(haggling.first())
        .map(|(id, _)| *id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admitted(taken: &mut Vec<Origin>, origin: Origin, places: usize) -> bool {
        let fits = has_place(origin, taken.iter().copied(), places);
        if fits {
            taken.push(origin);
        }
        fits
    }

    #[test]
    fn no_peer_takes_all_places_and_the_last_are_for_those_who_have_none() {
        let mut taken = Vec::new();
        let mut counts = Vec::new();
        for user in 0..20 {
            let origin = Origin::User(user);
            while admitted(&mut taken, origin, 256) {}
            counts.push(taken.iter().filter(|other| **other == origin).count());
        }
        assert_eq!(counts[..4], [192, 48, 12, 3], "{counts:?}");
        assert_eq!(taken.len(), 256, "the last places are not wasted");
        for places in [1, 2] {
            let mut taken = Vec::new();
            while admitted(&mut taken, Origin::Unknown, places) {}
            assert_eq!(taken.len(), places, "few places are nobody's to share");
        }
    }

    #[test]
    fn of_those_who_haggle_the_peer_with_most_makes_room() {
        let (many, one, new) = (Origin::User(1), Origin::User(2), Origin::User(3));
        let haggling = [(1, one), (2, many), (3, many), (4, many)];
        assert_eq!(evicted(new, &haggling, 5), None);
        assert_eq!(evicted(new, &haggling, 4), Some(2));
        assert_eq!(evicted(many, &haggling, 4), Some(2));
        assert_eq!(evicted(one, &haggling, 4), Some(2), "two are less than three");
        let even = [(1, one), (2, many)];
        assert_eq!(evicted(one, &even, 2), Some(1), "who would have most gives way himself");
        assert_eq!(evicted(new, &even, 2), Some(1));
    }
}
