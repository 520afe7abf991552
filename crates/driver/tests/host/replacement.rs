//! How one driver takes the place of another.
//!
//! Not here: what a host promises whoever serves (`main`).

use sawmill_device::Operation;
use sawmill_driver::protocol::{CommandKind, Control, ControlFacts, ControlKind, PacketSocket};

use crate::SIZE;
use crate::puppet::{Puppet, Stage, submit};

#[test]
fn a_driver_that_died_a_moment_ago_blocks_no_successor() {
    let stage = Stage::new("");
    let mut driver = Puppet::connect(stage.host.path(), SIZE).unwrap();
    for _ in 0..200 {
        // The host may not have noticed yet.
        drop(driver);
        driver = Puppet::connect(stage.host.path(), "").unwrap();
        assert!(!stage.gone(), "it died");
    }
}

#[test]
fn a_driver_that_is_replaced_finishes_and_the_next_one_gets_the_rest() {
    let stage = Stage::new("");
    let mut old = Puppet::connect(stage.host.path(), SIZE).unwrap();
    let device = stage.device();
    let first_write = submit(&*device, Operation::Write, 0, vec![1; 512]);
    let command = old.expect(0, CommandKind::Write);
    let path = stage.host.path().to_path_buf();
    let connector = std::thread::spawn(move || Puppet::connect(&path, "replace=1").unwrap());
    // It is told to finish, and gets nothing more.
    assert_eq!(old.expect(0, CommandKind::End).number, 0);
    let queued_request = submit(&*device, Operation::Write, 512, vec![2; 512]);
    assert!(first_write.is_open() && !connector.is_finished(), "the old one has a command still");
    old.answer(0, command.number, 0);
    first_write.wait().0.unwrap();
    drop(old);
    let mut new = connector.join().unwrap();
    assert!(stage.gone(), "it went in order");
    let command = new.expect(0, CommandKind::Write);
    assert_eq!((command.address, command.again), (512, false), "the old one never had it");
    new.answer(0, command.number, 0);
    queued_request.wait().0.unwrap();
}

#[test]
fn a_driver_that_dies_while_it_is_replaced_leaves_its_commands_to_the_new_one() {
    let stage = Stage::new("");
    let mut old = Puppet::connect(stage.host.path(), SIZE).unwrap();
    let device = stage.device();
    let first_write = submit(&*device, Operation::Write, 0, vec![1; 512]);
    old.expect(0, CommandKind::Write);
    let path = stage.host.path().to_path_buf();
    let connector = std::thread::spawn(move || Puppet::connect(&path, "replace=1").unwrap());
    old.expect(0, CommandKind::End);
    drop(old);
    let mut new = connector.join().unwrap();
    let command = new.expect(0, CommandKind::Write);
    assert!(command.again);
    new.answer(0, command.number, 0);
    first_write.wait().0.unwrap();
}

#[test]
fn a_driver_that_hangs_does_not_keep_its_successor_waiting_forever() {
    let stage = Stage::new("request_timeout_s=0.1");
    let mut hung = Puppet::connect(stage.host.path(), SIZE).unwrap();
    let device = stage.device();
    let path = stage.host.path().to_path_buf();
    let queued_request = submit(&*device, Operation::Write, 0, vec![1; 512]);
    hung.expect(0, CommandKind::Write);
    let (sender, connections) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(Puppet::connect(&path, "replace=1").unwrap()));
    let mut next = connections
        .recv_timeout(crate::puppet::PATIENCE)
        .expect("the one that hangs counts as gone");
    let command = next.expect(0, CommandKind::Write);
    next.answer(0, command.number, 0);
    queued_request.wait().0.unwrap();
    drop(hung);
}

#[test]
fn a_driver_that_stays_when_it_is_replaced_is_disconnected() {
    let stage = Stage::new("");
    let mut stays = Puppet::connect(stage.host.path(), SIZE).unwrap();
    let path = stage.host.path().to_path_buf();
    let (sender, connections) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(Puppet::connect(&path, "replace=1").unwrap()));
    stays.expect(0, CommandKind::End);
    connections
        .recv_timeout(crate::puppet::PATIENCE)
        .expect("the device is not the old one's forever");
    assert!(!stage.gone(), "it did not go in order");
}

const DEAD_DRIVERS: usize = 8;

#[test]
fn a_driver_that_went_before_its_turn_displaces_no_other() {
    let stage = Stage::new("");
    let mut old = Puppet::connect(stage.host.path(), SIZE).unwrap();
    let device = stage.device();
    let first_write = submit(&*device, Operation::Write, 0, vec![1; 512]);
    let command = old.expect(0, CommandKind::Write);
    let path = stage.host.path().to_path_buf();
    let connector = std::thread::spawn(move || Puppet::connect(&path, "replace=1").unwrap());
    // The connector has the turn until the old driver leaves.
    old.expect(0, CommandKind::End);
    for _ in 0..DEAD_DRIVERS {
        let dead = PacketSocket::connect(stage.host.path()).unwrap();
        let hello = ControlFacts::default().with("protocol", 1).with("replace", 1);
        dead.send(&Control::new(ControlKind::Hello, hello).encode(), &[]).unwrap();
    }
    old.answer(0, command.number, 0);
    first_write.wait().0.unwrap();
    drop(old);
    let mut new = connector.join().unwrap();
    // They had their turn when as many others behind them have been answered.
    for _ in 0..DEAD_DRIVERS {
        let refused = Puppet::connect(stage.host.path(), "").err().expect("there is a driver");
        assert!(refused.to_string().contains("replace=1"), "{refused}");
    }
    let write = submit(&*device, Operation::Write, 0, vec![2; 512]);
    let command = new.expect(0, CommandKind::Write);
    new.answer(0, command.number, 0);
    write.wait().0.unwrap();
}
