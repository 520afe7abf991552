//! Headers that name other files, in every format, and some that do not.

use std::process::Command;

use super::*;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn write(folder: &tempfile::TempDir, bytes: &[u8]) -> PathBuf {
    let path = folder.path().join("image");
    std::fs::write(&path, bytes).unwrap();
    path
}

/// A file of 1 MiB with these bytes at these places.
fn file(parts: &[(usize, &[u8])]) -> Vec<u8> {
    let mut bytes = vec![0; 1 << 20];
    for (at, part) in parts {
        bytes[*at..at + part.len()].copy_from_slice(part);
    }
    bytes
}

fn refused(bytes: &[u8], format: Format, exit: Exit, words: &str) {
    let folder = folder();
    let failure = inspect(&write(&folder, bytes), format, BackingFiles::Refused).unwrap_err();
    assert_eq!(failure.exit(), exit, "{failure}");
    assert!(failure.to_string().contains(words), "{failure}");
}

fn qcow2(parts: &[(usize, &[u8])]) -> Vec<u8> {
    let head: [(usize, &[u8]); 4] =
        [(0, b"QFI\xfb\0\0\0\x03"), (20, &[0, 0, 0, 16]), (100, &[0, 0, 0, 104]), (104, &[0; 8])];
    file(&[&head, parts].concat())
}

#[test]
fn qcow2_that_names_another_file_or_address_is_refused() {
    let ok = folder();
    inspect(&write(&ok, &qcow2(&[])), Format::Qcow2, BackingFiles::Refused).unwrap();
    let (at, length): (&[u8], &[u8]) = (&[0, 0, 0, 0, 0, 0, 1, 0], &[0, 0, 0, 6]);
    let layer = |name: &'static [u8]| qcow2(&[(8, at), (16, length), (256, name)]);
    refused(&layer(b"/a/b/c"), Format::Qcow2, Exit::Refused, "--follow-backing");
    for name in [b"nbd://", b"json:{"] {
        let folder = folder();
        let failure = inspect(&write(&folder, &layer(name)), Format::Qcow2, BackingFiles::Followed)
            .unwrap_err();
        assert!(failure.to_string().contains("not a file"), "{failure}");
    }
    let features = |bits: u8| qcow2(&[(79, &[bits])]);
    refused(&features(4), Format::Qcow2, Exit::Refused, "another file");
    refused(&features(2), Format::Qcow2, Exit::Corrupt, "damaged");
    refused(&features(128), Format::Qcow2, Exit::Corrupt, "unknown features");
    refused(&qcow2(&[(35, &[1])]), Format::Qcow2, Exit::Corrupt, "encrypted");
    refused(&qcow2(&[(104, b"DATA\0\0\0\x01")]), Format::Qcow2, Exit::Refused, "another file");
    refused(&qcow2(&[(16, &[255; 4]), (8, at)]), Format::Qcow2, Exit::Corrupt, "a name of");
    refused(&qcow2(&[(100, &[255; 4])]), Format::Qcow2, Exit::Corrupt, "a header of");
    refused(&file(&[(0, b"QFI\xfb\0\0\0\x01")]), Format::Qcow2, Exit::Corrupt, "version 1");
}

#[test]
fn vmdk_that_names_another_file_is_refused() {
    let header: [(usize, &[u8]); 4] = [(0, b"KDMV"), (12, &[8]), (28, &[1]), (36, &[20])];
    let vmdk = |text: &str| file(&[&header[..], &[(512, text.as_bytes())]].concat());
    let itself = "createType=\"monolithicSparse\"\nRW 8 SPARSE \"a.vmdk\"\n";
    let ok = folder();
    inspect(&write(&ok, &vmdk(itself)), Format::Vmdk, BackingFiles::Refused).unwrap();
    for text in [
        "createType=\"monolithicFlat\"\nRW 8 FLAT \"/etc/shadow\" 0\n",
        "createType=\"monolithicSparse\"\nRW 8 SPARSE \"/etc/shadow\"\n",
        "createType=\"monolithicSparse\"\nRW 8 SPARSE \"nbd://host\"\n",
        &format!("{itself}RW 8 FLAT \"b\" 0\n"),
        &format!("{itself}parentFileNameHint=\"b\"\n"),
    ] {
        refused(&vmdk(text), Format::Vmdk, Exit::Refused, "convert it first");
    }
    let text =
        b"# Disk DescriptorFile\ncreateType=\"monolithicFlat\"\nRW 8 FLAT \"/etc/shadow\" 0\n";
    refused(text, Format::Vmdk, Exit::Refused, "other files");
    refused(
        &file(&[(0, b"KDMV"), (28, &[1]), (36, &[20])]),
        Format::Vmdk,
        Exit::Refused,
        "other files",
    );
}

#[test]
fn layers_of_the_other_formats_are_refused() {
    let vdi: [(usize, &[u8]); 2] = [(0x40, &[0x7f, 0x10, 0xda, 0xbe]), (0x4c, &[1])];
    let ok = folder();
    inspect(&write(&ok, &file(&vdi)), Format::Vdi, BackingFiles::Refused).unwrap();
    refused(&file(&[&vdi[..], &[(0x1b8, &[1])]].concat()), Format::Vdi, Exit::Refused, "a layer");
    refused(&file(&[&vdi[..], &[(0x4c, &[4])]].concat()), Format::Vdi, Exit::Refused, "a layer");
    let vpc: [(usize, &[u8]); 1] = [(0, b"conectix")];
    refused(&file(&[&vpc[..], &[(63, &[4])]].concat()), Format::Vpc, Exit::Refused, "a layer");
    let dynamic: [(usize, &[u8]); 4] =
        [(0, b"conectix"), (63, &[3]), (22, &[2]), (512, b"cxsparse")];
    inspect(&write(&ok, &file(&dynamic)), Format::Vpc, BackingFiles::Refused).unwrap();
    refused(&file(&[&dynamic[..], &[(552, &[1])]].concat()), Format::Vpc, Exit::Refused, "a layer");
    let region = b"\x06\xa2\x7c\x8b\x90\x47\x9a\x4b\xb8\xfe\x57\x5f\x05\x0f\x88\x6e";
    let parent = b"\x2d\x5f\xd3\xa8\x0b\xb3\x4d\x45\xab\xf7\xd3\xd8\x48\x34\xab\x0c";
    let (table, place) = (192 << 10, 512 << 10);
    let vhdx: [(usize, &[u8]); 7] = [
        (0, b"vhdxfile"),
        (table, b"regi"),
        (table + 8, &[1]),
        (table + 16, region),
        (table + 34, &[8]),
        (place, b"metadata"),
        (place + 10, &[1]),
    ];
    inspect(&write(&ok, &file(&vhdx)), Format::Vhdx, BackingFiles::Refused).unwrap();
    refused(
        &file(&[&vhdx[..], &[(place + 32, parent)]].concat()),
        Format::Vhdx,
        Exit::Refused,
        "a layer",
    );
    refused(&file(&vhdx[..1]), Format::Vhdx, Exit::Corrupt, "no metadata table");
}

#[test]
fn a_layer_is_looked_at_in_the_format_in_which_qemu_opens_it() {
    let folder = folder();
    // The name ends the list of extensions. A reader that goes on finds another format behind it.
    let name: &[u8] = b"./ab    ";
    let outer: [(usize, &[u8]); 4] =
        [(15, &[120]), (19, &[8]), (104, b"\xe2\x79\x2a\xca\0\0\0\x05qcow2\0\0\0"), (120, name)];
    let path = write(&folder, &qcow2(&outer));
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let raw = b"\xe2\x79\x2a\xca\0\0\0\x03raw\0\0\0\0\0\0\0\0\0\0\0\0\0";
    file.write_all_at(raw, 128 + 0x2020_2020).unwrap();
    let below = folder.path().join("ab    ");
    std::fs::write(&below, qcow2(&[])).unwrap();
    inspect(&path, Format::Qcow2, BackingFiles::Followed).unwrap();
    std::fs::write(&below, qcow2(&[(79, &[4])])).unwrap();
    let failure = inspect(&path, Format::Qcow2, BackingFiles::Followed).unwrap_err();
    assert!(failure.to_string().contains("keeps its data in another file"), "{failure}");
}

#[test]
fn a_pipe_is_no_image_and_is_not_waited_for() {
    let folder = folder();
    let path = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    assert_eq!(
        inspect(&path, Format::Qcow2, BackingFiles::Refused).unwrap_err().exit(),
        Exit::Refused
    );
}
