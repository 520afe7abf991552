//! Prometheus' exposition format 0.0.4: rows of tables, and heads, samples and histograms as text.
//!
//! Invariants: `labels` escapes every value. The bounds of histograms are fixed, so that series
//! from different times can be added up.
//!
//! Not here: which metrics there are (`super`).

use std::fmt::Write;

use crate::admin::status::Histogram;

/// What a metric's number does over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MetricKind {
    /// Grows until the process ends.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts by size.
    Histogram,
}

impl MetricKind {
    pub(super) const fn name(self) -> &'static str {
        match self {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        }
    }
}

/// One row of a table: a metric of a `T`.
pub(super) struct Metric<T: 'static> {
    pub(super) name: &'static str,
    pub(super) kind: MetricKind,
    pub(super) help: &'static str,
    value: fn(&T) -> u64,
}

pub(super) const fn counter<T>(
    name: &'static str,
    help: &'static str,
    value: fn(&T) -> u64,
) -> Metric<T> {
    Metric { name, kind: MetricKind::Counter, help, value }
}

pub(super) const fn gauge<T>(
    name: &'static str,
    help: &'static str,
    value: fn(&T) -> u64,
) -> Metric<T> {
    Metric { name, kind: MetricKind::Gauge, help, value }
}

/// `a="x",b="y"` with the values escaped.
pub(super) fn labels(pairs: &[(&str, &str)]) -> String {
    let pairs: Vec<String> = pairs
        .iter()
        .map(|(name, value)| {
            let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            format!("{name}=\"{value}\"")
        })
        .collect();
    pairs.join(",")
}

/// The text so far.
#[derive(Default)]
pub(super) struct Exposition {
    pub(super) text: String,
}

impl Exposition {
    // Writing to a string cannot fail, so the results of `write!` are dropped.

    pub(super) fn head(&mut self, name: &str, kind: MetricKind, help: &str) {
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {}", kind.name());
    }

    pub(super) fn sample(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        let _ = match labels {
            "" => writeln!(self.text, "{name} {value}"),
            _ => writeln!(self.text, "{name}{{{labels}}} {value}"),
        };
    }

    pub(super) fn table<T>(&mut self, metrics: &[Metric<T>], subjects: &[(String, &T)]) {
        for metric in metrics {
            self.head(metric.name, metric.kind, metric.help);
            for (labels, subject) in subjects {
                self.sample(metric.name, labels, (metric.value)(subject));
            }
        }
    }

    pub(super) fn histogram(&mut self, name: &str, labels: &str, histogram: &Histogram) {
        // The bounds are fixed whatever was counted, so that series from different times can be
        // added up.
        const FIRST_US_LOG2: usize = 6;
        const LAST_US_LOG2: usize = 26;
        let counts = &histogram.buckets_us_log2;
        // Cumulative, as the format demands of buckets.
        let below = |end: usize| counts.iter().take(end + 1).sum::<u64>();
        for exponent in FIRST_US_LOG2..=LAST_US_LOG2 {
            let bound = (1u64 << exponent) as f64 / 1e6;
            let labels = format!("{labels},le=\"{bound}\"");
            self.sample(&format!("{name}_bucket"), &labels, below(exponent));
        }
        let count = histogram.count();
        self.sample(&format!("{name}_bucket"), &format!("{labels},le=\"+Inf\""), count);
        if let Some(sum_us) = histogram.sum_us {
            self.sample(&format!("{name}_sum"), labels, sum_us as f64 / 1e6);
        }
        self.sample(&format!("{name}_count"), labels, count);
    }
}
