//! A disk that fails: an NBD server of our own in memory, shown as a file through `nbdfuse`, so
//! that the real binary keeps its journal on it. The test makes writes and syncs fail, slow down or
//! hang.
//!
//! Invariant: unsynced writes are only in the disk's volatile cache. A failed sync drops them, and
//! later syncs succeed as if nothing had happened, as with disks and kernels. A power cut drops
//! them too.
//!
//! Not here: the client side of the protocol (`nbd`); more than one connection.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::machine::{self, PATIENCE, command};

/// The requests that the disk can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskRequest {
    /// Writes bytes to the volatile cache.
    Write,
    /// Writes the volatile cache to the medium.
    Sync,
}

/// What goes wrong with an act.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// It fails with EIO.
    Fails,
    /// It takes this long.
    Drags(Duration),
    /// It waits until the test calls [`BadDisk::release`].
    Hangs,
}

struct Plan {
    act: DiskRequest,
    skip: u64,
    times: u64,
    trouble: Trouble,
}

#[derive(Default)]
struct State {
    /// The content that reads see.
    cached: Vec<u8>,
    /// The content after a power cut.
    medium: Vec<u8>,
    /// Writes since the last sync, as ranges.
    unsynced: Vec<(usize, usize)>,
    plans: Vec<Plan>,
    struck: u64,
    hanging: u64,
    turns: u64,
}

#[derive(Default)]
struct BadDiskState {
    state: Mutex<State>,
    changed: Condvar,
}

/// The disk, and the file that shows it.
pub struct BadDisk {
    shared: Arc<BadDiskState>,
    file: PathBuf,
    socket: PathBuf,
    fuse: Option<Child>,
    _folder: tempfile::TempDir,
}

impl BadDisk {
    /// Shows a disk with the bytes of `file` in the place of that file.
    #[must_use]
    pub fn over(file: &Path) -> Self {
        let folder =
            tempfile::Builder::new().prefix("sawmill-disk-").tempdir().expect("a temporary folder");
        let socket = folder.path().join("socket");
        let bytes = std::fs::read(file).expect("a file to take the place of");
        let shared = Arc::new(BadDiskState::default());
        {
            let mut state = shared.lock();
            state.medium.clone_from(&bytes);
            state.cached = bytes;
        }
        let listener = UnixListener::bind(&socket).expect("a socket in a folder of our own");
        let served = Arc::clone(&shared);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let shared = Arc::clone(&served);
                // The thread ends when nbdfuse exits.
                std::thread::spawn(move || shared.serve(stream));
            }
        });
        let mut disk =
            BadDisk { shared, file: file.to_owned(), socket, fuse: None, _folder: folder };
        disk.mount();
        disk
    }

    /// After the first `skip`, the next `times` acts of this kind have this trouble.
    pub fn trouble(&self, act: DiskRequest, skip: u64, times: u64, trouble: Trouble) {
        self.shared.lock().plans.push(Plan { act, skip, times, trouble });
    }

    /// Ends all trouble; hanging acts continue.
    pub fn heal(&self) {
        self.shared.lock().plans.clear();
        self.release();
    }

    /// Lets all hanging acts continue.
    pub fn release(&self) {
        self.shared.lock().turns += 1;
        self.shared.changed.notify_all();
    }

    /// How many acts had trouble so far.
    #[must_use]
    pub fn struck(&self) -> u64 {
        self.shared.lock().struck
    }

    /// Waits until something hangs.
    ///
    /// # Panics
    /// When nothing hangs for too long.
    pub fn wait_hanging(&self) {
        let state = self.shared.lock();
        let (_state, waited) = self
            .shared
            .changed
            .wait_timeout_while(state, PATIENCE, |state| state.hanging == 0)
            .unwrap_or_else(PoisonError::into_inner);
        assert!(!waited.timed_out(), "the disk was never asked");
    }

    /// Drops the volatile cache, the kernel's too. No process may have the file open.
    pub fn cut_power(&mut self) {
        self.unmount();
        self.shared.lock().drop_unsynced();
        self.mount();
    }

    fn mount(&mut self) {
        let mut fuse = command("nbdfuse");
        fuse.arg(&self.file).arg("--unix").arg(&self.socket);
        let length = self.shared.lock().medium.len() as u64;
        // The file below has the same size: only the device distinguishes the two.
        let below = device_of(&self.file);
        self.fuse = Some(fuse.stderr(Stdio::inherit()).spawn().expect("nbdfuse starts"));
        machine::wait_for("nbdfuse shows the disk", || {
            let is_mounted = device_of(&self.file) != below;
            (is_mounted && std::fs::metadata(&self.file).ok()?.len() == length).then_some(())
        });
    }

    fn unmount(&mut self) {
        let Some(mut fuse) = self.fuse.take() else { return };
        machine::wait_for("the disk is no longer shown", || {
            let unmounted = command("fusermount3").arg("-u").arg(&self.file).output().ok()?;
            unmounted.status.success().then_some(())
        });
        let _ = fuse.wait();
    }
}

impl Drop for BadDisk {
    fn drop(&mut self) {
        self.heal();
        if let Some(mut fuse) = self.fuse.take() {
            // Lazily, in case a process still has it open.
            let _ = command("fusermount3").args(["-u", "-z"]).arg(&self.file).output();
            let _ = fuse.kill();
            let _ = fuse.wait();
        }
    }
}

fn device_of(file: &Path) -> Option<u64> {
    rustix::fs::stat(file).ok().map(|found| found.st_dev)
}

impl State {
    fn drop_unsynced(&mut self) {
        for (start, end) in std::mem::take(&mut self.unsynced) {
            self.cached[start..end].copy_from_slice(&self.medium[start..end]);
        }
    }

    fn sync(&mut self) {
        for (start, end) in std::mem::take(&mut self.unsynced) {
            self.medium[start..end].copy_from_slice(&self.cached[start..end]);
        }
    }

    fn strike(&mut self, act: DiskRequest) -> Option<Trouble> {
        let plan = self.plans.iter_mut().find(|plan| plan.act == act && plan.times > 0)?;
        if plan.skip > 0 {
            plan.skip -= 1;
            return None;
        }
        plan.times -= 1;
        self.struck += 1;
        Some(plan.trouble)
    }
}

impl BadDiskState {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One connection, to its end.
    fn serve(&self, mut stream: UnixStream) {
        // The end of the connection is an error too, and needs no report.
        let _ = self.negotiate(&mut stream).and_then(|()| self.transmit(&mut stream));
    }

    fn negotiate(&self, stream: &mut UnixStream) -> io::Result<()> {
        const FIXED_NEWSTYLE_NO_ZEROES: u16 = 3;
        const GO: u32 = 7;
        const HAS_FLAGS_AND_FLUSH: u16 = 1 | 1 << 2;
        stream.write_all(b"NBDMAGICIHAVEOPT")?;
        stream.write_all(&FIXED_NEWSTYLE_NO_ZEROES.to_be_bytes())?;
        read::<4>(stream)?;
        loop {
            read::<8>(stream)?;
            let option = u32::from_be_bytes(read(stream)?);
            let length = u32::from_be_bytes(read(stream)?);
            io::copy(&mut stream.take(u64::from(length)), &mut io::sink())?;
            let mut reply = |kind: u32, payload: &[u8]| -> io::Result<()> {
                stream.write_all(&0x0003_e889_0455_65a9_u64.to_be_bytes())?;
                stream.write_all(&option.to_be_bytes())?;
                stream.write_all(&kind.to_be_bytes())?;
                stream.write_all(&(payload.len() as u32).to_be_bytes())?;
                stream.write_all(payload)
            };
            if option != GO {
                reply(1 << 31 | 1, &[])?;
                continue;
            }
            let mut export = vec![0, 0];
            export.extend((self.lock().medium.len() as u64).to_be_bytes());
            export.extend(HAS_FLAGS_AND_FLUSH.to_be_bytes());
            reply(3, &export)?;
            return reply(1, &[]);
        }
    }

    fn transmit(&self, stream: &mut UnixStream) -> io::Result<()> {
        const EIO: u32 = 5;
        loop {
            read::<6>(stream)?;
            let kind = u16::from_be_bytes(read(stream)?);
            let cookie: [u8; 8] = read(stream)?;
            let offset = u64::from_be_bytes(read(stream)?) as usize;
            let length = u32::from_be_bytes(read(stream)?) as usize;
            let mut bytes = Vec::new();
            let done = match kind {
                0 => {
                    bytes.extend_from_slice(&self.lock().cached[offset..offset + length]);
                    true
                }
                1 => {
                    let mut written = vec![0; length];
                    stream.read_exact(&mut written)?;
                    self.meet(DiskRequest::Write, |state| {
                        state.cached[offset..offset + length].copy_from_slice(&written);
                        state.unsynced.push((offset, offset + length));
                    })
                }
                3 => self.meet(DiskRequest::Sync, State::sync),
                _ => return Ok(()),
            };
            stream.write_all(&0x6744_6698_u32.to_be_bytes())?;
            stream.write_all(&if done { 0 } else { EIO }.to_be_bytes())?;
            stream.write_all(&cookie)?;
            stream.write_all(&bytes)?;
        }
    }

    /// Does an act, or its planned trouble; returns false if it failed.
    fn meet(&self, act: DiskRequest, done: impl FnOnce(&mut State)) -> bool {
        let mut state = self.lock();
        match state.strike(act) {
            Some(Trouble::Fails) => {
                if act == DiskRequest::Sync {
                    state.drop_unsynced();
                }
                return false;
            }
            Some(Trouble::Drags(time)) => {
                drop(state);
                std::thread::sleep(time);
                state = self.lock();
            }
            Some(Trouble::Hangs) => {
                let turn = state.turns;
                state.hanging += 1;
                self.changed.notify_all();
                while state.turns == turn {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                state.hanging -= 1;
            }
            None => {}
        }
        done(&mut state);
        true
    }
}

fn read<const COUNT: usize>(from: &mut impl Read) -> io::Result<[u8; COUNT]> {
    let mut bytes = [0; COUNT];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}
