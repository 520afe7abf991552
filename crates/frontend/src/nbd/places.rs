//! Places for connections: some for clients that have chosen their export, others for those in
//! their handshake. No peer can take all of either.
//!
//! A peer may have three times as many places as are left: a single peer gets three quarters, the
//! next one three quarters of the rest, and the last places are for new peers. Among handshakes,
//! the oldest one of the peer with most of them is evicted for the next.
//!
//! Invariant: pure; the registry holds the state. Not here: identifying peers (`peer_identity`).

use super::peer_identity::PeerIdentity;

/// A peer may have at most this many times the number of free places.
const PLACES_PER_FREE_PLACE_MAX: usize = 3;

/// Whether a peer gets one more of `places` places; `identities` are the peers of the current
/// clients.
pub(super) fn has_place(
    newcomer: PeerIdentity,
    identities: impl Iterator<Item = PeerIdentity>,
    places: usize,
) -> bool {
    let (mut all, mut own) = (0, 0);
    for identity in identities {
        all += 1;
        own += usize::from(identity == newcomer);
    }
    // One peer alone gets three quarters of the places, and the last places go to peers that have
    // none (decision 0035).
    own < PLACES_PER_FREE_PLACE_MAX * places.saturating_sub(all)
}

/// The handshake (listed oldest first) that is evicted for a new one; `None` while there is room.
pub(super) fn evicted(
    newcomer: PeerIdentity,
    haggling: &[(u64, PeerIdentity)],
    places: usize,
) -> Option<u64> {
    if haggling.len() < places {
        return None;
    }
    let count = |identity: PeerIdentity| {
        haggling.iter().filter(|(_, other)| *other == identity).count()
            + usize::from(identity == newcomer)
    };
    let max_count = haggling.iter().map(|(_, identity)| count(*identity)).max()?;
    // If the newcomer would have most, its own oldest handshake is evicted.
    let is_own = count(newcomer) >= max_count;
    haggling
        .iter()
        .find(
            |(_, identity)| {
                if is_own { *identity == newcomer } else { count(*identity) == max_count }
            },
        )
        // A newcomer without a handshake in the list may count as the one with most, if all have
        // one each. Then the oldest of all goes.
        .or(haggling.first())
        .map(|(id, _)| *id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admitted(identities: &mut Vec<PeerIdentity>, identity: PeerIdentity, places: usize) -> bool {
        let has_place = has_place(identity, identities.iter().copied(), places);
        if has_place {
            identities.push(identity);
        }
        has_place
    }

    #[test]
    fn no_peer_takes_all_places_and_the_last_are_for_peers_that_have_none() {
        let mut identities = Vec::new();
        let mut counts = Vec::new();
        for user in 0..20 {
            let identity = PeerIdentity::User(user);
            while admitted(&mut identities, identity, 256) {}
            counts.push(identities.iter().filter(|other| **other == identity).count());
        }
        assert_eq!(counts[..4], [192, 48, 12, 3], "{counts:?}");
        assert_eq!(identities.len(), 256, "the last places are not wasted");
        for places in [1, 2] {
            let mut identities = Vec::new();
            while admitted(&mut identities, PeerIdentity::Unknown, places) {}
            assert_eq!(identities.len(), places, "few places are not shared");
        }
    }

    #[test]
    fn the_peer_with_most_unfinished_handshakes_makes_room() {
        let (many, one, new) =
            (PeerIdentity::User(1), PeerIdentity::User(2), PeerIdentity::User(3));
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
