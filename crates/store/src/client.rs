//! The object store that callers use: retry, time limits, the resolution of a doubtful put, turns
//! and numbers, around one backend.
//!
//! Invariants: every call is answered exactly once (S1), even if its task dies. A passing failure
//! ends as `Unavailable` or `Broken`, never as `NotFound` (S4). A put returns `Taken` only after it
//! read other bytes.
//!
//! Not here: what a request looks like on the wire; see the backends.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{BoxFuture, Either, select};
use tokio::time::{Instant, sleep};

use crate::backend::{Backend, Body, Creation, WantedBytes};
use crate::key::{check_key, check_prefix};
use crate::limit::{Direction, Limiter, Permit};
use crate::meter::{Attempt, Meter};
use crate::progress::{Load, SilenceLimits, unless_stalled};
use crate::runtime::runtime;
use crate::{
    CallKind, Class, Completion, Get, List, MeterSnapshot, ObjectInfo, ObjectStore, Put,
    PutOutcome, Raise, Result, StoreError, StoreErrorKind,
};

/// Reads of an object that may be ours before it is called unreadable.
const READ_BACKS_MAX: u32 = 6;

/// Upper limit of the first pause; each failure doubles it, up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(50);
/// Longest pause between two attempts.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Assumed size of an answer of unknown size, where its bytes cannot be seen to move.
const UNKNOWN_BYTES: u64 = 128 << 20;
/// Time to delete one object, as bytes that cannot be seen to move: a quarter of a second.
const DELETE_AS_BYTES: u64 = 8 << 10;
/// How many times faster than a link a disk is assumed to be.
const DISK_SPEED: u64 = 8;
/// A put is recognized by this many bytes at its start.
// The first 4 KiB of a body are unique to its put (`Put::body`, decision 0005).
const HEAD_BYTES: u64 = 4096;
/// Objects per page of a list.
// The protocol crate does not tell how many pages it fetched, but each one is billed.
const LIST_PAGE: u64 = 1000;

/// Limits of a client: its patience and its parallelism.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// How long a call is retried, in seconds from its first attempt. An attempt that is running
    /// then continues while its bytes move.
    pub deadline_s: u64,
    /// Most requests under way at once. Uploads and background work together get three quarters of
    /// them, background work alone half.
    pub requests_max: usize,
}

impl Default for StoreOptions {
    fn default() -> Self {
        StoreOptions { deadline_s: 60, requests_max: 64 }
    }
}

/// An object store behind the contract. Made by [`crate::open`]; may be dropped anywhere, at any
/// time.
pub struct Client {
    inner: Arc<SharedClient>,
}

struct SharedClient {
    /// The store's name for people; it contains no secret.
    name: String,
    backend: Box<dyn Backend>,
    deadline: Duration,
    silence_limits: SilenceLimits,
    limiter: Arc<Limiter>,
    meter: Meter,
}

impl Client {
    pub(crate) fn new(
        name: String,
        backend: Box<dyn Backend>,
        options: &StoreOptions,
    ) -> Arc<Self> {
        Client::with_silence_limits(name, backend, options, SilenceLimits::default())
    }

    /// A client with a `SilenceLimits` of its own.
    pub(crate) fn with_silence_limits(
        name: String,
        backend: Box<dyn Backend>,
        options: &StoreOptions,
        silence_limits: SilenceLimits,
    ) -> Arc<Self> {
        let deadline = Duration::from_secs(options.deadline_s);
        let limiter = Limiter::new(options.requests_max);
        Arc::new(Client {
            inner: Arc::new(SharedClient {
                name,
                backend,
                deadline,
                silence_limits,
                limiter,
                meter: Meter::default(),
            }),
        })
    }

    /// The store's URL as people write it. Contains no secret.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The endpoint of this store, if traffic to it leaves this machine unencrypted: then anyone on
    /// the way can read and change everything.
    #[must_use]
    pub fn exposed_endpoint(&self) -> Option<&str> {
        self.inner.backend.exposed_endpoint()
    }

    /// The requests to the store so far, and their outcomes.
    #[must_use]
    pub fn meter(&self) -> MeterSnapshot {
        self.inner.meter.snapshot()
    }

    /// Runs a valid call on the store's threads, or answers an invalid one at once.
    fn start<T: Send + 'static>(
        &self,
        checked: Result<()>,
        done: Completion<T>,
        call: impl FnOnce(Arc<SharedClient>) -> BoxFuture<'static, Result<T>>,
    ) {
        // Made first: whatever fails below, also in the spawned task, its drop still answers (S1).
        let answer = Answer(Some(done));
        // An invalid key never reaches the backend: it costs no request, and the meter does not
        // take it for a failure of the store.
        match checked.and_then(|()| runtime()) {
            Ok(runtime) => {
                let call = call(Arc::clone(&self.inner));
                runtime.spawn(async move { answer.complete(call.await) });
            }
            Err(error) => answer.complete(Err(error)),
        }
    }
}

impl ObjectStore for Client {
    fn get(&self, get: Get, done: Completion<Bytes>) {
        self.start(check_key(&get.key), done, |inner| {
            Box::pin(async move { inner.get(get).await })
        });
    }

    fn put(&self, put: Put, done: Completion<PutOutcome>) {
        self.start(check_key(&put.key), done, |inner| {
            Box::pin(async move { inner.put(put).await })
        });
    }

    fn list(&self, list: List, done: Completion<Vec<ObjectInfo>>) {
        let checked = check_prefix(&list.prefix).map(drop);
        self.start(checked, done, |inner| Box::pin(async move { inner.list(list).await }));
    }

    fn delete(&self, keys: Vec<String>, class: Class, done: Completion<()>) {
        let checked = keys.iter().try_for_each(|key| check_key(key));
        self.start(checked, done, move |inner| {
            Box::pin(async move { inner.delete(keys, class).await })
        });
    }
}

/// The caller's closure; if its task dies, it still answers.
struct Answer<T>(Option<Completion<T>>);

impl<T> Answer<T> {
    fn complete(mut self, outcome: Result<T>) {
        if let Some(done) = self.0.take() {
            done(outcome);
        }
    }
}

impl<T> Drop for Answer<T> {
    fn drop(&mut self) {
        if let Some(done) = self.0.take() {
            done(Err(StoreError::new(
                StoreErrorKind::Unavailable,
                "the store's task ended without an answer",
            )));
        }
    }
}

/// One call on its way through its attempts.
struct RetryState {
    class: Class,
    raise: Option<Raise>,
    /// The instant of the first attempt. Time spent waiting for a turn does not count.
    began: Option<Instant>,
    failures: u32,
}

impl RetryState {
    fn new(class: Class) -> Self {
        RetryState { class, raise: None, began: None, failures: 0 }
    }
}

/// One kind of request, ready to be repeated.
struct RepeatableCall<'a> {
    kind: CallKind,
    /// The object, for error texts.
    what: &'a str,
    bytes_out: u64,
    /// Bytes of an answer, or work as bytes, for stores that show no progress.
    size_bytes: u64,
    /// Work, as bytes, whose progress no store shows.
    unseen_bytes: u64,
}

impl SharedClient {
    async fn get(&self, get: Get) -> Result<Bytes> {
        let mut retry_state = RetryState { raise: get.raise, ..RetryState::new(get.class) };
        self.fetch(
            &mut retry_state,
            &get.key,
            WantedBytes { range: get.range, bytes_max: get.bytes_max },
        )
        .await
    }

    async fn fetch(
        &self,
        retry_state: &mut RetryState,
        key: &str,
        part: WantedBytes,
    ) -> Result<Bytes> {
        let size_bytes = part
            .range
            .as_ref()
            .map_or(UNKNOWN_BYTES, |range| range.end.saturating_sub(range.start));
        let ask = RepeatableCall {
            kind: CallKind::Get,
            what: key,
            bytes_out: 0,
            size_bytes,
            unseen_bytes: 0,
        };
        self.with_retries(
            retry_state,
            &ask,
            |body: &Bytes| body.len() as u64,
            || self.backend.get(key, part.clone()),
        )
        .await
    }

    async fn put(&self, put: Put) -> Result<PutOutcome> {
        let Put { key, body, class, bodies } = put;
        // One deadline for the put and all its read-backs: a store that answers "taken" and "not
        // there" by turns must not hold the call forever.
        let mut retry_state = RetryState::new(class);
        let bytes = body.len() as u64;
        let body = Body { bytes: body, bodies };
        let ask = RepeatableCall {
            kind: CallKind::Put,
            what: &key,
            bytes_out: bytes,
            size_bytes: bytes,
            unseen_bytes: 0,
        };
        loop {
            let create = || self.backend.create(&key, body.clone());
            if self.with_retries(&mut retry_state, &ask, |_| 0, create).await? == Creation::Created
            {
                return Ok(PutOutcome::Created);
            }
            // Real S3 also answers 409 while another put of the key is under way, and the protocol
            // crate reports that as "exists".
            // An earlier attempt, or a proxy's, may have created it; or it was a conflict with
            // nothing there.
            match self.is_ours(&mut retry_state, &key, &body.bytes).await {
                Ok(true) => return Ok(PutOutcome::Created),
                Ok(false) => return Ok(PutOutcome::Taken),
                Err(error) if error.kind() == StoreErrorKind::NotFound => {
                    // Not `Taken`: a writer that hears this counts itself as fenced, although
                    // nobody else has the key.
                    let text = "the store says the key is taken, yet nothing is there";
                    let conflict = StoreError::new(StoreErrorKind::Unavailable, text);
                    self.back_off(&mut retry_state, &ask, conflict).await?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether the object at `key` begins as `body` does. A difference is believed only when two
    /// reads in a row find the same: garbled bytes, or an answer that claims too many, are not
    /// another writer's object.
    async fn is_ours(&self, retry_state: &mut RetryState, key: &str, body: &Bytes) -> Result<bool> {
        let head = &body[..body.len().min(HEAD_BYTES as usize)];
        let mut before = None;
        // Bounded, because a link that garbles every read would keep this loop going forever.
        for _ in 0..READ_BACKS_MAX {
            let found = match self.beginning(retry_state, key, body).await {
                // It is longer than any put of ours.
                Err(error) if error.kind() == StoreErrorKind::Damaged => None,
                found => Some(found?),
            };
            if found.as_deref() == Some(head) {
                return Ok(true);
            }
            if before.as_ref() == Some(&found) {
                return Ok(false);
            }
            before = Some(found);
        }
        // Nothing is known: `Taken` would make a writer count itself as fenced because of garbled
        // bytes.
        Err(StoreError::new(
            StoreErrorKind::Unavailable,
            format!("{key} reads differently each time"),
        ))
    }

    /// Enough of an object to tell it from `body`.
    async fn beginning(
        &self,
        retry_state: &mut RetryState,
        key: &str,
        body: &Bytes,
    ) -> Result<Bytes> {
        let head_bytes = (body.len() as u64).min(HEAD_BYTES);
        // A longer object is `Damaged` by this bound, and `is_ours` tells it apart without reading
        // it.
        let whole = WantedBytes { range: None, bytes_max: HEAD_BYTES };
        if head_bytes == 0 {
            return self.fetch(retry_state, key, whole).await;
        }
        // One byte more than a short body: a longer object is not ours.
        let extra_bytes = u64::from((body.len() as u64) < HEAD_BYTES);
        match self
            .fetch(
                retry_state,
                key,
                WantedBytes { range: Some(0..head_bytes + extra_bytes), ..whole.clone() },
            )
            .await
        {
            // The object is empty: it has no first byte.
            Err(error) if error.kind() == StoreErrorKind::Invalid => {
                self.fetch(retry_state, key, whole).await
            }
            outcome => outcome,
        }
    }

    async fn list(&self, list: List) -> Result<Vec<ObjectInfo>> {
        let prefix = check_prefix(&list.prefix)?;
        let what = if prefix.is_empty() { "everything" } else { prefix };
        let mut retry_state = RetryState::new(list.class);
        let ask = RepeatableCall {
            kind: CallKind::List,
            what,
            bytes_out: 0,
            size_bytes: UNKNOWN_BYTES,
            unseen_bytes: 0,
        };
        let found =
            self.with_retries(&mut retry_state, &ask, |_| 0, || self.backend.list(prefix)).await?;
        // `with_retries` has counted the first page, which even an empty list takes.
        let pages = (found.len() as u64).div_ceil(LIST_PAGE);
        self.meter.add_requests(CallKind::List, pages.saturating_sub(1));
        Ok(found)
    }

    async fn delete(&self, mut keys: Vec<String>, class: Class) -> Result<()> {
        // Some stores answer a key that is listed twice with nonsense.
        keys.sort_unstable();
        keys.dedup();
        let Some(first) = keys.first() else { return Ok(()) };
        let what = if keys.len() == 1 {
            first.clone()
        } else {
            format!("{first} and {} more", keys.len() - 1)
        };
        // One answer covers all keys, so a store that works through them moves no byte meanwhile.
        let unseen_bytes = keys.len() as u64 * DELETE_AS_BYTES;
        let mut retry_state = RetryState::new(class);
        let ask = RepeatableCall {
            kind: CallKind::Delete,
            what: &what,
            bytes_out: 0,
            size_bytes: 0,
            unseen_bytes,
        };
        self.with_retries(&mut retry_state, &ask, |()| 0, || self.backend.delete(&keys)).await
    }

    /// Waits for a turn in the call's class, or in that of reads from the moment it is raised.
    async fn turn(&self, retry_state: &RetryState, direction: Direction) -> Result<Permit> {
        let Some(raise) = retry_state.raise.as_ref().filter(|_| retry_state.class != Class::Read)
        else {
            return self.limiter.acquire(retry_state.class, direction).await;
        };
        let patient = {
            let patient = pin!(self.limiter.acquire(retry_state.class, direction));
            match select(patient, pin!(raise.raised())).await {
                Either::Left((turn, _)) => Some(turn),
                Either::Right(_) => None,
            }
        };
        // The place in the other queue was given up with the block above, and a permit that came
        // there meanwhile went back: it may be the only one.
        match patient {
            Some(turn) => turn,
            None => self.limiter.acquire(Class::Read, direction).await,
        }
    }

    /// Makes attempts until one succeeds or fails with an error that a retry cannot fix, or until
    /// the deadline.
    async fn with_retries<'a, T>(
        &self,
        retry_state: &mut RetryState,
        call: &RepeatableCall<'_>,
        bytes_in: impl Fn(&T) -> u64,
        attempt: impl Fn() -> BoxFuture<'a, Result<T>>,
    ) -> Result<T> {
        for tries in 0.. {
            // A turn for each attempt: a call that pauses before its next one holds no permit, so
            // calls that fail do not block those that work.
            let permit = self.turn(retry_state, Direction::of(call.kind)).await?;
            let start = Instant::now();
            // The deadline begins here, after the turn: a call that waited long in the queue still
            // gets all its tries.
            let began = *retry_state.began.get_or_insert(start);
            let (silence_limits, load) = self.silence_limits_of(start - began, call);
            let ended = unless_stalled(&silence_limits, &load, attempt()).await;
            let is_stalled = ended.is_none();
            let outcome = ended.unwrap_or_else(|| {
                let text = format!(
                    "nothing moved for {} s",
                    silence_limits.silence_max.as_secs_f32().ceil()
                );
                Err(StoreError::new(StoreErrorKind::Unavailable, text))
            });
            // Only moving bytes change the window: a refusal says nothing about the link, so its
            // permit returns without a verdict.
            match &outcome {
                Ok(_) => permit.carried(),
                Err(_) if is_stalled => permit.stalled(),
                Err(_) => drop(permit),
            }
            // Before the outcome is judged, because the store bills failed attempts too.
            self.meter.record(&Attempt {
                kind: call.kind,
                is_retry: tries > 0,
                is_stalled,
                bytes_in: outcome.as_ref().map_or(0, &bytes_in),
                bytes_out: call.bytes_out,
                took: start.elapsed(),
                error: outcome.as_ref().err(),
            });
            match outcome {
                Ok(value) => return Ok(value),
                Err(error) if is_passing(error.kind()) => {
                    self.back_off(retry_state, call, error).await?
                }
                Err(error) => return Err(self.explain(call, &error, "")),
            }
        }
        unreachable!("the loop above has no end")
    }

    /// Waits before the next attempt, or gives up with the error.
    async fn back_off(
        &self,
        retry_state: &mut RetryState,
        call: &RepeatableCall<'_>,
        error: StoreError,
    ) -> Result<()> {
        retry_state.failures += 1;
        let pause = jittered(pause_limit(retry_state.failures));
        let waited = retry_state.began.map_or(Duration::ZERO, |began| began.elapsed());
        // Before the pause: the caller does not wait for an attempt that would come too late.
        if waited + pause >= self.deadline {
            let tries = retry_state.failures;
            let gave_up = format!(" (gave up after {tries} tries in {} s)", waited.as_secs());
            return Err(self.explain(call, &error, &gave_up));
        }
        tracing::debug!(store = %self.name, what = call.what, %error, ?pause, "trying the store \
            again");
        sleep(pause).await;
        Ok(())
    }

    /// How long an attempt may be silent that starts `waited` after the call's first.
    fn silence_limits_of(
        &self,
        waited: Duration,
        call: &RepeatableCall<'_>,
    ) -> (SilenceLimits, Load) {
        // The last attempt may begin just before the deadline; give it a second to answer.
        let time_left = self.deadline.saturating_sub(waited).max(Duration::from_secs(1));
        let silence_max = self.silence_limits.silence_max.min(time_left);
        let load = if self.backend.shows_progress() {
            Load { out_bytes: call.bytes_out, unseen_bytes: call.unseen_bytes }
        } else {
            Load { out_bytes: 0, unseen_bytes: call.size_bytes / DISK_SPEED + call.unseen_bytes }
        };
        (SilenceLimits { silence_max, ..self.silence_limits.clone() }, load)
    }

    fn explain(&self, call: &RepeatableCall<'_>, error: &StoreError, end: &str) -> StoreError {
        let verb = match call.kind {
            CallKind::Get => "get",
            CallKind::Put => "put",
            CallKind::List => "list",
            CallKind::Delete => "delete",
        };
        StoreError::new(
            error.kind(),
            format!("cannot {verb} {} in {}: {error}{end}", call.what, self.name),
        )
        .with_source(error.clone())
    }
}

/// Whether a retry may help.
fn is_passing(kind: StoreErrorKind) -> bool {
    match kind {
        // `Broken` too: an answer that was cut short or garbled on the way is usually whole at the
        // next try.
        StoreErrorKind::Unavailable | StoreErrorKind::Broken => true,
        // A store that answers clearly answers the same again; `Denied` needs a person first.
        StoreErrorKind::NotFound
        | StoreErrorKind::Denied
        | StoreErrorKind::Damaged
        | StoreErrorKind::Invalid => false,
    }
}

/// The longest pause after this many failures (1 and up).
fn pause_limit(failures: u32) -> Duration {
    // The bound of the shift keeps it from overflowing; the pause is at its limit long before.
    PAUSE_MIN.saturating_mul(1 << (failures - 1).min(16)).min(PAUSE_MAX)
}

/// A random part of `limit`, so that callers that failed together do not retry together.
fn jittered(limit: Duration) -> Duration {
    // Without randomness the longest pause is the safe one.
    let random = getrandom::u32().unwrap_or(u32::MAX);
    limit.mul_f64(f64::from(random) / f64::from(u32::MAX))
}

#[cfg(test)]
mod erratic;
#[cfg(test)]
mod tests;
