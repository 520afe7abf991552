//! Silent connections to a host.

use sawmill_driver::host::Host;
use sawmill_driver::protocol::{
    Control, ControlFacts, ControlKind, PACKET_BYTES_MAX, PacketSocket,
};

fn threads_of_connections() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux").flatten();
    let name = |task: std::fs::DirEntry| {
        std::fs::read_to_string(task.path().join("comm")).unwrap_or_default()
    };
    tasks.map(name).filter(|name| name.trim() == "driver").count()
}

#[test]
fn silent_connections_keep_few_threads_and_no_driver_out() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("sock");
    let host =
        Host::start("disk", &path, ControlFacts::default(), Box::new(drop)).expect("it listens");
    let silent: Vec<_> =
        (0..500).map(|_| PacketSocket::connect(&path).expect("it listens")).collect();
    let mut buffer = vec![0; PACKET_BYTES_MAX];
    for early in &silent[..400] {
        assert!(early.receive(&mut buffer).is_ok_and(|packet| packet.is_none()), "it had to go");
    }
    let driver = PacketSocket::connect(&path).expect("it listens");
    let hello =
        ControlFacts::default().with("protocol", 1).with("size", 1 << 20).with("mode", "plain");
    driver.send(&Control::new(ControlKind::Hello, hello).encode(), &[]).expect("it is there");
    let packet = driver.receive(&mut buffer).expect("it answers").expect("it does not close");
    assert_eq!(Control::decode(packet.bytes).expect("sound").kind, ControlKind::Welcome);
    let threads = threads_of_connections();
    assert!(threads <= 128, "{threads} threads");
    host.close();
    drop(silent);
}
