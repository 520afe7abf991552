//! Option haggling: every option, and everything a client can get wrong in it.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use sawmill_device::{BlockDevice, Geometry, MemoryDevice, Operations};

use crate::client::{
    ACK, BLOCK_STATUS, Client, ERR_INVALID, ERR_UNKNOWN, ERR_UNSUP, EXTENDED_HEADERS, GO, INFO,
    LIST, LIST_META_CONTEXT, READ, SET_META_CONTEXT, STARTTLS, STRUCTURED_REPLY, Style, TestServer,
    info, meta, option_bytes, serve, serve_with,
};

fn memory(size_bytes: u64) -> Arc<dyn BlockDevice> {
    Arc::new(MemoryDevice::new(size_bytes))
}

fn two_disks() -> TestServer {
    serve_with(&[("disk", memory(1 << 20)), ("ünder", memory(3 << 20))], |_| ())
}

const EXT_HEADER_REQD: u32 = 1 << 31 | 10;

#[test]
fn list_names_every_export_with_its_description() {
    let served = two_disks();
    let mut client = served.raw();
    let entry = |name: &str| {
        let mut bytes = (name.len() as u32).to_be_bytes().to_vec();
        bytes.extend(format!("{name}about {name}").bytes());
        (2, bytes)
    };
    assert_eq!(client.option(LIST, b""), [entry("disk"), entry("ünder"), (ACK, vec![])]);
    assert_eq!(client.verdict(LIST, b"x"), ERR_INVALID, "LIST takes no data");
}

#[test]
fn info_and_go_give_size_flags_block_sizes_name_and_description() {
    let served = two_disks();
    let mut client = served.raw();
    let export = |flags: u16| {
        let mut bytes = vec![0, 0];
        bytes.extend((3u64 << 20).to_be_bytes());
        bytes.extend(flags.to_be_bytes());
        (3, bytes)
    };
    let sizes =
        [&[0, 3][..], &1u32.to_be_bytes(), &65536u32.to_be_bytes(), &(32u32 << 20).to_be_bytes()];
    let text = |kind: u8, text: &str| (3, [&[0, kind], text.as_bytes()].concat());
    let simple_flags = 0b1101_0110_1101;
    let ack = (ACK, vec![]);
    let expected =
        [export(simple_flags), (3, sizes.concat()), text(1, "ünder"), text(2, "about ünder"), ack];
    assert_eq!(client.option(INFO, &info("ünder", &[1, 2, 3, 77])), expected);
    assert_eq!(client.verdict(STRUCTURED_REPLY, b""), ACK);
    let with_df = export(simple_flags | 1 << 7);
    assert_eq!(
        client.option(GO, &info("ünder", &[])),
        [with_df, (3, sizes.concat()), (ACK, vec![])]
    );
    client.style = Style::Structured;
    assert_eq!(client.read_ok((3 << 20) - 1, 1), [0]);
}

#[test]
fn flags_follow_what_the_device_can_do() {
    let geometry = Geometry {
        size_bytes: 4096,
        block_bytes: 512,
        preferred_bytes: 1,
        request_bytes_max: 1 << 16,
        read_only: true,
        shared_cache: false,
        operations: Operations { discard: false, write_zeroes: false, allocation: false },
    };
    let served = serve(Arc::new(MemoryDevice::with_geometry(geometry)));
    let mut client = served.raw();
    let replies = client.option(INFO, &info("disk", &[]));
    assert_eq!(replies[0].1[10..], 0b100_0000_1111u16.to_be_bytes());
    let sizes =
        [&[0, 3][..], &1u32.to_be_bytes(), &512u32.to_be_bytes(), &(1u32 << 16).to_be_bytes()];
    assert_eq!(replies[1].1, sizes.concat());
    assert_eq!(client.verdict(STRUCTURED_REPLY, b""), ACK);
    assert_eq!(
        client.option(LIST_META_CONTEXT, &meta("disk", &[])),
        [(ACK, vec![])],
        "no context to offer"
    );
}

#[test]
fn the_old_way_to_choose_sends_zeroes_only_to_clients_that_want_them() {
    let served = two_disks();
    for (flags, zeroes) in [(3, 0), (1, 124), (0, 124)] {
        let stream = UnixStream::connect(&served.path).expect("the server listens");
        let mut client = Client::hello(stream, flags);
        client.send_option(1, b"disk");
        assert_eq!(client.u64(), 1 << 20);
        assert_eq!(client.u16() & 1, 1);
        assert_eq!(client.bytes(zeroes), vec![0; zeroes]);
        assert_eq!(client.read_ok(0, 1), [0]);
    }
}

#[test]
fn the_empty_name_stands_for_the_first_export_or_for_the_one_named_so() {
    let served = two_disks();
    let size = |name: &str| served.raw().option(INFO, &info(name, &[]))[0].1[2..10].to_vec();
    assert_eq!(size(""), (1u64 << 20).to_be_bytes());
    let export = sawmill_frontend::nbd::Export {
        name: String::new(),
        description: String::new(),
        device: memory(7 << 20),
    };
    served.server.add_export(export).expect("the name is free");
    assert_eq!(size(""), (7u64 << 20).to_be_bytes());
}

#[test]
fn an_unknown_export_is_refused_and_haggling_goes_on() {
    let served = two_disks();
    let mut client = served.raw();
    assert_eq!(client.verdict(INFO, &info("nothing", &[])), ERR_UNKNOWN);
    assert_eq!(client.verdict(GO, &info("nothing", &[])), ERR_UNKNOWN);
    assert_eq!(client.verdict(STRUCTURED_REPLY, b""), ACK);
    assert_eq!(client.verdict(SET_META_CONTEXT, &meta("nothing", &[])), ERR_UNKNOWN);
    client.style = Style::Structured;
    client.go("disk");
    assert_eq!(client.read_ok(0, 3), [0; 3]);
}

/// nbdkit once failed an assertion when a client asked for one export and then chose another.
#[test]
fn asking_for_one_export_and_choosing_another_serves_the_one_chosen() {
    let served = two_disks();
    for style in [Style::Simple, Style::Structured] {
        let mut client = served.raw();
        for name in ["disk", "ünder", "nothing", "disk", ""] {
            let verdict = if name == "nothing" { ERR_UNKNOWN } else { ACK };
            assert_eq!(client.verdict(INFO, &info(name, &[1, 2, 3])), verdict, "{name}");
        }
        if style == Style::Structured {
            assert_eq!(client.verdict(STRUCTURED_REPLY, b""), ACK);
            assert_eq!(client.verdict(INFO, &info("disk", &[])), ACK);
        }
        client.style = style;
        client.go("ünder");
        assert_eq!(client.read_ok((3 << 20) - 1, 1), [0], "the size is that of the export chosen");
    }
}

#[test]
fn tls_and_unknown_options_are_unsupported_and_their_data_is_skipped() {
    let served = two_disks();
    let mut client = served.raw();
    assert_eq!(client.verdict(STARTTLS, b""), ERR_UNSUP);
    for number in [0, 4, 12, 77, u32::MAX] {
        assert_eq!(client.verdict(number, &[0xab; 1000]), ERR_UNSUP);
    }
    client.go("disk");
}

#[test]
fn abort_is_acknowledged_before_the_connection_closes() {
    let served = two_disks();
    let mut client = served.raw();
    assert_eq!(client.option(2, b""), [(ACK, vec![])]);
    client.expect_closed();
    assert_eq!(served.server.metrics().protocol_violations, 0);
}

#[test]
fn extended_headers_take_precedence_over_structured_replies() {
    let served = two_disks();
    let mut client = served.raw();
    assert_eq!(client.verdict(STRUCTURED_REPLY, b"x"), ERR_INVALID);
    assert_eq!(client.verdict(EXTENDED_HEADERS, b"x"), ERR_INVALID);
    assert_eq!(client.verdict(STRUCTURED_REPLY, b""), ACK);
    assert_eq!(client.verdict(EXTENDED_HEADERS, b""), ACK);
    assert_eq!(client.verdict(EXTENDED_HEADERS, b""), ERR_INVALID);
    assert_eq!(client.verdict(STRUCTURED_REPLY, b""), EXT_HEADER_REQD);
    client.style = Style::Extended;
    client.go("disk");
    assert_eq!(client.read_ok(5, 3), [0; 3]);
}

#[test]
fn contexts_need_a_style_that_can_carry_them_and_match_by_name() {
    let served = two_disks();
    let mut client = served.raw();
    for number in [LIST_META_CONTEXT, SET_META_CONTEXT] {
        assert_eq!(client.verdict(number, &meta("disk", &[])), ERR_INVALID);
    }
    assert_eq!(client.verdict(STRUCTURED_REPLY, b""), ACK);
    let context = |id: u8| (4, [&[0, 0, 0, id][..], b"base:allocation"].concat());
    let ack = || (ACK, vec![]);
    for queries in [&[][..], &["base:"], &["x-other:", "base:allocation"]] {
        assert_eq!(client.option(LIST_META_CONTEXT, &meta("disk", queries)), [context(0), ack()]);
    }
    assert_eq!(client.option(LIST_META_CONTEXT, &meta("disk", &["x-other:"])), [ack()]);
    let request = meta("disk", &["qemu:dirty-bitmap:x", "base:allocation"]);
    assert_eq!(client.option(SET_META_CONTEXT, &request), [context(1), ack()]);
    assert_eq!(
        client.option(SET_META_CONTEXT, &meta("disk", &["base:"])),
        [ack()],
        "no wildcard here"
    );
}

#[test]
fn block_status_works_only_for_the_export_the_context_was_chosen_for() {
    let served = two_disks();
    for (chosen, then, works) in [
        (&["disk"][..], "disk", true),
        (&["disk"], "", true),
        (&["ünder"], "disk", false),
        (&["disk", "nothing"], "disk", false),
        (&[], "disk", false),
    ] {
        let mut client = served.raw();
        assert_eq!(client.verdict(STRUCTURED_REPLY, b""), ACK);
        for name in chosen {
            client.option(SET_META_CONTEXT, &meta(name, &["base:allocation"]));
        }
        client.style = Style::Structured;
        client.go(then);
        let answer = client.call(0, BLOCK_STATUS, 0, 4096);
        assert_eq!(answer.error, if works { 0 } else { 22 }, "{chosen:?} then {then:?}");
        assert_eq!(client.read_ok(0, 1), [0], "the connection lives on");
    }
}

#[test]
fn malformed_option_data_is_invalid_and_haggling_goes_on() {
    let served = two_disks();
    let mut client = served.raw();
    assert_eq!(client.verdict(STRUCTURED_REPLY, b""), ACK);
    let too_long = [&u32::MAX.to_be_bytes()[..], b"disk"].concat();
    let overlong_info = [&info("disk", &[])[..], b"?"].concat();
    let not_utf8 = [&[0, 0, 0, 1, 0xff][..], &[0; 4]].concat();
    for number in [INFO, GO, LIST_META_CONTEXT, SET_META_CONTEXT] {
        for data in [&b""[..], b"\0\0\0", &too_long, &not_utf8] {
            assert_eq!(client.verdict(number, data), ERR_INVALID, "option {number} {data:?}");
        }
    }
    assert_eq!(client.verdict(GO, &overlong_info), ERR_INVALID);
    assert_eq!(
        client.verdict(LIST_META_CONTEXT, &[&meta("disk", &[])[..], b"?"].concat()),
        ERR_INVALID
    );
    client.style = Style::Structured;
    client.go("disk");
}

#[test]
fn options_sent_ahead_are_answered_in_order() {
    let served = two_disks();
    let mut client = served.raw();
    let mut bytes = option_bytes(STRUCTURED_REPLY, b"");
    bytes.extend(option_bytes(GO, &info("disk", &[])));
    client.style = Style::Structured;
    bytes.extend(client.header(0, READ, 8, 8));
    client.send(&bytes);
    assert_eq!(client.option_replies(STRUCTURED_REPLY), [(ACK, vec![])]);
    assert_eq!(client.option_replies(GO).last().map(|reply| reply.0), Some(ACK));
    assert_eq!(client.answer().data, [0; 8]);
}

/// Each of these loses its connection, counts as one violation, and affects no other client.
#[test]
fn violations_close_that_connection_only() {
    let served = two_disks();
    let mut bystander = served.client(Style::Structured);
    let raw = |flags| {
        Client::hello(UnixStream::connect(&served.path).expect("the server listens"), flags)
    };
    let mut violations = 0;
    let mut expect_violation = |mut client: Client| {
        client.expect_closed();
        violations += 1;
        assert_eq!(served.server.metrics().protocol_violations, violations);
        bystander.write_ok(violations, b"alive");
    };
    expect_violation(raw(4));
    let mut client = raw(3);
    client.send(b"IHAVEOPTIHAVEOPT");
    expect_violation(client);
    let mut client = raw(3);
    client.send(b"NOTANOPT\0\0\0\x03\0\0\0\0");
    expect_violation(client);
    let mut client = raw(3);
    client.send_option(1, b"nothing");
    expect_violation(client);
    let mut client = raw(3);
    client.send_option(1, b"\xff\xfe");
    expect_violation(client);
    let mut client = raw(2);
    client.send_option(LIST, b"");
    expect_violation(client);
    let mut client = raw(3);
    client.send(b"IHAVEOPT\0\0\0\x63\0\x01\0\x01");
    expect_violation(client);
    let mut client = raw(3);
    for _ in 0..8 {
        assert_eq!(client.verdict(99, &[0; 8 << 10]), ERR_UNSUP);
    }
    client.send_option(99, b"x");
    expect_violation(client);
    let mut client = raw(3);
    for _ in 0..64 {
        assert_eq!(client.verdict(99, b""), ERR_UNSUP);
    }
    expect_violation(client);
}

#[test]
fn a_client_that_does_not_finish_the_handshake_is_closed() {
    let time_max = Duration::from_millis(50);
    let served =
        serve_with(&[("disk", memory(4096))], |options| options.handshake_time_max = time_max);
    let mut silent = served.raw();
    let mut halfway = served.raw();
    halfway.send(b"IHAVE");
    silent.expect_closed();
    halfway.expect_closed();
    assert_eq!(served.server.metrics().protocol_violations, 2);
}
