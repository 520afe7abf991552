//! Numbers in traces: whole, or with a decimal point. Exact: floating point is not used.
//! Not here: which addresses and times are plausible (`super`).

/// Bytes of a sector in every format that counts sectors.
pub(super) const SECTOR_BYTES: u64 = 512;

/// A whole number: digits alone, perhaps between spaces.
pub(super) fn whole(text: &str) -> Option<u64> {
    let text = text.trim();
    // `parse` would accept a plus sign.
    text.starts_with(|character: char| character.is_ascii_digit())
        .then(|| text.parse().ok())
        .flatten()
}

/// A number of 512-byte sectors as bytes; `None` where that exceeds 64 bits.
pub(super) fn sectors(text: &str) -> Option<u64> {
    whole(text)?.checked_mul(SECTOR_BYTES)
}

/// Converts a number of units of `10^digits` nanoseconds, optionally with a decimal point, to
/// nanoseconds. Finer fractions are dropped.
pub(super) fn nanoseconds(text: &str, digits: u32) -> Option<u64> {
    let text = text.trim();
    let (seconds, fraction) = text.split_once('.').unwrap_or((text, ""));
    if seconds.is_empty() && fraction.is_empty()
        || !fraction.bytes().all(|byte| byte.is_ascii_digit())
    {
        return None;
    }
    let units = if seconds.is_empty() { 0 } else { whole(seconds)? };
    let mut total = units.checked_mul(10u64.pow(digits))?;
    let mut worth = 10u64.pow(digits);
    for digit in fraction.bytes() {
        worth /= 10;
        total = total.checked_add(u64::from(digit - b'0') * worth)?;
    }
    Some(total)
}
