//! The common parts of all commands that serve until SIGTERM: how they start, handle signals, and
//! report to the process that started them.
//!
//! Not here: what they serve, and how they stop.

use sawmill_console::exit::{Failure, Result};
use sawmill_console::output;
use serde::Serialize;
use signal_hook::iterator::Signals;

/// Signals, ends and hand-offs that the main thread has not handled yet; senders of more wait.
pub(crate) const EVENTS_MAX: usize = 1024;

/// One door, as `--json` prints it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct DoorDocument {
    /// `nbd`, `ublk`, `vhost-user`, `fuse`.
    pub(crate) kind: &'static str,
    /// What its users open.
    pub(crate) address: String,
}

/// Makes sockets, journals and caches accessible to their owner only, and marks the process as one
/// that reclaiming memory may depend on. Call this before any thread starts.
pub(crate) fn start() {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    // Only a debug message: without CAP_SYS_RESOURCE this is refused to every ordinary server.
    if let Err(error) = sawmill_sys::reclaim::set_io_flusher() {
        tracing::debug!("cannot mark threads as serving disks: {error}");
    }
}

/// Calls `on_signal` on a thread of its own for each of these signals, until it returns `false`.
pub(crate) fn on_signals(
    signals: &[i32],
    mut on_signal: impl FnMut(i32) -> bool + Send + 'static,
) -> Result<()> {
    let cannot = |error: std::io::Error| Failure::io("cannot listen to signals", &error);
    // Here and not on the thread: a signal that comes before the thread runs is kept for it.
    let mut signals = Signals::new(signals).map_err(cannot)?;
    let forward = move || {
        for signal in signals.forever() {
            if !on_signal(signal) {
                return;
            }
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(forward).map(drop).map_err(cannot)
}

/// Prints an event as JSON. A server continues to serve if nothing reads its output.
pub(crate) fn print_event(event: &impl Serialize) {
    if let Err(failure) = output::json_event(event) {
        tracing::debug!("cannot print an event: {failure}");
    }
}

/// Prints a line. As with events, a missing reader is not an error.
pub(crate) fn print_line(text: &str) {
    if let Err(failure) = output::line(text) {
        tracing::debug!("cannot print a line: {failure}");
    }
}

/// Notifies the service manager, if there is one.
pub(crate) fn notify(state: sd_notify::NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!("cannot notify the service manager: {error}");
    }
}
