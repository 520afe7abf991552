//! The contract, S2 to S8, by seed: a client against a backend that fails before and after the
//! work, answers "taken" for a free key, hangs, cuts answers short, refuses, does deletes in part,
//! and executes unanswered calls later. A model tells what may be there.
//!
//! Invariants: bodies differ in their first bytes, and a key is never put again once its delete was
//! requested, as callers must do. The test fails if any kind of trouble was rare.
//!
//! Not here: S1, which needs the client's own threads (`tests`).

use std::collections::{BTreeMap, BTreeSet};

use futures_util::FutureExt;
use futures_util::future::{join_all, ready};
use parking_lot::Mutex;

use sawmill_testkit::Dice;

use super::*;
use crate::Bodies;

const SEEDS: u64 = 400;
const ACTS: u64 = 30;
const KEYS: u64 = 5;

#[derive(Default)]
struct ErraticState {
    dice: Dice,
    /// One attempt in this many goes wrong; 0: none.
    odds: u64,
    objects: BTreeMap<String, Bytes>,
    /// Unanswered calls that may still take effect: a put of bytes, or a delete.
    late: Vec<(String, Option<Bytes>)>,
    /// How often each kind of trouble happened.
    trouble_counts: BTreeMap<&'static str, u64>,
}

impl ErraticState {
    /// What goes wrong with the next attempt.
    fn trouble(&mut self, kinds: &[&'static str]) -> Option<&'static str> {
        if self.odds == 0 || self.dice.below(self.odds) > 0 {
            return None;
        }
        let kind = kinds[self.dice.below(kinds.len() as u64) as usize];
        *self.trouble_counts.entry(kind).or_default() += 1;
        Some(kind)
    }

    fn create(&mut self, key: &str, body: Bytes) -> Creation {
        if self.objects.contains_key(key) {
            return Creation::Exists;
        }
        self.objects.insert(key.to_owned(), body);
        Creation::Created
    }

    fn land_one(&mut self) {
        if !self.late.is_empty() {
            let index = self.dice.below(self.late.len() as u64) as usize;
            match self.late.swap_remove(index) {
                (key, Some(body)) => drop(self.create(&key, body)),
                (key, None) => drop(self.objects.remove(&key)),
            }
        }
    }
}

/// A backend in memory that goes wrong as the dice of its state say.
#[derive(Default)]
struct Erratic {
    state: Mutex<ErraticState>,
}

fn failed<T>(kind: StoreErrorKind) -> Result<T> {
    Err(StoreError::new(kind, "erratic"))
}

/// An attempt without effect, or whose effect the caller never learns of.
fn unheard<'a, T: Send + 'a>(trouble: &str) -> BoxFuture<'a, Result<T>> {
    match trouble {
        "hangs" | "done, and hangs" => std::future::pending().boxed(),
        "cut short" => ready(failed(StoreErrorKind::Broken)).boxed(),
        "refused" => ready(failed(StoreErrorKind::Denied)).boxed(),
        _ => ready(failed(StoreErrorKind::Unavailable)).boxed(),
    }
}

impl Backend for Arc<Erratic> {
    fn shows_progress(&self) -> bool {
        false
    }

    fn exposed_endpoint(&self) -> Option<&str> {
        None
    }

    fn get<'a>(&'a self, key: &'a str, part: WantedBytes) -> BoxFuture<'a, Result<Bytes>> {
        let mut state = self.state.lock();
        if let Some(trouble) = state.trouble(&["away", "cut short", "hangs", "refused"]) {
            return unheard(trouble);
        }
        let Some(object) = state.objects.get(key) else {
            return ready(failed(StoreErrorKind::NotFound)).boxed();
        };
        let found = part.cut(object.len() as u64);
        ready(found.map(|range| object.slice(range.start as usize..range.end as usize))).boxed()
    }

    fn create<'a>(&'a self, key: &'a str, body: Body) -> BoxFuture<'a, Result<Creation>> {
        let body = body.bytes;
        let mut state = self.state.lock();
        let kinds = [
            "away",
            "hangs",
            "refused",
            "conflict",
            "lost",
            "done, and hangs",
            "taken by itself",
            "late",
        ];
        let Some(trouble) = state.trouble(&kinds) else {
            return ready(Ok(state.create(key, body))).boxed();
        };
        match trouble {
            "conflict" => return ready(Ok(Creation::Exists)).boxed(),
            "taken by itself" => {
                state.create(key, body);
                return ready(Ok(Creation::Exists)).boxed();
            }
            "lost" | "done, and hangs" => drop(state.create(key, body)),
            "late" => state.late.push((key.to_owned(), Some(body))),
            _ => {}
        }
        unheard(trouble)
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ObjectInfo>>> {
        let mut state = self.state.lock();
        if let Some(trouble) = state.trouble(&["away", "cut short", "hangs", "refused"]) {
            return unheard(trouble);
        }
        let objects = state.objects.iter().filter(|(key, _)| key.starts_with(prefix));
        let objects = objects
            .map(|(key, body)| ObjectInfo { key: key.clone(), size_bytes: body.len() as u64 });
        ready(Ok(objects.collect())).boxed()
    }

    fn delete<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<()>> {
        let mut state = self.state.lock();
        let trouble =
            state.trouble(&["away", "hangs", "refused", "lost", "done, and hangs", "half", "late"]);
        for (number, key) in keys.iter().enumerate() {
            match trouble {
                None | Some("lost" | "done, and hangs") => drop(state.objects.remove(key)),
                Some("half") if number % 2 == 0 => drop(state.objects.remove(key)),
                Some("late") => state.late.push((key.clone(), None)),
                _ => {}
            }
        }
        trouble.map_or_else(|| ready(Ok(())).boxed(), unheard)
    }
}

/// What callers were answered.
#[derive(Default)]
struct ReportedState {
    /// The body that created each key.
    created: BTreeMap<String, Bytes>,
    /// All bodies that were ever sent under a key.
    sent: BTreeMap<String, BTreeSet<Bytes>>,
    /// Keys with a delete requested: never used again, as in our stores.
    doomed: BTreeSet<String>,
    deleted: BTreeSet<String>,
}

struct ErraticRun {
    client: Arc<Client>,
    backend: Arc<Erratic>,
    state: ReportedState,
    seed: u64,
    number: u64,
}

impl ErraticRun {
    fn below(&self, bound: u64) -> u64 {
        self.backend.state.lock().dice.below(bound)
    }

    fn key(&self) -> String {
        format!("k/{}", self.below(KEYS) + self.state.doomed.len() as u64 / 2)
    }

    /// A body like ours: unique in its first bytes, and sometimes longer than what is read back.
    fn body(&mut self) -> Bytes {
        self.number += 1;
        let length =
            [9, 200, HEAD_BYTES as usize, HEAD_BYTES as usize + 77][self.below(4) as usize];
        let mut body = self.number.to_le_bytes().to_vec();
        body.resize(length, self.number as u8);
        body.into()
    }

    async fn put(&mut self) {
        let key = self.key();
        if self.state.doomed.contains(&key) {
            return;
        }
        let racers = 1 + self.below(3);
        let bodies: Vec<Bytes> = (0..racers).map(|_| self.body()).collect();
        self.state.sent.entry(key.clone()).or_default().extend(bodies.iter().cloned());
        let puts = bodies.iter().map(|body| {
            let put = Put {
                key: key.clone(),
                body: body.clone(),
                class: Class::Upload,
                bodies: Bodies::Whole,
            };
            self.client.inner.put(put)
        });
        let outcomes = join_all(puts).await;
        let seed = self.seed;
        for (body, outcome) in bodies.into_iter().zip(&outcomes) {
            match outcome {
                Ok(PutOutcome::Created) => {
                    let other = self.state.created.insert(key.clone(), body);
                    assert!(other.is_none(), "S2, seed {seed}: {key} was created twice");
                }
                Ok(PutOutcome::Taken) => {
                    let stored_body = self.backend.state.lock().objects.get(&key).cloned();
                    assert!(
                        stored_body.is_some_and(|stored_body| stored_body != body),
                        "S2, seed {seed}: {key} was taken by nobody"
                    );
                }
                Err(error) => {
                    assert!(error.kind() != StoreErrorKind::NotFound, "S4, seed {seed}: {error}")
                }
            }
        }
        let is_all_answered = outcomes.iter().all(std::result::Result::is_ok);
        let is_created = self.state.created.contains_key(&key);
        // Or an earlier put that got no answer created it.
        let is_there = self.backend.state.lock().objects.contains_key(&key);
        assert!(
            !is_all_answered || is_created || is_there,
            "S2, seed {seed}: of all racers nobody made {key}"
        );
    }

    async fn get(&mut self) {
        let (key, seed) = (self.key(), self.seed);
        let start = self.below(12);
        let range = (self.below(2) == 0).then_some(start..start + 1 + self.below(6000));
        let get = Get {
            key: key.clone(),
            range: range.clone(),
            bytes_max: 1 << 20,
            class: Class::Read,
            raise: None,
        };
        let outcome = self.client.inner.get(get).await;
        let created = self.state.created.get(&key).filter(|_| !self.state.doomed.contains(&key));
        match outcome {
            Ok(found) => {
                let cut = |body: &Bytes| {
                    let end = range
                        .as_ref()
                        .map_or(body.len(), |range| body.len().min(range.end as usize));
                    body.get(range.as_ref().map_or(0, |range| range.start as usize)..end)
                        .map(<[u8]>::to_vec)
                };
                let is_it = |body: &Bytes| cut(body).is_some_and(|cut| cut == found);
                let sent = self.state.sent.get(&key).is_some_and(|sent| sent.iter().any(is_it));
                assert!(
                    sent && created.is_none_or(is_it),
                    "S5, seed {seed}: {key} has other bytes"
                );
            }
            Err(error) if error.kind() == StoreErrorKind::NotFound => {
                assert!(created.is_none(), "S3, seed {seed}: {key} was created and is not found");
                let is_there = self.backend.state.lock().objects.contains_key(&key);
                assert!(!is_there, "S4, seed {seed}: {key} is there and is not found");
            }
            Err(_) => {}
        }
    }

    async fn delete(&mut self) {
        let count = 1 + self.below(4);
        let keys: Vec<String> = (0..count).map(|_| self.key()).collect();
        self.state.doomed.extend(keys.iter().cloned());
        match self.client.inner.delete(keys.clone(), Class::Background).await {
            Ok(()) => self.state.deleted.extend(keys),
            Err(error) => {
                assert!(error.kind() != StoreErrorKind::NotFound, "S7, seed {}: {error}", self.seed)
            }
        }
    }

    async fn list(&mut self) {
        let Ok(listed) =
            self.client.inner.list(List { prefix: "k/".into(), class: Class::Read }).await
        else {
            return;
        };
        let listed: BTreeSet<String> = listed.into_iter().map(|info| info.key).collect();
        let stored: BTreeSet<String> = self.backend.state.lock().objects.keys().cloned().collect();
        assert_eq!(listed, stored, "S6, seed {}", self.seed);
    }

    /// Keys reported as created exist, and keys reported as deleted do not, unless an earlier put
    /// lands late.
    fn judge(&self) {
        let state = self.backend.state.lock();
        let seed = self.seed;
        for (key, body) in
            self.state.created.iter().filter(|(key, _)| !self.state.doomed.contains(*key))
        {
            assert_eq!(state.objects.get(key), Some(body), "S3, seed {seed}: {key}");
        }
        for (key, object_body) in &state.objects {
            let is_sent = self.state.sent.get(key).is_some_and(|sent| sent.contains(object_body));
            assert!(is_sent, "S2, seed {seed}: {key} has what was never sent");
        }
    }
}

async fn play(seed: u64) -> BTreeMap<&'static str, u64> {
    let backend = Arc::new(Erratic::default());
    {
        let mut state = backend.state.lock();
        state.dice = Dice::new(seed);
        state.odds = [0, 6, 3, 2][state.dice.below(4) as usize];
    }
    let client = Client::new("erratic".into(), Box::new(backend.clone()), &StoreOptions::default());
    let mut play = ErraticRun { client, backend, state: ReportedState::default(), seed, number: 0 };
    for _ in 0..ACTS {
        if play.below(3) == 0 {
            play.backend.state.lock().land_one();
        }
        match play.below(10) {
            0..4 => play.put().await,
            4..7 => play.get().await,
            7..9 => play.delete().await,
            _ => play.list().await,
        }
        play.judge();
    }
    let is_quiet = play.backend.state.lock().late.is_empty();
    if is_quiet {
        let state = play.backend.state.lock();
        let returned = play.state.deleted.iter().find(|key| state.objects.contains_key(*key));
        assert!(
            returned.is_none() || state.trouble_counts.contains_key("late"),
            "S7, seed {seed}: {returned:?} is back"
        );
    }
    std::mem::take(&mut play.backend.state.lock().trouble_counts)
}

#[tokio::test(start_paused = true)]
async fn the_contract_is_kept_over_a_backend_that_does_everything_wrong() {
    let mut trouble_counts = BTreeMap::<&str, u64>::new();
    for seed in 1..=SEEDS {
        for (kind, count) in play(seed).await {
            *trouble_counts.entry(kind).or_default() += count;
        }
    }
    assert!(
        trouble_counts.len() == 10 && trouble_counts.values().all(|count| *count > SEEDS / 4),
        "what happened: {trouble_counts:?}"
    );
}
