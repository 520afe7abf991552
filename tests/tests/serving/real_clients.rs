//! Clients that nobody here wrote find nothing to complain about: nbdinfo, nbdcopy, qemu-img, fio,
//! and libnbd's Python API with writes that overlap in flight.

use std::path::Path;

use sawmill_testkit::Dice;
use sawmill_tests::machine::{command, repository, run};
use sawmill_tests::on_each_store;
use sawmill_tests::store::StoreUnderTest;
use sawmill_tests::test_bed::TestBed;

on_each_store!(
    nbdinfo_sees_size_blocks_and_abilities,
    nbdcopy_reads_back_what_it_wrote,
    qemu_img_converts_and_finds_both_images_identical,
    fio_verifies_writes_of_every_size_at_any_byte,
    overlapping_writes_in_flight_end_the_same_for_every_reader_and_after_a_restart,
);

/// An image with data, zeroes and holes.
fn make_image(path: &Path, bytes: usize) {
    let mut dice = Dice::seeded("make_image");
    let mut image = vec![0; bytes];
    for start in (0..bytes).step_by(1 << 20).filter(|start| start % (3 << 20) != 0) {
        let length = (1 << 20).min(bytes - start) / (1 + dice.below(4) as usize);
        image[start..start + length].copy_from_slice(&dice.bytes(length));
    }
    std::fs::write(path, image).expect("an image file");
}

fn nbdinfo_sees_size_blocks_and_abilities(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    bed.create("disk", "24M", &[]);
    let server = bed.serve("disk").start();
    let report = run(command("nbdinfo").arg("--json").arg(server.uri()));
    let report: serde_json::Value = serde_json::from_str(&report).expect("nbdinfo prints JSON");
    let export = &report["exports"][0];
    assert_eq!(report["structured"], true);
    assert_eq!(export["export-size"], 24 << 20);
    assert_eq!(export["block_size_minimum"], 1, "requests need not be aligned");
    for ability in [
        "can_flush",
        "can_fua",
        "can_trim",
        "can_zero",
        "can_multi_conn",
        "can_df",
        "can_fast_zero",
    ] {
        assert_eq!(export[ability], true, "{ability}");
    }
    assert_eq!(export["is_read_only"], false);
    // Nothing was written, so everything is a hole that reads as zeroes.
    let map = run(command("nbdinfo").args(["--map", "--json"]).arg(server.uri()));
    let map: serde_json::Value = serde_json::from_str(&map).expect("nbdinfo prints JSON");
    assert_eq!(map[0]["type"], 3, "{map}");
    let _ = server.stop().ok();
}

fn nbdcopy_reads_back_what_it_wrote(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    bed.create("disk", "24M", &["--segment-bytes", "1M"]);
    let (there, back) = (bed.path("there.img"), bed.path("back.img"));
    make_image(&there, 24 << 20);
    let server = bed.serve("disk").start();
    run(command("nbdcopy").arg("--flush").arg(&there).arg(server.uri()));
    run(command("nbdcopy").arg(server.uri()).arg(&back));
    let same = std::fs::read(&there).expect("source") == std::fs::read(&back).expect("copy");
    assert!(same, "the copy differs");
    let _ = server.stop().ok();
    // Once more from another machine, where every byte comes from the store.
    let elsewhere = bed.neighbor();
    let server = elsewhere.serve("disk").start();
    run(command("nbdcopy").arg(server.uri()).arg(&back));
    let same = std::fs::read(&there).expect("source") == std::fs::read(&back).expect("copy");
    assert!(same, "the copy made from the store differs");
}

fn qemu_img_converts_and_finds_both_images_identical(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    bed.create("disk", "24M", &["--block-size", "512"]);
    let (there, back) = (bed.path("there.img"), bed.path("back.qcow2"));
    make_image(&there, 24 << 20);
    let server = bed.serve("disk").start();
    let uri = server.uri();
    run(command("qemu-img")
        .args(["convert", "-n", "-f", "raw", "-O", "raw"])
        .arg(&there)
        .arg(&uri));
    run(command("qemu-img").args(["compare", "-f", "raw", "-F", "raw"]).arg(&there).arg(&uri));
    run(command("qemu-img").args(["convert", "-f", "raw", "-O", "qcow2"]).arg(&uri).arg(&back));
    run(command("qemu-img").args(["compare", "-f", "raw", "-F", "qcow2"]).arg(&there).arg(&back));
    let _ = server.stop().ok();
}

fn fio_verifies_writes_of_every_size_at_any_byte(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    bed.create("disk", "64M", &["--segment-bytes", "1M"]);
    let server = bed.serve("disk").start();
    let common = ["--ioengine=nbd", "--size=64M", "--verify=crc32c", "--verify_fatal=1"];
    let jobs: [&[&str]; 3] = [
        &["--rw=randwrite", "--bsrange=512-1M", "--bs_unaligned=1", "--iodepth=8", "--do_verify=1"],
        &[
            "--rw=randrw",
            "--bssplit=512/20:4k/40:16k/20:64k/10:1M/10",
            "--iodepth=32",
            "--fsync=64",
        ],
        &["--rw=write", "--bs=256k", "--iodepth=16", "--verify_backlog=32"],
    ];
    for (n, job) in jobs.iter().enumerate() {
        let mut fio = command("fio");
        fio.current_dir(bed.path("")).arg(format!("--name=job{n}")).args(common);
        run(fio.arg(format!("--uri={}", server.uri())).args(*job));
    }
    let _ = server.stop().ok();
    let _ = bed.sawmill(&["check", "disk"]).ok();
}

fn overlapping_writes_in_flight_end_the_same_for_every_reader_and_after_a_restart(
    store: &StoreUnderTest,
) {
    let bed = TestBed::new(store);
    bed.create("disk", "8M", &["--segment-bytes", "256K"]);
    let image = bed.path("image");
    let script = repository().join("tests/tests/serving/real_clients/overlapping.py");
    let seed = Dice::seeded("overlapping").below(1 << 32).to_string();
    let server = bed.serve("disk").start();
    // Debian's own Python: python3-libnbd is built for it.
    let python = || std::process::Command::new("/usr/bin/python3");
    println!("{}", run(python().arg(&script).args([&server.uri(), &seed]).arg(&image)));
    let content = std::fs::read(&image).expect("the script leaves the image it saw");
    server.kill();
    let server = bed.serve("disk").start();
    assert!(
        server.connect().read_all().expect("readable") == content,
        "after kill -9 the order is another"
    );
    let _ = server.stop().ok();
    let elsewhere = bed.neighbor();
    let server = elsewhere.serve("disk").start();
    assert!(
        server.connect().read_all().expect("readable") == content,
        "in the store the order is another"
    );
}
