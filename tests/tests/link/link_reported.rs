//! What both ends of a link report: metrics, status, readiness; and which bytes a cache saved.

use std::collections::BTreeMap;

use sawmill_tests::linked::{End, addresses, key};
use sawmill_tests::machine::{PATIENCE, wait_for};
use sawmill_tests::nbd::{Client, Style};
use sawmill_tests::server::page;
use sawmill_tests::store;
use sawmill_tests::test_bed::TestBed;
use serde_json::Value;

const ADMIN: [&str; 2] = ["--admin", "127.0.0.1:0"];

/// A test bed with a key, and where its target listens.
struct Scene {
    bed: TestBed,
    listen: String,
    key: String,
}

impl Scene {
    fn new(kinds: &[&str]) -> Self {
        let bed = TestBed::new(&store::folder());
        let key = key(&bed, "key");
        Scene { bed, listen: addresses(kinds), key }
    }

    fn target_words(&self) -> Vec<&str> {
        vec![
            "target",
            "memory:16M",
            "--listen",
            &self.listen,
            "--key-file",
            &self.key,
            "--name",
            "store",
        ]
    }

    fn target(&self) -> End {
        End::start(&self.bed, &[&self.target_words(), &ADMIN[..]].concat())
    }

    fn attach_words(&self) -> Vec<String> {
        let link = format!("link:{}/memory", self.listen);
        let door = format!("unix:{}", self.bed.path("door.sock").display());
        ["attach", &link, "--key-file", &self.key, "--nbd", &door].map(str::to_owned).to_vec()
    }

    fn attach(&self, options: &[&str]) -> End {
        let words = self.attach_words();
        let words: Vec<&str> =
            words.iter().map(String::as_str).chain(options.iter().copied()).collect();
        End::start(&self.bed, &words)
    }
}

/// The samples of a page of metrics, by name and labels.
fn metrics(end: &End) -> BTreeMap<String, f64> {
    let text = page(end.ready["admin"].as_str().expect("it was started with --admin"), "metrics");
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    samples
        .map(|line| {
            let (name, value) =
                line.rsplit_once(' ').unwrap_or_else(|| panic!("no sample: {line}"));
            (name.to_owned(), value.parse().unwrap_or_else(|_| panic!("no number: {line}")))
        })
        .collect()
}

/// The samples of one metric, by link, whatever the other labels are.
fn by_link(samples: &BTreeMap<String, f64>, name: &str) -> BTreeMap<String, f64> {
    let of = |labels: &str| {
        labels.split(',').find(|label| label.starts_with("link=")).map(str::to_owned)
    };
    let samples = samples.iter().filter_map(|(sample, value)| {
        let labels = sample.strip_prefix(name)?.strip_prefix('{')?;
        Some((of(labels)?, *value))
    });
    samples.collect()
}

/// The first label of a sample of a metric.
fn connection_of(samples: &BTreeMap<String, f64>) -> String {
    let mut names = samples.keys().filter(|name| name.starts_with("sawmill_link_connected{"));
    let (one, none) = (names.next().expect("a connection"), names.next());
    assert_eq!(none, None, "one connection, under one label");
    one.split_once('{').and_then(|(_, labels)| labels.split(',').next()).expect("labels").to_owned()
}

fn sum(samples: &BTreeMap<String, f64>) -> f64 {
    samples.values().sum()
}

#[test]
fn both_ends_count_the_same_packets_of_the_same_links() {
    let scene = Scene::new(&["udp", "udp", "tcp"]);
    let target = scene.target();
    let attached = scene.attach(&ADMIN);
    let client = attached.connect();
    client.write(0, &[7; 4 << 20]).expect("accepted");
    assert_eq!(client.read(0, 1 << 20).expect("read"), [7; 1 << 20]);
    let (initiator_metrics, target_metrics) = (metrics(&attached), metrics(&target));
    assert_eq!(
        connection_of(&initiator_metrics),
        connection_of(&target_metrics),
        "both ends name the connection alike"
    );
    assert_eq!(initiator_metrics["sawmill_link_connections"], 1.0);
    for name in ["sawmill_link_up", "sawmill_link_sent_bytes_total", "sawmill_link_rtt_seconds"] {
        assert_eq!(
            (by_link(&initiator_metrics, name).len(), by_link(&target_metrics, name).len()),
            (3, 3),
            "{name}: {target_metrics:?}"
        );
    }
    assert_eq!(
        (
            sum(&by_link(&initiator_metrics, "sawmill_link_up")),
            sum(&by_link(&target_metrics, "sawmill_link_up"))
        ),
        (3.0, 3.0)
    );
    let bytes = |samples: &BTreeMap<String, f64>, what: &str| {
        sum(&by_link(samples, &format!("sawmill_link_{what}_bytes_total")))
    };
    assert!(
        bytes(&initiator_metrics, "sent") >= f64::from(4 << 20)
            && bytes(&initiator_metrics, "received") >= f64::from(1 << 20)
    );
    // The target was asked later; what came there, this end had sent, except what it sent
    // meanwhile.
    let later = metrics(&attached);
    for (link, received_packets) in by_link(&target_metrics, "sawmill_link_received_packets_total")
    {
        let sent_packets = by_link(&later, "sawmill_link_sent_packets_total")[&link];
        assert!(
            received_packets > 0.0 && received_packets <= sent_packets,
            "{link}: {received_packets} came of {sent_packets}"
        );
    }
    assert!(bytes(&target_metrics, "received") >= f64::from(4 << 20), "{target_metrics:?}");
    let labels = format!("{{{},", connection_of(&initiator_metrics));
    let granted = initiator_metrics
        .iter()
        .find(|(name, _)| name.starts_with(&format!("sawmill_link_places{labels}")));
    assert!(granted.is_some_and(|(_, places)| *places >= 64.0), "{initiator_metrics:?}");
}

#[test]
fn a_link_is_reported_down_while_its_target_is_away_and_up_when_it_returns() {
    let scene = Scene::new(&["udp", "tcp"]);
    let target = scene.target();
    let attached = scene.attach(&ADMIN);
    let client = attached.connect();
    client.write(0, &[1; 4096]).expect("accepted");
    // What this target has not flushed goes with it, which the last flush would say.
    client.flush().expect("flushed");
    drop(client);
    target.kill();
    let up = |end: &End| by_link(&metrics(end), "sawmill_link_up");
    wait_for("all links are down", || (sum(&up(&attached)) == 0.0).then_some(()));
    assert_eq!(up(&attached).len(), 2, "links that are down are listed");
    let status =
        |scene: &Scene| scene.bed.sawmill(&["--json", "link", "status", "--over", "0"]).json();
    let link = &status(&scene)[0]["connections"][0]["links"][0];
    assert!(matches!(link["state"].as_str(), Some("down" | "silent")), "{link}");
    assert!(
        link["address"].as_str().is_some_and(|address| address.starts_with("udp:127.0.0.1:")),
        "{link}"
    );
    let _target = scene.target();
    wait_for("all links are up", || (sum(&up(&attached)) == 2.0).then_some(()));
    let _ = attached.stop().ok();
    assert_eq!(
        status(&scene)[0]["connections"],
        serde_json::json!([]),
        "no initiator is connected any more"
    );
}

#[test]
fn bytes_that_partial_writes_saved_are_counted_as_whole_pages_less_what_was_sent() {
    let scene = Scene::new(&["udp"]);
    let _target = scene.target();
    let attached = scene.attach(&[&ADMIN[..], &["--cache", "write-back"]].concat());
    let client = attached.connect();
    // NBD writes of one byte in 64 pages: whole pages would be 256 KiB.
    for page in 0..64 {
        client.write(page * 4096 + 100, &[9]).expect("accepted");
    }
    let before = metrics(&attached);
    assert_eq!(before["sawmill_link_cache_dirty_bytes"], 64.0, "{before:?}");
    client.flush().expect("flushed");
    let after = metrics(&attached);
    let of = |name: &str| after[&format!("sawmill_link_cache_{name}")];
    assert_eq!(
        (of("dirty_bytes"), of("partial_writes_total"), of("written_bytes_total")),
        (0.0, 64.0, 64.0)
    );
    assert_eq!(of("saved_bytes_total") + of("sent_bytes_total"), 64.0 * 4096.0, "{after:?}");
    assert!(of("sent_bytes_total") < 64.0 * 16.0, "positions take little: {after:?}");
    let table = scene.bed.sawmill(&["link", "status", "--over", "0"]).ok();
    assert!(table.contains("by 64 partial writes") && table.contains("places in use"), "{table}");
}

#[test]
fn rates_of_both_directions_are_measured_over_the_time_that_is_asked_for() {
    let scene = Scene::new(&["tcp"]);
    let _target = scene.target();
    let attached = scene.attach(&[]);
    let client = attached.connect();
    let over = std::sync::atomic::AtomicBool::new(false);
    let status = std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            while !over.load(std::sync::atomic::Ordering::SeqCst) {
                client.write(0, &[3; 65536]).expect("accepted");
            }
        });
        let status = scene.bed.sawmill(&["--json", "link", "status", "--over", "1s"]).json();
        over.store(true, std::sync::atomic::Ordering::SeqCst);
        load.join().expect("it only writes");
        status
    });
    let end = |kind: &str| -> Value {
        let ends = status.as_array().expect("ends").iter();
        ends.clone().find(|end| end["kind"] == kind).unwrap_or_else(|| panic!("{status}")).clone()
    };
    let rate = |end: &Value, what: &str| end["connections"][0]["links"][0]["rate"][what].as_u64();
    let (here, there) = (end("attach"), end("target"));
    for (end, what) in
        [(&here, "sent"), (&here, "received"), (&there, "sent"), (&there, "received")]
    {
        assert!(rate(end, &format!("{what}_packets_per_s")) > Some(0), "{what}: {status}");
    }
    // Data goes one way, and receipts the other.
    assert!(rate(&here, "sent_bytes_per_s") > rate(&here, "received_bytes_per_s"), "{status}");
    assert!(rate(&there, "received_bytes_per_s") > rate(&there, "sent_bytes_per_s"), "{status}");
}

#[test]
fn the_service_manager_is_notified_when_an_end_is_ready_and_when_it_stops() {
    let scene = Scene::new(&["udp"]);
    let path = scene.bed.path("notify");
    let socket = std::os::unix::net::UnixDatagram::bind(&path).expect("a socket in the place");
    socket.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
    let notification = || {
        let mut message = [0; 256];
        let length = socket.recv(&mut message).expect("it notifies the service manager");
        String::from_utf8_lossy(&message[..length]).into_owned()
    };
    let start = |words: &[&str]| {
        End::launch(scene.bed.command(words).arg("--json").env("NOTIFY_SOCKET", &path))
    };
    let target = start(&scene.target_words());
    assert!(notification().contains("READY=1"));
    let words = scene.attach_words();
    let attached = start(&words.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(notification().contains("READY=1"));
    Client::connect(&attached.uri(), Style::Simple).expect("the door was open by then");
    let _ = attached.stop().ok();
    assert!(notification().contains("STOPPING=1"));
    let _ = target.stop().ok();
    assert!(notification().contains("STOPPING=1"));
}
