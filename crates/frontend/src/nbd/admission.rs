//! Which connections are admitted: so many of clients that have chosen their export, and so many in
//! their handshake. No peer can take all of either.
//!
//! A peer may have three times as many connections as are free: a single peer gets three quarters,
//! the next one three quarters of the rest, and the last are for new peers. Among handshakes, the
//! oldest one of the peer with most of them is evicted for the next.
//!
//! Invariant: pure; the registry holds the state. Not here: identifying peers (`peer_identity`).

use super::peer_identity::PeerIdentity;

/// A peer may have at most this many times the number of free connections.
const PER_FREE_CONNECTION_MAX: usize = 3;

/// Whether a peer gets one more of `connections_max` connections; `identities` are the peers of the
/// current clients.
pub(super) fn is_admitted(
    newcomer: PeerIdentity,
    identities: impl Iterator<Item = PeerIdentity>,
    connections_max: usize,
) -> bool {
    let (mut all, mut own) = (0, 0);
    for identity in identities {
        all += 1;
        own += usize::from(identity == newcomer);
    }
    // One peer alone gets three quarters of the connections, and the last go to peers that have
    // none (decision 0035).
    own < PER_FREE_CONNECTION_MAX * connections_max.saturating_sub(all)
}

/// The handshake (listed oldest first) that is evicted for a new one; `None` while there is room.
pub(super) fn evicted(
    newcomer: PeerIdentity,
    haggling: &[(u64, PeerIdentity)],
    handshakes_max: usize,
) -> Option<u64> {
    if haggling.len() < handshakes_max {
        return None;
    }
    let count = |identity: PeerIdentity| {
        haggling.iter().filter(|(_, other)| *other == identity).count()
            + usize::from(identity == newcomer)
    };
    let count_max = haggling.iter().map(|(_, identity)| count(*identity)).max()?;
    // If the newcomer would have most, its own oldest handshake is evicted.
    let is_own = count(newcomer) >= count_max;
    haggling
        .iter()
        .find(
            |(_, identity)| {
                if is_own { *identity == newcomer } else { count(*identity) == count_max }
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

    /// Whether it is admitted; then it is one more of them.
    fn enters(identities: &mut Vec<PeerIdentity>, identity: PeerIdentity, most: usize) -> bool {
        let is_admitted = is_admitted(identity, identities.iter().copied(), most);
        if is_admitted {
            identities.push(identity);
        }
        is_admitted
    }

    #[test]
    fn no_peer_takes_all_connections_and_the_last_are_for_peers_that_have_none() {
        let mut identities = Vec::new();
        let mut counts = Vec::new();
        for user in 0..20 {
            let identity = PeerIdentity::User(user);
            while enters(&mut identities, identity, 256) {}
            counts.push(identities.iter().filter(|other| **other == identity).count());
        }
        assert_eq!(counts[..4], [192, 48, 12, 3], "{counts:?}");
        assert_eq!(identities.len(), 256, "the last are not wasted");
        for connections_max in [1, 2] {
            let mut identities = Vec::new();
            while enters(&mut identities, PeerIdentity::Unknown, connections_max) {}
            assert_eq!(identities.len(), connections_max, "few are not shared");
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
