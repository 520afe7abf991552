//! The backend against a small Azure Blob Storage: create-only as S3 but refused as a conflict,
//! lists of its own, and deletes as requests inside a request.
//!
//! Not here: whether a signature is right; only that there is one.

use super::*;

const BOUNDARY: &str = "batchresponse_scripted";
const ABSENT: &str = "The specified blob does not exist.";

fn perform(world: &mut World, request: &Request) -> Answer {
    let authorization = &request.headers["authorization"];
    assert!(authorization.starts_with("SharedKey me:"), "an unsigned request");
    let (path, query) = request.target.split_once('?').unwrap_or((&request.target, ""));
    let Some(path) = path.strip_prefix("/bucket") else {
        return code(404, "ContainerNotFound");
    };
    let key = path.trim_start_matches('/').to_owned();
    let is_block = request.headers.get("x-ms-blob-type").is_some_and(|kind| kind == "BlockBlob");
    match request.method.as_str() {
        "PUT" if !is_block => code(400, "MissingRequiredHeader"),
        "PUT" if request.headers.get("if-none-match").is_none_or(|value| value != "*") => {
            code(400, "NoCondition")
        }
        "PUT" if world.objects.contains_key(&key) => code(409, "BlobAlreadyExists"),
        "PUT" => Answer { status: 201, ..made(world, key, &request.body) },
        "POST" if query == "restype=container&comp=batch" => batch(world, request),
        "GET" if query.starts_with("restype=container&comp=list") => list(world, query),
        "GET" => match world.objects.get(&key) {
            Some(body) => part_of(body, request.headers.get("range")),
            None => code(404, "BlobNotFound"),
        },
        other => panic!("no method {other} with {query}"),
    }
}

fn list(world: &World, query: &str) -> Answer {
    let prefix = url::form_urlencoded::parse(query.as_bytes()).find(|(name, _)| name == "prefix");
    let prefix = prefix.map(|(_, value)| value.into_owned()).unwrap_or_default();
    let found = world.objects.iter().filter(|(key, _)| key.starts_with(&prefix));
    let blobs: String = found
        .map(|(key, body)| {
            let size = body.len();
            format!(
                "<Blob><Name>{key}</Name><Properties>\
                 <Last-Modified>Mon, 01 Jan 2024 00:00:00 GMT</Last-Modified>\
                 <Content-Length>{size}</Content-Length><Content-Type>x</Content-Type>\
                 </Properties></Blob>"
            )
        })
        .collect();
    let blobs = format!("<Blobs>{blobs}</Blobs><NextMarker/>");
    answer(200, format!("<EnumerationResults>{blobs}</EnumerationResults>"))
}

/// The keys that a batch deletes, in its order. Each part of it is a request by itself.
fn batched(request: &Request) -> Vec<String> {
    let text = String::from_utf8(request.body.clone()).unwrap();
    let lines = text.lines().filter_map(|line| line.strip_prefix("DELETE /bucket/"));
    lines.map(|line| line.strip_suffix(" HTTP/1.1").unwrap().to_owned()).collect()
}

fn batch(world: &mut World, request: &Request) -> Answer {
    let absent = format!(
        "404 {ABSENT}\r\nx-ms-error-code: BlobNotFound\r\nContent-Type: application/xml\r\n\r\n\
         <Error><Code>BlobNotFound</Code><Message>{ABSENT}</Message></Error>"
    );
    let deleted = batched(request).into_iter().map(|key| match world.objects.remove(&key) {
        Some(_) => "202 Accepted\r\nx-ms-delete-type-permanent: true\r\n\r\n".to_owned(),
        None => absent.clone(),
    });
    parts(deleted.collect())
}

/// The answer to a batch, whose parts are answers.
fn parts(answers: Vec<String>) -> Answer {
    let each = answers.iter().enumerate().map(|(number, answer)| {
        format!(
            "--{BOUNDARY}\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n\
             HTTP/1.1 {answer}\r\n"
        )
    });
    let body = format!("{}--{BOUNDARY}--\r\n", each.collect::<String>());
    let headers = format!("Content-Type: multipart/mixed; boundary={BOUNDARY}\r\n");
    Answer { headers, ..answer(202, body) }
}

fn client(server: &Server, bucket: &str) -> Arc<Client> {
    let port = server.port;
    let url = format!("az://{bucket}/some/prefix?account=me&endpoint=http://127.0.0.1:{port}");
    let variables = environment(&[("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")]);
    open_in(&url, &StoreOptions { deadline_s: 5, ..StoreOptions::default() }, &variables).unwrap()
}

#[test]
fn the_azure_backend_keeps_the_contract() {
    let server = serving(perform);
    assert_eq!(conformance::run(&*client(&server, "bucket")), Vec::<String>::new());
    let requests = &server.world.lock().requests;
    let begin = "PUT /bucket/some/prefix/conformance/";
    assert!(requests.iter().any(|request| request.starts_with(begin)), "{:?}", requests.first());
}

#[test]
fn a_missing_container_is_denied_at_once() {
    let server = serving(perform);
    let error = put(&client(&server, "elsewhere"), "x").unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Denied, "{error}");
    assert!(error.to_string().contains("create the container"), "{error}");
    assert_eq!(server.world.lock().requests.len(), 1);
}

/// A client of a store that has these objects, and their keys.
fn filled(server: &Server) -> (Arc<Client>, Vec<String>) {
    let (client, keys) = (client(server, "bucket"), ["a", "b", "c", "d"].map(str::to_owned));
    for key in &keys {
        Blocking(&*client).put(key, "body".into(), Class::Upload).unwrap();
    }
    server.world.lock().requests.clear();
    (client, keys.to_vec())
}

#[test]
fn a_batch_that_is_half_done_is_done_by_repeating_it() {
    fn busy_once(world: &mut World, request: &Request) -> Answer {
        if request.method != "POST" || world.requests.len() > 1 {
            return perform(world, request);
        }
        let answers = batched(request).into_iter().map(|key| match key.as_str() {
            "some/prefix/a" | "some/prefix/b" => {
                world.objects.remove(&key);
                "202 Accepted\r\n\r\n".to_owned()
            }
            _ => "503 The server is busy.\r\n\r\n".to_owned(),
        });
        parts(answers.collect())
    }
    let server = serving(busy_once);
    let (client, keys) = filled(&server);
    Blocking(&*client).delete(keys, Class::Background).unwrap();
    let world = server.world.lock();
    assert_eq!((world.objects.len(), world.requests.len()), (0, 2));
}

#[test]
fn a_batch_that_may_not_delete_is_denied_at_once() {
    fn closed(world: &mut World, request: &Request) -> Answer {
        let refused = "403 This request is not authorized to perform this operation.\r\n\r\n";
        match request.method.as_str() {
            "POST" => parts(vec![refused.to_owned(); batched(request).len()]),
            _ => perform(world, request),
        }
    }
    let server = serving(closed);
    let (client, keys) = filled(&server);
    let error = Blocking(&*client).delete(keys, Class::Background).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Denied, "{error}");
    let world = server.world.lock();
    assert_eq!((world.objects.len(), world.requests.len()), (4, 1));
}
