//! Identifies a state in a volume's past. Not here: how it is found ([`super::find`]).

use std::fmt;

use chrono::{DateTime, SecondsFormat};

/// Which state of a volume's past.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cut {
    /// The snapshot of this name.
    Snapshot(String),
    /// The newest state at or before this moment, in milliseconds since 1970, UTC, by the writer's
    /// clock.
    Time(u64),
    /// The newest state that has no write at or past this position of the log.
    Position(u64),
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cut::Snapshot(name) => write!(f, "snapshot {name:?}"),
            Cut::Time(unix_ms) => write!(f, "the moment {}", rfc3339(*unix_ms)),
            Cut::Position(position) => write!(f, "position {position}"),
        }
    }
}

/// A time in milliseconds since 1970 as RFC 3339 writes it, in UTC.
#[must_use]
pub fn rfc3339(unix_ms: u64) -> String {
    let time = i64::try_from(unix_ms).ok().and_then(DateTime::from_timestamp_millis);
    time.map_or_else(
        // Beyond what a calendar holds: a damaged clock wrote it.
        || format!("{unix_ms} ms after 1970"),
        |time| time.to_rfc3339_opts(SecondsFormat::AutoSi, true),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_shown_to_the_millisecond_and_without_an_idle_fraction() {
        assert_eq!(Cut::Time(1_795_244_889_000).to_string(), "the moment 2026-11-21T07:08:09Z");
        assert_eq!(rfc3339(1_795_244_889_050), "2026-11-21T07:08:09.050Z");
        assert_eq!(rfc3339(u64::MAX), "18446744073709551615 ms after 1970");
    }
}
