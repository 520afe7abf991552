//! Sizes and durations as people write them.
//!
//! Invariants: sizes are powers of 1024 whatever the spelling (`G`, `Gi`, `GiB`); nothing is
//! rounded silently: a value that is not a whole number of bytes or milliseconds is refused.
//!
//! Not here: moments and past states (`moment` of `crates/sawmill`), the sizes that a driver writes
//! (`sawmill_driver::client::parse_size`).

use std::time::Duration;

const SIZE_UNITS: [(char, u32); 5] = [('K', 10), ('M', 20), ('G', 30), ('T', 40), ('P', 50)];

/// Parses a size in bytes: `4096`, `512M`, `10G`, `1.5T`, `8MiB`.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let wrong = || {
        format!(
            "'{text}' is not a size; write a number with K, M, G, T or P (of 1024), as in 10G or \
            512M"
        )
    };
    let (number, unit) = split_unit(text);
    let shift = match unit {
        "" | "B" => 0,
        _ => {
            let mut letters = unit.chars();
            let letter = letters.next().ok_or_else(wrong)?.to_ascii_uppercase();
            let rest = letters.as_str();
            let (_, shift) =
                SIZE_UNITS.iter().find(|(name, _)| *name == letter).ok_or_else(wrong)?;
            // Not guessed: the two meanings of `GB` differ by 7 %.
            if rest.eq_ignore_ascii_case("b") {
                return Err(format!(
                    "'{text}' could mean powers of 1000 or of 1024; write {number}{letter}iB or \
                     {number}{letter} (of 1024), or the number of bytes"
                ));
            }
            if !(rest.is_empty()
                || rest.eq_ignore_ascii_case("i")
                || rest.eq_ignore_ascii_case("ib"))
            {
                return Err(wrong());
            }
            *shift
        }
    };
    scale(number, 1 << shift).map_err(|fault| match fault {
        Fault::Number => wrong(),
        Fault::TooLarge => format!("'{text}' is larger than any size can be"),
        Fault::Fraction => format!("'{text}' is not a whole number of bytes"),
    })
}

/// Parses a size that must fit 32 bits.
pub fn parse_size_u32(text: &str) -> Result<u32, String> {
    let bytes = parse_size(text)?;
    u32::try_from(bytes)
        .map_err(|_| format!("'{text}' is too large; the most is {} bytes", u32::MAX))
}

/// Parses a duration: `500ms`, `30s`, `5m`, `2h`, `0`.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = || {
        format!(
            "'{text}' is not a duration; write a number with ms, s, m, h or d, as in 30s or 500ms"
        )
    };
    let (number, unit) = split_unit(text);
    let milliseconds: u64 = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" | "min" => 60 * 1000,
        "h" => 60 * 60 * 1000,
        "d" => 24 * 60 * 60 * 1000,
        // Zero is the same in every unit, so it needs none.
        "" if number == "0" => 1,
        "" => return Err(format!("'{text}' lacks a unit; write {text}s, {text}ms or {text}m")),
        _ => return Err(wrong()),
    };
    let total = scale(number, milliseconds).map_err(|fault| match fault {
        Fault::Number => wrong(),
        Fault::TooLarge => format!("'{text}' is longer than any duration can be"),
        Fault::Fraction => format!("'{text}' is finer than a millisecond"),
    })?;
    Ok(Duration::from_millis(total))
}

/// Parses a duration of whole seconds, as volumes store it.
pub fn parse_whole_seconds(text: &str) -> Result<Duration, String> {
    let duration = parse_duration(text)?;
    if duration.subsec_nanos() > 0 {
        return Err(format!("'{text}' is not a whole number of seconds; write 1s or more, or 0"));
    }
    Ok(duration)
}

enum Fault {
    Number,
    TooLarge,
    Fraction,
}

fn split_unit(text: &str) -> (&str, &str) {
    let text = text.trim();
    let at = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    (&text[..at], text[at..].trim_start())
}

/// `number * unit` without rounding.
fn scale(number: &str, unit: u64) -> Result<u64, Fault> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits_only = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
    let pointless = number.contains('.') && fraction.is_empty();
    if whole.is_empty()
        || pointless
        || !digits_only(whole)
        || !digits_only(fraction)
        // Eighteen digits times the largest unit fit 128 bits, and more digits than that are an
        // error.
        || fraction.len() > 18
    {
        return Err(Fault::Number);
    }
    // Only digits are left, so a failure to parse means too many of them.
    let base = whole.parse::<u64>().map_err(|_| Fault::TooLarge)?;
    let base = base.checked_mul(unit).ok_or(Fault::TooLarge)?;
    if fraction.is_empty() {
        return Ok(base);
    }
    let parts = fraction.parse::<u128>().map_err(|_| Fault::Number)? * u128::from(unit);
    let divisor = 10u128.pow(fraction.len() as u32);
    if !parts.is_multiple_of(divisor) {
        return Err(Fault::Fraction);
    }
    let rest = u64::try_from(parts / divisor).map_err(|_| Fault::TooLarge)?;
    base.checked_add(rest).ok_or(Fault::TooLarge)
}

/// A size for people: three significant digits at least, `10 GiB`, `1.50 TiB`, `512 B`.
pub fn human_size(bytes: u64) -> String {
    const NAMES: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let step = if bytes == 0 { 0 } else { (63 - bytes.leading_zeros()) / 10 };
    let unit = 1u64 << (10 * step);
    let name = NAMES[step as usize];
    if bytes.is_multiple_of(unit) {
        return format!("{} {name}", bytes / unit);
    }
    let value = bytes as f64 / unit as f64;
    let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.digits$} {name}")
}

/// A size as an option takes it: `8M`, `4K`, `0`. [`parse_size`] reads it back exactly.
///
/// An option gives its default to clap with this, so that the help shows the constant itself.
pub fn exact_size(bytes: u64) -> String {
    let divides = |(_, shift): &&(char, u32)| bytes != 0 && bytes.is_multiple_of(1 << shift);
    match SIZE_UNITS.iter().rev().find(divides) {
        Some((letter, shift)) => format!("{}{letter}", bytes >> shift),
        None => bytes.to_string(),
    }
}

/// A duration as an option takes it: `30s`, `500ms`, `0`. [`parse_duration`] reads it back, except
/// for what is finer than a millisecond, which no option takes.
pub fn exact_duration(duration: Duration) -> String {
    const UNITS: [(&str, u128); 5] =
        [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)];
    let milliseconds = duration.as_millis();
    let divides = |(_, unit): &&(&str, u128)| milliseconds.is_multiple_of(*unit);
    match UNITS.iter().find(divides) {
        Some((name, unit)) if milliseconds > 0 => format!("{}{name}", milliseconds / unit),
        _ => "0".to_owned(),
    }
}

/// A count for people, with commas between groups of three digits: `1,234,567`.
pub fn human_count(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A duration for people: `850 ms`, `12.5 s`, `3 min 20 s`, `5 h 2 min`, `3 d 4 h`.
pub fn human_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0 if duration.as_millis() == 0 => format!("{} us", duration.as_micros()),
        0 => format!("{} ms", duration.as_millis()),
        1..60 => format!("{:.1} s", duration.as_secs_f64()),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3600..86400 => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
        _ => format!("{} d {} h", seconds / 86400, seconds / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_powers_of_1024() {
        let cases = [
            ("4096", 4096),
            ("0", 0),
            ("10G", 10 << 30),
            ("10g", 10 << 30),
            ("512M", 512 << 20),
            ("1T", 1 << 40),
            ("8MiB", 8 << 20),
            ("8Mi", 8 << 20),
            ("1.5K", 1536),
            ("0.5G", 1 << 29),
            ("64 K", 64 << 10),
            ("100B", 100),
        ];
        for (text, bytes) in cases {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn a_wrong_size_is_refused_with_what_to_write() {
        for text in ["", "G", "ten", "-1G", "1X", "1.G", ".5G", "1..5G", "1e9", "10 G B", "1Gx"] {
            let error = parse_size(text).unwrap_err();
            assert!(error.contains(&format!("'{text}'")) && error.contains("10G"), "{error}");
        }
        assert!(parse_size("10GB").unwrap_err().contains("10GiB"));
        assert!(parse_size("0.3K").unwrap_err().contains("whole number of bytes"));
        assert!(parse_size("99999999999999999999").unwrap_err().contains("larger"));
        assert!(parse_size("20000P").unwrap_err().contains("larger"));
        assert!(parse_size_u32("4G").unwrap_err().contains("too large"));
    }

    #[test]
    fn durations_need_a_unit_unless_zero() {
        assert_eq!(parse_duration("30s"), Ok(Duration::from_secs(30)));
        assert_eq!(parse_duration("5m"), Ok(Duration::from_secs(300)));
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_duration("2h"), Ok(Duration::from_secs(7200)));
        assert_eq!(parse_duration("0"), Ok(Duration::ZERO));
        assert!(parse_duration("30").unwrap_err().contains("30s"));
        assert!(parse_duration("soon").unwrap_err().contains("'soon'"));
        assert!(parse_duration("0.0001s").unwrap_err().contains("finer"));
        assert_eq!(parse_whole_seconds("1.5m"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_whole_seconds("0"), Ok(Duration::ZERO));
        for rounded_away in ["500ms", "1.5s"] {
            assert!(parse_whole_seconds(rounded_away).unwrap_err().contains("whole number"));
        }
    }

    #[test]
    fn sizes_are_shown_exactly_where_they_are_round() {
        let cases = [
            (0, "0 B"),
            (512, "512 B"),
            (1024, "1 KiB"),
            (10 << 30, "10 GiB"),
            (1536, "1.50 KiB"),
            (123 << 20 | 1 << 19, "124 MiB"),
            (12 << 20 | 1 << 19, "12.5 MiB"),
            (u64::MAX, "16.0 EiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(human_size(bytes), text);
        }
    }

    #[test]
    fn what_is_shown_exactly_reads_back_as_itself() {
        for bytes in [0, 1, 4096, 8 << 20, 10 << 30, 1 << 50] {
            assert_eq!(parse_size(&human_size(bytes)), Ok(bytes));
        }
    }

    #[test]
    fn what_an_option_shows_as_its_default_is_read_back_exactly() {
        for bytes in [0, 1, 1000, 4096, 4097, 8 << 20, 3 << 29, 10 << 30, 1 << 50, u64::MAX] {
            assert_eq!(parse_size(&exact_size(bytes)), Ok(bytes));
        }
        for ms in [0, 1, 500, 1000, 1500, 5000, 60_000, 90_000, 86_400_000, u64::MAX] {
            let duration = Duration::from_millis(ms);
            assert_eq!(parse_duration(&exact_duration(duration)), Ok(duration));
        }
        assert_eq!((exact_size(0), exact_size(1 << 30)), ("0".into(), "1G".into()));
        assert_eq!(exact_duration(Duration::from_secs(30)), "30s");
    }

    #[test]
    fn counts_are_grouped_by_thousands() {
        assert_eq!(human_count(0), "0");
        assert_eq!(human_count(999), "999");
        assert_eq!(human_count(1000), "1,000");
        assert_eq!(human_count(1_234_567), "1,234,567");
    }

    #[test]
    fn durations_are_shown_in_their_own_size() {
        assert_eq!(human_duration(Duration::from_micros(12)), "12 us");
        assert_eq!(human_duration(Duration::from_millis(850)), "850 ms");
        assert_eq!(human_duration(Duration::from_millis(12_500)), "12.5 s");
        assert_eq!(human_duration(Duration::from_secs(200)), "3 min 20 s");
        assert_eq!(human_duration(Duration::from_secs(90_000)), "1 d 1 h");
    }
}
