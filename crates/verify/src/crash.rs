//! Crashes the server of a device under a stamped load, again and again, and checks that everything
//! that was answered is there.
//!
//! A block device (ublk, vhost-user, FUSE with a loop device) outlives its server, and its users
//! wait for the next one. An export disappears with its server, and the load connects again.
//!
//! Invariant: the image is read through the door that the load used, when all requests have ended.
//! Not here: power failures, which are cut from a recording (`run`, `campaign`).

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use sawmill_device::{BlockDevice, BlockDeviceExt};

use crate::cut_check::Rule;
use crate::load::{Load, LoadCounts, Mix};
use crate::program;
use crate::stamp::{self, Log, SECTOR_BYTES, Verdict, Violation};
use crate::{ANSWER_TIME_MAX, Error, Result};
use sawmill_testkit::Dice;

/// What must be there after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guarantee {
    /// Every write that was answered: the server died, its machine lives.
    Answered,
    /// What was flushed, or written with FUA: power failed.
    Flushed,
}

/// The crashes to cause, and what the device promises.
#[derive(Clone, Copy, Debug)]
pub struct Crashes<'a> {
    /// A command line that crashes the server and returns when it serves again.
    pub command: &'a str,
    /// How often the server is killed and started again.
    pub rounds: u64,
    /// Requests answered before each crash.
    pub requests: u64,
    /// Bytes of the device that are written, from its beginning.
    pub area_bytes: u64,
    /// Whether trims are used, and must read as zeroes afterwards.
    pub trim: bool,
    /// The seed of all random choices.
    pub seed: u64,
    /// What must be there after a crash.
    pub guarantee: Guarantee,
    /// The states that the rest may have.
    pub rule: Rule,
    /// Whether requests in flight may fail with the server, as on an export's connection. Users of
    /// a block device wait instead.
    pub may_go: bool,
}

/// The sums over all rounds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// Crashes that were checked.
    pub rounds: u64,
    /// Requests that were answered without an error, in all rounds.
    pub answered: u64,
    /// Requests that ended with their connection.
    pub unanswered: u64,
    /// Writes that had to be there after a crash, in all.
    pub demanded: u64,
    /// What was wrong, and after which crash. This ends the check.
    pub found: Option<(u64, String)>,
}

impl Crashes<'_> {
    /// Crashes the device; `open` opens it, and again after each crash. The output of the command
    /// goes to `folder`.
    ///
    /// Errors: a device that cannot be opened or is too small, a command that fails.
    pub fn run(
        &self,
        open: impl Fn() -> Result<Arc<dyn BlockDevice>>,
        folder: &Path,
        mut progress: impl FnMut(u64),
    ) -> Result<Survey> {
        let mut device = open()?;
        let geometry = device.geometry();
        if geometry.size_bytes < self.area_bytes {
            let (has, needs) = (geometry.size_bytes, self.area_bytes);
            return Err(Error::Usage(format!(
                "the device has {has} bytes; the workload needs {needs}"
            )));
        }
        // The judge has to know every sector: what an earlier use left there would look foreign.
        device.write_at(0, &vec![0; self.area_bytes as usize])?;
        device.flush()?;
        let sectors_step = u64::from(geometry.block_bytes).div_ceil(SECTOR_BYTES as u64);
        let mix = Mix { trim: self.trim, sectors_step, ..Mix::default() };
        let mut load = Load::new(self.area_bytes, Dice::new(self.seed), mix);
        let mut survey = Survey::default();
        while survey.rounds < self.rounds {
            let mut crashed = Ok(());
            // The device is moved in and dropped, so that its connection is closed before the next
            // one is opened.
            let counts = load.drive(&[device], self.requests, || crashed = self.crash(folder));
            crashed?;
            survey.rounds += 1;
            survey.answered += counts.completed;
            survey.unanswered += counts.unanswered;
            if let Some(what) = self.unanswered(counts) {
                survey.found = Some((survey.rounds, what));
                return Ok(survey);
            }
            device = open()?;
            let image = device.read_at(0, self.area_bytes as usize)?;
            match self.judge(&load.log, &image) {
                Ok(verdict) => survey.demanded += verdict.demanded as u64,
                Err(violation) => {
                    survey.found = Some((survey.rounds, violation.0));
                    return Ok(survey);
                }
            }
            // The next round begins from what was found: a write that is missing now must not come
            // back later.
            load.log.rebase(&image);
            progress(survey.rounds);
        }
        Ok(survey)
    }

    fn crash(&self, folder: &Path) -> Result<()> {
        let output_path = folder.join("crash.output");
        let failed = |error: std::io::Error| Error::io("cannot write", &output_path, error);
        // Not through a pipe: the server that it starts may keep that open.
        let output = File::create(&output_path).map_err(failed)?;
        let error_output = output.try_clone().map_err(failed)?;
        let mut command = program::command("sh")?;
        command.args(["-c", self.command]).stdout(output).stderr(error_output);
        let status = command
            .status()
            .map_err(|source| Error::Io { what: "cannot start sh".into(), source })?;
        if status.success() {
            return Ok(());
        }
        let output_text = std::fs::read_to_string(&output_path).unwrap_or_default();
        Err(Error::Subject(format!(
            "`{}` failed ({status}): {}",
            self.command,
            output_text.trim_end()
        )))
    }

    /// What is wrong with how requests ended.
    fn unanswered(&self, counts: LoadCounts) -> Option<String> {
        if let Some(errno) = counts.last_errno {
            return Some(format!(
                "{} requests ended with an error (the last: {errno})",
                counts.refused
            ));
        }
        if counts.unanswered > 0 && !self.may_go {
            let (requests, seconds) = (counts.unanswered, ANSWER_TIME_MAX.as_secs());
            return Some(format!(
                "{requests} requests had no answer {seconds} s after the server came back"
            ));
        }
        None
    }

    fn judge(&self, log: &Log, image: &[u8]) -> Result<Verdict, Violation> {
        match (self.guarantee, self.rule) {
            (Guarantee::Answered, Rule::Prefix) => stamp::check_nothing_accepted_lost(log, image),
            (Guarantee::Answered, Rule::Sector) => stamp::check_sectors_accepted(log, image),
            (Guarantee::Flushed, Rule::Prefix) => stamp::check_flushed_kept(log, image),
            (Guarantee::Flushed, Rule::Sector) => stamp::check_sectors(log, image),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use sawmill_device::{
        Error as DeviceError, ErrorKind, Geometry, MemoryDevice, Operation, Request,
    };

    use super::*;

    const AREA_BYTES: u64 = 1 << 20;

    /// Memory that fails some requests.
    struct FaultyMemory {
        memory: MemoryDevice,
        requests: AtomicU64,
        /// The first request that fails, and its error. Reads still succeed.
        fails: Option<(u64, ErrorKind)>,
        block_bytes: u64,
    }

    impl FaultyMemory {
        fn new(fails: Option<(u64, ErrorKind)>) -> Self {
            let memory = MemoryDevice::new(AREA_BYTES);
            FaultyMemory { memory, requests: AtomicU64::new(0), fails, block_bytes: 1 }
        }
    }

    impl BlockDevice for FaultyMemory {
        fn geometry(&self) -> Geometry {
            self.memory.geometry()
        }

        fn submit(&self, request: Request) {
            let number = self.requests.fetch_add(1, Ordering::Relaxed);
            let aligned = (request.address | request.length).is_multiple_of(self.block_bytes);
            match self.fails {
                _ if !aligned => {
                    request.fail(DeviceError::new(ErrorKind::Invalid, "not whole blocks"))
                }
                Some((from, kind)) if number >= from && request.operation != Operation::Read => {
                    request.fail(DeviceError::new(kind, "planted"));
                }
                _ => self.memory.submit(request),
            }
        }
    }

    fn crashes() -> Crashes<'static> {
        Crashes {
            command: "true",
            rounds: 3,
            requests: 200,
            area_bytes: AREA_BYTES,
            trim: true,
            seed: 1,
            guarantee: Guarantee::Answered,
            rule: Rule::Prefix,
            may_go: false,
        }
    }

    /// What is found on devices that `open` gives, and what the folder holds then.
    fn survey(
        crashes: Crashes<'_>,
        open: impl Fn() -> Result<Arc<dyn BlockDevice>>,
    ) -> Result<Survey> {
        let folder = tempfile::tempdir().expect("a folder");
        crashes.run(open, folder.path(), |_| ())
    }

    #[test]
    fn a_device_that_keeps_everything_is_not_blamed_by_any_rule() {
        for (keeps, rule) in [
            (Guarantee::Answered, Rule::Prefix),
            (Guarantee::Answered, Rule::Sector),
            (Guarantee::Flushed, Rule::Prefix),
            (Guarantee::Flushed, Rule::Sector),
        ] {
            let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(AREA_BYTES));
            let survey =
                survey(Crashes { guarantee: keeps, rule, ..crashes() }, || Ok(Arc::clone(&device)));
            let survey = survey.expect("carried out");
            assert_eq!((survey.found, survey.rounds), (None, 3), "{keeps:?} {rule:?}");
            assert!(survey.answered >= 600 && survey.demanded > 100, "{keeps:?} {rule:?}");
        }
    }

    #[test]
    fn what_was_answered_and_is_gone_is_found_by_every_rule_that_asks_for_it() {
        for rule in [Rule::Prefix, Rule::Sector] {
            let open = || Ok(Arc::new(MemoryDevice::new(AREA_BYTES)) as Arc<dyn BlockDevice>);
            let survey = survey(Crashes { rule, ..crashes() }, open).expect("carried out");
            assert!(matches!(survey.found, Some((1, _))), "{rule:?}: {survey:?}");
        }
    }

    #[test]
    fn an_error_is_a_finding_and_a_connection_that_ends_is_one_where_it_may_not() {
        let at = |kind| {
            let device: Arc<dyn BlockDevice> = Arc::new(FaultyMemory::new(Some((150, kind))));
            move || Ok(Arc::clone(&device))
        };
        let found = survey(crashes(), at(ErrorKind::Unavailable)).expect("carried out").found;
        assert!(
            found.is_some_and(|(round, what)| round == 1 && what.contains("error (the last: 5)"))
        );
        let gone = survey(crashes(), at(ErrorKind::Closed)).expect("carried out");
        assert!(gone.found.is_some_and(|(_, what)| what.contains("no answer")));
        let export = Crashes { may_go: true, rounds: 1, ..crashes() };
        let gone = survey(export, at(ErrorKind::Closed)).expect("carried out");
        assert_eq!((gone.found, gone.unanswered > 0), (None, true));
    }

    #[test]
    fn every_request_is_whole_blocks_of_the_device() {
        let geometry = Geometry { block_bytes: 4096, ..MemoryDevice::new(AREA_BYTES).geometry() };
        /// Reports larger blocks than it needs.
        struct LargeDevice(Geometry, FaultyMemory);
        impl BlockDevice for LargeDevice {
            fn geometry(&self) -> Geometry {
                self.0
            }
            fn submit(&self, request: Request) {
                self.1.submit(request);
            }
        }
        let inner = FaultyMemory { block_bytes: 4096, ..FaultyMemory::new(None) };
        let device: Arc<dyn BlockDevice> = Arc::new(LargeDevice(geometry, inner));
        let survey = survey(crashes(), || Ok(Arc::clone(&device))).expect("carried out");
        assert_eq!(survey.found, None);
    }

    #[test]
    fn a_command_that_fails_ends_the_check_with_what_it_said() {
        let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(AREA_BYTES));
        let failed =
            survey(Crashes { command: "echo not here; false", ..crashes() }, || Ok(device.clone()));
        assert!(failed.expect_err("it failed").to_string().ends_with(": not here"));
    }
}
