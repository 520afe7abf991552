//! A simulated object store, at the contract's level (above retries): calls wait until the
//! scheduler lets one happen, in any order; an answer may be lost after the work is done, or the
//! work may be done long after the answer "unknown".
//!
//! Invariants: S1 to S9 of the contract hold, and nothing beyond them; only `garble_odds` breaks
//! S5. During a process's open, where the engine waits for answers, calls happen immediately.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use sawmill_store::{
    Class, Completion, Get, List, ObjectInfo, ObjectStore, Put, PutOutcome, StoreError,
    StoreErrorKind, check_key, check_prefix,
};

use crate::death::Life;
use crate::trace::Trace;
use sawmill_testkit::Dice;

/// How calls fail: one in so many; 0: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreFaults {
    /// Nothing is done, and the caller's result is unknown.
    pub fail_odds: u64,
    /// The call is done, and the caller's result is unknown.
    pub unheard_odds: u64,
    /// The caller's result is unknown, and the call is done later.
    pub late_odds: u64,
    /// A list misses recent puts.
    pub lag_odds: u64,
    /// A get returns other bytes than it should: one is wrong, some are missing, or they belong to
    /// another object.
    pub garble_odds: u64,
    /// A delete of many keys is done in part, and the caller's result is unknown.
    pub half_odds: u64,
    /// A list shows recently deleted keys.
    pub ghost_odds: u64,
}

type Change = (String, Option<Bytes>);

/// Deleted keys that a list may show.
const GHOSTS_MAX: usize = 12;

#[derive(Default)]
struct Bucket {
    objects: BTreeMap<String, Bytes>,
    /// Effects that failed calls may still have: a put of bytes, or a delete.
    late: Vec<Change>,
    /// Keys in order of creation, for lists that lag.
    lately: Vec<String>,
    /// Deleted keys and their sizes, for lists that still show them.
    dead: Vec<ObjectInfo>,
    puts: u64,
}

impl Bucket {
    fn delete(&mut self, key: &str) {
        if let Some(body) = self.objects.remove(key) {
            self.dead.push(ObjectInfo { key: key.to_owned(), size_bytes: body.len() as u64 });
        }
    }

    fn put(&mut self, key: &str, body: &Bytes) -> PutOutcome {
        match self.objects.get(key) {
            Some(there) if there == body => PutOutcome::Created,
            Some(_) => PutOutcome::Taken,
            None => {
                self.puts += 1;
                self.lately.push(key.to_owned());
                self.objects.insert(key.to_owned(), body.clone());
                PutOutcome::Created
            }
        }
    }
}

/// The objects that all machines share.
#[derive(Default)]
pub struct SimBucket {
    bucket: Mutex<Bucket>,
}

impl SimBucket {
    /// The number of calls that may still take effect late.
    pub fn late(&self) -> usize {
        self.bucket.lock().late.len()
    }

    /// One late call takes effect.
    pub fn land(&self, index: usize, trace: &Trace) {
        let mut bucket = self.bucket.lock();
        if index >= bucket.late.len() {
            return;
        }
        let (key, body) = bucket.late.swap_remove(index);
        trace.note("late", [index as u64, body.is_some().into()], || {
            format!("    store: late {}", short(&key))
        });
        match body {
            Some(body) => drop(bucket.put(&key, &body)),
            None => bucket.delete(&key),
        }
    }

    /// The keys whose late deletes may still take effect.
    pub fn late_deletes(&self) -> Vec<String> {
        let bucket = self.bucket.lock();
        bucket.late.iter().filter(|(_, body)| body.is_none()).map(|(key, _)| key.clone()).collect()
    }

    /// The late deletes of those keys take effect.
    pub fn land_deletes(&self, keys: &[String], trace: &Trace) {
        for key in keys {
            let is_it = |(late, body): &Change| late == key && body.is_none();
            let found = self.bucket.lock().late.iter().position(is_it);
            if let Some(index) = found {
                self.land(index, trace);
            }
        }
    }

    /// Drops all late calls.
    pub fn forget_late(&self) {
        self.bucket.lock().late.clear();
    }

    /// One byte of the last object whose key holds `part` rots; false when there is none.
    pub fn rot_last(&self, part: &str) -> bool {
        let mut bucket = self.bucket.lock();
        let Some((_, body)) = bucket.objects.iter_mut().rev().find(|(key, _)| key.contains(part))
        else {
            return false;
        };
        let mut rotten = body.to_vec();
        let middle = rotten.len() / 2;
        rotten[middle] ^= 0x10;
        *body = rotten.into();
        true
    }

    /// An independent store with all objects as they are, with or without the late calls.
    pub fn copy(&self, with_late: bool) -> SimBucket {
        let bucket = self.bucket.lock();
        let late = if with_late { bucket.late.clone() } else { Vec::new() };
        SimBucket {
            bucket: Mutex::new(Bucket {
                objects: bucket.objects.clone(),
                late,
                ..Bucket::default()
            }),
        }
    }

    /// Restores the store to these objects; calls in flight never happen.
    pub fn put_back(&self, objects: BTreeMap<String, Bytes>) {
        *self.bucket.lock() = Bucket { objects, ..Bucket::default() };
    }

    /// All objects as they are.
    pub fn objects(&self) -> BTreeMap<String, Bytes> {
        self.bucket.lock().objects.clone()
    }
}

/// A call that has not happened yet.
enum Call {
    Get(Get, Completion<Bytes>),
    Put(Put, Completion<PutOutcome>),
    List(List, Completion<Vec<ObjectInfo>>),
    Delete(Vec<String>, Completion<()>),
}

impl Call {
    /// Whether its keys are legal.
    fn check(&self) -> sawmill_store::Result<()> {
        match self {
            Call::Get(get, _) => check_key(&get.key),
            Call::Put(put, _) => check_key(&put.key),
            Call::List(list, _) => check_prefix(&list.prefix).map(drop),
            Call::Delete(keys, _) => keys.iter().try_for_each(|key| check_key(key)),
        }
    }

    fn fail(self, error: StoreError) {
        match self {
            Call::Get(_, done) => done(Err(error)),
            Call::Put(_, done) => done(Err(error)),
            Call::List(_, done) => done(Err(error)),
            Call::Delete(_, done) => done(Err(error)),
        }
    }
}

/// The fate of a call whose caller has died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFate {
    /// It has happened.
    Happened,
    /// It happens later.
    Late,
    /// It never happens.
    Never,
}

impl CallFate {
    /// Rolls one of the three.
    #[must_use]
    pub fn roll(dice: &mut Dice) -> Self {
        *dice.pick(&[CallFate::Happened, CallFate::Late, CallFate::Never])
    }
}

/// The outcome that the scheduler chooses for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScheduledOutcome {
    Well,
    Fails,
    Unheard,
    Late,
    /// A delete removes every other key.
    Half,
}

/// The store as one process uses it.
pub struct SimStore {
    shared: Arc<SimBucket>,
    life: Arc<Life>,
    trace: Arc<Trace>,
    state: Mutex<(StoreFaults, Dice)>,
    waiting: Mutex<Vec<Call>>,
    at_once: AtomicBool,
}

impl SimStore {
    /// A process's client.
    pub fn new(
        shared: Arc<SimBucket>,
        life: Arc<Life>,
        trace: Arc<Trace>,
        faults: StoreFaults,
        dice: Dice,
    ) -> Self {
        let state = Mutex::new((faults, dice));
        SimStore {
            shared,
            life,
            trace,
            state,
            waiting: Mutex::default(),
            at_once: AtomicBool::new(true),
        }
    }

    /// Sets whether calls happen immediately (during an open) or wait for [`happen`](Self::happen).
    pub fn set_at_once(&self, at_once: bool) {
        self.at_once.store(at_once, Ordering::Relaxed);
    }

    /// Replaces the faults of this store.
    pub fn set_faults(&self, faults: StoreFaults) {
        self.state.lock().0 = faults;
    }

    /// Removes the faults of this store.
    pub fn heal(&self) {
        self.state.lock().0 = StoreFaults::default();
    }

    /// How many calls wait.
    pub fn waiting(&self) -> usize {
        self.waiting.lock().len()
    }

    /// One waiting call happens.
    pub fn happen(&self, index: usize) {
        let call = {
            let mut waiting = self.waiting.lock();
            if index >= waiting.len() {
                return;
            }
            waiting.remove(index)
        };
        self.carry_out(call);
    }

    /// The process is dead: `fate` decides about each waiting call that changes something.
    pub fn end_calls(&self, mut fate: impl FnMut(usize) -> CallFate) {
        let waiting = std::mem::take(&mut *self.waiting.lock());
        let mut bucket = self.shared.bucket.lock();
        let mut number = 0;
        for call in waiting {
            let changes: Vec<Change> = match call {
                Call::Put(put, _) => vec![(put.key, Some(put.body))],
                Call::Delete(keys, _) => keys.into_iter().map(|key| (key, None)).collect(),
                Call::Get(..) | Call::List(..) => Vec::new(),
            };
            for (key, body) in changes {
                match (fate(number), body) {
                    (CallFate::Happened, Some(body)) => drop(bucket.put(&key, &body)),
                    (CallFate::Happened, None) => bucket.delete(&key),
                    (CallFate::Late, body) => bucket.late.push((key, body)),
                    (CallFate::Never, _) => {}
                }
                number += 1;
            }
        }
    }

    fn take(&self, call: Call) {
        if !self.life.tick() {
            return;
        }
        if let Err(error) = call.check() {
            call.fail(error);
        } else if self.at_once.load(Ordering::Relaxed) {
            self.carry_out(call);
        } else {
            self.waiting.lock().push(call);
        }
    }

    fn scheduled(&self, changes: bool) -> ScheduledOutcome {
        let mut state = self.state.lock();
        let faults = state.0;
        if state.1.one_in(faults.fail_odds) {
            ScheduledOutcome::Fails
        } else if state.1.one_in(faults.unheard_odds) {
            ScheduledOutcome::Unheard
        } else if changes && state.1.one_in(faults.late_odds) {
            ScheduledOutcome::Late
        } else {
            ScheduledOutcome::Well
        }
    }

    fn rolls(&self, odds: impl FnOnce(StoreFaults) -> u64) -> bool {
        let mut state = self.state.lock();
        let odds = odds(state.0);
        state.1.one_in(odds)
    }

    fn below(&self, bound: u64) -> u64 {
        self.state.lock().1.below(bound)
    }

    fn carry_out(&self, call: Call) {
        let changes = matches!(call, Call::Put(..) | Call::Delete(..));
        let scheduled = match &call {
            Call::Delete(keys, _) if keys.len() > 1 && self.rolls(|faults| faults.half_odds) => {
                ScheduledOutcome::Half
            }
            _ => self.scheduled(changes),
        };
        self.trace_call(&call, scheduled);
        match call {
            Call::Get(get, done) => match scheduled {
                ScheduledOutcome::Well => done(self.get_now(&get)),
                _ => done(Err(unknown())),
            },
            Call::List(list, done) => match scheduled {
                ScheduledOutcome::Well => done(Ok(self.list_now(&list))),
                _ => done(Err(unknown())),
            },
            Call::Put(put, done) => {
                let outcome = match scheduled {
                    ScheduledOutcome::Fails | ScheduledOutcome::Half => Err(unknown()),
                    ScheduledOutcome::Late => {
                        self.shared.bucket.lock().late.push((put.key, Some(put.body)));
                        Err(unknown())
                    }
                    ScheduledOutcome::Well | ScheduledOutcome::Unheard => {
                        let outcome = self.shared.bucket.lock().put(&put.key, &put.body);
                        if scheduled == ScheduledOutcome::Well {
                            Ok(outcome)
                        } else {
                            Err(unknown())
                        }
                    }
                };
                done(outcome);
            }
            Call::Delete(keys, done) => {
                let which = if scheduled == ScheduledOutcome::Half { self.below(2) } else { 0 };
                let mut bucket = self.shared.bucket.lock();
                for (number, key) in (0..).zip(keys) {
                    match scheduled {
                        ScheduledOutcome::Fails => {}
                        ScheduledOutcome::Late => bucket.late.push((key, None)),
                        ScheduledOutcome::Half if number % 2 == which => {}
                        ScheduledOutcome::Well
                        | ScheduledOutcome::Unheard
                        | ScheduledOutcome::Half => bucket.delete(&key),
                    }
                }
                drop(bucket);
                done(if scheduled == ScheduledOutcome::Well { Ok(()) } else { Err(unknown()) });
            }
        }
    }

    fn trace_call(&self, call: &Call, scheduled: ScheduledOutcome) {
        let (kind, key, size) = match call {
            Call::Get(get, _) => ("get", get.key.as_str(), 0),
            Call::Put(put, _) => ("put", put.key.as_str(), put.body.len()),
            Call::List(list, _) => ("list", list.prefix.as_str(), 0),
            Call::Delete(keys, _) => {
                ("delete", keys.first().map_or("", String::as_str), keys.len())
            }
        };
        self.trace.note(kind, [size as u64, scheduled as u64], || {
            let how = if scheduled == ScheduledOutcome::Well {
                String::new()
            } else {
                format!(": {scheduled:?}")
            };
            format!("    store: {kind} {} ({size}){how}", short(key))
        });
    }

    fn get_now(&self, get: &Get) -> sawmill_store::Result<Bytes> {
        let bucket = self.shared.bucket.lock();
        let Some(object) = bucket.objects.get(&get.key) else {
            return Err(StoreError::new(
                StoreErrorKind::NotFound,
                format!("{} is not there", get.key),
            ));
        };
        let bytes = match &get.range {
            None => object.clone(),
            Some(range) => {
                let (start, end) = (range.start as usize, (range.end as usize).min(object.len()));
                if start >= end {
                    return Err(StoreError::new(
                        StoreErrorKind::Invalid,
                        "the range is past the end",
                    ));
                }
                object.slice(start..end)
            }
        };
        drop(bucket);
        if bytes.len() as u64 > get.bytes_max {
            let text = format!("{} claims {} bytes", get.key, bytes.len());
            return Err(StoreError::new(StoreErrorKind::Damaged, text));
        }
        if self.rolls(|faults| faults.garble_odds) && !self.life.is_spared() {
            return Ok(self.garble(bytes));
        }
        Ok(bytes)
    }

    fn garble(&self, bytes: Bytes) -> Bytes {
        let (manner, at) = {
            let dice = &mut self.state.lock().1;
            (dice.below(4), dice.below(bytes.len().max(1) as u64) as usize)
        };
        self.trace.note("garbled", [manner, at as u64], || match manner {
            0 => format!("    store: only {at} bytes of it come"),
            1 => "    store: another object's bytes come".into(),
            _ => format!("    store: byte {at} of it is wrong"),
        });
        match manner {
            0 => bytes.slice(..at),
            1 => {
                let bucket = self.shared.bucket.lock();
                let other = bucket.objects.values().nth(at % bucket.objects.len().max(1));
                other.map_or_else(Bytes::new, |other| other.slice(..other.len().min(bytes.len())))
            }
            _ => {
                let mut garbled = bytes.to_vec();
                if let Some(byte) = garbled.get_mut(at) {
                    *byte ^= 0x40;
                }
                garbled.into()
            }
        }
    }

    fn list_now(&self, list: &List) -> Vec<ObjectInfo> {
        let lag = self.rolls(|faults| faults.lag_odds);
        let ghosts = self.rolls(|faults| faults.ghost_odds);
        let bucket = self.shared.bucket.lock();
        let hidden: &[String] = if lag {
            let from = bucket.lately.len().saturating_sub(4);
            &bucket.lately[from..]
        } else {
            &[]
        };
        let prefix = list.prefix.trim_end_matches('/');
        let below = |key: &str| {
            prefix.is_empty() || key.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('/'))
        };
        let listed = bucket.objects.iter().filter(|(key, _)| below(key) && !hidden.contains(key));
        let mut listed: Vec<ObjectInfo> = listed
            .map(|(key, body)| ObjectInfo { key: key.clone(), size_bytes: body.len() as u64 })
            .collect();
        if ghosts {
            let dead = bucket.dead.iter().rev().take(GHOSTS_MAX);
            let is_visible =
                |info: &&ObjectInfo| below(&info.key) && !bucket.objects.contains_key(&info.key);
            listed.extend(dead.filter(is_visible).cloned());
            listed.sort_by(|one, other| one.key.cmp(&other.key));
            listed.dedup_by(|one, other| one.key == other.key);
        }
        listed
    }
}

impl ObjectStore for SimStore {
    fn get(&self, get: Get, done: Completion<Bytes>) {
        self.take(Call::Get(get, done));
    }

    fn put(&self, put: Put, done: Completion<PutOutcome>) {
        self.take(Call::Put(put, done));
    }

    fn list(&self, list: List, done: Completion<Vec<ObjectInfo>>) {
        self.take(Call::List(list, done));
    }

    fn delete(&self, keys: Vec<String>, _: Class, done: Completion<()>) {
        self.take(Call::Delete(keys, done));
    }
}

fn unknown() -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, "the store did not answer")
}

/// A key without the volume's id.
fn short(key: &str) -> &str {
    key.split_once('/').map_or(key, |(_, rest)| rest)
}
