//! `sawmill target`, `sawmill attach` and `sawmill link`: devices of another machine, one writer at
//! a time.

use sawmill_tests::linked::{End, addresses, key};
use sawmill_tests::machine::{command, require_mount, run, skip};
use sawmill_tests::test_bed::TestBed;
use sawmill_tests::{requires, store};

/// A target of these names, with its key, and where it is.
struct TargetScene {
    bed: TestBed,
    listen: String,
    key: String,
    target: End,
}

/// What keeps a target of volumes small.
const SMALL: [&str; 4] = ["--journal-bytes", "64M", "--cache-bytes", "64M"];

impl TargetScene {
    fn start(bed: TestBed, names: &[&str], kinds: &[&str]) -> Self {
        let (listen, key) = (addresses(kinds), key(&bed, "key"));
        let target = Self::target(&bed, names, &listen, &key);
        TargetScene { bed, listen, key, target }
    }

    fn target(bed: &TestBed, names: &[&str], listen: &str, key: &str) -> End {
        let staging = bed.memory().display().to_string();
        let words =
            ["--listen", listen, "--key-file", key, "--name", "store", "--staging", &staging];
        End::start(bed, &[&["target"], names, &SMALL, &words].concat())
    }

    fn link(&self, export: &str) -> String {
        format!("link:{}/{export}", self.listen)
    }

    fn attach(&self, name: &str, export: &str, options: &[&str]) -> End {
        let door = format!("unix:{}", self.bed.path(&format!("{name}.sock")).display());
        let link = self.link(export);
        let words = ["attach", &link, "--key-file", &self.key, "--name", name, "--nbd", &door];
        End::start(&self.bed, &[&words, options].concat())
    }

    /// An attach that is to be refused.
    fn refused(&self, words: &[&str], code: i32, texts: &[&str]) {
        let door = format!("unix:{}", self.bed.path("refused.sock").display());
        self.bed
            .sawmill(&[&["attach"], words, &["--nbd", &door, "--log", "error"]].concat())
            .refused(code, texts);
    }
}

fn memory(kinds: &[&str]) -> TargetScene {
    TargetScene::start(TestBed::new(&store::folder()), &["memory:16M"], kinds)
}

#[test]
fn a_volume_and_a_file_of_another_machine_are_written_and_read_over_several_links() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "16M", &[]);
    let file = bed.path("file");
    std::fs::File::create(&file).expect("a file").set_len(4 << 20).expect("of a size");
    let device = format!("raw=device:{}", file.display());
    let scene =
        TargetScene::start(bed, &["disk", &device, "scratch=memory:1M"], &["udp", "tcp", "udp"]);
    assert_eq!(scene.target.ready["exports"].as_array().map(Vec::len), Some(3));
    for (export, size) in [("disk", 16 << 20), ("raw", 4 << 20)] {
        let attached = scene.attach(export, export, &[]);
        assert_eq!(attached.ready["size_bytes"].as_u64(), Some(size));
        let client = attached.connect();
        client.write(4096, &[7; 70_000]).expect("accepted");
        client.write(size - 512, &[8; 512]).expect("the last bytes");
        client.flush().expect("flushed");
        assert_eq!(client.read(4096, 70_000).expect("read"), [7; 70_000]);
        assert_eq!(client.read(0, 4096).expect("read"), [0; 4096]);
        drop(client);
        let _ = attached.stop().ok();
    }
    let TargetScene { bed, target, .. } = scene;
    let _ = target.stop().ok();
    let bytes = std::fs::read(&file).expect("the target's file");
    assert!(bytes[4096..74_096].iter().all(|byte| *byte == 7) && bytes[(4 << 20) - 1] == 8);
    let server = bed.serve("disk").start();
    assert_eq!(server.connect().read(4096, 70_000).expect("stored"), [7; 70_000]);
}

#[test]
fn exports_are_listed_a_target_is_found_and_links_report_their_state() {
    let scene = TargetScene::start(
        TestBed::new(&store::folder()),
        &["a=memory:1M", "b=null:1G"],
        &["udp", "tcp"],
    );
    let ask = |words: &[&str]| scene.bed.sawmill(&[&["--json", "link"], words].concat()).json();
    let link = format!("link:{}", scene.listen);
    let listed = ask(&["list", &link, "--key-file", &scene.key]);
    let row = |n: usize| (listed[n]["name"].as_str(), listed[n]["size_bytes"].as_u64());
    assert_eq!((row(0), row(1)), ((Some("a"), Some(1 << 20)), (Some("b"), Some(1 << 30))));
    let udp = scene.listen.split(',').next().expect("one").trim_start_matches("udp:");
    let found = ask(&["find", "--udp", udp, "--wait", "300ms"]);
    assert_eq!(
        (found[0]["name"].as_str(), found[0]["sealed"].as_bool()),
        (Some("store"), Some(true))
    );
    assert_eq!(found[0]["address"].as_str(), Some(&*format!("udp:{udp}")));
    assert_eq!(
        ask(&["find", "--udp", udp, "--name", "other", "--wait", "300ms"]),
        serde_json::json!([])
    );
    let attached = scene.attach("a", "a", &["--cache", "write-back"]);
    attached.connect().write(100, &[1; 10]).expect("accepted");
    let status = ask(&["status", "--over", "0"]);
    let ends = status.as_array().expect("ends");
    let end = |kind: &str| ends.iter().find(|end| end["kind"] == kind).expect("it runs");
    assert_eq!(end("target")["connections"].as_array().map(Vec::len), Some(1), "{status}");
    let connection = &end("attach")["connections"][0];
    assert!(connection["connected"] == true && connection["places"].as_u64() > Some(0), "{status}");
    assert_eq!(connection["links"].as_array().map(Vec::len), Some(2), "{status}");
    assert_eq!(end("attach")["cache"]["partial_writes"].as_u64(), Some(1), "{status}");
    let table = scene.bed.sawmill(&["link", "status", "--over", "50ms"]).ok();
    assert!(
        table.contains("places in use") && table.contains("saved by 1 partial writes"),
        "{table}"
    );
}

#[test]
fn an_initiator_without_the_key_is_refused_with_the_reason() {
    let scene = memory(&["udp"]);
    let link = scene.link("memory");
    let wrong = key(&scene.bed, "wrong");
    scene.refused(&[&link, "--key-file", &wrong], 8, &["same key"]);
    scene.refused(&[&link, "--insecure"], 8, &["wants a key"]);
    scene.refused(&[&link], 2, &["sawmill link key", "--insecure"]);
    scene
        .bed
        .sawmill(&["target", "memory:1M", "--listen", "udp:127.0.0.1"])
        .refused(2, &["sawmill link key"]);
    scene.bed.sawmill(&["link", "key", &wrong]).refused(4, &["never overwritten"]);
    let insecure = addresses(&["udp"]);
    let open =
        End::start(&scene.bed, &["target", "memory:1M", "--listen", &insecure, "--insecure"]);
    scene.refused(
        &[&format!("link:{insecure}/memory"), "--key-file", &scene.key],
        8,
        &["insecure"],
    );
    let _ = open.stop().ok();
}

#[test]
fn a_device_has_one_user_until_another_takes_it_over_or_all_share_it() {
    let scene = memory(&["udp"]);
    let first = scene.attach("first", "memory", &[]);
    first.connect().write(0, &[1; 4096]).expect("accepted");
    let link = scene.link("memory");
    scene.refused(&[&link, "--key-file", &scene.key], 11, &["--take-over", "--shared"]);
    let second = scene.attach("second", "memory", &["--take-over"]);
    let client = second.connect();
    assert_eq!(client.read(0, 4096).expect("read"), [1; 4096]);
    assert!(first.connect().write(0, &[9; 4096]).is_err(), "the first one is cut off");
    first.finished().refused_as_fenced("taken over the export");
    assert_eq!(client.read(0, 4096).expect("read"), [1; 4096]);
    drop(client);
    // Also one that nobody uses hears of it.
    let third = scene.attach("third", "memory", &["--take-over"]);
    second.finished().refused_as_fenced("taken over the export");
    let _ = third.stop().ok();
    let one = scene.attach("one", "memory", &["--shared"]);
    let other = scene.attach("other", "memory", &["--shared"]);
    one.connect().write(0, &[3; 512]).expect("accepted");
    assert_eq!(other.connect().read(0, 512).expect("read"), [3; 512]);
}

#[test]
fn an_attach_that_cannot_open_its_doors_or_cache_fences_no_initiator() {
    let scene = memory(&["udp"]);
    let first = scene.attach("first", "memory", &[]);
    let link = scene.link("memory");
    let door = first
        .uri()
        .split_once("socket=")
        .map(|(_, path)| format!("unix:{path}"))
        .expect("a socket");
    let words =
        ["attach", &link, "--key-file", &scene.key, "--take-over", "--log", "error", "--nbd"];
    let refused = |options: &[&str], code, texts: &[&str]| {
        scene.bed.sawmill(&[&words, options].concat()).refused(code, texts);
    };
    refused(&[&door], 11, &["--nbd"]);
    let free = format!("unix:{}", scene.bed.path("free.sock").display());
    refused(&[&free, "--cache", "write-back", "--cache-bytes", "1K"], 2, &["--cache-bytes"]);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let admin = listener.local_addr().expect("bound").to_string();
    refused(&[&free, "--admin", &admin], 11, &["--admin"]);
    first.connect().write(0, &[1; 512]).expect("it is not fenced");
}

trait FencedRefusal {
    fn refused_as_fenced(&self, text: &str);
}

impl FencedRefusal for sawmill_tests::test_bed::CommandOutput {
    /// An attachment logs more than its last line.
    fn refused_as_fenced(&self, text: &str) {
        let last = self.stderr.lines().last().unwrap_or_default();
        let has_message = last.starts_with("sawmill: error: ") && last.contains(text);
        assert!(self.code == Some(6) && has_message, "{self:?}");
    }
}

#[test]
fn an_initiator_fenced_while_frozen_stays_fenced_when_the_target_restarts() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "16M", &[]);
    let file = bed.path("file");
    std::fs::File::create(&file).expect("a file").set_len(4 << 20).expect("of a size");
    let names = ["disk", &format!("raw=device:{}", file.display())];
    let mut scene = TargetScene::start(bed, &names, &["udp"]);
    for export in ["disk", "raw"] {
        let first = scene.attach("first", export, &[]);
        first.connect().write(0, &[1; 4096]).expect("accepted");
        first.freeze(true);
        let second = scene.attach("second", export, &["--take-over"]);
        second.connect().write(0, &[2; 4096]).expect("accepted");
        // It leaves in order: nobody has it any more.
        let _ = second.stop().ok();
        let TargetScene { bed, listen, key, target } = scene;
        target.kill();
        let target = TargetScene::target(&bed, &names, &listen, &key);
        scene = TargetScene { bed, listen, key, target };
        first.freeze(false);
        first.finished().refused_as_fenced("reservation conflict");
        // Without --take-over: the last one gave it back.
        let third = scene.attach("third", export, &[]);
        assert_eq!(third.connect().read(0, 4096).expect("read"), [2; 4096], "{export}");
    }
}

#[test]
fn a_device_of_another_machine_is_a_file_and_a_block_device_of_this_one() {
    requires!(require_mount());
    let scene = memory(&["udp", "tcp"]);
    let folder = scene.bed.path("mount").display().to_string();
    let attached =
        scene.attach("disk", "memory", &["--fuse", &folder, "--loop", "--cache", "write-through"]);
    let doors = attached.ready["doors"].as_array().expect("doors");
    let device = doors
        .iter()
        .find_map(|door| door["address"].as_str().filter(|path| path.starts_with("/dev/")));
    attached.connect().write(8192, &[6; 4096]).expect("accepted");
    let bytes = run(command("dd")
        .args(["bs=4096", "skip=2", "count=1", "status=none", "iflag=direct"])
        .arg(format!("if={}", device.expect("a loop device"))));
    assert_eq!(bytes.as_bytes(), [6; 4096]);
    let _ = attached.stop().ok();
}

#[test]
fn a_read_only_initiator_changes_nothing() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "1M", &[]);
    let scene = TargetScene::start(bed, &["disk", "memory:1M", "--read-only"], &["udp"]);
    let attached = scene.attach("reader", "disk", &[]);
    assert_eq!(attached.ready["read_only"], true);
    assert!(attached.connect().write(0, &[1; 512]).is_err());
    let beside = scene.attach("beside", "memory", &["--read-only"]);
    assert_eq!(beside.connect().read(0, 512).expect("read"), [0; 512]);
}

#[test]
fn what_cannot_be_a_link_is_refused_with_what_to_write() {
    let scene = memory(&["udp"]);
    let key = ["--key-file", &*scene.key];
    let with_key = |link: &str, options: &[&str], code: i32, texts: &[&str]| {
        scene.refused(&[&[link], options, &key].concat(), code, texts);
    };
    with_key("udp:127.0.0.1/memory", &[], 2, &["link:ADDRESS"]);
    with_key("link:127.0.0.1/memory", &[], 2, &["udp:, tcp:, eth: or xdp:"]);
    with_key("link:udp:127.0.0.1", &[], 2, &["names no export", "sawmill link list"]);
    with_key("link:eth:nosuch0/memory", &[], if is_root() { 3 } else { 8 }, &["eth:nosuch0"]);
    with_key(&scene.link("nothing"), &[], 3, &["nothing", "memory"]);
    with_key(&scene.link("memory"), &["--cache-bytes", "1M"], 2, &["--cache"]);
    with_key(
        &scene.link("memory"),
        &["--cache", "write-back", "--cache-bytes", "1K"],
        2,
        &["--cache-bytes", "64 KiB"],
    );
    with_key(&scene.link("memory"), &["--shared", "--take-over"], 2, &["--take-over"]);
    with_key(&scene.link("memory"), &["--shared", "--cache", "write-through"], 2, &["--cache"]);
    let cached = ["--cache", "write-back", "--dirty-bytes"];
    with_key(
        &scene.link("memory"),
        &[&cached[..], &["1G"]].concat(),
        2,
        &["--dirty-bytes", "--cache-bytes"],
    );
    with_key(&scene.link("memory"), &["--name", "a/b"], 2, &["--name", "a/b"]);
    with_key(&scene.link("memory"), &["--timeout", "soon"], 2, &["--timeout", "30s"]);
    with_key(&scene.link("memory"), &["--admin", "192.0.2.1:9101"], 2, &["--admin", "loopback"]);
    with_key("link:udp:127.0.0.1:99999/memory", &[], 2, &["port"]);
    with_key("link:udp:127.0.0.1,udp:127.0.0.1/memory", &[], 2, &["twice"]);
}

#[test]
fn what_link_and_target_cannot_do_is_refused_with_what_to_write() {
    let scene = memory(&["udp"]);
    let key = ["--key-file", &*scene.key];
    let link = |words: &[&str], code: i32, texts: &[&str]| {
        scene.bed.sawmill(&[&["link"], words].concat()).refused(code, texts);
    };
    link(&["list", "udp:127.0.0.1", key[0], key[1]], 2, &["link:ADDRESS"]);
    link(&["list", "link:udp:127.0.0.1"], 2, &["sawmill link key"]);
    link(&["find", "--udp", "tcp:127.0.0.1"], 2, &["--udp"]);
    link(&["find", "--name", &"x".repeat(65)], 2, &["--name", "64"]);
    link(&["find", "--wait", "soon"], 2, &["--wait", "30s"]);
    link(&["status", "--over", "soon"], 2, &["--over", "30s"]);
    let target = |words: &[&str], code: i32, texts: &[&str]| {
        scene
            .bed
            .sawmill(&[&["target", "--log", "error"], words, &key].concat())
            .refused(code, texts);
    };
    let free = addresses(&["udp"]);
    target(&["memory:1M", "--listen", "127.0.0.1"], 2, &["udp:, tcp:, eth: or xdp:"]);
    target(&["memory:1M", "--listen", &scene.listen], 11, &["another port"]);
    target(&["memory:1M", "memory:2M", "--listen", &free], 2, &["EXPORT="]);
    target(&["memory:1M", "--listen", &free, "--place-bytes-max", "5000"], 2, &["whole pages"]);
    target(&["device:/no/such/disk", "--listen", &free], 3, &["/no/such/disk"]);
    target(&["absent", "--listen", &free], 3, &["absent"]);
    target(&["device:/", "--listen", &free], 2, &["EXPORT="]);
    target(&["root=device:/", "--listen", &free], 2, &["folder"]);
    target(&["a/b=memory:1M", "--listen", &free], 2, &["export name", "a/b"]);
    for size in ["0", "100", "lots", ""] {
        target(&[&format!("memory:{size}"), "--listen", &free], 2, &[&format!("'memory:{size}'")]);
    }
    for (option, wrong) in [
        ("--places-max", "0"),
        ("--places-max", "4097"),
        ("--place-bytes-max", "8M"),
        ("--connections", "0"),
        ("--receivers", "65"),
        ("--admin", "0.0.0.0:9101"),
    ] {
        target(&["memory:1M", "--listen", &free, option, wrong], 2, &[option, wrong]);
    }
    // Names of earlier builds.
    for (option, wrong, now) in
        [("--slots", "4097", "--places-max"), ("--slot-bytes", "8M", "--place-bytes-max")]
    {
        target(&["memory:1M", "--listen", &free, option, wrong], 2, &[now, wrong]);
    }
    target(&["memory:1M", "--listen", &free, "--name", ""], 2, &["name", "64"]);
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Two network namespaces with a cable between them, removed in the end.
struct Cable([String; 2]);

impl Cable {
    fn new() -> Result<Self, String> {
        let names = [0, 1].map(|end| format!("smcli{}-{end}", std::process::id()));
        let ip = |words: &[&str]| {
            command("ip").args(words).output().is_ok_and(|output| output.status.success())
        };
        if !is_root() || !names.iter().all(|name| ip(&["netns", "add", name])) {
            return Err("network namespaces need root".to_owned());
        }
        let cable = Cable(names);
        let [a, b] = [0, 1].map(|end| cable.0[end].as_str());
        let laid = ip(&[
            "-n", a, "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", b,
        ]) && ip(&["-n", a, "link", "set", "near", "up"])
            && ip(&["-n", b, "link", "set", "far", "up"]);
        if laid { Ok(cable) } else { Err("this kernel has no veth interfaces".to_owned()) }
    }

    /// The interface of one end goes down, and up again.
    fn pull(&self) {
        for state in ["down", "up"] {
            run(command("ip").args(["-n", &self.0[0], "link", "set", "near", state]));
        }
    }

    /// A `sawmill` command line at one of its ends.
    fn command(&self, end: usize, bed: &TestBed, words: &[&str]) -> std::process::Command {
        let inside = bed.command(words);
        let mut command = command("ip");
        command
            .args(["netns", "exec", &self.0[end]])
            .arg(inside.get_program())
            .args(inside.get_args());
        command.envs(inside.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for name in &self.0 {
            let _ = command("ip").args(["netns", "del", name]).output();
        }
    }
}

#[test]
fn a_device_comes_by_raw_ethernet_with_no_addresses_at_all() {
    let cable = match Cable::new() {
        Ok(cable) => cable,
        Err(why) => return skip(&why),
    };
    let bed = TestBed::new(&store::folder());
    let key = key(&bed, "key");
    let words = [
        "target",
        "memory:4M",
        "--listen",
        "eth:near",
        "--key-file",
        &key,
        "--name",
        "near",
        "--json",
    ];
    let target = End::launch(&mut cable.command(0, &bed, &words));
    let find = ["--json", "link", "find", "--interface", "far", "--wait", "500ms"];
    let found: serde_json::Value =
        serde_json::from_str(&run(&mut cable.command(1, &bed, &find))).expect("a list");
    assert_eq!(
        (found[0]["name"].as_str(), found[0]["address"].as_str()),
        (Some("near"), Some("eth:far"))
    );
    let door = format!("unix:{}", bed.path("far.sock").display());
    let words = ["attach", "link:eth:far/memory", "--key-file", &key, "--nbd", &door, "--json"];
    let attached = End::launch(&mut cable.command(1, &bed, &words));
    let client = attached.connect();
    client.write(0, &[5; 300_000]).expect("accepted");
    assert_eq!(client.read(0, 300_000).expect("read"), [5; 300_000]);
    // The cable is pulled and put back: both ends open their interfaces again.
    cable.pull();
    client.write(0, &[6; 300_000]).expect("it waited");
    assert_eq!(client.read(0, 300_000).expect("read"), [6; 300_000]);
    drop(client);
    let _ = attached.stop().ok();
    let _ = target.stop().ok();
}

#[test]
fn a_target_is_found_by_broadcast_without_a_default_route() {
    let cable = match Cable::new() {
        Ok(cable) => cable,
        Err(why) => return skip(&why),
    };
    for (end, interface) in ["near", "far"].into_iter().enumerate() {
        let address = format!("10.99.7.{}/24", end + 1);
        run(command("ip").args(["-n", &cable.0[end], "addr", "add", &address, "dev", interface]));
    }
    let bed = TestBed::new(&store::folder());
    let words = [
        "target",
        "memory:1M",
        "--listen",
        "udp:0.0.0.0",
        "--insecure",
        "--name",
        "near",
        "--json",
    ];
    let target = End::launch(&mut cable.command(0, &bed, &words));
    let find = |options: &[&str]| -> serde_json::Value {
        let words = [&["--json", "link", "find", "--wait", "500ms"], options].concat();
        serde_json::from_str(&run(&mut cable.command(1, &bed, &words))).expect("a list")
    };
    for found in [find(&[]), find(&["--udp", "10.99.7.255@far"]), find(&["--udp", "udp:10.99.7.1"])]
    {
        let one =
            (found[0]["name"].as_str(), found[0]["address"].as_str(), found[0]["sealed"].as_bool());
        assert_eq!(one, (Some("near"), Some("udp:10.99.7.1:9700"), Some(false)), "{found}");
    }
    let _ = target.stop().ok();
}
