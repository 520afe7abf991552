//! The client against a host of the tests' own, which can break the protocol.

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle, ThreadId};

use parking_lot::Mutex;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use sawmill_device::layer::Align;
use sawmill_device::{BlockDevice, ErrorKind, Result, conformance};
use sawmill_sys::{Arena, ArenaPiece};

use super::{
    Abilities, ChunkDriver, Door, Driver, InProcess, Options, Outcome, serve, serve_chunks,
};
use crate::batch::chunk::ChunkEntry;
use crate::protocol::{
    Answer, Command, CommandKind, Control, ControlFacts, ControlKind, PACKET_BYTES_MAX,
    PacketSocket,
};

const CHUNK: usize = 64 << 10;
const METADATA: usize = 4096;

/// A driver in memory that panics, fails and records on command.
struct Ram {
    bytes: Mutex<Vec<u8>>,
    abilities: Abilities,
    threads: Mutex<Vec<ThreadId>>,
    doors: Mutex<Vec<Door>>,
    flushes: AtomicU32,
}

impl Ram {
    fn new() -> Self {
        let abilities = Abilities { discard: true, write_zeroes: true, ..Abilities::default() };
        let (bytes, flushes) = (Mutex::new(vec![0; 16 << 20]), AtomicU32::new(0));
        Ram { bytes, abilities, threads: Mutex::default(), doors: Mutex::default(), flushes }
    }
}

impl Driver for Ram {
    fn abilities(&self) -> Abilities {
        self.abilities
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.threads.lock().push(thread::current().id());
        if offset == 512 {
            panic!("told to");
        }
        if offset == 1024 {
            return Err(io::Error::from_raw_os_error(28));
        }
        let at = offset as usize;
        into.copy_from_slice(&self.bytes.lock()[at..at + into.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8], _fua: bool) -> io::Result<()> {
        let at = offset as usize;
        self.bytes.lock()[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.flushes.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn discard(&self, _offset: u64, _length: u64) -> io::Result<()> {
        Ok(())
    }

    fn write_zeroes(&self, offset: u64, length: u64, _keep_space: bool) -> io::Result<()> {
        self.write(offset, &vec![0; length as usize], false)
    }

    fn ready(&self, doors: &[Door]) {
        self.doors.lock().extend_from_slice(doors);
        self.threads.lock().push(thread::current().id());
    }
}

/// The host's side of one driver.
struct Host {
    control: PacketSocket,
    /// Sockets and memory, as they were sent.
    lanes: Vec<(PacketSocket, Arc<Arena>, ArenaPiece)>,
    hello: ControlFacts,
}

impl Host {
    fn command(&self, lane: usize, command: Command) {
        self.lanes[lane].0.send(&command.encode(), &[]).unwrap();
    }

    fn answers(&self, lane: usize, count: usize) -> Vec<Answer> {
        let mut buffer = vec![0; PACKET_BYTES_MAX];
        let mut answers = Vec::new();
        while answers.len() < count {
            let packet = self.lanes[lane].0.receive(&mut buffer).unwrap().expect("answers first");
            answers.extend(Answer::decode_all(packet.bytes).unwrap());
        }
        answers
    }

    fn errno(&self, lane: usize, command: Command) -> i32 {
        self.command(lane, command);
        let answers = self.answers(lane, 1);
        assert_eq!(answers[0].number, command.number);
        answers[0].errno
    }

    fn send(&self, kind: ControlKind, facts: ControlFacts) {
        self.control.send(&Control::new(kind, facts).encode(), &[]).unwrap();
    }

    fn finish(&self, reason: &str) {
        self.send(ControlKind::Finish, ControlFacts::default().with("reason", reason));
        let mut buffer = vec![0; PACKET_BYTES_MAX];
        for (socket, ..) in &self.lanes {
            socket.send(&Command::new(CommandKind::End, 0).encode(), &[]).unwrap();
        }
        for (socket, ..) in &self.lanes {
            assert!(
                socket.receive(&mut buffer).unwrap().is_none(),
                "END is not answered: the socket closes"
            );
        }
    }
}

/// Listens for one driver, and welcomes it with `facts`.
fn host(
    folder: &Path,
    facts: ControlFacts,
    queues: usize,
    script: impl FnOnce(&mut Host) + Send + 'static,
) -> (PathBuf, JoinHandle<()>) {
    let path = folder.join("driver");
    let flags = SocketFlags::CLOEXEC;
    let listener =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let work = move || {
        let control = PacketSocket::from(rustix::net::accept(&listener).unwrap());
        let mut buffer = vec![0; PACKET_BYTES_MAX];
        let hello = Control::decode(control.receive(&mut buffer).unwrap().unwrap().bytes).unwrap();
        assert_eq!(hello.kind, ControlKind::Hello);
        let is_batch = facts.get("mode") == Some("batch");
        let mut host = Host { control, lanes: Vec::new(), hello: hello.facts };
        host.send(ControlKind::Welcome, facts);
        for queue in 0..queues {
            let mut files = Vec::new();
            let mut facts = ControlFacts::default().with("queue", queue);
            for name in if is_batch {
                &["memory_bytes", "read_memory_bytes"][..]
            } else {
                &["memory_bytes"]
            } {
                let (ours, theirs) = PacketSocket::pair().unwrap();
                let arena = Arena::create("test", 1 << 20).unwrap();
                facts.add(name, 1 << 20);
                files.push((theirs, arena.file().try_clone().unwrap()));
                let piece = arena.lend(1 << 20).unwrap();
                host.lanes.push((ours, arena, piece));
            }
            let fds: Vec<_> =
                files.iter().flat_map(|(socket, file)| [socket.as_fd(), file.as_fd()]).collect();
            host.control.send(&Control::new(ControlKind::Queue, facts).encode(), &fds).unwrap();
        }
        host.send(ControlKind::Attached, ControlFacts::default());
        script(&mut host);
    };
    (path, thread::spawn(work))
}

fn plain() -> ControlFacts {
    ControlFacts::default()
        .with("protocol", 1)
        .with("name", "disk")
        .with("generation", 1)
        .with("mode", "plain")
}

fn batch() -> ControlFacts {
    let facts =
        ControlFacts::default().with("protocol", 1).with("name", "disk").with("mode", "batch");
    facts.with("metadata_bytes", METADATA).with("collision_area_size", 4096)
}

fn command(kind: CommandKind, number: u64, address: u64, length: u64) -> Command {
    Command { address, length, ..Command::new(kind, number) }
}

/// Runs a driver against a host. Returns how the driver ended.
fn run(
    driver: &Arc<impl Driver + 'static>,
    facts: ControlFacts,
    (queues, threads): (usize, usize),
    script: impl FnOnce(&mut Host) + Send + 'static,
) -> Result<Outcome> {
    let folder = tempfile::tempdir().unwrap();
    let (path, host) = host(folder.path(), facts, queues, script);
    let options = Options::sized(16 << 20).threads(threads).socket(path);
    let outcome = serve(Arc::clone(driver), &[], &options);
    host.join().unwrap();
    outcome
}

#[test]
fn requests_are_answered_in_shared_memory_until_the_end() {
    for (queues, threads) in [(1, 1), (3, 1), (1, 4), (2, 3)] {
        let driver = Arc::new(Ram::new());
        let outcome = run(&driver, plain(), (queues, threads), move |host| {
            assert_eq!(host.hello.get("size"), Some("16777216"));
            assert_eq!(host.hello.get("can_discard"), Some("1"));
            assert_eq!(host.hello.get("read_only"), None, "what is a default is not said");
            for round in 0..3 {
                for lane in 0..queues {
                    let address = (lane as u64 + 1) << 16;
                    host.lanes[lane].2[4096..8192].fill(round + 1);
                    let write =
                        Command { offset: 4096, ..command(CommandKind::Write, 7, address, 4096) };
                    assert_eq!(host.errno(lane, write), 0);
                    let read =
                        Command { offset: 8192, ..command(CommandKind::Read, 8, address, 4096) };
                    assert_eq!(host.errno(lane, read), 0);
                    assert_eq!(host.lanes[lane].2[8192..12288], [round + 1; 4096]);
                    let zeroes = command(CommandKind::WriteZeroes, 9, address, 512);
                    assert_eq!(host.errno(lane, zeroes), 0);
                }
                if round == 0 {
                    let doors =
                        ControlFacts::default().with("door", "nbd nbd+unix:///?socket=/a b");
                    host.send(ControlKind::Doors, doors);
                }
            }
            host.finish("ended");
        });
        assert_eq!(outcome.unwrap(), Outcome::Ended);
        assert_eq!(driver.doors.lock()[0].address, "nbd+unix:///?socket=/a b");
        assert_eq!(driver.bytes.lock()[(1 << 16) + 511..][..2], [0, 3]);
        if (queues, threads) == (1, 1) {
            let caller = thread::current().id();
            assert!(
                driver.threads.lock().iter().all(|thread| *thread == caller),
                "all on the calling thread"
            );
        }
    }
}

#[test]
fn many_commands_of_one_packet_are_all_answered() {
    let driver = Arc::new(Ram::new());
    let outcome = run(&driver, plain(), (1, 4), |host| {
        host.send(ControlKind::Doors, ControlFacts::default());
        let commands = (0..200)
            .map(|n| Command { offset: n * 4096, ..command(CommandKind::Read, n, n * 4096, 4096) });
        let packet: Vec<u8> = commands.flat_map(|command| command.encode()).collect();
        host.lanes[0].0.send(&packet, &[]).unwrap();
        let mut numbers: Vec<u64> =
            host.answers(0, 200).iter().map(|answer| answer.number).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..200).collect::<Vec<_>>());
        host.finish("replaced");
    });
    assert_eq!(outcome.unwrap(), Outcome::Replaced);
}

/// A driver whose reads wait until four are in progress.
struct BarrierDriver(std::sync::Barrier);

impl Driver for BarrierDriver {
    fn abilities(&self) -> Abilities {
        Abilities::default()
    }

    fn read(&self, _offset: u64, _into: &mut [u8]) -> std::io::Result<()> {
        self.0.wait();
        Ok(())
    }

    fn write(&self, _offset: u64, _bytes: &[u8], _fua: bool) -> std::io::Result<()> {
        Ok(())
    }

    fn flush(&self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn as_many_commands_as_threads_are_in_work_at_once() {
    let driver = Arc::new(BarrierDriver(std::sync::Barrier::new(4)));
    let outcome = run(&driver, plain(), (1, 4), |host| {
        host.send(ControlKind::Doors, ControlFacts::default());
        let read = |n: u64| {
            Command { offset: n * 4096, ..command(CommandKind::Read, n, n * 4096, 4096) }.encode()
        };
        for at_once in [1, 2, 4, 8] {
            let reads: Vec<Vec<u8>> = (0..8).map(|n| read(n).to_vec()).collect();
            for packet in reads.chunks(at_once) {
                host.lanes[0].0.send(&packet.concat(), &[]).unwrap();
            }
            assert_eq!(host.answers(0, 8).len(), 8);
        }
        host.finish("ended");
    });
    assert_eq!(outcome.unwrap(), Outcome::Ended);
}

#[test]
fn an_error_without_a_number_has_the_errno_of_its_kind() {
    use std::io::ErrorKind;
    let errno = |kind: ErrorKind| super::driver::errno(&kind.into());
    assert_eq!(errno(ErrorKind::PermissionDenied), 13, "EACCES");
    assert_eq!(errno(ErrorKind::StorageFull), 28, "ENOSPC");
    assert_eq!(errno(ErrorKind::QuotaExceeded), 122, "EDQUOT");
    assert_eq!(errno(ErrorKind::ReadOnlyFilesystem), 30, "EROFS");
    assert_eq!(errno(ErrorKind::Unsupported), 95, "EOPNOTSUPP");
    assert_eq!(errno(ErrorKind::TimedOut), 110, "ETIMEDOUT");
    assert_eq!(errno(ErrorKind::Other), 5, "EIO");
}

#[test]
fn a_panic_and_an_error_end_their_request_and_nothing_else() {
    let driver = Arc::new(Ram::new());
    let outcome = run(&driver, plain(), (1, 1), |host| {
        assert_eq!(host.errno(0, command(CommandKind::Read, 1, 512, 512)), 5);
        assert_eq!(host.errno(0, command(CommandKind::Read, 2, 1024, 512)), 28);
        assert_eq!(host.errno(0, command(CommandKind::Read, 3, 0, 512)), 0);
        host.finish("ended");
    });
    assert_eq!(outcome.unwrap(), Outcome::Ended);
}

#[test]
fn a_write_that_shall_be_durable_is_flushed_where_the_driver_knows_nothing_else() {
    let driver = Arc::new(Ram::new());
    run(&driver, plain(), (1, 1), |host| {
        assert_eq!(
            host.errno(0, Command { fua: true, ..command(CommandKind::Write, 1, 0, 512) }),
            0
        );
        host.finish("ended");
    })
    .unwrap();
    assert_eq!(driver.flushes.load(Ordering::SeqCst), 1);
}

#[test]
fn commands_that_reach_outside_their_memory_end_the_connection() {
    for (offset, length) in [(0, (1 << 20) + 1), (1 << 20, 512), (u64::MAX, 512), (0, 0)] {
        for threads in [1, 2] {
            let driver = Arc::new(Ram::new());
            let outcome = run(&driver, plain(), (1, threads), move |host| {
                host.send(ControlKind::Doors, ControlFacts::default());
                host.command(0, Command { offset, ..command(CommandKind::Write, 1, 0, length) });
                assert!(host.lanes[0].0.receive(&mut [0; 100]).unwrap().is_none(), "no answer");
            });
            let error = outcome.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        }
    }
}

#[test]
fn a_host_that_goes_or_breaks_the_protocol_ends_the_driver() {
    for threads in [1, 3] {
        let driver = Arc::new(Ram::new());
        let error = run(&driver, plain(), (2, threads), |_| ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed);
        let outcome = run(&driver, plain(), (1, threads), |host| {
            host.lanes[0].0.send(&[9; 64], &[]).unwrap();
            assert!(host.lanes[0].0.receive(&mut [0; 100]).unwrap().is_none());
        });
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Invalid);
        let outcome = run(&driver, plain(), (1, threads), |host| {
            host.send(ControlKind::Hello, ControlFacts::default());
            assert!(host.control.receive(&mut [0; 100]).unwrap().is_none());
        });
        assert!(outcome.unwrap_err().to_string().contains("Hello"));
    }
}

#[test]
fn a_refusal_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let (path, host) = host(folder.path(), plain(), 0, |host| {
        let facts =
            ControlFacts::default().with("errno", 16).with("message", "the device has a driver");
        // The driver may have ended already.
        let _ = host.control.send(&Control::new(ControlKind::Refused, facts).encode(), &[]);
    });
    let error = serve(Ram::new(), &[], &Options::new().socket(path)).unwrap_err();
    // ATTACHED without a queue came first.
    assert!(error.to_string().contains("Attached"), "{error}");
    host.join().unwrap();
}

#[test]
fn a_driver_that_cannot_do_what_the_device_commands_is_not_attached() {
    let driver = Arc::new(Ram { abilities: Abilities::default(), ..Ram::new() });
    let error = run(&driver, plain().with("can_discard", 1), (1, 1), |_| ()).unwrap_err();
    assert!(error.to_string().contains("can_discard=1"), "{error}");
}

/// A chunk of one entry, in the memory of a lane.
fn chunk(
    host: &mut Host,
    at: usize,
    (address, length, write_number): (u64, usize, u64),
    value: u8,
) -> Command {
    let entry = ChunkEntry { address, length: length as u64, write_number };
    host.lanes[0].2[at..at + 32].copy_from_slice(&entry.encode());
    host.lanes[0].2[at + METADATA..at + METADATA + length].fill(value);
    let command = command(CommandKind::Chunk, write_number, 0, CHUNK as u64);
    Command { offset: at as u64, entries: 1, horizon: 9, floor: 1, ..command }
}

#[test]
fn a_driver_without_chunks_gets_their_writes_and_late_ones_change_nothing() {
    let driver = Arc::new(Ram::new());
    let outcome = run(&driver, batch(), (1, 1), |host| {
        let newer = chunk(host, 0, (4096, 512, 2), 2);
        assert_eq!(host.errno(0, newer), 0);
        let older = chunk(host, CHUNK, (4096, 1024, 1), 1);
        assert_eq!(host.errno(0, older), 0);
        let bad = Command { entries: 3, ..chunk(host, 0, (8192, 512, 3), 3) };
        host.lanes[0].2[32..64].fill(255);
        assert_eq!(host.errno(0, bad), 22, "entries that make no sense are refused whole");
        assert_eq!(host.errno(1, command(CommandKind::Read, 1, 4096, 1024)), 0);
        assert_eq!((host.lanes[1].2[0], host.lanes[1].2[511], host.lanes[1].2[512]), (2, 2, 1));
        host.finish("ended");
    });
    assert_eq!(outcome.unwrap(), Outcome::Ended);
    assert_eq!(driver.bytes.lock()[8192], 0);
}

/// Takes a chunk, and completes it on command.
struct SlowDriver {
    began: Sender<&'static str>,
    go_on: Mutex<std::sync::mpsc::Receiver<()>>,
}

impl ChunkDriver for SlowDriver {
    fn abilities(&self) -> Abilities {
        Abilities::default()
    }

    fn write(&self, chunk: &super::Chunk<'_>) -> io::Result<()> {
        let (entry, data) = chunk.entries().next().unwrap().unwrap();
        assert_eq!((entry.length, data[0]), (512, 5));
        self.began.send("write").unwrap();
        self.go_on.lock().recv().unwrap();
        self.began.send("written").unwrap();
        Ok(())
    }

    fn read(&self, _offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.began.send("read").unwrap();
        into.fill(0);
        Ok(())
    }

    fn flush(&self, queue: usize) -> io::Result<()> {
        assert_eq!(queue, 0);
        self.began.send("flush").unwrap();
        Ok(())
    }
}

#[test]
fn a_flush_of_chunks_waits_for_those_before_it_and_reads_do_not() {
    let folder = tempfile::tempdir().unwrap();
    let (began, receiver) = channel();
    let (sender, go_on) = channel();
    let (path, host) = host(folder.path(), batch(), 1, move |host| {
        host.send(ControlKind::Doors, ControlFacts::default());
        let command_of_chunk = chunk(host, 0, (0, 512, 1), 5);
        host.command(0, command_of_chunk);
        host.command(0, Command::new(CommandKind::Flush, 2));
        assert_eq!(receiver.recv().unwrap(), "write");
        assert_eq!(host.errno(1, command(CommandKind::Read, 1, 0, 512)), 0);
        assert_eq!(receiver.recv().unwrap(), "read");
        sender.send(()).unwrap();
        assert_eq!(host.answers(0, 2).iter().map(|answer| answer.errno).sum::<i32>(), 0);
        assert_eq!([receiver.recv().unwrap(), receiver.recv().unwrap()], ["written", "flush"]);
        host.finish("ended");
    });
    let driver = SlowDriver { began, go_on: Mutex::new(go_on) };
    let options = Options::sized(16 << 20).threads(3).socket(path);
    assert_eq!(serve_chunks(&driver, &[], &options).unwrap(), Outcome::Ended);
    host.join().unwrap();
}

#[test]
fn a_driver_in_this_process_keeps_the_contract() {
    struct Plain(Ram);
    impl Driver for Plain {
        fn abilities(&self) -> Abilities {
            self.0.abilities
        }
        fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
            let at = offset as usize;
            into.copy_from_slice(&self.0.bytes.lock()[at..at + into.len()]);
            Ok(())
        }
        fn write(&self, offset: u64, bytes: &[u8], fua: bool) -> io::Result<()> {
            assert!(bytes.len().is_multiple_of(512) && offset.is_multiple_of(512));
            self.0.write(offset, bytes, fua)
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
        fn discard(&self, _offset: u64, _length: u64) -> io::Result<()> {
            Ok(())
        }
        fn write_zeroes(&self, offset: u64, length: u64, keep_space: bool) -> io::Result<()> {
            self.0.write_zeroes(offset, length, keep_space)
        }
    }
    for threads in [0, 4] {
        conformance::all(&|| -> Arc<dyn BlockDevice> {
            let device = InProcess::new(Plain(Ram::new()), 16 << 20, 512, threads).unwrap();
            Arc::new(Align::new(device, 512).unwrap())
        });
    }
    let read_only = Abilities { write: false, ..Abilities::default() };
    conformance::read_only(&|| -> Arc<dyn BlockDevice> {
        let ram = Ram { abilities: read_only, ..Ram::new() };
        Arc::new(InProcess::new(Plain(ram), 16 << 20, 512, 1).unwrap())
    });
}
