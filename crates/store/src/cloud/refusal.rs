//! What the errors of network stores mean, in one table.
//!
//! The protocol crate keeps status and body of an answer only in its error's text, so this module
//! reads that text. Where the text quotes an answer, reading starts at "Server returned".
//!
//! Invariants: the names of volumes, snapshots and buckets decide nothing, although URLs and
//! answers repeat them. An answer that no rule matches is `Unavailable`, which permits no
//! conclusion.
//!
//! Not here: how an error is handled (`client`), and the errors of files (`directory`).

use object_store::Error;

use crate::StoreError;
use crate::StoreErrorKind::{self, Broken, Denied, Invalid, NotFound, Unavailable};

/// Longest error text that is passed on, in bytes.
const TEXT_BYTES_MAX: usize = 400;

/// The answer names the object itself as missing. The last is Azure's text within a batch: of that
/// answer the protocol crate keeps only the first line. Keys have no spaces.
pub(crate) const OBJECT_MISSING: [&str; 4] = [
    "<Code>NoSuchKey</Code>",
    "<Code>BlobNotFound</Code>",
    "No such object",
    ": The specified blob does not exist.",
];

/// Words in an answer, what they mean, and what to do. The first that occurs counts.
const WORDS: [(&str, StoreErrorKind, &str); 23] = [
    ("NoSuchBucket", Denied, "create the bucket or fix its name"),
    ("ContainerNotFound", Denied, "create the container or fix its name"),
    ("bucket does not exist", Denied, "create the bucket or fix its name"),
    ("AccountNotFound", Denied, "fix the account's name"),
    ("RequestTimeTooSkewed", Denied, "set this machine's clock"),
    ("InvalidAccessKeyId", Denied, "check the access key"),
    ("SignatureDoesNotMatch", Denied, "check the secret key and the endpoint"),
    ("ExpiredToken", Denied, "renew the session's credentials"),
    ("InvalidToken", Denied, "renew the session's credentials"),
    (
        "AccessDenied",
        Denied,
        "grant list, get, put and delete on the bucket (without list, S3 hides what is missing)",
    ),
    ("AuthorizationHeaderMalformed", Invalid, "set AWS_REGION to the bucket's region"),
    ("redirect without LOCATION", Invalid, "set AWS_REGION to the bucket's region"),
    ("PermanentRedirect", Invalid, "set AWS_REGION and the endpoint to the bucket's"),
    ("InvalidBucketName", Invalid, "fix the bucket's name"),
    ("InvalidRange", Invalid, ""),
    ("EntityTooLarge", Invalid, "use smaller segments"),
    ("NotImplemented", Invalid, "this store lacks a call that is needed; see the doctor command"),
    (
        "169.254.169.254",
        Unavailable,
        "no credentials were found but the machine's own; set the access key's variables",
    ),
    (
        "DeleteObjects response",
        Unavailable,
        "if this store cannot delete in bulk, set AWS_DISABLE_BULK_DELETE=true",
    ),
    ("SlowDown", Unavailable, ""),
    ("InternalError", Unavailable, ""),
    (", got ", Broken, "something between here and the store mixes up ranges"),
    ("non-partial response", Broken, "something between here and the store ignores ranges"),
];

/// Turns the protocol crate's error into ours.
pub(crate) fn explain(error: Error) -> StoreError {
    let full = full_text(&error);
    let quoted = full.find("Server returned").map(|at| &full[at..]);
    let answer = quoted.unwrap_or(&full);
    let (kind, advice) = judge(&error, answer);
    let text = summary(answer).unwrap_or_else(|| one_line(answer));
    let advice = if advice.is_empty() { String::new() } else { format!("; {advice}") };
    StoreError::new(kind, format!("{text}{advice}")).with_source(error)
}

/// The text without URLs and keys, which an answer may repeat: a volume may be called
/// `AccessDenied`. The address of a machine's own credentials stays, because it shows what was
/// requested.
fn without_keys(text: &str) -> String {
    let is_border = |c: char| c.is_whitespace() || "<>\"'".contains(c);
    let is_key =
        |word: &str| (word.contains('/') || word.contains("%2F")) && !word.contains("://169.254.");
    let kept = text.split_inclusive(is_border).map(|piece| {
        let word = piece.trim_end_matches(is_border);
        if is_key(word) { &piece[word.len()..] } else { piece }
    });
    kept.collect()
}

/// What an answer permits to conclude, and what to do.
fn judge(error: &Error, answer: &str) -> (StoreErrorKind, &'static str) {
    let text = without_keys(answer);
    // Before the crate's own kinds: to the crate, a missing bucket is `NotFound` as well.
    if let Some((_, kind, advice)) = WORDS.iter().find(|(words, _, _)| text.contains(words)) {
        return (*kind, advice);
    }
    match error {
        Error::NotFound { .. } if OBJECT_MISSING.iter().any(|words| answer.contains(words)) => {
            (NotFound, "")
        }
        // A 404 that does not name the object may be a proxy's; as `NotFound` it would hide an
        // object.
        Error::NotFound { .. } => {
            (Unavailable, "the answer does not come from the store; check the endpoint")
        }
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
            (Denied, "check the credentials")
        }
        Error::NotSupported { .. } | Error::NotImplemented { .. } => (Invalid, ""),
        Error::InvalidPath { .. } | Error::UnknownConfigurationKey { .. } => (Invalid, ""),
        _ => match status(answer) {
            Some(401 | 403) => (Denied, "check the credentials"),
            Some(416 | 413) => (Invalid, ""),
            Some(405 | 501) => {
                (Invalid, "this store lacks a call that is needed; see the doctor command")
            }
            _ if answer.contains("Wanted range starting at") => (Invalid, ""),
            // What no rule knows permits no conclusion, and the client tries again.
            _ => (Unavailable, ""),
        },
    }
}

/// The error and all its causes.
fn full_text(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        let cause_text = inner.to_string();
        // Many errors of the crate quote their cause already.
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        cause = inner.source();
    }
    text
}

/// The HTTP status that the text names, also that of one delete within a batch.
fn status(answer: &str) -> Option<u16> {
    let (_, rest) =
        answer.split_once("status code: ").or_else(|| answer.rsplit_once(" (code: "))?;
    rest.get(..3)?.parse().ok()
}

/// Status, code and message of an XML answer; `None` if it is not XML.
fn summary(answer: &str) -> Option<String> {
    let element = |name: &str| {
        let (_, rest) = answer.split_once(&format!("<{name}>"))?;
        Some(rest.split_once("</")?.0)
    };
    let code = element("Code")?;
    let status = status(answer).map(|status| format!(" (HTTP {status})")).unwrap_or_default();
    let message = element("Message").map(|message| format!(": {message}")).unwrap_or_default();
    Some(one_line(&format!("the store said {code}{status}{message}")))
}

/// The text in one line of bearable length. A store's answer must not write control characters to a
/// terminal.
pub(super) fn one_line(text: &str) -> String {
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut line = words.replace(char::is_control, "?");
    if line.len() > TEXT_BYTES_MAX {
        let end = (0..=TEXT_BYTES_MAX).rev().find(|at| line.is_char_boundary(*at)).unwrap_or(0);
        line.truncate(end);
        line.push_str("...");
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(text: &str) -> Error {
        Error::Generic { store: "S3", source: text.to_owned().into() }
    }

    fn not_found(text: &str) -> Error {
        Error::NotFound { path: "x".to_owned(), source: text.to_owned().into() }
    }

    fn answer(status: &str, code: &str) -> String {
        format!(
            "Error performing GET http://h/b/NoSuchKey in 1ms - Server returned non-2xx status \
            code: {status}: \
            <Error>\n<Code>{code}</Code>\n<Message>so it is</Message></Error>"
        )
    }

    #[test]
    fn only_an_answer_that_names_the_object_as_missing_is_not_found() {
        assert_eq!(explain(not_found(&answer("404 Not Found", "NoSuchKey"))).kind(), NotFound);
        assert_eq!(explain(not_found(&answer("404 Not Found", "BlobNotFound"))).kind(), NotFound);
        assert_eq!(explain(not_found(&answer("404 Not Found", "NoSuchBucket"))).kind(), Denied);
        assert_eq!(
            explain(not_found(&answer("404 Not Found", "ContainerNotFound"))).kind(),
            Denied
        );
        let proxy = "Error performing GET http://h/<Code>NoSuchKey</Code> - Server returned \
            non-2xx status code: 404 Not Found: <html>nginx</html>";
        assert_eq!(explain(not_found(proxy)).kind(), Unavailable);
        assert_eq!(explain(not_found("")).kind(), Unavailable);
    }

    #[test]
    fn an_answer_with_a_namespace_says_what_it_says() {
        let message = |status: &str, code: &str| {
            let space = "http://s3.example.com/doc/2006-03-01/";
            format!(
                "Error performing GET http://h/b/k in 1ms - Server returned non-2xx status code: \
                 {status}: <Error xmlns=\"{space}\"><Code>{code}</Code></Error>"
            )
        };
        assert_eq!(explain(not_found(&message("404 Not Found", "NoSuchKey"))).kind(), NotFound);
        assert_eq!(explain(not_found(&message("404 Not Found", "NoSuchBucket"))).kind(), Denied);
        let skewed = message("403 Forbidden", "RequestTimeTooSkewed");
        assert!(explain(generic(&skewed)).to_string().contains("clock"));
    }

    #[test]
    fn a_name_that_an_answer_repeats_decides_nothing() {
        let absent = "Error performing GET http://h/b/k in 1ms - Server returned non-2xx status \
            code: 404 Not Found: ";
        for name in ["AccessDenied", "old-SlowDown", "NoSuchBucket"] {
            let minio = format!(
                "{absent}<Error><Code>NoSuchKey</Code><Message>The specified key does not \
                 exist.</Message><Key>names/{name}/1</Key><BucketName>b</BucketName>\
                 <Resource>/b/names/{name}/1</Resource></Error>"
            );
            assert_eq!(explain(not_found(&minio)).kind(), NotFound, "{minio}");
            let google = format!("{absent}{{\"message\": \"No such object: b/names/{name}/1\"}}");
            assert_eq!(explain(not_found(&google)).kind(), NotFound, "{google}");
        }
    }

    #[test]
    fn one_delete_within_a_batch_is_judged_by_its_own_status() {
        let one = |words: &str| format!("Bulk delete request failed for key a/b: {words}");
        let absent = one("The specified blob does not exist. (code: 404)");
        assert_eq!(explain(not_found(&absent)).kind(), NotFound);
        let elsewhere = one("The specified container does not exist. (code: 404)");
        assert_eq!(explain(not_found(&elsewhere)).kind(), Unavailable);
        assert_eq!(
            explain(generic(&one("This request is not authorized (code: 403)"))).kind(),
            Denied
        );
        assert_eq!(explain(generic(&one("The server is busy. (code: 503)"))).kind(), Unavailable);
    }

    #[test]
    fn every_answer_is_classed_by_what_the_caller_may_conclude() {
        let table = [
            ("400 Bad Request", "RequestTimeout", Unavailable),
            ("400 Bad Request", "AuthorizationHeaderMalformed", Invalid),
            ("400 Bad Request", "ExpiredToken", Denied),
            ("401 Unauthorized", "Whatever", Denied),
            ("403 Forbidden", "AccessDenied", Denied),
            ("416 Requested Range Not Satisfiable", "InvalidRange", Invalid),
            ("429 Too Many Requests", "SlowDown", Unavailable),
            ("500 Internal Server Error", "InternalError", Unavailable),
            ("501 Not Implemented", "NotImplemented", Invalid),
            ("502 Bad Gateway", "x", Unavailable),
            ("503 Slow Down", "SlowDown", Unavailable),
        ];
        for (status, code, kind) in table {
            assert_eq!(explain(generic(&answer(status, code))).kind(), kind, "{status} {code}");
        }
        assert_eq!(explain(generic("connection refused")).kind(), Unavailable);
        let named = "Error performing PUT http://h/b/AccessDenied/seg/00/1 - connection refused";
        assert_eq!(explain(generic(named)).kind(), Unavailable, "a name says nothing");
        let own = "Error performing PUT http://169.254.169.254/latest/api/token - timed out";
        assert!(explain(generic(own)).to_string().contains("no credentials were found"));
    }

    #[test]
    fn the_text_is_one_short_line_with_the_stores_own_words() {
        let text = explain(generic(&answer("403 Forbidden", "SignatureDoesNotMatch"))).to_string();
        let start =
            "the store said SignatureDoesNotMatch (HTTP 403): so it is; check the secret key";
        assert!(text.starts_with(start), "{text}");
        let long = explain(generic(&"ä\n".repeat(10_000))).to_string();
        assert!(long.len() < TEXT_BYTES_MAX + 10 && !long.contains('\n'));
    }

    #[test]
    fn an_answer_writes_no_control_characters_to_a_terminal() {
        let text = explain(generic(&answer("403 Forbidden", "Code\x1b[2J"))).to_string();
        assert!(text.contains("Code?[2J") && !text.contains(char::is_control), "{text}");
    }
}
