//! Runs that are recorded: a workload on a device under test over a recording disk (*below*), or
//! through a recorder on a user's disk (*above*).
//!
//! Invariant: one clock stamps the workload and the entries of the recording, so that a cut knows
//! what the workload had been promised at that time.
//!
//! Not here: what is left after a crash (`cut_check`).

use std::path::Path;
use std::sync::Arc;

use sawmill_device::{BlockDevice, BlockDeviceExt};
use sawmill_frontend::nbd::{Export, Listen, NbdOptions, NbdServer};
use sawmill_frontend::{Door, Stop};

use crate::bridge::{LoopDevice, NbdFile, require_mount};
use crate::file_system::FileSystem;
use crate::files::Files;
use crate::image::Image;
use crate::load::{Load, Mix};
use crate::nbd::{Client, Style};
use crate::program;
use crate::recorded_run::{Knowledge, RecordedRun};
use crate::recorder::Recorder;
use crate::recording::LogWriter;
use crate::stamp::{self, Clock};
use crate::subject::Subject;
use crate::{Error, Result};
use sawmill_testkit::Dice;

/// What is done to the device.
#[derive(Clone, Debug)]
pub enum Work {
    /// Stamped writes, zeroes and flushes.
    Stamps {
        /// Bytes of the device that are written, from its beginning.
        area_bytes: u64,
        /// Requests of the whole load, over all connections.
        requests: u64,
        /// Whether trims are used, and must read as zeroes afterwards.
        trim: bool,
    },
    /// A file system is made and filled.
    Files {
        /// The kind to make.
        kind: FileSystem,
        /// Files made, replaced and removed.
        steps: u64,
    },
    /// A command line of the user's, with `{device}` for the block device.
    Command(String),
}

/// The largest target whose old content is read, because a command may rely on it.
const BEFORE_BYTES_MAX: u64 = 4 << 30;

/// Does the work on `subject` over a recording disk of `disk_bytes`; leaves everything in `folder`.
pub fn below(
    subject: &dyn Subject,
    disk_bytes: u64,
    work: &Work,
    seed: u64,
    folder: &Path,
) -> Result<RecordedRun> {
    let clock = Clock::default();
    let before = subject.prepare(disk_bytes, folder)?;
    let log = LogWriter::create(&folder.join("log"))?;
    let disk = Arc::new(Recorder::new(before.to_device()?, log, clock.clone()));
    let mut running = subject.start(Arc::clone(&disk), folder)?;
    let (first, knowledge) = match work {
        Work::Stamps { area_bytes, requests, trim } => {
            let client = running.client()?;
            let stamping =
                StampLoad { area_bytes: *area_bytes, requests: *requests, trim: *trim, seed };
            (0, stamping.drive(&client, &clock, || running.settle())?)
        }
        Work::Files { .. } | Work::Command(_) => {
            // Closes the connection that showed that it serves, because some serve only one at a
            // time.
            drop(running.client()?);
            let uri = running.uri().to_owned();
            on_block_device(&uri, work, seed, &clock, folder, || {
                running.settle()?;
                Ok(disk.entry_count())
            })?
        }
    };
    running.stop()?;
    let recorded = RecordedRun { recording: disk.finish()?, before, first, knowledge };
    recorded.save(folder)?;
    Ok(recorded)
}

/// Does the work on `target` through a recorder. Also returns what was wrong with the target's own
/// answers.
pub fn above(
    target: Arc<dyn BlockDevice>,
    work: &Work,
    seed: u64,
    folder: &Path,
) -> Result<(RecordedRun, Option<String>)> {
    let clock = Clock::default();
    let before = content_before(&*target, work)?;
    let log = LogWriter::create(&folder.join("log"))?;
    let disk = Arc::new(Recorder::new(target, log, clock.clone()));
    let server = NbdServer::start(NbdOptions::new(Listen::Unix(folder.join("disk.sock"))))?;
    let device = Arc::clone(&disk) as Arc<dyn BlockDevice>;
    server.add_export(Export { name: String::new(), description: String::new(), device })?;
    let (mut wrong, uri) = (None, server.uri(""));
    let (first, knowledge) = if let Work::Stamps { area_bytes, requests, trim } = *work {
        disk.write_zeroes(0, area_bytes)
            .or_else(|_| disk.write_at(0, &vec![0; area_bytes as usize]))?;
        disk.flush()?;
        let first = disk.entry_count();
        // After the wiping. In cuts before that, the judge would meet what the target held earlier.
        let client = connect(&uri)?;
        let stamping = StampLoad { area_bytes, requests, trim, seed };
        let knowledge = stamping.drive(&client, &clock, || Ok(false))?;
        if let Knowledge::Stamps { log, .. } = &knowledge {
            let image = disk.read_at(0, area_bytes as usize)?;
            wrong =
                stamp::check_nothing_accepted_lost(log, &image).err().map(|violation| violation.0);
        }
        (first, knowledge)
    } else {
        on_block_device(&uri, work, seed, &clock, folder, || Ok(disk.entry_count()))?
    };
    // Before the log is completed, so that the last requests are in it.
    server.stop(Stop::Drained);
    let recorded = RecordedRun { recording: disk.finish()?, before, first, knowledge };
    recorded.save(folder)?;
    Ok((recorded, wrong))
}

fn connect(uri: &str) -> Result<Client> {
    Client::connect(uri, Style::Structured)
        .map_err(|source| Error::Io { what: format!("cannot connect to {uri}"), source })
}

/// The content of a target. It is read only for a command; all other work writes what it relies on.
fn content_before(target: &dyn BlockDevice, work: &Work) -> Result<Image> {
    const STEP: u64 = 1 << 20;
    let size_bytes = target.geometry().size_bytes;
    let mut image = Image::new(size_bytes);
    if !matches!(work, Work::Command(_)) {
        return Ok(image);
    }
    if size_bytes > BEFORE_BYTES_MAX {
        let text = format!(
            "the target has {size_bytes} bytes; for a command of your own it may have \
             {BEFORE_BYTES_MAX} at most, because its old content is part of every image"
        );
        return Err(Error::Usage(text));
    }
    for address in (0..size_bytes).step_by(STEP as usize) {
        let bytes = target.read_at(address, STEP.min(size_bytes - address) as usize)?;
        image.write(address, &bytes);
    }
    Ok(image)
}

/// The export `uri` as a block device, and the work on it. Returns the first entry after the file
/// system was made; `made` reports which that is.
fn on_block_device(
    uri: &str,
    work: &Work,
    seed: u64,
    clock: &Clock,
    folder: &Path,
    mut made: impl FnMut() -> Result<usize>,
) -> Result<(usize, Knowledge)> {
    require_mount()?;
    let file = NbdFile::new(uri, &folder.join("export"))?;
    let device = LoopDevice::new(file.path())?;
    match work {
        Work::Files { kind, steps } => {
            kind.require_programs()?;
            kind.make(device.path())?;
            let mounted = kind.mount(&device, folder)?;
            // A cut before the file system is complete could not be mounted, and that would be
            // nobody's fault.
            program::run(program::command("sync")?.arg("-f").arg(mounted.root()))?;
            let first = made()?;
            let mut files = Files::new(*kind);
            files.fill(mounted.root(), *steps, &mut Dice::new(seed), clock)?;
            mounted.unmount()?;
            Ok((first, Knowledge::Files(files)))
        }
        Work::Command(line) => {
            let line = line.replace("{device}", &device.path().display().to_string());
            program::run(program::command("sh")?.args(["-c", &line]))?;
            Ok((0, Knowledge::Nothing))
        }
        Work::Stamps { .. } => Ok((0, Knowledge::Nothing)),
    }
}

/// The stamped workload, at the target and in its log.
struct StampLoad {
    area_bytes: u64,
    requests: u64,
    trim: bool,
    seed: u64,
}

impl StampLoad {
    /// Tenths of the requests, and how they behave: many at a time, few, and one by one.
    fn phases(&self) -> [(u64, Mix); 3] {
        let mix = Mix { trim: self.trim, flush_once_in: 12, fua_once_in: 12, ..Mix::default() };
        let few = Mix { depth: 4, sectors_max: 24, ..mix };
        [(4, mix), (3, few), (3, Mix { depth: 1, ..few })]
    }

    /// Does the work; between its phases `settle` may make accepted writes survive the loss of the
    /// disk.
    fn drive(
        &self,
        client: &Client,
        clock: &Clock,
        mut settle: impl FnMut() -> Result<bool>,
    ) -> Result<Knowledge> {
        let size_bytes = client.export().size_bytes;
        if size_bytes < self.area_bytes {
            let text = format!(
                "the device has {size_bytes} bytes; the workload needs {}",
                self.area_bytes
            );
            return Err(Error::Usage(text));
        }
        let phases = self.phases();
        let mut load = Load::new(self.area_bytes, Dice::new(self.seed), phases[0].1);
        load.log.clock = clock.clone();
        let mut settled = Vec::new();
        for (share, mix) in phases {
            load.mix = mix;
            let counts =
                load.drive(std::slice::from_ref(client), self.requests * share / 10, || ());
            // Without a crash, every request must succeed. A recording of a failing device proves
            // nothing.
            if counts.refused + counts.unanswered > 0 {
                let text = format!(
                    "the device did not do the work: {} requests refused (the last error number: \
                     {:?}), {} unanswered",
                    counts.refused, counts.last_errno, counts.unanswered
                );
                return Err(Error::Subject(text));
            }
            // Before the settling: what completes during it may or may not be covered.
            let before = clock.tick();
            if settle()? {
                settled.push((before, clock.tick()));
            }
        }
        Ok(Knowledge::Stamps { log: load.log.clone(), settled })
    }
}
