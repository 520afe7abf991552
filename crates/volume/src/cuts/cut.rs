//! Identifies a state in a volume's past. Not here: how it is found ([`super::find`]).

use std::fmt;

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
            Cut::Time(unix_ms) => write!(f, "the moment {unix_ms} ms after 1970"),
            Cut::Position(position) => write!(f, "position {position}"),
        }
    }
}
