//! The doors that a user requests, as options of a command and as one line of text, and the table
//! of all kinds of doors.
//!
//! The line travels to a running server (`sawmill door add`) and to the process that takes over its
//! doors. Invariant: parsing what a plan writes gives the same plan, in every process. Not here:
//! what a kind of door needs (its own file), and opening.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use clap::{ArgMatches, Args, FromArgMatches};
use sawmill_frontend::DoorPiece;
use serde::{Deserialize, Serialize};

use super::kind::{DoorInstance, DoorKind, RequestedDoor, Trial};
use super::{DoorContext, fuse, nbd, ublk, vhost_user};
use sawmill_console::exit::{Failure, Result};

/// All kinds of doors, in the order of their options.
static KINDS: [DoorKind; 4] = [nbd::KIND, ublk::KIND, vhost_user::KIND, fuse::KIND];

/// One requested door of any kind, in memory and as text.
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct DoorPlan(Arc<dyn RequestedDoor>);

impl DoorPlan {
    /// Parses the text form that `Display` writes: `nbd=unix:/path`, `ublk=3`.
    pub(crate) fn parse(text: &str) -> Result<DoorPlan> {
        // At the first one: paths may have more of them.
        let (keyword, value) = text.split_once('=').unwrap_or((text, ""));
        let kind = KINDS.iter().find(|kind| kind.keywords.contains(&keyword)).ok_or_else(|| {
            let forms = KINDS.iter().flat_map(|kind| kind.forms).copied();
            let forms = alternatives(forms.collect());
            Failure::usage(format!("unknown door '{text}'; write {forms}"))
        })?;
        (kind.parse)(keyword, value).map(DoorPlan::from)
    }

    /// An NBD server at this Unix socket: the door of a command for which the user names none.
    pub(crate) fn at_socket(path: &Path) -> DoorPlan {
        nbd::at_socket(path).into()
    }

    /// Returns a usage error if the door makes no sense for this many volumes.
    pub(crate) fn check(&self, volumes: usize) -> Result<()> {
        self.0.check(volumes)
    }

    /// Returns `InUse` if another process has the address.
    pub(crate) fn check_free(&self) -> Result<()> {
        self.0.check_free()
    }

    /// The same door for one volume of several; `None` if one door serves all of them.
    pub(super) fn of_volume(&self, name: &str) -> Option<DoorPlan> {
        self.0.of_volume(name).map(DoorPlan::from)
    }

    /// The plan that opens this door again for the same users, now that its address is known.
    pub(crate) fn reopened_at(&self, address: &str) -> DoorPlan {
        self.0.reopened_at(address).map_or_else(|| self.clone(), DoorPlan::from)
    }

    pub(super) fn open(&self, context: &DoorContext<'_>) -> Result<DoorInstance> {
        self.0.open(context)
    }

    pub(super) fn take_over(
        &self,
        pieces: Vec<DoorPiece>,
        context: &DoorContext<'_>,
    ) -> sawmill_device::Result<DoorInstance> {
        self.0.take_over(pieces, context)
    }
}

impl From<Box<dyn RequestedDoor>> for DoorPlan {
    fn from(plan: Box<dyn RequestedDoor>) -> Self {
        DoorPlan(plan.into())
    }
}

impl TryFrom<String> for DoorPlan {
    type Error = Failure;

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

/// The doors that a command opens: the options of all kinds. Any combination may serve one volume.
pub(crate) struct DoorOptions {
    plans: Vec<DoorPlan>,
}

impl Args for DoorOptions {
    fn augment_args(command: clap::Command) -> clap::Command {
        let command = command.next_help_heading("Doors");
        KINDS.iter().fold(command, |command, kind| (kind.add_options)(command))
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for DoorOptions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let requested = KINDS.iter().filter_map(|kind| (kind.requested)(matches).transpose());
        let plans = requested.map(|plan| plan.map(DoorPlan::from)).collect::<Result<_, _>>()?;
        Ok(DoorOptions { plans })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl DoorOptions {
    /// The requested doors, in the order of the table.
    pub(crate) fn plans(&self) -> Vec<DoorPlan> {
        self.plans.clone()
    }

    /// The requested doors; without any, an NBD server at this Unix socket.
    pub(crate) fn plans_or(&self, socket: &Path) -> Vec<DoorPlan> {
        match self.plans.is_empty() {
            true => vec![DoorPlan::at_socket(socket)],
            false => self.plans(),
        }
    }
}

/// Examples of text forms, for help.
pub(crate) fn examples() -> String {
    KINDS.iter().flat_map(|kind| kind.examples).copied().collect::<Vec<_>>().join(", ")
}

/// The options that request a door: `--nbd, --ublk or --fuse`.
pub(crate) fn options() -> String {
    let names = KINDS.iter().filter_map(|kind| kind.keywords.first());
    alternatives(names.map(|name| format!("--{name}")).collect())
}

/// What `sawmill conform` can test a device through.
pub(crate) fn trials() -> impl Iterator<Item = &'static Trial> {
    KINDS.iter().flat_map(|kind| kind.trials)
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
            "unknown door 'iscsi'; write nbd=ADDRESS, ublk, ublk=ID, vhost-user=PATH, fuse=FOLDER \
             or loop=FOLDER"
        );
        assert_eq!(options(), "--nbd, --ublk, --vhost-user or --fuse");
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
