//! NBD, the network block device: works with every kernel, QEMU, libnbd, over TCP and Unix sockets.
//!
//! Fixed newstyle only. Modules: [`options`](NbdOptions), `limits`, `listener` (the socket),
//! [`server`](NbdServer) (exports and connections), `reception` (new connections), `peer_identity`
//! and `admission` (fair shares for peers), `handshake` (option haggling), `session` (the
//! agreement), `connection` (the loop of one client), `budget` (memory of all clients), `intake`
//! (received bytes), `ticket` (one request in flight), `outbox` (bytes to send), `protocol` (the
//! codec, pure), [`metrics`](NbdMetrics); `door` (the interface of every door), `pause`
//! (quiescing), `hand_over` (pieces as facts).
//!
//! There is one thread per connection. It receives many requests with one system call, submits them
//! all, and sends the replies of those that completed immediately with another one. A request that
//! completes later, on another thread, is answered from there, without ever waiting for the client.
//!
//! Not here: TLS (refused for now), resize while connected, the oldstyle handshake.

mod admission;
mod budget;
mod complaints;
mod connection;
mod door;
mod hand_over;
mod handshake;
mod intake;
mod limits;
mod listener;
mod metrics;
mod options;
mod outbox;
mod pause;
mod peer_identity;
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
pub use protocol::errno;
pub use server::{Client, Export, NbdServer};
