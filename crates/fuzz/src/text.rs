//! Text from people, stores and local files: sizes, durations, URLs, ids, keys, addresses of links
//! and NBD servers, rights to exports, and the file about a ublk device.
//!
//! Invariants: accepted text has one meaning, shown text can be parsed again, and no secret gets
//! into a text.
//!
//! Not here: command lines and configuration files (`crates/sawmill`), the file of machines
//! (`machines`).

use sawmill_format::checkpoint::{checkpoint_key, parse_checkpoint_key};
use sawmill_format::ids::VolumeId;
use sawmill_format::map_part::{parse_part_key, part_key};
use sawmill_format::segment::{parse_segment_key, segment_key};
use sawmill_format::volume_record::{FlushMode, parse_volume_key, volume_key};
use sawmill_frontend::fuzzing::ublk_facts;
use sawmill_link::carrier::LinkAddress;
use sawmill_link::target::Rights;
use sawmill_nbd_client::Address;
use sawmill_store::{check_url, split_volume_url};
use std::time::Duration;

use sawmill_console::units::{
    human_count, human_duration, human_size, parse_duration, parse_size, parse_size_u32,
};

/// Passes a text to the parsers of texts, and a number to what shows numbers.
pub(crate) fn run(bytes: &[u8]) {
    let text = &*String::from_utf8_lossy(bytes);
    sizes(text);
    urls(text);
    keys(text);
    addresses(text);
    ublk_facts(text);
    let number = bytes.iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte));
    size_round_trip(number);
}

fn sizes(text: &str) {
    let bytes = parse_size(text);
    match &bytes {
        Ok(bytes) => {
            assert_eq!(parse_size(&bytes.to_string()), Ok(*bytes));
            assert_eq!(
                parse_size(&format!(" {text} ")),
                Ok(*bytes),
                "blanks around it mean nothing"
            );
            assert_eq!(
                parse_size_u32(text).ok().map(u64::from),
                Some(*bytes).filter(|b| *b <= u32::MAX.into())
            );
        }
        Err(why) => assert!(why.contains(&format!("'{text}'")), "it says what was wrong: {why}"),
    }
    match parse_duration(text) {
        Ok(time) => assert_eq!(parse_duration(&format!("{}ms", time.as_millis())), Ok(time)),
        Err(why) => assert!(why.contains(&format!("'{text}'")), "it says what was wrong: {why}"),
    }
}

fn size_round_trip(number: u64) {
    let size = human_size(number);
    if !size.contains('.') && !size.ends_with("EiB") {
        let read = parse_size(&size).expect("a size that is shown can be read");
        // Digits after the third are rounded.
        assert!(read == number || read.abs_diff(number) <= read / 100, "{size} for {number}");
    }
    assert_eq!(human_count(number).replace(',', ""), number.to_string());
    assert!(!human_duration(Duration::from_micros(number)).is_empty());
}

fn urls(text: &str) {
    const SECRET: &str = "hunter2";
    if let Ok(display) = check_url(text) {
        assert_eq!(
            check_url(&display).ok(),
            Some(display),
            "what is shown is a URL, and shown as itself"
        );
    }
    if let Ok((_, name)) = split_volume_url(text) {
        let legal = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        assert!(
            (1..=128).contains(&name.len()) && !name.starts_with('.') && name.chars().all(legal)
        );
    }
    // An input with the word in it would be shown rightly.
    if text.contains(SECRET) {
        return;
    }
    for scheme in ["s3", "gs", "az", "S3"] {
        let with_password = format!("{scheme}://user:{SECRET}@{text}");
        let with_key = format!("{scheme}://bucket/{text}?secret_key={SECRET}");
        for url in [with_password, with_key] {
            let message = match (check_url(&url), split_volume_url(&url)) {
                (Err(error), Err(other)) => format!("{error} {other}"),
                (Err(error), Ok(_)) => error.to_string(),
                (Ok(display), _) => display,
            };
            assert!(!message.contains(SECRET), "{url:?} gives its secret away: {message}");
        }
    }
}

fn keys(text: &str) {
    if let Ok(id) = text.parse::<VolumeId>() {
        assert_eq!(id.to_string(), text);
    }
    if let Ok(mode) = text.parse::<FlushMode>() {
        assert_eq!(mode.name(), text);
    }
    if let Some((volume_id, sequence)) = parse_segment_key(text) {
        assert_eq!(segment_key(volume_id, sequence), text);
    }
    if let Some((volume_id, number)) = parse_checkpoint_key(text) {
        assert_eq!(checkpoint_key(volume_id, number), text);
    }
    if let Some(identity) = parse_part_key(text) {
        assert_eq!(part_key(&identity), text);
    }
    if let Some(name) = parse_volume_key(text) {
        assert_eq!(volume_key(name), text);
    }
}

fn addresses(text: &str) {
    if let Ok(address) = text.parse::<LinkAddress>() {
        assert_eq!(address.to_string().parse(), Ok(address), "what is shown is the same address");
    }
    if let Ok(list) = LinkAddress::list(text) {
        let shown: Vec<_> = list.iter().map(LinkAddress::to_string).collect();
        assert_eq!(LinkAddress::list(&shown.join(",")), Ok(list));
    }
    assert!(Rights::parse(&format!("{text},{text}")).is_err(), "an export is listed once");
    if let Ok(Address::Tcp(host, _)) = Address::parse(text) {
        assert!(host.contains(':'), "an address has a port: {host}");
    }
    let escaped: String = text.bytes().map(|byte| format!("%{byte:02X}")).collect();
    let address = Address::parse(&format!("nbd+unix:///{escaped}?socket=/{escaped}"));
    let expected = Address::Unix(format!("/{text}").into(), text.to_owned());
    assert_eq!(address.ok(), Some(expected), "any name and path can be written");
}
