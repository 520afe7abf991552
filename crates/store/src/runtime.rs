//! The one async runtime of this crate: two workers, and a bounded pool for blocking file calls.
//!
//! It is shared by all clients and lives until the process ends, so a client may be dropped
//! anywhere, also on a runtime thread, and its calls in flight are still answered (S1).
//!
//! Not here: how many requests run at a time (`limit`), and how long one may take (`client`).

use std::sync::OnceLock;

use parking_lot::Mutex;
use tokio::runtime::{Builder, Runtime};

use crate::{Result, StoreError, StoreErrorKind};

/// Threads that run the async code. Two suffice: they only move bytes between sockets and memory.
const WORKERS_MAX: usize = 2;
/// Most threads that may be inside blocking calls (files, name resolution).
pub(crate) const BLOCKING_THREADS_MAX: usize = 64;

static RUNTIME: OnceLock<Runtime> = OnceLock::new();
/// Held by who starts the runtime, so that no second one is started and dropped.
static STARTING: Mutex<()> = Mutex::new(());

/// The runtime, started at the first call. A start that failed is tried again at the next call: a
/// lack of threads or memory may pass.
pub(crate) fn runtime() -> Result<&'static Runtime> {
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime);
    }
    let _starting = STARTING.lock();
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime);
    }
    let started = Builder::new_multi_thread()
        .worker_threads(WORKERS_MAX)
        .max_blocking_threads(BLOCKING_THREADS_MAX)
        .thread_name("sawmill-store")
        .enable_all()
        .build()
        .map_err(|error| {
            let text = format!(
                "cannot start the store's threads: {error}; raise the limit on threads or memory"
            );
            StoreError::new(StoreErrorKind::Unavailable, text).with_source(error)
        })?;
    // Never dropped: to drop a runtime on one of its own threads panics, and a client may be
    // dropped there.
    Ok(RUNTIME.get_or_init(|| started))
}
