//! Whole disks in and out: raw files, qcow2 images, NBD exports, other stores; sparse both ways,
//! taken up again after a kill, and never "done" when they are not.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use sawmill_tests::machine::{command, run, wait_for};
use sawmill_tests::on_each_store;
use sawmill_tests::store::{self, StoreUnderTest};
use sawmill_tests::test_bed::{CommandOutput, TestBed, field};

const MIB: u64 = 1 << 20;

on_each_store!(
    a_raw_file_goes_in_and_comes_back_equal_with_its_holes,
    a_qcow2_image_goes_in_and_comes_back_equal,
);

/// A sparse file of `mib` MiB: runs of noise, of holes, and of zeroes that were written.
fn disk(bed: &TestBed, name: &str, mib: u64) -> PathBuf {
    let path = bed.path(name);
    let file = File::create(&path).expect("a file");
    file.set_len(mib * MIB).expect("a sparse file");
    let mut state = 88_172_645_463_325_252_u64;
    let mut noise = vec![0; MIB as usize];
    for at in (0..mib).filter(|at| at % 4 < 2) {
        for word in noise.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        noise[4096..16384].fill(0);
        file.write_all_at(&noise, at * MIB).expect("written");
    }
    for at in (0..mib).filter(|at| at % 8 == 3) {
        file.write_all_at(&vec![0; MIB as usize], at * MIB).expect("written");
    }
    path
}

/// Bytes of noise in such a disk.
fn noise_bytes(mib: u64) -> u64 {
    mib / 4 * 2 * (MIB - 12288)
}

fn qcow2(raw: &Path) -> PathBuf {
    let image = raw.with_extension("qcow2");
    run(command("qemu-img").args(["convert", "-f", "raw", "-O", "qcow2"]).arg(raw).arg(&image));
    image
}

fn text(path: &Path) -> &str {
    path.to_str().expect("paths of tests are text")
}

fn same(one: &Path, other: &Path) {
    let formats =
        |path: &Path| if path.extension().is_some_and(|e| e == "qcow2") { "qcow2" } else { "raw" };
    let mut compare = command("qemu-img");
    compare.args(["compare", "-f", formats(one), "-F", formats(other)]).arg(one).arg(other);
    run(&mut compare);
}

fn number(document: &serde_json::Value, name: &str) -> u64 {
    let found = field(document, name).and_then(serde_json::Value::as_u64);
    found.unwrap_or_else(|| panic!("no {name} in {document:#}"))
}

/// Options for every command that attaches, so that its staging file is in the test's folder.
fn attach(bed: &TestBed) -> Vec<String> {
    ["--journal-bytes", "64M", "--staging", text(bed.memory())].map(str::to_owned).to_vec()
}

fn import(bed: &TestBed, arguments: &[&str]) -> CommandOutput {
    let attach = attach(bed);
    let words: Vec<&str> =
        ["--json", "import"].into_iter().chain(arguments.iter().copied()).collect();
    let options: Vec<&str> = attach.iter().map(String::as_str).collect();
    bed.sawmill(&[words, options].concat())
}

fn export(bed: &TestBed, arguments: &[&str]) -> CommandOutput {
    bed.sawmill(&[&["--json", "export"], arguments].concat())
}

fn a_raw_file_goes_in_and_comes_back_equal_with_its_holes(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    let source_file = disk(&bed, "there.raw", 32);
    let imported = import(&bed, &[text(&source_file), "disk"]).json();
    assert_eq!(number(&imported, "written_bytes"), noise_bytes(32), "neither holes nor zeroes");
    assert_eq!(imported["created"], true);
    let info = bed.info("disk");
    assert_eq!(number(&info, "size_bytes"), 32 * MIB);
    assert_eq!(number(&info, "live_bytes"), noise_bytes(32), "zeroes take nothing in the store");
    assert!(number(&info, "object_bytes") < noise_bytes(32) + MIB, "{info:#}");
    let _ = bed.sawmill(&["check", "disk"]).ok();
    let back = bed.path("back.raw");
    let exported = export(&bed, &["disk", "--to-file", text(&back)]).json();
    assert_eq!(number(&exported, "written_bytes"), noise_bytes(32));
    same(&source_file, &back);
    let blocks = |path: &Path| std::fs::metadata(path).expect("it is there").blocks() * 512;
    assert!(blocks(&back) <= noise_bytes(32) + MIB, "holes stay holes: {}", blocks(&back));
    assert_eq!(back.metadata().expect("it is there").len(), 32 * MIB);
    assert!(!bed.path("back.raw.part").exists());
}

fn a_qcow2_image_goes_in_and_comes_back_equal(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    let source_file = qcow2(&disk(&bed, "there.raw", 16));
    let _ = import(&bed, &[text(&source_file), "disk"]).ok();
    let (raw, image) = (bed.path("back.raw"), bed.path("back.qcow2"));
    let _ = export(&bed, &["disk", "--to-file", text(&raw)]).ok();
    let _ = export(&bed, &["disk", "--to-file", text(&image), "--format", "qcow2"]).ok();
    same(&source_file, &raw);
    same(&source_file, &image);
    run(command("qemu-img").args(["check", "-q", "-f", "qcow2"]).arg(&image));
}

/// A server of somebody else's, on a socket.
struct NbdServer {
    child: Child,
    uri: String,
}

impl NbdServer {
    /// nbdkit with a plugin and filters; it ends when this goes.
    fn nbdkit(bed: &TestBed, name: &str, arguments: &[&str]) -> Self {
        let socket = bed.path(name);
        let mut kit = command("nbdkit");
        kit.args(["--foreground", "--exit-with-parent", "--unix"]).arg(&socket).args(arguments);
        Self::start(kit, &socket)
    }

    fn qemu(bed: &TestBed, name: &str, format: &str, image: &Path) -> Self {
        let socket = bed.path(name);
        let mut server = command("qemu-nbd");
        server
            .args(["--persistent", "--shared=8", "--discard=unmap"])
            .arg(format!("--format={format}"));
        server.arg("--socket").arg(&socket).arg(image);
        Self::start(server, &socket)
    }

    fn start(mut server: std::process::Command, socket: &Path) -> Self {
        // One that was killed leaves its socket.
        let _ = std::fs::remove_file(socket);
        let child =
            server.stdin(Stdio::null()).stderr(Stdio::null()).spawn().expect("the server starts");
        let ready = || std::os::unix::net::UnixStream::connect(socket).ok();
        wait_for("the NBD server listens", ready);
        NbdServer { child, uri: format!("nbd+unix:///?socket={}", socket.display()) }
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn an_nbd_export_goes_in_and_out() {
    let bed = TestBed::new(&store::folder());
    let source_file = disk(&bed, "there.raw", 16);
    let source = NbdServer::qemu(&bed, "source.sock", "raw", &source_file);
    let imported = import(&bed, &[&source.uri, "disk"]).json();
    assert!(number(&imported, "read_bytes") <= 10 * MIB, "its holes are not read: {imported:#}");
    // A target full of something else, and larger.
    let back = bed.path("back.raw");
    std::fs::write(&back, vec![0xee; 17 * MIB as usize]).expect("written");
    let target = NbdServer::qemu(&bed, "target.sock", "raw", &back);
    let _ = export(&bed, &["disk", "--to-nbd", &target.uri]).ok();
    drop(target);
    let (want, got) =
        (std::fs::read(&source_file).expect("read"), std::fs::read(&back).expect("read"));
    assert!(want == got[..want.len()], "the export differs");
    assert!(got[want.len()..].iter().all(|byte| *byte == 0xee), "what lies beyond was touched");
    let blocks = back.metadata().expect("it is there").blocks() * 512;
    assert!(blocks < 11 * MIB, "holes were punched: {blocks}");
    // One that has neither holes nor write-zeroes to offer.
    let plain = NbdServer::nbdkit(&bed, "plain.sock", &["--filter=nozero", "memory", "16M"]);
    let _ = export(&bed, &["disk", "--to-nbd", &plain.uri]).ok();
    let _ = import(&bed, &[&plain.uri, "again"]).ok();
    let again = bed.path("again.raw");
    let _ = export(&bed, &["again", "--to-file", text(&again)]).ok();
    same(&source_file, &again);
    let small = NbdServer::nbdkit(&bed, "small.sock", &["memory", "15M"]);
    export(&bed, &["disk", "--to-nbd", &small.uri]).refused(5, &["does not fit"]);
    let fixed = NbdServer::nbdkit(&bed, "fixed.sock", &["--readonly", "memory", "16M"]);
    export(&bed, &["disk", "--to-nbd", &fixed.uri]).refused(5, &["read-only"]);
}

/// How far the progress files of a test bed say that it is.
fn progress(bed: &TestBed) -> u64 {
    let folders = std::fs::read_dir(bed.path("state/sawmill")).into_iter().flatten().flatten();
    let files =
        folders.filter_map(|folder| std::fs::read_dir(folder.path()).ok()).flatten().flatten();
    let done = files
        .filter(|file| file.path().extension().is_some_and(|e| e == "progress"))
        .filter_map(|f| {
            let bytes = std::fs::read(f.path()).ok()?;
            Some(u64::from_le_bytes(bytes.get(40..48)?.try_into().ok()?))
        });
    done.max().unwrap_or(0)
}

/// Runs a command and kills it as soon as it has written some progress down. Says how far that was;
/// 0 when it ended first.
fn kill_midway(bed: &TestBed, arguments: &[&str], past: u64) -> u64 {
    let mut child = bed
        .command(arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the binary under test starts");
    let reached = wait_for("progress, or the end", || {
        let ended = child.try_wait().expect("a child of ours").is_some();
        let reached = progress(bed);
        (ended || reached > past).then_some(if ended { 0 } else { reached })
    });
    let _ = child.kill();
    let _ = child.wait();
    // It may have done all meanwhile, and then there is nothing to take up.
    if progress(bed) == 0 { 0 } else { reached }
}

/// In and out, both killed again and again and taken up, and equal in the end.
fn kill_in_both_directions(bed: &TestBed, mib: u64) {
    let raw = disk(bed, "there.raw", mib);
    let source_file = qcow2(&raw);
    let attach = attach(bed);
    let mut words = vec!["import", text(&source_file), "disk"];
    words.extend(attach.iter().map(String::as_str));
    let (mut kills, mut reached, mut is_whole) = (0, 0, false);
    while kills < 3 && !is_whole {
        match kill_midway(bed, &words, reached) {
            0 => is_whole = true,
            now => (reached, kills) = (now, kills + 1),
        }
    }
    if !is_whole {
        let resumed = number(&import(bed, &[text(&source_file), "disk"]).json(), "resumed_bytes");
        assert!(resumed >= reached, "taken up at {resumed}, and {reached} was said to be stored");
    }
    let back = bed.path("back.raw");
    let out = ["export", "disk", "--to-file", text(&back)];
    let mut reached = 0;
    while kills < 6 {
        assert!(!back.exists() || reached == 0, "a file appears when it is whole");
        match kill_midway(bed, &out, reached) {
            0 => break,
            now => reached = now,
        }
        kills += 1;
    }
    if !back.exists() {
        let resumed = number(&export(bed, &out[1..]).json(), "resumed_bytes");
        assert!(resumed >= reached, "taken up at {resumed}, and {reached} was said to be synced");
    }
    assert_eq!(progress(bed), 0, "nothing is left to take up");
    same(&source_file, &back);
    same(&raw, &back);
    println!("{kills} kills");
}

#[test]
fn a_qcow2_image_killed_on_its_way_in_and_out_is_equal_in_the_end() {
    kill_in_both_directions(&TestBed::new(&store::folder()), 64);
}

#[test]
#[ignore = "2 GiB: a minute and 6 GiB of disk; run it with --ignored"]
fn a_qcow2_image_of_two_gibibytes_killed_on_its_way_in_and_out_is_equal_in_the_end() {
    kill_in_both_directions(&TestBed::new(&store::folder()), 2048);
}

#[test]
fn an_nbd_source_and_target_are_compared_when_they_are_taken_up_again() {
    let bed = TestBed::new(&store::folder());
    let source_file = disk(&bed, "there.raw", 128);
    // Half of it is data: the first segment is full after a second, the last after nine.
    let slowly = ["--filter=rate", "file", text(&source_file), "rate=60M", "burstiness=0.2"];
    let source = NbdServer::nbdkit(&bed, "source.sock", &slowly);
    let attach = attach(&bed);
    let mut words = vec!["import", &source.uri, "disk"];
    words.extend(attach.iter().map(String::as_str));
    assert!(kill_midway(&bed, &words, 0) > 0, "killed on its way");
    // Nothing tells that the source has changed: it is seen by comparing.
    let file = File::options().write(true).open(&source_file).expect("opened");
    file.write_all_at(&[7; 5000], 100).expect("written");
    file.write_all_at(&vec![0; MIB as usize], MIB).expect("written");
    drop(source);
    let source = NbdServer::nbdkit(&bed, "source.sock", &["file", text(&source_file)]);
    let _ = import(&bed, &[&source.uri, "disk"]).ok();
    let back = bed.path("back.raw");
    std::fs::write(&back, vec![0xee; 128 * MIB as usize]).expect("written");
    let slowly = ["--filter=rate", "file", text(&back), "rate=60M", "burstiness=0.2"];
    let target = NbdServer::nbdkit(&bed, "target.sock", &slowly);
    assert!(kill_midway(&bed, &["export", "disk", "--to-nbd", &target.uri], 0) > 0, "killed");
    drop(target);
    // The other end lost what it had.
    let file = File::options().write(true).open(&back).expect("opened");
    file.write_all_at(&vec![3; MIB as usize], 0).expect("written");
    let target = NbdServer::nbdkit(&bed, "target.sock", &["file", text(&back)]);
    let _ = export(&bed, &["disk", "--to-nbd", &target.uri]).ok();
    drop(target);
    same(&source_file, &back);
}

#[test]
fn a_source_that_changed_since_is_refused_until_it_starts_over() {
    let bed = TestBed::new(&store::folder());
    let source_file = disk(&bed, "there.raw", 64);
    let attach = attach(&bed);
    let mut words = vec!["import", text(&source_file), "disk"];
    words.extend(attach.iter().map(String::as_str));
    // However early the kill: the volume is there, and so is what was begun.
    let mut child = bed.command(&words).spawn().expect("the binary under test starts");
    wait_for("the import has begun", || bed.journals().first().cloned());
    child.kill().expect("killed");
    child.wait().expect("a child of ours");
    let file = File::options().write(true).open(&source_file).expect("opened");
    file.write_all_at(&[7; 5000], 9 * MIB).expect("written");
    import(&bed, &[text(&source_file), "disk"]).refused(5, &["has changed", "--restart"]);
    let _ = import(&bed, &[text(&source_file), "disk", "--restart"]).ok();
    let back = bed.path("back.raw");
    let _ = export(&bed, &["disk", "--to-file", text(&back)]).ok();
    same(&source_file, &back);
}

#[test]
fn what_cannot_be_imported_or_exported_is_refused_with_its_exit_code() {
    let bed = TestBed::new(&store::folder());
    let source_file = disk(&bed, "there.raw", 8);
    let other = disk(&bed, "other.raw", 4);
    let image = qcow2(&source_file);
    let _ = import(&bed, &[text(&source_file), "disk"]).ok();
    import(&bed, &[text(&source_file), "disk"]).refused(4, &["--overwrite"]);
    import(&bed, &[text(&other), "disk", "--overwrite"])
        .refused(5, &["sizes must match", "resize"]);
    let _ = import(&bed, &[text(&image), "disk", "--overwrite"]).ok();
    import(&bed, &["/nonexistent/disk.raw", "new"]).refused(3, &["/nonexistent/disk.raw"]);
    import(&bed, &["nbd://127.0.0.1:1/x", "new"]).refused(7, &["127.0.0.1:1"]);
    import(&bed, &["nbd:x", "new"]).refused(2, &["nbd://host:port"]);
    let whole = std::fs::metadata(&image).expect("it is there").len();
    File::options().write(true).open(&image).expect("opened").set_len(whole - MIB).expect("cut");
    import(&bed, &[text(&image), "new"]).refused(9, &["truncated"]);
    let disguised = bed.path("disguised.img");
    std::fs::copy(&image, &disguised).expect("copied");
    import(&bed, &[text(&disguised), "new"]).refused(2, &["--format qcow2", "--format raw"]);
    let layer = bed.path("layer.qcow2");
    let mut create = command("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(&source_file).arg(&layer);
    run(&mut create);
    import(&bed, &[text(&layer), "new"]).refused(5, &["there.raw", "--follow-backing"]);
    let _ = import(&bed, &[text(&layer), "layered", "--follow-backing"]).ok();
    let back = bed.path("back.raw");
    let _ = export(&bed, &["layered", "--to-file", text(&back)]).ok();
    same(&source_file, &back);
    export(&bed, &["disk", "--to-file", text(&back)]).refused(4, &["--overwrite"]);
    let _ = export(&bed, &["disk", "--to-file", text(&back), "--overwrite"]).ok();
    export(&bed, &["none", "--to-file", "/tmp/x"]).refused(3, &["none"]);
    export(&bed, &["disk"]).refused(2, &["--to-file"]);
    std::fs::write(bed.path("new.raw.part"), "another program's").expect("written");
    export(&bed, &["disk", "--to-file", text(&bed.path("new.raw"))]).refused(4, &["new.raw.part"]);
    let names = bed.sawmill(&["list", "--json"]).json();
    let names: Vec<_> = names.as_array().expect("a list").iter().map(|row| &row["name"]).collect();
    assert_eq!(names, ["disk", "layered"], "a refused import leaves no volume");
}

#[test]
fn an_image_without_qemu_is_refused_with_what_to_install() {
    let bed = TestBed::new(&store::folder());
    let image = qcow2(&disk(&bed, "there.raw", 4));
    let mut command = bed.command(&["import", text(&image), "disk"]);
    let output =
        command.env("PATH", bed.path("empty")).output().expect("the binary under test starts");
    let finished = CommandOutput::new("sawmill import".into(), &output);
    finished.refused(3, &["qemu-img is not installed", "qemu-utils"]);
}

#[test]
fn a_served_volume_is_exported_as_it_was_when_the_command_began() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "16M", &[]);
    let server = bed.serve("disk").with(&["--segment-age", "0"]).start();
    let client = server.connect();
    client.write(5000, &[5; 100_000]).expect("accepted");
    let back = bed.path("back.raw");
    let _ = export(&bed, &["disk", "--to-file", text(&back)]).ok();
    let bytes = std::fs::read(&back).expect("read");
    assert_eq!(
        bytes[5000..105_000],
        [5; 100_000],
        "accepted before, though nothing had been stored"
    );
    let _ = bed.sawmill(&[&["copy", "disk", "copied"], &words(&attach(&bed))[..]].concat()).ok();
    import(&bed, &[text(&back), "disk", "--overwrite"]).refused(11, &["served"]);
    // Over its own door, like any other NBD export.
    let _ = import(&bed, &[&server.uri(), "doored"]).ok();
    for volume in ["copied", "doored"] {
        let copied_file = bed.path(volume);
        let _ = export(&bed, &[volume, "--to-file", text(&copied_file)]).ok();
        same(&back, &copied_file);
    }
    // Writes that only a journal has are never passed over in silence.
    client.write(5000, &[6; 100_000]).expect("accepted");
    server.kill();
    let again = bed.path("again.raw");
    export(&bed, &["disk", "--to-file", text(&again)]).refused(5, &["--cut", "journal"]);
    let _ = export(&bed, &["disk", "--to-file", text(&again), "--cut"]).ok();
    same(&back, &again);
}

fn words(list: &[String]) -> Vec<&str> {
    list.iter().map(String::as_str).collect()
}

#[test]
fn a_volume_is_copied_to_another_store_and_taken_up_again() {
    let bed = TestBed::new(&store::folder());
    let source_file = disk(&bed, "there.raw", 64);
    let _ = import(&bed, &[text(&source_file), "disk", "--block-size", "512", "--flush", "stored"])
        .ok();
    let elsewhere = format!("file://{}", bed.path("elsewhere").display());
    let destination = format!("{elsewhere}/copied");
    let attach = attach(&bed);
    let copy = [&["copy", "disk", &destination], &words(&attach)[..]].concat();
    let reached = kill_midway(&bed, &copy, 0);
    if reached > 0 {
        let copied = bed.sawmill(&[&copy[..], &["--json"]].concat()).json();
        assert!(number(&copied, "resumed_bytes") >= reached, "{copied:#}");
    }
    let back = bed.path("back.raw");
    let _ = export(&bed, &[&destination, "--to-file", text(&back)]).ok();
    same(&source_file, &back);
    let info = bed.info(&destination);
    assert_eq!(
        (number(&info, "block_bytes"), info["flush"].as_str()),
        (512, Some("stored")),
        "{info:#}"
    );
    assert_eq!(number(&info, "live_bytes"), noise_bytes(64));
    bed.sawmill(&copy).refused(4, &["--overwrite"]);
    bed.sawmill(&["copy", "disk", "disk"]).refused(2, &["itself"]);
}

#[test]
fn progress_that_could_not_be_written_is_no_orderly_end() {
    let bed = TestBed::new(&store::folder());
    let source_file = disk(&bed, "there.raw", 32);
    let slowly = ["--filter=rate", "file", text(&source_file), "rate=60M", "burstiness=0.2"];
    let source = NbdServer::nbdkit(&bed, "source.sock", &slowly);
    let attach = attach(&bed);
    let import = [&["import", &source.uri, "disk"], &words(&attach)[..]].concat();
    let mut child = bed
        .command(&import)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary under test starts");
    drop(child.stderr.take());
    let status = child.wait().expect("a child of ours");
    assert_eq!(status.code(), Some(7), "its progress went nowhere");
    let back = bed.path("back.raw");
    let _ = export(&bed, &["disk", "--to-file", text(&back)]).ok();
    same(&source_file, &back);
}
