//! The stores under test: a folder, a MinIO of our own on the loopback, or a server that lies.
//!
//! One MinIO serves a whole test program; it and its data are removed when the program ends in any
//! way, because a small shell watches a pipe that only the program holds open.
//!
//! Invariant: a fresh store has a prefix or folder that is unique in the program, so that tests run
//! side by side. Not here: faults on the way to a store (`proxy`).

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use tokio::net::TcpSocket;

use crate::dishonest::Dishonest;
use crate::machine;
use crate::proxy::Proxy;

/// An existing bucket.
pub const BUCKET: &str = "timber";
/// The user of `MinIO`.
pub const USER: &str = "sawmill-test";
/// The user's password.
pub const PASSWORD: &str = "sawmill-test-secret";

/// A store for volumes. Cheap to clone; clones are the same store.
#[derive(Clone, Debug)]
pub enum StoreUnderTest {
    /// A folder inside each test bed.
    Folder,
    /// A prefix in a bucket.
    Minio(Arc<Minio>),
    /// The same, behind a proxy that injects faults.
    Proxied(Arc<Proxy>),
    /// A prefix in a store that lets two racers win.
    Dishonest(Arc<Dishonest>),
}

/// The folder store.
#[must_use]
pub fn folder() -> StoreUnderTest {
    StoreUnderTest::Folder
}

/// The MinIO that the tests of this program share.
#[must_use]
pub fn minio() -> StoreUnderTest {
    StoreUnderTest::Minio(shared_minio())
}

/// As [`minio`], as a server.
#[must_use]
pub fn shared_minio() -> Arc<Minio> {
    static SHARED: OnceLock<Arc<Minio>> = OnceLock::new();
    Arc::clone(SHARED.get_or_init(|| Arc::new(Minio::start())))
}

/// A fresh store that lets two racers win.
#[must_use]
pub fn dishonest() -> StoreUnderTest {
    StoreUnderTest::Dishonest(Arc::new(Dishonest::start()))
}

impl StoreUnderTest {
    /// The URL of a fresh, empty store: `folder` when this is a folder, else a new prefix.
    #[must_use]
    pub fn fresh_url(&self, folder: &Path) -> String {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        match self {
            StoreUnderTest::Folder => {
                std::fs::create_dir(folder).expect("a folder for the store");
                format!("file://{}", folder.display())
            }
            StoreUnderTest::Minio(_)
            | StoreUnderTest::Proxied(_)
            | StoreUnderTest::Dishonest(_) => {
                format!("s3://{BUCKET}/yard-{}", COUNT.fetch_add(1, Ordering::Relaxed))
            }
        }
    }

    /// The environment that makes the store reachable.
    #[must_use]
    pub fn environment(&self) -> Vec<(String, String)> {
        match self {
            StoreUnderTest::Folder => Vec::new(),
            StoreUnderTest::Minio(minio) => environment(&format!("http://{}", minio.address())),
            StoreUnderTest::Proxied(proxy) => environment(&format!("http://{}", proxy.address())),
            StoreUnderTest::Dishonest(server) => environment(&server.endpoint()),
        }
    }
}

/// A MinIO server on a free port of the loopback, with a folder of its own.
#[derive(Debug)]
pub struct Minio {
    address: ReservedAddress,
    folder: PathBuf,
    running: Mutex<Option<(Child, ChildStdin)>>,
}

impl Minio {
    /// Starts a server and waits until it is ready.
    #[must_use]
    pub fn start() -> Self {
        let folder = tempfile::Builder::new().prefix("sawmill-minio-").tempdir();
        let folder = folder.expect("a temporary folder for MinIO").keep();
        // On one disk a bucket is a folder of the data folder, so it can be made before the start.
        std::fs::create_dir(folder.join(BUCKET)).expect("a folder for the bucket");
        let minio = Minio { address: ReservedAddress::new(), folder, running: Mutex::new(None) };
        minio.resume();
        minio
    }

    /// Stops the server: connections break, and new ones are refused. Its data stays.
    pub fn pause(&self) {
        std::fs::write(self.keep_mark(), "").expect("a mark beside MinIO's folder");
        self.end();
    }

    /// Starts the server again at the same address with the same data, and waits until it is ready.
    pub fn resume(&self) {
        let mut running = self.running.lock().expect("no test panicked here");
        if running.is_some() {
            return;
        }
        // The shell ends the server when the pipe on its standard input closes, and removes the
        // data unless the mark is there.
        let script = r#""$1" server --quiet --address "$2" "$3" \
                >/dev/null 2>&1 </dev/null & server=$!
            read -r _; kill -9 $server; wait $server 2>/dev/null; [ -e "$3.keep" ] || rm -rf "$3""#;
        let mut child = Command::new("sh")
            .args(["-c", script, "minio"])
            .arg(machine::program("minio"))
            .arg(self.address().to_string())
            .arg(&self.folder)
            .env("MINIO_ROOT_USER", USER)
            .env("MINIO_ROOT_PASSWORD", PASSWORD)
            .env("MINIO_BROWSER", "off")
            .env("MINIO_UPDATE", "off")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("sh starts");
        let pipe = child.stdin.take().expect("the pipe was asked for");
        machine::wait_for("MinIO is ready", || self.is_ready().then_some(()));
        let _ = std::fs::remove_file(self.keep_mark());
        *running = Some((child, pipe));
    }

    fn end(&self) {
        let running = self.running.lock().expect("no test panicked here").take();
        if let Some((mut child, pipe)) = running {
            drop(pipe);
            child.wait().expect("the shell around MinIO ends");
        }
    }

    fn keep_mark(&self) -> PathBuf {
        let mut name = self.folder.clone().into_os_string();
        name.push(".keep");
        PathBuf::from(name)
    }

    fn is_ready(&self) -> bool {
        let probe = || -> std::io::Result<bool> {
            let mut stream = TcpStream::connect_timeout(&self.address(), Duration::from_secs(1))?;
            stream.set_read_timeout(Some(Duration::from_secs(5)))?;
            stream.write_all(b"GET /minio/health/ready HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
            let mut answer = [0; 12];
            stream.read_exact(&mut answer)?;
            Ok(answer.ends_with(b" 200"))
        };
        probe().unwrap_or(false)
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address.address()
    }
}

impl Drop for Minio {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.keep_mark());
        self.end();
        // The folder still exists only if the server was paused when its owner was dropped.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A reserved loopback address without a listener: the kernel assigns it to no other process, and a
/// program that is given the address may listen there any number of times.
#[derive(Debug)]
pub struct ReservedAddress {
    address: SocketAddr,
    /// Bound, never listening. Listeners set SO_REUSEADDR, as this does, so it does not block them.
    _socket: TcpSocket,
}

impl ReservedAddress {
    /// An address of its own.
    #[must_use]
    pub fn new() -> Self {
        let reserve = || {
            let socket = TcpSocket::new_v4()?;
            socket.set_reuseaddr(true)?;
            socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
            std::io::Result::Ok(ReservedAddress { address: socket.local_addr()?, _socket: socket })
        };
        reserve().expect("the loopback has a free port")
    }

    /// The address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Default for ReservedAddress {
    fn default() -> Self {
        Self::new()
    }
}

/// The environment that makes an S3 server on the loopback reachable.
fn environment(endpoint: &str) -> Vec<(String, String)> {
    [
        ("AWS_ACCESS_KEY_ID", USER),
        ("AWS_SECRET_ACCESS_KEY", PASSWORD),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", endpoint),
        ("AWS_ALLOW_HTTP", "true"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .to_vec()
}
