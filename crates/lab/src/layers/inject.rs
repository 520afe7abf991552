//! Faults and delays on demand: rules in text, and the device that follows them.
//!
//! A rule is `OPERATIONS:WHAT[:WHAT]...`. Operations: `read`, `write`, `flush`, `discard`, `zero`,
//! `prefetch`, `allocation`, joined by `+`, or `any`. What happens: `error=EIO` (or another of
//! [`ERRORS`]), `delay=5ms`, `delay=1ms-20ms` (any time between). When: `rate=0.01` (of the
//! requests, by chance), `range=1M-2M` (requests that touch these bytes; a flush touches none),
//! `after=100` (not to the first 100 that match), `count=3` (no more than 3 times). Delays of
//! several rules add up, and the first error counts.
//!
//! Invariants: a request that fails never reaches the device inside, and a delayed request reaches
//! it late. Which of the matching requests a rate selects depends only on the seed and their
//! number. A device that is dropped sends delayed requests to the device inside immediately.
//!
//! Not here: requests held until a test releases them (`sawmill_device::layer::Fault`).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sawmill_device::{BlockDevice, Error, ErrorKind, Geometry, Operation, Request};

use sawmill_console::exit::{Failure, Result};
use sawmill_console::units::{parse_duration, parse_size};
use sawmill_testkit::Dice;

const OPERATIONS: [(&str, Operation); 7] = [
    ("read", Operation::Read),
    ("write", Operation::Write),
    ("flush", Operation::Flush),
    ("discard", Operation::Discard),
    ("zero", Operation::WriteZeroes),
    ("prefetch", Operation::Prefetch),
    ("allocation", Operation::Allocation),
];

/// Errors by the names that users of a door see: each errno with one of the kinds that it stands
/// for.
const ERRORS: [(&str, ErrorKind); 9] = [
    ("EIO", ErrorKind::Unavailable),
    ("ENOSPC", ErrorKind::Full),
    ("EINVAL", ErrorKind::Invalid),
    ("EPERM", ErrorKind::ReadOnly),
    ("EACCES", ErrorKind::Denied),
    ("EBUSY", ErrorKind::InUse),
    ("ESHUTDOWN", ErrorKind::Closed),
    ("ETIMEDOUT", ErrorKind::TimedOut),
    ("ENOLINK", ErrorKind::Unreachable),
];

/// One rule, see the head of this file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rule {
    text: String,
    operations: Vec<Operation>,
    error: Option<ErrorKind>,
    delay: Option<(Duration, Duration)>,
    rate: f64,
    range: Option<Range<u64>>,
    after: u64,
    count: u64,
}

impl Rule {
    /// Parses a rule. The error says which part is wrong, and what is allowed there.
    pub(crate) fn parse(text: &str) -> Result<Rule, String> {
        let mut parts = text.split(':');
        let mut rule = Rule {
            text: text.to_owned(),
            operations: operations(parts.next().unwrap_or_default())?,
            error: None,
            delay: None,
            rate: 1.0,
            range: None,
            after: 0,
            count: u64::MAX,
        };
        let mut seen = Vec::new();
        for part in parts {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            // The second would silently replace the first.
            if seen.contains(&name) {
                return Err(format!("'{text}' says {name} twice"));
            }
            seen.push(name);
            rule.set(name, value).map_err(|error| format!("'{part}' in '{text}': {error}"))?;
        }
        // A test with such a rule would pass, and test nothing.
        if rule.error.is_none() && rule.delay.is_none() {
            return Err(format!("'{text}' does nothing: add error=EIO or delay=5ms"));
        }
        Ok(rule)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let number = || {
            value.parse::<u64>().map_err(|_| format!("'{value}' is not a whole number of requests"))
        };
        match name {
            "error" => self.error = Some(named(&ERRORS, value, "error")?),
            "delay" => {
                let (least, most) = value.split_once('-').unwrap_or((value, value));
                let (least, most) = (parse_duration(least)?, parse_duration(most)?);
                if least > most {
                    return Err("the shorter delay comes first".to_owned());
                }
                self.delay = Some((least, most));
            }
            "rate" => {
                let rate = value.parse().ok().filter(|rate| (0.0..=1.0).contains(rate));
                self.rate = rate.ok_or_else(|| format!("'{value}' is not a rate from 0 to 1"))?;
            }
            "range" => {
                let (start, end) = value.split_once('-').ok_or("write START-END, as in 1M-2M")?;
                let range = parse_size(start)?..parse_size(end)?;
                if range.is_empty() {
                    return Err("a range ends after it begins".to_owned());
                }
                self.range = Some(range);
            }
            "after" => self.after = number()?,
            "count" => self.count = number()?,
            _ => {
                return Err(format!(
                    "there is no '{name}'; use error, delay, rate, range, after or count"
                ));
            }
        }
        Ok(())
    }

    /// Whether the rule is about this request, whatever its rate and counts say.
    fn matches(&self, request: &Request) -> bool {
        let touches = |range: &Range<u64>| {
            // A request past all addresses is invalid, and the device inside says so.
            let end = request.end().unwrap_or(u64::MAX);
            request.length > 0 && request.address < range.end && range.start < end
        };
        self.operations.contains(&request.operation) && self.range.as_ref().is_none_or(touches)
    }
}

fn operations(text: &str) -> Result<Vec<Operation>, String> {
    match text {
        "any" => Ok(OPERATIONS.map(|(_, operation)| operation).to_vec()),
        _ => text.split('+').map(|name| named(&OPERATIONS, name, "operation")).collect(),
    }
}

fn named<T: Copy>(table: &[(&str, T)], name: &str, what: &str) -> Result<T, String> {
    let found = table.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
    found.ok_or_else(|| {
        let known: Vec<_> = table.iter().map(|(known, _)| *known).collect();
        let any = if what == "operation" { ", joined by +, or any" } else { "" };
        format!("'{name}' is not an {what}; use one of {}{any}", known.join(", "))
    })
}

/// A rule that is active.
struct ActiveRule {
    rule: Rule,
    seed: u64,
    matched: AtomicU64,
    hits: AtomicU64,
}

impl ActiveRule {
    /// Whether the rule matches this request; if so, a random number for it.
    fn hit(&self, request: &Request) -> Option<u64> {
        if !self.rule.matches(request) {
            return None;
        }
        // The chance depends on the number of the match and on the seed alone, so that a run with
        // the same requests meets the same faults.
        let number = self.matched.fetch_add(1, Relaxed);
        let chance = Dice::new(self.seed ^ Dice::new(number).word()).word();
        // 53 bits are what a number of this type holds exactly.
        if number < self.rule.after
            || (chance >> 11) as f64 / (1_u64 << 53) as f64 >= self.rule.rate
        {
            return None;
        }
        let free = |hits| (hits < self.rule.count).then(|| hits + 1);
        self.hits.fetch_update(Relaxed, Relaxed, free).is_ok().then(|| Dice::new(chance).word())
    }
}

/// A device with the faults and delays of some rules.
pub(super) struct InjectLayer {
    inner: Arc<dyn BlockDevice>,
    rules: Vec<ActiveRule>,
    late: Arc<DelayQueue>,
    sender: Option<JoinHandle<()>>,
}

/// Requests that are being delayed.
struct DelayQueue {
    state: Mutex<DelayState>,
    changed: Condvar,
}

#[derive(Default)]
struct DelayState {
    /// By time, then in the order of arrival.
    heap: BinaryHeap<Reverse<Entry>>,
    entered: u64,
    is_closed: bool,
}

struct Entry {
    key: (Instant, u64),
    request: Request,
    error: Option<Error>,
}

impl InjectLayer {
    pub(super) fn start(inner: Arc<dyn BlockDevice>, rules: Vec<Rule>, seed: u64) -> Result<Self> {
        let late = Arc::new(DelayQueue { state: Mutex::default(), changed: Condvar::new() });
        let active = |(number, rule)| ActiveRule {
            rule,
            seed: Dice::new(seed.wrapping_add(number as u64)).word(),
            matched: AtomicU64::new(0),
            hits: AtomicU64::new(0),
        };
        let rules = rules.into_iter().enumerate().map(active).collect();
        let (mine, device) = (Arc::clone(&late), Arc::clone(&inner));
        let sender = std::thread::Builder::new()
            .name("inject".into())
            .spawn(move || mine.send(&*device))
            .map_err(|error| Failure::io("cannot start the thread for delays", &error))?;
        Ok(InjectLayer { inner, rules, late, sender: Some(sender) })
    }
}

impl BlockDevice for InjectLayer {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn submit(&self, request: Request) {
        let mut delay = Duration::ZERO;
        let mut error = None;
        for active in &self.rules {
            let Some(chance) = active.hit(&request) else { continue };
            if let Some((least, most)) = active.rule.delay {
                let spread = (most - least).as_nanos() as u64;
                delay += least + Duration::from_nanos(chance % spread.saturating_add(1));
            }
            if let Some(kind) = active.rule.error {
                let operation = request.operation;
                let text = format!(
                    "{operation:?} at {}: injected by {}",
                    request.address, active.rule.text
                );
                // The first error ends the list: a request fails once. Delays of the rules before
                // it have added up.
                error = Some(Error::new(kind, text));
                break;
            }
        }
        if delay.is_zero() {
            return carry_out(&*self.inner, request, error);
        }
        let mut waiting = self.late.state.lock();
        waiting.entered += 1;
        // The number keeps requests with the same time in their order.
        let key = (Instant::now() + delay, waiting.entered);
        waiting.heap.push(Reverse(Entry { key, request, error }));
        self.late.changed.notify_one();
    }
}

impl Drop for InjectLayer {
    fn drop(&mut self) {
        self.late.state.lock().is_closed = true;
        self.late.changed.notify_one();
        if let Some(sender) = self.sender.take() {
            let _ = sawmill_sys::join_unless_own(sender);
        }
    }
}

impl DelayQueue {
    fn send(&self, device: &dyn BlockDevice) {
        let mut waiting = self.state.lock();
        loop {
            let Some(Reverse(first)) = waiting.heap.peek() else {
                if waiting.is_closed {
                    return;
                }
                self.changed.wait(&mut waiting);
                continue;
            };
            let due = first.key.0;
            // A closed device sends what is left at once, so that its end does not wait for long
            // delays.
            if !waiting.is_closed && Instant::now() < due {
                self.changed.wait_until(&mut waiting, due);
                continue;
            }
            let Some(Reverse(entry)) = waiting.heap.pop() else { continue };
            // Without the lock: the answer may submit the next request on this thread.
            parking_lot::MutexGuard::unlocked(&mut waiting, || {
                carry_out(device, entry.request, entry.error)
            });
        }
    }
}

fn carry_out(device: &dyn BlockDevice, request: Request, error: Option<Error>) {
    match error {
        Some(error) => request.fail(error),
        None => device.submit(request),
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key.cmp(&other.key)
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl Eq for Entry {}

#[cfg(test)]
mod tests {
    use sawmill_device::{BlockDeviceExt, MemoryDevice, conformance};

    use super::*;

    fn device(rules: &[&str], seed: u64) -> InjectLayer {
        let rules = rules.iter().map(|text| Rule::parse(text).expect("a rule")).collect();
        InjectLayer::start(Arc::new(MemoryDevice::new(16 << 20)), rules, seed).expect("a thread")
    }

    #[test]
    fn a_wrong_rule_is_refused_with_the_part_and_what_could_stand_there() {
        let refusal = |text| Rule::parse(text).expect_err("wrong");
        for (text, part, cure) in [
            ("reed:error=EIO", "'reed' is not an operation", "read, write"),
            ("read", "'read' does nothing", "add error=EIO"),
            ("read:error=EFOO", "'error=EFOO' in 'read:error=EFOO'", "EIO, ENOSPC"),
            ("read:delay=5", "'delay=5' in", "5ms"),
            ("read:delay=5ms-1ms", "'delay=5ms-1ms' in", "shorter delay comes first"),
            ("read:error=EIO:rate=2", "'rate=2' in", "from 0 to 1"),
            ("read:error=EIO:range=5M-1M", "'range=5M-1M' in", "ends after it begins"),
            ("read:error=EIO:range=5M", "'range=5M' in", "START-END"),
            ("read:error=EIO:count=-1", "'count=-1' in", "whole number"),
            ("read:error=EIO:error=EIO", "error twice", ""),
            ("read:error=EIO:size=1", "there is no 'size'", "use error, delay, rate"),
        ] {
            let refusal = refusal(text);
            assert!(refusal.contains(part) && refusal.contains(cure), "{text}: {refusal}");
        }
    }

    #[test]
    fn errors_come_where_and_as_often_as_the_rule_says() {
        let device = device(&["write+zero:error=ENOSPC:range=1M-2M:after=1:count=2"], 1);
        let kind = |address| device.write_at(address, b"x").map_err(|error| error.kind());
        assert_eq!(kind((1 << 20) - 1), Ok(()));
        assert_eq!(kind(2 << 20), Ok(()));
        assert_eq!(kind(1 << 20), Ok(()), "the first that matches is spared");
        assert_eq!(kind((2 << 20) - 1), Err(ErrorKind::Full));
        let zeroes = device.write_zeroes(0, 2 << 20).map_err(|error| error.kind());
        assert_eq!(zeroes, Err(ErrorKind::Full), "it touches the range");
        assert_eq!(kind(1 << 20), Ok(()), "twice is enough");
        device.flush().expect("no rule is about flushes");
        assert_eq!(device.read_at(1 << 20, 1).expect("nor reads"), b"x");
    }

    #[test]
    fn a_rate_takes_its_share_and_the_same_seed_the_same_requests() {
        let failed = |seed| -> Vec<u64> {
            let device = device(&["read:error=EIO:rate=0.1"], seed);
            (0..2000).filter(|number| device.read_at(*number, 1).is_err()).collect()
        };
        let (first, again, other) = (failed(1), failed(1), failed(2));
        assert!((120..280).contains(&first.len()), "{} of 2000", first.len());
        assert_eq!(first, again);
        assert_ne!(first, other);
    }

    #[test]
    fn a_late_write_is_not_there_before_its_answer_and_delays_add_up() {
        let device = device(&["write:delay=10ms", "write:delay=5ms-10ms"], 1);
        let start = Instant::now();
        device.write_at(0, b"late").expect("in range");
        assert!(start.elapsed() >= Duration::from_millis(15));
        assert_eq!(device.read_at(0, 4).expect("not late"), b"late");
    }

    #[test]
    fn delays_that_reorder_requests_keep_the_contract() {
        conformance::all(&|| Arc::new(device(&["any:delay=0-1ms:rate=0.2"], 3)));
    }
}
