//! Orders about a volume's past: sent to the process that serves it, or carried out on a volume at
//! rest.
//!
//! Not here: how the volume is attached for that (`attach`).

use sawmill_volume::{Undo, Volume};

use crate::attach::{Attach, served};
use crate::config::{Paths, VolumeAddress};
use crate::control;
use crate::control::protocol::{ChangeReply, ControlRequest, PastChange};
use sawmill_console::exit::{Failure, Result};

impl PastChange {
    /// Waits until the order is done. Returns how to undo a rollback.
    pub(crate) fn carry_out(&self, volume: &Volume) -> sawmill_volume::Result<Option<Undo>> {
        match self {
            PastChange::CreateSnapshot(name) => volume.create_snapshot(name).map(|()| None),
            PastChange::DeleteSnapshot(name) => volume.delete_snapshot(name).map(|()| None),
            PastChange::SetRetention(seconds) => volume.set_retention(*seconds).map(|()| None),
            PastChange::RollBack(cut) => volume.roll_back(cut).map(Some),
        }
    }
}

/// Carries out an order in the process that serves the volume, or by attaching the volume. Returns
/// the snapshot of the state before a rollback.
pub(crate) fn order(
    paths: &Paths,
    address: &VolumeAddress,
    attach: &Attach,
    past: &PastChange,
) -> Result<Option<String>> {
    if let Some((folder, _)) = served(paths, address)?
        // A server that ended in between answers nothing; then the volume is at rest.
        && let Some(ChangeReply { undo }) =
            control::query_writer(&folder, &ControlRequest::Past(past.clone()))?
    {
        return Ok(undo);
    }
    let undo =
        attach.at_rest(paths, address, |volume| past.carry_out(volume).map_err(Failure::from))?;
    Ok(undo.map(|undo| undo.snapshot))
}
