//! Orders about a volume's past: given to the process that serves it, or to one that attaches for it.
//!
//! Invariant: a volume that somebody serves on this machine is never attached a second time.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use sawmill_store::ObjectStore;
use sawmill_volume::{Cut, OpenOptions, Undo, Volume, limits};

use crate::config::{Places, VolumeAddress};
use crate::exit::{Exit, Failure, Result};
use crate::{control, wiring};

/// Where a command that attaches by itself finds what it needs.
#[derive(Args, Default)]
pub(crate) struct Attach {
    /// The journal of a volume that nobody serves at present, when it is not in its usual place.
    #[arg(long, value_name = "PATH")]
    journal: Option<PathBuf>,

    /// Go on although the store lets two writers win; you promise that there is one.
    #[arg(long)]
    no_fencing: bool,
}

/// What can be ordered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Past {
    CreateSnapshot(String),
    DeleteSnapshot(String),
    SetRetention(u64),
    RollBack(Cut),
}

impl Past {
    /// The query by which it is asked over a control socket.
    pub(crate) fn to_query(&self) -> String {
        match self {
            Past::CreateSnapshot(name) => format!("create_snapshot={name}"),
            Past::DeleteSnapshot(name) => format!("delete_snapshot={name}"),
            Past::SetRetention(seconds) => format!("set_retention_s={seconds}"),
            Past::RollBack(Cut::Snapshot(name)) => format!("roll_back_to_snapshot={name}"),
            Past::RollBack(Cut::Time(unix_ms)) => format!("roll_back_to_unix_ms={unix_ms}"),
            Past::RollBack(Cut::Position(position)) => format!("roll_back_to_position={position}"),
        }
    }

    /// Reads such a query.
    pub(crate) fn parse(query: &str) -> Result<Past> {
        let wrong = || Failure::usage(format!("{query} is no order"));
        let (name, value) = query.split_once('=').ok_or_else(wrong)?;
        let number = || value.parse::<u64>().map_err(|_| wrong());
        Ok(match name {
            "create_snapshot" => Past::CreateSnapshot(value.to_owned()),
            "delete_snapshot" => Past::DeleteSnapshot(value.to_owned()),
            "set_retention_s" => Past::SetRetention(number()?),
            "roll_back_to_snapshot" => Past::RollBack(Cut::Snapshot(value.to_owned())),
            "roll_back_to_unix_ms" => Past::RollBack(Cut::Time(number()?)),
            "roll_back_to_position" => Past::RollBack(Cut::Position(number()?)),
            _ => return Err(wrong()),
        })
    }

    /// Waits until it is done; says how a rollback is undone.
    pub(crate) fn carry_out(&self, volume: &Volume) -> sawmill_volume::Result<Option<Undo>> {
        match self {
            Past::CreateSnapshot(name) => volume.create_snapshot(name).map(|()| None),
            Past::DeleteSnapshot(name) => volume.delete_snapshot(name).map(|()| None),
            Past::SetRetention(seconds) => volume.set_retention(*seconds).map(|()| None),
            Past::RollBack(cut) => volume.roll_back(cut).map(Some),
        }
    }
}

/// Carries out an order by whoever serves the volume, or by attaching. Returns the snapshot of the state
/// before, of a rollback.
pub(crate) fn order(
    places: &Places,
    address: &VolumeAddress,
    attach: &Attach,
    past: &Past,
) -> Result<Option<String>> {
    if let Some((folder, _)) = served(places, address)?
        && let Some(answer) = control::order_past(&folder, &past.to_query())?
    {
        return Ok(answer["undo"].as_str().map(str::to_owned));
    }
    let undo = at_rest(places, address, attach, |volume| past.carry_out(volume).map_err(Failure::from))?;
    Ok(undo.map(|undo| undo.snapshot))
}

/// The folder of a volume that this machine serves for writing.
pub(crate) fn served(places: &Places, address: &VolumeAddress) -> Result<Option<(PathBuf, u32)>> {
    let served = control::served(&places.state_folder()?, address)?;
    let writes = served.filter(|(folder, _)| folder.join(control::WRITER_SOCKET).exists());
    Ok(writes.map(|(folder, process)| (folder, process.pid)))
}

/// Attaches a volume that nobody serves, does something, and lets it go with everything stored.
pub(crate) fn at_rest<T>(
    places: &Places,
    address: &VolumeAddress,
    attach: &Attach,
    act: impl FnOnce(&Arc<Volume>) -> Result<T>,
) -> Result<T> {
    let (store, record) = wiring::find(address)?;
    let folder = places.volume_folder(&record.volume_id.to_string(), &address.store_url)?;
    wiring::make_volume_folder(&folder, &address.store_url)?;
    let journal_path = attach.journal.clone().unwrap_or_else(|| folder.join("journal"));
    let made = !journal_path.exists();
    let options = OpenOptions {
        journal_bytes: limits::journal_bytes_min(record.segment_bytes),
        staging_bytes: limits::STAGING_BYTES_MIN,
        no_fencing: attach.no_fencing,
        ..OpenOptions::new(&journal_path)
    };
    let dynamic: Arc<dyn ObjectStore> = store;
    let volume = Volume::open(dynamic, &address.name, options).map_err(|error| {
        let failure = Failure::from(error);
        if failure.exit() == Exit::Refused {
            let text =
                format!("{failure}; if another machine serves {} now, give the command there", address.name);
            return Failure::new(Exit::Refused, text);
        }
        failure.of_volume(&address.name)
    })?;
    let done = act(&volume);
    let closed = volume.close().map_err(Failure::from);
    if made && closed.is_ok() {
        // Of the least size, and empty: whoever serves the volume next makes one to its own liking.
        let _ = fs::remove_file(&journal_path);
    }
    let done = done.map_err(|failure| failure.of_volume(&address.name))?;
    closed.map_err(|failure| failure.of_volume(&address.name)).map(|()| done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_survives_the_way_over_a_socket() {
        let cuts = [Cut::Snapshot("a.b-c_9".into()), Cut::Time(5), Cut::Position(u64::MAX)];
        let orders =
            [Past::CreateSnapshot("x".into()), Past::DeleteSnapshot("x".into()), Past::SetRetention(9)];
        for past in cuts.map(Past::RollBack).into_iter().chain(orders) {
            assert_eq!(Past::parse(&past.to_query()).unwrap(), past);
        }
        assert!(Past::parse("make_coffee=1").is_err());
    }
}
