//! The newest state that a machine has seen of a volume: its golden vector, and what is refused.

use sawmill_format::newest_state::{self, NewestState};
use sawmill_format::{FormatError, crc};

use crate::samples::{Case, VOLUME, WALL_UNIX_MS};

pub(crate) const VALUE: NewestState =
    NewestState { volume_id: VOLUME, epoch: 7, stored_sequence: 258, wall_unix_ms: WALL_UNIX_MS };

pub(crate) fn newest_case() -> Case {
    Case {
        name: "newest_state/v1-attached",
        bytes: VALUE.encode().unwrap(),
        value: format!("{VALUE:#?}"),
        table: newest_state::at::TABLE,
        decode: Box::new(|bytes| Ok(NewestState::decode(bytes, VOLUME)? == VALUE)),
    }
}

#[test]
fn a_newest_state_of_no_attachment_or_of_another_volume_is_refused() {
    let mut bytes = VALUE.encode().unwrap();
    let other = sawmill_format::ids::VolumeId([9; 16]);
    assert!(matches!(NewestState::decode(&bytes, other), Err(FormatError::Identity { .. })));
    let epoch_at = newest_state::at::EPOCH.offset;
    bytes[epoch_at..epoch_at + 8].fill(0);
    let end = bytes.len() - 4;
    let sum = crc::crc32c(&bytes[..end]);
    bytes[end..].copy_from_slice(&sum.to_le_bytes());
    assert!(matches!(
        NewestState::decode(&bytes, VOLUME),
        Err(FormatError::Field { field: "epoch", .. })
    ));
}
