//! From a URL to a client. Not here: what a URL means (`location`), and the credentials of a
//! network store (`cloud`, `profile`).

use std::sync::Arc;

use crate::backend::Backend;
use crate::cloud::Cloud;
use crate::directory::Directory;
use crate::location::{self, Location};
use crate::memory::Memory;
use crate::{Client, Result, StoreOptions};

/// Opens the store that `url` names; makes no request yet.
///
/// | URL | store |
/// |---|---|
/// | `memory:` | a fresh one in this process's memory |
/// | `memory:NAME` | the process-wide one of that name |
/// | `/path`, `file:///path` | a folder; made by the first put |
/// | `s3://bucket/prefix?endpoint=URL&region=NAME` | S3 and its kin |
/// | `gs://bucket/prefix?endpoint=URL` | Google Cloud Storage |
/// | `az://container/prefix?account=NAME&endpoint=URL` | Azure Blob Storage |
///
/// Credentials and further settings come from the usual variables: `AWS_*` (and the AWS credentials
/// file), `GOOGLE_*`, `AZURE_*`. Traffic to an `http://` endpoint is not encrypted.
///
/// Fails with a one-line `Invalid` error if the URL or a setting is wrong.
pub fn open(url: &str, options: StoreOptions) -> Result<Arc<Client>> {
    // Not `vars`, which panics at any variable that is not Unicode, needed or not.
    let variables = std::env::vars_os();
    let environment: Vec<(String, String)> = variables
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    let client = open_in(url, &options, &environment)?;
    if let Some(endpoint) = client.exposed_endpoint() {
        tracing::warn!(
            "{endpoint} is spoken to without encryption: whoever is on the way can read and change \
             all data; use an https:// endpoint"
        );
    }
    Ok(client)
}

/// Reads a store URL without opening anything, and returns it in a form that may be shown: without
/// its parameters.
///
/// Fails as [`open`] does, except for settings that are missing or wrong outside the URL.
pub fn check_url(url: &str) -> Result<String> {
    location::parse(url).map(|_| location::public_form(url))
}

/// Opens the store that `url` names as [`open`] does, with credentials and settings from these
/// variables (names and values) only, not from the process's own. Prints no warnings.
pub fn open_in(
    url: &str,
    options: &StoreOptions,
    environment: &[(String, String)],
) -> Result<Arc<Client>> {
    let backend: Box<dyn Backend> = match location::parse(url)? {
        Location::Memory { name: None } => Box::new(Memory::default()),
        Location::Memory { name: Some(name) } => Box::new(Memory::named(&name)),
        Location::Directory { root } => Box::new(Directory::new(root)),
        Location::Cloud(location) => Box::new(Cloud::new(&location, environment)?),
    };
    Ok(Client::new(location::public_form(url), backend, options))
}
