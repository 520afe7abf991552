//! States of the past as people write them: `disk1@NAME`, `disk1@2026-11-21T10:00:00Z`, `disk1@position:N`.
//!
//! Invariant: what `moment` shows, `parse_cut` reads back as the same millisecond.

use sawmill_volume::Cut;

use crate::exit::{Failure, Result};

const DAY_MS: u64 = 86_400_000;

/// Reads what follows the `@`, or `--to`.
pub(crate) fn parse_cut(text: &str) -> Result<Cut> {
    let wrong = |why: &str| {
        Failure::usage(format!(
            "'{text}' names no state of the past ({why}); write the name of a snapshot, a time such as \
             2026-11-21T10:00:00Z, or position:N"
        ))
    };
    if let Some(number) = text.strip_prefix("position:") {
        return number.parse().map(Cut::Position).map_err(|_| wrong("the position is no whole number"));
    }
    if text.contains(':') {
        return parse_moment(text).map(Cut::Time).ok_or_else(|| wrong("it is no time"));
    }
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if text.is_empty() || text.len() > 128 || text.starts_with('.') || !text.chars().all(allowed) {
        return Err(wrong("no snapshot can be called that"));
    }
    Ok(Cut::Snapshot(text.to_owned()))
}

/// `YYYY-MM-DDTHH:MM:SS[.mmm]` and `Z` or an offset such as `+01:00`, as milliseconds since 1970.
fn parse_moment(text: &str) -> Option<u64> {
    let (date, rest) = text.split_once(['T', 't', ' '])?;
    let zone_at = rest.find(['Z', 'z', '+', '-'])?;
    let (time, zone) = rest.split_at(zone_at);
    let [year, month, day] = numbers(date, '-', [4, 2, 2])?;
    let (time, fraction) = time.split_once('.').unwrap_or((time, ""));
    let [hour, minute, second] = numbers(time, ':', [2, 2, 2])?;
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days_in_month = match month {
        2 => 28 + u64::from(leap),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    };
    let fits = (1..=12).contains(&month) && (1..=days_in_month).contains(&day) && year >= 1970;
    if !fits || hour > 23 || minute > 59 || second > 59 {
        return None;
    }
    let milliseconds = match fraction.len() {
        0 if !rest[..zone_at].contains('.') => 0,
        length @ 1..=3 => digits(fraction)? * 10u64.pow(3 - length as u32),
        _ => return None,
    };
    let seconds = days_before(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second;
    let ms = seconds * 1000 + milliseconds;
    if zone.eq_ignore_ascii_case("z") {
        return Some(ms);
    }
    let (sign, offset) = zone.split_at(1);
    let [hours, minutes] = numbers(offset, ':', [2, 2])?;
    let offset_ms = (hours * 3600 + minutes * 60) * 1000;
    if hours > 23 || minutes > 59 {
        return None;
    }
    if sign == "+" { ms.checked_sub(offset_ms) } else { ms.checked_add(offset_ms) }
}

fn digits(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

fn numbers<const N: usize>(text: &str, between: char, lengths: [usize; N]) -> Option<[u64; N]> {
    let mut parts = text.split(between);
    let mut found = [0; N];
    for (number, length) in found.iter_mut().zip(lengths) {
        *number = parts.next().filter(|part| part.len() == length).and_then(digits)?;
    }
    parts.next().is_none().then_some(found)
}

/// Days from 1970-01-01 to a date, by the Gregorian calendar.
fn days_before(year: u64, month: u64, day: u64) -> u64 {
    // Years are counted from March, so that the leap day is the last of its year.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let leap_days = year / 4 - year / 100 + year / 400;
    year * 365 + leap_days + (153 * month + 2) / 5 + day - 1 - 719_468
}

/// A moment as `parse_cut` reads it.
pub(crate) fn moment(unix_ms: u64) -> String {
    let shown = crate::units::human_time(unix_ms);
    let shown = shown.trim_end_matches(" UTC").replacen(' ', "T", 1);
    match unix_ms % DAY_MS % 1000 {
        0 => format!("{shown}Z"),
        milliseconds => format!("{shown}.{milliseconds:03}Z"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_read_back_as_it_is_shown() {
        for unix_ms in [0, 951_782_400_000, 1_709_251_199_999, 4_107_542_400_001, 1_795_244_889_000] {
            assert_eq!(parse_cut(&moment(unix_ms)).unwrap(), Cut::Time(unix_ms), "{}", moment(unix_ms));
        }
        let zoned = parse_cut("2026-11-21T11:00:00.5+01:00").unwrap();
        assert_eq!(zoned, parse_cut("2026-11-21T10:00:00.500Z").unwrap());
    }

    #[test]
    fn names_and_positions_are_told_apart() {
        assert_eq!(parse_cut("before").unwrap(), Cut::Snapshot("before".into()));
        assert_eq!(parse_cut("2026-11-21").unwrap(), Cut::Snapshot("2026-11-21".into()));
        assert_eq!(parse_cut("position:77").unwrap(), Cut::Position(77));
        for text in ["", ".x", "a/b", "position:x", "10:00", "2026-02-30T00:00:00Z", "2026-11-21T10:00:00"] {
            let error = parse_cut(text).unwrap_err().to_string();
            assert!(error.contains("position:N"), "{text}: {error}");
        }
    }
}
