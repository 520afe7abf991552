//! The codec and the buffers, without a socket. What clients see is tested from outside, in
//! `tests/nbd`.

use proptest::collection::vec;
use proptest::prelude::*;
use sawmill_device::{Allocation, ErrorKind, Geometry, Operations};

use super::handshake::block_sizes;
use super::intake::Intake;
use super::limits::{EXTENTS_MAX, RECEIVE_BYTES_MAX};
use super::protocol::{
    Command, NbdErrno, RequestHeader, RequestIdentity, Style, command_flag, parse_info_request,
    parse_meta_request, parse_option_header, push_option_reply, transmission,
};
use super::server::percent_encoded;
use super::session::transmission_flags;

const STYLES: [Style; 3] = [Style::Simple, Style::Structured, Style::Extended];

fn style() -> impl Strategy<Value = Style> {
    prop::sample::select(&STYLES[..])
}

fn encoded(style: Style, header: &RequestHeader) -> Vec<u8> {
    let magic: u32 = if style == Style::Extended { 0x21e4_1c71 } else { 0x2560_9513 };
    let mut bytes = magic.to_be_bytes().to_vec();
    bytes.extend(header.flags.to_be_bytes());
    bytes.extend(header.command.to_be_bytes());
    bytes.extend(header.cookie.to_be_bytes());
    bytes.extend(header.offset.to_be_bytes());
    if style == Style::Extended {
        bytes.extend(header.length.to_be_bytes());
    } else {
        bytes.extend((header.length as u32).to_be_bytes());
    }
    bytes
}

proptest! {
    #[test]
    fn request_headers_survive_encoding_and_wait_for_their_last_byte(
        style in style(), flags: u16, command: u16, cookie: u64, offset: u64, length: u64,
        rest in vec(any::<u8>(), 0..9),
    ) {
        let length = if style == Style::Extended { length } else { length & 0xffff_ffff };
        let header = RequestHeader { flags, command, cookie, offset, length };
        let mut bytes = encoded(style, &header);
        for cut in 0..bytes.len() {
            prop_assert_eq!(RequestHeader::parse(style, &bytes[..cut]), Ok(None));
        }
        bytes.extend(rest);
        prop_assert_eq!(RequestHeader::parse(style, &bytes), Ok(Some(header)));
        let follows = match style {
            Style::Extended => flags & command_flag::PAYLOAD_LEN != 0,
            Style::Simple | Style::Structured => command == 1,
        };
        prop_assert_eq!(header.payload_bytes(style), if follows { length } else { 0 });
    }

    #[test]
    fn parsers_take_any_bytes_without_panic_and_refuse_a_false_magic(
        style in style(), bytes in vec(any::<u8>(), 0..200),
    ) {
        let parsed = RequestHeader::parse(style, &bytes);
        if bytes.len() >= 32 && bytes[0] != 0x25 && bytes[0] != 0x21 {
            prop_assert!(parsed.is_err());
        }
        let _ = parse_info_request(&bytes);
        let _ = parse_meta_request(&bytes);
        if let Some(header) = bytes.first_chunk::<16>() {
            prop_assert_eq!(parse_option_header(header).is_ok(), header.starts_with(b"IHAVEOPT"));
        }
    }

    #[test]
    fn option_data_survives_encoding_and_every_cut_of_it_is_refused(
        name in "[a-zA-Zäß/ ]{0,20}", info_kinds in vec(any::<u16>(), 0..8),
        queries in vec("[a-z:]{0,12}", 0..5),
    ) {
        let mut info = (name.len() as u32).to_be_bytes().to_vec();
        info.extend(name.as_bytes());
        let mut meta = info.clone();
        info.extend((info_kinds.len() as u16).to_be_bytes());
        info.extend(info_kinds.iter().flat_map(|kind| kind.to_be_bytes()));
        meta.extend((queries.len() as u32).to_be_bytes());
        for query in &queries {
            meta.extend((query.len() as u32).to_be_bytes());
            meta.extend(query.as_bytes());
        }
        prop_assert_eq!(parse_info_request(&info), Some((name.as_str(), info_kinds)));
        let queries: Vec<&str> = queries.iter().map(String::as_str).collect();
        prop_assert_eq!(parse_meta_request(&meta), Some((name.as_str(), queries)));
        for cut in 0..info.len() {
            prop_assert_eq!(parse_info_request(&info[..cut]), None);
        }
        for cut in 0..meta.len() {
            prop_assert_eq!(parse_meta_request(&meta[..cut]), None);
        }
    }

    #[test]
    fn block_status_keeps_the_runs_and_ends_at_the_limit(
        style in prop::sample::select(&STYLES[1..]),
        runs in vec((0u64..100_000, any::<bool>()), 1..40),
        runs_max in prop::sample::select(&[1, EXTENTS_MAX][..]),
    ) {
        let runs: Vec<_> =
            runs.into_iter().map(|(length, data)| Allocation { length, data }).collect();
        prop_assume!(runs.iter().any(|run| run.length > 0));
        let mut out = Vec::new();
        let identity = RequestIdentity { style, cookie: 7, offset: 9 };
        identity.push_block_status(&mut out, &runs, runs_max);
        let (head, width) = if style == Style::Extended { (32 + 8, 16) } else { (20 + 4, 8) };
        let decoded_runs: Vec<(u64, u64)> = out[head..].chunks_exact(width).map(|run| {
            let (length, state) = run.split_at(width / 2);
            let number =
                |bytes: &[u8]| bytes.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
            (number(length), number(state))
        }).collect();
        prop_assert!(
            decoded_runs.iter().all(|(length, state)| *length > 0 && (*state == 0 || *state == 3))
        );
        prop_assert!(
            decoded_runs.windows(2).all(|pair| pair[0].1 != pair[1].1), "neighbors alike are \
            joined"
        );
        let expected = |at: u64| {
            let mut end = 0;
            let run = runs.iter().find(|run| { end += run.length; at < end });
            run.map(|run| if run.data { 0 } else { 3 })
        };
        let mut start = 0;
        for (length, state) in &decoded_runs {
            prop_assert_eq!(expected(start), Some(*state));
            prop_assert_eq!(expected(start + length - 1), Some(*state));
            start += length;
        }
        if runs_max == 1 {
            prop_assert_eq!(decoded_runs.len(), 1);
        } else {
            prop_assert_eq!(start, runs.iter().map(|run| run.length).sum::<u64>());
        }
    }

    #[test]
    fn every_geometry_gives_sound_block_sizes_and_flags(
        size_bytes: u64, preferred_bytes: u32, request_bytes_max in 512u32.., bits in 0u8..32,
    ) {
        let bit = |number: u8| bits >> number & 1 == 1;
        let operations = Operations { discard: bit(0), write_zeroes: bit(1), allocation: bit(2) };
        let geometry = Geometry {
            size_bytes, block_bytes: 512, preferred_bytes, request_bytes_max,
            read_only: bit(3), shared_cache: bit(4), operations,
        };
        let [minimum, preferred, maximum] = block_sizes(&geometry);
        prop_assert_eq!(minimum, 1);
        prop_assert!(preferred.is_power_of_two() && preferred >= 512 && preferred <= maximum);
        prop_assert!(maximum <= 32 << 20 && maximum <= request_bytes_max);
        for style in STYLES {
            let flags = transmission_flags(&geometry, style);
            let has = |flag| flags & flag != 0;
            prop_assert!(has(transmission::HAS_FLAGS) && has(transmission::SEND_FLUSH));
            prop_assert_eq!(has(transmission::READ_ONLY), geometry.read_only);
            prop_assert_eq!(has(transmission::SEND_DF), style != Style::Simple);
            prop_assert_eq!(
                has(transmission::SEND_TRIM), operations.discard && !geometry.read_only
            );
            prop_assert_eq!(
                has(transmission::SEND_FAST_ZERO), has(transmission::SEND_WRITE_ZEROES)
            );
            prop_assert_eq!(has(transmission::CAN_MULTI_CONN), geometry.shared_cache);
        }
    }

    #[test]
    fn intake_gives_every_byte_once_and_never_changes_a_payload_that_is_held(
        steps in vec((1usize..50_000, 1usize..60_000, any::<bool>()), 1..60),
    ) {
        let mut intake = Intake::with(&[], &connection_budget());
        let (mut sent_bytes, mut taken_bytes) = (0u64, 0u64);
        let mut held_payloads = Vec::new();
        let pattern = |at: u64| (at.wrapping_mul(31) >> 3) as u8;
        for (arrive, take, hold) in steps {
            let space = intake.space(take);
            prop_assert!(!space.is_empty());
            let length = arrive.min(space.len());
            for byte in &mut space[..length] {
                *byte = pattern(sent_bytes);
                sent_bytes += 1;
            }
            intake.received(length);
            if intake.bytes().len() >= take {
                held_payloads.push((taken_bytes, intake.take_payload(take)));
                taken_bytes += take as u64;
            }
            if !hold {
                held_payloads.clear();
            }
            for (start, payload) in &held_payloads {
                for (at, byte) in (*start..).zip(payload.bytes()) {
                    prop_assert_eq!(*byte, pattern(at));
                }
            }
        }
        prop_assert_eq!(intake.bytes().len() as u64, sent_bytes - taken_bytes);
    }
}

fn connection_budget() -> std::sync::Arc<super::budget::ConnectionBudget> {
    super::budget::Budget::default().admit().expect("an empty budget")
}

#[test]
fn a_payload_longer_than_the_receive_buffer_is_received_apart_and_exactly() {
    let mut intake = Intake::with(&[], &connection_budget());
    let space = intake.space(0);
    space[..5].copy_from_slice(b"abcde");
    intake.received(5);
    intake.consume(1);
    let length = RECEIVE_BYTES_MAX + 3;
    intake.fill_apart(length);
    assert!(intake.take_filled().is_none());
    assert_eq!(intake.space(0).len(), length - 4, "not a byte beyond the payload");
    intake.space(0).fill(b'x');
    intake.received(length - 4);
    let payload = intake.take_filled().expect("complete");
    assert_eq!((payload.bytes().len(), &payload.bytes()[..6]), (length, &b"bcdexx"[..]));
    assert!(!intake.is_partial());
    intake.fill_apart(length);
    intake.space(0).fill(b'y');
    assert_eq!(payload.bytes()[length - 1], b'x', "a held buffer is not used again");
}

#[test]
fn replies_have_the_bytes_of_the_protocol() {
    let (cookie, offset) = (0x0102_0304_0506_0708, 0x1112_1314_1516_1718);
    let answered = |style| RequestIdentity { style, cookie, offset };
    let pushed = |push: &dyn Fn(&mut Vec<u8>)| {
        let mut out = Vec::new();
        push(&mut out);
        out.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    let simple = answered(Style::Simple);
    assert_eq!(pushed(&|out| simple.push_done(out)), "67446698000000000102030405060708");
    assert_eq!(
        pushed(&|out| simple.push_error(out, NbdErrno::Io, "why")),
        "67446698000000050102030405060708"
    );
    let structured = answered(Style::Structured);
    assert_eq!(pushed(&|out| structured.push_done(out)), "67446698000000000102030405060708");
    assert_eq!(
        pushed(&|out| structured.push_error(out, NbdErrno::NoSpace, "why")),
        "668e33ef0001800101020304050607080000000900 00001c0003776879".replace(' ', "")
    );
    let extended = answered(Style::Extended);
    assert_eq!(
        pushed(&|out| extended.push_done(out)),
        "6e8a278c00010000010203040506070811121314151617180000000000000000"
    );
    let head = |style: Style| {
        pushed(&|out| {
            out.resize(style.read_head_bytes(), 0);
            answered(style).write_read_head(out, 16);
        })
    };
    assert_eq!(head(Style::Simple), "67446698000000000102030405060708");
    assert_eq!(
        head(Style::Structured),
        "668e33ef0001000101020304050607080000001811121314151617 18".replace(' ', "")
    );
    assert_eq!(
        head(Style::Extended),
        "6e8a278c0001000101020304050607081112131415161718 0000000000000018 1112131415161718"
            .replace(' ', "")
    );
    assert_eq!(
        pushed(&|out| push_option_reply(out, 7, 1, b"hi")),
        "0003e889045565a9 00000007 00000001 00000002 6869".replace(' ', "")
    );
}

#[test]
fn error_texts_are_cut_between_characters_at_the_limit_of_the_protocol() {
    let text = "ä".repeat(5000);
    let mut out = Vec::new();
    RequestIdentity { style: Style::Structured, cookie: 1, offset: 0 }.push_error(
        &mut out,
        NbdErrno::Io,
        &text,
    );
    let sent_text = std::str::from_utf8(&out[20 + 6..]).expect("whole characters");
    assert_eq!(sent_text.len(), 4096);
    assert!(text.starts_with(sent_text));
}

#[test]
fn every_kind_of_failure_has_an_error_number_clients_know() {
    for (kind, errno) in [
        (ErrorKind::Invalid, NbdErrno::Inval),
        (ErrorKind::ReadOnly, NbdErrno::Perm),
        (ErrorKind::NotFound, NbdErrno::Io),
        (ErrorKind::Fenced, NbdErrno::Shutdown),
        (ErrorKind::Unavailable, NbdErrno::Io),
        (ErrorKind::Full, NbdErrno::NoSpace),
        (ErrorKind::Corrupt, NbdErrno::Io),
        (ErrorKind::Closed, NbdErrno::Shutdown),
        (ErrorKind::TimedOut, NbdErrno::Io),
        (ErrorKind::Internal, NbdErrno::Io),
    ] {
        assert_eq!(NbdErrno::from(kind), errno, "{kind:?}");
    }
    assert_eq!(Command::from_number(7), Some(Command::BlockStatus));
    assert_eq!(Command::from_number(8), None);
}

#[test]
fn uris_escape_what_would_end_a_name_or_a_path() {
    assert_eq!(percent_encoded(b"disk-1.raw/x_y~").to_string(), "disk-1.raw/x_y~");
    assert_eq!(percent_encoded("a b?c&d%ä".as_bytes()).to_string(), "a%20b%3Fc%26d%25%C3%A4");
}
