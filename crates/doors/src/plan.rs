//! The doors that a user requests, in memory and as one line of text, and the table of all kinds of
//! doors.
//!
//! The line travels to a running server (`sawmill door add`) and to the process that takes over its
//! doors. Invariant: parsing what a plan writes gives the same plan, in every process. Not here:
//! what a kind of door needs (its own file), and opening.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use sawmill_device::{Error, ErrorKind, Result};
use sawmill_frontend::DoorPiece;
use sawmill_frontend::nbd::Listen;
use serde::{Deserialize, Serialize};

use super::DoorContext;
use super::buse::{self, BusePlan};
use super::fuse::{self, FusePlan};
use super::kind::{DoorInstance, DoorKind, RequestedDoor};
use super::nbd::{self, NbdPlan};
use super::ublk::{self, UblkPlan};
use super::vhost_user::{self, VhostPlan};

/// All kinds of doors, in the order of their options.
static KINDS: [DoorKind; 5] = [nbd::KIND, ublk::KIND, vhost_user::KIND, fuse::KIND, buse::KIND];

/// One requested door of any kind, in memory and as text.
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DoorPlan(Arc<dyn RequestedDoor>);

impl DoorPlan {
    /// Parses the text form that `Display` writes: `nbd=unix:/path`, `ublk=3`.
    pub fn parse(text: &str) -> Result<DoorPlan> {
        // At the first one: paths may have more of them.
        let (keyword, value) = text.split_once('=').unwrap_or((text, ""));
        let kind = KINDS.iter().find(|kind| kind.keywords.contains(&keyword)).ok_or_else(|| {
            let forms = KINDS.iter().flat_map(|kind| kind.forms).copied();
            let forms = alternatives(forms.collect());
            Error::new(ErrorKind::Invalid, format!("unknown door '{text}'; write {forms}"))
        })?;
        (kind.parse)(keyword, value).map(DoorPlan::from)
    }

    /// An NBD server that only this machine can reach.
    #[must_use]
    pub fn nbd(listen: Listen) -> DoorPlan {
        DoorPlan(Arc::new(NbdPlan::new(listen)))
    }

    /// An NBD server, also where other machines can reach it.
    #[must_use]
    pub fn nbd_insecure(listen: Listen) -> DoorPlan {
        DoorPlan(Arc::new(NbdPlan::new(listen).insecure()))
    }

    /// A device node with this number, or any.
    #[must_use]
    pub fn ublk(id: Option<u32>) -> DoorPlan {
        DoorPlan(Arc::new(UblkPlan::new(id)))
    }

    /// A device node that an unprivileged user may serve, and that ends with its server.
    #[must_use]
    pub fn ublk_unprivileged(id: Option<u32>) -> DoorPlan {
        DoorPlan(Arc::new(UblkPlan::new(id).unprivileged()))
    }

    /// A device node of the kernel module BUSE, with this number, or any.
    #[must_use]
    pub fn buse(id: Option<u32>) -> DoorPlan {
        DoorPlan(Arc::new(BusePlan::new(id)))
    }

    /// A vhost-user-blk socket.
    #[must_use]
    pub fn vhost_user(path: &Path) -> DoorPlan {
        DoorPlan(Arc::new(VhostPlan::new(path)))
    }

    /// A file in this folder, through FUSE.
    #[must_use]
    pub fn fuse(mountpoint: &Path) -> DoorPlan {
        DoorPlan(Arc::new(FusePlan::new(mountpoint)))
    }

    /// A file in this folder, through FUSE, and a loop device on it.
    #[must_use]
    pub fn fuse_and_loop(mountpoint: &Path) -> DoorPlan {
        DoorPlan(Arc::new(FusePlan::new(mountpoint).and_loop()))
    }

    /// Whether such a door has a thread for each queue, and so uses [`super::DoorQueues`].
    #[must_use]
    pub fn has_queues(&self) -> bool {
        self.is_of(&ublk::KIND)
    }

    /// Whether the kernel completes writes of such a door before the server has them.
    #[must_use]
    pub(super) fn has_completed_writes(&self) -> bool {
        self.is_of(&buse::KIND)
    }

    fn is_of(&self, kind: &DoorKind) -> bool {
        let text = self.to_string();
        kind.keywords.contains(&text.split('=').next().unwrap_or_default())
    }

    /// Returns a usage error if the door makes no sense for this many volumes.
    pub fn check(&self, volumes: usize) -> Result<()> {
        self.0.check(volumes)
    }

    /// Returns `InUse` if another process has the address.
    pub fn check_free(&self) -> Result<()> {
        self.0.check_free()
    }

    /// The same door for one volume of several; `None` if one door serves all of them.
    pub(super) fn of_volume(&self, name: &str) -> Option<DoorPlan> {
        self.0.of_volume(name).map(DoorPlan::from)
    }

    /// The plan that opens this door again for the same users, now that its address is known.
    pub fn reopened_at(&self, address: &str) -> DoorPlan {
        self.0.reopened_at(address).map_or_else(|| self.clone(), DoorPlan::from)
    }

    pub(super) fn open(&self, context: &DoorContext<'_>) -> Result<DoorInstance> {
        self.0.open(context)
    }

    pub(super) fn take_over(
        &self,
        pieces: Vec<DoorPiece>,
        context: &DoorContext<'_>,
    ) -> Result<DoorInstance> {
        self.0.take_over(pieces, context)
    }
}

impl From<Box<dyn RequestedDoor>> for DoorPlan {
    fn from(plan: Box<dyn RequestedDoor>) -> Self {
        DoorPlan(plan.into())
    }
}

impl TryFrom<String> for DoorPlan {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        DoorPlan::parse(&text)
    }
}

impl From<DoorPlan> for String {
    fn from(plan: DoorPlan) -> String {
        plan.to_string()
    }
}

impl fmt::Display for DoorPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for DoorPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DoorPlan({self})")
    }
}

impl PartialEq for DoorPlan {
    fn eq(&self, other: &Self) -> bool {
        // The text form is what identifies a door across processes and versions.
        self.to_string() == other.to_string()
    }
}

impl Eq for DoorPlan {}

/// Examples of text forms, for help.
pub fn examples() -> String {
    KINDS.iter().flat_map(|kind| kind.examples).copied().collect::<Vec<_>>().join(", ")
}

/// The options that request a door: `--nbd, --ublk or --fuse`.
pub fn options() -> String {
    let names = KINDS.iter().filter_map(|kind| kind.keywords.first());
    alternatives(names.map(|name| format!("--{name}")).collect())
}

/// `a, b or c`.
fn alternatives<T: AsRef<str>>(all: Vec<T>) -> String {
    let all: Vec<&str> = all.iter().map(AsRef::as_ref).collect();
    match all.split_last() {
        Some((last, first)) if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        _ => all.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_reads_what_it_wrote() {
        for text in [
            "nbd=unix:/run/a=b.sock",
            "nbd=tcp:127.0.0.1:10809",
            "nbd-insecure=tcp:[::1]:1",
            "ublk",
            "ublk=7",
            "ublk-unprivileged",
            "ublk-unprivileged=7",
            "vhost-user=/run/x y.sock",
            "fuse=/mnt/disk1",
            "loop=/mnt/disk1",
            "buse",
            "buse=7",
        ] {
            assert_eq!(DoorPlan::parse(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_is_no_door_is_refused_with_what_there_is() {
        for text in [
            "",
            "nbd",
            "nbd=",
            "ublk=x",
            "vhost-user",
            "fuse=",
            "loop",
            "iscsi=3",
            "ublk=-1",
            "ublk-x",
        ] {
            assert!(DoorPlan::parse(text).is_err(), "{text}");
        }
        assert_eq!(
            DoorPlan::parse("iscsi").unwrap_err().to_string(),
            "unknown door 'iscsi'; write nbd=ADDRESS, ublk, ublk=ID, vhost-user=PATH, \
             fuse=FOLDER, loop=FOLDER, buse or buse=ID"
        );
        assert_eq!(options(), "--nbd, --ublk, --vhost-user, --fuse or --buse");
    }

    #[test]
    fn volumes_of_one_folder_get_places_of_their_own() {
        let plan = DoorPlan::parse("vhost-user=/run/disks").unwrap();
        assert_eq!(plan.of_volume("a").unwrap().to_string(), "vhost-user=/run/disks/a.sock");
        let plan = DoorPlan::parse("loop=/mnt").unwrap();
        assert_eq!(plan.of_volume("a").unwrap().to_string(), "loop=/mnt/a");
    }

    #[test]
    fn a_keyword_names_one_kind() {
        let mut keywords: Vec<_> = KINDS.iter().flat_map(|kind| kind.keywords).collect();
        let all = keywords.len();
        keywords.sort();
        keywords.dedup();
        assert_eq!(keywords.len(), all);
    }

    #[test]
    fn a_relative_path_means_the_same_in_another_process() {
        let folder = std::env::current_dir().unwrap();
        for (text, prefix) in [
            ("nbd=unix:a.sock", "nbd=unix:"),
            ("vhost-user=a.sock", "vhost-user="),
            ("fuse=a.sock", "fuse="),
            ("loop=a.sock", "loop="),
        ] {
            let absolute = format!("{prefix}{}", folder.join("a.sock").display());
            assert_eq!(DoorPlan::parse(text).unwrap().to_string(), absolute);
        }
    }

    #[test]
    fn only_a_device_of_any_number_serves_each_of_several_volumes() {
        assert!(DoorPlan::parse("ublk=3").unwrap().check(1).is_ok());
        assert!(DoorPlan::parse("ublk").unwrap().check(2).is_ok());
        assert!(DoorPlan::parse("ublk=3").unwrap().check(2).is_err());
        assert!(DoorPlan::parse("nbd=unix:/a").unwrap().of_volume("a").is_none(), "one for all");
    }
}
