//! Orders about a volume's past: given to the process that serves it, or carried out on a volume at rest.
//!
//! Not here: how it is attached for that (`attach`).

use sawmill_volume::{Cut, Undo, Volume};

use crate::attach::{Attach, served};
use crate::config::{Places, VolumeAddress};
use crate::control;
use crate::exit::{Failure, Result};

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
    let undo = attach.at_rest(places, address, |volume| past.carry_out(volume).map_err(Failure::from))?;
    Ok(undo.map(|undo| undo.snapshot))
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
