//! The events in order: a digest of all of them, and on request the events themselves, as a story.
//!
//! Invariant: two runs of one seed have the same digest. Otherwise the engine or this world depends
//! on a clock, an address or an order that the seed does not determine.

use parking_lot::Mutex;

use sawmill_testkit::mix;

#[derive(Default)]
struct TraceContent {
    digest: u64,
    events: u64,
    story: Option<Vec<String>>,
}

/// The digest of a run's events, and the events themselves if they were asked for.
#[derive(Default)]
pub struct Trace {
    inner: Mutex<TraceContent>,
}

impl Trace {
    /// A trace that also keeps the story.
    #[must_use]
    pub fn telling() -> Self {
        Trace {
            inner: Mutex::new(TraceContent { story: Some(Vec::new()), ..TraceContent::default() }),
        }
    }

    /// Notes an event: its kind and up to two numbers; `text` makes its line of the story.
    pub fn note(&self, kind: &str, numbers: [u64; 2], text: impl FnOnce() -> String) {
        let mut inner = self.inner.lock();
        inner.events += 1;
        let mut digest = inner.digest;
        for byte in kind.bytes() {
            digest = mix(digest ^ u64::from(byte));
        }
        for number in numbers {
            digest = mix(digest ^ number);
        }
        inner.digest = digest;
        if let Some(story) = &mut inner.story {
            story.push(text());
        }
    }

    /// The digest so far.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.inner.lock().digest
    }

    /// The number of events.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.inner.lock().events
    }

    /// The story so far, if it is kept.
    #[must_use]
    pub fn story(&self) -> Vec<String> {
        self.inner.lock().story.clone().unwrap_or_default()
    }
}
