//! Images that strangers made to read another file, reach a network or hold up whoever imports
//! them: refused before QEMU sees them; and neither QEMU nor a driver has the secrets of this
//! process.

use std::net::TcpListener;
use std::path::Path;

use sawmill_tests::machine::{command, run, wait_for};
use sawmill_tests::store;
use sawmill_tests::test_bed::{CommandOutput, TestBed};

fn text(path: &Path) -> &str {
    path.to_str().expect("a path of text")
}

/// Refused with 5, and no volume is left.
fn refused(bed: &TestBed, image: &Path, words: &[&str]) {
    bed.sawmill(&["import", text(image), "disk"]).refused(5, words);
    assert_eq!(bed.sawmill(&["list", "--json"]).json(), serde_json::json!([]));
}

fn qcow2(bed: &TestBed, name: &str, options: &[&str]) -> std::path::PathBuf {
    let image = bed.path(name);
    let mut create = command("qemu-img");
    create.current_dir(bed.path("")).args(["create", "-q", "-f", "qcow2"]).args(options);
    let _ = run(create.arg(&image).arg("8M"));
    image
}

#[test]
fn a_vmdk_that_names_a_secret_file_is_refused() {
    let bed = TestBed::new(&store::folder());
    let secret = bed.path("secret");
    std::fs::write(&secret, vec![7; 1 << 20]).expect("written");
    let image = bed.path("image.vmdk");
    let extent = format!("RW 2048 FLAT \"{}\" 0", secret.display());
    let kind = "version=1\nCID=00000001\nparentCID=ffffffff\ncreateType=\"monolithicFlat\"";
    std::fs::write(&image, format!("# Disk DescriptorFile\n{kind}\n{extent}\n")).expect("written");
    refused(&bed, &image, &["image.vmdk", "description of other files"]);
    // As it was sold to other tools: a sparse header that says nothing of its own size.
    let mut sparse = vec![0; 1 << 16];
    sparse[..8].copy_from_slice(b"KDMV\x01\0\0\0");
    sparse[28] = 1;
    sparse[36] = 20;
    let description = format!("# Disk DescriptorFile\n{kind}\n{extent}\n");
    sparse[512..512 + description.len()].copy_from_slice(description.as_bytes());
    std::fs::write(&image, sparse).expect("written");
    refused(&bed, &image, &["image.vmdk", "description of other files"]);
}

#[test]
fn an_image_over_an_address_reaches_no_network() {
    let bed = TestBed::new(&store::folder());
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.set_nonblocking(true).expect("it need not wait");
    let address = format!("nbd://{}/x", listener.local_addr().expect("bound"));
    let image = qcow2(&bed, "image.qcow2", &["-u", "-F", "raw", "-b", &address]);
    refused(&bed, &image, &["nbd://", "not a file"]);
    bed.sawmill(&["import", text(&image), "disk", "--follow-backing"]).refused(5, &["not a file"]);
    let called = listener.accept().map(drop).expect_err("no program may call");
    assert_eq!(called.kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn an_image_whose_data_is_a_pipe_or_that_is_one_is_not_waited_for() {
    let bed = TestBed::new(&store::folder());
    let image = qcow2(&bed, "image.qcow2", &["-o", "data_file=data"]);
    std::fs::remove_file(bed.path("data")).expect("it was made");
    let _ = run(command("mkfifo").arg(bed.path("data")));
    refused(&bed, &image, &["another file"]);
    refused(&bed, &bed.path("data"), &["neither a file nor a block device"]);
}

/// What an import says whose `program` is one that tells its environment and fails.
fn import_with(bed: &TestBed, image: &Path, program: &str) -> CommandOutput {
    use std::os::unix::fs::PermissionsExt;
    let folder = bed.path(program);
    std::fs::create_dir_all(&folder).expect("made");
    let path = folder.join(program);
    std::fs::write(&path, "#!/bin/sh\nenv >&2\nexit 1\n").expect("written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("a program");
    let mut import = bed.command(&["import", text(image), "disk"]);
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").expect("set"));
    let output = import.env("PATH", path).env("AWS_SECRET_ACCESS_KEY", "s3cr3t").output();
    CommandOutput::new("sawmill import".into(), &output.expect("the binary under test starts"))
}

#[test]
fn qemu_has_no_secret_of_the_importer() {
    let bed = TestBed::new(&store::folder());
    let image = qcow2(&bed, "image.qcow2", &[]);
    for program in ["qemu-img", "qemu-nbd"] {
        let finished = import_with(&bed, &image, program);
        assert_eq!(finished.code, Some(7), "{}", finished.stderr);
        assert!(finished.stderr.contains("LANG="), "{program} was not asked: {}", finished.stderr);
        assert!(!finished.stderr.contains("s3cr3t"), "{}", finished.stderr);
    }
}

#[test]
fn a_driver_has_no_secret_of_its_host_but_what_it_is_given_by_name() {
    let bed = TestBed::new(&store::folder());
    let environment_of = |options: &[&str]| {
        let out = bed.path("environment");
        let script = format!("env > {0}.new && mv {0}.new {0}", out.display());
        let line =
            [&["run", "--name", "spy", "--no-restart"], options, &["--", "sh", "-c", &script]]
                .concat();
        let mut host = bed.command(&line);
        host.env("AWS_SECRET_ACCESS_KEY", "s3cr3t")
            .env("AZURE_STORAGE_KEY", "s3cr3t")
            .env("OTHER", "kept");
        let mut host = host.spawn().expect("the binary under test starts");
        let environment =
            wait_for("the driver tells its environment", || std::fs::read_to_string(&out).ok());
        let _ = host.kill();
        let _ = host.wait();
        std::fs::remove_file(&out).expect("it was read");
        environment
    };
    let environment = environment_of(&[]);
    assert!(!environment.contains("s3cr3t") && environment.contains("OTHER=kept"), "{environment}");
    let environment = environment_of(&["--driver-env", "AWS_SECRET_ACCESS_KEY"]);
    assert!(environment.contains("AWS_SECRET_ACCESS_KEY=s3cr3t"), "{environment}");
    assert!(!environment.contains("AZURE_STORAGE_KEY"), "{environment}");
}
