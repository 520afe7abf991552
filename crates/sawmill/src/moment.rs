//! Past states as users type them: `disk1@NAME`, `disk1@2026-11-21T10:00:00Z`, `disk1@position:N`.
//!
//! Invariant: `parse_cut` parses what `rfc3339` shows to the same millisecond.
//!
//! Not here: which states a volume has (`sawmill_volume::past`), the volume before the `@`
//! (`config`).

use chrono::{DateTime, Utc};
use sawmill_volume::{Cut, rfc3339};

use sawmill_console::exit::{Failure, Result};

/// Parses what follows the `@`, or `--to`.
pub(crate) fn parse_cut(text: &str) -> Result<Cut> {
    let wrong = |why: &str| {
        Failure::usage(format!(
            "'{text}' names no state of the past ({why}); write the name of a snapshot, a time \
             such as 2026-11-21T10:00:00Z, or position:N"
        ))
    };
    // Before times, which are recognized by a colon anywhere.
    if let Some(number) = text.strip_prefix("position:") {
        return number
            .parse()
            .map(Cut::Position)
            .map_err(|_| wrong("the position is not a whole number"));
    }
    if text.contains(':') {
        return parse_moment(text).map(Cut::Time).ok_or_else(|| wrong("it is not a time"));
    }
    // The alphabet has no colon, so no snapshot can have the name of a time or a position.
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if text.is_empty() || text.len() > 128 || text.starts_with('.') || !text.chars().all(allowed) {
        return Err(wrong("that is not a valid snapshot name"));
    }
    Ok(Cut::Snapshot(text.to_owned()))
}

/// An RFC 3339 time of no more than millisecond precision, as milliseconds since 1970.
fn parse_moment(text: &str) -> Option<u64> {
    let time = DateTime::parse_from_rfc3339(text).ok()?;
    // The log has milliseconds, and a finer time would silently mean another moment.
    let is_exact = time.timestamp_subsec_nanos().is_multiple_of(1_000_000);
    is_exact.then(|| time.timestamp_millis().try_into().ok())?
}

/// A moment for people, in UTC: `2026-11-21 07:08:09 UTC`.
pub(crate) fn human_time(unix_ms: u64) -> String {
    match utc(unix_ms) {
        Some(time) => time.format("%Y-%m-%d %H:%M:%S UTC").to_string(),
        None => format!("{unix_ms} ms after 1970"),
    }
}

/// A moment in UTC; `None` beyond what a calendar holds.
pub(crate) fn utc(unix_ms: u64) -> Option<DateTime<Utc>> {
    DateTime::from_timestamp_millis(i64::try_from(unix_ms).ok()?)
}

/// A cut as `parse_cut` reads it.
fn display_text(cut: &Cut) -> String {
    match cut {
        Cut::Snapshot(name) => name.clone(),
        Cut::Time(unix_ms) => rfc3339(*unix_ms),
        Cut::Position(position) => format!("position:{position}"),
    }
}

/// For serde: a cut as a text.
pub(crate) mod text {
    use sawmill_volume::Cut;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

    pub(crate) fn serialize<S: Serializer>(cut: &Cut, to: S) -> Result<S::Ok, S::Error> {
        super::display_text(cut).serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Cut, D::Error> {
        super::parse_cut(&String::deserialize(from)?).map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_read_back_as_it_is_shown() {
        for unix_ms in [0, 951_782_400_000, 1_709_251_199_999, 4_107_542_400_001, 1_795_244_889_000]
        {
            let text = rfc3339(unix_ms);
            assert_eq!(parse_cut(&text).unwrap(), Cut::Time(unix_ms), "{text}");
        }
        let zoned = parse_cut("2026-11-21T11:00:00.5+01:00").unwrap();
        assert_eq!(zoned, parse_cut("2026-11-21T10:00:00.500Z").unwrap());
    }

    #[test]
    fn names_and_positions_are_distinguished() {
        assert_eq!(parse_cut("before").unwrap(), Cut::Snapshot("before".into()));
        assert_eq!(parse_cut("2026-11-21").unwrap(), Cut::Snapshot("2026-11-21".into()));
        assert_eq!(parse_cut("position:77").unwrap(), Cut::Position(77));
        for text in
            ["", ".x", "a/b", "position:x", "10:00", "2026-02-30T00:00:00Z", "2026-11-21T10:00:00"]
        {
            let error = parse_cut(text).unwrap_err().to_string();
            assert!(error.contains("position:N"), "{text}: {error}");
        }
    }

    #[test]
    fn moments_are_shown_by_the_calendar() {
        assert_eq!(human_time(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(human_time(951_782_400_000), "2000-02-29 00:00:00 UTC");
        assert_eq!(human_time(1_709_251_199_999), "2024-02-29 23:59:59 UTC");
        assert_eq!(human_time(4_107_542_400_000), "2100-03-01 00:00:00 UTC");
        assert_eq!(human_time(1_795_244_889_000), "2026-11-21 07:08:09 UTC");
    }
}
