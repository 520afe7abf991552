//! Describes what is lost with a journal or its memory: how old the last state in the store is, and
//! how much is known to have been accepted after it.
//!
//! Invariant: the text states what is not known. An amount is a difference of positions; it
//! includes the heads and the padding of records, so it is always "about".
//!
//! Not here: whether a loss needs to be accepted ([`super::journal`], [`super::memory`]).

use chrono::{DateTime, SecondsFormat};

use crate::recovery::stored::StoredVolume;
use crate::world::World;

/// Follows "to" in a sentence and ends it: where an accepted loss of the journal leads. `reached`
/// is a position that is known to have been accepted.
pub(super) fn rollback(stored: &StoredVolume, reached: Option<u64>, world: &dyn World) -> String {
    let position = stored.end.position;
    let lost = match reached.and_then(|reached| reached.checked_sub(position)) {
        None | Some(0) => "How much was accepted after it is not known".to_owned(),
        Some(bytes) => format!("At least about {} accepted after it would be lost", size(bytes)),
    };
    format!(
        "go back to the last state that reached the store ({}; position {position}). {lost}",
        last_stored(stored, world)
    )
}

/// When something last reached the store, and how long ago that is.
pub(super) fn last_stored(stored: &StoredVolume, world: &dyn World) -> String {
    let segments = stored.view.segments.snapshot();
    let newest = segments.iter().map(|(_, info)| info.wall_unix_ms).max().unwrap_or_default();
    moment_and_age(newest.max(stored.newest.checkpoint.wall_unix_ms), world.unix_ms())
}

fn moment_and_age(unix_ms: u64, now_unix_ms: u64) -> String {
    let time = i64::try_from(unix_ms).ok().filter(|unix_ms| *unix_ms > 0);
    let Some(time) = time.and_then(DateTime::from_timestamp_millis) else {
        return "at a time that is not known".to_owned();
    };
    let time = time.to_rfc3339_opts(SecondsFormat::Secs, true);
    match now_unix_ms.checked_sub(unix_ms) {
        Some(age_ms) => format!("{time}, {} ago", age(age_ms / 1000)),
        // A clock was set: the age would be wrong.
        None => time,
    }
}

fn age(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        7_200..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// Bytes in the largest unit of which there is at least one.
pub(super) fn size(bytes: u64) -> String {
    match bytes {
        0..1_024 => format!("{bytes} bytes"),
        1_024..1_048_576 => format!("{} KiB", bytes >> 10),
        1_048_576..1_073_741_824 => format!("{} MiB", bytes >> 20),
        _ => format!("{} GiB", bytes >> 30),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOON: u64 = 1_795_262_400_000;

    #[test]
    fn a_moment_is_said_in_utc_with_its_age() {
        for (age_s, says) in [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7_200, "2 h")] {
            let text = moment_and_age(NOON, NOON + age_s * 1000);
            assert_eq!(text, format!("2026-11-21T12:00:00Z, {says} ago"));
        }
        assert!(moment_and_age(NOON, NOON + 3 * 86_400_000).ends_with(", 3 d ago"));
    }

    #[test]
    fn a_time_in_the_future_has_no_age_and_no_time_is_not_known() {
        assert_eq!(moment_and_age(NOON, NOON - 1), "2026-11-21T12:00:00Z");
        assert_eq!(moment_and_age(0, NOON), "at a time that is not known");
        assert_eq!(moment_and_age(u64::MAX, NOON), "at a time that is not known");
    }

    #[test]
    fn sizes_have_one_unit() {
        let texts = [1_023, 1_024, 33_554_432, 33_554_431, 5 << 30].map(size);
        assert_eq!(texts, ["1023 bytes", "1 KiB", "32 MiB", "31 MiB", "5 GiB"]);
    }
}
