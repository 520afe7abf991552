//! A device from one server to the next: what it hands over, and how another process takes it over.
//!
//! The kernel keeps the device meanwhile, so its number and its volume are all that is handed over.
//! Taking over after a crash is the same.
//!
//! Invariant: what fails leaves a device that waits for a server and can be taken over later. Not
//! here: making and removing devices (`server`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sawmill_device::{BlockDevice, Error, ErrorKind, Result};
use sawmill_sys::ublk::{Control, DeviceState, feature, node_path};

use super::DOOR;
use super::limits::CHECK_EVERY;
use super::options::UblkOptions;
use super::registry::{self, failed};
use super::server::{UblkDoor, UblkState, facts, features_of, open_char_device};
use super::serving::{ServedDevice, ServiceState};
use crate::DoorPiece;
use crate::device_facts::{DeviceFacts, DeviceLock, make_symlink};

impl UblkDoor {
    /// Takes over a device whose server is gone, after a crash or
    /// [`QuietDoor::release`](crate::QuietDoor::release). Its users wait until then, and requests
    /// that the old server had not answered are served now. The number of queues and the limits
    /// stay the same.
    ///
    /// Errors: `NotFound`; `Refused` for a device of another program or volume, or one that cannot
    /// be taken over; `InUse` if its server still runs; `Unavailable` if the kernel does not notice
    /// in time that it is gone.
    pub fn recover(id: u32, options: UblkOptions, device: Arc<dyn BlockDevice>) -> Result<Self> {
        options.check()?;
        if options.unprivileged {
            let text =
                "ublk: an unprivileged device ends with its server, so it cannot be taken over";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let mut control = registry::control()?;
        let features = features_of(&mut control)?;
        let device_info = registry::device(&mut control, &options.run_folder, id)?;
        let refuse =
            |text: String| Err(Error::new(ErrorKind::Refused, format!("ublk: device {id} {text}")));
        if !device_info.is_ours {
            return refuse("belongs to another program and was not changed".into());
        }
        if !device_info.is_for(&options.volume) {
            let made_for = device_info.volume.unwrap_or_else(|| "another volume".into());
            return refuse(format!(
                "was made for {made_for}, not for {}; its users would see other data",
                options.volume
            ));
        }
        if device_info.state == DeviceState::Dead {
            return refuse("is stopped; delete it and start a new one".into());
        }
        let size_bytes = device.geometry().size_bytes;
        // The kernel keeps the size it knows, and requests beyond the end of a smaller volume would
        // fail under a file system.
        if device_info.size_bytes > size_bytes {
            return refuse(format!(
                "has {} bytes, more than the volume's {size_bytes}",
                device_info.size_bytes
            ));
        }
        let device_lock = DeviceLock::wait(DOOR, &options.run_folder, id)?;
        let is_half_taken =
            DeviceFacts::read(&options.run_folder, id).is_some_and(|facts| facts.is_recovering);
        if is_half_taken && features & feature::QUIESCE == 0 {
            // The kernel would fail on the queues that have no server yet.
            return Err(lost(id));
        }
        start_recovery(&mut control, id, options.recovery_time_max)?;
        let info =
            control.info(id).map_err(|error| failed(&format!("device {id} vanished"), error))?;
        // Before any queue has a server: if this process dies in the middle, the next one must know
        // it.
        device_lock.write(&DeviceFacts { is_recovering: true, ..facts(&options) })?;
        let mut serving = ServiceState::new(device_lock);
        let outcome = open_char_device(id).and_then(|char_device| {
            let (info, options, device) = (&info, &options, &device);
            let char_device = Arc::new(char_device);
            let served_device = ServedDevice { info, options, device, char_device };
            serving.serve_all(&mut control, &served_device)
        });
        let outcome = outcome.and_then(|()| {
            // Last: from here on the kernel sends requests, and every queue needs a thread by then.
            let ended = control.end_recovery(id, std::process::id());
            ended.map_err(|error| failed(&format!("cannot take over device {id}"), error))?;
            serving.device_lock.write(&facts(&options))
        });
        if let Err(error) = outcome {
            // Its users continue to wait: the next attempt may succeed.
            serving.leave();
            return Err(error);
        }
        make_symlink(&options.symlink_folder, options.symlink.as_deref(), &node_path(id));
        tracing::info!(id, volume = options.volume, "ublk: took over a device");
        Ok(Self::new(id, options, device, features, serving))
    }
}

/// Starts the takeover of the device, as soon as the kernel has noticed that its server is gone.
fn start_recovery(control: &mut Control, id: u32, time_max: Duration) -> Result<()> {
    let began = Instant::now();
    loop {
        match control.start_recovery(id) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {
                if began.elapsed() >= time_max {
                    let text = format!(
                        "ublk: the old server of device {id} is still running after {time_max:?}"
                    );
                    return Err(Error::new(ErrorKind::Unavailable, text).with_source(error));
                }
                std::thread::sleep(CHECK_EVERY);
            }
            Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => {
                return Err(lost(id).with_source(error));
            }
            Err(error) => return Err(failed(&format!("cannot take over device {id}"), error)),
        }
    }
}

fn lost(id: u32) -> Error {
    let text = "a server died while taking it over, and this kernel cannot recover it after that";
    Error::new(
        ErrorKind::Refused,
        format!("ublk: device {id} is lost: {text}; delete it and start a new one"),
    )
}

/// What a successor gets of a device whose queues rest.
pub(super) fn pieces(state: &UblkState) -> Result<Vec<DoorPiece>> {
    let UblkState { id, options, .. } = state;
    let invalid = |text: &str| Error::new(ErrorKind::Invalid, format!("ublk: device {id} {text}"));
    if !*state.is_quiet.lock() {
        return Err(invalid("is not quiet"));
    }
    if options.unprivileged {
        return Err(invalid(
            "is unprivileged and ends with its server, so it cannot be handed over",
        ));
    }
    let facts = BTreeMap::from([
        ("id".to_owned(), id.to_string()),
        ("volume".to_owned(), options.volume.clone()),
    ]);
    Ok(vec![DoorPiece { what: "device".to_owned(), facts, ..DoorPiece::default() }])
}
