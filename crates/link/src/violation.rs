//! Violations of the protocol by a peer. One ends the connection with its reason, and affects
//! nothing else.
//!
//! Not here: packets that do not open, which are dropped and end nothing
//! (`session::PacketRefusal`).

use sawmill_format::FormatError;

/// Why the peer can no longer be trusted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Violation {
    /// A statement that breaks this rule.
    #[error("{0}")]
    Rule(&'static str),
    /// Bytes that are no statement.
    #[error("a statement cannot be decoded: {0}")]
    Undecodable(#[source] FormatError),
}

#[cfg(test)]
mod tests {
    use sawmill_format::link::statement::{Body, Statement};
    use sawmill_format::link::{HEADER_BYTES, Packet, PacketKind, TAIL_BYTES};

    use super::*;
    use crate::connection::{Connection, ConnectionEnd, PacketFill};
    use crate::halves::{SentPiece, SentPieces};
    use crate::session::Seals;

    struct NoPlaces;

    impl ConnectionEnd for NoPlaces {
        fn take(&self, _: &Statement<'_>) -> Result<(), Violation> {
            Ok(())
        }

        fn put(&self, _: u16, _: &mut Body<'_>, _: &mut SentPieces) -> PacketFill {
            PacketFill::All
        }

        fn lost(&self, _: &SentPiece) -> bool {
            false
        }
    }

    #[test]
    fn a_statement_that_cannot_be_decoded_is_reported_with_what_is_wrong_in_it() {
        const NO_STATEMENT: u8 = 0xff;
        let (near, far) = ([1; 32], [2; 32]);
        let peer = Seals::new(&near, &far).expect("keys");
        let seals = Seals::new(&far, &near).expect("keys");
        let length = HEADER_BYTES + 8 + TAIL_BYTES;
        let mut packet = vec![NO_STATEMENT; length];
        let header = Packet {
            kind: PacketKind::Sealed,
            length: length as u32,
            connection: 7,
            link: 0,
            number: 0,
        };
        header.encode(&mut packet);
        peer.seal(&mut packet).expect("sealed");
        let connection = Connection::new(7, seals, 1, 1, NoPlaces, 0);
        let violation = connection
            .receive(&header, &mut packet, 0, &mut |_| ())
            .expect_err("no such statement");
        assert!(matches!(violation, Violation::Undecodable(_)), "{violation}");
        assert!(violation.to_string().contains("kind"), "{violation}");
    }
}
