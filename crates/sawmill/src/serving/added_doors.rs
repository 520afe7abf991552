//! Doors that were added to a volume while it was served. They are remembered so that they return
//! after a crash, because the users of a dead server's device or mount wait for them.
//!
//! The file `doors` in the volume's state folder has one [`DoorPlan`] per line. Invariants: a door
//! is remembered from the time it is open until it is removed or the server stops cleanly. A line
//! that cannot be parsed stops nothing. Not here: doors from options of `serve`, which return
//! anyway.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use sawmill_console::exit::{Failure, Result};
use sawmill_doors::DoorPlan;

/// The added doors of one volume, in a file.
pub(crate) struct AddedDoors {
    path: PathBuf,
    /// Held while the file is read and rewritten.
    changing: Mutex<()>,
}

impl AddedDoors {
    /// Those in a volume's state folder.
    pub(crate) fn of(folder: &Path) -> Self {
        AddedDoors { path: folder.join("doors"), changing: Mutex::new(()) }
    }

    /// Remembers a door that is open.
    pub(crate) fn remember(&self, plan: &DoorPlan) -> Result<()> {
        let line = plan.to_string();
        self.change(|lines| {
            // A door that was lost and added again is remembered once.
            if !lines.contains(&line) {
                lines.push(line);
            }
        })
    }

    /// Forgets a closed door. A door that was not remembered is not an error.
    pub(crate) fn forget(&self, plan: &DoorPlan) -> Result<()> {
        let line = plan.to_string();
        self.change(|lines| {
            if let Some(at) = lines.iter().position(|remembered| *remembered == line) {
                lines.remove(at);
            }
        })
    }

    /// Forgets all doors: they were closed cleanly.
    pub(crate) fn forget_all(&self) {
        let _one_at_a_time = self.changing.lock();
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(
                    "cannot remove {}; its doors will be reopened: {error}",
                    self.path.display()
                );
            }
            _ => {}
        }
    }

    /// The doors of an earlier server that `others` do not bring back.
    pub(crate) fn left(&self, others: &[DoorPlan]) -> Vec<DoorPlan> {
        let read = |line: &String| match DoorPlan::parse(line) {
            Ok(plan) => Some(plan),
            Err(failure) => {
                tracing::error!("{}: cannot reopen a door: {failure}", self.path.display());
                None
            }
        };
        // A door of `serve` is open by now; opening it twice would fail, or show a second device.
        let is_missing = |plan: &DoorPlan| !others.contains(plan);
        self.lines()
            .unwrap_or_else(|failure| {
                tracing::error!("cannot reopen the doors that were added: {failure}");
                Vec::new()
            })
            .iter()
            .filter_map(read)
            .filter(is_missing)
            .collect()
    }

    fn lines(&self) -> Result<Vec<String>> {
        match fs::read_to_string(&self.path) {
            Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(Failure::io(format!("cannot read {}", self.path.display()), &error)),
        }
    }

    fn change(&self, change: impl FnOnce(&mut Vec<String>)) -> Result<()> {
        let _one_at_a_time = self.changing.lock();
        let before = self.lines()?;
        let mut lines = before.clone();
        change(&mut lines);
        if lines == before {
            return Ok(());
        }
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        // Replaced as a whole and not synced: a power cut also ends the users that would wait.
        let anew = self.path.with_extension("new");
        let written = fs::write(&anew, text).and_then(|()| fs::rename(&anew, &self.path));
        written
            .map_err(|error| Failure::io(format!("cannot write {}", self.path.display()), &error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_remembered_is_left_until_it_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let plan = |text: &str| DoorPlan::parse(text).unwrap();
        let doors = || AddedDoors::of(folder.path());
        assert_eq!(doors().left(&[]), []);
        for text in ["ublk=1", "fuse=/mnt/a", "ublk=2", "fuse=/mnt/a"] {
            doors().remember(&plan(text)).unwrap();
        }
        assert_eq!(doors().left(&[]), [plan("ublk=1"), plan("fuse=/mnt/a"), plan("ublk=2")]);
        let of_serve = [plan("ublk"), plan("fuse=/mnt/a")];
        assert_eq!(doors().left(&of_serve), [plan("ublk=1"), plan("ublk=2")], "devices are many");
        doors().forget(&plan("ublk=1")).unwrap();
        doors().forget(&plan("vhost-user=/never/added")).unwrap();
        assert_eq!(doors().left(&[]), [plan("fuse=/mnt/a"), plan("ublk=2")]);
        doors().forget_all();
        doors().forget_all();
        assert_eq!(doors().left(&[]), []);
    }

    #[test]
    fn a_device_of_any_number_is_remembered_with_the_one_it_got() {
        let plan = |text: &str| DoorPlan::parse(text).unwrap();
        assert_eq!(plan("ublk").reopened_at("/dev/ublkb7"), plan("ublk=7"));
        let unprivileged = plan("ublk-unprivileged").reopened_at("/dev/ublkb0");
        assert_eq!(unprivileged, plan("ublk-unprivileged=0"));
        assert_eq!(plan("fuse=/mnt/a").reopened_at("/mnt/a/disk"), plan("fuse=/mnt/a"));
    }

    #[test]
    fn a_server_at_any_port_is_remembered_with_the_one_it_got() {
        let reopened =
            |text: &str, address| DoorPlan::parse(text).unwrap().reopened_at(address).to_string();
        for (text, address, remembered) in [
            ("nbd=tcp:127.0.0.1:0", "nbd://127.0.0.1:40123/disk", "nbd=tcp:127.0.0.1:40123"),
            ("nbd-insecure=tcp:[::]:0", "nbd://[::]:40123/disk", "nbd-insecure=tcp:[::]:40123"),
            ("nbd=tcp:127.0.0.1:7", "nbd://127.0.0.1:7/disk", "nbd=tcp:127.0.0.1:7"),
            ("nbd=unix:/a", "nbd+unix:///disk?socket=%2Fa", "nbd=unix:/a"),
        ] {
            assert_eq!(reopened(text, address), remembered);
        }
    }

    #[test]
    fn a_line_without_meaning_costs_its_own_door_alone() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("doors"), "iscsi=1\nublk=3\n\0\n").unwrap();
        assert_eq!(AddedDoors::of(folder.path()).left(&[]), [DoorPlan::parse("ublk=3").unwrap()]);
    }

    #[test]
    fn a_door_that_cannot_be_remembered_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let doors = AddedDoors::of(&folder.path().join("gone"));
        let failure = doors.remember(&DoorPlan::parse("ublk").unwrap()).unwrap_err();
        assert!(failure.to_string().contains("doors"), "{failure}");
    }
}
