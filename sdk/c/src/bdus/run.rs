//! A driver's whole life: checked, connected, initialized, serving, terminated.
//!
//! Invariants: a host is started with the privileges that the program has at the call; `initialize`
//! may drop them. `terminate` is called if and only if `initialize` succeeded. Not here: requests
//! (`driver`).

use std::fs::OpenOptions;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use sawmill_device::ErrorKind;
use sawmill_driver::client::{self, Connection, DOORS_VARIABLE, Options};
use sawmill_driver::protocol::SOCKET_VARIABLE;

use super::device_file::{self, DeviceFacts, DeviceFile};
use super::driver::{Callbacks, SharedContext};
use super::fault::Fault;
use super::layout::{Attrs, Context, Ops};
use crate::user::UserPointer;

/// How long requests wait for another driver of a recoverable device (kbdus: the kernel's
/// timeout).
const DEATH_TIMEOUT_S: u32 = 30;

/// `bdus_run`.
pub(super) fn run(ops: &Ops, attrs: &Attrs, private_data: UserPointer) -> Result<(), Fault> {
    ops.check()?;
    let attrs = attrs.completed()?;
    let is_started = std::env::var_os(SOCKET_VARIABLE).is_some_and(|path| !path.is_empty());
    let doors = if is_started { Vec::new() } else { doors()? };
    let number = device_file::number()?;
    let options = options(number, &attrs, !is_started && !attrs.dont_daemonize);
    let doors: Vec<&str> = doors.iter().map(String::as_str).collect();
    let connection = client::connect(&doors, &options)?;
    let socket = connection.socket().ok_or_else(|| Fault::invalid("the device has no host"))?;
    let facts = DeviceFacts::of(socket, ops, &attrs);
    let becomes_daemon = !is_started && !attrs.dont_daemonize;
    live(number, connection, facts, (ops, &attrs, becomes_daemon, false), private_data)
}

/// `bdus_rerun`.
pub(super) fn rerun(
    number: u64,
    ops: &Ops,
    attrs: &Attrs,
    private_data: UserPointer,
) -> Result<(), Fault> {
    let mut facts = device_file::find(number)?;
    let attrs = covers(&facts, ops, attrs)?;
    let becomes_daemon = !attrs.dont_daemonize;
    let options = options(number, &attrs, false).socket(facts.socket()).replace();
    let connection = client::connect(&[], &options)?;
    facts.set("log", &u8::from(attrs.log).to_string());
    live(number, connection, facts, (ops, &attrs, becomes_daemon, true), private_data)
}

/// The door of a device whose program names none.
fn doors() -> Result<Vec<String>, Fault> {
    let names = std::env::var(DOORS_VARIABLE).unwrap_or_default();
    if !names.trim().is_empty() {
        return Ok(names.split_whitespace().map(str::to_owned).collect());
    }
    if !Path::new("/dev/ublk-control").exists() {
        let text = format!(
            "no /dev/ublk-control: modprobe ublk_drv, or name another door in {DOORS_VARIABLE}"
        );
        return Err(Fault::new(libc::ENODEV, &text));
    }
    if device_file::user_id() != 0 {
        let text = format!(
            "only root can create ublk devices: run as root, or name another door in \
             {DOORS_VARIABLE}"
        );
        return Err(Fault::new(libc::EPERM, &text));
    }
    Ok(vec!["ublk".to_owned()])
}

/// The device, as options of the protocol.
fn options(number: u64, attrs: &Attrs, is_quiet: bool) -> Options {
    let threads = attrs.max_concurrent_callbacks;
    let block = attrs.device_block();
    let options = Options::sized(attrs.size)
        .name(format!("bdus-{number}"))
        // Programs become daemons after the device is there, which a device in their own process
        // would not survive.
        .host_process()
        .threads(threads as usize)
        .option("blocksize", block)
        .option("io_min", attrs.physical_block_size.max(block))
        .option("request_bytes_max", attrs.max_read_write_size)
        .option("queue_depth", threads.saturating_mul(2).clamp(16, 256))
        .option("recoverable", u8::from(attrs.recoverable));
    let options = match attrs.recoverable {
        true => options.option("death_timeout_s", DEATH_TIMEOUT_S),
        false => options,
    };
    if is_quiet { options.quiet() } else { options }
}

/// Checks whether a driver can replace the one that made the device. Returns the attributes in
/// effect.
fn covers(facts: &DeviceFacts, ops: &Ops, attrs: &Attrs) -> Result<Attrs, Fault> {
    let before: Vec<&str> = facts.get("ops").split(',').collect();
    for (name, is_there) in ops.named() {
        if before.contains(&name) && !is_there {
            return Err(Fault::invalid(&format!(
                "the device was made with the callback {name}(), which is missing"
            )));
        }
        if name == "flush" && is_there && !before.contains(&name) {
            return Err(Fault::invalid(
                "the device was made without the callback flush(), which is there now",
            ));
        }
    }
    ops.check()?;
    let attrs = attrs.filled(|name| facts.number(name)).completed()?;
    for (name, value) in attrs.named() {
        let is_own = ["dont_daemonize", "log", "max_concurrent_callbacks"].contains(&name);
        let original = facts.number(name);
        if value != original && !is_own {
            let text = format!(
                "attribute {name} is {value}; the device was made with {original}: say that, or 0"
            );
            return Err(Fault::invalid(&text));
        }
    }
    Ok(attrs)
}

fn live(
    number: u64,
    connection: Connection,
    facts: DeviceFacts,
    (ops, attrs, becomes_daemon, is_rerun): (&Ops, &Attrs, bool, bool),
    private_data: UserPointer,
) -> Result<(), Fault> {
    let driver = match driver(number, facts, (ops, attrs, becomes_daemon, is_rerun), private_data) {
        Ok(driver) => Arc::new(driver),
        Err(fault) => {
            connection.give_up();
            return Err(fault);
        }
    };
    if let Err(fault) = driver.call("initialize", ops.initialize) {
        connection.give_up();
        return Err(fault);
    }
    let served = connection.serve(Arc::clone(&driver));
    let terminated = driver.call("terminate", ops.terminate);
    if let Some(fault) = driver.failure.lock().take() {
        return Err(fault);
    }
    match served {
        Ok(_) => terminated,
        // A device that disappeared counts as destroyed.
        Err(error) if error.kind() == ErrorKind::Closed => {
            Err(Fault::new(libc::ENODEV, "the device is gone, or its host"))
        }
        Err(error) => Err(error.into()),
    }
}

fn driver(
    number: u64,
    facts: DeviceFacts,
    (ops, attrs, becomes_daemon, is_rerun): (&Ops, &Attrs, bool, bool),
    private_data: UserPointer,
) -> Result<Callbacks, Fault> {
    let device_file = DeviceFile::open(number)?;
    device_file.write(&facts)?;
    let log = match attrs.log {
        true => Some(
            OpenOptions::new().append(true).create(true).open(device_file::log_path(number)?)?,
        ),
        false => None,
    };
    // The program's tables as callbacks see them, with the values in effect. They are small and
    // never freed: a program may keep the pointers.
    let (ops, attrs): (&'static Ops, &'static Attrs) =
        (Box::leak(Box::new(*ops)), Box::leak(Box::new(*attrs)));
    let path = c"".as_ptr();
    let context =
        Context { id: number, path, ops, attrs, is_rerun, private_data, major: 0, minor: 0 };
    Ok(Callbacks {
        ops: *ops,
        attrs: *attrs,
        context: SharedContext::new(context),
        device_file,
        facts: Mutex::new(facts),
        log,
        becomes_daemon,
        device: OnceLock::new(),
        failure: Mutex::new(None),
        is_over: AtomicBool::new(false),
        path: OnceLock::new(),
    })
}
