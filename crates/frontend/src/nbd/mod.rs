//! NBD, the network block device: works with every kernel, QEMU, libnbd, over TCP and Unix sockets.
//!
//! Fixed newstyle only. Modules: [`options`](NbdOptions), `limits`, `listener` (the socket),
//! [`server`](NbdServer) (exports and connections), `reception` (who comes in), `origin` and `places` (whose
//! share that is), `handshake` (option haggling), `session` (what was agreed on), `connection` (the loop of
//! one client), `budget` (memory of all clients), `intake` (bytes that came), `ticket` (one request in
//! flight), `outbox` (bytes that go), `protocol` (the codec, pure), [`metrics`](NbdMetrics); `door` (what
//! every door can do), `pause` (how all are held), `handover` (pieces as facts).
//!
//! One thread per connection. It receives many requests with one system call, submits them all, and sends
//! the replies of those that completed at once with one more. A request that completes later, on another
//! thread, is answered from there without ever waiting for the client.
//!
//! Not here: TLS (refused for now), resize while connected, the oldstyle handshake.

mod budget;
mod complaints;
mod connection;
mod door;
mod handover;
mod handshake;
mod intake;
mod limits;
mod listener;
mod metrics;
mod options;
mod origin;
mod outbox;
mod pause;
mod places;
mod protocol;
mod reception;
mod server;
mod session;
#[cfg(test)]
mod tests;
mod ticket;

pub use budget::{Budget, BudgetUse};
pub use metrics::{NbdMetrics, RequestCounts};
pub use options::{Listen, NbdOptions};
pub use server::{Client, Export, NbdServer};
