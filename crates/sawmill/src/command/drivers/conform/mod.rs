//! `sawmill conform`: runs the contract's tests on any driver, in any language, behind any door.
//!
//! Each clause gets a driver of its own: a new process, and a device that is zeroed where the tests
//! look, so that one broken clause does not spoil the others. Modules: `scene` (the host, one
//! driver, one door), `trial` (the doors), `life` (what only drivers do: die, be replaced, end).
//!
//! Invariants: a request without an answer fails its clause and does not hang the command; no
//! process and no door outlives the command. Not here: the clauses of the contract
//! (`sawmill_device::conformance`).

mod life;
mod scene;
mod trial;

use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use sawmill_device::conformance::{self, Clause};
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use super::run::DeviceOptions;
use crate::command::Context;
use crate::daemon;
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output;
use scene::{Scene, TestPlan, wrong};
use trial::{TRIALS, Trial};

/// The value of `--door` for no door.
const DIRECT: &str = "direct";
/// A clause that takes longer has lost a request: the contract's own clauses give up after two
/// minutes.
const CLAUSE_TIME_MAX: Duration = Duration::from_secs(150);
/// Interval of checks for the end of the driver while a clause runs.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Longer reasons are truncated.
const NOTE_CHARS_MAX: usize = 300;
/// Time for a clause to end after its device has failed.
const GIVE_UP_TIME_MAX: Duration = Duration::from_secs(10);

/// The time for a driver to connect and to disconnect, unless the user sets one.
const WITHIN_S_DEFAULT: u32 = 30;

/// Test a driver: run the block device contract's tests on it, and kill, replace and end it.
///
/// Starts the command once for each clause, as `sawmill run` does. OVERWRITES the content of the
/// device, which must have 16 MiB or more. Prints a line for each clause. Exit code 0: no clause is
/// broken; 1: at least one is. For batch mode, add --option mode=batch. A driver that does not
/// answer a command within 20 s fails the clause; --option request_timeout_s=SECONDS changes this
/// limit.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// The door through which the tests use the device.
    #[arg(long, value_name = "DOOR", value_parser = through(), default_value = DIRECT)]
    door: TestDoor,

    /// Kind of device. A null device keeps nothing; a read-only device refuses writes and reads as
    /// zeroes.
    #[arg(long, value_name = "KIND", value_enum, default_value_t = DeviceKind::Full)]
    kind: DeviceKind,

    #[command(flatten)]
    device: DeviceOptions,

    /// Run only the clauses whose name contains this. May be repeated.
    #[arg(long = "clause", value_name = "TEXT")]
    clauses: Vec<String>,

    /// Seconds a driver may take to connect and to disconnect. After the last request, its process
    /// must exit within a third of this.
    #[arg(long, value_name = "SECONDS", default_value_t = WITHIN_S_DEFAULT,
        value_parser = clap::value_parser!(u32).range(3..=3600))]
    within: u32,

    /// The driver, with its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// The door under test. `None`: no door; this process sends requests straight to the driver.
#[derive(Clone, Copy)]
pub(in crate::command) struct TestDoor(Option<&'static Trial>);

/// Reads the door under test.
fn through() -> impl TypedValueParser<Value = TestDoor> {
    let direct = "No door: this process sends requests straight to the driver";
    let doors = TRIALS.iter().map(|trial| PossibleValue::new(trial.name).help(trial.help));
    let values = std::iter::once(PossibleValue::new(DIRECT).help(direct)).chain(doors);
    PossibleValuesParser::new(values)
        .map(|name| TestDoor(TRIALS.iter().find(|trial| trial.name == name)))
}

/// What the device must be able to do.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(in crate::command) enum DeviceKind {
    /// Run all tests
    Full,
    /// Run the tests that a device that keeps nothing can pass
    Null,
    /// Run the tests that a device that refuses writes can pass
    ReadOnly,
}

/// The result of a clause.
enum Outcome {
    /// Kept, with a note or an empty string.
    Ok(String),
    /// Broken, with the reason.
    Failed(String),
    /// Not tested, with the reason.
    LeftOut(String),
}

/// One test: of the contract, or of a driver's life.
#[derive(Clone, Copy)]
enum Test {
    Contract(Clause),
    Life(life::Life),
}

#[derive(Serialize)]
struct Row {
    clause: &'static str,
    outcome: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    note: String,
}

#[derive(Serialize)]
struct Report {
    clauses: Vec<Row>,
    failed: usize,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    daemon::start();
    let within = Duration::from_secs(arguments.within.into());
    let (door, kind) = (arguments.door, arguments.kind);
    let mut plan = TestPlan::new(door, kind, &arguments.device.options, &arguments.command, within);
    let is_selected = |test: &Test| {
        arguments.clauses.is_empty()
            || arguments.clauses.iter().any(|text| test.name().contains(text.as_str()))
    };
    let tests: Vec<Test> = tests(arguments.kind).into_iter().filter(is_selected).collect();
    if tests.is_empty() {
        return Err(Failure::usage("no clause has such a name; omit --clause to see all names"));
    }
    listen_to_panics();
    let interrupted = listen_to_signals()?;
    plan.interrupted = Arc::clone(&interrupted);
    let mut clauses = Vec::new();
    for test in tests {
        let outcome = match test.left_out(&plan) {
            Some(why) => Outcome::LeftOut(why.to_owned()),
            None => judge(&plan, test)?,
        };
        if interrupted.load(Ordering::SeqCst) {
            return Err(Failure::new(Exit::Unavailable, format!("interrupted in {}", test.name())));
        }
        let (outcome, note) = match outcome {
            Outcome::Ok(note) => ("ok", note),
            Outcome::Failed(why) => ("FAIL", why),
            Outcome::LeftOut(why) => ("left out", why),
        };
        if !context.json {
            let note = if note.is_empty() { String::new() } else { format!(": {note}") };
            output::line(&format!("{outcome:<8}  {}{note}", test.name()))?;
        }
        clauses.push(Row { clause: test.name(), outcome, note });
    }
    let count = |outcome| clauses.iter().filter(|row| row.outcome == outcome).count();
    let (kept, failed) = (count("ok"), count("FAIL"));
    let left_out = clauses.len() - kept - failed;
    match context.json {
        true => output::json(&Report { clauses, failed })?,
        false => {
            output::line(&format!("{kept} clauses kept, {failed} broken, {left_out} left out"))?
        }
    }
    Ok(if failed == 0 { Exit::Ok } else { Exit::Negative })
}

fn tests(kind: DeviceKind) -> Vec<Test> {
    let contract = match kind {
        DeviceKind::Full => conformance::ALL,
        DeviceKind::Null => conformance::NULL,
        DeviceKind::ReadOnly => conformance::READ_ONLY,
    };
    contract.iter().map(|clause| Test::Contract(*clause)).chain(life::ALL.map(Test::Life)).collect()
}

impl Test {
    fn name(&self) -> &'static str {
        match self {
            Test::Contract(clause) => clause.name,
            Test::Life(life) => life.name(),
        }
    }

    /// Why it cannot be tested through this door.
    fn left_out(&self, plan: &TestPlan) -> Option<&'static str> {
        let kernel_checks = plan.through.0.is_some_and(|trial| trial.kernel_checks);
        let name = self.name();
        // Left out and not passed: nothing was shown about the driver.
        if kernel_checks && (name.starts_with("d6_") || name.starts_with("d7_")) {
            return Some("the kernel refuses such requests before the driver sees them");
        }
        None
    }
}

/// Runs one clause on a driver of its own. Returns an error if there is no driver to judge.
fn judge(plan: &TestPlan, test: Test) -> Result<Outcome> {
    let mut scene = Scene::open(plan)?;
    let outcome = match prepare(plan, &scene) {
        Err(why) => Outcome::Failed(why.to_string()),
        Ok(()) => match test {
            Test::Contract(clause) => contract(&mut scene, clause),
            Test::Life(life) => watched(&mut scene, life),
        },
    };
    Ok(match (outcome, scene.close()) {
        // A failure at the end is often a consequence of a broken clause, whose reason counts then.
        (Outcome::Ok(_), Err(why)) => Outcome::Failed(format!("at the end: {why}")),
        (outcome, _) => outcome,
    })
}

fn prepare(plan: &TestPlan, scene: &Scene) -> Result<()> {
    let size_bytes = scene.device().geometry().size_bytes;
    if size_bytes < conformance::SIZE_BYTES_MIN {
        let least = conformance::SIZE_BYTES_MIN;
        let text = format!("the device has {size_bytes} bytes; the tests need {least} or more");
        return Err(wrong(text));
    }
    if plan.kind == DeviceKind::ReadOnly && !scene.device().geometry().read_only {
        return Err(wrong("the device is not read-only: add --option read_only=1"));
    }
    if plan.kind != DeviceKind::Full {
        return Ok(());
    }
    scene.zero().map_err(|error| {
        Failure::caused(Exit::Unavailable, "the device could not be zeroed for the test", error)
    })
}

/// Set by SIGINT and SIGTERM: the clause ends, then doors and drivers are closed. A second signal
/// ends the process immediately.
fn listen_to_signals() -> Result<Arc<AtomicBool>> {
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // The second one finds the flag set.
        flag::register_conditional_shutdown(signal, 1, Arc::clone(&interrupted))
            .and_then(|_| flag::register(signal, Arc::clone(&interrupted)))
            .map_err(|error| Failure::io("cannot listen to signals", &error))?;
    }
    Ok(interrupted)
}

/// The first panic since the last clause. Threads inside a clause panic before the clause itself
/// does, and the hook of a process gets all of them, so this is of the process too.
static PANICKED: Mutex<Option<String>> = Mutex::new(None);

fn listen_to_panics() {
    std::panic::set_hook(Box::new(|info| {
        let payload = info.payload();
        let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
        if let Ok(mut panicked) = PANICKED.lock() {
            panicked.get_or_insert_with(|| {
                text.unwrap_or_else(|| "a panic without a message".to_owned())
            });
        }
    }));
}

/// Why a clause broke, on one line. Of two values that differ it says only that they differ.
fn take_panic() -> Option<String> {
    let text = PANICKED.lock().ok().and_then(|mut panicked| panicked.take())?;
    let first = text.lines().next().unwrap_or_default();
    let message = first.strip_prefix("assertion `left == right` failed: ").unwrap_or(first);
    Some(message.chars().take(NOTE_CHARS_MAX).collect())
}

/// A clause of the contract.
fn contract(scene: &mut Scene, clause: Clause) -> Outcome {
    // What an earlier clause left must not be reported as the reason of this one.
    take_panic();
    let (sender, receiver) = sync_channel(1);
    let device = scene.device();
    let test = move || {
        let is_kept = catch_unwind(AssertUnwindSafe(|| (clause.test)(device))).is_ok();
        // A clause that took too long has no listener any more.
        let _ = sender.send(is_kept);
    };
    if let Err(error) = std::thread::Builder::new().name("clause".into()).spawn(test) {
        return Outcome::Failed(format!("no thread to test with: {error}"));
    }
    let deadline = Instant::now() + CLAUSE_TIME_MAX;
    loop {
        match receiver.recv_timeout(LOOK_EVERY) {
            Ok(true) => return Outcome::Ok(String::new()),
            Ok(false) | Err(RecvTimeoutError::Disconnected) => {
                return Outcome::Failed(
                    take_panic().unwrap_or_else(|| "a panic without a message".to_owned()),
                );
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        let why = match scene.driver_died() {
            Some(how) => format!("the driver ended during the clause: {how}"),
            None if Instant::now() > deadline => {
                format!(
                    "not done after {} s: a request was not answered",
                    CLAUSE_TIME_MAX.as_secs()
                )
            }
            None => continue,
        };
        // Everything that waits for an answer gets an error now.
        scene.fail(&why);
        let _ = receiver.recv_timeout(GIVE_UP_TIME_MAX);
        return Outcome::Failed(why);
    }
}

/// A clause of a driver's life; these clauses watch their own time limits.
fn watched(scene: &mut Scene, life: life::Life) -> Outcome {
    let judged = catch_unwind(AssertUnwindSafe(|| life.judge(scene)));
    judged.unwrap_or_else(|_| Outcome::Failed(take_panic().unwrap_or_default()))
}
