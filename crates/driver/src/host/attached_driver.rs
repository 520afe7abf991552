//! One driver that the host has accepted: its sockets, and the threads that carry commands and
//! answers.
//!
//! Invariants: END is the last packet on a lane. An answer must be for a command that the driver
//! has; otherwise the driver is cut off. When [`Threads::join`] returns, nothing of this driver is
//! left here.
//!
//! Not here: how a driver connects, and what follows when it is gone (`attach`); how long it may
//! take (`policy`).

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Instant;

use parking_lot::Mutex;
use sawmill_device::{Error, ErrorKind, Result};

use super::{LEAVE_TIME_MAX, refuse, thread};
use crate::protocol::{
    ANSWER_BYTES, Answer, Command, CommandKind, Control, ControlFacts, ControlKind,
    PACKET_BYTES_MAX, PacketSocket,
};
use crate::request_holder::{CommandLanes, FetchState};

/// The most commands of one packet.
const COMMANDS_MAX: usize = 64;

/// The connections of one driver. Its threads, and whoever replaces or ends the driver, share it.
pub(super) struct AttachedDriver {
    pub(super) generation: u64,
    pub(super) pid: u32,
    control: PacketSocket,
    lanes: Vec<PacketSocket>,
    /// Lanes on which the driver may still send something.
    open: AtomicUsize,
    /// Lanes on which END was sent.
    ended: Box<[AtomicBool]>,
    /// Our ends are closed.
    is_closed: AtomicBool,
    is_cut: AtomicBool,
    knows_doors: AtomicBool,
    why: Mutex<Option<String>>,
    /// Whether its threads may begin; they wait for this.
    begins: OnceLock<bool>,
    /// It was told to finish.
    pub(super) is_finishing: AtomicBool,
}

/// The threads of a driver.
pub(super) struct Threads(Vec<JoinHandle<()>>);

impl AttachedDriver {
    pub(super) fn new(
        generation: u64,
        pid: u32,
        control: PacketSocket,
        lanes: Vec<PacketSocket>,
    ) -> Arc<Self> {
        Arc::new(AttachedDriver {
            generation,
            pid,
            control,
            open: AtomicUsize::new(lanes.len()),
            ended: lanes.iter().map(|_| AtomicBool::new(false)).collect(),
            is_closed: AtomicBool::new(false),
            lanes,
            is_cut: AtomicBool::new(false),
            knows_doors: AtomicBool::new(false),
            why: Mutex::default(),
            begins: OnceLock::new(),
            is_finishing: AtomicBool::new(false),
        })
    }

    /// Starts the threads, which wait for [`begin`](Self::begin): without them the driver is
    /// refused.
    pub(super) fn start(self: &Arc<Self>, lanes: &Arc<dyn CommandLanes>) -> Result<Threads> {
        let mut threads = Threads(Vec::new());
        for lane in 0..self.lanes.len() {
            let (driver, from) = (Arc::clone(self), Arc::clone(lanes));
            let sender = thread("driver-commands", move || {
                if *driver.begins.wait() {
                    from.pin_thread(lane / from.lanes_per_queue());
                    driver.send_commands(lane, &*from);
                }
            });
            let (driver, to) = (Arc::clone(self), Arc::clone(lanes));
            let receiver = thread("driver-answers", move || {
                if *driver.begins.wait() {
                    to.pin_thread(lane / to.lanes_per_queue());
                    driver.take_answers(lane, &*to);
                }
            });
            for started in [sender, receiver] {
                let Err(error) = started.map(|handle| threads.0.push(handle)) else { continue };
                self.begin(false);
                threads.join();
                return Err(error);
            }
        }
        Ok(threads)
    }

    /// Lets the threads deliver commands, or end. The device is running.
    pub(super) fn begin(&self, is_served: bool) {
        let _ = self.begins.set(is_served);
    }

    /// Tells the driver, which has not heard ATTACHED, why it is not served, and closes everything.
    pub(super) fn refuse(&self, errno: i32, message: &str) {
        refuse(&self.control, errno, message);
        self.close();
    }

    /// Sends a message on the control connection.
    pub(super) fn send(&self, kind: ControlKind, facts: ControlFacts) {
        // If the driver is gone, the next read detects it.
        let _ = self.control.send(&Control::new(kind, facts).encode(), &[]);
    }

    /// Sends the doors of the device once.
    pub(super) fn send_doors(&self, doors: &ControlFacts) {
        if !self.knows_doors.swap(true, Ordering::SeqCst) {
            self.send(ControlKind::Doors, doors.clone());
        }
    }

    /// The next message of the driver on the control connection; `None` if it is gone.
    pub(super) fn receive_message(&self, buffer: &mut [u8]) -> Result<Option<Control>> {
        match self.control.receive(buffer)? {
            Some(packet) => Control::decode(packet.bytes).map(Some),
            None => Ok(None),
        }
    }

    /// Whether its process has ended or closed the connection, and no thread has noticed yet.
    pub(super) fn has_hung_up(&self) -> bool {
        self.control.has_hung_up()
    }

    /// Treats the driver as gone.
    pub(super) fn cut(&self, why: &str) {
        // The first reason counts: what is closed afterward fails in many other ways.
        self.why.lock().get_or_insert_with(|| why.to_owned());
        self.is_cut.store(true, Ordering::SeqCst);
        self.close();
    }

    /// Treats a driver as gone if it was told to finish, has done everything since `done_since`
    /// (now, if that is none), and stays.
    pub(super) fn expect_disconnect(&self, done_since: &mut Option<Instant>) {
        if done_since.get_or_insert_with(Instant::now).elapsed() > LEAVE_TIME_MAX {
            self.cut("it did not disconnect after all its work was done");
        }
    }

    pub(super) fn is_cut(&self) -> bool {
        self.is_cut.load(Ordering::SeqCst)
    }

    /// Why it was cut.
    pub(super) fn why(&self) -> Option<String> {
        self.why.lock().clone()
    }

    /// Closes all connections. Messages that the driver has already sent are still read.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        self.control.close_both_ways();
        for lane in &self.lanes {
            lane.close_both_ways();
        }
    }

    fn send_commands(&self, lane: usize, lanes: &dyn CommandLanes) {
        let (mut commands, mut bytes) = (Vec::with_capacity(COMMANDS_MAX), Vec::new());
        loop {
            commands.clear();
            bytes.clear();
            let next = lanes.fetch(lane, &mut commands, COMMANDS_MAX);
            if next != FetchState::Commands {
                // Before END is sent: the driver may close the lane as soon as it has it.
                self.ended[lane].store(true, Ordering::SeqCst);
                commands.push(Command::new(CommandKind::End, 0));
            }
            for command in &commands {
                bytes.extend_from_slice(&command.encode());
            }
            if self.lanes[lane].send(&bytes, &[]).is_err() || next != FetchState::Commands {
                return;
            }
        }
    }

    fn take_answers(&self, lane: usize, lanes: &dyn CommandLanes) {
        let mut buffer = vec![0; PACKET_BYTES_MAX / ANSWER_BYTES * ANSWER_BYTES];
        loop {
            let answered = match self.lanes[lane].receive(&mut buffer) {
                Ok(Some(packet)) => self.answered(lane, packet.bytes, lanes),
                Ok(None) => {
                    self.closed_by_driver(lane, lanes);
                    break;
                }
                Err(error) => Err(error),
            };
            if let Err(error) = answered {
                self.cut(&format!("it broke the protocol: {error}"));
                break;
            }
        }
        if self.open.fetch_sub(1, Ordering::SeqCst) == 1 {
            // Nothing more comes from it, whether it was told to finish or not.
            self.control.close_both_ways();
        }
    }

    /// One unserved lane is enough to cut the driver: its requests would hang.
    fn closed_by_driver(&self, lane: usize, lanes: &dyn CommandLanes) {
        let has_done_all = self.ended[lane].load(Ordering::SeqCst) && !lanes.has_commands(lane);
        if !has_done_all && !self.is_closed.load(Ordering::SeqCst) {
            self.cut("it closed its connection");
        }
    }

    fn answered(&self, lane: usize, packet: &[u8], lanes: &dyn CommandLanes) -> Result<()> {
        for answer in Answer::decode_all(packet)? {
            lanes.answer(lane, answer.number, outcome_of(answer.errno))?;
        }
        Ok(())
    }
}

impl Threads {
    /// Waits for the threads to end: the driver was closed, and the device paused.
    pub(super) fn join(self) {
        for thread in self.0 {
            // A thread that panicked has already logged it.
            let _ = thread.join();
        }
    }
}

fn outcome_of(errno: i32) -> Result<()> {
    if errno == 0 {
        return Ok(());
    }
    let error = std::io::Error::from_raw_os_error(errno);
    Err(Error::caused(ErrorKind::of_driver(errno), "the driver failed", error))
}

/// Socket pairs for the lanes: our ends, and the driver's.
pub(super) fn lanes(count: usize) -> Result<(Vec<PacketSocket>, Vec<PacketSocket>)> {
    let pairs: Result<Vec<_>> = (0..count).map(|_| PacketSocket::pair()).collect();
    Ok(pairs?.into_iter().unzip())
}

/// Sends the driver its end of each lane, and the memory for it.
pub(super) fn hand_queues(
    control: &PacketSocket,
    theirs: &[PacketSocket],
    lanes: &dyn CommandLanes,
) -> Result<()> {
    let per_queue = lanes.lanes_per_queue();
    for (queue, sockets) in theirs.chunks(per_queue).enumerate() {
        let memory: Vec<_> =
            (0..per_queue).map(|lane| lanes.memory(queue * per_queue + lane)).collect();
        let mut facts = ControlFacts::default()
            .with("queue", queue)
            .with("memory_bytes", memory[0].length_bytes());
        if let Some(reads) = memory.get(1) {
            facts.add("read_memory_bytes", reads.length_bytes());
        }
        let files: Vec<_> = sockets
            .iter()
            .zip(&memory)
            .flat_map(|(socket, memory)| [socket.as_fd(), memory.file().as_fd()])
            .collect();
        control.send(&Control::new(ControlKind::Queue, facts).encode(), &files)?;
    }
    Ok(())
}
