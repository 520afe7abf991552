//! Short proofs outside of connections. They show which key a hello uses, that a cookie or an
//! *unknown* was sent by a holder of the key, and that the sender of a hello receives at its
//! claimed address.
//!
//! All are HMAC-SHA256, truncated to what is sent. The key of the first three is derived from the
//! pre-shared key. An end without a key uses zeroes: there, a proof shows only that its maker has
//! seen the packet in question. The last one uses a secret of the target, which changes every two
//! minutes.
//!
//! Invariants: a proof of one kind is never valid as another kind. Proofs are compared in constant
//! time. Nothing here costs a key agreement.
//!
//! Not here: when a target is under load, and what follows from a proof (`crate::target`,
//! `crate::initiator`).

use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::hmac;
use aws_lc_rs::rand::SystemRandom;
use sawmill_format::link::PROOF_BYTES;
use zeroize::Zeroizing;

use super::handshake::token_of;
use super::key::KEY_BYTES;
use super::{PreSharedKey, Security};
use crate::carrier::Peer;
use crate::clock::SECOND;

const PURPOSE: &[u8] = b"sawmill link proofs 1";
const HINT: u8 = 1;
const COOKIE: u8 = 2;
const UNKNOWN: u8 = 3;
const CONNECTION: u8 = 4;

/// A proof.
pub(crate) type Proof = [u8; PROOF_BYTES];

/// Makes and checks the proofs of one key.
pub(crate) struct Proofs(hmac::Key);

fn cut<const N: usize>(tag: &hmac::Tag) -> [u8; N] {
    std::array::from_fn(|index| tag.as_ref()[index])
}

fn is_same(expected: &[u8], received: &[u8]) -> bool {
    verify_slices_are_equal(expected, received).is_ok()
}

impl Proofs {
    /// The proofs of an end with this security.
    pub(crate) fn new(security: &Security) -> Self {
        match security {
            Security::Key(key) => Self::of_key(key),
            Security::Insecure => Self(hmac::Key::new(hmac::HMAC_SHA256, &[0; KEY_BYTES])),
        }
    }

    fn of_key(key: &PreSharedKey) -> Self {
        let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key.bytes()), PURPOSE);
        let key_bytes = Zeroizing::new(cut::<KEY_BYTES>(&tag));
        Self(hmac::Key::new(hmac::HMAC_SHA256, &key_bytes[..]))
    }

    fn sign(&self, kind: u8, inputs: &[&[u8]]) -> hmac::Tag {
        let mut context = hmac::Context::with_key(&self.0);
        context.update(&[kind]);
        inputs.iter().for_each(|input| context.update(input));
        context.sign()
    }

    /// The hint that identifies a greeting's key: a different number for each greeting, never zero.
    pub(crate) fn hint(&self, message: &[u8]) -> u32 {
        u32::from_le_bytes(cut(&self.sign(HINT, &[token_of(message)]))).max(1)
    }

    /// Proves that `cookie` comes from a holder of the key, for the greeting `message` on link
    /// `link`.
    pub(crate) fn of_cookie(&self, message: &[u8], link: u8, cookie: &Proof) -> Proof {
        cut(&self.sign(COOKIE, &[token_of(message), &[link], cookie]))
    }

    /// Whether `proof` is valid for these arguments.
    pub(crate) fn is_of_cookie(
        &self,
        message: &[u8],
        link: u8,
        cookie: &Proof,
        proof: &Proof,
    ) -> bool {
        is_same(&self.of_cookie(message, link, cookie), proof)
    }

    /// Proves that a holder of the key does not know connection `connection`, which a packet with
    /// this number claimed.
    pub(crate) fn of_unknown(&self, connection: u64, link: u8, number: u64) -> Proof {
        cut(&self.sign(UNKNOWN, &[&connection.to_le_bytes(), &[link], &number.to_le_bytes()]))
    }

    /// Whether `proof` is valid for these arguments.
    pub(crate) fn is_of_unknown(
        &self,
        connection: u64,
        link: u8,
        number: u64,
        proof: &[u8],
    ) -> bool {
        is_same(&self.of_unknown(connection, link, number), proof)
    }

    /// A number for a connection. A later target with the same keys recognizes from it which of its
    /// keys made the connection; others cannot.
    pub(crate) fn connection(&self, random: u64) -> u64 {
        let random = random.max(1) << 16;
        random | u64::from(self.tag_of(random))
    }

    /// Whether this key made a connection's number. A number without this tag may match by chance.
    pub(crate) fn is_connection(&self, connection: u64) -> bool {
        connection as u16 == self.tag_of(connection)
    }

    fn tag_of(&self, connection: u64) -> u16 {
        u16::from_le_bytes(cut(&self.sign(CONNECTION, &[&(connection >> 16).to_le_bytes()])))
    }
}

/// How long a secret makes cookies. It stays valid for as long again.
const SECRET_EVERY_NS: u64 = 120 * SECOND;

/// Makes and recognizes cookies, without state about their owners.
#[derive(Default)]
pub(crate) struct CookieSecrets {
    /// The newest secret with the time it was made, and the one before.
    secrets: [Option<(hmac::Key, u64)>; 2],
}

impl CookieSecrets {
    fn renew(&mut self, now: u64) {
        let is_new = |secret: &(hmac::Key, u64)| now.saturating_sub(secret.1) < SECRET_EVERY_NS;
        if self.secrets[0].as_ref().is_some_and(is_new) {
            return;
        }
        let new_key = hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new());
        let before = self.secrets[0]
            .take()
            .filter(|secret| now.saturating_sub(secret.1) < 2 * SECRET_EVERY_NS);
        // A machine without randomness makes no cookies; it greets no peer either.
        self.secrets = [new_key.ok().map(|key| (key, now)), before];
    }

    /// The cookie for the sender at `peer` of the greeting `message`.
    pub(crate) fn cookie(&mut self, peer: &Peer, message: &[u8], now: u64) -> Option<Proof> {
        self.renew(now);
        self.secrets[0].as_ref().map(|(secret, _)| cookie_of(secret, peer, message))
    }

    /// Whether `cookie` was made here recently, for this greeting from this peer.
    pub(crate) fn is_ours(
        &mut self,
        cookie: &Proof,
        peer: &Peer,
        message: &[u8],
        now: u64,
    ) -> bool {
        self.renew(now);
        let mut secrets = self.secrets.iter().flatten();
        secrets.any(|(secret, _)| is_same(&cookie_of(secret, peer, message), cookie))
    }
}

fn cookie_of(secret: &hmac::Key, peer: &Peer, message: &[u8]) -> Proof {
    let mut context = hmac::Context::with_key(secret);
    match peer {
        Peer::Udp(address) => {
            match address.ip() {
                std::net::IpAddr::V4(ip) => context.update(&ip.octets()),
                std::net::IpAddr::V6(ip) => context.update(&ip.octets()),
            }
            context.update(&address.port().to_le_bytes());
        }
        Peer::Ethernet(address) => context.update(address),
        Peer::Stream => {}
    }
    context.update(token_of(message));
    cut(&context.sign())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESSAGE: [u8; 116] = [7; 116];

    fn peer(port: u16) -> Peer {
        Peer::Udp(([10, 0, 0, 1], port).into())
    }

    #[test]
    fn a_cookie_is_of_its_address_its_hello_and_its_time() {
        let mut cookies = CookieSecrets::default();
        let cookie = cookies.cookie(&peer(1), &MESSAGE, 0).expect("randomness");
        assert!(cookies.is_ours(&cookie, &peer(1), &MESSAGE, SECOND));
        assert!(!cookies.is_ours(&cookie, &peer(2), &MESSAGE, SECOND), "another port");
        assert!(!cookies.is_ours(&cookie, &Peer::Ethernet([10, 0, 0, 1, 0, 1]), &MESSAGE, SECOND));
        let mut other = MESSAGE;
        other[4] ^= 1;
        assert!(!cookies.is_ours(&cookie, &peer(1), &other, SECOND), "another hello");
        assert!(
            !CookieSecrets::default().is_ours(&cookie, &peer(1), &MESSAGE, SECOND),
            "another target"
        );
        assert!(cookies.is_ours(&cookie, &peer(1), &MESSAGE, SECRET_EVERY_NS), "the secret before");
        assert!(!cookies.is_ours(&cookie, &peer(1), &MESSAGE, 2 * SECRET_EVERY_NS), "too old");
        let mut idle_secrets = CookieSecrets::default();
        let cookie = idle_secrets.cookie(&peer(1), &MESSAGE, 0).expect("randomness");
        assert!(
            !idle_secrets.is_ours(&cookie, &peer(1), &MESSAGE, 3 * SECRET_EVERY_NS),
            "too old, though nothing came"
        );
    }

    #[test]
    fn a_proof_is_of_one_key_and_one_thing() {
        let key = |byte| Proofs::new(&Security::Key(PreSharedKey::from_bytes([byte; 32])));
        let (one, other, none) = (key(1), key(2), Proofs::new(&Security::Insecure));
        let proof = one.of_unknown(9, 1, 7);
        assert!(one.is_of_unknown(9, 1, 7, &proof));
        assert!(!one.is_of_unknown(8, 1, 7, &proof) && !one.is_of_unknown(9, 0, 7, &proof));
        assert!(!one.is_of_unknown(9, 1, 6, &proof) && !one.is_of_unknown(9, 1, 7, &proof[..15]));
        assert!(!other.is_of_unknown(9, 1, 7, &proof) && !none.is_of_unknown(9, 1, 7, &proof));
        assert!(!one.is_of_unknown(9, 1, 7, &[]), "no proof is none");
        let cookie = one.of_cookie(&MESSAGE, 1, &[3; 16]);
        assert!(one.is_of_cookie(&MESSAGE, 1, &[3; 16], &cookie));
        assert!(!one.is_of_cookie(&MESSAGE, 2, &[3; 16], &cookie));
        assert!(!other.is_of_cookie(&MESSAGE, 1, &[3; 16], &cookie));
        assert_ne!(one.hint(&MESSAGE), other.hint(&MESSAGE));
        assert!(
            one.is_connection(one.connection(12345)) && !other.is_connection(one.connection(12345))
        );
    }
}
