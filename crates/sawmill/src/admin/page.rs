//! The dashboard: one self-contained page. It polls `/status` and draws the result.
//!
//! Invariant: the page loads nothing from elsewhere and reads only fields of `status`; the tests
//! below check both. Not here: which requests get it (`answer`).

/// The HTML of the page, with its script and its styles.
pub(crate) const DASHBOARD: &str = include_str!("dashboard.html");

/// What the page may do: run its own script, and query its own server.
pub(crate) const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; \
     style-src 'unsafe-inline'; connect-src 'self'; \
     img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::told::{CacheTold, ConnectionTold, EndTold, LinkTold};

    #[test]
    fn the_page_loads_nothing_from_elsewhere() {
        for word in ["http://", "https://", "src=", "@import", "url("] {
            assert!(!DASHBOARD.contains(word), "the page contains {word:?}");
        }
    }

    #[test]
    fn the_page_reads_only_fields_that_the_status_has() {
        let mut process = super::super::status::ProcessStatus::default();
        let mut volume = super::super::status::VolumeStatus::default();
        volume.health.reason = Some(String::new());
        volume.operations.push(super::super::status::OperationStatus::default());
        process.volumes.push(volume);
        process.stores.push(super::super::status::StoreStatus::default());
        process.doors.push(super::super::status::DoorStatus::default());
        process.cache = Some(super::super::status::CacheStatus::default());
        let mut connection = ConnectionTold::default();
        connection.links.push(LinkTold { address: Some(String::new()), ..LinkTold::default() });
        let (connections, cache) = (vec![connection], Some(CacheTold::default()));
        process.link = Some(EndTold { connections, cache, ..EndTold::default() });
        let document = serde_json::to_string(&process).unwrap();
        // The script reads the document through short names, which it declares itself.
        let script = DASHBOARD.split("<script>").nth(1).unwrap();
        let mut read = 0;
        for prefix in ["v.", "c.", "p.", "s.", "k.", "e.", "j.", "l."] {
            for (at, _) in script.match_indices(prefix) {
                let before = script[..at].chars().next_back().unwrap_or(' ');
                if before.is_alphanumeric() || matches!(before, '_' | '.' | '\'' | '"') {
                    continue;
                }
                let rest = &script[at + prefix.len()..];
                let end = rest
                    .find(|c: char| !(c.is_ascii_lowercase() || c == '_'))
                    .unwrap_or(rest.len());
                let field = &rest[..end];
                assert!(
                    document.contains(&format!("\"{field}\":")),
                    "the page reads {prefix}{field}"
                );
                read += 1;
            }
        }
        assert!(read > 20, "the page reads {read} fields");
    }
}
