//! Prices, and what a trace would cost in a month: in the store, and on provisioned block storage
//! of the same size and speed.
//!
//! A price file is a flat subset of TOML: comments, sections, and keys with a number or a text. The
//! default is `prices.toml` beside this file.
//!
//! Invariants: a price file has every key exactly once and no other key, so a typo cannot become a
//! price of zero. No figure includes machines, their local disks, or transfer between regions.
//!
//! Not here: the counts that are priced (`sawmill_volume::forecast`), the busiest minute
//! (`survey`).

use std::collections::BTreeMap;
use std::path::Path;

use sawmill_volume::forecast::Report;
use serde::Serialize;

use super::survey::Busiest;
use sawmill_console::exit::{Failure, Result};

/// The prices in use unless the user gives others.
const TEXT_DEFAULT: &str = include_str!("prices.toml");
const NAME_DEFAULT: &str = "the built-in price file";
/// A month as vendors count it: 730 hours.
const MONTH_S: f64 = 730.0 * 3600.0;
const GIB: f64 = (1u64 << 30) as f64;
const MIB: f64 = (1u64 << 20) as f64;

/// The prices of a store, in dollars.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct StorePrices {
    pub(super) gib_month: f64,
    pub(super) put_per_1000: f64,
    pub(super) get_per_1000: f64,
    pub(super) list_per_1000: f64,
    pub(super) delete_per_1000: f64,
}

/// The prices of provisioned block storage, in dollars.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct BlockPrices {
    pub(super) gib_month: f64,
    pub(super) requests_per_s_included: f64,
    pub(super) requests_per_s_month: f64,
    pub(super) mib_per_s_included: f64,
    pub(super) mib_per_s_month: f64,
}

/// A price file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Prices {
    pub(super) name: String,
    /// The date when the prices were looked up.
    pub(super) date: String,
    pub(super) source: String,
    pub(super) store: StorePrices,
    pub(super) block: BlockPrices,
}

impl Prices {
    /// The file at `path`, or the built-in one.
    pub(super) fn load(path: Option<&Path>) -> Result<Prices> {
        let Some(path) = path else { return Prices::parse(TEXT_DEFAULT, NAME_DEFAULT) };
        let text = std::fs::read_to_string(path).map_err(|error| {
            Failure::io(format!("cannot read prices {}", path.display()), &error)
        })?;
        Prices::parse(&text, &path.display().to_string())
    }

    fn parse(text: &str, file: &str) -> Result<Prices> {
        let mut entries = Entries::parse(text, file)?;
        let prices = Prices {
            name: entries.text("name")?,
            date: entries.text("date")?,
            source: entries.text("source")?,
            store: StorePrices {
                gib_month: entries.number("store.gib_month")?,
                put_per_1000: entries.number("store.put_per_1000")?,
                get_per_1000: entries.number("store.get_per_1000")?,
                list_per_1000: entries.number("store.list_per_1000")?,
                delete_per_1000: entries.number("store.delete_per_1000")?,
            },
            block: BlockPrices {
                gib_month: entries.number("block.gib_month")?,
                requests_per_s_included: entries.number("block.requests_per_s_included")?,
                requests_per_s_month: entries.number("block.requests_per_s_month")?,
                mib_per_s_included: entries.number("block.mib_per_s_included")?,
                mib_per_s_month: entries.number("block.mib_per_s_month")?,
            },
        };
        entries.finish()?;
        Ok(prices)
    }
}

/// The keys of a file, with their sections: line number and value, still quoted if it was.
struct Entries<'a> {
    file: &'a str,
    left: BTreeMap<String, (usize, String)>,
}

impl<'a> Entries<'a> {
    fn parse(text: &str, file: &'a str) -> Result<Entries<'a>> {
        let mut entries = Entries { file, left: BTreeMap::new() };
        let mut section = String::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = without_comment(line).trim();
            if line.is_empty() {
                continue;
            }
            if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                section = format!("{}.", name.trim());
                continue;
            }
            let Some((key, value)) = line.split_once('=') else {
                return Err(
                    entries.wrong(number, &format!("expected 'key = value', found '{line}'"))
                );
            };
            let key = format!("{section}{}", key.trim());
            let entry = (number, value.trim().to_owned());
            if entries.left.insert(key.clone(), entry).is_some() {
                return Err(entries.wrong(number, &format!("{key} is set twice")));
            }
        }
        Ok(entries)
    }

    fn wrong(&self, line: usize, what: &str) -> Failure {
        Failure::usage(format!("prices {}: line {line}: {what}", self.file))
    }

    fn take(&mut self, key: &str) -> Result<(usize, String)> {
        // Taken out, so that what is left at the end is unknown: a misspelled key must not count as
        // zero.
        self.left.remove(key).ok_or_else(|| {
            Failure::usage(format!(
                "prices {}: {key} is missing; write 0 where nothing is charged",
                self.file
            ))
        })
    }

    fn text(&mut self, key: &str) -> Result<String> {
        let (line, value) = self.take(key)?;
        let inner = value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
        // Escapes are not supported. Refusing them is better than showing them wrong.
        let inner = inner.filter(|inner| !inner.contains(['"', '\\']));
        let wrong =
            || self.wrong(line, &format!("{key}: expected a text in quotes, found {value}"));
        inner.map(str::to_owned).ok_or_else(wrong)
    }

    fn number(&mut self, key: &str) -> Result<f64> {
        let (line, value) = self.take(key)?;
        let number =
            value.parse::<f64>().ok().filter(|number| number.is_finite() && *number >= 0.0);
        number.ok_or_else(|| {
            self.wrong(
                line,
                &format!("{key}: expected a number that is not negative, found {value}"),
            )
        })
    }

    fn finish(self) -> Result<()> {
        match self.left.first_key_value() {
            None => Ok(()),
            Some((key, (line, _))) => {
                Err(self.wrong(*line, &format!("{key} is not a known price")))
            }
        }
    }
}

/// The line up to a `#` that is not inside a text.
fn without_comment(line: &str) -> &str {
    let mut quoted = false;
    let comment = line.find(|character| {
        quoted ^= character == '"';
        character == '#' && !quoted
    });
    comment.map_or(line, |at| &line[..at])
}

/// What the trace would cost, in dollars per month.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Costs {
    /// How many times the trace fits into a month: the factor for its requests.
    pub(super) traces_per_month: f64,
    /// What the trace left in the store.
    pub(super) storage_usd: f64,
    pub(super) puts_usd: f64,
    /// As if nothing were cached.
    pub(super) gets_max_usd: f64,
    pub(super) lists_usd: f64,
    pub(super) deletes_usd: f64,
    /// The sum of the above.
    pub(super) total_max_usd: f64,
    /// The same for a full disk with the proportion of dead data that the end of the trace has.
    pub(super) full_storage_usd: f64,
    pub(super) full_total_max_usd: f64,
    /// Provisioned block storage for the disk's size and the trace's busiest minute.
    pub(super) block_capacity_usd: f64,
    pub(super) block_requests_usd: f64,
    pub(super) block_throughput_usd: f64,
    pub(super) block_total_usd: f64,
}

impl Costs {
    pub(super) fn of(
        prices: &Prices,
        report: &Report,
        busiest: Busiest,
        disk_bytes: u64,
        span_s: f64,
    ) -> Costs {
        // Traces shorter than a second are scaled as if they lasted one.
        let traces_per_month = MONTH_S / span_s.max(1.0);
        let thousands = |count: u64, price: f64| count as f64 * traces_per_month / 1000.0 * price;
        let requests = &report.requests;
        let gib = |bytes: f64| bytes / GIB * prices.store.gib_month;
        let overhead = if report.live_bytes == 0 {
            1.0
        } else {
            report.store_bytes as f64 / report.live_bytes as f64
        };
        let block = &prices.block;
        let beyond = |used: f64, included: f64, price: f64| (used - included).max(0.0) * price;
        let mut costs = Costs {
            traces_per_month,
            storage_usd: gib(report.store_bytes as f64),
            puts_usd: thousands(requests.put(), prices.store.put_per_1000),
            gets_max_usd: thousands(requests.get_max(), prices.store.get_per_1000),
            lists_usd: thousands(requests.list, prices.store.list_per_1000),
            deletes_usd: thousands(requests.delete, prices.store.delete_per_1000),
            full_storage_usd: gib(disk_bytes as f64 * overhead),
            block_capacity_usd: disk_bytes as f64 / GIB * block.gib_month,
            block_requests_usd: beyond(
                busiest.requests_per_s,
                block.requests_per_s_included,
                block.requests_per_s_month,
            ),
            block_throughput_usd: beyond(
                busiest.bytes_per_s / MIB,
                block.mib_per_s_included,
                block.mib_per_s_month,
            ),
            ..Costs::default()
        };
        let requests_usd =
            costs.puts_usd + costs.gets_max_usd + costs.lists_usd + costs.deletes_usd;
        costs.total_max_usd = costs.storage_usd + requests_usd;
        costs.full_total_max_usd = costs.full_storage_usd + requests_usd;
        costs.block_total_usd =
            costs.block_capacity_usd + costs.block_requests_usd + costs.block_throughput_usd;
        costs
    }
}

#[cfg(test)]
mod tests {
    use sawmill_volume::forecast::Requests;

    use super::*;

    fn near(found: f64, expected: f64) {
        assert!(
            (found - expected).abs() < 1e-9 * expected.abs().max(1.0),
            "{found}, expected {expected}"
        );
    }

    #[test]
    fn the_cost_equals_a_sum_computed_by_hand() {
        let prices = Prices::load(None).unwrap();
        // A day's trace on a disk of 100 GiB: 10 GiB live, 12 GiB in the store.
        let report = Report {
            live_bytes: 10 << 30,
            store_bytes: 12 << 30,
            requests: Requests {
                put_segments: 9_000,
                put_checkpoints: 1_000,
                get_moves_max: 500,
                get_reads_max: 99_500,
                list: 200,
                delete: 300,
            },
            ..Report::default()
        };
        let busiest = Busiest { requests_per_s: 5_000.0, bytes_per_s: 225.0 * MIB };
        let costs = Costs::of(&prices, &report, busiest, 100 << 30, 86_400.0);
        // 730 h / 24 h.
        let days = 730.0 / 24.0;
        near(costs.traces_per_month, days);
        near(costs.storage_usd, 0.276); // 12 x 0.023
        near(costs.puts_usd, 0.05 * days); // 10 thousand x 0.005
        near(costs.gets_max_usd, 0.04 * days); // 100 thousand x 0.0004
        near(costs.lists_usd, 0.001 * days); // 0.2 thousand x 0.005
        near(costs.deletes_usd, 0.0);
        near(costs.total_max_usd, 0.276 + 0.091 * days);
        near(costs.full_storage_usd, 2.76); // 100 x 12 / 10 x 0.023
        near(costs.full_total_max_usd, 2.76 + 0.091 * days);
        near(costs.block_capacity_usd, 8.0); // 100 x 0.08
        near(costs.block_requests_usd, 10.0); // 2000 x 0.005
        near(costs.block_throughput_usd, 4.0); // 100 x 0.04
        near(costs.block_total_usd, 22.0);
    }

    #[test]
    fn a_price_file_is_refused_when_a_key_is_missing_unknown_double_or_no_number() {
        let refused = |text: &str, words: &str| {
            let error = Prices::parse(text, "mine.toml").err().unwrap().to_string();
            assert!(error.contains("mine.toml") && error.contains(words), "{error}");
        };
        assert!(Prices::parse(TEXT_DEFAULT, "mine.toml").is_ok());
        refused(
            &TEXT_DEFAULT.replace("put_per_1000 = 0.005\n", ""),
            "store.put_per_1000 is missing",
        );
        refused(
            &format!("{TEXT_DEFAULT}discount = 1\n"),
            &format!(
                "line {}: block.discount is not a known price",
                TEXT_DEFAULT.lines().count() + 1
            ),
        );
        refused(&format!("{TEXT_DEFAULT}gib_month = 1\n"), "block.gib_month is set twice");
        refused(&TEXT_DEFAULT.replace("0.023", "cheap"), "store.gib_month: expected a number");
        refused(&TEXT_DEFAULT.replace("0.023", "-1"), "expected a number that is not negative");
        refused(
            &TEXT_DEFAULT.replace("\"2025-11-01\"", "2025-11-01"),
            "date: expected a text in quotes",
        );
        refused("just words\n", "line 1: expected 'key = value'");
    }

    #[test]
    fn a_hash_in_a_text_begins_no_comment() {
        assert_eq!(without_comment("a = \"b # c\" # d"), "a = \"b # c\" ");
    }
}
