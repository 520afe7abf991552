//! The requests to the process that serves a volume: `POST /request` on one of the volume's control
//! sockets, with a [`ControlRequest`] as JSON. They are not available over TCP.
//!
//! Invariant: a request is answered once it is carried out, or refused with a reason.
//!
//! Not here: questions that change nothing, which are GETs (`admin`); carrying a request out
//! (`serving`).

use std::path::PathBuf;
use std::time::Duration;

use sawmill_doors::DoorPlan;
use sawmill_volume::Cut;
use serde::{Deserialize, Serialize};

/// The path of all requests. A POST to another path is refused.
pub(crate) const REQUEST_TARGET: &str = "/request";
/// The longest request that a process reads.
pub(crate) const REQUEST_BYTES_MAX: usize = 64 << 10;

/// How the refusal of a request begins that a server does not know, or knows only in part.
pub(crate) const UNKNOWN_REQUEST: &str = "unknown request";

/// A request to the process of a volume.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
// An older server must refuse a request that it knows only in part, not carry out that part.
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum ControlRequest {
    /// Answered with [`CollectReply`].
    CollectGarbage { threshold: f64 },
    /// Answered with [`ChangeReply`].
    Past(PastChange),
    /// Changes the size; answered with [`ResizeReply`] once that is durable.
    Resize { size_bytes: u64 },
    /// Opens a door; answered with [`AddDoorReply`].
    AddDoor(DoorPlan),
    /// Closes a door; answered with [`RemoveDoorReply`].
    RemoveDoor { address: String },
    /// Answered with [`HandOffResult`](crate::handoff::HandOffResult).
    HandOff(HandOff),
    /// What the read cache has room for; answered with [`WarmRoomReply`].
    WarmRoom,
    /// A step of warming the read cache; answered with [`WarmReply`]. Whoever asks for no next one
    /// has stopped it.
    Warm(WarmStepRequest),
    /// Notes what is read from now on; answered with [`BegunReply`].
    BeginRecording { time_max: Duration },
    /// Makes a boot set of what was read since; answered with [`RecordingReply`].
    EndRecording {
        /// See [`BegunReply`].
        recording: u64,
    },
}

/// The most ranges of one step: the request stays below [`REQUEST_BYTES_MAX`].
pub(crate) const WARM_RANGES_MAX: usize = 1000;

/// See [`ControlRequest::Warm`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WarmStepRequest {
    /// Addresses and lengths.
    pub(crate) ranges: Vec<(u64, u64)>,
    /// Frames to fetch at most.
    pub(crate) frames_max: u64,
}

/// A change of a volume's past.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum PastChange {
    CreateSnapshot(String),
    DeleteSnapshot(String),
    /// How long the past is kept, in seconds.
    SetRetention(u64),
    RollBack(#[serde(with = "crate::moment::text")] Cut),
}

/// How another process takes over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HandOff {
    /// The program that takes over. Default: the file that this process was started from.
    pub(crate) binary: Option<PathBuf>,
    /// Time for the successor to get ready, while the predecessor still serves.
    pub(crate) timeout: Duration,
    /// Longest interruption of service; after it, the predecessor resumes.
    pub(crate) stall_max: Duration,
}

/// The answer to a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WaitReply {
    /// Whether it was reached before the timeout.
    pub(crate) reached: bool,
}

/// The body of every answer whose HTTP status is not 200.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Refusal {
    pub(crate) error: String,
    /// The exit code of a command that fails with it.
    pub(crate) exit: u8,
}

/// What garbage collection moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CollectReply {
    pub(crate) moved_bytes: u64,
    pub(crate) moved_segments: u64,
}

/// The answer to a change of the past.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ChangeReply {
    /// After a rollback: the snapshot of the state before it.
    pub(crate) undo: Option<String>,
}

/// The size that a volume has now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ResizeReply {
    pub(crate) size_bytes: u64,
}

/// The room for data that nobody has read yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WarmRoomReply {
    pub(crate) frames: u64,
    pub(crate) frame_bytes: u64,
    /// Of the disk.
    pub(crate) size_bytes: u64,
}

/// What a step of warming did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WarmReply {
    pub(crate) fetched_frames: u64,
    pub(crate) fetched_bytes: u64,
    /// The cache had them.
    pub(crate) present_bytes: u64,
    /// There was no room for them, they are damaged, or they were deleted meanwhile.
    pub(crate) left_bytes: u64,
    /// There is no room for more.
    #[serde(default)]
    pub(crate) is_full: bool,
    /// So much of the ranges, in their order, is done.
    pub(crate) done_bytes: u64,
}

/// A recording under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BegunReply {
    /// To be given at its end.
    pub(crate) recording: u64,
}

/// A boot set that was recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RecordingReply {
    /// The id of the volume that has it; none: nothing was read from the store or the cache.
    pub(crate) kept_with: Option<String>,
    pub(crate) ranges: u64,
    pub(crate) bytes: u64,
    /// More was read than a boot set holds.
    pub(crate) is_cut: bool,
}

/// A door that was opened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AddDoorReply {
    /// `nbd`, `ublk`, `vhost-user`, `fuse` or `buse`.
    pub(crate) door: String,
    pub(crate) address: String,
}

/// The address of a door that was closed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RemoveDoorReply {
    pub(crate) removed: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_survives_the_way_over_a_socket() {
        let cuts = [Cut::Snapshot("a.b-c_9".into()), Cut::Time(5), Cut::Time(1_709_251_199_999)];
        let cuts = cuts.into_iter().chain([Cut::Position(u64::MAX)]).map(PastChange::RollBack);
        let past = [
            PastChange::CreateSnapshot("x".into()),
            PastChange::DeleteSnapshot("x".into()),
            PastChange::SetRetention(9),
        ];
        let plans = ["nbd=unix:/run/a b&c=d.sock", "ublk=3", "fuse=/mnt/ü"];
        let (timeout, stall_max) = (Duration::from_millis(5), Duration::from_millis(7));
        let requests = (cuts.chain(past).map(ControlRequest::Past))
            .chain(plans.map(|plan| ControlRequest::AddDoor(DoorPlan::parse(plan).unwrap())))
            .chain([
                ControlRequest::CollectGarbage { threshold: 0.25 },
                ControlRequest::Resize { size_bytes: u64::MAX },
                ControlRequest::RemoveDoor { address: "/dev/ublkb0".into() },
                ControlRequest::WarmRoom,
                ControlRequest::Warm(WarmStepRequest {
                    ranges: vec![(u64::MAX, u64::MAX); WARM_RANGES_MAX],
                    frames_max: u64::MAX,
                }),
                ControlRequest::BeginRecording { time_max: timeout },
                ControlRequest::EndRecording { recording: u64::MAX },
                ControlRequest::HandOff(HandOff {
                    binary: Some("/a b".into()),
                    timeout,
                    stall_max,
                }),
            ]);
        for request in requests {
            let text = serde_json::to_string(&request).unwrap();
            assert!(text.len() <= REQUEST_BYTES_MAX, "{} bytes", text.len());
            assert_eq!(serde_json::from_str::<ControlRequest>(&text).unwrap(), request, "{text}");
        }
    }

    #[test]
    fn what_is_no_request_is_refused_with_what_there_is() {
        for text in [
            "",
            r#"{"make_coffee":1}"#,
            r#"{"collect_garbage":{"threshold":"much"}}"#,
            r#"{"resize":{"size_bytes":4096,"volume":"x"}}"#,
            r#"{"add_door":"window"}"#,
            r#"{"past":{"roll_back":"position:x"}}"#,
        ] {
            assert!(serde_json::from_str::<ControlRequest>(text).is_err(), "{text}");
        }
        let error = serde_json::from_str::<ControlRequest>(r#"{"make_coffee":1}"#).unwrap_err();
        assert!(error.to_string().contains("collect_garbage"), "{error}");
    }
}
