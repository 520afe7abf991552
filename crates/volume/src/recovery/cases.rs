//! The decision table for journal records found after a crash: keep, skip, stop or refuse. A torn
//! tail is not damage (`docs/crash-consistency.md`), and the mark tells them apart.
//!
//! Invariant: every combination of facts matches exactly one row. A test goes through all of them,
//! and another compares the rows with the table on that page.
//!
//! Not here: how the facts are found (`journal::scan`), and what follows from the verdict (`open`).

/// What was found at the next position of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RecordFacts {
    /// The slot head is valid and is of this journal and position.
    pub(crate) has_slot: bool,
    /// The whole header is valid (only together with a valid slot head) and of an allowed epoch.
    pub(crate) has_header: bool,
    /// The payload has its checksum (or there is none).
    pub(crate) has_payload: bool,
    /// The position lies below a mark: it was flushed, or a later record implies that it was.
    pub(crate) is_below_mark: bool,
    /// The bytes come from memory that outlived the process, not from the disk.
    pub(crate) is_staged: bool,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Verdict {
    /// A record: replay it and continue behind it.
    Keep,
    /// A slot that was reserved but not filled when the process died: its write was never
    /// acknowledged. Continue behind it.
    Skip,
    /// The end of the log.
    Stop,
    /// Flushed data is missing: damage.
    Refuse,
}

struct Row {
    label: &'static str,
    slot: Option<bool>,
    header: Option<bool>,
    payload: Option<bool>,
    below_mark: Option<bool>,
    staged: Option<bool>,
    verdict: Verdict,
}

const YES: Option<bool> = Some(true);
const NO: Option<bool> = Some(false);
const ANY: Option<bool> = None;

/// `header` without `slot` is impossible, and counts as no header.
#[rustfmt::skip]
const ROWS: [Row; 9] = [
    //                              slot header payload mark staged
    row("whole record",            [YES, YES, YES, ANY, ANY], Verdict::Keep),
    row("never filled slot",       [YES, NO,  ANY, NO,  YES], Verdict::Skip),
    row("unfilled yet flushed",    [YES, NO,  ANY, YES, ANY], Verdict::Refuse),
    row("torn header on the disk", [YES, NO,  ANY, NO,  NO ], Verdict::Stop),
    row("torn payload",            [YES, YES, NO,  NO,  NO ], Verdict::Stop),
    row("damaged memory",          [YES, YES, NO,  NO,  YES], Verdict::Refuse),
    row("damaged payload",         [YES, YES, NO,  YES, ANY], Verdict::Refuse),
    row("nothing, where data was", [NO,  ANY, ANY, YES, ANY], Verdict::Refuse),
    row("end of the log",          [NO,  ANY, ANY, NO,  ANY], Verdict::Stop),
];

const fn row(label: &'static str, facts: [Option<bool>; 5], verdict: Verdict) -> Row {
    let [slot, header, payload, below_mark, staged] = facts;
    Row { label, slot, header, payload, below_mark, staged, verdict }
}

/// The row that matches, by name, and its verdict.
pub(crate) fn judge(facts: RecordFacts) -> (&'static str, Verdict) {
    let row = ROWS.iter().find(|row| row.matches(facts));
    // The test below shows that a row always matches. If none did, refusing is the safe verdict.
    row.map_or(("no case", Verdict::Refuse), |row| (row.label, row.verdict))
}

impl Row {
    fn matches(&self, facts: RecordFacts) -> bool {
        let fits = |wanted: Option<bool>, is: bool| wanted.is_none_or(|wanted| wanted == is);
        fits(self.slot, facts.has_slot)
            && fits(self.header, facts.has_header)
            && fits(self.payload, facts.has_payload)
            && fits(self.below_mark, facts.is_below_mark)
            && fits(self.staged, facts.is_staged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = RecordFacts> {
        (0..32u32).map(|bits| RecordFacts {
            has_slot: bits & 1 != 0,
            has_header: bits & 2 != 0,
            has_payload: bits & 4 != 0,
            is_below_mark: bits & 8 != 0,
            is_staged: bits & 16 != 0,
        })
    }

    #[test]
    fn every_combination_of_facts_matches_exactly_one_row() {
        for facts in all() {
            let rows: Vec<_> =
                ROWS.iter().filter(|row| row.matches(facts)).map(|row| row.label).collect();
            assert_eq!(rows.len(), 1, "{facts:?} matches {rows:?}");
        }
    }

    #[test]
    fn the_page_has_the_rows_of_the_table_in_the_same_order() {
        let page = include_str!("../../../../docs/crash-consistency.md");
        let table = page.split("| case |").nth(1).expect("the page has the table");
        let lines = table.lines().skip(2).take_while(|line| line.starts_with('|'));
        let on_page: Vec<Vec<&str>> =
            lines.map(|line| line.trim_matches('|').split('|').map(str::trim).collect()).collect();
        let fact = |wanted: Option<bool>, yes: &'static str, no: &'static str| match wanted {
            Some(true) => yes,
            Some(false) => no,
            None => "any",
        };
        let in_code: Vec<Vec<&str>> = ROWS
            .iter()
            .map(|row| {
                vec![
                    row.label,
                    fact(row.slot, "valid", "invalid"),
                    fact(row.header, "valid", "invalid"),
                    fact(row.payload, "valid", "invalid"),
                    fact(row.below_mark, "yes", "no"),
                    fact(row.staged, "yes", "no"),
                    match row.verdict {
                        Verdict::Keep => "keep",
                        Verdict::Skip => "skip",
                        Verdict::Stop => "stop",
                        Verdict::Refuse => "refuse",
                    },
                ]
            })
            .collect();
        assert_eq!(on_page, in_code);
    }

    #[test]
    fn nothing_flushed_is_ever_dropped_and_nothing_broken_is_ever_kept() {
        for facts in all() {
            let (_, verdict) = judge(facts);
            let whole = facts.has_slot && facts.has_header && facts.has_payload;
            assert_eq!(verdict == Verdict::Keep, whole);
            if facts.is_below_mark && !whole {
                assert_eq!(verdict, Verdict::Refuse);
            }
            if facts.is_staged && facts.has_slot && facts.has_header && !facts.has_payload {
                assert_eq!(
                    verdict,
                    Verdict::Refuse,
                    "a header is written last: memory cannot tear"
                );
            }
            if verdict == Verdict::Skip {
                assert!(
                    facts.is_staged && !facts.has_header,
                    "only memory can show a slot that was never filled"
                );
            }
        }
    }
}
