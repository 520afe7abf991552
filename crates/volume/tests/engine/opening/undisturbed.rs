//! Whether anybody else was active while an attach put its fence: each of its questions by itself,
//! and a writer that goes on between two of the answers.
//!
//! Not here: the checks one by one that follow a doubt (`fencing`, `names`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use sawmill_device::{BlockDevice, BlockDeviceExt, ErrorKind};
use sawmill_format::checkpoint::{checkpoint_key, checkpoint_prefix, parse_checkpoint_key};
use sawmill_format::ids::VolumeId;
use sawmill_format::kept_block::status_pin_key;
use sawmill_format::name_record::name_key;
use sawmill_format::role::role_key;
use sawmill_format::segment::parse_segment_key;
use sawmill_store::{
    Blocking, Class, Completion, Get, List, ObjectInfo, ObjectStore, Put, PutOutcome, StoreError,
    StoreErrorKind,
};
use sawmill_volume::Volume;

use crate::faulty::until;
use crate::rig::{MIB, Rig, pattern};

/// What the store of one attach does from the moment its fence is put.
trait Script: Send + Sync {
    /// Before the first fence is put.
    fn before_fence(&self);
    /// The answer to a get, if not the truth.
    fn get(&self, key: &str) -> Option<sawmill_store::Result<Bytes>>;
    /// The answer to the list of checkpoints, if not the truth.
    fn list(&self) -> Option<sawmill_store::Result<Vec<ObjectInfo>>>;
}

/// A store behind a script.
struct ScriptedStore<S> {
    inner: Arc<dyn ObjectStore>,
    script: S,
    fences: AtomicUsize,
}

impl<S: Script> ScriptedStore<S> {
    fn is_fenced(&self) -> bool {
        self.fences.load(Ordering::SeqCst) > 0
    }
}

impl<S: Script> ObjectStore for ScriptedStore<S> {
    fn get(&self, get: Get, done: Completion<Bytes>) {
        match self.is_fenced().then(|| self.script.get(&get.key)).flatten() {
            Some(answer) => done(answer),
            None => self.inner.get(get, done),
        }
    }
    fn put(&self, put: Put, done: Completion<PutOutcome>) {
        if parse_segment_key(&put.key).is_some() {
            if !self.is_fenced() {
                self.script.before_fence();
            }
            self.fences.fetch_add(1, Ordering::SeqCst);
        }
        self.inner.put(put, done);
    }
    fn list(&self, list: List, done: Completion<Vec<ObjectInfo>>) {
        let is_roots = list.prefix.contains("/checkpoint/");
        match (self.is_fenced() && is_roots).then(|| self.script.list()).flatten() {
            Some(answer) => done(answer),
            None => self.inner.list(list, done),
        }
    }
    fn delete(&self, keys: Vec<String>, class: Class, done: Completion<()>) {
        self.inner.delete(keys, class, done);
    }
}

/// A volume that was written and closed.
fn closed() -> (Rig, VolumeId) {
    let rig = Rig::new();
    let volume = rig.open();
    volume.write_at(0, &pattern(0, 1, 100_000)).unwrap();
    volume.close().unwrap();
    let volume_id = sawmill_volume::find(&*rig.store, "disk").unwrap().volume_id;
    (rig, volume_id)
}

/// Another machine, on a store that follows a script.
fn scripted<S: Script + 'static>(rig: &Rig, script: S) -> (Rig, Arc<ScriptedStore<S>>) {
    let (inner, fences) = (rig.store.clone(), AtomicUsize::new(0));
    let store = Arc::new(ScriptedStore { inner, script, fences });
    let mut second = Rig::over(store.clone());
    second.options.store_is_probed = true;
    second.options.accept_journal_loss = true;
    (second, store)
}

fn roots(store: &dyn ObjectStore, volume_id: VolumeId) -> Vec<ObjectInfo> {
    Blocking(store).list(&checkpoint_prefix(volume_id), Class::Read).unwrap()
}

fn newest_root(store: &dyn ObjectStore, volume_id: VolumeId) -> u64 {
    let numbers = roots(store, volume_id).into_iter();
    numbers.filter_map(|root| Some(parse_checkpoint_key(&root.key)?.1)).max().unwrap()
}

/// What one of the answers after the fence is, the first time.
enum Oddity {
    Garbled,
    Absent,
    Fails,
}

/// Answers one question in an odd way.
struct OddAnswer {
    /// None: the list of checkpoints.
    key: Option<String>,
    oddity: Oddity,
    was_asked: AtomicBool,
}

impl OddAnswer {
    fn answer<T>(&self, garbled: T) -> Option<sawmill_store::Result<T>> {
        let failed = |kind| Err(StoreError::new(kind, "scripted"));
        let is_again = self.was_asked.swap(true, Ordering::SeqCst);
        match self.oddity {
            Oddity::Fails => Some(failed(StoreErrorKind::Unavailable)),
            _ if is_again => None,
            Oddity::Garbled => Some(Ok(garbled)),
            Oddity::Absent => Some(failed(StoreErrorKind::NotFound)),
        }
    }
}

impl Script for OddAnswer {
    fn before_fence(&self) {}
    fn get(&self, key: &str) -> Option<sawmill_store::Result<Bytes>> {
        let is_it = self.key.as_deref() == Some(key);
        is_it.then(|| self.answer(Bytes::from_static(b"odd"))).flatten()
    }
    fn list(&self) -> Option<sawmill_store::Result<Vec<ObjectInfo>>> {
        self.key.is_none().then(|| self.answer(Vec::new())).flatten()
    }
}

/// The outcome of an attach that meets an odd answer, and how often it asked.
fn attached_with(key: Option<String>, oddity: Oddity, rig: &Rig) -> (Option<ErrorKind>, bool) {
    let script = OddAnswer { key, oddity, was_asked: AtomicBool::new(false) };
    let (second, store) = scripted(rig, script);
    let outcome = second.try_open();
    let was_asked = store.script.was_asked.load(Ordering::SeqCst);
    let refused = outcome.as_ref().err().map(sawmill_volume::Error::kind);
    if let Ok(volume) = outcome {
        assert!(volume.read_at(0, 100_000).unwrap() == pattern(0, 1, 100_000));
        volume.close().unwrap();
    }
    (refused, was_asked)
}

#[test]
fn an_attach_goes_on_only_if_each_answer_after_its_fence_is_a_definite_one() {
    let (rig, volume_id) = closed();
    let next = || checkpoint_key(volume_id, newest_root(&*rig.store, volume_id) + 1);
    let last = || checkpoint_key(volume_id, newest_root(&*rig.store, volume_id));
    let fixed = [name_key("disk", 2), status_pin_key(volume_id, 1), role_key(volume_id, 1)];
    for key in fixed.iter().cloned().map(Some).chain([Some(next()), Some(last()), None]) {
        let (refused, was_asked) = attached_with(key.clone(), Oddity::Fails, &rig);
        assert!(was_asked, "{key:?}");
        assert_eq!(refused, Some(ErrorKind::Unavailable), "{key:?}");
    }
    // What is there, whatever it is, is looked at again: here it is gone, and the attach goes on.
    for key in fixed {
        let (refused, was_asked) = attached_with(Some(key.clone()), Oddity::Garbled, &rig);
        assert_eq!((refused, was_asked), (None, true), "{key}");
    }
    assert_eq!(attached_with(Some(next()), Oddity::Garbled, &rig), (None, true));
    assert_eq!(attached_with(Some(last()), Oddity::Absent, &rig), (None, true));
}

/// The store of an attach whose list lags, and a writer that puts checkpoints before the fence and
/// deletes the old ones while the attach asks what is there.
struct BusyWriter {
    writer: Arc<Volume>,
    inner: Arc<dyn ObjectStore>,
    volume_id: VolumeId,
    /// As the attach found them.
    roots: Vec<ObjectInfo>,
    last: u64,
    last_bytes: Bytes,
    /// How often the number after it is still there when it is asked for.
    next_is_there: AtomicUsize,
    /// The deletes took effect when it was asked for and was gone.
    next_was_asked: AtomicBool,
    lists_left: AtomicUsize,
    size_bytes: Mutex<u64>,
}

impl Script for BusyWriter {
    fn before_fence(&self) {
        let size_bytes = 96 * MIB;
        self.writer.resize(size_bytes).unwrap();
        *self.size_bytes.lock() = size_bytes;
        let is_gone = |number| {
            let kept = roots(&*self.inner, self.volume_id);
            !kept.iter().any(|root| root.key == checkpoint_key(self.volume_id, number))
        };
        until("the checkpoints that the attach knows are deleted", || {
            self.writer.checkpoint(Duration::from_secs(60));
            is_gone(self.last) && is_gone(self.last + 1)
        });
    }
    fn get(&self, key: &str) -> Option<sawmill_store::Result<Bytes>> {
        let less = |left: usize| left.checked_sub(1);
        if key == checkpoint_key(self.volume_id, self.last + 1) {
            let (set, load) = (Ordering::SeqCst, Ordering::SeqCst);
            if self.next_is_there.fetch_update(set, load, less).is_ok() {
                return Some(Ok(self.last_bytes.clone()));
            }
            self.next_was_asked.store(true, Ordering::SeqCst);
        }
        let is_late = key == checkpoint_key(self.volume_id, self.last)
            && !self.next_was_asked.load(Ordering::SeqCst);
        is_late.then(|| Ok(self.last_bytes.clone()))
    }
    fn list(&self) -> Option<sawmill_store::Result<Vec<ObjectInfo>>> {
        let less = |left: usize| left.checked_sub(1);
        let lags = self.lists_left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok();
        lags.then(|| Ok(self.roots.clone()))
    }
}

/// Whether the lists that lag show the last checkpoint.
#[derive(PartialEq, Eq)]
enum LastIs {
    Listed,
    Hidden,
}

fn attach_beside_a_busy_writer(last_is: LastIs) {
    let (rig, volume_id) = closed();
    let writer = rig.open();
    let inner = rig.store.clone();
    let last = newest_root(&*inner, volume_id);
    let last_bytes =
        Blocking(&*inner).get(&checkpoint_key(volume_id, last), None, Class::Read).unwrap();
    let mut listed = roots(&*inner, volume_id);
    let is_hidden = last_is == LastIs::Hidden;
    listed.retain(|root| !is_hidden || root.key != checkpoint_key(volume_id, last));
    let script = BusyWriter {
        writer: writer.clone(),
        roots: listed,
        inner,
        volume_id,
        last,
        last_bytes,
        next_is_there: AtomicUsize::new(usize::from(is_hidden)),
        next_was_asked: AtomicBool::new(false),
        lists_left: AtomicUsize::new(2),
        size_bytes: Mutex::default(),
    };
    let (second, store) = scripted(&rig, script);
    let volume = second.open();
    assert_eq!(volume.geometry().size_bytes, *store.script.size_bytes.lock(), "as reported");
    assert!(newest_root(&*rig.store, volume_id) > last + 3, "its own comes after the writer's");
    assert!(volume.read_at(0, 100_000).unwrap() == pattern(0, 1, 100_000));
    volume.write_at(80 * MIB, &pattern(80 * MIB, 2, 4096)).unwrap();
    volume.close().unwrap();
    drop(writer);
    let volume = second.open();
    assert!(volume.read_at(80 * MIB, 4096).unwrap() == pattern(80 * MIB, 2, 4096));
}

#[test]
fn checkpoints_that_are_deleted_between_two_answers_do_not_hide_their_successors() {
    attach_beside_a_busy_writer(LastIs::Listed);
}

#[test]
fn a_checkpoint_that_no_list_shows_is_the_last_only_if_it_outlives_the_look_for_the_next() {
    attach_beside_a_busy_writer(LastIs::Hidden);
}
