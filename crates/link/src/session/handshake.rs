//! Two messages that make the keys of a connection: the initiator's greeting, and the target's
//! answer.
//!
//! A message is {suite u8, step u8, reason u8, zero u8} and what the suite makes of its payload.
//! Suite 2 is Noise NNpsk0 (`noise`): the pre-shared key authenticates both ends. The ephemeral
//! keys are destroyed after the handshake, so a pre-shared key that is stolen later decrypts no
//! past traffic. Suite 1 is `--insecure`, with the same shape: 32 random bytes that the answer must
//! repeat, the payload in clear, a checksum. The [`Security`] of an end determines its suite.
//! Nothing is negotiated, so nothing can be downgraded.
//!
//! Invariants: a payload is returned only after its message proved the key. A refused message
//! leaves a [`Greeting`] as it was, so an attacker cannot spoil a handshake by answering first.
//! The payload of the first message may be a replay: it proves that a holder of the key sent it at
//! some time, not now. So a target acts on it only when the first packet opened (see
//! `crate::target`).
//!
//! Snow's own state (a copy of the pre-shared key, the chaining key) is freed but not overwritten
//! when a handshake ends; our keys are.
//!
//! Not here: the content of payloads and prologue, retransmission, timers.

use snow::HandshakeState;
use zeroize::Zeroizing;

use super::noise::{self, HandshakeSide};
use super::{PacketRefusal, Seals, Security};
use sawmill_format::crc::Crc32c;

/// The bytes of a message besides its payload.
pub const HANDSHAKE_BYTES: usize = HEAD_BYTES + TOKEN_BYTES + TAIL_BYTES;
/// The longest message, a limit of Noise.
pub const MESSAGE_BYTES_MAX: usize = 65535;

const HEAD_BYTES: usize = 4;
/// The bytes of Noise's ephemeral public key, or of what replaces it in clear.
pub(crate) const TOKEN_BYTES: usize = 32;
const TAIL_BYTES: usize = 16;

const INSECURE: u8 = 1;
const SECURE: u8 = 2;

const GREETING: u8 = 1;
const ANSWER: u8 = 2;
const REFUSAL: u8 = 3;

/// An initiator's handshake that has sent its greeting and waits for the answer.
pub struct Greeting(GreetingState);

enum GreetingState {
    Secure(Box<HandshakeState>),
    Insecure { prologue: Vec<u8>, token: [u8; TOKEN_BYTES] },
    Finished,
}

impl std::fmt::Debug for Greeting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match &self.0 {
            GreetingState::Secure(_) => "Greeting(secure)",
            GreetingState::Insecure { .. } => "Greeting(insecure)",
            GreetingState::Finished => "Greeting(finished)",
        })
    }
}

impl Greeting {
    /// Writes the first message with `payload` into `out` and returns its length. Both ends must
    /// have the same `prologue`, the name and the version of the protocol, which is authenticated
    /// but not sent.
    ///
    /// # Errors
    /// [`PacketRefusal::Room`], [`PacketRefusal::Broken`].
    pub fn new(
        security: &Security,
        prologue: &[u8],
        payload: &[u8],
        out: &mut [u8],
    ) -> Result<(Self, usize), PacketRefusal> {
        let bytes = check_room(payload, out)?;
        let head = [suite_of(security), GREETING, 0, 0];
        let state = match security {
            Security::Key(key) => {
                let mut noise = noise::begin(key, prologue, HandshakeSide::Initiator)?;
                write_noise(&mut noise, head, payload, &mut out[..bytes])?;
                GreetingState::Secure(Box::new(noise))
            }
            Security::Insecure => {
                let mut token = [0; TOKEN_BYTES];
                aws_lc_rs::rand::fill(&mut token).map_err(|_| PacketRefusal::Broken)?;
                write_clear(prologue, head, &token, payload, &mut out[..bytes]);
                GreetingState::Insecure { prologue: prologue.to_vec(), token }
            }
        };
        Ok((Self(state), bytes))
    }

    /// Reads the second message. Returns the keys of this connection, and the target's payload.
    ///
    /// # Errors
    /// All errors except [`PacketRefusal::Finished`] leave the handshake open. None is
    /// authenticated: a stranger can cause it. So keep waiting, and report the last one if no
    /// answer arrives. A target's refusal ([`refusal`]) becomes the reason that both ends see:
    /// [`PacketRefusal::PeerInsecure`], [`PacketRefusal::PeerSecure`], [`PacketRefusal::Unproven`],
    /// [`PacketRefusal::Unknown`].
    pub fn finish(&mut self, message: &[u8]) -> Result<(Seals, Vec<u8>), PacketRefusal> {
        let result = match &mut self.0 {
            GreetingState::Finished => return Err(PacketRefusal::Finished),
            GreetingState::Secure(noise) => {
                let payload = read_noise(noise, check_head(message, SECURE, ANSWER)?)?;
                (seals_of(noise, HandshakeSide::Initiator)?, payload)
            }
            GreetingState::Insecure { prologue, token } => {
                check_head(message, INSECURE, ANSWER)?;
                let (received_token, payload) = read_clear(prologue, message)?;
                if received_token != token {
                    return Err(PacketRefusal::NotOurs);
                }
                (Seals::Checksum, payload.to_vec())
            }
        };
        self.0 = GreetingState::Finished;
        Ok(result)
    }
}

/// The target's side: reads the first message, passes its payload to `respond`, and writes the
/// second message with the result into `out`. Returns the keys of this connection and the length of
/// the second message.
///
/// A target that refuses this initiator (no such device) says so in its payload, where it is
/// authenticated.
///
/// # Errors
/// The message is not a greeting of this kind of security, key and prologue: `respond` is not
/// called, and [`refusal`] notifies the initiator.
pub fn answer(
    security: &Security,
    prologue: &[u8],
    message: &[u8],
    respond: impl FnOnce(&[u8]) -> Vec<u8>,
    out: &mut [u8],
) -> Result<(Seals, usize), PacketRefusal> {
    let suite = suite_of(security);
    let head = [suite, ANSWER, 0, 0];
    let rest = check_head(message, suite, GREETING)?;
    match security {
        Security::Key(key) => {
            let mut noise = noise::begin(key, prologue, HandshakeSide::Target)?;
            let payload = respond(&read_noise(&mut noise, rest)?);
            let bytes = check_room(&payload, out)?;
            write_noise(&mut noise, head, &payload, &mut out[..bytes])?;
            Ok((seals_of(&mut noise, HandshakeSide::Target)?, bytes))
        }
        Security::Insecure => {
            let (token, payload) = read_clear(prologue, message)?;
            let payload = respond(payload);
            let bytes = check_room(&payload, out)?;
            write_clear(prologue, head, token, &payload, &mut out[..bytes]);
            Ok((Seals::Checksum, bytes))
        }
    }
}

/// What distinguishes a greeting from all others. It is not authenticated.
pub(crate) fn token_of(message: &[u8]) -> &[u8] {
    message.get(HEAD_BYTES..HEAD_BYTES + TOKEN_BYTES).unwrap_or_default()
}

/// Whether a message may be a greeting of this kind of security, as far as a cheap check can tell.
pub(crate) fn may_be_greeting(security: &Security, message: &[u8]) -> bool {
    check_head(message, suite_of(security), GREETING).is_ok()
}

/// The reply of a target to a greeting that it refused, so that the user there sees more than "no
/// answer". None for damaged packets and noise. It is shorter than the greeting: no amplification.
pub fn refusal(security: &Security, why: PacketRefusal) -> Option<[u8; HEAD_BYTES]> {
    let reason = match why {
        PacketRefusal::PeerInsecure => 1,
        PacketRefusal::PeerSecure => 2,
        PacketRefusal::Unproven => 3,
        PacketRefusal::Unknown => 4,
        _ => return None,
    };
    Some([suite_of(security), REFUSAL, reason, 0])
}

fn suite_of(security: &Security) -> u8 {
    match security {
        Security::Key(_) => SECURE,
        Security::Insecure => INSECURE,
    }
}

/// The length of the message for a payload, if it fits.
fn check_room(payload: &[u8], out: &[u8]) -> Result<usize, PacketRefusal> {
    let (bytes, room) = (payload.len() + HANDSHAKE_BYTES, out.len().min(MESSAGE_BYTES_MAX));
    if bytes <= room { Ok(bytes) } else { Err(PacketRefusal::Room { bytes, room }) }
}

/// The message after its head, if the head is valid here.
fn check_head(message: &[u8], suite: u8, step: u8) -> Result<&[u8], PacketRefusal> {
    let short = PacketRefusal::Short { bytes: message.len(), least: HANDSHAKE_BYTES };
    let (head, rest) = message.split_first_chunk::<HEAD_BYTES>().ok_or(short)?;
    match *head {
        // The target's reason describes our end; mirrored, it is the reason that we would give.
        [INSECURE | SECURE, REFUSAL, reason, 0] if step == ANSWER && rest.is_empty() => {
            Err(match reason {
                1 => PacketRefusal::PeerSecure,
                2 => PacketRefusal::PeerInsecure,
                3 => PacketRefusal::Unproven,
                _ => PacketRefusal::Unknown,
            })
        }
        [INSECURE | SECURE, GREETING | ANSWER, 0, 0] if rest.len() < TOKEN_BYTES + TAIL_BYTES => {
            Err(short)
        }
        [INSECURE, GREETING | ANSWER, 0, 0] if suite == SECURE => Err(PacketRefusal::PeerInsecure),
        [SECURE, GREETING | ANSWER, 0, 0] if suite == INSECURE => Err(PacketRefusal::PeerSecure),
        [_, received_step @ (GREETING | ANSWER), 0, 0]
            if head[0] == suite && received_step != step =>
        {
            Err(PacketRefusal::OutOfTurn)
        }
        [_, GREETING | ANSWER, 0, 0] if head[0] == suite => Ok(rest),
        _ => Err(PacketRefusal::Unknown),
    }
}

fn write_noise(
    noise: &mut HandshakeState,
    head: [u8; HEAD_BYTES],
    payload: &[u8],
    out: &mut [u8],
) -> Result<(), PacketRefusal> {
    let (head_room, rest) = out.split_at_mut(HEAD_BYTES);
    head_room.copy_from_slice(&head);
    // The room was checked, so an error here is not ours to fix.
    let bytes = noise.write_message(payload, rest).map_err(|error| match error {
        // The peer has the key, but sent a public key that determines the result.
        snow::Error::Dh => PacketRefusal::Unproven,
        _ => PacketRefusal::Broken,
    })?;
    if bytes == rest.len() { Ok(()) } else { Err(PacketRefusal::Broken) }
}

fn read_noise(noise: &mut HandshakeState, message: &[u8]) -> Result<Vec<u8>, PacketRefusal> {
    let mut payload = vec![0; message.len()];
    let bytes = noise.read_message(message, &mut payload).map_err(|_| PacketRefusal::Unproven)?;
    payload.truncate(bytes);
    Ok(payload)
}

/// Takes the raw keys. Snow's transport is not used: it has no associated data (our header), needs
/// a second buffer, and counts nonces in its own way.
fn seals_of(noise: &mut HandshakeState, side: HandshakeSide) -> Result<Seals, PacketRefusal> {
    let (to_target, to_initiator) = noise.dangerously_get_raw_split();
    let (to_target, to_initiator) = (Zeroizing::new(to_target), Zeroizing::new(to_initiator));
    match side {
        HandshakeSide::Initiator => Seals::new(&to_target, &to_initiator),
        HandshakeSide::Target => Seals::new(&to_initiator, &to_target),
    }
}

fn write_clear(
    prologue: &[u8],
    head: [u8; HEAD_BYTES],
    token: &[u8],
    payload: &[u8],
    out: &mut [u8],
) {
    let end = out.len() - TAIL_BYTES;
    out[..HEAD_BYTES].copy_from_slice(&head);
    out[HEAD_BYTES..HEAD_BYTES + TOKEN_BYTES].copy_from_slice(token);
    out[HEAD_BYTES + TOKEN_BYTES..end].copy_from_slice(payload);
    let tail = clear_tail(prologue, &out[..end]);
    out[end..].copy_from_slice(&tail);
}

/// Token and payload of a message with a checked head.
fn read_clear<'a>(
    prologue: &[u8],
    message: &'a [u8],
) -> Result<(&'a [u8; TOKEN_BYTES], &'a [u8]), PacketRefusal> {
    let short = PacketRefusal::Short { bytes: message.len(), least: HANDSHAKE_BYTES };
    let (covered, tail) = message.split_last_chunk::<TAIL_BYTES>().ok_or(short)?;
    if *tail != clear_tail(prologue, covered) {
        return Err(PacketRefusal::Damaged);
    }
    covered.get(HEAD_BYTES..).and_then(<[u8]>::split_first_chunk).ok_or(short)
}

/// CRC-32C of the prologue and all before the tail, and zeroes.
fn clear_tail(prologue: &[u8], covered: &[u8]) -> [u8; TAIL_BYTES] {
    let mut crc = Crc32c::new();
    crc.update(prologue);
    crc.update(covered);
    let mut tail = [0; TAIL_BYTES];
    tail[..4].copy_from_slice(&crc.value().to_le_bytes());
    tail
}

#[cfg(test)]
mod tests;
