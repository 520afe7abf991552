//! Faults on the way to a real S3 server, one kind after another: no acknowledged flush is lost, no
//! wrong byte is returned, a put that was done unheard is not taken for a fence, reads are right or
//! fail, and the server goes on when the store is well again. Each test sees in the proxy's counts
//! that its fault happened.

use std::sync::Arc;
use std::time::Duration;

use sawmill_testkit::Dice;
use sawmill_tests::load::{Load, Mix};
use sawmill_tests::nbd::Failure;
use sawmill_tests::proxy::{Fault, FaultRates, Proxy, Rule, Verb};
use sawmill_tests::server::Server;
use sawmill_tests::stamp::check_nothing_accepted_lost;
use sawmill_tests::store::shared_minio;
use sawmill_tests::test_bed::{TestBed, field};

const VOLUME_BYTES: u64 = 8 << 20;
const SEGMENTS: &str = "/seg/";
const OPTIONS: [&str; 4] = ["--checkpoint-bytes", "1M", "--admin", "127.0.0.1:0"];
/// What an attach may end with that could not ask the store.
const UNAVAILABLE: i32 = 7;
const DENIED: i32 = 8;
const EIO: u32 = 5;

/// A volume behind a proxy, and the load on it.
struct Scene {
    proxy: Arc<Proxy>,
    bed: TestBed,
    load: Load,
}

impl Scene {
    fn new() -> Self {
        let proxy = Proxy::before(shared_minio());
        let bed = TestBed::new(&proxy.store());
        bed.create("disk", "8M", &["--segment-bytes", "256K"]);
        let load = Load::new(VOLUME_BYTES, Dice::seeded("store_faults_http"), Mix::default());
        Scene { proxy, bed, load }
    }

    fn serve(&self) -> Server {
        self.bed.serve("disk").with(&OPTIONS).start()
    }

    fn wait_stored(&self) {
        let _ = self.bed.sawmill(&["wait", "disk", "--stored", "--timeout", "60s"]).ok();
    }

    /// A volume with data, closed in order.
    fn filled() -> Self {
        let mut scene = Scene::new();
        let server = scene.serve();
        scene.load.run(&[server.connect()], 600);
        let _ = server.stop().ok();
        scene
    }

    fn judge(&self, image: &[u8]) {
        let judged = check_nothing_accepted_lost(&self.load.log, image);
        judged.unwrap_or_else(|violation| panic!("{violation}; {}", self.proxy.counts()));
    }

    fn happened(&self, fault: Fault, times: u64) {
        let counts = self.proxy.counts();
        assert!(
            counts.of(fault.name()) >= times,
            "{} was to happen {times} times: {counts}",
            fault.name()
        );
    }

    /// On another machine, from the store alone, all is there.
    fn judge_store(&self) {
        let elsewhere = self.bed.neighbor();
        let server = elsewhere.serve("disk").with(&["--accept-journal-loss"]).start();
        self.judge(&server.connect().read_all().expect("readable"));
    }
}

/// Puts meet a fault so many times: every request of the disk succeeds, everything is stored in the
/// end, and the volume survives both a crash and the loss of the machine.
fn writes_go_on(fault: Fault, times: u64) {
    let mut scene = Scene::new();
    let mut server = scene.serve();
    let clients = [server.connect(), server.connect()];
    scene.load.run(&clients, 200);
    scene.proxy.rule(Rule::first(Verb::Put, SEGMENTS, times, fault));
    scene.load.run(&clients, 500);
    scene.wait_stored();
    scene.happened(fault, times);
    scene.load.run(&clients, 200);
    assert!(server.is_running(), "{}", server.stderr());
    scene.judge(&clients[0].read_all().expect("readable"));
    server.kill();
    let server = scene.serve();
    scene.judge(&server.connect().read_all().expect("readable"));
    scene.wait_stored();
    server.kill();
    scene.judge_store();
}

/// Reads from the store meet a fault so many times and are right in spite of it.
fn reads_go_on(fault: Fault, times: u64) {
    let scene = Scene::filled();
    let elsewhere = scene.bed.neighbor();
    let server = elsewhere.serve("disk").with(&["--cache-bytes", "0"]).start();
    scene.proxy.rule(Rule::first(Verb::Get, SEGMENTS, times, fault));
    scene.judge(&server.connect().read_all().expect("readable in spite of the fault"));
    scene.happened(fault, times);
    let _ = server.stop().ok();
}

/// An attach meets the fault at each of its first requests in turn: it succeeds, or says that the
/// store could not be asked; and it is right as soon as the fault is over.
///
/// It asks for several things at once, so which request is which differs from attach to attach.
fn attaches_go_on(verb: Verb, fault: Fault) {
    let scene = Scene::filled();
    let mut hits = 0;
    for skip in 0..6 {
        scene.proxy.stop_faults();
        let before = scene.proxy.counts().of(fault.name());
        scene.proxy.rule(Rule { skip, ..Rule::first(verb, "", 1, fault) });
        let elsewhere = scene.bed.neighbor();
        let server = match elsewhere.serve("disk").attempt() {
            Ok(server) => server,
            Err(refused) => {
                let code = refused.code.unwrap_or(-1);
                assert!(
                    [UNAVAILABLE, DENIED].contains(&code),
                    "request {skip}: {code}: {}",
                    refused.stderr
                );
                scene.proxy.stop_faults();
                elsewhere.serve("disk").start()
            }
        };
        hits += scene.proxy.counts().of(fault.name()) - before;
        scene.proxy.stop_faults();
        scene.judge(&server.connect().read_all().expect("readable"));
        let _ = server.stop().ok();
    }
    assert!(hits > 0, "the fault never happened");
}

/// Bodies are wrong, each time they are asked for: no wrong byte is returned, and when the bodies
/// are right again so are the reads.
fn wrong_bodies_are_errors(fault: Fault) {
    reads_go_on(fault, 1);
    let scene = Scene::filled();
    let elsewhere = scene.bed.neighbor();
    let server = elsewhere.serve("disk").with(&["--cache-bytes", "0"]).start();
    let client = server.connect();
    let right = client.read_all().expect("readable");
    scene.judge(&right);
    scene.proxy.rule(Rule::every(Verb::Get, SEGMENTS, fault));
    let mut refused = 0;
    for (block, expected) in right.chunks(64 << 10).enumerate() {
        match client.read((block as u64) << 16, 64 << 10) {
            Ok(bytes) => assert!(bytes == expected, "wrong bytes at block {block}"),
            Err(failure) => {
                assert_eq!(failure, Failure::Errno(EIO), "block {block}");
                refused += 1;
            }
        }
    }
    assert!(refused > 0, "every body was wrong, and every read succeeded");
    scene.happened(fault, refused);
    assert!(server.stderr().contains(SEGMENTS), "the object is not named: {}", server.stderr());
    scene.proxy.stop_faults();
    assert!(client.read_all().expect("readable again") == right, "the reads are other ones now");
}

#[test]
fn a_refused_connection_is_an_outage_that_ends() {
    let mut scene = Scene::new();
    let server = scene.serve();
    let clients = [server.connect(), server.connect()];
    for _ in 0..3 {
        scene.load.run(&clients, 200);
        scene.proxy.shut();
        scene.load.run(&clients, 200);
        scene.proxy.open();
    }
    scene.wait_stored();
    assert!(scene.proxy.counts().of("refused") == 3);
    scene.judge(&clients[0].read_all().expect("readable"));
    server.kill();
    scene.judge_store();
}

#[test]
fn a_reset_before_the_request_is_tried_again() {
    writes_go_on(Fault::Reset, 5);
    reads_go_on(Fault::Reset, 5);
    attaches_go_on(Verb::Get, Fault::Reset);
    attaches_go_on(Verb::Put, Fault::Reset);
}

#[test]
fn a_put_whose_answer_is_lost_is_not_taken_for_a_fence() {
    writes_go_on(Fault::AnswerLost, 8);
    attaches_go_on(Verb::Put, Fault::AnswerLost);
}

#[test]
fn a_get_whose_answer_is_lost_is_tried_again() {
    reads_go_on(Fault::AnswerLost, 5);
    attaches_go_on(Verb::Get, Fault::AnswerLost);
}

#[test]
fn a_put_that_is_delivered_twice_is_not_taken_for_a_fence() {
    writes_go_on(Fault::PutTwice, 8);
    attaches_go_on(Verb::Put, Fault::PutTwice);
}

#[test]
fn a_delayed_answer_is_waited_for() {
    writes_go_on(Fault::Delayed(Duration::from_millis(700)), 4);
    reads_go_on(Fault::Delayed(Duration::from_millis(700)), 4);
}

#[test]
fn an_answer_that_trickles_is_waited_for() {
    reads_go_on(Fault::Trickle(Duration::from_millis(80)), 6);
    attaches_go_on(Verb::Get, Fault::Trickle(Duration::from_millis(20)));
}

#[test]
fn a_body_that_is_cut_is_fetched_again() {
    reads_go_on(Fault::Cut, 5);
    attaches_go_on(Verb::Get, Fault::Cut);
    attaches_go_on(Verb::List, Fault::Cut);
}

#[test]
fn a_body_that_is_too_short_for_what_was_asked_is_fetched_again() {
    reads_go_on(Fault::Shortened, 2);
    attaches_go_on(Verb::Get, Fault::Shortened);
}

#[test]
fn an_error_of_the_store_is_tried_again() {
    writes_go_on(Fault::Status(500), 6);
    reads_go_on(Fault::Status(500), 6);
    attaches_go_on(Verb::Get, Fault::Status(500));
    attaches_go_on(Verb::Put, Fault::Status(500));
}

#[test]
fn a_store_that_says_slow_down_is_obeyed_and_asked_again() {
    writes_go_on(Fault::Status(503), 6);
    reads_go_on(Fault::Status(503), 6);
    attaches_go_on(Verb::List, Fault::Status(503));
}

#[test]
fn too_many_requests_are_tried_again() {
    writes_go_on(Fault::Status(429), 6);
    reads_go_on(Fault::Status(429), 6);
}

#[test]
fn credentials_refused_for_a_while_are_reported_and_end_as_an_outage() {
    reads_go_on(Fault::Status(403), 3);
    attaches_go_on(Verb::Get, Fault::Status(403));
    let mut scene = Scene::new();
    let server = scene.serve();
    let clients = [server.connect()];
    scene.proxy.rule(Rule::every(Verb::Put, SEGMENTS, Fault::Status(403)));
    scene.load.run(&clients, 400);
    let status = server.wait_for("the server says that it is refused", |status| {
        field(status, "health").is_some_and(|health| health["state"] == "store_unavailable")
    });
    let health = field(&status, "health").map(ToString::to_string).unwrap_or_default();
    assert!(health.contains("AccessDenied"), "the reason is not reported: {health}");
    scene.load.run(&clients, 200);
    scene.proxy.stop_faults();
    scene.wait_stored();
    scene.happened(Fault::Status(403), 4);
    server.wait_for("the server is well again", |status| {
        field(status, "health").is_some_and(|health| health["state"] == "serving")
    });
    server.kill();
    scene.judge_store();
}

#[test]
fn an_answer_that_never_comes_is_given_up_and_the_put_is_not_taken_for_a_fence() {
    let mut scene = Scene::new();
    let server = scene.serve();
    let clients = [server.connect()];
    scene.proxy.rule(Rule::first(Verb::Put, SEGMENTS, 2, Fault::Held));
    scene.load.run(&clients, 300);
    scene.proxy.wait_for(Fault::Held.name(), 2);
    // The engine gives the held puts up by itself, and finds that they were done.
    scene.wait_stored();
    scene.load.run(&clients, 200);
    scene.proxy.release();
    scene.wait_stored();
    scene.judge(&clients[0].read_all().expect("readable"));
    server.kill();
    scene.judge_store();
}

#[test]
fn a_read_whose_answer_is_held_comes_when_it_is_let_go() {
    let scene = Scene::filled();
    let elsewhere = scene.bed.neighbor();
    let server = elsewhere.serve("disk").with(&["--cache-bytes", "0"]).start();
    let client = server.connect();
    scene.proxy.rule(Rule::first(Verb::Get, SEGMENTS, 3, Fault::Held));
    let image = std::thread::scope(|scope| {
        let reading = scope.spawn(|| client.read_all());
        scene.proxy.wait_for(Fault::Held.name(), 3);
        scene.proxy.release();
        reading.join().expect("the reader does not panic")
    });
    scene.judge(&image.expect("readable"));
}

#[test]
fn a_stop_that_is_asked_for_while_serving_starts_ends_it_in_order() {
    let scene = Scene::new();
    scene.proxy.rule(Rule::first(Verb::Get, "", 1, Fault::Held));
    let server = scene.bed.serve("disk").launch();
    scene.proxy.wait_for(Fault::Held.name(), 1);
    server.signal(rustix::process::Signal::TERM);
    scene.proxy.release();
    let ended = server.finished();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

#[test]
fn garbled_bodies_are_never_returned() {
    wrong_bodies_are_errors(Fault::Garbled);
}

#[test]
fn bodies_of_other_objects_are_never_returned() {
    wrong_bodies_are_errors(Fault::Foreign);
}

#[test]
fn shortened_bodies_are_never_returned() {
    let scene = Scene::filled();
    let elsewhere = scene.bed.neighbor();
    let server = elsewhere.serve("disk").with(&["--cache-bytes", "0"]).start();
    let client = server.connect();
    // Each is asked for again until it is whole.
    scene.proxy.rule(Rule::every(Verb::Get, SEGMENTS, Fault::Shortened));
    let image = std::thread::scope(|scope| {
        let reading = scope.spawn(|| client.read_all());
        scene.proxy.wait_for(Fault::Shortened.name(), 20);
        scene.proxy.stop_faults();
        reading.join().expect("the reader does not panic")
    });
    scene.judge(&image.expect("readable"));
}

#[test]
fn a_body_garbled_once_does_not_stop_an_attach() {
    attaches_go_on(Verb::Get, Fault::Garbled);
}

#[test]
fn the_body_of_another_object_does_not_stop_an_attach() {
    attaches_go_on(Verb::Get, Fault::Foreign);
}

#[test]
fn a_list_that_lags_hides_nothing() {
    let mut scene = Scene::new();
    for _ in 0..2 {
        let server = scene.serve();
        scene.load.run(&[server.connect()], 150);
        let _ = server.stop().ok();
        // Of its keys some are gone, and newer ones are not in it.
        scene.proxy.rule(Rule::every(Verb::List, "", Fault::ListLagged));
        let server = scene.serve();
        scene.judge(&server.connect().read_all().expect("readable"));
        scene.load.run(&[server.connect()], 150);
        scene.wait_stored();
        server.kill();
        scene.judge_store();
        scene.proxy.stop_faults();
        scene.bed.lose_state();
        let server =
            scene.bed.serve("disk").with(&OPTIONS).with(&["--accept-journal-loss"]).start();
        let _ = server.stop().ok();
    }
    scene.happened(Fault::ListLagged, 2);
}

#[test]
fn a_list_that_lacks_keys_never_rolls_back() {
    let mut scene = Scene::new();
    for round in 0..2 {
        let server = scene.serve();
        scene.load.run(&[server.connect()], 150);
        let _ = server.stop().ok();
        scene.proxy.rule(Rule::every(Verb::List, "", Fault::ListLacking));
        match scene.bed.serve("disk").with(&OPTIONS).attempt() {
            Ok(server) => {
                scene.judge(&server.connect().read_all().expect("readable"));
                let _ = server.stop().ok();
            }
            // Without any list nobody can know where to begin; to stop is right, to guess would not
            // be.
            Err(refused) => {
                assert!(refused.stderr.contains("list"), "round {round}: {}", refused.stderr)
            }
        }
        scene.proxy.stop_faults();
    }
    scene.happened(Fault::ListLacking, 2);
    let server = scene.serve();
    scene.judge(&server.connect().read_all().expect("readable"));
    let _ = server.stop().ok();
}

#[test]
fn a_wrong_etag_disturbs_no_read_write_or_attach() {
    writes_go_on(Fault::WrongEtag, 8);
    reads_go_on(Fault::WrongEtag, 8);
    attaches_go_on(Verb::Put, Fault::WrongEtag);
}

#[test]
fn puts_delivered_after_a_newer_attachment_change_nothing() {
    let mut scene = Scene::new();
    let server = scene.serve();
    let clients = [server.connect(), server.connect()];
    scene.load.run(&clients, 200);
    scene.wait_stored();
    // From here on nothing reaches the store in time.
    scene.proxy.rule(Rule::every(Verb::Put, SEGMENTS, Fault::PutLate));
    scene.load.run(&clients, 600);
    scene.proxy.wait_for(Fault::PutLate.name(), 6);
    server.kill();
    scene.proxy.stop_faults();
    let elsewhere = scene.bed.neighbor();
    let second = elsewhere.serve("disk").with(&["--accept-journal-loss"]).start();
    let image = second.connect().read_all().expect("readable");
    scene.load.log.rebase(&image);
    let clients = [second.connect()];
    scene.load.run(&clients, 200);
    let statuses = scene.proxy.deliver_late();
    println!("late puts were answered with {statuses:?}");
    assert!(
        statuses.contains(&200) && statuses.contains(&412),
        "one meets the fence, others make objects: {statuses:?}"
    );
    scene.load.run(&clients, 200);
    scene.judge(&clients[0].read_all().expect("readable"));
    let _ = elsewhere.sawmill(&["wait", "disk", "--stored", "--timeout", "60s"]).ok();
    second.kill();
    scene.judge_store();
}

#[test]
fn a_load_goes_through_every_fault_by_chance() {
    let mut scene = Scene::new();
    for round in 0..2 {
        let server = scene.serve();
        let clients = [server.connect(), server.connect()];
        let rates = FaultRates { dice: Dice::new(scene.load.dice.word()), fault_once_in: 3 };
        scene.proxy.inject_by_chance(rates);
        for _ in 0..4 {
            scene.load.run(&clients, 250);
            // Flushes that were acknowledged and writes that were accepted can be read.
            match clients[0].read_all() {
                Ok(image) => scene.judge(&image),
                Err(failure) => assert_eq!(failure, Failure::Errno(EIO)),
            }
        }
        scene.proxy.shut();
        scene.load.run(&clients, 100);
        scene.proxy.open();
        scene.proxy.stop_faults();
        scene.wait_stored();
        scene.judge(&clients[0].read_all().expect("readable when the store is well again"));
        server.kill();
        scene.proxy.deliver_late();
        if round % 2 == 1 {
            scene.judge_store();
            scene.bed.lose_state();
            let server =
                scene.bed.serve("disk").with(&OPTIONS).with(&["--accept-journal-loss"]).start();
            let _ = server.stop().ok();
        }
    }
    let counts = scene.proxy.counts();
    println!("{counts}");
    assert!(counts.total() > 50, "hardly anything went wrong: {counts}");
}
