//! One device: made, served, removed.
//!
//! Invariants: the kernel has all commands of all queues before the device is started. The
//! character device is closed before the device is deleted. A device that was released is not
//! touched again. Not here: the interface of every door (`door`), from
//! one server to the next (`hand_over`), its queues (`serving`),
//! requests (`worker`).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sawmill_device::{BlockDevice, Error, ErrorKind, Result};
use sawmill_sys::ublk::{CharDevice, Control, DeviceInfo as KernelInfo, feature, node_path};

use super::DOOR;
use super::channel::{Message, QueueChannel};
use super::limits::{CHECK_EVERY, NODE_TIME_MAX};
use super::options::UblkOptions;
use super::protocol;
use super::registry::{self, failed};
use super::serving::{ServedDevice, ServiceState};
use crate::DoorCounts;
use crate::device_facts::{DeviceFacts, DeviceLock, make_symlink, remove_symlink};

/// The features of all our devices.
const FLAGS: u64 = feature::USER_RECOVERY
    | feature::USER_RECOVERY_REISSUE
    | feature::USER_COPY
    | feature::CMD_IOCTL_ENCODE;
/// The features of an unprivileged device: the driver allows no more.
const FLAGS_UNPRIVILEGED: u64 = feature::UNPRIVILEGED_DEV | feature::CMD_IOCTL_ENCODE;

pub(super) struct UblkState {
    pub(super) id: u32,
    pub(super) options: UblkOptions,
    device: Arc<dyn BlockDevice>,
    /// The driver's features.
    features: u64,
    pub(super) serving: Mutex<Option<ServiceState>>,
    /// The counters from before the device was gone.
    past: Mutex<DoorCounts>,
    pub(super) is_quiet: Mutex<bool>,
}

/// A ublk device and the threads that serve it. Dropping it is [`Stop::Now`](crate::Stop::Now).
pub struct UblkDoor {
    pub(super) shared: Arc<UblkState>,
}

impl UblkDoor {
    /// Makes a device and serves it. Returns when users can open [`UblkDoor::node`].
    ///
    /// Errors: `Invalid` for an option out of range; `Exists` if the number is taken; `Unavailable`
    /// if the kernel has no ublk or an old version; `Denied` without permission (`CAP_SYS_ADMIN`).
    pub fn start(options: UblkOptions, device: Arc<dyn BlockDevice>) -> Result<Self> {
        options.check()?;
        let mut control = registry::control()?;
        let features = features_of(&mut control)?;
        let geometry = device.geometry();
        let request_bytes_max = protocol::request_bytes_max(&geometry, options.request_bytes_max);
        if request_bytes_max == 0 {
            let text = "ublk: the device accepts no request of 4 KiB, the size of a block";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let mut info = KernelInfo {
            queues: options.queue_count(),
            // One tag more than there are requests: see `keep_one_tag_back`.
            queue_depth: options.queue_depth + 1,
            request_bytes_max,
            id: options.id.unwrap_or(u32::MAX),
            server_pid: std::process::id() as i32,
            flags: match (options.unprivileged, options.recoverable) {
                (true, _) => FLAGS_UNPRIVILEGED,
                (false, true) => FLAGS,
                (false, false) => {
                    FLAGS & !(feature::USER_RECOVERY | feature::USER_RECOVERY_REISSUE)
                }
            },
            server_signature: protocol::signature(&options.volume),
            ..KernelInfo::default()
        };
        control.add(&mut info).map_err(|error| {
            let name = options.id.map_or_else(|| "a device".into(), |id| format!("device {id}"));
            failed(&format!("cannot add {name}"), error)
        })?;
        let id = info.id;
        let started = start_added(&mut control, &info, &options, &device);
        let mut serving = match started {
            Ok(serving) => serving,
            Err(error) => {
                let _ = control.delete(id);
                return Err(error);
            }
        };
        if features & feature::QUIESCE == 0 && info.flags & feature::USER_RECOVERY != 0 {
            let requests = options.queue_depth;
            let limit = move || keep_one_tag_back(id, requests);
            // The kernel takes a while for this, and hundreds of devices would wait for each other.
            serving.limiting =
                std::thread::Builder::new().name("ublk-limit".into()).spawn(limit).ok();
        }
        make_symlink(&options.symlink_folder, options.symlink.as_deref(), &node_path(id));
        tracing::info!(id, queues = info.queues, volume = options.volume, "ublk: serving a device");
        Ok(Self::new(id, options, device, features, serving))
    }

    pub(super) fn new(
        id: u32,
        options: UblkOptions,
        device: Arc<dyn BlockDevice>,
        features: u64,
        serving: ServiceState,
    ) -> Self {
        let (serving, past) = (Mutex::new(Some(serving)), Mutex::default());
        let is_quiet = Mutex::new(false);
        UblkDoor {
            shared: Arc::new(UblkState { id, options, device, features, serving, past, is_quiet }),
        }
    }

    /// The number in `/dev/ublkbN`.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.shared.id
    }

    /// The block device.
    #[must_use]
    pub fn node(&self) -> PathBuf {
        node_path(self.shared.id)
    }

    /// Publishes the current size of the device. Returns `Refused` if the kernel cannot do that
    /// (before Linux 6.16): the device keeps its old size until it is stopped and started again.
    pub fn resize(&self) -> Result<()> {
        let id = self.shared.id;
        if self.shared.features & feature::UPDATE_SIZE == 0 {
            let text = "cannot change its size while it runs (that needs Linux 6.16): stop it and \
                start it again";
            return Err(Error::new(ErrorKind::Refused, format!("ublk: device {id} {text}")));
        }
        let sectors = protocol::sectors(&self.shared.device.geometry());
        registry::control()?
            .update_size(id, sectors)
            .map_err(|error| failed(&format!("cannot resize device {id}"), error))
    }
}

/// The driver's features, if it has the required ones.
pub(super) fn features_of(control: &mut Control) -> Result<u64> {
    let features = control.features().unwrap_or(0);
    if features & FLAGS == FLAGS {
        return Ok(features);
    }
    let text = "ublk: this kernel's driver is too old: Linux 6.5 or later is required (recovery \
        and user copy)";
    Err(Error::new(ErrorKind::Unavailable, text))
}

/// Opens the character device, as soon as it exists and is accessible.
pub(super) fn open_char_device(id: u32) -> Result<CharDevice> {
    let began = Instant::now();
    loop {
        match CharDevice::open(id) {
            Ok(device) => return Ok(device),
            Err(error) if began.elapsed() > NODE_TIME_MAX => {
                return Err(failed(
                    &format!("cannot open the character device of device {id}"),
                    error,
                ));
            }
            Err(_) => std::thread::sleep(CHECK_EVERY),
        }
    }
}

/// Serves and starts a device that the kernel has added. After an error, it is still added.
fn start_added(
    control: &mut Control,
    info: &KernelInfo,
    options: &UblkOptions,
    device: &Arc<dyn BlockDevice>,
) -> Result<ServiceState> {
    let id = info.id;
    let device_lock = DeviceLock::wait(DOOR, &options.run_folder, id)?;
    device_lock.write(&facts(options))?;
    // Only the owner of the node may command an unprivileged device.
    let char_device = Arc::new(open_char_device(id)?);
    let parameters = protocol::parameters(&device.geometry(), info.request_bytes_max);
    let step = |what: &str, error| failed(&format!("device {id}: {what}"), error);
    control
        .set_parameters(id, &parameters)
        .map_err(|error| step("the kernel refused its parameters", error))?;
    let mut serving = ServiceState::new(device_lock);
    let served_device = ServedDevice { info, options, device, char_device };
    let outcome = serving.serve_all(control, &served_device).and_then(|()| {
        let started = control.start(id, std::process::id());
        started.map_err(|error| step("cannot start it", error))
    });
    drop(served_device);
    match outcome {
        Ok(()) => Ok(serving),
        Err(error) => {
            serving.abandon(control, id);
            Err(error)
        }
    }
}

/// What is noted of a device that has all its queues served.
pub(super) fn facts(options: &UblkOptions) -> DeviceFacts {
    DeviceFacts {
        volume: options.volume.clone(),
        symlink: options.symlink.clone(),
        is_recovering: false,
        // The driver keeps the signature.
        instance: None,
    }
}

/// Makes the kernel use one tag less than it has, so that one command always waits there. Through
/// these commands (and before Linux 6.16 only through them) the kernel notices immediately that a
/// server died. Otherwise, it checks every 30 s.
fn keep_one_tag_back(id: u32, requests: u16) {
    let queue = PathBuf::from(format!("/sys/block/ublkb{id}/queue"));
    // An I/O scheduler would have tags of its own, and use all of ours.
    let outcome = std::fs::write(queue.join("scheduler"), "none")
        .and_then(|()| std::fs::write(queue.join("nr_requests"), requests.to_string()));
    if let Err(error) = outcome {
        tracing::warn!(
            %error, id, "ublk: no tag is reserved; recovery after a crash may take 30 s longer"
        );
    }
}

impl UblkState {
    pub(super) fn counts(&self) -> DoorCounts {
        let mut counts = *self.past.lock();
        if let Some(serving) = &*self.serving.lock() {
            counts.connections = serving.channels.len() as u64;
            counts.connections_total = serving.channels.len() as u64;
            serving.channels.iter().for_each(|channel| channel.counters.add_to(&mut counts));
        }
        counts
    }

    pub(super) fn quiesce(&self, patience: Duration) -> Result<()> {
        let service =
            self.serving.lock().as_ref().map(|service_state| {
                (service_state.channels.len(), service_state.progress.clone())
            });
        let Some((queues, progress)) = service else {
            return Err(Error::new(
                ErrorKind::Closed,
                format!("ublk: device {} is not served", self.id),
            ));
        };
        let round = progress.begin_round();
        self.send_all(|channel| Message::Quiesce(channel, round));
        if progress.wait_quiet(queues, patience) {
            *self.is_quiet.lock() = true;
            return Ok(());
        }
        self.resume();
        let text =
            format!("ublk: requests of device {} were not answered within {patience:?}", self.id);
        Err(Error::new(ErrorKind::Unavailable, text))
    }

    pub(super) fn resume(&self) {
        *self.is_quiet.lock() = false;
        self.send_all(Message::Resume);
    }

    /// Takes the serving state, once.
    pub(super) fn end(&self) -> Option<ServiceState> {
        let counts = self.counts();
        let serving = self.serving.lock().take()?;
        *self.past.lock() = DoorCounts { connections: 0, in_flight: 0, ..counts };
        Some(serving)
    }

    fn send_all(&self, message: impl Fn(Arc<QueueChannel>) -> Message) {
        if let Some(serving) = &*self.serving.lock() {
            for channel in &serving.channels {
                channel.inbox.send(message(channel.clone()));
            }
        }
    }

    pub(super) fn stop(&self) {
        self.send_all(Message::Resume);
        // A quiet queue would hold the writes of the sync below back, and the sync would never end.
        let Some(serving) = self.end() else { return };
        let id = self.id;
        // Once the device is being stopped, the kernel fails what is in its caches: write that
        // first.
        if let Ok(node) = std::fs::File::open(node_path(id)) {
            let _ = node.sync_all();
        }
        remove_symlink(
            &self.options.symlink_folder,
            self.options.symlink.as_deref(),
            &node_path(id),
        );
        match registry::control() {
            Ok(mut control) => {
                serving.abandon(&mut control, id);
                if let Err(error) = control.delete(id) {
                    tracing::warn!(%error, id, "ublk: cannot delete a device");
                }
            }
            Err(error) => {
                tracing::warn!(%error, id, "ublk: cannot stop a device; it waits for a server");
                serving.leave();
            }
        }
    }
}

impl UblkDoor {
    pub(super) fn stop_now(&self) {
        if self.shared.serving.lock().is_none() {
            return;
        }
        let shared = self.shared.clone();
        // On a thread of its own: the stop writes the kernel's cache and waits for requests in
        // flight, and this promises not to wait.
        let stop = move || shared.stop();
        if let Err(error) = std::thread::Builder::new().name("ublk-stop".into()).spawn(stop) {
            tracing::warn!(%error, id = self.id(), "ublk: cannot start a thread to stop a device");
        }
    }
}

impl Drop for UblkDoor {
    fn drop(&mut self) {
        self.stop_now();
    }
}
