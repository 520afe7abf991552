//! Does this store keep its promises? A racing probe of conditional creation, and a check-up for
//! people.
//!
//! Some stores accept `If-None-Match: *` and let two racers win, or ignore it. Fencing depends on
//! it, so it is tested. Objects made here live under `probe/` and are deleted at the end.
//!
//! Invariants: a key is deleted only after the race for it has its answers. A store that fails
//! during a probe gets no report, so it never counts as honest.
//!
//! Not here: the other clauses as tests (`conformance`), when an attach probes (the volume crate's
//! `fencing`), and what `sawmill doctor` checks on the machine.

use std::sync::mpsc::sync_channel;

use bytes::Bytes;

use crate::{
    Blocking, Bodies, Class, Completion, ObjectStore, Put, PutOutcome, Result, StoreError,
    StoreErrorKind,
};

/// Where the probes' objects live.
const FOLDER: &str = "probe";
/// Size of a probe's body: more than the 4 KiB that identify a put.
const BODY_BYTES: usize = 5000;

/// What a racing probe found. All counts of broken promises are 0 if the store is honest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProbeReport {
    /// Races held.
    pub rounds: usize,
    /// Puts per race.
    pub racers: usize,
    /// Races that more than one put won.
    pub several_winners: usize,
    /// Races that no put won.
    pub no_winner: usize,
    /// Races after which a get returned other bytes than the winner's.
    pub wrong_bytes: usize,
    /// Puts that got `Created` although the race for their key was over.
    pub overwrites: usize,
}

impl ProbeReport {
    /// Whether conditional creation can be relied on, as far as this probe can tell.
    #[must_use]
    pub fn is_honest(&self) -> bool {
        self.several_winners + self.no_winner + self.wrong_bytes + self.overwrites == 0
    }

    /// The findings in one line.
    #[must_use]
    pub fn summary(&self) -> String {
        let ProbeReport { rounds, racers, .. } = self;
        if self.is_honest() {
            return format!(
                "{rounds} races of {racers} puts: one winner each, nothing overwritten"
            );
        }
        let counts = [
            (self.several_winners, "had several winners"),
            (self.no_winner, "had no winner"),
            (self.wrong_bytes, "kept bytes that are not the winner's"),
            (self.overwrites, "let a later put overwrite the object"),
        ];
        let broken: Vec<String> = counts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        format!("of {rounds} races of {racers} puts, {}", broken.join(", "))
    }
}

/// Lets `racers` puts (at least 2) race for one key, `rounds` times (at least once), and checks
/// which won.
///
/// An error of the store ends the probe with that error: then nothing is known. Blocks.
pub fn probe_conditional_create(
    store: &dyn ObjectStore,
    rounds: usize,
    racers: usize,
    bodies: Bodies,
) -> Result<ProbeReport> {
    let (rounds, racers) = (rounds.max(1), racers.max(2));
    let name = random_name()?;
    let keys: Vec<String> = (0..rounds).map(|round| format!("{FOLDER}/{name}-{round}")).collect();
    let mut report = ProbeReport { rounds, racers, ..ProbeReport::default() };
    // An error ends the races, and the objects so far are deleted all the same.
    let raced = keys.iter().try_for_each(|key| race(store, key, racers, bodies, &mut report));
    let cleaned = Blocking(store).delete(keys, Class::Background);
    // The error of a race comes first: a failed clean-up is often its consequence.
    raced.and(cleaned).map(|()| report)
}

/// One race for one key.
fn race(
    store: &dyn ObjectStore,
    key: &str,
    racers: usize,
    bodies: Bodies,
    report: &mut ProbeReport,
) -> Result<()> {
    let sent: Vec<Bytes> = (0..racers).map(|_| random_body()).collect::<Result<_>>()?;
    let (sender, receiver) = sync_channel(racers);
    for (racer, body) in sent.iter().enumerate() {
        let sender = sender.clone();
        let put = Put { key: key.to_owned(), body: body.clone(), class: Class::Upload, bodies };
        // The receiver is gone only if this thread died.
        let done: Completion<PutOutcome> =
            Box::new(move |outcome| drop(sender.send((racer, outcome))));
        store.put(put, done);
    }
    drop(sender);
    // All answers are awaited, so that no put comes after the deletes.
    let answers: Vec<(usize, Result<PutOutcome>)> = receiver.iter().collect();
    if answers.len() < racers {
        let text = "the store dropped a call without an answer";
        return Err(StoreError::new(StoreErrorKind::Unavailable, text));
    }
    let mut winners = Vec::new();
    for (racer, outcome) in answers {
        if outcome? == PutOutcome::Created {
            winners.push(racer);
        }
    }
    match winners[..] {
        [] => report.no_winner += 1,
        [winner] => {
            let is_wrong = || Ok(Blocking(store).get(key, None, Class::Upload)? != sent[winner]);
            // One answer that was garbled on its way condemns no store.
            report.wrong_bytes += usize::from(is_wrong()? && is_wrong()?);
        }
        _ => report.several_winners += 1,
    }
    // Now the object is complete: a store that ignores the condition overwrites it here, even if no
    // racer met another.
    let second = Blocking(store).put(key, random_body()?, Class::Upload)?;
    report.overwrites += usize::from(second == PutOutcome::Created);
    Ok(())
}

/// One line of a check-up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckResult {
    /// What was checked.
    pub name: &'static str,
    /// Whether it is correct.
    pub ok: bool,
    /// What was found.
    pub detail: String,
    /// What to do if it is not ok; else empty.
    pub advice: &'static str,
}

/// Checks everything that Sawmill needs of a store, in order, and continues after failures. Blocks.
pub fn doctor(store: &dyn ObjectStore) -> Vec<CheckResult> {
    let (name, body) = match random_name().and_then(|name| Ok((name, random_body()?))) {
        Ok(probe_object) => probe_object,
        Err(error) => {
            return vec![check(
                "random numbers",
                Err(error),
                "check why getrandom(2) fails on this machine",
            )];
        }
    };
    let calls = Blocking(store);
    // Random: puts only create, so what an earlier check-up left behind must not be in the way.
    let key = format!("{FOLDER}/{name}/object");
    let whole = || expect_bytes(calls.get(&key, None, Class::Read), &body);
    let part = || expect_bytes(calls.get(&key, Some(1000..2000), Class::Read), &body[1000..2000]);
    let results = vec![
        check(
            "put an object",
            expect_put(&calls, &key, body.clone(), PutOutcome::Created),
            CREDENTIALS,
        ),
        check("get it whole", whole(), CREDENTIALS),
        check(
            "get a part of it",
            part(),
            "the store, or a proxy before it, must honor Range requests",
        ),
        check(
            "find it in a list",
            expect_listed(&calls, &format!("{FOLDER}/{name}/"), &key),
            LISTING,
        ),
        check("tell that an object is absent", expect_absent(&calls, &format!("{key}-2")), LISTING),
        check(
            "refuse a second put (conditional create)",
            expect_refusal(&calls, &key),
            CONDITIONAL,
        ),
        check(
            "let one of many puts win (conditional create)",
            expect_honest(store, Bodies::Whole),
            CONDITIONAL,
        ),
        check(
            "let one of many interleaved puts win (conditional create)",
            expect_honest(store, Bodies::InHalves),
            CONDITIONAL,
        ),
        check("delete an object", expect_deleted(&calls, &key), "grant delete on the bucket"),
        check(
            "tell that it is gone",
            expect_absent(&calls, &key),
            "switch off caches before the store",
        ),
    ];
    // Deletes the key again in case a check failed; the result does not matter.
    let _ = calls.delete(vec![key], Class::Background);
    results
}

const CREDENTIALS: &str =
    "check the URL, the endpoint, the credentials, and the right to get and put";
const LISTING: &str =
    "grant the right to list the bucket; without it S3 answers 403 for what is missing";
const CONDITIONAL: &str = "the store does not create conditionally (If-None-Match): two writers \
    could both win. Update it, or create and serve with --no-fencing and see to it yourself that \
    only one machine does";

fn check(name: &'static str, outcome: Result<String>, advice: &'static str) -> CheckResult {
    match outcome {
        Ok(detail) => CheckResult { name, ok: true, detail, advice: "" },
        Err(error) => CheckResult { name, ok: false, detail: error.to_string(), advice },
    }
}

/// The store answered, and not as it must.
fn wrong(text: impl Into<String>) -> StoreError {
    StoreError::new(StoreErrorKind::Broken, text)
}

fn expect_put(
    calls: &Blocking<'_>,
    key: &str,
    body: Bytes,
    expected: PutOutcome,
) -> Result<String> {
    let bytes = body.len();
    match calls.put(key, body, Class::Upload)? {
        outcome if outcome == expected => Ok(format!("{bytes} bytes: {outcome:?}")),
        outcome => Err(wrong(format!("{outcome:?} instead of {expected:?}"))),
    }
}

fn expect_refusal(calls: &Blocking<'_>, key: &str) -> Result<String> {
    expect_put(calls, key, random_body()?, PutOutcome::Taken)
}

fn expect_bytes(found: Result<Bytes>, expected: &[u8]) -> Result<String> {
    let found = found?;
    if found == expected {
        return Ok(format!("{} bytes as written", found.len()));
    }
    Err(wrong(format!("{} bytes that are not the {} written", found.len(), expected.len())))
}

fn expect_listed(calls: &Blocking<'_>, prefix: &str, key: &str) -> Result<String> {
    match calls.list(prefix, Class::Read)?.iter().find(|object| object.key == key) {
        Some(object) if object.size_bytes == BODY_BYTES as u64 => Ok("with its size".to_owned()),
        Some(object) => {
            Err(wrong(format!("listed with {} bytes instead of {BODY_BYTES}", object.size_bytes)))
        }
        None => Err(wrong("the list does not show it")),
    }
}

fn expect_absent(calls: &Blocking<'_>, key: &str) -> Result<String> {
    match calls.get(key, None, Class::Read) {
        Err(error) if error.kind() == StoreErrorKind::NotFound => {
            Ok("not found, as it must be".to_owned())
        }
        Err(error) => {
            let text = format!("not a clear \"not found\": {error}");
            Err(StoreError::new(error.kind(), text).with_source(error))
        }
        Ok(found) => Err(wrong(format!("{} bytes came back", found.len()))),
    }
}

fn expect_honest(store: &dyn ObjectStore, bodies: Bodies) -> Result<String> {
    let report = probe_conditional_create(store, 4, 8, bodies)?;
    if report.is_honest() { Ok(report.summary()) } else { Err(wrong(report.summary())) }
}

fn expect_deleted(calls: &Blocking<'_>, key: &str) -> Result<String> {
    calls.delete(vec![key.to_owned()], Class::Background).map(|()| "done".to_owned())
}

fn random_name() -> Result<String> {
    getrandom::u64().map(|random| format!("{random:016x}")).map_err(no_random)
}

fn random_body() -> Result<Bytes> {
    let mut body = vec![0; BODY_BYTES];
    getrandom::fill(&mut body).map_err(no_random)?;
    Ok(Bytes::from(body))
}

fn no_random(error: getrandom::Error) -> StoreError {
    StoreError::new(
        StoreErrorKind::Unavailable,
        format!("the kernel returned no random bytes: {error}"),
    )
    .with_source(error)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;
    use crate::{Fault, FaultStore, Get, List, ObjectInfo, StoreOptions, open};

    fn memory() -> Arc<dyn ObjectStore> {
        open("memory:", StoreOptions::default()).unwrap()
    }

    /// A store that ignores the condition: the last put wins and all get `Created`.
    struct OverwriteStore(Mutex<Vec<(String, Bytes)>>);

    impl ObjectStore for OverwriteStore {
        fn get(&self, get: Get, done: Completion<Bytes>) {
            let found = self
                .0
                .lock()
                .iter()
                .rfind(|(key, _)| *key == get.key)
                .map(|(_, body)| body.clone());
            done(found.ok_or_else(|| StoreError::new(StoreErrorKind::NotFound, "absent")));
        }
        fn put(&self, put: Put, done: Completion<PutOutcome>) {
            self.0.lock().push((put.key, put.body));
            done(Ok(PutOutcome::Created));
        }
        fn list(&self, _: List, done: Completion<Vec<ObjectInfo>>) {
            done(Ok(Vec::new()));
        }
        fn delete(&self, keys: Vec<String>, _: Class, done: Completion<()>) {
            self.0.lock().retain(|(key, _)| !keys.contains(key));
            done(Ok(()));
        }
    }

    #[test]
    fn an_honest_store_passes_the_probe_and_is_left_clean() {
        let store = memory();
        let report = probe_conditional_create(&*store, 8, 16, Bodies::InHalves).unwrap();
        assert!(report.is_honest(), "{report:?}");
        assert_eq!((report.rounds, report.racers), (8, 16));
        assert_eq!(Blocking(&*store).list("", Class::Read).unwrap(), []);
    }

    #[test]
    fn a_store_that_overwrites_is_found_out_and_left_clean() {
        let store = OverwriteStore(Mutex::default());
        let report = probe_conditional_create(&store, 3, 4, Bodies::InHalves).unwrap();
        assert!(!report.is_honest());
        assert_eq!((report.several_winners, report.overwrites), (3, 3));
        assert!(report.summary().contains("3 had several winners"));
        assert!(store.0.lock().is_empty());
    }

    #[test]
    fn a_store_that_keeps_other_bytes_than_the_winners_is_found_out() {
        let store =
            FaultStore::new(
                memory(),
                Box::new(|call| {
                    if call.kind == crate::CallKind::Get { Fault::Truncate } else { Fault::None }
                }),
            );
        assert_eq!(
            probe_conditional_create(&*store, 2, 2, Bodies::InHalves).unwrap().wrong_bytes,
            2
        );
    }

    #[test]
    fn one_answer_that_was_garbled_on_its_way_condemns_no_store() {
        let gets = std::sync::atomic::AtomicUsize::new(0);
        let store = FaultStore::new(
            memory(),
            Box::new(move |call| {
                let is_first = call.kind == crate::CallKind::Get
                    && gets.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0;
                if is_first { Fault::Truncate } else { Fault::None }
            }),
        );
        assert!(probe_conditional_create(&*store, 1, 2, Bodies::InHalves).unwrap().is_honest());
    }

    #[test]
    fn a_store_that_cannot_be_asked_gives_an_error_and_no_verdict() {
        let store =
            FaultStore::new(memory(), Box::new(|_| Fault::Fail(StoreErrorKind::Unavailable)));
        let error = probe_conditional_create(&*store, 1, 2, Bodies::InHalves).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    }

    #[test]
    fn a_conforming_store_passes_the_probe_and_keeps_no_object() {
        let store = memory();
        let results = doctor(&*store);
        assert_eq!(results.len(), 10);
        assert!(results.iter().all(|result| result.ok && result.advice.is_empty()), "{results:?}");
        assert_eq!(Blocking(&*store).list("", Class::Read).unwrap(), []);
    }

    #[test]
    fn the_doctor_names_what_is_broken_and_says_what_to_do() {
        let results = doctor(&OverwriteStore(Mutex::default()));
        let broken: Vec<_> =
            results.iter().filter(|result| !result.ok).map(|result| result.name).collect();
        let ranges = "get a part of it";
        assert_eq!(
            broken,
            [
                ranges,
                "find it in a list",
                "refuse a second put (conditional create)",
                "let one of many puts win (conditional create)",
                "let one of many interleaved puts win (conditional create)",
            ]
        );
        assert!(results.iter().all(|result| result.ok || !result.advice.is_empty()));
    }
}
