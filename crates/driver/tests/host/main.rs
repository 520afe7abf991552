//! What a host promises to users of a device and to its drivers, whichever of them dies when.

mod puppet;
mod replacement;

use std::os::fd::AsFd;

use puppet::{Puppet, Stage, submit, submit_with};
use sawmill_device::{Error, ErrorKind, Flags, Operation};
use sawmill_driver::host::{Event, Host};
use sawmill_driver::protocol::{
    CommandKind, Control, ControlFacts, ControlKind, PACKET_BYTES_MAX, PacketSocket,
};

const SIZE: &str = "size=1048576";

#[test]
fn a_request_is_answered_by_what_the_driver_says() {
    let stage = Stage::new("");
    let mut driver = Puppet::connect(stage.host.path(), SIZE).unwrap();
    assert_eq!(driver.welcome.get("generation"), Some("1"));
    let device = stage.device();
    let write = submit(&*device, Operation::Write, 4096, vec![7; 1024]);
    let command = driver.expect(0, CommandKind::Write);
    assert_eq!((command.address, command.length, command.again), (4096, 1024, false));
    assert_eq!(driver.bytes(0, &command), vec![7; 1024]);
    assert!(write.is_open(), "no driver has done it yet");
    driver.answer(0, command.number, 28);
    assert_eq!(write.wait().0.unwrap_err().kind(), ErrorKind::Full);
    let read = submit(&*device, Operation::Read, 0, vec![0; 512]);
    let command = driver.expect(0, CommandKind::Read);
    driver.fill(0, &command, 9);
    driver.answer(0, command.number, 0);
    assert_eq!(read.wait().1, vec![9; 512]);
}

#[test]
fn what_a_dead_driver_left_is_handed_to_the_next_one_in_order() {
    let stage = Stage::new("");
    let mut first = Puppet::connect(stage.host.path(), SIZE).unwrap();
    let device = stage.device();
    let requests: Vec<_> =
        (0..3).map(|n| submit(&*device, Operation::Write, n * 512, vec![n as u8; 512])).collect();
    let numbers: Vec<u64> = (0..3).map(|_| first.command(0).number).collect();
    first.answer(0, numbers[1], 0);
    requests[1].wait().0.unwrap();
    let later = submit(&*device, Operation::Write, 512, vec![9; 512]);
    drop(first);
    assert!(!stage.gone(), "it died");
    assert!(requests[0].is_open() && requests[2].is_open() && later.is_open(), "they wait");
    let mut second = Puppet::connect(stage.host.path(), "").unwrap();
    assert_eq!(
        (second.welcome.get("generation"), second.welcome.get("again")),
        (Some("2"), Some("1"))
    );
    let mut commands = Vec::new();
    for _ in 0..3 {
        let command = second.expect(0, CommandKind::Write);
        assert_eq!(
            second.bytes(0, &command),
            vec![if command.address == 512 { 9 } else { (command.address / 512) as u8 }; 512]
        );
        commands.push((command.address, command.again));
        second.answer(0, command.number, 0);
    }
    // It is unknown whether the first driver had the last command.
    let last = commands.pop().unwrap();
    assert_eq!(commands, [(0, true), (1024, true)]);
    assert_eq!(last.0, 512);
    for request in [&requests[0], &requests[2], &later] {
        request.wait().0.unwrap();
    }
}

#[test]
fn a_refused_driver_receives_the_reason_and_changes_nothing() {
    let stage = Stage::new("can_discard=1");
    let path = stage.host.path();
    let refused = |hello: &str| Puppet::connect(path, hello).err().expect("refused");
    assert!(refused("size=1000").contains("size=1000"));
    assert!(refused("color=red").contains("color"));
    assert!(refused("protocol=1 mode=batch read_only=1").contains("mode=plain"));
    let mut driver = Puppet::connect(path, SIZE).unwrap();
    assert_eq!(driver.welcome.get("can_discard"), Some("1"), "the host knows it");
    assert!(refused(SIZE).contains("has a driver already"));
    assert!(refused("replace=1 size=4096").contains("size=4096"));
    let control = PacketSocket::connect(path).unwrap();
    let hello = Control::new(ControlKind::Hello, ControlFacts::default().with("protocol", 2));
    control.send(&hello.encode(), &[]).unwrap();
    let mut buffer = vec![0; PACKET_BYTES_MAX];
    let reply = Control::decode(control.receive(&mut buffer).unwrap().unwrap().bytes).unwrap();
    assert!(
        reply.kind == ControlKind::Refused
            && reply.facts.get("message").unwrap().contains("speaks 1")
    );
    for nonsense in [&b"\x01"[..], b"\x63\0\0\0", b"\x08\0\0\0outcome=ended\n", &[255; 70]] {
        let control = PacketSocket::connect(path).unwrap();
        control.send(nonsense, &[control.as_fd()]).unwrap();
        let reply = Control::decode(control.receive(&mut buffer).unwrap().unwrap().bytes).unwrap();
        assert_eq!(reply.kind, ControlKind::Refused, "{nonsense:?}");
    }
    // The current driver goes on serving.
    let write = submit(&*stage.device(), Operation::Write, 0, vec![1; 512]);
    let command = driver.expect(0, CommandKind::Write);
    driver.answer(0, command.number, 0);
    write.wait().0.unwrap();
}

#[test]
fn a_driver_that_breaks_the_protocol_counts_as_dead_and_its_commands_as_not_done() {
    type BreakAction = fn(&Puppet, u64);
    let breaks: [BreakAction; 5] = [
        |driver, number| driver.answer(0, number + 1, 0),
        |driver, number| driver.answer(0, number, -1),
        |driver, _| driver.send_raw(0, &[0; 15]),
        |driver, _| driver.send(ControlKind::Welcome, ""),
        |driver, _| driver.send_raw(0, &[1; 16]),
    ];
    let stage = Stage::new("");
    let mut hello = SIZE;
    let mut queued_request = None;
    for broken in breaks {
        let mut driver = Puppet::connect(stage.host.path(), hello).unwrap();
        hello = "";
        queued_request
            .get_or_insert_with(|| submit(&*stage.device(), Operation::Write, 0, vec![1; 512]));
        let command = driver.expect(0, CommandKind::Write);
        broken(&driver, command.number);
        assert!(!stage.gone(), "it is taken for dead");
    }
    let mut sound = Puppet::connect(stage.host.path(), "").unwrap();
    let command = sound.expect(0, CommandKind::Write);
    sound.answer(0, command.number, 0);
    queued_request.unwrap().wait().0.unwrap();
}

#[test]
fn a_driver_that_closes_one_of_its_queues_is_gone() {
    for hello in ["hw_queues=2", "mode=batch"] {
        let stage = Stage::new("");
        let driver = Puppet::connect(stage.host.path(), &format!("{SIZE} {hello}")).unwrap();
        driver.close(1);
        assert!(!stage.gone(), "what is on that queue would wait forever");
    }
}

#[test]
fn a_request_that_comes_while_a_device_fails_is_answered_in_batch_mode_too() {
    for _ in 0..1000 {
        let stage = Stage::new("mode=batch");
        let _driver = Puppet::connect(stage.host.path(), SIZE).unwrap();
        let device = stage.device();
        let asking = std::thread::spawn(move || {
            let mut requests = Vec::new();
            loop {
                let read = submit(&*device, Operation::Read, 0, vec![0; 512]);
                if !read.is_open() {
                    return requests;
                }
                requests.push(read);
            }
        });
        stage.host.fail(&Error::new(ErrorKind::Closed, "over"));
        for read in asking.join().unwrap() {
            read.wait().0.unwrap_err();
        }
    }
}

#[test]
fn a_device_that_is_not_recoverable_fails_with_its_driver() {
    let stage = Stage::new("");
    let mut driver = Puppet::connect(stage.host.path(), "size=1048576 recoverable=0").unwrap();
    let device = stage.device();
    let queued_request = submit(&*device, Operation::Read, 0, vec![0; 512]);
    driver.expect(0, CommandKind::Read);
    drop(driver);
    assert_eq!(queued_request.wait().0.unwrap_err().kind(), ErrorKind::Unavailable);
    let why =
        stage.wait_for(|event| if let Event::EndAsked(why) = event { why.clone() } else { None });
    assert!(why.contains("driver died"), "{why}");
    assert!(submit(&*device, Operation::Read, 0, vec![0; 512]).wait().0.is_err());
}

#[test]
fn without_a_driver_requests_fail_at_once_where_that_was_asked_for() {
    let stage = Stage::new("on_death=fail");
    let driver = Puppet::connect(stage.host.path(), SIZE).unwrap();
    let device = stage.device();
    drop(driver);
    stage.gone();
    let error = submit(&*device, Operation::Read, 0, vec![0; 512]).wait().0.unwrap_err();
    assert!(error.to_string().contains("no driver now"), "{error}");
    let mut next = Puppet::connect(stage.host.path(), "").unwrap();
    let read = submit(&*device, Operation::Read, 0, vec![0; 512]);
    let command = next.expect(0, CommandKind::Read);
    next.answer(0, command.number, 0);
    read.wait().0.unwrap();
}

#[test]
fn requests_that_waited_too_long_for_a_driver_fail_and_the_device_goes_on_with_the_next_one() {
    for mode in ["plain", "batch"] {
        let stage = Stage::new("death_timeout_s=0.1");
        let driver = Puppet::connect(stage.host.path(), &format!("{SIZE} mode={mode}")).unwrap();
        let device = stage.device();
        drop(driver);
        let queued_request = submit(&*device, Operation::Read, 0, vec![0; 512]);
        assert_eq!(queued_request.wait().0.unwrap_err().kind(), ErrorKind::TimedOut, "{mode}");
        let late = submit(&*device, Operation::Flush, 0, Vec::new());
        assert_eq!(late.wait().0.unwrap_err().kind(), ErrorKind::TimedOut, "{mode}");
        let mut next = Puppet::connect(stage.host.path(), "").unwrap();
        let read = submit(&*device, Operation::Read, 0, vec![0; 512]);
        let lane = usize::from(mode == "batch");
        let command = next.expect(lane, CommandKind::Read);
        next.answer(lane, command.number, 0);
        read.wait().0.unwrap();
    }
}

#[test]
fn a_driver_that_does_not_answer_in_time_counts_as_dead() {
    let stage = Stage::new("request_timeout_s=0.1");
    let mut driver = Puppet::connect(stage.host.path(), SIZE).unwrap();
    let device = stage.device();
    let queued_request = submit(&*device, Operation::Write, 0, vec![1; 512]);
    driver.expect(0, CommandKind::Write);
    let pid =
        stage.wait_for(|event| if let Event::Hung { pid } = event { Some(*pid) } else { None });
    assert_eq!(pid, std::process::id());
    assert!(!stage.gone());
    let mut next = Puppet::connect(stage.host.path(), "").unwrap();
    let command = next.expect(0, CommandKind::Write);
    assert!(command.again);
    next.answer(0, command.number, 0);
    queued_request.wait().0.unwrap();
}

#[test]
fn a_device_ends_when_everything_was_answered_and_flushed() {
    let stage = Stage::new("");
    let mut driver = Puppet::connect(stage.host.path(), SIZE).unwrap();
    let device = stage.device();
    let write = submit(&*device, Operation::Write, 0, vec![1; 512]);
    let host = stage.host.clone();
    let ending = std::thread::spawn(move || host.finish());
    let first = driver.expect(0, CommandKind::Write);
    let flush = driver.expect(0, CommandKind::Flush);
    driver.answer(0, first.number, 0);
    write.wait().0.unwrap();
    driver.answer(0, flush.number, 0);
    driver.expect(0, CommandKind::End);
    drop(driver);
    ending.join().unwrap().unwrap();
    assert!(stage.gone());
    assert!(stage.host.wait_for_end().is_ok());
    assert_eq!(
        submit(&*device, Operation::Read, 0, vec![0; 512]).wait().0.unwrap_err().kind(),
        ErrorKind::Closed
    );
    assert!(Puppet::connect(stage.host.path(), "").err().unwrap().contains("ended"));
}

#[test]
fn a_driver_that_dies_at_the_end_leaves_the_rest_to_the_next_one() {
    let stage = Stage::new("");
    let mut driver = Puppet::connect(stage.host.path(), SIZE).unwrap();
    let write = submit(&*stage.device(), Operation::Write, 0, vec![1; 512]);
    driver.expect(0, CommandKind::Write);
    let host = stage.host.clone();
    let ending = std::thread::spawn(move || host.finish());
    driver.expect(0, CommandKind::Flush);
    drop(driver);
    assert!(!stage.gone());
    let mut next = Puppet::connect(stage.host.path(), "").unwrap();
    for kind in [CommandKind::Write, CommandKind::Flush] {
        let command = next.expect(0, kind);
        assert!(command.again);
        next.answer(0, command.number, 0);
    }
    next.expect(0, CommandKind::End);
    drop(next);
    ending.join().unwrap().unwrap();
    write.wait().0.unwrap();
}

#[test]
fn a_driver_asks_for_the_end() {
    let stage = Stage::new("");
    let driver = Puppet::connect(stage.host.path(), SIZE).unwrap();
    driver.send(ControlKind::Leave, "outcome=ended");
    assert_eq!(
        stage.wait_for(|event| if let Event::EndAsked(why) = event {
            Some(why.clone())
        } else {
            None
        }),
        None
    );
    driver.send(ControlKind::Leave, "outcome=failed message=broken");
    let why = stage
        .wait_for(|event| if let Event::EndAsked(why) = event { Some(why.clone()) } else { None });
    assert_eq!(why.as_deref(), Some("broken"));
}

#[test]
fn a_write_that_is_to_be_durable_is_flushed_unless_the_driver_can_do_it_alone() {
    let fua = Flags { fua: true, ..Flags::default() };
    let stage = Stage::new("");
    let mut driver = Puppet::connect(stage.host.path(), SIZE).unwrap();
    let write = submit_with(&*stage.device(), Operation::Write, 0, vec![1; 512], fua);
    let command = driver.expect(0, CommandKind::Write);
    assert!(!command.fua);
    driver.answer(0, command.number, 0);
    let flush = driver.expect(0, CommandKind::Flush);
    assert!(write.is_open(), "it is not durable yet");
    driver.answer(0, flush.number, 5);
    assert!(write.wait().0.is_err(), "a flush that failed made nothing durable");

    let stage = Stage::new("can_fua=1");
    let mut driver = Puppet::connect(stage.host.path(), SIZE).unwrap();
    let write = submit_with(&*stage.device(), Operation::Write, 0, vec![1; 512], fua);
    let command = driver.expect(0, CommandKind::Write);
    assert!(command.fua);
    driver.answer(0, command.number, 0);
    write.wait().0.unwrap();

    let stage = Stage::new("can_flush=0");
    let mut driver = Puppet::connect(stage.host.path(), SIZE).unwrap();
    let write = submit_with(&*stage.device(), Operation::Write, 0, vec![1; 512], fua);
    let command = driver.expect(0, CommandKind::Write);
    driver.answer(0, command.number, 0);
    write.wait().0.unwrap();
    submit(&*stage.device(), Operation::Flush, 0, Vec::new()).wait().0.unwrap();
}

#[test]
fn a_durable_write_and_its_flush_are_done_by_the_same_driver() {
    let fua = Flags { fua: true, ..Flags::default() };
    let stage = Stage::new("");
    let mut first = Puppet::connect(stage.host.path(), SIZE).unwrap();
    let write = submit_with(&*stage.device(), Operation::Write, 0, vec![7; 512], fua);
    let command = first.expect(0, CommandKind::Write);
    first.answer(0, command.number, 0);
    first.expect(0, CommandKind::Flush);
    drop(first);
    stage.gone();
    let mut second = Puppet::connect(stage.host.path(), "").unwrap();
    let command = second.expect(0, CommandKind::Write);
    assert_eq!(
        (second.bytes(0, &command), command.again),
        (vec![7; 512], true),
        "no flush covered it"
    );
    second.answer(0, command.number, 0);
    let flush = second.expect(0, CommandKind::Flush);
    assert!(write.is_open(), "it is not durable yet");
    second.answer(0, flush.number, 0);
    write.wait().0.unwrap();
}

#[test]
fn zeroes_and_discards_that_are_to_be_durable_are_flushed_too() {
    let fua = Flags { fua: true, ..Flags::default() };
    for options in ["", "can_fua=1", "mode=batch"] {
        let stage = Stage::new(&format!("{options} can_discard=1 can_write_zeroes=1"));
        let mut driver = Puppet::connect(stage.host.path(), SIZE).unwrap();
        for (operation, kind) in [
            (Operation::WriteZeroes, CommandKind::WriteZeroes),
            (Operation::Discard, CommandKind::Discard),
        ] {
            let change = submit_with(&*stage.device(), operation, 0, vec![0; 512], fua);
            let command = driver.expect(0, kind);
            assert!(!command.fua, "that is for writes");
            driver.answer(0, command.number, 0);
            let flush = driver.expect(0, CommandKind::Flush);
            assert!(change.is_open(), "{options}: it is not durable yet");
            driver.answer(0, flush.number, 0);
            change.wait().0.unwrap();
        }
    }
}

#[test]
fn no_more_commands_are_with_a_driver_than_it_takes() {
    let stage = Stage::new("queue_depth=2");
    let mut driver = Puppet::connect(stage.host.path(), SIZE).unwrap();
    let device = stage.device();
    let requests: Vec<_> =
        (0..5).map(|n| submit(&*device, Operation::Read, n * 512, vec![0; 512])).collect();
    let mut with_it = vec![driver.command(0), driver.command(0)];
    for request in &requests {
        let command = with_it.remove(0);
        driver.answer(0, command.number, 0);
        request.wait().0.unwrap();
        if requests.len() > 2 && command.address < 3 * 512 {
            with_it.push(driver.command(0));
        }
    }
}

#[test]
fn a_batch_driver_gets_chunks_and_the_next_one_gets_them_again_with_newer_bytes() {
    let stage = Stage::new("mode=batch chunk_age_max_ms=0");
    let mut first = Puppet::connect(stage.host.path(), SIZE).unwrap();
    let device = stage.device();
    let metadata: usize = first.welcome.parsed("metadata_bytes").unwrap();
    submit(&*device, Operation::Write, 512, vec![1; 1024]).wait().0.unwrap();
    let flush = submit(&*device, Operation::Flush, 0, Vec::new());
    let old = first.expect(0, CommandKind::Chunk);
    assert_eq!((old.entries, old.length), (1, metadata as u64 + 1024));
    let bytes = first.bytes(0, &old);
    assert_eq!(bytes[metadata..], [1; 1024]);
    assert_eq!(
        (bytes[0], bytes[8], bytes[16], bytes[24]),
        (1, 2, 1, 1),
        "sector, sectors, write_number, flag"
    );
    let flushed = first.expect(0, CommandKind::Flush);
    // A newer write of the second block, in a newer chunk: acknowledged before the older one.
    submit(&*device, Operation::Write, 1024, vec![2; 512]).wait().0.unwrap();
    let again = submit(&*device, Operation::Flush, 0, Vec::new());
    let new = first.expect(0, CommandKind::Chunk);
    assert!(new.floor <= old.horizon, "the older one is not answered");
    first.answer(0, new.number, 0);
    drop(first);
    assert!(!stage.gone());
    let mut second = Puppet::connect(stage.host.path(), "").unwrap();
    let old = second.expect(0, CommandKind::Chunk);
    assert!(old.again);
    let bytes = second.bytes(0, &old);
    assert_eq!(
        (bytes[metadata], bytes[metadata + 512]),
        (1, 2),
        "the newer bytes are in the older write"
    );
    second.answer(0, old.number, 0);
    assert_eq!(second.expect(0, CommandKind::Flush).number, flushed.number);
    second.answer(0, flushed.number, 0);
    let last = second.expect(0, CommandKind::Flush);
    second.answer(0, last.number, 0);
    flush.wait().0.unwrap();
    again.wait().0.unwrap();
}

#[test]
fn a_failed_chunk_is_reported_to_every_flush_of_it_and_to_no_other() {
    let stage = Stage::new("mode=batch chunk_age_max_ms=0");
    let mut driver = Puppet::connect(stage.host.path(), SIZE).unwrap();
    let device = stage.device();
    let flush = || submit(&*device, Operation::Flush, 0, Vec::new());
    let before = flush();
    submit(&*device, Operation::Write, 0, vec![1; 512]).wait().0.unwrap();
    let behind = [flush(), flush()];
    let first = driver.expect(0, CommandKind::Flush);
    let chunk = driver.expect(0, CommandKind::Chunk);
    driver.answer(0, chunk.number, 28);
    driver.answer(0, first.number, 0);
    before.wait().0.expect("it came before the write");
    for flush in behind {
        let command = driver.expect(0, CommandKind::Flush);
        driver.answer(0, command.number, 0);
        assert_eq!(flush.wait().0.unwrap_err().kind(), ErrorKind::Full);
    }
    let later = flush();
    let command = driver.expect(0, CommandKind::Flush);
    driver.answer(0, command.number, 0);
    later.wait().0.expect("it was reported");
}

#[test]
fn a_weak_flush_reports_a_chunk_that_failed_before() {
    let stage = Stage::new("mode=batch weak_flush=1");
    let mut driver = Puppet::connect(stage.host.path(), SIZE).unwrap();
    let device = stage.device();
    submit(&*device, Operation::Write, 0, vec![1; 512]).wait().0.unwrap();
    let chunk = driver.expect(0, CommandKind::Chunk);
    driver.answer(0, chunk.number, 5);
    // A read of the same bytes is delivered after that answer.
    let read = submit(&*device, Operation::Read, 0, vec![0; 512]);
    let command = driver.expect(1, CommandKind::Read);
    driver.answer(1, command.number, 0);
    read.wait().0.unwrap();
    assert!(submit(&*device, Operation::Flush, 0, Vec::new()).wait().0.is_err());
}

#[test]
fn any_bytes_can_be_written_although_the_driver_knows_blocks() {
    let stage = Stage::new("");
    let mut driver = Puppet::connect(stage.host.path(), SIZE).unwrap();
    let write = submit(&*stage.device(), Operation::Write, 700, vec![5; 10]);
    let read = driver.expect(0, CommandKind::Read);
    assert_eq!((read.address, read.length), (512, 512));
    driver.fill(0, &read, 3);
    driver.answer(0, read.number, 0);
    let command = driver.expect(0, CommandKind::Write);
    let bytes = driver.bytes(0, &command);
    assert_eq!((bytes.len(), bytes[187], bytes[188], bytes[197], bytes[198]), (512, 3, 5, 5, 3));
    driver.answer(0, command.number, 0);
    write.wait().0.unwrap();
    let stage = Stage::new("byte_granular=1");
    let mut driver = Puppet::connect(stage.host.path(), SIZE).unwrap();
    let write = submit(&*stage.device(), Operation::Write, 700, vec![5; 10]);
    let command = driver.expect(0, CommandKind::Write);
    assert_eq!((command.address, command.length), (700, 10));
    driver.answer(0, command.number, 0);
    write.wait().0.unwrap();
}

#[test]
fn a_name_has_one_host() {
    let stage = Stage::new("");
    let other = Host::start("disk", stage.host.path(), ControlFacts::default(), Box::new(|_| ()));
    assert_eq!(other.err().unwrap().kind(), ErrorKind::InUse);
    Puppet::connect(stage.host.path(), SIZE).expect("the first one is unharmed");
}
