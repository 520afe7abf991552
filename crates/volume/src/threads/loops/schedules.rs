//! Loops, their threads and their clock under random schedules, as `journal::schedules` does for
//! the journal's path: everything but the loops themselves is what production runs.
//!
//! A wait with a timeout ends at once or never here. So a lost wake-up of a parked loop, of a
//! thread that went idle or of the clock is a deadlock, which is detected.
//!
//! Not here: disks that hang and panics (`tests`).

use shuttle::rand::Rng;
use shuttle::thread;

use super::*;
use crate::journal::schedules::{is_caught, under_schedules};

/// How a loop rests in one schedule.
#[derive(Clone, Copy)]
enum Resting {
    /// Until it is notified.
    Long,
    /// Until it is notified, or for no time: then the clock ends it.
    Any,
}

/// Takes items until it has all of them.
struct Collecting {
    items: Arc<Mutex<u32>>,
    wanted: u32,
    resting: Resting,
}

impl SteppedLoop for Collecting {
    fn step(&mut self, _: bool) -> Rest {
        if *self.items.lock() == self.wanted {
            return Rest::End;
        }
        match (self.resting, shuttle::rand::thread_rng().gen_range(0..4)) {
            (Resting::Any, 0) => Rest::Long(Some(Duration::ZERO)),
            (Resting::Any, 1) => Rest::Short { watch: Duration::ZERO, sleep: Duration::ZERO },
            (_, 2) => Rest::No,
            _ => Rest::Long(None),
        }
    }
    fn fail(&mut self) {}
}

/// Rests so many times until the clock ends it; nobody notifies it.
struct Timed(u32);

impl SteppedLoop for Timed {
    fn step(&mut self, _: bool) -> Rest {
        let Some(left) = self.0.checked_sub(1) else { return Rest::End };
        self.0 = left;
        Rest::Long(Some(Duration::ZERO))
    }
    fn fail(&mut self) {}
}

fn few_threads(stuck_after: Duration) -> LoopLimits {
    LoopLimits {
        threads_max: 1,
        all_threads_max: 3,
        group_threads_max: 1,
        sleepers_max: 1,
        stuck_after,
        ..LoopLimits::default()
    }
}

fn loop_threads() -> Arc<LoopThreads> {
    let limits = match shuttle::rand::thread_rng().gen_range(0..3) {
        0 => LoopLimits::default(),
        // One thread, and others for as long as the clock finds it stuck.
        1 => few_threads(Duration::ZERO),
        _ => few_threads(STUCK_AFTER),
    };
    Arc::new(LoopThreads::with(limits, |name, work| {
        thread::Builder::new().name(name.into()).spawn(work).map(drop)
    }))
}

/// As `VolumeLoop::wait_ended`, which notifies.
fn wait_ended(running: &VolumeLoop) {
    let mut run = running.run.lock();
    while !run.has_ended {
        running.ended.wait(&mut run);
    }
}

/// Some threads put items into two loops and notify; the loops end with the last item, and the
/// threads with the loops.
fn collect_all_items(resting: Resting, notify: impl Fn(&Wake) + Copy + Send + Sync + 'static) {
    const NOTIFIERS: u32 = 2;
    let threads = loop_threads();
    let loops: Vec<_> = [LoopKind::Journal, LoopKind::Engine]
        .into_iter()
        .map(|kind| {
            let items = Arc::<Mutex<u32>>::default();
            let stepped = Collecting { items: items.clone(), wanted: NOTIFIERS, resting };
            let wake = Arc::<Wake>::default();
            let group = LoopGroup { disk: 1, kind };
            let running = threads.run(group, wake.clone(), Box::new(stepped));
            (running.expect("there are threads"), wake, items)
        })
        .collect();
    for _ in 0..NOTIFIERS {
        let wanted: Vec<_> =
            loops.iter().map(|(_, wake, items)| (wake.clone(), items.clone())).collect();
        thread::spawn(move || {
            for (wake, items) in wanted {
                *items.lock() += 1;
                notify(&wake);
            }
        });
    }
    loops.iter().for_each(|(running, ..)| wait_ended(running));
    let state = threads.state.lock();
    assert!(state.due.is_empty() && state.loops == 0 && state.ready.open() == 0);
}

#[test]
fn a_parked_loop_misses_no_notification() {
    under_schedules(|| collect_all_items(Resting::Long, Wake::notify));
}

#[test]
fn a_loop_misses_no_notification_beside_the_clock() {
    under_schedules(|| collect_all_items(Resting::Any, Wake::notify));
}

#[test]
fn every_rest_that_has_a_limit_ends() {
    under_schedules(|| {
        let threads = loop_threads();
        let group = LoopGroup { disk: 1, kind: LoopKind::Engine };
        let loops = [(); 2].map(|()| threads.run(group, Arc::default(), Box::new(Timed(3))));
        loops.into_iter().for_each(|running| wait_ended(&running.expect("there are threads")));
    });
}

#[test]
fn a_planted_notification_that_a_loop_misses_before_it_is_parked_is_caught() {
    assert!(is_caught(|| collect_all_items(Resting::Long, Wake::notify_if_asleep)));
}
