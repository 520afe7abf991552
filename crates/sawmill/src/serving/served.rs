//! One volume of a process that serves volumes: open, away for a hand-off, or given up.
//!
//! Invariants: what the doors hold stays the same while the volume is closed and reopened. A
//! volume that is away has a closed gate, so its requests wait; one that was given up has an open
//! gate and fails them.
//!
//! Not here: doors, and requests to the whole process (`super`).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::added_doors::AddedDoors;
use parking_lot::{Mutex, RwLock};
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_device::layer::{Gate, Meter};
use sawmill_device::{BlockDevice, Error, ErrorKind, Geometry, Request};
use sawmill_doors::DoorVolume;
use sawmill_format::ids::VolumeId;
use sawmill_store::Client;
use sawmill_volume::{Safety, Volume};

use crate::admin::status::{HealthStatus, PositionsStatus, VolumeStatus};
use crate::config::VolumeAddress;
use crate::seen;

/// Interval at which the newest stored state is remembered. If a store is restored from a backup,
/// the loss of what was stored after that goes unnoticed, unless the journal knows of it.
const SEEN_EVERY: Duration = Duration::from_secs(10);

/// The state of a volume in this process.
enum VolumeState {
    Open(Arc<Volume>),
    /// It was closed for a hand-off.
    Away(Absent),
    /// It could not be reopened. It stays closed until a person fixes the cause.
    GivenUp(Absent),
}

/// A volume that this process had open.
struct Absent {
    /// The status when it was closed.
    last: VolumeStatus,
    reason: String,
}

/// One volume, and what was used to open it.
pub(crate) struct ServedVolume {
    pub(crate) address: VolumeAddress,
    pub(crate) volume_id: VolumeId,
    display_name: String,
    state: RwLock<VolumeState>,
    /// What the doors hold: it stays when the volume is closed and reopened.
    gate: Arc<Gate>,
    pub(super) meter: Arc<Meter<Arc<Gate>>>,
    pub(crate) store: Arc<Client>,
    pub(crate) folder: PathBuf,
    pub(crate) journal_path: Option<PathBuf>,
    /// Doors that were added to it. Readers have none, because they share the writer's folder.
    pub(super) added_doors: Option<AddedDoors>,
    /// When this was last compared with what is stored, and the newest segment that this loop has
    /// remembered.
    remembered: Mutex<(Instant, Option<u64>)>,
}

impl ServedVolume {
    pub(crate) fn new(
        address: VolumeAddress,
        volume: Arc<Volume>,
        store: Arc<Client>,
        folder: PathBuf,
        journal_path: Option<PathBuf>,
    ) -> Self {
        let (volume_id, remembered) =
            (volume.status().volume_id, Mutex::new((Instant::now(), None)));
        let gate = Arc::new(Gate::new(Arc::clone(&volume) as Arc<dyn BlockDevice>));
        let (display_name, meter) =
            (address.display_name(), Arc::new(Meter::new(Arc::clone(&gate))));
        let state = RwLock::new(VolumeState::Open(volume));
        let added_doors = journal_path.as_ref().map(|_| AddedDoors::of(&folder));
        ServedVolume {
            address,
            volume_id,
            display_name,
            state,
            gate,
            meter,
            store,
            folder,
            journal_path,
            added_doors,
            remembered,
        }
    }

    /// The export's name: the volume's, with the cut that is served.
    pub(crate) fn name(&self) -> &str {
        &self.display_name
    }

    /// The open volume. Returns `Unavailable` while it is away; the text says why.
    pub(crate) fn volume(&self) -> Result<Arc<Volume>> {
        match &*self.state.read() {
            VolumeState::Open(volume) => Ok(Arc::clone(volume)),
            VolumeState::Away(Absent { reason, .. })
            | VolumeState::GivenUp(Absent { reason, .. }) => Err(Failure::new(
                Exit::Unavailable,
                format!("volume {}: {reason}", self.display_name),
            )),
        }
    }

    /// Closes the volume as if the process had died: accepted writes are in its journal, and
    /// another process can open it once the last reference to the result is dropped. New requests
    /// wait.
    pub(crate) fn close_as_it_is(
        &self,
        patience: Duration,
    ) -> sawmill_device::Result<Option<Arc<Volume>>> {
        // First: nothing may be accepted after the log below has been asked to cover everything.
        self.gate.shut(patience)?;
        // Memory may not outlive this process, so answered writes go to the disk first.
        if let Err(error) = self.log_all(patience) {
            self.gate.open();
            return Err(error);
        }
        let mut state = self.state.write();
        let (closed, last) = match &mut *state {
            VolumeState::Open(volume) => (Some(Arc::clone(volume)), volume_status(volume)),
            VolumeState::Away(absent) | VolumeState::GivenUp(absent) => {
                (None, std::mem::take(&mut absent.last))
            }
        };
        let reason = "it is being handed off to another process; try again".to_owned();
        *state = VolumeState::Away(Absent { last, reason });
        // The lock ends here, because a request for the status must not wait for the close.
        drop(state);
        let Some(volume) = closed else { return Ok(None) };
        volume.close_now();
        // The gate's reference to the volume would keep the journal locked for the next process.
        self.gate.replace(Arc::new(AbsentDevice(self.gate.geometry())))?;
        Ok(Some(volume))
    }

    /// Returns when everything accepted so far is logged.
    pub(crate) fn log_all(&self, patience: Duration) -> sawmill_device::Result<()> {
        let VolumeState::Open(volume) = &*self.state.read() else { return Ok(()) };
        // A volume that has failed has nothing more to log, and reports that to its users.
        match volume.wait(Safety::Logged, Some(patience)) {
            Ok(false) => {
                let text =
                    format!("the journal of {} accepted no writes for {patience:?}", self.name());
                Err(Error::new(ErrorKind::Unavailable, text))
            }
            _ => Ok(()),
        }
    }

    /// Puts the reopened volume back: its doors resume.
    pub(crate) fn put_back(&self, volume: Arc<Volume>) -> sawmill_device::Result<()> {
        self.gate.replace(Arc::clone(&volume) as Arc<dyn BlockDevice>)?;
        // Before the gate opens, so that no request is served while a status says that it is away.
        *self.state.write() = VolumeState::Open(volume);
        self.gate.open();
        Ok(())
    }

    /// The volume cannot be reopened now: its users wait.
    pub(crate) fn keep_away(&self, why: &Failure) {
        if let VolumeState::Away(absent) = &mut *self.state.write() {
            absent.reason = format!("a hand-off was rolled back; reopen failed, retrying: {why}");
        }
    }

    /// The volume will not be reopened in this process: its users get errors instead of waiting.
    pub(crate) fn give_up(&self, why: &Failure) {
        let mut state = self.state.write();
        if let VolumeState::Away(absent) = &mut *state {
            let reason = format!(
                "a hand-off was rolled back and reopen failed; accepted writes are in its journal; \
                 fix the cause and retry the hand-off, or restart the server: {why}"
            );
            *state =
                VolumeState::GivenUp(Absent { last: std::mem::take(&mut absent.last), reason });
        }
        drop(state);
        // Waiting requests now reach `Away`, which fails them.
        self.gate.open();
    }

    pub(crate) fn is_away(&self) -> bool {
        matches!(*self.state.read(), VolumeState::Away(_))
    }

    /// Why the volume was given up, if it was.
    pub(super) fn given_up(&self) -> Option<String> {
        match &*self.state.read() {
            VolumeState::GivenUp(absent) => {
                Some(format!("volume {}: {}", self.display_name, absent.reason))
            }
            _ => None,
        }
    }

    /// The newest status of the volume, open or not.
    pub(super) fn known(&self) -> VolumeStatus {
        match &*self.state.read() {
            VolumeState::Open(volume) => volume_status(volume),
            VolumeState::Away(absent) | VolumeState::GivenUp(absent) => {
                VolumeStatus { health: closed(absent.reason.clone()), ..absent.last.clone() }
            }
        }
    }

    /// The volume as doors serve it.
    pub(crate) fn door_volume(&self) -> DoorVolume {
        DoorVolume {
            name: self.display_name.clone(),
            description: format!("{} on {}", self.display_name, self.store.name()),
            device: Arc::clone(&self.meter) as Arc<dyn BlockDevice>,
            folder: self.folder.clone(),
            identity: match (self.folder.file_name(), &self.address.cut) {
                (Some(name), None) => name.to_string_lossy().into_owned(),
                (Some(name), Some((cut, _))) => format!("{}@{cut}", name.to_string_lossy()),
                (None, _) => self.display_name.clone(),
            },
            outlives_server: true,
            queues: None,
        }
    }

    pub(crate) fn health(&self) -> HealthStatus {
        self.known().health
    }

    pub(crate) fn positions(&self) -> PositionsStatus {
        self.known().positions
    }

    /// Remembers what the store has, now and then. A fenced process knows less than the one that
    /// fenced it, so it remembers nothing.
    pub(super) fn remember_seen(&self) {
        let mut remembered = self.remembered.lock();
        if self.journal_path.is_none() || remembered.0.elapsed() < SEEN_EVERY {
            return;
        }
        let Ok(volume) = self.volume() else { return };
        remembered.0 = Instant::now();
        if remembered.1 != Some(volume.status().stored_sequence) && self.health().state == "serving"
        {
            remembered.1 = seen::remember(&self.folder, &volume);
        }
    }
}

fn closed(reason: String) -> HealthStatus {
    HealthStatus { state: "closed".into(), since_ms: None, reason: Some(reason) }
}

/// The status of an open volume.
fn volume_status(volume: &Volume) -> VolumeStatus {
    let record = volume.record();
    VolumeStatus {
        block_bytes: record.block_bytes,
        segment_bytes: record.segment_bytes,
        flush: record.flush_mode.to_string(),
        created_unix_ms: record.created_unix_ms,
        ..VolumeStatus::new(&volume.status())
    }
}

impl Drop for ServedVolume {
    fn drop(&mut self) {
        // No effect on a volume that was closed cleanly; the others keep accepted writes in their
        // journals.
        if let VolumeState::Open(volume) = &*self.state.read() {
            volume.close_now();
        }
    }
}

/// Stands in for a volume that another process may have. Its gate is closed until the volume is
/// given up.
struct AbsentDevice(Geometry);

impl BlockDevice for AbsentDevice {
    fn geometry(&self) -> Geometry {
        self.0
    }

    fn submit(&self, request: Request) {
        let text = "the volume was closed for a hand-off and could not be reopened; see the log";
        let away = || Error::new(ErrorKind::Unavailable, text);
        let error = request.check(&self.0).err().unwrap_or_else(away);
        request.fail(error);
    }
}

#[cfg(test)]
mod tests {
    use sawmill_device::{BlockDeviceExt, MemoryDevice};

    use super::*;

    #[test]
    fn a_volume_that_is_away_still_tells_invalid_requests_from_others() {
        let away = AbsentDevice(MemoryDevice::new(1 << 20).geometry());
        let kind = |offset| away.read_at(offset, 4096).map_err(|error| error.kind());
        assert_eq!(kind(0), Err(ErrorKind::Unavailable));
        assert_eq!(kind(1 << 20), Err(ErrorKind::Invalid), "it reaches past the end");
    }
}
