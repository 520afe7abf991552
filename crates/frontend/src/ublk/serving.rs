//! The queues of one device while they are served, and the threads that serve them.
//!
//! Invariants: a device that is given back to the kernel, or left to the next server, has no thread
//! of ours on any of its queues, and its lock goes last.
//!
//! Not here: the device's life (`server`), requests (`worker`).

use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;

use sawmill_device::{BlockDevice, Error, ErrorKind, Result};
use sawmill_sys::ublk::{CharDevice, Control, DeviceInfo as KernelInfo, feature};

use super::channel::{CopyMode, Inbox, Message, NewQueue, QueueChannel};
use super::options::UblkOptions;
use super::progress::Progress;
use super::registry::failed;
use super::worker::Worker;
use crate::device_facts::DeviceLock;

/// A device to serve: what the kernel and the caller say of it.
pub(super) struct ServedDevice<'a> {
    pub(super) info: &'a KernelInfo,
    pub(super) options: &'a UblkOptions,
    pub(super) device: &'a Arc<dyn BlockDevice>,
    pub(super) char_device: Arc<CharDevice>,
}

/// The state while the device is served.
pub(super) struct ServiceState {
    pub(super) channels: Vec<Arc<QueueChannel>>,
    pub(super) progress: Arc<Progress>,
    /// The threads of this door only; none if threads are shared.
    workers: Vec<Worker>,
    pub(super) device_lock: DeviceLock,
    /// Sets the queue's limits, in parallel to everything else.
    pub(super) limiting: Option<JoinHandle<()>>,
}

impl ServiceState {
    pub(super) fn new(device_lock: DeviceLock) -> Self {
        ServiceState {
            channels: Vec::new(),
            progress: Arc::default(),
            workers: Vec::new(),
            device_lock,
            limiting: None,
        }
    }
    /// Assigns all queues of the device to threads. Returns when the kernel has all their commands.
    /// After an error, some may be served.
    pub(super) fn serve_all(
        &mut self,
        control: &mut Control,
        served: &ServedDevice<'_>,
    ) -> Result<()> {
        for queue in 0..served.info.queues {
            let inbox = self.inbox_for(control, served, queue)?;
            self.serve_queue(served, queue, inbox)?;
        }
        Ok(())
    }

    /// The inbox of the thread that serves a queue: its own thread, or the next of the shared ones.
    fn inbox_for(
        &mut self,
        control: &mut Control,
        served: &ServedDevice<'_>,
        queue: u16,
    ) -> Result<Arc<Inbox>> {
        let (id, options) = (served.info.id, served.options);
        if let Some(workers) = &options.workers {
            return workers.choose();
        }
        let cores = match options.pin {
            true => control.queue_cores(id, queue).unwrap_or_default(),
            false => Vec::new(),
        };
        let worker = Worker::start(format!("ublk-{id}-{queue}"), 1, cores)?;
        let inbox = worker.inbox.clone();
        self.workers.push(worker);
        Ok(inbox)
    }

    fn serve_queue(
        &mut self,
        served: &ServedDevice<'_>,
        queue: u16,
        inbox: Arc<Inbox>,
    ) -> Result<()> {
        let ServedDevice { info, char_device, device, .. } = served;
        let id = info.id;
        let descriptors = char_device.descriptors(queue, info.queue_depth);
        let descriptors = descriptors.map_err(|error| {
            failed(&format!("device {id}: cannot map the requests of queue {queue}"), error)
        })?;
        let copy_mode = match info.flags & feature::USER_COPY {
            0 => CopyMode::Kernel,
            _ => CopyMode::User,
        };
        let progress = self.progress.clone();
        let channel = Arc::new(QueueChannel::new(
            char_device.clone(),
            queue,
            copy_mode,
            inbox.clone(),
            progress,
        ));
        let bytes_max = info.request_bytes_max;
        let device = Arc::clone(device);
        let queue = NewQueue {
            channel: channel.clone(),
            device,
            descriptors,
            tags: info.queue_depth,
            bytes_max,
        };
        let (answer, receiver) = sync_channel(1);
        if !inbox.send(Message::Attach(queue, answer)) {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "ublk: the thread of a queue has ended",
            ));
        }
        // Also for a queue that fails below: its thread reports it as gone, and `wait_gone` counts
        // the channels.
        self.channels.push(channel);
        receiver.recv().unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::Internal, "ublk: a thread ended while it took over a queue"))
        })
    }

    /// Takes back all queues of a device that was never started, or is already stopped.
    pub(super) fn abandon(self, control: &mut Control, id: u32) {
        if let Err(error) = control.stop(id) {
            tracing::warn!(%error, id, "ublk: cannot stop a device; it waits for a server");
            return self.leave();
        }
        let ServiceState { channels, progress, mut workers, device_lock, limiting } = self;
        // Before the number can belong to another device.
        if let Some(limiting) = limiting {
            let _ = limiting.join();
        }
        progress.wait_gone(channels.len());
        drop(channels);
        for worker in &mut workers {
            worker.inbox.send(Message::Stop);
            worker.join();
        }
        // Before the caller deletes the device: afterward, the number and so the file may be
        // another's.
        device_lock.remove();
    }

    /// Leaves a device to the next server.
    pub(super) fn leave(self) {
        let ServiceState { channels, progress, mut workers, device_lock, limiting: _ } = self;
        for channel in &channels {
            channel.inbox.send(Message::LetGo(channel.clone()));
        }
        for worker in &workers {
            worker.inbox.send(Message::Stop);
        }
        // Shared threads release the queues only when all their devices are let go, so waiting for
        // that here could last forever.
        if !workers.is_empty() {
            progress.wait_gone(channels.len());
        }
        drop(channels);
        workers.iter_mut().for_each(Worker::join);
        // Only now may another server take it.
        drop(device_lock);
    }
}
