//! The life of an attached driver: one or more threads execute commands until the host sends END.
//!
//! Invariants: everything happens on the calling thread until the doors are known, and always with
//! one thread for one lane. A driver that panics answers EIO and continues. A thread that finds the
//! host gone wakes all others. Not here: sockets (`lane`, `host_connection`).

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use sawmill_device::{Error, ErrorKind, Result};

use super::Outcome;
use super::driver::{Abilities, Device, Door, errno};
use super::host_connection::{HostConnection, HostMessage, gone};
use super::lane::{Answers, Lane, Task};
use crate::cores::Cores;
use crate::protocol::Command;

/// Executes commands: a driver of either kind.
pub(super) trait Handler: Send + Sync {
    fn abilities(&self) -> Abilities;
    fn attached(&self, device: &Device);
    fn ready(&self, doors: &[Door]);
    /// `memory` belongs to the command; it is empty if the command has none.
    fn handle(&self, queue: usize, command: &Command, memory: &mut [u8]) -> io::Result<()>;
}

/// Serves until the host has no more commands.
pub(super) fn run(
    mut connection: HostConnection,
    handler: &dyn Handler,
    threads: usize,
) -> Result<Outcome> {
    handler.attached(&connection.device);
    let (threads, is_alone) = (threads.max(1), threads <= 1 && connection.lanes.len() == 1);
    // Opening the doors may read the device (a partition table, for example), so commands are
    // served before the doors are known.
    let is_over = serve_alone(&mut connection, handler, is_alone)?;
    if !is_over {
        serve_together(&mut connection, handler, threads)?;
    }
    let is_replaced = connection.is_replaced;
    Ok(if is_replaced { Outcome::Replaced } else { Outcome::Ended })
}

/// Serves all lanes on this thread: to the end, or until the doors are known. Returns whether it is
/// the end.
fn serve_alone(
    connection: &mut HostConnection,
    handler: &dyn Handler,
    to_the_end: bool,
) -> Result<bool> {
    let mut answers = Answers::default();
    loop {
        for lane in &connection.lanes {
            while lane.has_pending() && !work_one(lane, handler, &mut answers)? {}
            answers.send(lane)?;
        }
        let (has_message, ready) = wait(connection)?;
        let message = if has_message { connection.receive_message()? } else { HostMessage::News };
        match message {
            HostMessage::Doors(doors) => {
                handler.ready(&doors);
                if !to_the_end {
                    return Ok(false);
                }
            }
            HostMessage::News => {}
            HostMessage::End => return Err(gone()),
        }
        for at in ready {
            work_one(&connection.lanes[at], handler, &mut answers)?;
            // The answers of the next lane use another socket.
            answers.send(&connection.lanes[at])?;
        }
        if connection.lanes.iter().all(Lane::has_ended) {
            finish(connection);
            return Ok(true);
        }
    }
}

/// Waits for packets: returns whether control packets are there, and the lanes with commands.
fn wait(connection: &HostConnection) -> Result<(bool, Vec<usize>)> {
    let open: Vec<usize> =
        (0..connection.lanes.len()).filter(|at| !connection.lanes[*at].has_ended()).collect();
    let mut files = vec![PollFd::new(&*connection.control, PollFlags::IN)];
    files.extend(open.iter().map(|at| PollFd::new(&connection.lanes[*at].socket, PollFlags::IN)));
    loop {
        match poll(&mut files, None) {
            Err(Errno::INTR) => {}
            Err(error) => {
                return Err(Error::caused(ErrorKind::Internal, "cannot wait for the host", error));
            }
            Ok(_) => break,
        }
    }
    let mut readable = files.iter().map(|file| !file.revents().is_empty());
    let has_message = readable.next().unwrap_or(false);
    let ready = open.iter().zip(readable).filter(|(_, readable)| *readable).map(|(at, _)| *at);
    Ok((has_message, ready.collect()))
}

/// Starts threads for every lane; this thread handles the other messages of the host.
fn serve_together(
    connection: &mut HostConnection,
    handler: &dyn Handler,
    threads: usize,
) -> Result<()> {
    let lanes = std::mem::take(&mut connection.lanes);
    let (device, control) = (connection.device.clone(), Arc::clone(&connection.control));
    let cores = (device.option("tie_queues") == Some("1")).then(Cores::new);
    let failure = Mutex::new(None);
    let fail = |error: Error| {
        failure.lock().get_or_insert(error);
        HostConnection::break_off(&control, &lanes);
    };
    let running_count = std::sync::atomic::AtomicUsize::new(lanes.len() * threads);
    thread::scope(|scope| {
        for lane in lanes.iter().flat_map(|lane| std::iter::repeat_n(lane, threads)) {
            let (fail, running_count, lanes, control, cores) =
                (&fail, &running_count, &lanes, &control, cores.as_ref());
            let work = move || {
                if let Some(cores) = cores {
                    cores.pin_thread(lane.queue);
                }
                if let Err(error) = work_off(lane, handler) {
                    fail(error);
                }
                // The last worker unblocks `receive_message` below: without lanes, the host has
                // nothing more to say.
                if running_count.fetch_sub(1, std::sync::atomic::Ordering::AcqRel) == 1 {
                    HostConnection::break_off(control, lanes);
                }
            };
            let started =
                thread::Builder::new().name("sawmill-driver".to_owned()).spawn_scoped(scope, work);
            if let Err(error) = started {
                fail(Error::caused(ErrorKind::Full, "cannot start a thread for the driver", error));
                break;
            }
        }
        loop {
            match connection.receive_message() {
                Ok(HostMessage::Doors(doors)) => handler.ready(&doors),
                Ok(HostMessage::News) => {}
                Ok(HostMessage::End) => break,
                Err(error) => return fail(error),
            }
        }
        // The host has closed the control connection before it sent END on each lane: it has died.
        if lanes.iter().any(|lane| !lane.has_ended()) {
            fail(gone());
        }
    });
    failure.into_inner().map_or(Ok(()), Err)
}

fn work_off(lane: &Lane, handler: &dyn Handler) -> Result<()> {
    let mut answers = Answers::default();
    while !work_one(lane, handler, &mut answers)? {}
    answers.send(lane)
}

/// Executes one command. Returns whether there are no more.
fn work_one(lane: &Lane, handler: &dyn Handler, answers: &mut Answers) -> Result<bool> {
    let Some(mut task) = lane.take(answers)? else { return Ok(true) };
    let outcome = handle(lane.queue, handler, &mut task);
    let errno = outcome.err().map_or(0, |error| errno(&error));
    lane.answer(task, errno, answers)?;
    Ok(false)
}

fn handle(queue: usize, handler: &dyn Handler, task: &mut Task) -> io::Result<()> {
    let command = task.command;
    let memory = task.memory.as_deref_mut().unwrap_or_default();
    catch_unwind(AssertUnwindSafe(|| handler.handle(queue, &command, memory))).unwrap_or_else(
        |_| {
            let (kind, length, address) = (command.kind, command.length, command.address);
            tracing::error!(
                "the driver panicked in a {kind:?} of {length} bytes at {address}; answered EIO"
            );
            Err(Errno::IO.into())
        },
    )
}

/// Reads why there are no more commands: the host has sent that before.
fn finish(connection: &mut HostConnection) {
    HostConnection::break_off(&connection.control, &connection.lanes);
    while connection.receive_message().is_ok_and(|message| message != HostMessage::End) {}
}
