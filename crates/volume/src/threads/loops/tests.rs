//! Loops that say what a test wants, on real threads. Not here: the schedules in which they are
//! notified (`schedules`), and which loop runs next (`ready`).

use std::sync::mpsc::{Receiver, Sender, channel};

use sawmill_sys::sync::AtomicUsize;

use super::*;

const PATIENCE: Duration = Duration::from_secs(60);

/// A loop that does what a test says.
struct Scripted<F>(F);

impl<F: FnMut(bool) -> Rest + Send> SteppedLoop for Scripted<F> {
    fn step(&mut self, was_quiet: bool) -> Rest {
        (self.0)(was_quiet)
    }
    fn fail(&mut self) {}
}

/// A loop that panics, and again when that is handled, and again when it is dropped.
struct Panicking;

impl SteppedLoop for Panicking {
    fn step(&mut self, _: bool) -> Rest {
        panic!("the step fails")
    }
    fn fail(&mut self) {
        panic!("a callback fails")
    }
}

impl Drop for Panicking {
    fn drop(&mut self) {
        panic!("what it holds fails")
    }
}

fn group(disk: u64) -> LoopGroup {
    LoopGroup { disk, kind: LoopKind::Journal }
}

fn start(
    threads: &Arc<LoopThreads>,
    disk: u64,
    step: impl FnMut(bool) -> Rest + Send + 'static,
) -> Arc<VolumeLoop> {
    let stepped = Box::new(Scripted(step));
    threads.run(group(disk), Arc::default(), stepped).expect("there are threads")
}

/// A loop that tells of each step and rests until it is notified; it ends with the receiver.
fn telling(threads: &Arc<LoopThreads>, disk: u64) -> (Arc<VolumeLoop>, Receiver<()>) {
    // Bounded by the steps that the test causes.
    let (told, steps) = channel();
    let step = move |_| if told.send(()).is_ok() { Rest::Long(None) } else { Rest::End };
    (start(threads, disk, step), steps)
}

/// Loops of one disk whose steps wait until the sender is dropped; then they end.
fn hanging(
    threads: &Arc<LoopThreads>,
    disk: u64,
    count: usize,
) -> (Vec<Arc<VolumeLoop>>, Sender<()>) {
    // Nothing is sent.
    let (release, released) = channel::<()>();
    let released = Arc::new(Mutex::new(released));
    let step = |released: Arc<Mutex<Receiver<()>>>| {
        move |_| {
            let _ = released.lock().recv();
            Rest::End
        }
    };
    ((0..count).map(|_| start(threads, disk, step(released.clone()))).collect(), release)
}

fn count(threads: &LoopThreads) -> usize {
    threads.counts().threads as usize
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < PATIENCE, "{what}");
        std::thread::yield_now();
    }
}

fn wait_until_gone(threads: &LoopThreads) {
    until("the threads end with the last loop", || {
        count(threads) == 0 && !threads.state.lock().has_clock
    });
    let state = threads.state.lock();
    assert_eq!((state.arriving, state.stuck, state.ready.running()), (0, 0, 0));
}

#[test]
fn disks_that_hang_leave_threads_to_the_loops_of_others() {
    let threads = Arc::new(LoopThreads::default());
    // Together they would have all threads three times.
    let hung: Vec<_> = (1..=4).map(|disk| hanging(&threads, disk, THREADS_MAX)).collect();
    let (other, steps) = telling(&threads, 9);
    steps.recv_timeout(PATIENCE).expect("its first step");
    for _ in 0..100 {
        other.wake.notify();
        steps.recv_timeout(PATIENCE).expect("a step for each notification");
    }
    until("the threads that hang are counted", || {
        threads.counts().stuck == 4 * GROUP_THREADS_MAX as u64
    });
    assert!(count(&threads) <= THREADS_MAX + 4 * GROUP_THREADS_MAX, "{:?}", threads.counts());
    drop(steps);
    other.wait_ended();
    for (stuck, release) in hung {
        drop(release);
        stuck.iter().for_each(|ended| ended.wait_ended());
    }
    wait_until_gone(&threads);
}

#[test]
fn threads_that_hang_have_a_bound() {
    let threads = Arc::new(LoopThreads::default());
    let disks = ALL_THREADS_MAX / GROUP_THREADS_MAX + 2;
    let hung: Vec<_> =
        (0..disks as u64).map(|disk| hanging(&threads, disk, GROUP_THREADS_MAX)).collect();
    until("as many hang as may", || count(&threads) == ALL_THREADS_MAX);
    let (other, steps) = telling(&threads, 999);
    assert!(count(&threads) <= ALL_THREADS_MAX, "{:?}", threads.counts());
    for (stuck, release) in hung {
        drop(release);
        stuck.iter().for_each(|ended| ended.wait_ended());
    }
    steps.recv_timeout(PATIENCE).expect("it waited for one of them");
    drop(steps);
    other.wait_ended();
    wait_until_gone(&threads);
}

#[test]
fn a_thread_that_hung_leaves_its_place_to_the_one_that_replaced_it() {
    let threads = Arc::new(LoopThreads::default());
    let hung: Vec<_> = (1..=2).map(|disk| hanging(&threads, disk, THREADS_MAX)).collect();
    let (other, steps) = telling(&threads, 9);
    steps.recv_timeout(PATIENCE).expect("its first step");
    for (stuck, release) in hung {
        drop(release);
        stuck.iter().for_each(|ended| ended.wait_ended());
    }
    until("no more are left than there may be", || count(&threads) <= THREADS_MAX);
    assert_eq!(threads.counts().stuck, 0);
    drop(steps);
    other.wait_ended();
    wait_until_gone(&threads);
}

#[test]
fn a_thread_that_could_not_be_started_is_tried_again() {
    /// Starts that succeed, beside the two that every loop needs.
    static STARTS: AtomicUsize = AtomicUsize::new(2);
    let threads = Arc::new(LoopThreads::with(LoopLimits::default(), |name, work| {
        if name == "volume-log" {
            return Ok(());
        }
        let may_start =
            STARTS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        may_start.map_err(|_| io::Error::from(io::ErrorKind::WouldBlock))?;
        std::thread::Builder::new().name("volume".into()).spawn(work).map(drop)
    }));
    let (stuck, release) = hanging(&threads, 1, 1);
    until("the only thread is in its step", || threads.state.lock().ready.open() == 0);
    let (other, steps) = telling(&threads, 2);
    assert_eq!(count(&threads), 1, "there is no other");
    // Nothing but time passes.
    STARTS.store(1, Ordering::SeqCst);
    steps.recv_timeout(PATIENCE).expect("its first step");
    drop((release, steps));
    stuck.iter().for_each(|ended| ended.wait_ended());
    other.wait_ended();
    wait_until_gone(&threads);
}

#[test]
fn a_thread_does_not_inherit_the_priority_of_the_one_that_made_its_loop_ready() {
    let threads = Arc::new(LoopThreads::default());
    // One message.
    let (told, started_by) = channel();
    let (stuck, release) = hanging(&threads, 1, 1);
    let step = move |_| {
        let comm = std::fs::read_to_string("/proc/thread-self/stat").expect("this thread");
        // The fields behind the name: `nice` is the 17th.
        let fields = comm.rsplit(')').next().expect("a line").to_owned();
        let _ = told.send(fields.split_whitespace().nth(16).map(str::to_owned));
        Rest::End
    };
    let low = threads.clone();
    let started = std::thread::spawn(move || {
        sawmill_sys::lower_cpu_priority();
        start(&low, 2, step)
    });
    started.join().expect("it starts a loop").wait_ended();
    let found = started_by.recv_timeout(PATIENCE).expect("its step");
    let own = std::fs::read_to_string("/proc/self/stat").expect("this process");
    let own = own.rsplit(')').next().and_then(|fields| fields.split_whitespace().nth(16));
    assert_eq!(found.as_deref(), own);
    drop(release);
    stuck.iter().for_each(|ended| ended.wait_ended());
    wait_until_gone(&threads);
}

#[test]
fn loops_at_rest_have_no_threads_and_each_notification_is_one_step() {
    let threads = Arc::new(LoopThreads::default());
    let loops: Vec<_> = (0..500).map(|_| telling(&threads, 1)).collect();
    for (_, steps) in &loops {
        steps.recv_timeout(PATIENCE).expect("its first step");
    }
    for _ in 0..10 {
        loops.iter().for_each(|(running, _)| running.wake.notify());
        for (_, steps) in &loops {
            steps.recv_timeout(PATIENCE).expect("a step for each notification");
        }
    }
    for (running, steps) in loops {
        assert!(steps.try_recv().is_err(), "no step without a reason");
        drop(steps);
        running.wait_ended();
    }
    wait_until_gone(&threads);
}

#[test]
fn loops_that_never_rest_take_turns() {
    let threads = Arc::new(LoopThreads::default());
    let is_over = Arc::new(AtomicBool::new(false));
    let busy = |is_over: Arc<AtomicBool>| {
        move |_| if is_over.load(Ordering::Relaxed) { Rest::End } else { Rest::No }
    };
    // As many as run at once, of both groups.
    let all: Vec<_> = (0..2 * THREADS_MAX as u64)
        .map(|number| start(&threads, number % 2, busy(is_over.clone())))
        .collect();
    let (other, steps) = telling(&threads, 1);
    steps.recv_timeout(PATIENCE).expect("a turn");
    is_over.store(true, Ordering::Relaxed);
    drop(steps);
    other.wait_ended();
    all.iter().for_each(|ended| ended.wait_ended());
    wait_until_gone(&threads);
}

#[test]
fn a_rest_ends_when_its_time_is_over_and_says_that_it_was_quiet() {
    let threads = Arc::new(LoopThreads::default());
    // Bounded by the steps that the test causes.
    let (told, steps) = channel();
    // More than may sleep with a thread.
    let resting = |told: Sender<(usize, bool)>, number: usize| {
        let brief = Duration::from_millis(2);
        move |was_quiet| match told.send((number, was_quiet)) {
            Ok(()) if number.is_multiple_of(2) => Rest::Long(Some(brief)),
            Ok(()) => Rest::Short { watch: Duration::ZERO, sleep: brief },
            Err(_) => Rest::End,
        }
    };
    let loops = 4 * SLEEPERS_MAX;
    let all: Vec<_> =
        (0..loops).map(|number| start(&threads, 1, resting(told.clone(), number))).collect();
    let mut quiet = vec![0; loops];
    while quiet.iter().any(|seen| *seen < 20) {
        let (number, was_quiet) = steps.recv_timeout(PATIENCE).expect("another step");
        quiet[number] += usize::from(was_quiet);
    }
    drop(steps);
    all.iter().for_each(|ended| ended.wait_ended());
    assert!(threads.state.lock().due.is_empty(), "no time is kept for what has ended");
    wait_until_gone(&threads);
}

#[test]
fn a_loop_that_panics_again_and_again_ends_and_costs_no_other() {
    let threads = Arc::new(LoopThreads::default());
    let (other, steps) = telling(&threads, 1);
    for _ in 0..2 * THREADS_MAX {
        let panicking = threads.run(group(1), Arc::default(), Box::new(Panicking));
        panicking.expect("there are threads").wait_ended();
    }
    steps.recv_timeout(PATIENCE).expect("its first step");
    other.wake.notify();
    steps.recv_timeout(PATIENCE).expect("its next step");
    drop(steps);
    other.wait_ended();
    wait_until_gone(&threads);
}

#[test]
fn a_loop_can_end_itself() {
    let threads = Arc::new(LoopThreads::default());
    // One message.
    let (given, gets) = channel::<Arc<VolumeLoop>>();
    let own = start(&threads, 1, move |_| {
        gets.recv().expect("the test gives it").wait_ended();
        Rest::End
    });
    given.send(own.clone()).expect("it waits");
    own.wait_ended();
}

/// Limits of which a test can say everything; nothing is stuck, and idle threads stay.
fn limits(threads_max: usize, group_threads_max: usize) -> LoopLimits {
    LoopLimits {
        threads_max,
        group_threads_max,
        stuck_after: Duration::MAX,
        idle_time_max: Duration::from_secs(3600),
        ..LoopLimits::default()
    }
}

fn spawn(name: &str, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(work).map(drop)
}

/// Has one clock and one thread.
fn spawn_one(name: &str, work: Box<dyn FnOnce() + Send>, starts: &AtomicUsize) -> io::Result<()> {
    let is_refused = name == "volume" && starts.fetch_add(1, Ordering::SeqCst) > 0;
    if is_refused { Err(io::ErrorKind::WouldBlock.into()) } else { spawn(name, work) }
}

#[test]
fn the_clock_survives_a_panic_and_goes_on() {
    static STARTS: AtomicUsize = AtomicUsize::new(0);
    let threads = Arc::new(LoopThreads::with(limits(8, 8), |name, work| {
        let number = STARTS.fetch_add(usize::from(name == "volume"), Ordering::SeqCst);
        // The first is not started by the clock.
        assert!(name != "volume" || number != 1, "a panic of the clock");
        spawn(name, work)
    }));
    let (stuck, release) = hanging(&threads, 1, 1);
    until("the only thread is in its step", || threads.state.lock().ready.open() == 0);
    let (other, steps) = telling(&threads, 2);
    steps.recv_timeout(PATIENCE).expect("the clock tries again");
    assert!(STARTS.load(Ordering::SeqCst) >= 3, "it has panicked before");
    let timed = start(&threads, 3, |was_quiet| match was_quiet {
        false => Rest::Long(Some(Duration::from_millis(1))),
        true => Rest::End,
    });
    timed.wait_ended();
    drop((release, steps));
    stuck.iter().for_each(|ended| ended.wait_ended());
    other.wait_ended();
    wait_until_gone(&threads);
}

#[test]
fn nothing_is_started_or_logged_with_the_lock_held() {
    static THREADS: std::sync::OnceLock<Arc<LoopThreads>> = std::sync::OnceLock::new();
    static LOGGED: AtomicUsize = AtomicUsize::new(0);
    static LOCKED: AtomicUsize = AtomicUsize::new(0);
    fn look() {
        let threads = THREADS.get().expect("they are set first");
        // Longer than anybody else holds it.
        let is_free = threads.state.try_lock_for(PATIENCE / 6).is_some();
        LOCKED.fetch_add(usize::from(!is_free), Ordering::SeqCst);
    }
    struct Looking;
    impl tracing::Subscriber for Looking {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn event(&self, _: &tracing::Event<'_>) {
            look();
            LOGGED.fetch_add(1, Ordering::SeqCst);
        }
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {}
    }
    let few = LoopLimits { stuck_after: Duration::ZERO, ..limits(2, 2) };
    let threads = Arc::new(LoopThreads::with(few, |name, work| {
        look();
        // The second one is refused once.
        static STARTS: AtomicUsize = AtomicUsize::new(0);
        if name == "volume" && STARTS.fetch_add(1, Ordering::SeqCst) == 1 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let logging = || tracing::subscriber::with_default(Looking, work);
        std::thread::Builder::new().name(name.into()).spawn(logging).map(drop)
    }));
    assert!(THREADS.set(threads.clone()).is_ok());
    let (stuck, release) = hanging(&threads, 1, 4);
    let (other, steps) = telling(&threads, 2);
    steps.recv_timeout(PATIENCE).expect("there are threads");
    until("something was logged", || LOGGED.load(Ordering::SeqCst) > 0);
    drop((release, steps));
    stuck.iter().for_each(|ended| ended.wait_ended());
    other.wait_ended();
    wait_until_gone(&threads);
    assert_eq!(LOCKED.load(Ordering::SeqCst), 0);
}

#[test]
fn a_disk_without_a_thread_has_one_beyond_the_number() {
    let threads = Arc::new(LoopThreads::with(limits(2, 2), spawn));
    // None of them ever counts as stuck.
    let slow: Vec<_> = (1..=2).map(|disk| hanging(&threads, disk, 4)).collect();
    let others: Vec<_> = (3..=5).map(|disk| telling(&threads, disk)).collect();
    for round in 0..50 {
        for (other, steps) in &others {
            steps.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("round {round}"));
            other.wake.notify();
        }
    }
    assert!(count(&threads) <= 2 + 5 + 1, "{:?}", threads.counts());
    for (other, steps) in others {
        drop(steps);
        other.wait_ended();
    }
    for (ended, release) in slow {
        drop(release);
        ended.iter().for_each(|ended| ended.wait_ended());
    }
    wait_until_gone(&threads);
}

#[test]
fn loops_that_waited_for_a_hang_go_on_with_the_threads_that_are_there() {
    let few = LoopLimits { stuck_after: Duration::from_millis(1), ..limits(3, 2) };
    let threads = Arc::new(LoopThreads::with(few, spawn));
    let (hung, release) = hanging(&threads, 1, 2);
    // Each waits in its step for the other: they need two threads.
    let (arrived, met) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let meeting = |arrived: Arc<AtomicUsize>, met: Arc<AtomicUsize>| {
        move |_| {
            arrived.fetch_add(1, Ordering::SeqCst);
            until("both are in a step", || arrived.load(Ordering::SeqCst) == 2);
            met.fetch_add(1, Ordering::SeqCst);
            Rest::End
        }
    };
    until("all that may run do", || threads.state.lock().ready.open() == 0);
    let waiting = [(); 2].map(|()| start(&threads, 1, meeting(arrived.clone(), met.clone())));
    // Others bring the number of threads to its limit, beside those that hang.
    let (others, release_others) = hanging(&threads, 2, 2);
    let (last, release_last) = hanging(&threads, 3, 1);
    until("they are found stuck", || threads.state.lock().stuck == 5);
    drop((release_others, release_last));
    others.iter().chain(&last).for_each(|ended| ended.wait_ended());
    until("those threads are idle", || threads.state.lock().idle.len() == 3);
    // From here nothing but the loops that waited is there to bring them a thread.
    drop(release);
    hung.iter().chain(&waiting).for_each(|ended| ended.wait_ended());
    assert_eq!(met.load(Ordering::SeqCst), 2, "neither gave up");
    wait_until_gone(&threads);
}

#[test]
fn there_are_no_more_threads_than_loops() {
    for loops in (1..=8).cycle().take(64) {
        let threads = Arc::new(LoopThreads::with(limits(32, 24), spawn));
        let all: Vec<_> = (0..loops).map(|disk| telling(&threads, disk)).collect();
        for (_, steps) in &all {
            steps.recv_timeout(PATIENCE).expect("its first step");
            assert!(count(&threads) <= all.len(), "{loops}: {:?}", threads.counts());
        }
        for (running, steps) in all {
            drop(steps);
            running.wait_ended();
        }
        wait_until_gone(&threads);
    }
}

#[test]
fn a_loop_that_sleeps_with_the_only_thread_leaves_it_to_one_that_waits() {
    static STARTS: AtomicUsize = AtomicUsize::new(0);
    let threads =
        Arc::new(LoopThreads::with(limits(8, 8), |name, work| spawn_one(name, work, &STARTS)));
    // One for each step.
    let (told, slept) = channel();
    let hour = Duration::from_secs(3600);
    let sleeper = start(&threads, 1, move |_| match told.send(()) {
        Ok(()) => Rest::Short { watch: Duration::ZERO, sleep: hour },
        Err(_) => Rest::End,
    });
    slept.recv_timeout(PATIENCE).expect("its first step");
    until("it sleeps", || !threads.sleepers.lock().is_empty());
    let (other, steps) = telling(&threads, 2);
    steps.recv_timeout(PATIENCE).expect("it has the thread");
    // A loop that begins to wait while the step before the sleep runs.
    other.wake.notify();
    sleeper.wake.notify();
    steps.recv_timeout(PATIENCE).expect("it has the thread again");
    drop((steps, slept));
    other.wait_ended();
    sleeper.wait_ended();
    wait_until_gone(&threads);
}

#[test]
fn a_step_that_waits_for_the_end_of_another_loop_needs_no_other_thread() {
    static STARTS: AtomicUsize = AtomicUsize::new(0);
    let threads =
        Arc::new(LoopThreads::with(limits(8, 8), |name, work| spawn_one(name, work, &STARTS)));
    let (other, steps) = telling(&threads, 1);
    steps.recv_timeout(PATIENCE).expect("its first step");
    drop(steps);
    // One message.
    let (told, ended) = channel();
    let closing = start(&threads, 1, move |_| {
        other.wait_ended();
        let _ = told.send(());
        Rest::End
    });
    ended.recv_timeout(PATIENCE).expect("the step ends");
    closing.wait_ended();
    wait_until_gone(&threads);
}
