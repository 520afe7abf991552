//! `sawmill target --machines`: a key for each machine, what each may open, and a reload under
//! those who are attached.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use rustix::process::Signal;
use sawmill_tests::linked::{End, addresses, key};
use sawmill_tests::store;
use sawmill_tests::test_bed::TestBed;

const REFUSED: i32 = 5;
const USAGE: i32 = 2;
const DENIED: i32 = 8;

/// A target of a disk and logs in memory, and the file of its machines.
struct TargetScene {
    bed: TestBed,
    listen: String,
    machines: PathBuf,
    target: End,
}

/// Writes the lines of these machines, which have their keys in files of their names.
fn write_machines(bed: &TestBed, machines: &PathBuf, lines: &[(&str, &str)]) {
    let line = |(name, exports): &(&str, &str)| {
        let key = std::fs::read_to_string(bed.path(name)).expect("its key");
        format!("{name} {} {exports}\n", key.trim())
    };
    let text: String = lines.iter().map(line).collect();
    std::fs::write(machines, text).expect("a file of ours");
    std::fs::set_permissions(machines, PermissionsExt::from_mode(0o600)).expect("a file of ours");
}

fn target_words<'a>(listen: &'a str, machines: &'a str) -> Vec<&'a str> {
    vec!["target", "disk=memory:1M", "logs=memory:1M", "--listen", listen, "--machines", machines]
}

impl TargetScene {
    fn start(lines: &[(&str, &str)]) -> Self {
        let bed = TestBed::new(&store::folder());
        let (listen, machines) = (addresses(&["udp"]), bed.path("machines"));
        lines.iter().for_each(|(name, _)| drop(key(&bed, name)));
        write_machines(&bed, &machines, lines);
        let target = End::start(&bed, &target_words(&listen, &machines.display().to_string()));
        TargetScene { bed, listen, machines, target }
    }

    fn words<'a>(&'a self, key: &'a str, link: &'a str, door: &'a str) -> Vec<&'a str> {
        vec!["attach", link, "--key-file", key, "--nbd", door]
    }

    fn attach(&self, machine: &str, export: &str, options: &[&str]) -> End {
        let (key, link, door) = self.of(machine, export);
        End::start(&self.bed, &[&self.words(&key, &link, &door), options].concat())
    }

    fn refused(&self, machine: &str, export: &str, texts: &[&str]) {
        let (key, link, door) = self.of(machine, export);
        self.bed.sawmill(&self.words(&key, &link, &door)).refused(DENIED, texts);
    }

    fn of(&self, machine: &str, export: &str) -> (String, String, String) {
        let key = self.bed.path(machine).display().to_string();
        let door = format!("unix:{}", self.bed.path(&format!("{machine}-{export}.sock")).display());
        (key, format!("link:{}/{export}", self.listen), door)
    }

    /// What the target says of a reload: machines and connections that ended, or what is wrong.
    fn reload(&mut self) -> Result<(u64, u64), String> {
        self.target.signal(Signal::HUP);
        let event = self.target.next_event().expect("it goes on");
        assert_eq!(event["event"], "reloaded", "{event}");
        match event["error"].as_str() {
            Some(error) => Err(error.to_owned()),
            None => Ok((
                event["machines"].as_u64().expect("machines"),
                event["ended"].as_u64().expect("ended"),
            )),
        }
    }
}

#[test]
fn each_machine_opens_what_its_line_says() {
    let scene = TargetScene::start(&[("db", "disk"), ("backup", "*:ro")]);
    let db = scene.attach("db", "disk", &["--shared"]);
    db.connect().write(0, &[1; 5000]).expect("written");
    scene.refused("db", "logs", &["may not open", "logs"]);
    let backup = scene.attach("backup", "disk", &["--read-only", "--shared"]);
    assert_eq!(backup.connect().read(0, 5000).expect("read"), [1; 5000]);
    scene.refused("backup", "logs", &["may only read"]);
    let link = format!("link:{}", scene.listen);
    for (machine, count) in [("db", 1), ("backup", 2)] {
        let key = scene.bed.path(machine).display().to_string();
        let listed =
            scene.bed.sawmill(&["link", "list", &link, "--key-file", &key, "--json"]).json();
        let listed = listed
            .as_array()
            .map_or_else(|| listed["exports"].as_array().map(Vec::len), |all| Some(all.len()));
        assert_eq!(listed, Some(count), "{machine}");
    }
}

#[test]
fn a_reload_ends_connections_whose_line_is_gone_and_no_others() {
    let mut scene = TargetScene::start(&[("db", "disk"), ("logger", "logs")]);
    let (db, logger) = (scene.attach("db", "disk", &[]), scene.attach("logger", "logs", &[]));
    let (disk, logs) = (db.connect(), logger.connect());
    disk.write(0, &[1; 5000]).expect("written");

    std::fs::write(&scene.machines, "db 0123 disk\n").expect("a file of ours");
    let wrong = scene.reload().expect_err("no key");
    assert!(wrong.contains("line 1") && !wrong.contains("0123"), "{wrong}");
    disk.write(0, &[2; 5000]).expect("nothing has changed");

    write_machines(&scene.bed, &scene.machines, &[("logger", "logs")]);
    assert_eq!(scene.reload(), Ok((1, 1)));
    logs.write(0, &[3; 512]).expect("nothing has changed for it");
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| disk.write(0, &[4; 5000]));
        write_machines(&scene.bed, &scene.machines, &[("logger", "logs"), ("db", "disk")]);
        assert_eq!(scene.reload(), Ok((2, 0)), "it was ended, and waits");
        writer.join().expect("no panic").expect("it went on");
    });
    assert_eq!(disk.read(0, 5000).expect("read"), [4; 5000]);

    write_machines(&scene.bed, &scene.machines, &[("logger", "logs"), ("db", "logs:ro")]);
    assert_eq!(scene.reload(), Ok((2, 1)));
    assert_eq!(db.finished().code, Some(DENIED));
}

#[test]
fn a_file_of_machines_that_cannot_be_is_refused_with_the_line() {
    let bed = TestBed::new(&store::folder());
    let (listen, machines) = (addresses(&["udp"]), bed.path("machines"));
    let path = machines.display().to_string();
    drop(key(&bed, "db"));
    write_machines(&bed, &machines, &[("db", "disk"), ("db", "logs")]);
    let target =
        |code, texts: &[&str]| bed.sawmill(&target_words(&listen, &path)).refused(code, texts);
    target(USAGE, &["machines, line 2", "is listed twice"]);
    write_machines(&bed, &machines, &[]);
    target(USAGE, &["no machine"]);
    std::fs::set_permissions(&machines, PermissionsExt::from_mode(0o640)).expect("a file of ours");
    target(REFUSED, &["chmod 600"]);
}
