//! The door itself: from the mount to the first request, a hand-over, and the end.
//!
//! Invariants: the mount holder, if there is one, holds the descriptor before the first user can
//! open the file. This process owns the device before it takes any request from the kernel, so the
//! previous server is gone. Not here: how a request is answered (`worker`).

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rustix::io::Errno;
use sawmill_device::{BlockDevice, Error, ErrorKind, Result};
use sawmill_sys::{LoopAccess, LoopDevice};

use super::answer::{self, InitParameters};
use super::channel::KernelChannel;
use super::greeting::greet;
use super::hand_over::{MountHandOver, handed};
use super::holder_watch::HolderWatch;
use super::limits::{NAME_BYTES_MAX, REQUEST_BYTES_MAX, REQUEST_BYTES_MIN, WORKERS_MAX};
use super::metrics::FuseMetrics;
use super::mount::{Mount, MountOptions};
use super::options::FuseOptions;
use super::protocol::init;
use super::worker::{FuseFile, work};
use crate::mount_holder::MountHolder;
use crate::{Door, DoorCounts, DoorPiece, ExportStatus, QuietDoor, Stop};

/// How long a stop waits for short-time users of a device, such as udev.
const BUSY_TIME_MAX: Duration = Duration::from_secs(2);

/// A volume as one file in a folder of its own. Dropping it is [`Stop::Now`].
pub struct FuseDoor {
    mounted: Arc<MountService>,
}

/// A mount and the threads that serve it.
struct MountService {
    channel: Arc<KernelChannel>,
    file: Arc<FuseFile>,
    mount: Mount,
    parameters: InitParameters,
    workers: Mutex<Vec<JoinHandle<()>>>,
    loop_device: Mutex<Option<LoopDevice>>,
    mount_holder: Mutex<Option<HolderWatch>>,
    /// Closed, or handed over.
    is_over: AtomicBool,
}

impl FuseDoor {
    /// Exports the device as `MOUNTPOINT/NAME`. If a mount holder answers on the socket of the
    /// options, this resumes the mount that it holds instead of making one: its users have waited
    /// and see no error.
    ///
    /// Errors: `Invalid`, `NotFound` or `InUse` for an unusable folder or option; `Refused` if the
    /// mount holder holds another mount than this; `Unavailable` if the system refuses.
    pub fn mount(options: FuseOptions, device: Arc<dyn BlockDevice>) -> Result<Self> {
        check(&options, &*device)?;
        if let Some(mount_holder) = &options.mount_holder
            && let Some((mount_holder, handed)) = MountHolder::find(&mount_holder.socket)?
        {
            let mountpoint = options.mountpoint.display();
            tracing::info!(%mountpoint, "fuse: a mount holder holds the mount; resuming it");
            return Self::start_serving(&options, device, handed, Some(mount_holder));
        }
        let geometry = device.geometry();
        let bytes_max = request_bytes_max(&*device);
        let name = &options.file_name;
        let (read_only, allow_other) = (geometry.read_only, options.allow_other);
        let mount_options =
            MountOptions { name, read_only, allow_other, read_bytes_max: bytes_max };
        let (mount, kernel) = Mount::make(&options.mountpoint, &mount_options)?;
        let outcome = greet(&kernel, bytes_max).and_then(|agreed| {
            let mount_holder = Self::kept(&options, &mount, &kernel, &agreed, geometry.size_bytes)?;
            Ok((agreed, mount_holder))
        });
        let (agreed, mount_holder) = outcome.inspect_err(|_| mount.abandon())?;
        let door = Self::open(&options, device, mount, kernel, agreed, mount_holder)?;
        // From now on the kernel caches the folder, also while no server runs.
        let _ = std::fs::metadata(&door.mounted.mount.path);
        door.mounted.attach(&options)?;
        Ok(door)
    }

    /// Takes over the door of another process, on the same mount, with the result of its
    /// [`QuietDoor::hand_over`]. Returns `Invalid` if that is not a mount, or not the one that the
    /// options name.
    pub fn take_over(
        options: FuseOptions,
        device: Arc<dyn BlockDevice>,
        pieces: Vec<DoorPiece>,
    ) -> Result<Self> {
        check(&options, &*device)?;
        let handed = pieces.into_iter().find(|piece| piece.what == "fuse");
        let handed = handed
            .ok_or_else(|| Error::new(ErrorKind::Invalid, "fuse: no mount was handed over"))?;
        // Flags that cannot be read are refused below.
        let mount_holder =
            options.mount_holder.as_ref().filter(|_| handed.parsed("flags").is_ok_and(can_outlive));
        let mount_holder =
            mount_holder.and_then(|holder_options| match MountHolder::at(&holder_options.socket) {
                Some(mount_holder) => Some(mount_holder),
                None => MountHolder::start(
                    &holder_options.socket,
                    &holder_options.command,
                    &handed,
                )
                .inspect_err(|error| {
                    // Users wait behind this door, so a missing part is logged and does not close
                    // the door.
                    tracing::error!(
                        "fuse: no mount holder; the mount will not survive this server: {error}"
                    );
                })
                .ok(),
            });
        Self::start_serving(&options, device, handed, mount_holder)
    }

    fn start_serving(
        options: &FuseOptions,
        device: Arc<dyn BlockDevice>,
        piece: DoorPiece,
        mount_holder: Option<MountHolder>,
    ) -> Result<Self> {
        let MountHandOver { mount, kernel, parameters: agreed, number, size_bytes } =
            MountHandOver::read(options, piece)?;
        // The kernel was told the limit once, at the mount, and cannot be told another.
        if agreed.write_bytes_max > request_bytes_max(&*device) {
            let text = format!(
                "fuse: the mount at {} has requests of up to {} bytes; this device accepts at most \
                {}",
                mount.path.display(),
                agreed.write_bytes_max,
                request_bytes_max(&*device)
            );
            return Err(Error::new(ErrorKind::Refused, text));
        }
        let is_resized = size_bytes != device.geometry().size_bytes;
        if agreed.flags & init::RESEND != 0 {
            // Requests that another server took and did not answer; there are none after a
            // hand-off. Ask before our own workers take anything: otherwise the kernel would resend
            // their requests too.
            rustix::io::write(&kernel, &answer::resend()).map_err(|error| {
                let what = "fuse: cannot find out what was left open";
                Error::caused(ErrorKind::Unavailable, what, error)
            })?;
        }
        let door = Self::open(options, device, mount, kernel, agreed, mount_holder)?;
        // The number may belong to another file by now, if somebody has detached the device in
        // between.
        let device = number.map(LoopDevice::numbered).filter(|device| device.is_of(&door.file()));
        *door.mounted.loop_device.lock() = device;
        // Users wait behind this door, so a missing part is logged and does not close the door.
        let mounted = &door.mounted;
        let update = if is_resized { mounted.resized() } else { mounted.notify_mount_holder() };
        let outcome = update.and_then(|()| mounted.attach(options));
        if let Err(error) = outcome {
            tracing::error!(mountpoint = %mounted.mount.path.display(), "fuse: the mount resumes, \
                but: {error}");
        }
        Ok(door)
    }

    /// Starts the workers. If that fails, the mount stays: a mount holder may hold it.
    fn open(
        options: &FuseOptions,
        device: Arc<dyn BlockDevice>,
        mount: Mount,
        kernel: OwnedFd,
        init_parameters: InitParameters,
        mount_holder: Option<MountHolder>,
    ) -> Result<Self> {
        let failed = |error: std::io::Error| {
            Error::caused(ErrorKind::Unavailable, "fuse: cannot start the door", error)
        };
        let time_s =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let (user, group) =
            (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let (name, mode) = (options.file_name.clone(), options.mode & 0o777);
        let fuse_file = Arc::new(FuseFile { device, name, mode, user, group, time_s });
        let channel = Arc::new(KernelChannel::new(kernel, options.workers).map_err(failed)?);
        let mut workers = Vec::new();
        for number in 0..options.workers {
            let (channel, fuse_file) = (channel.clone(), fuse_file.clone());
            let thread = std::thread::Builder::new().name(format!("fuse-{number}"));
            workers.push(thread.spawn(move || work(&channel, &fuse_file)).map_err(failed)?);
        }
        let mounted = MountService {
            channel,
            file: fuse_file,
            mount,
            parameters: init_parameters,
            workers: Mutex::new(workers),
            loop_device: Mutex::default(),
            mount_holder: Mutex::default(),
            is_over: AtomicBool::new(false),
        };
        if let (Some(how), Some(mount_holder)) = (&options.mount_holder, mount_holder) {
            let holder_watch =
                mounted.handed().map(|handed| HolderWatch::new(how, mount_holder, handed));
            *mounted.mount_holder.lock() = holder_watch
                .inspect_err(|error| tracing::error!("the mount holder is not watched: {error}"))
                .ok();
        }
        Ok(FuseDoor { mounted: Arc::new(mounted) })
    }

    /// Starts a mount holder if one is requested and useful.
    fn kept(
        options: &FuseOptions,
        mount: &Mount,
        kernel: &OwnedFd,
        parameters: &InitParameters,
        size_bytes: u64,
    ) -> Result<Option<MountHolder>> {
        // Its start comes before the door opens: users must not rely on a mount that would die with
        // the server although they asked for more.
        let Some(mount_holder) = &options.mount_holder else { return Ok(None) };
        if !can_outlive(parameters.flags) {
            return Ok(None);
        }
        let handed = handed(&options.file_name, mount, kernel, parameters, None, size_bytes)?;
        MountHolder::start(&mount_holder.socket, &mount_holder.command, &handed).map(Some)
    }

    /// The file with the volume.
    #[must_use]
    pub fn file(&self) -> PathBuf {
        self.mounted.file()
    }

    /// The loop device, if one is attached.
    #[must_use]
    pub fn loop_device(&self) -> Option<LoopDevice> {
        *self.mounted.loop_device.lock()
    }

    /// The counters since the start.
    #[must_use]
    pub fn metrics(&self) -> FuseMetrics {
        let channel = &self.mounted.channel;
        channel.counters.snapshot(u64::from(!channel.is_finished()), channel.in_flight())
    }
}

impl MountService {
    /// Attaches a loop device if one is requested and there is none.
    fn attach(&self, options: &FuseOptions) -> Result<()> {
        let mut slot = self.loop_device.lock();
        if !options.attach_loop || slot.is_some() {
            return Ok(());
        }
        let geometry = self.file.device.geometry();
        let failed = |error: std::io::Error| {
            let what = format!("fuse: cannot attach a loop device to {}", self.file().display());
            Error::caused(ErrorKind::Unavailable, what, error)
        };
        let file =
            std::fs::OpenOptions::new().read(true).write(!geometry.read_only).open(self.file());
        let file = file.map_err(failed)?;
        let access = if geometry.read_only { LoopAccess::ReadOnly } else { LoopAccess::ReadWrite };
        let device = LoopDevice::attach(&file, geometry.block_bytes, access).map_err(failed)?;
        if !device.is_direct().unwrap_or(true) {
            let path = device.path();
            tracing::warn!(
                path = %path.display(), "fuse: the loop device has no direct I/O and is slower"
            );
        }
        *slot = Some(device);
        drop(slot);
        // `handed` takes this lock, too.
        self.notify_mount_holder()
    }

    fn notify_mount_holder(&self) -> Result<()> {
        let handed = self.handed()?;
        self.mount_holder.lock().as_ref().map_or(Ok(()), |mount_holder| mount_holder.update(handed))
    }

    fn handed(&self) -> Result<DoorPiece> {
        let number = self.loop_device.lock().map(|device| device.number());
        let size_bytes = self.file.device.geometry().size_bytes;
        handed(
            &self.file.name,
            &self.mount,
            &self.channel.kernel,
            &self.parameters,
            number,
            size_bytes,
        )
    }

    /// The file with the volume.
    fn file(&self) -> PathBuf {
        self.mount.path.join(&self.file.name)
    }

    /// Notifies the kernel, and the loop device, of the new size of the device. Not while the door
    /// is quiet.
    fn resized(&self) -> Result<()> {
        self.channel.send(&[&answer::invalidate_file()]);
        let device = *self.loop_device.lock();
        if let Some(device) = device {
            // The loop device uses the kernel's cached size of the file, so refresh that first.
            let outcome = std::fs::metadata(self.file()).and_then(|_| device.take_size());
            outcome.map_err(|error| {
                let what =
                    format!("fuse: {} does not accept the new size", device.path().display());
                Error::caused(ErrorKind::Unavailable, what, error)
            })?;
        }
        self.notify_mount_holder()
    }

    fn detach_loop(&self) {
        // Out of the slot first, so that it is detached once.
        let Some(device) = self.loop_device.lock().take() else { return };
        let path = device.path();
        if !device.is_of(&self.file()) {
            return;
        }
        if let Err(error) = device.detach() {
            tracing::warn!(%error, path = %path.display(), "fuse: cannot detach the loop device");
        }
        if !patiently(|| !device.is_of(&self.file())) {
            tracing::warn!(
                path = %path.display(),
                "fuse: the loop device is in use; it is removed when it is closed"
            );
        }
    }

    fn join(&self) {
        for worker in self.workers.lock().drain(..) {
            let _ = worker.join();
        }
    }

    fn end_mount_holder(&self) {
        if let Some(mount_holder) = self.mount_holder.lock().take() {
            mount_holder.end();
        }
    }

    fn quiesce(&self, patience: Duration) -> Result<()> {
        if self.channel.quiesce(patience) {
            return Ok(());
        }
        let in_flight = self.channel.in_flight();
        self.channel.resume();
        let text = format!(
            "fuse: {in_flight} requests to {} were not answered in {} ms; the door has resumed",
            self.file().display(),
            patience.as_millis()
        );
        Err(Error::new(ErrorKind::Unavailable, text))
    }

    fn hand_over(&self) -> Result<Vec<DoorPiece>> {
        if self.channel.is_finished() {
            let text = format!("fuse: {} was unmounted", self.mount.path.display());
            return Err(Error::new(ErrorKind::Closed, text));
        }
        if !self.channel.is_quiet() {
            return Err(Error::new(
                ErrorKind::Invalid,
                "fuse: only a quiet door can be handed over",
            ));
        }
        Ok(vec![self.handed()?])
    }

    fn release(&self) {
        if !self.is_over.swap(true, SeqCst) {
            self.channel.finish();
            self.join();
            if let Some(mount_holder) = self.mount_holder.lock().take() {
                // Last: the next server may read from the descriptor as soon as the mount holder is
                // free, and no worker here may still take a request then.
                mount_holder.leave();
            }
        }
    }

    fn stop(&self) {
        if self.is_over.swap(true, SeqCst) {
            return self.join();
        }
        self.channel.resume();
        // Detaching and unmounting send requests. A quiet door would not answer them, and would
        // wait for itself.
        self.detach_loop();
        // The loop device has the file open. While it does, the mount is busy.
        let mut outcome = Ok(());
        let is_unmounted = self.channel.is_finished()
            || patiently(|| {
                outcome = self.mount.unmount();
                !matches!(
                    &outcome,
                    Err(error) if error.raw_os_error() == Some(Errno::BUSY.raw_os_error())
                )
            });
        self.channel.finish();
        self.join();
        self.channel.drain();
        if !is_unmounted || outcome.is_err() {
            let file = self.file();
            let file = file.display();
            tracing::warn!(%file, "fuse: still in use: unmounted lazily; its users get errors from \
                now on");
            self.mount.abandon();
        }
        self.end_mount_holder();
    }

    fn stop_now(&self) {
        if self.is_over.swap(true, SeqCst) {
            // Wakes users that wait for an answer, with errors.
            return self.join();
        }
        self.channel.finish();
        // It is identified by the path of its file, which an unmount changes.
        let device = self.loop_device.lock().take().filter(|device| device.is_of(&self.file()));
        self.mount.abandon();
        self.join();
        if let Some(device) = device {
            // Its users already have errors, so there is nothing to wait for.
            let _ = device.detach();
        }
        self.end_mount_holder();
    }
}

/// Whether a mount with these flags can survive its server, so that a mount holder is useful.
fn can_outlive(flags: u64) -> bool {
    let can = flags & init::RESEND != 0;
    if !can {
        // Requests that a dead server took would never be resent, and their users would hang.
        tracing::warn!(
            "fuse: this kernel is older than 6.9: the mount cannot survive the death of the server"
        );
    }
    can
}

/// Whether the condition becomes true in time.
fn patiently(mut condition: impl FnMut() -> bool) -> bool {
    let until = Instant::now() + BUSY_TIME_MAX;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The longest request to allow the kernel, in whole pages.
fn request_bytes_max(device: &dyn BlockDevice) -> u32 {
    device.geometry().request_bytes_max.min(REQUEST_BYTES_MAX) / REQUEST_BYTES_MIN
        * REQUEST_BYTES_MIN
}

fn check(options: &FuseOptions, device: &dyn BlockDevice) -> Result<()> {
    let invalid = |text: String| Err(Error::new(ErrorKind::Invalid, text));
    let name = &options.file_name;
    if name.is_empty()
        || name.len() > NAME_BYTES_MAX
        || name.contains(['/', '\0'])
        || name == "."
        || name == ".."
    {
        return invalid(format!("fuse: {name:?} is not a valid file name"));
    }
    if !(1..=WORKERS_MAX).contains(&options.workers) {
        return invalid(format!(
            "fuse: {} workers are not supported; use 1 to {WORKERS_MAX}",
            options.workers
        ));
    }
    if request_bytes_max(device) < REQUEST_BYTES_MIN {
        let longest = device.geometry().request_bytes_max;
        return invalid(format!(
            "fuse: the device accepts requests of at most {longest} bytes; 4096 are required"
        ));
    }
    Ok(())
}

impl Door for FuseDoor {
    fn kind(&self) -> &'static str {
        "fuse"
    }

    fn address(&self) -> String {
        let file = self.file();
        self.loop_device().map_or(file, |device| device.path()).display().to_string()
    }

    fn export(&self, _name: &str) -> ExportStatus {
        ExportStatus { address: self.address(), peers: Vec::new() }
    }

    fn counts(&self) -> DoorCounts {
        self.metrics().counts
    }

    fn quiesce(&self, patience: Duration) -> Result<Box<dyn QuietDoor>> {
        self.mounted.quiesce(patience)?;
        Ok(Box::new(QuietFuseDoor(Arc::clone(&self.mounted))))
    }

    /// Not while the door is quiet.
    fn resized(&self) -> Result<()> {
        self.mounted.resized()
    }

    fn stop(&self, how: Stop) {
        match how {
            Stop::Drained => self.mounted.stop(),
            Stop::Now => self.mounted.stop_now(),
        }
    }
}

struct QuietFuseDoor(Arc<MountService>);

impl QuietDoor for QuietFuseDoor {
    fn hand_over(&self) -> Result<Vec<DoorPiece>> {
        self.0.hand_over()
    }

    fn release(self: Box<Self>) {
        self.0.release();
    }

    fn resume(self: Box<Self>) {
        self.0.channel.resume();
    }
}

impl Drop for FuseDoor {
    fn drop(&mut self) {
        self.mounted.stop_now();
    }
}
