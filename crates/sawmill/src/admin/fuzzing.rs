//! One connection to the admin server from a fuzzer, with made-up callbacks.
//!
//! Invariant: it ends when the client has said everything. Not here: what must hold of the answers
//! (`crates/fuzz`).

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::status::{CacheStatus, ProcessStatus, VolumeStatus};
use super::{AdminState, Call, Callbacks, ConnectionPermit, Side, start_connection};
use crate::fuzzing::{OWN_PATH, ServedConnection};

/// A connection that lives longer hangs.
const HANG: Duration = Duration::from_secs(60);
/// The volume of the control socket.
const VOLUME: &str = "oak";

pub(crate) fn own_connection(bytes: &[u8]) -> ServedConnection {
    serve(bytes, Side::Own, Some(VOLUME.to_owned()))
}

pub(crate) fn loopback_connection(bytes: &[u8]) -> ServedConnection {
    serve(bytes, Side::Strangers, None)
}

/// Callbacks that record what is asked of them.
fn callbacks(calls: &Arc<Mutex<ServedConnection>>) -> Callbacks {
    let (waited, carried_out) = (Arc::clone(calls), Arc::clone(calls));
    let volume = VolumeStatus {
        name: VOLUME.to_owned(),
        journal_path: Some(OWN_PATH.to_owned()),
        ..VolumeStatus::default()
    };
    let cache = CacheStatus { path: OWN_PATH.to_owned(), ..CacheStatus::default() };
    Callbacks {
        status: Box::new(move |_| ProcessStatus {
            volumes: vec![volume.clone()],
            cache: Some(cache.clone()),
            ..ProcessStatus::default()
        }),
        waiter: Box::new(move |_, _, timeout, _| {
            waited.lock().waits.push(timeout);
            Ok(true)
        }),
        carry_out: Box::new(move |_, request, _| {
            let text = serde_json::to_string(&request).unwrap_or_default();
            carried_out.lock().carried_out.push(text);
            Ok(serde_json::Value::Null)
        }),
    }
}

fn serve(bytes: &[u8], side: Side, volume: Option<String>) -> ServedConnection {
    let calls = Arc::new(Mutex::new(ServedConnection::default()));
    let shared = Arc::new(AdminState::new(callbacks(&calls)));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(Call::threads())
        .build()
        .expect("a runtime");
    let answers = runtime.block_on(async {
        let (near, far) = UnixStream::pair().expect("a socket");
        let permit = ConnectionPermit::take(&shared, side).expect("there is no other connection");
        start_connection(far, &shared, &Arc::new(volume), permit);
        tokio::time::timeout(HANG, exchange(near, bytes)).await.expect("each connection ends")
    });
    // Waits for the calls that have begun.
    drop(runtime);
    let calls = std::mem::take(&mut *calls.lock());
    ServedConnection { answers, ..calls }
}

/// Sends everything, and returns what comes back until the server closes the connection.
async fn exchange(near: UnixStream, bytes: &[u8]) -> Vec<u8> {
    let (mut from, mut to) = near.into_split();
    let mut answers = Vec::new();
    let send = async {
        // A server that has heard enough closes the connection, which is its answer.
        if to.write_all(bytes).await.is_ok() {
            let _ = to.shutdown().await;
        }
    };
    let _ = tokio::join!(send, from.read_to_end(&mut answers)).1;
    answers
}
