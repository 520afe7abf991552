//! A store in this process's memory, for tests and trials.
//!
//! `memory:` is a fresh store of its own; `memory:NAME` is the same store throughout the process,
//! and keeps its objects when no client uses it.
//!
//! Not here: a store that is slow or fails (`fault`).

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt, ready};
use parking_lot::Mutex;

use crate::backend::{Backend, Body, Creation, WantedBytes};
use crate::{ObjectInfo, Result, StoreError, StoreErrorKind};

type Objects = Arc<Mutex<BTreeMap<String, Bytes>>>;

/// The stores with a name, for as long as the process runs: several clients of one process, such as
/// a command and the volume that it opens, must find the same objects.
///
/// Bounded by the names that the process's URLs have.
static NAMED: LazyLock<Mutex<HashMap<String, Objects>>> = LazyLock::new(Mutex::default);

/// Objects in memory.
#[derive(Default)]
pub(crate) struct Memory {
    objects: Objects,
}

impl Memory {
    /// The process-wide store called `name`.
    pub(crate) fn named(name: &str) -> Self {
        Memory { objects: Arc::clone(NAMED.lock().entry(name.to_owned()).or_default()) }
    }

    fn read(&self, key: &str, part: &WantedBytes) -> Result<Bytes> {
        let body = self.objects.lock().get(key).cloned();
        let body =
            body.ok_or_else(|| StoreError::new(StoreErrorKind::NotFound, "no such object"))?;
        let range = part.cut(body.len() as u64)?;
        Ok(body.slice(range.start as usize..range.end as usize))
    }
}

impl Backend for Memory {
    fn shows_progress(&self) -> bool {
        false
    }

    fn exposed_endpoint(&self) -> Option<&str> {
        None
    }

    fn get<'a>(&'a self, key: &'a str, part: WantedBytes) -> BoxFuture<'a, Result<Bytes>> {
        ready(self.read(key, &part)).boxed()
    }

    fn create<'a>(&'a self, key: &'a str, body: Body) -> BoxFuture<'a, Result<Creation>> {
        // One lock for the look and the insertion: of racing puts exactly one creates the object
        // (S2).
        let mut objects = self.objects.lock();
        let creation = if objects.contains_key(key) {
            Creation::Exists
        } else {
            objects.insert(key.to_owned(), body.bytes);
            Creation::Created
        };
        ready(Ok(creation)).boxed()
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ObjectInfo>>> {
        // With the slash: `a` must not list `ab/c`.
        let below = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
        let objects = self.objects.lock();
        let found = objects
            .range(below.clone()..)
            .take_while(|(key, _)| key.starts_with(&below))
            .map(|(key, body)| ObjectInfo { key: key.clone(), size_bytes: body.len() as u64 })
            .collect();
        ready(Ok(found)).boxed()
    }

    fn delete<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<()>> {
        let mut objects = self.objects.lock();
        for key in keys {
            objects.remove(key);
        }
        ready(Ok(())).boxed()
    }
}
