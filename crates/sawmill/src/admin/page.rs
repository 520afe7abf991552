//! The dashboard: a page, its style and its script, which polls `/status` and draws the result.
//!
//! Invariant: the page loads nothing but its own two files and reads only fields of `status`; the
//! tests below check both. Not here: which requests get it (`answer`).

const PAGE: &str = include_str!("dashboard/index.html");
const STYLE: &str = include_str!("dashboard/style.css");
const SCRIPT: &str = include_str!("dashboard/script.js");

/// What the page may do: have the style and run the script of its own server, and query it.
pub(crate) const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; \
     style-src 'self'; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The media type and the text of the file under this path, if it is one of the dashboard's.
pub(crate) fn file(path: &str) -> Option<(&'static str, &'static str)> {
    match path {
        "/" => Some(("text/html; charset=utf-8", PAGE)),
        "/style.css" => Some(("text/css; charset=utf-8", STYLE)),
        "/script.js" => Some(("text/javascript; charset=utf-8", SCRIPT)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::end_report::{CacheReport, ConnectionReport, EndReport, LinkReport};

    #[test]
    fn the_page_loads_its_own_files_and_nothing_from_elsewhere() {
        let named: Vec<&str> = ["href=\"", "src=\""]
            .into_iter()
            .flat_map(|attribute| PAGE.split(attribute).skip(1))
            .filter_map(|rest| rest.split('"').next())
            .collect();
        assert_eq!(named, ["style.css", "script.js"]);
        for name in named {
            assert!(file(&format!("/{name}")).is_some(), "nothing is served as {name}");
        }
        for text in [PAGE, STYLE, SCRIPT] {
            for word in ["http://", "https://", "@import", "url("] {
                assert!(!text.contains(word), "the page contains {word:?}");
            }
        }
    }

    /// The policy refuses both.
    #[test]
    fn no_element_has_a_style_or_a_script_of_its_own() {
        for text in [PAGE, SCRIPT] {
            for word in ["<style", "style=", "<script>", "onclick=", "onload=", "onerror="] {
                assert!(!text.contains(word), "it contains {word:?}");
            }
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
        let mut connection = ConnectionReport::default();
        connection.links.push(LinkReport { address: Some(String::new()), ..LinkReport::default() });
        let (connections, cache) = (vec![connection], Some(CacheReport::default()));
        process.link = Some(EndReport { connections, cache, ..EndReport::default() });
        let document = serde_json::to_string(&process).unwrap();
        // The script reads the document through short names, which its head lists.
        let mut read = 0;
        for prefix in ["v.", "c.", "p.", "s.", "k.", "e.", "j.", "l."] {
            for (at, _) in SCRIPT.match_indices(prefix) {
                let before = SCRIPT[..at].chars().next_back().unwrap_or(' ');
                if before.is_alphanumeric() || matches!(before, '_' | '.' | '\'' | '"') {
                    continue;
                }
                let rest = &SCRIPT[at + prefix.len()..];
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
