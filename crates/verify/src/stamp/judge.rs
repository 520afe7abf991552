//! The judge of crash images.
//!
//! Definition. `a → b` when write a completed before write b was submitted. Let O be the writes of
//! which a sector is seen, D those that must have survived. The cut P is O ∪ D with everything that
//! is → one of them. The image is legal when
//! 1. Each sector is whole, at its place, of this run, and of a write this log or its base knows;
//! 2. No sector shows a write w while P has a w' that covers the sector with w → w' (so nothing in
//!    P is missing, and a write is whole or absent);
//! 3. There is one order of P that respects → and gives every sector the write seen there: what two
//!    concurrent writes leave where they overlap is of one of them, not a mixture.
//!
//! A sector of zeroes may be the base or any write of zeroes; it makes the image illegal only when
//! none of these can explain it.
//!
//! Invariant: while one image is judged, P only grows: a round adds a write of zeroes that alone
//! explains a sector, or it is the last.
//!
//! Not here: the choice of the check for a device (`cut_check`, `crash`), the times of requests
//! and answers (`log`).

use std::fmt;

use super::{Kind, Log, SECTOR_BYTES, Sector, Write};

/// The counts of writes of a legal image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Writes in the cut.
    pub kept: usize,
    /// Completed writes after the cut.
    pub lost: usize,
    /// Writes that had to survive.
    pub demanded: usize,
}

/// Why an image is illegal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(pub String);

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Requires that every completed write is there, and that the image is a cut.
pub fn check_nothing_accepted_lost(log: &Log, image: &[u8]) -> Result<Verdict, Violation> {
    Judge::new(log, image, |write| write.completed.is_some())?.judge()
}

/// Requires that every write is there that completed before the last completed flush was submitted,
/// and every completed write with FUA, and that the image is a cut.
pub fn check_flushed_kept(log: &Log, image: &[u8]) -> Result<Verdict, Violation> {
    let flushed = last_flush(log);
    let demanded = |write: &Write| write.completed.is_some_and(|done| write.fua || done < flushed);
    Judge::new(log, image, demanded)?.judge()
}

/// Requires that the image is a cut, at any time.
pub fn check_cut(log: &Log, image: &[u8]) -> Result<Verdict, Violation> {
    Judge::new(log, image, |_| false)?.judge()
}

/// Requires that every write completed before `time` is there, and that the image is a cut.
pub fn check_kept_before(log: &Log, time: u64, image: &[u8]) -> Result<Verdict, Violation> {
    Judge::new(log, image, |write| write.completed.is_some_and(|done| done < time))?.judge()
}

/// The promise of a plain disk with a cache: each sector on its own is whole, and no later write
/// that had to survive covers the write that it shows. Between two flushes, writes may be there in
/// part and in any order.
pub fn check_sectors(log: &Log, image: &[u8]) -> Result<Verdict, Violation> {
    let flushed = last_flush(log);
    sectors_by_themselves(log, image, |write| {
        write.completed.is_some_and(|done| write.fua || done < flushed)
    })
}

/// The promise of a plain disk whose cache survived: as [`check_sectors`], but every completed
/// write must survive.
pub fn check_sectors_accepted(log: &Log, image: &[u8]) -> Result<Verdict, Violation> {
    sectors_by_themselves(log, image, |write| write.completed.is_some())
}

fn sectors_by_themselves(
    log: &Log,
    image: &[u8],
    must: impl Fn(&Write) -> bool,
) -> Result<Verdict, Violation> {
    let mut judge = Judge::new(log, image, must)?;
    let covers = judge.covers(&judge.demanded);
    judge.settle_zeroes(&covers)?;
    judge.check_sectors(&covers)?;
    let kept = (0..log.writes.len()).filter(|&n| judge.observed[n] || judge.demanded[n]).count();
    let demanded = judge.demanded.iter().filter(|&&demanded| demanded).count();
    let completed = log.writes.iter().filter(|write| write.completed.is_some()).count();
    Ok(Verdict { kept, lost: completed.saturating_sub(kept), demanded })
}

fn last_flush(log: &Log) -> u64 {
    let flushes = log.flushes.iter().filter(|flush| flush.completed.is_some());
    flushes.map(|flush| flush.submitted).max().unwrap_or(0)
}

/// The origin of a sector's content, in terms of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SectorOrigin {
    /// The content from before this log.
    Base,
    /// The data of a write of this log.
    Write(usize),
    /// Zeroes that the base does not explain, or that a write of zeroes may explain too.
    Zeroes,
}

/// The newest write of the cut over a sector: the latest submission, and its write.
#[derive(Clone, Copy, Debug, Default)]
struct Cover {
    submitted: u64,
    by: usize,
}

struct Judge<'a> {
    log: &'a Log,
    origins: Vec<SectorOrigin>,
    demanded: Vec<bool>,
    observed: Vec<bool>,
    /// For each sector of zeroes, the only write of zeroes that can explain it, once that is
    /// certain.
    maker: Vec<Option<usize>>,
    zero_writes: Vec<Vec<usize>>,
}

impl<'a> Judge<'a> {
    fn new(log: &'a Log, image: &[u8], must: impl Fn(&Write) -> bool) -> Result<Self, Violation> {
        if image.len() != log.base.len() * SECTOR_BYTES {
            let (have, want) = (image.len(), log.base.len() * SECTOR_BYTES);
            return Err(Violation(format!("the image has {have} bytes, the volume {want}")));
        }
        let demanded: Vec<bool> = log.writes.iter().map(must).collect();
        let mut zero_writes = vec![Vec::new(); log.base.len()];
        for (place, write) in
            log.writes.iter().enumerate().filter(|(_, write)| write.kind == Kind::Zero)
        {
            for sector in sectors(write) {
                zero_writes[sector].push(place);
            }
        }
        let mut seen = Vec::with_capacity(log.base.len());
        for (sector, bytes) in image.chunks(SECTOR_BYTES).enumerate() {
            seen.push(identify(log, sector, bytes, !zero_writes[sector].is_empty())?);
        }
        let mut observed = vec![false; log.writes.len()];
        for &what in &seen {
            if let SectorOrigin::Write(place) = what {
                observed[place] = true;
            }
        }
        let maker = vec![None; log.base.len()];
        Ok(Judge { log, origins: seen, demanded, observed, maker, zero_writes })
    }

    fn judge(mut self) -> Result<Verdict, Violation> {
        // Each write of zeroes that is certain may demand further writes, which may rule out other
        // explanations.
        let in_cut = loop {
            let in_cut = self.cut();
            let covers = self.covers(&in_cut);
            if !self.settle_zeroes(&covers)? {
                self.check_sectors(&covers)?;
                break in_cut;
            }
        };
        self.check_one_order(&in_cut)?;
        let writes = self.log.writes.iter().zip(&in_cut);
        Ok(Verdict {
            kept: in_cut.iter().filter(|&&kept| kept).count(),
            lost: writes.filter(|(write, kept)| write.completed.is_some() && !**kept).count(),
            demanded: self.demanded.iter().filter(|&&demanded| demanded).count(),
        })
    }

    /// P: what is observed or demanded, and all that completed before the last of these was
    /// submitted.
    fn cut(&self) -> Vec<bool> {
        let writes = &self.log.writes;
        let given = |place: usize| self.observed[place] || self.demanded[place];
        let last = (0..writes.len())
            .filter(|&place| given(place))
            .map(|place| writes[place].submitted)
            .max();
        let last = last.unwrap_or(0);
        (0..writes.len())
            .map(|place| given(place) || writes[place].completed.is_some_and(|done| done < last))
            .collect()
    }

    fn covers(&self, in_cut: &[bool]) -> Vec<Cover> {
        let mut covers = vec![Cover::default(); self.origins.len()];
        for (place, write) in self.log.writes.iter().enumerate().filter(|&(place, _)| in_cut[place])
        {
            for sector in sectors(write) {
                if write.submitted > covers[sector].submitted {
                    covers[sector] = Cover { submitted: write.submitted, by: place };
                }
            }
        }
        covers
    }

    /// Finds the writes that can explain each sector of zeroes; true when that added a write to the
    /// cut.
    fn settle_zeroes(&mut self, covers: &[Cover]) -> Result<bool, Violation> {
        let mut grown = false;
        for (sector, cover) in covers.iter().enumerate() {
            if self.origins[sector] != SectorOrigin::Zeroes {
                continue;
            }
            // Zeroes from before explain the sector only where no write of the cut lies over it.
            let by_base = self.log.base[sector].is_none() && cover.submitted == 0;
            let able = |&place: &usize| ends_after(&self.log.writes[place], cover.submitted);
            let mut makers = self.zero_writes[sector].iter().copied().filter(able);
            match (makers.next(), makers.next()) {
                (None, _) if !by_base => return Err(self.missing(sector, cover, "zeroes")),
                // The single explanation must have happened, so it counts as seen, and the cut may
                // grow by it.
                (Some(only), None) if !by_base => {
                    self.maker[sector] = Some(only);
                    grown |= !self.observed[only];
                    self.observed[only] = true;
                }
                _ => {}
            }
        }
        Ok(grown)
    }

    fn check_sectors(&self, covers: &[Cover]) -> Result<(), Violation> {
        for (sector, cover) in covers.iter().enumerate() {
            match self.origins[sector] {
                SectorOrigin::Base if cover.submitted > 0 => {
                    return Err(self.missing(sector, cover, "what was there before"));
                }
                SectorOrigin::Write(place)
                    if !ends_after(&self.log.writes[place], cover.submitted) =>
                {
                    let what = format!("write {}", self.log.writes[place].id);
                    return Err(self.missing(sector, cover, &what));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn missing(&self, sector: usize, cover: &Cover, what: &str) -> Violation {
        if cover.submitted == 0 {
            return Violation(format!(
                "sector {sector} shows {what}, and nothing in the log or before it made them"
            ));
        }
        let by = &self.log.writes[cover.by];
        let why = if self.demanded[cover.by] {
            "had to survive"
        } else if self.observed[cover.by] {
            "is seen elsewhere"
        } else {
            "completed before something that is there was submitted"
        };
        Violation(format!(
            "sector {sector} shows {what}, but the later write {} (sectors {}..{}, {:?}) {why}",
            by.id,
            by.sector,
            by.sector + u64::from(by.count),
            by.kind
        ))
    }

    /// For each sector the write that the image shows there; `usize::MAX`: none.
    fn top_writes(&self) -> Vec<usize> {
        let mut over = vec![usize::MAX; self.origins.len()];
        for (sector, what) in self.origins.iter().enumerate() {
            match (what, self.maker[sector]) {
                (&SectorOrigin::Write(place), _) | (_, Some(place)) => over[sector] = place,
                _ => {}
            }
        }
        over
    }

    /// Clause 3, by sorting the cut: edges are → (through the line of completions) and "under what
    /// is seen".
    fn check_one_order(&self, in_cut: &[bool]) -> Result<(), Violation> {
        let writes = &self.log.writes;
        let over = self.top_writes();
        let members: Vec<usize> = (0..writes.len()).filter(|&place| in_cut[place]).collect();
        // Nodes: the writes, then one per completion in order of time. A completion follows its
        // write and the completion before it; a write follows the last completion before its
        // submission.
        let mut completions: Vec<(u64, usize)> = members
            .iter()
            .filter_map(|&place| writes[place].completed.map(|done| (done, place)))
            .collect();
        completions.sort_unstable();
        let first_completion = writes.len();
        let mut after: Vec<Vec<usize>> = vec![Vec::new(); first_completion + completions.len()];
        let mut before = vec![0_usize; after.len()];
        let mut edge = |from: usize, to: usize| {
            after[from].push(to);
            before[to] += 1;
        };
        for (number, &(_, place)) in completions.iter().enumerate() {
            edge(place, first_completion + number);
            if number > 0 {
                // A line of completions stands for the edges between all pairs, of which there
                // would be the square.
                edge(first_completion + number - 1, first_completion + number);
            }
        }
        for &place in &members {
            let earlier = completions.partition_point(|&(done, _)| done < writes[place].submitted);
            if earlier > 0 {
                edge(first_completion + earlier - 1, place);
            }
            let mut tops: Vec<usize> = sectors(&writes[place]).map(|sector| over[sector]).collect();
            tops.sort_unstable();
            tops.dedup();
            for top in tops.into_iter().filter(|&top| top != usize::MAX && top != place) {
                edge(place, top);
            }
        }
        let nodes = members.len() + completions.len();
        let mut free: Vec<usize> =
            members.iter().copied().filter(|&place| before[place] == 0).collect();
        let mut sorted = 0;
        while let Some(node) = free.pop() {
            sorted += 1;
            for &next in &after[node] {
                before[next] -= 1;
                if before[next] == 0 {
                    free.push(next);
                }
            }
        }
        // What could not be sorted is in a circle: no order gives these sectors.
        if sorted == nodes {
            return Ok(());
        }
        let stuck = members
            .iter()
            .filter(|&&place| before[place] > 0)
            .map(|&place| writes[place].id.to_string());
        let stuck: Vec<String> = stuck.take(8).collect();
        Err(Violation(format!(
            "no one order of the writes gives this image; among them {}",
            stuck.join(", ")
        )))
    }
}

fn sectors(write: &Write) -> std::ops::Range<usize> {
    write.sector as usize..write.sector as usize + write.count as usize
}

/// Whether the write may lie over one submitted at `submitted`: it had not completed by then.
fn ends_after(write: &Write, submitted: u64) -> bool {
    write.completed.is_none_or(|done| done >= submitted)
}

fn identify(
    log: &Log,
    sector: usize,
    bytes: &[u8],
    zeroed: bool,
) -> Result<SectorOrigin, Violation> {
    let stamp = match Sector::read(bytes) {
        Sector::Empty if log.base[sector].is_none() && !zeroed => return Ok(SectorOrigin::Base),
        Sector::Empty => return Ok(SectorOrigin::Zeroes),
        Sector::Damaged => return Err(Violation(format!("sector {sector} is torn or foreign"))),
        Sector::Stamped(stamp) => stamp,
    };
    if stamp.run != log.run {
        return Err(Violation(format!("sector {sector} is of run {}, not {}", stamp.run, log.run)));
    }
    if stamp.sector != sector as u64 {
        return Err(Violation(format!(
            "sector {sector} holds what belongs at sector {}",
            stamp.sector
        )));
    }
    let Some(place) = log.find(stamp.write) else {
        if log.base[sector] == Some(stamp.write) {
            return Ok(SectorOrigin::Base);
        }
        return Err(Violation(format!(
            "sector {sector} holds write {}, which was gone or never made",
            stamp.write
        )));
    };
    let write = &log.writes[place];
    let ours = write.kind == Kind::Data
        && stamp.index < write.count
        && write.sector + u64::from(stamp.index) == stamp.sector
        && write.count == stamp.count;
    if !ours {
        return Err(Violation(format!(
            "sector {sector}: its stamp is not what write {} wrote",
            write.id
        )));
    }
    Ok(SectorOrigin::Write(place))
}
