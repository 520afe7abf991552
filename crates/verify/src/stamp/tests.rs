//! The judge judged: hand-made images of an eight-sector volume, each legal or illegal by the
//! definition.
//!
//! A log is written as `A 0+4 1-2; B 2+4 3-`: write A covers sectors 0 to 3, was submitted at 1 and
//! completed at 2; B was submitted at 3 and never completed. `zero` and `fua` may follow; `flush
//! 5-6` is a flush. An image has one letter per sector: a write's letter is its stamp there, `.`
//! zeroes, `q` and `r` older writes, `!` garbage, `a` the stamp of write A one sector off, `$` a
//! stamp of another run.

use super::{
    Flush, Kind, Log, SECTOR_BYTES, Sector, Stamp, Verdict, Violation, Write, check_cut,
    check_flushed_kept, check_nothing_accepted_lost,
};

const RUN: u64 = 77;
const SECTORS: u64 = 8;

fn id_of(letter: char) -> u64 {
    u64::from(u32::from(letter))
}

fn times(text: &str) -> (u64, Option<u64>) {
    let (submitted, completed) = text.split_once('-').expect("a row names two times");
    (submitted.parse().expect("a time"), completed.parse().ok())
}

fn log(text: &str, base: &str) -> Log {
    let mut log = Log::new(RUN, SECTORS);
    for (sector, letter) in base.chars().enumerate() {
        log.base[sector] = (letter != '.').then(|| id_of(letter));
    }
    for entry in text.split(';').map(str::trim).filter(|entry| !entry.is_empty()) {
        let words: Vec<&str> = entry.split_whitespace().collect();
        if words[0] == "flush" {
            let (submitted, completed) = times(words[1]);
            log.flushes.push(Flush { submitted, completed });
            continue;
        }
        let (sector, count) = words[1].split_once('+').expect("a row names a range");
        let (submitted, completed) = times(words[2]);
        let kind = if words.contains(&"zero") { Kind::Zero } else { Kind::Data };
        log.add(Write {
            id: id_of(words[0].chars().next().expect("a letter")),
            kind,
            sector: sector.parse().expect("a sector"),
            count: count.parse().expect("a count"),
            fua: words.contains(&"fua"),
            submitted,
            completed,
        });
    }
    log
}

fn image(log: &Log, letters: &str) -> Vec<u8> {
    let mut image = vec![0; SECTORS as usize * SECTOR_BYTES];
    for (sector, (letter, into)) in letters.chars().zip(image.chunks_mut(SECTOR_BYTES)).enumerate()
    {
        let sector = sector as u64;
        let plain = |run, write| Stamp { run, sector, write, index: 0, count: 1 };
        match letter {
            '.' => {}
            '!' => into.fill(0xa5),
            '$' => plain(RUN + 1, 1).put(into),
            'q' | 'r' => plain(RUN, id_of(letter)).put(into),
            _ => {
                let write =
                    log.writes[log.find(id_of(letter.to_ascii_uppercase())).expect("a write")];
                let off = u64::from(letter.is_ascii_lowercase());
                let index = (sector + off).wrapping_sub(write.sector) as u32;
                Stamp {
                    run: RUN,
                    sector: sector + off,
                    write: write.id,
                    index,
                    count: write.count,
                }
                .put(into);
            }
        }
    }
    image
}

fn judge(demand: &str, text: &str, base: &str, letters: &str) -> Result<Verdict, Violation> {
    let log = log(text, base);
    let image = image(&log, letters);
    match demand {
        "cut" => check_cut(&log, &image),
        "flushed" => check_flushed_kept(&log, &image),
        "accepted" => check_nothing_accepted_lost(&log, &image),
        other => panic!("no such demand: {other}"),
    }
}

const NOTHING: &str = "........";

/// Demand, log, base, image, and why it is legal.
const LEGAL: &[(&str, &str, &str, &str, &str)] = &[
    ("accepted", "", NOTHING, NOTHING, "nothing was done"),
    ("accepted", "A 0+4 1-2", NOTHING, "AAAA....", "one write, there"),
    ("accepted", "A 0+4 1-", NOTHING, NOTHING, "an unanswered write may be absent"),
    ("accepted", "A 0+4 1-", NOTHING, "AAAA....", "an unanswered write may be there"),
    ("accepted", "A 0+4 1-2; B 2+4 3-4", NOTHING, "AABBBB..", "the later over the earlier"),
    ("accepted", "A 0+4 1-3; B 2+4 2-4", NOTHING, "AABBBB..", "concurrent: B won"),
    ("accepted", "A 0+4 1-3; B 2+4 2-4", NOTHING, "AAAABB..", "concurrent: A won"),
    ("accepted", "A 0+2 1-2; B 0+2 3-4", NOTHING, "BB......", "a write wholly covered"),
    ("accepted", "A 0+2 1-2; B 0+2 3-", NOTHING, "AA......", "the unanswered one absent"),
    ("accepted", "A 0+2 1-2; Z 0+2 3-4 zero", NOTHING, NOTHING, "zeroed"),
    ("accepted", "A 0+4 1-2; Z 1+2 3-4 zero", NOTHING, "A..A....", "a hole in the middle"),
    ("accepted", "A 0+2 1-2; Z 0+2 3- zero", NOTHING, "AA......", "an unanswered zeroing absent"),
    ("accepted", "A 0+2 1-4; Z 0+2 2-3 zero", NOTHING, NOTHING, "concurrent zeroing won"),
    ("accepted", "A 0+2 1-2", "qqqq....", "AAqq....", "over an older image"),
    ("accepted", "Z 0+4 1-2 zero", "qqqq....", NOTHING, "older data zeroed"),
    ("cut", "A 0+2 1-2; B 2+2 3-4", NOTHING, NOTHING, "the cut before everything"),
    ("cut", "A 0+2 1-2; B 2+2 3-4", NOTHING, "AA......", "the cut between"),
    ("cut", "A 0+2 1-2; B 2+2 3-4", NOTHING, "AABB....", "the cut after everything"),
    (
        "cut",
        "A 0+2 1-4; B 2+2 2-3",
        NOTHING,
        "..BB....",
        "concurrent, so either may be before the cut",
    ),
    ("cut", "A 0+2 1-2; B 0+2 3-4; C 4+1 5-6", NOTHING, "AA......", "an overwrite after the cut"),
    ("cut", "A 0+2 1-2; B 0+2 3-4; C 4+1 5-6", NOTHING, "BB..C...", "A is under B"),
    (
        "cut",
        "A 0+1 1-2; Z 0+1 3-4 zero; B 1+1 5-6",
        NOTHING,
        ".B......",
        "B demands the zeroing, which is there",
    ),
    ("cut", "A 0+1 1-2", "qr......", "qr......", "the older image alone"),
    (
        "flushed",
        "A 0+2 1-2; flush 3-4; B 2+2 5-6",
        NOTHING,
        "AA......",
        "flushed kept, unflushed lost",
    ),
    ("flushed", "A 0+2 1-2; flush 3-4; B 2+2 5-6", NOTHING, "AABB....", "more than demanded"),
    ("flushed", "A 0+2 1-2; flush 3-", NOTHING, NOTHING, "an unanswered flush demands nothing"),
    ("flushed", "A 0+2 1-5; flush 3-4", NOTHING, NOTHING, "not completed before the flush"),
    (
        "flushed",
        "A 0+2 1-2; flush 3-4; B 0+2 5-",
        NOTHING,
        "BB......",
        "overwritten by an unanswered write",
    ),
    ("flushed", "A 0+1 1-2 fua; B 1+1 3-4", NOTHING, "A.......", "FUA kept, the rest lost"),
    ("flushed", "A 0+2 1-2; Z 0+2 3-4 zero; flush 5-6", NOTHING, NOTHING, "the flushed zeroing"),
];

/// Demand, log, base, image, and why it is illegal.
const ILLEGAL: &[(&str, &str, &str, &str, &str)] = &[
    ("accepted", "A 0+4 1-2", NOTHING, NOTHING, "an accepted write is gone"),
    ("accepted", "A 0+4 1-2", NOTHING, "AAA.....", "an accepted write is torn"),
    ("accepted", "A 0+4 1-", NOTHING, "A.......", "an unanswered write is torn"),
    ("accepted", "A 0+2 1-2; B 0+2 3-4", NOTHING, "AA......", "the earlier over the later"),
    ("accepted", "A 0+2 1-2; B 0+2 3-4", NOTHING, "BA......", "half of the later"),
    ("accepted", "A 0+4 1-3; B 0+4 2-4", NOTHING, "AABB....", "two concurrent writes mixed"),
    ("accepted", "A 0+4 1-3; B 2+4 2-4", NOTHING, "AABABB..", "two concurrent writes interleaved"),
    ("accepted", "A 0+2 1-2; Z 0+2 3-4 zero", NOTHING, "AA......", "an accepted zeroing is gone"),
    ("accepted", "A 0+2 1-2; Z 0+2 3-4 zero", NOTHING, "A.......", "an accepted zeroing is torn"),
    ("accepted", "A 0+2 1-2", "qqqq....", "qqqq....", "an accepted write over older data is gone"),
    ("accepted", "A 0+2 1-2", "qqqq....", "AA.q....", "older data turned to zeroes"),
    ("accepted", "A 0+2 1-2", "q.......", "AAr.....", "a write that was gone came back"),
    ("accepted", "A 0+2 1-2", NOTHING, "AA..!...", "garbage where nothing was written"),
    ("accepted", "A 0+2 1-2", NOTHING, "A!......", "garbage in a write"),
    ("accepted", "A 0+3 1-2", NOTHING, "AaA.....", "a sector at the wrong place"),
    ("accepted", "A 0+2 1-2", NOTHING, "AA$.....", "a sector of another run"),
    ("accepted", "A 0+2 1-2", NOTHING, "AAA.....", "a write longer than it was"),
    ("cut", "A 0+2 1-2; B 2+2 3-4", NOTHING, "..BB....", "the later without the earlier"),
    ("cut", "A 0+2 1-2; B 2+2 3-", NOTHING, "..BB....", "the unanswered later without the earlier"),
    (
        "cut",
        "A 0+2 1-2; B 0+2 3-4; C 4+1 5-6",
        NOTHING,
        "AA..C...",
        "a write in the middle is gone",
    ),
    ("cut", "A 0+4 1-2", NOTHING, "AA......", "a torn write at the cut"),
    (
        "cut",
        "A 0+1 1-2; Z 0+1 3-4 zero; B 1+1 5-6",
        NOTHING,
        "AB......",
        "a zeroing before the cut is gone",
    ),
    ("cut", "Z 0+1 1-2 zero; B 1+1 3-4", "q.......", "qB......", "the same over older data"),
    ("cut", "A 0+1 1-2; B 1+1 3-4; C 2+1 5-6", NOTHING, "A.C.....", "a hole in the order"),
    ("cut", "A 0+2 1-3; B 1+2 2-4; C 2+2 5-6", NOTHING, "..CC....", "everything before C is gone"),
    ("cut", "A 0+1 1-2", NOTHING, "!.......", "garbage is never a cut"),
    ("cut", "Z 0+2 3-4 zero; A 4+1 1-2", "qq......", ".q..A...", "a torn zeroing"),
    ("flushed", "A 0+2 1-2; flush 3-4", NOTHING, NOTHING, "a flushed write is gone"),
    ("flushed", "A 0+2 1-2; flush 3-4; B 0+2 5-", NOTHING, "BA......", "torn over flushed data"),
    ("flushed", "A 0+1 1-2 fua", NOTHING, NOTHING, "a FUA write is gone"),
    (
        "flushed",
        "A 0+1 1-2; B 1+1 3-4 fua",
        NOTHING,
        ".B......",
        "FUA kept without what was before it",
    ),
    (
        "flushed",
        "A 0+2 1-2; Z 0+2 3-4 zero; flush 5-6",
        NOTHING,
        "AA......",
        "a flushed zeroing is gone",
    ),
    ("accepted", "A 0+3 1-4; B 1+3 2-5; C 2+2 3-6", NOTHING, "ABAC....", "a circle of three"),
];

#[test]
fn every_legal_image_is_accepted() {
    assert!(LEGAL.len() >= 20);
    for (demand, text, base, letters, why) in LEGAL {
        if let Err(violation) = judge(demand, text, base, letters) {
            panic!(
                "{demand} [{text}] base {base} image {letters} is legal ({why}), but: {violation}"
            );
        }
    }
}

#[test]
fn every_illegal_image_is_rejected() {
    assert!(ILLEGAL.len() >= 20);
    for (demand, text, base, letters, why) in ILLEGAL {
        let judged = judge(demand, text, base, letters);
        assert!(judged.is_err(), "{demand} [{text}] base {base} image {letters} is illegal: {why}");
    }
}

#[test]
fn the_verdict_counts_what_was_kept_lost_and_demanded() {
    let verdict = judge("cut", "A 0+2 1-2; B 2+2 3-4; C 4+2 5-", NOTHING, "AA......");
    assert_eq!(verdict, Ok(Verdict { kept: 1, lost: 1, demanded: 0 }));
    let verdict = judge("accepted", "A 0+2 1-2; B 2+2 3-4; C 4+2 5-", NOTHING, "AABBCC..");
    assert_eq!(verdict, Ok(Verdict { kept: 3, lost: 0, demanded: 2 }));
}

#[test]
fn a_violation_names_the_sector_and_the_missing_write() {
    let Err(Violation(text)) = judge("accepted", "A 3+1 1-2", NOTHING, NOTHING) else {
        panic!("a lost write was not seen");
    };
    assert!(text.contains("sector 3") && text.contains("write 65"), "{text}");
}

#[test]
fn an_image_of_the_wrong_size_is_refused() {
    let log = log("A 0+1 1-2", NOTHING);
    assert!(check_cut(&log, &[0; SECTOR_BYTES]).is_err());
}

#[test]
fn what_a_rebase_left_out_may_not_come_back() {
    let mut log = log("A 0+1 1-2; B 1+1 3-4", NOTHING);
    let (full, cut) = (image(&log, "AB......"), image(&log, "A......."));
    assert!(check_cut(&log, &cut).is_ok());
    log.rebase(&cut);
    assert!(check_nothing_accepted_lost(&log, &cut).is_ok());
    assert!(
        check_nothing_accepted_lost(&log, &full).is_err(),
        "B was rolled back and is here again"
    );
}

#[test]
fn what_one_branch_of_a_log_wrote_is_foreign_to_the_other() {
    let root = log("A 0+1 1-2", NOTHING);
    let (mut one, mut other) = (root.branch(1), root.branch(2));
    for branch in [&mut one, &mut other] {
        let place = branch.submit(Kind::Data, 1, 1);
        branch.writes[place].completed = Some(branch.clock.tick());
    }
    let mut bytes = image(&root, "A.......");
    bytes[SECTOR_BYTES..2 * SECTOR_BYTES].copy_from_slice(&one.bytes_of(1));
    assert!(check_nothing_accepted_lost(&one, &bytes).is_ok());
    assert!(check_cut(&other, &bytes).is_err(), "the same write of another history");
}

#[test]
fn what_is_added_to_a_volume_holds_zeroes() {
    let mut log = log("A 0+1 1-2", NOTHING);
    let smaller = image(&log, "A.......");
    log.grow(SECTORS + 1);
    assert!(check_cut(&log, &smaller).is_err(), "the volume is larger");
    let larger = [&smaller[..], &[0; SECTOR_BYTES]].concat();
    assert!(check_nothing_accepted_lost(&log, &larger).is_ok());
}

#[test]
fn a_stamp_reads_back_and_any_flipped_bit_shows() {
    let stamp = Stamp { run: 1, sector: 2, write: 3, index: 0, count: 1 };
    let mut bytes = [0; SECTOR_BYTES];
    stamp.put(&mut bytes);
    assert_eq!(Sector::read(&bytes), Sector::Stamped(stamp));
    for bit in 0..SECTOR_BYTES * 8 {
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(Sector::read(&bytes), Sector::Damaged, "bit {bit}");
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
    assert_eq!(Sector::read(&[0; SECTOR_BYTES]), Sector::Empty);
}
