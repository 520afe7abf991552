//! Noise_NNpsk0_25519_AESGCM_SHA256: the state machine is `snow`'s, the arithmetic is
//! `aws-lc-rs`'s.
//!
//! With this, the link adds only one crate to what TLS to the object stores needs anyway, and each
//! primitive exists once. Only the handshake uses this; packets use [`super::seal`].
//!
//! Invariants: there is one choice of each primitive; any other is refused. If sealing fails, the
//! message has zeroes in place of the payload, never plain bytes. A shared secret of only zeroes is
//! an error.
//!
//! Not here: the content of the messages and their framing (`handshake`).

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::{agreement, digest, rand};
use snow::Error;
use snow::params::{CipherChoice, DHChoice, HashChoice};
use snow::resolvers::CryptoResolver;
use snow::types::{Cipher, Dh, Hash, Random};
use snow::{Builder, HandshakeState};
use zeroize::Zeroizing;

use super::PacketRefusal;
use super::key::PreSharedKey;

/// The complete choice of cryptography. Another choice is a new version of the handshake.
const PROTOCOL: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";
/// The pattern mixes in the key before the first message.
const KEY_AT: u8 = 0;
/// Bytes of an AES-GCM tag.
const TAG_BYTES: usize = 16;

/// The end of the handshake.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum HandshakeSide {
    /// Sends the first message.
    Initiator,
    /// Answers it.
    Target,
}

/// A handshake that has sent nothing yet. `prologue` is what both ends must agree on in advance.
pub(super) fn begin(
    key: &PreSharedKey,
    prologue: &[u8],
    side: HandshakeSide,
) -> Result<HandshakeState, PacketRefusal> {
    start(key, prologue, side, None).map_err(|_| PacketRefusal::Broken)
}

fn start(
    key: &PreSharedKey,
    prologue: &[u8],
    side: HandshakeSide,
    ephemeral: Option<&[u8]>,
) -> Result<HandshakeState, Error> {
    let mut builder = Builder::with_resolver(PROTOCOL.parse()?, Box::new(Primitives))
        .psk(KEY_AT, key.bytes())?
        .prologue(prologue)?;
    if let Some(bytes) = ephemeral {
        builder = builder.fixed_ephemeral_key_for_testing_only(bytes);
    }
    match side {
        HandshakeSide::Initiator => builder.build_initiator(),
        HandshakeSide::Target => builder.build_responder(),
    }
}

struct Primitives;

impl CryptoResolver for Primitives {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        Some(Box::new(SystemRandom))
    }

    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        matches!(choice, DHChoice::Curve25519).then(|| Box::new(X25519::default()) as Box<dyn Dh>)
    }

    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        matches!(choice, HashChoice::SHA256).then(|| Box::new(Sha256::default()) as Box<dyn Hash>)
    }

    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
        matches!(choice, CipherChoice::AESGCM).then(|| Box::new(AesGcm(None)) as Box<dyn Cipher>)
    }
}

struct SystemRandom;

impl Random for SystemRandom {
    fn try_fill_bytes(&mut self, out: &mut [u8]) -> Result<(), Error> {
        rand::fill(out).map_err(|_| Error::Rng)
    }
}

/// A key pair of one handshake.
#[derive(Default)]
struct X25519 {
    secret: Zeroizing<[u8; 32]>,
    public: [u8; 32],
    pair: Option<agreement::PrivateKey>,
}

impl Dh for X25519 {
    fn name(&self) -> &'static str {
        "25519"
    }

    fn pub_len(&self) -> usize {
        32
    }

    fn priv_len(&self) -> usize {
        32
    }

    fn set(&mut self, secret: &[u8]) {
        *self = Self::default();
        let Ok(pair) = agreement::PrivateKey::from_private_key(&agreement::X25519, secret) else {
            return;
        };
        let Ok(public) = pair.compute_public_key() else { return };
        self.secret.copy_from_slice(secret);
        self.public.copy_from_slice(public.as_ref());
        self.pair = Some(pair);
    }

    fn generate(&mut self, random: &mut dyn Random) -> Result<(), Error> {
        let mut secret = Zeroizing::new([0; 32]);
        random.try_fill_bytes(&mut secret[..])?;
        self.set(&secret[..]);
        self.pair.is_some().then_some(()).ok_or(Error::Dh)
    }

    fn pubkey(&self) -> &[u8] {
        &self.public
    }

    fn privkey(&self) -> &[u8] {
        &self.secret[..]
    }

    /// Fails if the result would be all zeroes: a peer with the key must not determine the result
    /// alone.
    fn dh(&self, peer: &[u8], out: &mut [u8]) -> Result<(), Error> {
        let pair = self.pair.as_ref().ok_or(Error::Dh)?;
        // The buffer of a peer's key may be longer than the key.
        let (peer, out) = (peer.get(..32).ok_or(Error::Dh)?, out.get_mut(..32).ok_or(Error::Dh)?);
        let peer = agreement::UnparsedPublicKey::new(&agreement::X25519, peer);
        agreement::agree(pair, peer, Error::Dh, |shared| {
            out.copy_from_slice(shared);
            Ok(())
        })
    }
}

struct Sha256(digest::Context);

impl Default for Sha256 {
    fn default() -> Self {
        Self(digest::Context::new(&digest::SHA256))
    }
}

impl Hash for Sha256 {
    fn name(&self) -> &'static str {
        "SHA256"
    }

    fn block_len(&self) -> usize {
        64
    }

    fn hash_len(&self) -> usize {
        32
    }

    fn reset(&mut self) {
        *self = Self::default();
    }

    fn input(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn result(&mut self, out: &mut [u8]) {
        out[..32].copy_from_slice(std::mem::take(self).0.finish().as_ref());
    }
}

/// AES-256-GCM as Noise uses it: the nonce is a big-endian counter.
struct AesGcm(Option<LessSafeKey>);

fn nonce_of(count: u64) -> Nonce {
    let mut nonce = [0; 12];
    nonce[4..].copy_from_slice(&count.to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}

impl Cipher for AesGcm {
    fn name(&self) -> &'static str {
        "AESGCM"
    }

    fn set(&mut self, key: &[u8; 32]) {
        self.0 = UnboundKey::new(&AES_256_GCM, key).ok().map(LessSafeKey::new);
    }

    fn encrypt(&self, count: u64, beside: &[u8], plain: &[u8], out: &mut [u8]) -> usize {
        let bytes = plain.len() + TAG_BYTES;
        let (body, tag) = out[..bytes].split_at_mut(plain.len());
        body.copy_from_slice(plain);
        let sealed = self.0.as_ref().and_then(|key| {
            key.seal_in_place_separate_tag(nonce_of(count), Aad::from(beside), body).ok()
        });
        match sealed {
            Some(made) => tag.copy_from_slice(made.as_ref()),
            // `snow` allows no error here. Nothing is sent in clear; the peer will refuse it.
            None => out[..bytes].fill(0),
        }
        bytes
    }

    fn decrypt(
        &self,
        count: u64,
        beside: &[u8],
        sealed: &[u8],
        out: &mut [u8],
    ) -> Result<usize, Error> {
        let key = self.0.as_ref().ok_or(Error::Decrypt)?;
        let (body, tag) = sealed.split_last_chunk::<TAG_BYTES>().ok_or(Error::Decrypt)?;
        let out = out.get_mut(..body.len()).ok_or(Error::Decrypt)?;
        key.open_separate_gather(nonce_of(count), Aad::from(beside), body, tag, out)
            .map_err(|_| Error::Decrypt)?;
        Ok(body.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(hex: &str) -> Vec<u8> {
        (0..hex.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
            .collect()
    }

    /// The published test vector of this protocol (the `cacophony` set, against which other
    /// implementations of Noise are checked too).
    #[test]
    fn the_messages_and_keys_are_those_of_the_published_vector() {
        let key = PreSharedKey::from_bytes(*b"This is my Austrian perspective!");
        let initial = bytes_of("893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a");
        let replying = bytes_of("bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b");
        let mut initiator =
            start(&key, b"John Galt", HandshakeSide::Initiator, Some(&initial)).unwrap();
        let mut target = start(&key, b"John Galt", HandshakeSide::Target, Some(&replying)).unwrap();
        let (mut message, mut payload) = ([0; 100], [0; 100]);

        let bytes = initiator.write_message(b"Ludwig von Mises", &mut message).unwrap();
        let first = "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944\
                     7c37a89fc17813788d30df2d59501d6066f5f8aecc3406bbd9829f2d24a531b1";
        assert_eq!(message[..bytes], bytes_of(first));
        let bytes = target.read_message(&message[..bytes], &mut payload).unwrap();
        assert_eq!(&payload[..bytes], b"Ludwig von Mises");

        let bytes = target.write_message(b"Murray Rothbard", &mut message).unwrap();
        let second = "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f1448088432\
                      f29d79368ef9de4e1ae7a362fb05bf0ad668e026bf5714554497b3a720461";
        assert_eq!(message[..bytes], bytes_of(second));
        let bytes = initiator.read_message(&message[..bytes], &mut payload).unwrap();
        assert_eq!(&payload[..bytes], b"Murray Rothbard");

        let hash = "9f3b1f9afd7767767b5b9d1069844a6154fdbdcc36dfb3e31c0fffc5c973d530";
        assert_eq!(initiator.get_handshake_hash(), bytes_of(hash));
        let keys = initiator.dangerously_get_raw_split();
        assert_eq!(keys, target.dangerously_get_raw_split());
        // The vector's first two packets: each key sealed one of them, the initiator's key the
        // first.
        for (key, plain, sealed) in [
            (keys.0, &b"F. A. Hayek"[..], "7c01e898a6201f36aecee532e29cd0b7f8ffa29d3366ad0dce39a6"),
            (keys.1, &b"Carl Menger"[..], "a9ff535aace3db6a1da1a7fb00fe2de2622bb373abad9fb42c00e0"),
        ] {
            let mut cipher = AesGcm(None);
            cipher.set(&key);
            let bytes = cipher.encrypt(0, &[], plain, &mut message);
            assert_eq!(message[..bytes], bytes_of(sealed));
        }
    }

    #[test]
    fn a_public_key_that_fixes_the_outcome_is_refused() {
        let mut pair = X25519::default();
        pair.generate(&mut SystemRandom).unwrap();
        assert_eq!(pair.dh(&[0; 32], &mut [0; 32]), Err(Error::Dh));
        assert_eq!(pair.dh(&[0; 31], &mut [0; 32]), Err(Error::Dh));
        assert_eq!(X25519::default().dh(&[9; 32], &mut [0; 32]), Err(Error::Dh));
    }

    #[test]
    fn two_handshakes_never_share_a_key_pair() {
        let pair = || {
            let mut pair = X25519::default();
            pair.generate(&mut SystemRandom).unwrap();
            pair.pubkey().to_vec()
        };
        assert_ne!(pair(), pair());
    }

    #[test]
    fn a_cipher_without_its_key_sends_nothing_in_clear() {
        let mut out = [0xee; 20];
        assert_eq!(AesGcm(None).encrypt(0, &[], b"mine", &mut out), 20);
        assert_eq!(out, [0; 20]);
        assert_eq!(AesGcm(None).decrypt(0, &[], &out, &mut [0; 4]), Err(Error::Decrypt));
    }
}
