//! The client against a backend that follows a script, on a paused clock.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;

use futures_util::FutureExt;
use parking_lot::Mutex;

use super::*;
use crate::backend::cut_range;
use crate::memory::Memory;
use crate::{Blocking, Bodies};

/// What a scripted backend does with one attempt.
#[derive(Clone, Copy)]
enum Step {
    Pass,
    Fail(StoreErrorKind),
    /// Does it, and then fails.
    LoseAnswer,
    Hang,
    /// Answers that the key is taken, without checking.
    Conflict,
    /// Gives a read this many bytes other than those that are there.
    Garble(usize),
    Panic,
}

/// A memory store behind a script; passes everything when the script has ended.
struct ScriptStore {
    memory: Memory,
    steps: Mutex<VecDeque<Step>>,
    /// What happens after the script.
    then: Step,
    attempts: AtomicUsize,
}

impl ScriptStore {
    fn run<'a, T: Send + 'a>(
        &'a self,
        conflict: Option<T>,
        call: impl FnOnce() -> BoxFuture<'a, Result<T>>,
    ) -> BoxFuture<'a, Result<T>> {
        self.attempts.fetch_add(1, Ordering::Relaxed);
        let lost = |kind| Err(StoreError::new(kind, "scripted"));
        match self.steps.lock().pop_front().unwrap_or(self.then) {
            Step::Pass => call(),
            Step::Fail(kind) => std::future::ready(lost(kind)).boxed(),
            Step::LoseAnswer => call().map(move |_| lost(StoreErrorKind::Unavailable)).boxed(),
            Step::Hang => std::future::pending().boxed(),
            Step::Conflict => std::future::ready(Ok(conflict.expect("only puts conflict"))).boxed(),
            Step::Garble(_) => unreachable!("only reads are garbled"),
            Step::Panic => async { panic!("scripted") }.boxed(),
        }
    }
}

impl Backend for ScriptStore {
    fn shows_progress(&self) -> bool {
        false
    }

    fn exposed_endpoint(&self) -> Option<&str> {
        None
    }

    fn get<'a>(&'a self, key: &'a str, part: WantedBytes) -> BoxFuture<'a, Result<Bytes>> {
        let garbled = match self.steps.lock().front() {
            Some(Step::Garble(count)) => Some(*count),
            _ => None,
        };
        if let Some(count) = garbled {
            self.steps.lock().pop_front();
            return std::future::ready(Ok(Bytes::from(vec![0xee; count]))).boxed();
        }
        self.run(None, || self.memory.get(key, part))
    }
    fn create<'a>(&'a self, key: &'a str, body: Body) -> BoxFuture<'a, Result<Creation>> {
        self.run(Some(Creation::Exists), || self.memory.create(key, body.clone()))
    }
    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ObjectInfo>>> {
        self.run(None, || self.memory.list(prefix))
    }
    fn delete<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<()>> {
        self.run(None, || self.memory.delete(keys))
    }
}

fn scripted(name: &str, steps: &[Step], then: Step) -> Arc<Client> {
    let steps = Mutex::new(steps.iter().copied().collect());
    let memory = if name.is_empty() { Memory::default() } else { Memory::named(name) };
    let backend = ScriptStore { memory, steps, then, attempts: AtomicUsize::new(0) };
    Client::new("scripted".to_owned(), Box::new(backend), &StoreOptions::default())
}

fn put_of(body: &'static [u8]) -> Put {
    Put {
        key: "k".to_owned(),
        body: Bytes::from_static(body),
        class: Class::Upload,
        bodies: Bodies::Whole,
    }
}

fn get_of(range: Option<Range<u64>>) -> Get {
    Get { key: "k".to_owned(), range, bytes_max: 1 << 20, class: Class::Read, raise: None }
}

use Step::{Conflict, Fail, Garble, Hang, LoseAnswer, Panic, Pass};
use StoreErrorKind::{Broken, Denied, Invalid, NotFound, Unavailable};

#[tokio::test(start_paused = true)]
async fn passing_failures_are_tried_again_and_lasting_ones_are_not() {
    for (kind, attempts) in
        [(Unavailable, 3), (Broken, 3), (NotFound, 1), (Denied, 1), (Invalid, 1)]
    {
        let client = scripted("", &[Fail(kind), Fail(kind)], Pass);
        let outcome = client.inner.delete(vec!["k".to_owned()], Class::Upload).await;
        assert_eq!(outcome.is_ok(), attempts == 3, "{kind:?}");
        let stats = client.meter().delete;
        assert_eq!((stats.requests, stats.retries), (attempts, attempts - 1), "{kind:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_put_whose_answer_was_lost_is_created() {
    let client = scripted("lost", &[LoseAnswer], Pass);
    assert_eq!(client.inner.put(put_of(b"ours")).await.unwrap(), PutOutcome::Created);
    let meter = client.meter();
    assert_eq!(
        (meter.put.requests, meter.put.retries, meter.put.bytes_out, meter.get.requests),
        (2, 1, 8, 1)
    );
}

#[tokio::test(start_paused = true)]
async fn a_put_whose_answer_was_lost_is_created_though_the_read_back_fails_at_first() {
    let client = scripted("lost again", &[LoseAnswer, Pass, Fail(Unavailable), Hang], Pass);
    assert_eq!(client.inner.put(put_of(b"ours")).await.unwrap(), PutOutcome::Created);
    assert_eq!(client.meter().get.retries, 2);
}

#[tokio::test(start_paused = true)]
async fn another_object_of_the_same_key_is_taken_even_after_a_lost_answer() {
    let client = scripted("taken", &[Pass, LoseAnswer], Pass);
    client.inner.put(put_of(b"theirs")).await.unwrap();
    assert_eq!(client.inner.put(put_of(b"ours")).await.unwrap(), PutOutcome::Taken);
    assert_eq!(client.inner.get(get_of(None)).await.unwrap(), "theirs");
}

#[tokio::test(start_paused = true)]
async fn a_garbled_read_back_is_not_taken_for_another_writers_object() {
    let client = scripted("garbled", &[LoseAnswer, Pass, Garble(4), Garble(3)], Pass);
    assert_eq!(client.inner.put(put_of(b"ours")).await.unwrap(), PutOutcome::Created);
}

#[tokio::test(start_paused = true)]
async fn an_object_that_is_too_long_is_anothers_when_two_reads_say_so() {
    let damaged = Fail(StoreErrorKind::Damaged);
    let client = scripted("long", &[LoseAnswer, Pass, damaged], Pass);
    assert_eq!(client.inner.put(put_of(b"ours")).await.unwrap(), PutOutcome::Created);
    let client = scripted("long", &[Pass, damaged, damaged], Pass);
    assert_eq!(client.inner.put(put_of(b"ours")).await.unwrap(), PutOutcome::Taken);
}

#[tokio::test(start_paused = true)]
async fn a_conflict_with_nothing_there_is_put_again() {
    let client = scripted("conflict", &[Conflict, Pass, Conflict], Pass);
    assert_eq!(client.inner.put(put_of(b"ours")).await.unwrap(), PutOutcome::Created);
    assert_eq!(client.meter().put.requests, 3);
}

#[tokio::test(start_paused = true)]
async fn a_conflict_that_never_ends_is_unavailable_and_never_taken() {
    let steps: Vec<Step> = [Conflict, Pass].into_iter().cycle().take(2000).collect();
    let error = scripted("", &steps, Hang).inner.put(put_of(b"ours")).await.unwrap_err();
    assert_eq!(error.kind(), Unavailable);
}

#[tokio::test(start_paused = true)]
async fn the_deadline_gives_unavailable_and_never_not_found() {
    for then in [Fail(Unavailable), Hang, LoseAnswer] {
        let client = scripted("", &[], then);
        let start = Instant::now();
        let error = client.inner.get(get_of(Some(0..10))).await.unwrap_err();
        assert_eq!(error.kind(), Unavailable);
        assert!(error.to_string().starts_with("cannot get k in scripted: "), "{error}");
        assert!(error.to_string().contains("gave up after"), "{error}");
        // The clock is paused, so it shows exactly how long the client waited.
        assert!(start.elapsed() <= Duration::from_secs(61), "{:?}", start.elapsed());
        let put = client.inner.put(put_of(b"ours")).await.unwrap_err();
        assert_eq!(put.kind(), Unavailable);
        assert!(client.meter().unavailable_since.is_some());
        assert_eq!(client.meter().get.errors, client.meter().get.requests);
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_clears_the_state_of_failure() {
    let client = scripted("", &[Fail(Unavailable)], Pass);
    assert_eq!(client.inner.get(get_of(None)).await.unwrap_err().kind(), NotFound);
    let meter = client.meter();
    assert_eq!(meter.unavailable_since, None);
    assert!(meter.last_error.unwrap().1.contains("scripted"));
    assert_eq!((meter.get.requests, meter.get.errors), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_big_body_gets_the_time_it_needs() {
    // A scripted body shows no progress.
    for (mebibytes, limit_s) in [(0, 10), (8, 42)] {
        let client = scripted("", &[Hang], Pass);
        let start = Instant::now();
        let body = Bytes::from(vec![1; mebibytes << 20]);
        let put = Put { key: "k".to_owned(), body, class: Class::Upload, bodies: Bodies::Whole };
        client.inner.put(put).await.unwrap();
        assert_eq!(start.elapsed().as_secs(), limit_s);
        assert_eq!(client.meter().put.stalls, 1);
    }
}

#[test]
fn pauses_double_up_to_five_seconds_and_are_jittered_within() {
    let pauses: Vec<u128> = (1..=9).map(|failures| pause_limit(failures).as_millis()).collect();
    assert_eq!(pauses, [50, 100, 200, 400, 800, 1600, 3200, 5000, 5000]);
    assert_eq!(pause_limit(u32::MAX), PAUSE_MAX);
    let drawn: Vec<Duration> = (0..64).map(|_| jittered(PAUSE_MAX)).collect();
    assert!(
        drawn.iter().all(|pause| *pause <= PAUSE_MAX)
            && drawn.iter().any(|pause| *pause != drawn[0])
    );
}

#[test]
fn a_call_whose_task_dies_is_still_answered() {
    let client = scripted("", &[], Panic);
    let (sender, receiver) = channel();
    client.get(get_of(None), Box::new(move |outcome| sender.send(outcome).unwrap()));
    assert_eq!(receiver.recv().unwrap().unwrap_err().kind(), Unavailable);
}

#[test]
fn a_client_may_be_dropped_on_a_store_thread_with_calls_in_flight() {
    let client = scripted("", &[], Pass);
    let (sender, receiver) = channel();
    let last = Arc::clone(&client);
    let more = sender.clone();
    client.put(
        put_of(b"x"),
        Box::new(move |outcome| {
            last.get(get_of(None), Box::new(move |found| more.send(found.map(drop)).unwrap()));
            drop(last);
            sender.send(outcome.map(drop)).unwrap();
        }),
    );
    drop(client);
    assert!(receiver.recv().unwrap().is_ok());
    assert!(receiver.recv().unwrap().is_ok());
    assert!(receiver.recv().is_err(), "every call is answered once");
}

#[test]
fn a_wrong_key_is_answered_without_a_request() {
    let client = scripted("", &[], Pass);
    assert_eq!(Blocking(&*client).get("../x", None, Class::Read).unwrap_err().kind(), Invalid);
    assert_eq!(Blocking(&*client).list("a b", Class::Read).unwrap_err().kind(), Invalid);
    let keys = vec!["fine".to_owned(), "/not".to_owned()];
    assert_eq!(Blocking(&*client).delete(keys, Class::Read).unwrap_err().kind(), Invalid);
    assert_eq!(client.meter(), MeterSnapshot::default());
}

#[test]
fn ranges_are_cut_at_the_end_and_refused_outside() {
    assert_eq!(cut_range(None, 5).unwrap(), 0..5);
    assert_eq!(cut_range(Some(3..9), 5).unwrap(), 3..5);
    for range in [5..6, 2..2, Range { start: 4, end: 1 }] {
        assert_eq!(cut_range(Some(range), 5).unwrap_err().kind(), Invalid);
    }
}

/// A link on which this many bodies move at a time, a piece each 5 s; others get nothing.
struct LimitedStore {
    memory: Memory,
    carries: usize,
    running: AtomicUsize,
    sent_bytes: AtomicUsize,
}

const PIECES: usize = 8;

struct RunningCount<'a>(&'a AtomicUsize);

impl Drop for RunningCount<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Backend for Arc<LimitedStore> {
    fn shows_progress(&self) -> bool {
        true
    }
    fn exposed_endpoint(&self) -> Option<&str> {
        None
    }
    fn get<'a>(&'a self, key: &'a str, part: WantedBytes) -> BoxFuture<'a, Result<Bytes>> {
        self.memory.get(key, part)
    }
    fn create<'a>(&'a self, key: &'a str, body: Body) -> BoxFuture<'a, Result<Creation>> {
        async move {
            let before = self.running.fetch_add(1, Ordering::Relaxed);
            let _running = RunningCount(&self.running);
            if before >= self.carries {
                std::future::pending::<()>().await;
            }
            for _ in 0..PIECES {
                sleep(Duration::from_secs(5)).await;
                self.sent_bytes.fetch_add(body.bytes.len() / PIECES, Ordering::Relaxed);
                crate::progress::Progress::current()
                    .unwrap()
                    .sent((body.bytes.len() / PIECES) as u64);
            }
            self.memory.create(key, body).await
        }
        .boxed()
    }
    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ObjectInfo>>> {
        self.memory.list(prefix)
    }
    fn delete<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<()>> {
        self.memory.delete(keys)
    }
}

#[tokio::test(start_paused = true)]
async fn every_body_arrives_over_a_network_that_starves_all_but_a_few_and_none_is_sent_twice() {
    const BODIES: usize = 24;
    const BODY_BYTES: usize = 8 << 20;
    for carries in [1, 2, 5] {
        let limited = Arc::new(LimitedStore {
            memory: Memory::default(),
            carries,
            running: AtomicUsize::new(0),
            sent_bytes: AtomicUsize::new(0),
        });
        let backend = Box::new(Arc::clone(&limited));
        let client = Client::new("limited".to_owned(), backend, &StoreOptions::default());
        let puts = (0..BODIES).map(|number| {
            let client = &client;
            async move {
                let body = Bytes::from(vec![number as u8; BODY_BYTES]);
                let put = Put {
                    key: format!("k{number}"),
                    body,
                    class: Class::Upload,
                    bodies: Bodies::Whole,
                };
                // As a volume's engine does.
                while client.inner.put(put.clone()).await.ok() != Some(PutOutcome::Created) {}
            }
        });
        futures_util::future::join_all(puts).await;
        let sent = limited.sent_bytes.load(Ordering::Relaxed);
        assert_eq!(sent, BODIES * BODY_BYTES, "what moves is never cut");
        // Each stall halves the number that run at once, so few attempts starve.
        let stalls = client.meter().put.stalls;
        assert!(stalls <= 6 * BODIES as u64, "{stalls} stalls where {carries} bodies move at once");
        assert!(stalls > 0, "the link starves no request");
    }
}

/// A client of two permits, of which background has one, and a get that holds that one for good.
async fn with_a_busy_background() -> (Arc<Client>, BoxFuture<'static, Result<Bytes>>) {
    let steps = Mutex::new([Hang].into());
    let backend =
        ScriptStore { memory: Memory::default(), steps, then: Pass, attempts: AtomicUsize::new(0) };
    let options = StoreOptions { requests_max: 2, ..StoreOptions::default() };
    let client = Client::new("scripted".to_owned(), Box::new(backend), &options);
    let inner = Arc::clone(&client.inner);
    let mut hangs = async move { inner.get(background_get(None)).await }.boxed();
    assert!((&mut hangs).now_or_never().is_none());
    (client, hangs)
}

fn background_get(raise: Option<Raise>) -> Get {
    Get { class: Class::Background, raise, ..get_of(None) }
}

#[tokio::test(start_paused = true)]
async fn gets_that_were_raised_do_not_wait_behind_background_work() {
    let (client, _hangs) = with_a_busy_background().await;
    let raise = Raise::default();
    let mut unwanted = Box::pin(client.inner.get(background_get(None)));
    // One reader may wait for several.
    let mut wanted =
        [(); 2].map(|()| Box::pin(client.inner.get(background_get(Some(raise.clone())))));
    assert!((&mut unwanted).now_or_never().is_none());
    for wanted in &mut wanted {
        assert!(wanted.now_or_never().is_none());
    }
    raise.raise();
    for wanted in wanted {
        assert_eq!(wanted.await.unwrap_err().kind(), NotFound);
    }
    assert!((&mut unwanted).now_or_never().is_none());
}

#[tokio::test(start_paused = true)]
async fn gets_that_were_raised_leave_no_place_behind_in_the_queue() {
    let (client, _hangs) = with_a_busy_background().await;
    for _ in 0..=crate::limit::WAITING_MAX {
        let raise = Raise::default();
        let mut wanted = Box::pin(client.inner.get(background_get(Some(raise.clone()))));
        assert!((&mut wanted).now_or_never().is_none());
        raise.raise();
        assert_eq!(wanted.await.unwrap_err().kind(), NotFound, "none is refused");
    }
}
