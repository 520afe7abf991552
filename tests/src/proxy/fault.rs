//! The faults of a request, when they occur, and how often they did.
//!
//! A [`Rule`] strikes the requests it names, from the n-th on, a number of times. [`FaultRates`]
//! strikes by seeded chance. A fault counts only if it was really done: one that does not fit the
//! answer (no other object is known yet, say) leaves the request alone. A rule whose fault needs a
//! body waits for an answer that has one.

use std::collections::BTreeMap;
use std::time::Duration;

use sawmill_testkit::Dice;

/// The kinds of requests to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Reads an object or a part of it.
    Get,
    /// Creates an object.
    Put,
    /// Lists objects.
    List,
    /// Deletes objects.
    Delete,
}

/// One kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The connection is reset; the store never gets the request.
    Reset,
    /// The store did it; the connection is reset instead of the answer.
    AnswerLost,
    /// The store did it; the answer comes after this time.
    Delayed(Duration),
    /// The store did it; the answer comes when the test calls [`super::Proxy::release`].
    Held,
    /// The body and the connection end in the middle; the stated length is larger.
    Cut,
    /// The body ends in the middle, and the stated length matches that.
    Shortened,
    /// The store never gets the request; the answer is this status, in S3's form.
    Status(u16),
    /// Some bytes of the body are changed; its length is correct.
    Garbled,
    /// The body is that of another object; its length is correct.
    Foreign,
    /// An outdated list.
    ListLagged,
    /// A list without the later half of its keys.
    ListLacking,
    /// A put is done twice in a row, and answered with the second outcome.
    PutTwice,
    /// The connection is reset; the put reaches the store later ([`super::Proxy::deliver_late`], or
    /// by chance, under [`FaultRates`]).
    PutLate,
    /// The `ETag` of the answer is wrong.
    WrongEtag,
    /// The body comes in pieces with this pause before each.
    Trickle(Duration),
}

impl Fault {
    /// Whether it changes the body of an answer, and so needs one.
    pub(super) fn needs_body(self) -> bool {
        use Fault::{Cut, Foreign, Garbled, Shortened, Trickle};
        matches!(self, Cut | Foreign | Garbled | Shortened | Trickle(_))
    }

    /// Its name in counts.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Fault::Reset => "reset",
            Fault::AnswerLost => "answer lost",
            Fault::Delayed(_) => "delayed",
            Fault::Held => "held",
            Fault::Cut => "cut",
            Fault::Shortened => "shortened",
            Fault::Status(403) => "403",
            Fault::Status(429) => "429",
            Fault::Status(503) => "503",
            Fault::Status(_) => "500",
            Fault::Garbled => "garbled",
            Fault::Foreign => "foreign",
            Fault::ListLagged => "list lagged",
            Fault::ListLacking => "list lacking",
            Fault::PutTwice => "put twice",
            Fault::PutLate => "put late",
            Fault::WrongEtag => "wrong etag",
            Fault::Trickle(_) => "trickle",
        }
    }
}

/// The requests that a fault strikes.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Requests of this kind,
    pub verb: Verb,
    /// whose key contains this,
    pub key_contains: String,
    /// except the first of them, this many,
    pub skip: u64,
    /// and then this many.
    pub times: u64,
    /// The fault.
    pub fault: Fault,
}

impl Rule {
    /// Strikes every request of this kind whose key contains `key`, forever.
    #[must_use]
    pub fn every(verb: Verb, key: &str, fault: Fault) -> Self {
        Rule { verb, key_contains: key.to_owned(), skip: 0, times: u64::MAX, fault }
    }

    /// Strikes the first `times`.
    #[must_use]
    pub fn first(verb: Verb, key: &str, times: u64, fault: Fault) -> Self {
        Rule { times, ..Rule::every(verb, key, fault) }
    }

    fn names(&self, verb: Verb, key: &str) -> bool {
        self.verb == verb && key.contains(&self.key_contains)
    }

    fn strikes(&mut self, verb: Verb, key: &str) -> bool {
        if !self.names(verb, key) || self.times == 0 {
            return false;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        self.times -= 1;
        true
    }
}

/// Faults by chance.
#[derive(Clone, Debug)]
pub struct FaultRates {
    /// The source of chance.
    pub dice: Dice,
    /// One request in this many is struck.
    pub fault_once_in: u64,
}

impl FaultRates {
    fn choose(&mut self, verb: Verb) -> Option<Fault> {
        if !self.dice.one_in(self.fault_once_in) {
            return None;
        }
        let pause = Duration::from_millis(1 + self.dice.below(400));
        let any = [
            Fault::Reset,
            Fault::AnswerLost,
            Fault::Delayed(pause),
            Fault::Status(500),
            Fault::Status(503),
            Fault::Status(429),
            Fault::Status(403),
        ];
        let own: &[Fault] = match verb {
            Verb::Get => &[
                Fault::Cut,
                Fault::Shortened,
                Fault::Garbled,
                Fault::Foreign,
                Fault::WrongEtag,
                Fault::Trickle(pause / 8),
            ],
            Verb::Put => &[
                Fault::AnswerLost,
                Fault::PutTwice,
                Fault::PutLate,
                Fault::PutLate,
                Fault::WrongEtag,
            ],
            Verb::List => &[Fault::ListLagged, Fault::ListLacking, Fault::Cut],
            Verb::Delete => &[],
        };
        let chosen = self.dice.below((any.len() + own.len()) as u64) as usize;
        any.get(chosen).or_else(|| own.get(chosen - any.len())).copied()
    }
}

/// The rules and the rates that decide about each request.
#[derive(Debug, Default)]
pub(super) struct Script {
    pub(super) rules: Vec<Rule>,
    pub(super) rates: Option<FaultRates>,
}

impl Script {
    pub(super) fn choose(&mut self, verb: Verb, key: &str) -> Option<Fault> {
        let ruled =
            self.rules.iter_mut().find_map(|rule| rule.strikes(verb, key).then_some(rule.fault));
        ruled.or_else(|| self.rates.as_mut().and_then(|rates| rates.choose(verb)))
    }

    /// The fault did not fit the answer to this request: its rule strikes a later one.
    pub(super) fn not_done(&mut self, verb: Verb, key: &str, fault: Fault) {
        let mut rules = self.rules.iter_mut();
        if let Some(rule) = rules.find(|rule| rule.fault == fault && rule.names(verb, key)) {
            rule.times = rule.times.saturating_add(1);
        }
    }
}

/// How often each fault was done, by name, and the number of all requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests received.
    pub requests: u64,
    /// Faults by name.
    pub faults: BTreeMap<&'static str, u64>,
}

impl Counts {
    /// How often this fault was done.
    #[must_use]
    pub fn of(&self, name: &str) -> u64 {
        self.faults.get(name).copied().unwrap_or(0)
    }

    /// All faults together.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.faults.values().sum()
    }

    /// Adds others to these.
    pub fn add(&mut self, others: &Counts) {
        self.requests += others.requests;
        for (name, count) in &others.faults {
            *self.faults.entry(name).or_default() += count;
        }
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kinds: Vec<String> =
            self.faults.iter().map(|(name, count)| format!("{name} {count}")).collect();
        write!(f, "{} requests, {} faults ({})", self.requests, self.total(), kinds.join(", "))
    }
}
