//! Targets and attachments that die: users of a device wait for the next target and lose nothing; a
//! cache loses what a disk's would, and nothing that was flushed.

use sawmill_testkit::Dice;
use sawmill_tests::linked::{End, addresses, key};
use sawmill_tests::load::{Load, Mix};
use sawmill_tests::machine::wait_for;
use sawmill_tests::nbd::Client;
use sawmill_tests::stamp::{check_nothing_accepted_lost, check_sectors};
use sawmill_tests::store;
use sawmill_tests::test_bed::TestBed;

const VOLUME_BYTES: u64 = 16 << 20;

struct Scene {
    bed: TestBed,
    listen: String,
    key: String,
}

impl Scene {
    fn new() -> Self {
        let bed = TestBed::new(&store::folder());
        bed.create("disk", "16M", &[]);
        let key = key(&bed, "key");
        Scene { bed, listen: addresses(&["udp", "tcp"]), key }
    }

    fn target(&self) -> End {
        let staging = self.bed.memory().display().to_string();
        let words = [
            "target",
            "disk",
            "--listen",
            &self.listen,
            "--key-file",
            &self.key,
            "--staging",
            &staging,
        ];
        End::start(
            &self.bed,
            &[&words[..], &["--journal-bytes", "64M", "--cache-bytes", "64M"]].concat(),
        )
    }

    fn attach(&self, name: &str, options: &[&str]) -> End {
        let door = format!("unix:{}", self.bed.path(&format!("{name}.sock")).display());
        let link = format!("link:{}/disk", self.listen);
        let words = ["attach", &link, "--key-file", &self.key, "--name", name, "--nbd", &door];
        End::start(&self.bed, &[&words, options].concat())
    }
}

#[test]
fn a_target_killed_under_a_load_comes_back_and_its_users_see_no_error() {
    let scene = Scene::new();
    let mut target = Some(scene.target());
    let attached = scene.attach("disk", &[]);
    let clients: Vec<Client> = (0..2).map(|_| attached.connect()).collect();
    let mut load = Load::new(VOLUME_BYTES, Dice::seeded("link_deaths"), Mix::default());
    for kill in 0..3 {
        let completions = 1 + load.dice.below(400);
        let counts = load.drive(&clients, completions, || {
            target.take().expect("it runs").kill();
            target = Some(scene.target());
        });
        assert_eq!((counts.refused, counts.unanswered), (0, 0), "kill {kill}: {counts:?}");
    }
    // In order, too: nobody hears of a device that was closed behind the target.
    let counts = load.drive(&clients, 100, || {
        let _ = target.take().expect("it runs").stop().ok();
        target = Some(scene.target());
    });
    assert_eq!((counts.refused, counts.unanswered), (0, 0), "stopped: {counts:?}");
    let image = clients[0].read_all().expect("readable");
    let verdict = check_nothing_accepted_lost(&load.log, &image)
        .unwrap_or_else(|violation| panic!("{violation}"));
    assert!(verdict.kept > 0, "{verdict:?}");
    drop(clients);
    let _ = attached.stop().ok();
}

#[test]
fn what_a_cache_had_flushed_survives_it_and_its_end_in_order_flushes_all() {
    let scene = Scene::new();
    let target = scene.target();
    let cached = ["--cache", "write-back", "--cache-bytes", "8M", "--flush-interval", "1h"];
    let attached = scene.attach("first", &cached);
    let mut load = Load::new(VOLUME_BYTES, Dice::seeded("link_cache"), Mix::default());
    let clients = [attached.connect()];
    load.run(&clients, 300);
    load.drive(&clients, 100, || attached.kill());
    drop(clients);
    let attached = scene.attach("second", &[&cached[..], &["--take-over"]].concat());
    let client = attached.connect();
    let image = client.read_all().expect("readable");
    let verdict =
        check_sectors(&load.log, &image).unwrap_or_else(|violation| panic!("{violation}"));
    assert!(verdict.demanded > 0, "nothing was flushed: this run proves nothing: {verdict:?}");
    client.write(1 << 20, &[0xDD; 100_000]).expect("accepted");
    drop(client);
    let _ = attached.stop().ok();
    let _ = target.stop().ok();
    let server = scene.bed.serve("disk").start();
    assert_eq!(server.connect().read(1 << 20, 100_000).expect("stored"), vec![0xDD; 100_000]);
}

#[test]
fn with_a_timeout_requests_fail_when_the_target_stays_away_and_the_attachment_ends() {
    let scene = Scene::new();
    let target = scene.target();
    let attached = scene.attach("disk", &["--timeout", "1s"]);
    let client = attached.connect();
    client.write(0, &[1; 4096]).expect("accepted");
    target.kill();
    assert!(client.write(0, &[2; 4096]).is_err(), "no answer comes");
    let left = attached.finished();
    let has_message = left
        .stderr
        .lines()
        .last()
        .is_some_and(|line| line.contains("no answer from the target for 1 s"));
    assert!(left.code == Some(7) && has_message, "{left:?}");
}

#[test]
fn memory_that_a_dead_target_kept_is_missed_by_the_next_flush_and_by_no_other() {
    let bed = TestBed::new(&store::folder());
    let (listen, key) = (addresses(&["udp"]), key(&bed, "key"));
    let start =
        || End::start(&bed, &["target", "memory:1M", "--listen", &listen, "--key-file", &key]);
    let target = start();
    let door = format!("unix:{}", bed.path("disk.sock").display());
    let link = format!("link:{listen}/memory");
    let attached = End::start(&bed, &["attach", &link, "--key-file", &key, "--nbd", &door]);
    let client = attached.connect();
    client.write(0, &[1; 4096]).expect("accepted");
    target.kill();
    let _next = start();
    assert!(client.flush().is_err(), "what was written is gone, and a flush must not hide it");
    client.write(0, &[2; 4096]).expect("accepted");
    client.flush().expect("all that was written since");
}

#[test]
fn a_second_signal_while_the_target_is_away_ends_it_and_fails_requests() {
    let scene = Scene::new();
    let target = scene.target();
    let mut attached = scene.attach("disk", &[]);
    let client = attached.connect();
    target.kill();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| client.write(0, &[1; 4096]));
        wait_for("the write waits for the target", || {
            let status = scene.bed.sawmill(&["--json", "link", "status", "--over", "0"]).json();
            (status[0]["connections"][0]["pending"].as_u64() > Some(0)).then_some(())
        });
        attached.request_end();
        while attached.next_event().expect("it has not ended")["event"] != "stopping" {}
        // In order it cannot end: a door waits for the write, and the write for the target.
        wait_for("the log says what it waits for", || {
            attached.stderr().contains("stopping: waiting for the target to answer").then_some(())
        });
        attached.request_end();
        let ended = attached.finished();
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert!(writer.join().expect("it only writes").is_err(), "it is free");
    });
}
