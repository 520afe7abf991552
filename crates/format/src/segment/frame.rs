//! A frame: the unit of checksum, compression, caching and fetching. 16 bytes of head, then the
//! payload.
//!
//! Invariant: the CRC covers the frame's place (volume, sequence, epoch, index), so that a frame of
//! another place does not verify and one ranged GET is enough to trust it.
//!
//! Not here: where a frame begins in its segment (`segment`, `FrameEntry`), and which data it gets
//! (`segment::builder` in `sawmill-volume`).

use crate::crc::Crc32c;
use crate::error::check_field;
use crate::ids::VolumeId;
use crate::layout::layout;
use crate::preamble::check_available;
use crate::{FormatError, Result};

layout! {
    /// Bytes of the head.
    head_at, "Frame head", 16;
    CRC: 0, 4, "crc";
    DATA_BYTES: 4, 4, "data_bytes";
    PAYLOAD_BYTES: 8, 4, "payload_bytes";
    CODEC: 12, 1, "codec";
    RESERVED: 13, 3, "reserved";
}

layout! {
    /// Bytes that only the CRC sees, before the head.
    place_at, "Frame place", 36;
    VOLUME_ID: 0, 16, "volume_id";
    SEQUENCE: 16, 8, "sequence";
    EPOCH: 24, 8, "epoch";
    FRAME: 32, 4, "frame";
}

const WHAT: &str = "frame";
const RAW: u8 = 0;

/// Bytes before a frame's payload.
pub const FRAME_HEAD_BYTES: usize = head_at::SIZE;

/// The place of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FrameIdentity {
    /// Its volume.
    pub volume_id: VolumeId,
    /// Its segment.
    pub sequence: u64,
    /// The epoch of its segment.
    pub epoch: u64,
    /// Its index in the segment.
    pub frame: u32,
}

impl FrameIdentity {
    /// The CRC of the place, the head after its CRC field, and the payload.
    fn crc(&self, head: &[u8], payload: &[u8]) -> u32 {
        const COVERED_HEAD: usize = head_at::SIZE - head_at::CRC.size;
        let mut covered = [0; place_at::SIZE + COVERED_HEAD];
        place_at::VOLUME_ID.put(&mut covered, self.volume_id.0);
        place_at::SEQUENCE.put(&mut covered, self.sequence.to_le_bytes());
        place_at::EPOCH.put(&mut covered, self.epoch.to_le_bytes());
        place_at::FRAME.put(&mut covered, self.frame.to_le_bytes());
        covered[place_at::SIZE..].copy_from_slice(&head[head_at::CRC.size..head_at::SIZE]);
        let mut crc = Crc32c::new();
        crc.update(&covered);
        crc.update(payload);
        crc.value()
    }
}

/// Writes the head of a raw frame; `data` follows it in the body as it is.
pub fn frame_seal(identity: &FrameIdentity, data: &[u8], head_out: &mut [u8; FRAME_HEAD_BYTES]) {
    *head_out = [0; FRAME_HEAD_BYTES];
    // A longer frame has no entry in a segment header, which is made first.
    assert!(u32::try_from(data.len()).is_ok(), "a frame has less than 4 GiB");
    let data_bytes = (data.len() as u32).to_le_bytes();
    head_at::DATA_BYTES.put(head_out, data_bytes);
    head_at::PAYLOAD_BYTES.put(head_out, data_bytes);
    head_at::CODEC.put(head_out, [RAW]);
    let crc = identity.crc(head_out, data);
    head_at::CRC.put(head_out, crc.to_le_bytes());
}

/// Verifies a frame, given with its head and nothing after it, and returns its data. Bytes of
/// another place, intact or not, fail as [`FormatError::Checksum`].
pub fn frame_open<'a>(
    identity: &FrameIdentity,
    frame_bytes_with_head: &'a [u8],
) -> Result<&'a [u8]> {
    let bytes = frame_bytes_with_head;
    check_available(WHAT, bytes, FRAME_HEAD_BYTES)?;
    let (head, payload) = bytes.split_at(FRAME_HEAD_BYTES);
    let payload_bytes = head_at::PAYLOAD_BYTES.u32(head) as usize;
    check_available(WHAT, bytes, FRAME_HEAD_BYTES.saturating_add(payload_bytes))?;
    check_field(
        WHAT,
        "payload_bytes",
        "bytes follow after the end",
        payload.len() == payload_bytes,
    )?;
    if identity.crc(head, payload) != head_at::CRC.u32(head) {
        return Err(FormatError::Checksum { what: WHAT });
    }
    if !head_at::RESERVED.is_zero(head) {
        return Err(FormatError::Reserved { what: WHAT });
    }
    check_field(WHAT, "codec", "only raw frames are known here", head_at::CODEC.u8(head) == RAW)?;
    let data_bytes = head_at::DATA_BYTES.u32(head) as usize;
    check_field(WHAT, "data_bytes", "a raw frame's is its payload's", data_bytes == payload_bytes)?;
    Ok(payload)
}
