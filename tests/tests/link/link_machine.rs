//! A virtual machine whose disk is a device of another machine: `attach --vhost-user`.
//!
//! It boots from it, which is no more than the firmware and 512 bytes, but real ones: the firmware
//! finds the virtio disk and reads its first block, and what that holds writes itself to the second
//! and says so.

use sawmill_tests::linked::{End, addresses, key};
use sawmill_tests::machine::command;
use sawmill_tests::store;
use sawmill_tests::test_bed::TestBed;

const BLOCK_BYTES: usize = 512;
/// What QEMU ends with when its guest put this into the port of isa-debug-exit.
const WRITTEN: i32 = b'Y' as i32 * 2 + 1;

/// Writes itself to block 1 by the firmware's "extended write", and ends the machine with Y, or N.
const BOOT: [u8; 43] = [
    0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xc0, // ax = ds = es = 0
    0xbe, 0x1b, 0x7c, // si = where the address packet below lies
    0xb4, 0x43, 0xb0, 0x00, 0xcd, 0x13, // int 13h, 43h: write; dl is the disk that was booted
    0xb0, b'Y', 0x73, 0x02, 0xb0, b'N', // carry: it failed
    0xe6, 0xf4, // out f4h, al
    0xf4, 0xeb, 0xfd, 0x90, // never again
    0x10, 0x00, 0x01, 0x00, 0x00, 0x7c, 0x00, 0x00, // one block from 0:7c00
    0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, // to block 1
];

#[test]
fn a_virtual_machine_boots_from_a_device_of_another_machine_and_writes_it() {
    let bed = TestBed::new(&store::folder());
    // This firmware boots from no other.
    bed.create("disk", "4M", &["--block-size", "512"]);
    let (listen, key, staging) =
        (addresses(&["udp", "tcp"]), key(&bed, "key"), bed.memory().display().to_string());
    let small = ["--journal-bytes", "64M", "--cache-bytes", "0", "--staging", &staging];
    let words = ["target", "disk", "--listen", &listen, "--key-file", &key];
    let target = End::start(&bed, &[&words[..], &small].concat());
    let (link, socket) =
        (format!("link:{listen}/disk"), bed.path("disk.sock").display().to_string());
    let door = format!("unix:{}", bed.path("nbd.sock").display());
    let words = ["attach", &link, "--key-file", &key, "--nbd", &door, "--vhost-user", &socket];
    let attached = End::start(&bed, &words);
    let mut block = [0; BLOCK_BYTES];
    block[..BOOT.len()].copy_from_slice(&BOOT);
    block[BLOCK_BYTES - 2..].copy_from_slice(&[0x55, 0xaa]);
    let client = attached.connect();
    client.write(0, &block).expect("accepted");
    let ended = command("timeout")
        .args([
            "60",
            "qemu-system-x86_64",
            "-nodefaults",
            "-display",
            "none",
            "-accel",
            "tcg",
            "-m",
            "64M",
        ])
        .args(["-object", "memory-backend-memfd,id=memory,size=64M,share=on"])
        .args([
            "-machine",
            "pc,memory-backend=memory",
            "-device",
            "isa-debug-exit,iobase=0xf4,iosize=1",
        ])
        .args(["-chardev", &format!("socket,id=disk,path={socket}")])
        .args(["-device", "vhost-user-blk-pci,chardev=disk,bootindex=0"])
        .output()
        .expect("it starts");
    assert_eq!(ended.status.code(), Some(WRITTEN), "{ended:?}");
    assert_eq!(client.read(BLOCK_BYTES as u64, BLOCK_BYTES as u32).expect("read"), block);
    drop(client);
    let _ = attached.stop().ok();
    let _ = target.stop().ok();
    let server = bed.serve("disk").start();
    assert_eq!(
        server.connect().read(BLOCK_BYTES as u64, BLOCK_BYTES as u32).expect("stored"),
        block
    );
}
