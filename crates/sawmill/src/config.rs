//! Maps volume names to stores, and chooses the folders for state, cache and sockets.
//!
//! Invariants: the process environment is read here once, as a value, so that tests can use another
//! one. Nothing here touches a store or makes a file.
//!
//! Not here: the file with options of commands (`command::config_file`), making the folders
//! (`folders`).

use std::path::{Path, PathBuf};
use std::{env, fs};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use sawmill_doors::UNPRIVILEGED_FOLDER;
use sawmill_format::crc::crc32c;
use sawmill_format::kept_block::NAME_BYTES_MAX;
use sawmill_volume::Cut;

use crate::moment::parse_cut;
use sawmill_console::exit::{Failure, Result};

/// The environment variable that names the default store.
pub(crate) const STORE_VARIABLE: &str = "SAWMILL_STORE";

/// The file in a volume's folder that names its store.
pub(crate) const STORE_FILE: &str = "store";

/// The folder in a user's state folder that has one folder for each device with a driver.
pub(crate) const DRIVERS_FOLDER: &str = "drivers";

/// The folder in a user's state folder that has one socket for each running end of a link.
const LINKS_FOLDER: &str = "links";
/// The folder in a user's state folder with the persistent state of each file and disk that a
/// target exports.
const EXPORTS_FOLDER: &str = "exports";

/// The variables of the process environment that determine places.
#[derive(Clone, Debug, Default)]
pub(crate) struct Paths {
    /// `SAWMILL_STORE`.
    pub(crate) store: Option<String>,
    /// `HOME`.
    pub(crate) home: Option<PathBuf>,
    /// `XDG_DATA_HOME`.
    pub(crate) data_home: Option<PathBuf>,
    /// `XDG_STATE_HOME`.
    pub(crate) state_home: Option<PathBuf>,
    /// `XDG_RUNTIME_DIR`.
    pub(crate) runtime: Option<PathBuf>,
}

/// A volume and the store it is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VolumeAddress {
    /// URL of the store.
    pub(crate) store_url: String,
    /// Name of the volume in it.
    pub(crate) name: String,
    /// The past state, as typed and as parsed; `None`: the present.
    pub(crate) cut: Option<(String, Cut)>,
}

impl VolumeAddress {
    /// Name and cut in the form that users type.
    pub(crate) fn display_name(&self) -> String {
        match &self.cut {
            Some((text, _)) => format!("{}@{text}", self.name),
            None => self.name.clone(),
        }
    }
}

impl Paths {
    /// Reads the environment. Relative XDG paths are ignored, as their specification says.
    pub(crate) fn from_environment() -> Self {
        let absolute = |variable: &str| {
            env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
        };
        Paths {
            store: env::var(STORE_VARIABLE).ok().filter(|url| !url.is_empty()),
            home: absolute("HOME"),
            data_home: absolute("XDG_DATA_HOME"),
            state_home: absolute("XDG_STATE_HOME"),
            runtime: absolute("XDG_RUNTIME_DIR"),
        }
    }

    /// The same places with another default store, if one is given.
    pub(crate) fn with_store(self, store: Option<String>) -> Self {
        Paths { store: store.filter(|url| !url.is_empty()).or(self.store), ..self }
    }

    /// The store that plain names are looked up in.
    pub(crate) fn default_store(&self) -> Result<String> {
        if let Some(url) = &self.store {
            return Ok(url.clone());
        }
        Ok(file_url(&self.default_store_folder()?))
    }

    /// The folder behind the default store when `SAWMILL_STORE` is not set.
    pub(crate) fn default_store_folder(&self) -> Result<PathBuf> {
        self.home_folder(self.data_home.as_ref(), ".local/share", "XDG_DATA_HOME")
            .map(|folder| folder.join("sawmill/store"))
    }

    /// The folder for journals, control sockets and the read cache.
    pub(crate) fn state_folder(&self) -> Result<PathBuf> {
        self.home_folder(self.state_home.as_ref(), ".local/state", "XDG_STATE_HOME")
            .map(|folder| folder.join("sawmill"))
    }

    /// The folder with the facts of ublk devices that this user's servers run without privileges.
    pub(crate) fn ublk_folder(&self) -> Result<PathBuf> {
        Ok(self.state_folder()?.join(UNPRIVILEGED_FOLDER))
    }

    /// The folder of one volume of one store below the state folder. Its name is the volume's id.
    /// If the same volume of another store (a replica) has that folder, the name is the id and the
    /// store.
    pub(crate) fn volume_folder(&self, volume_id: &str, store_url: &str) -> Result<PathBuf> {
        let plain = self.state_folder()?.join(volume_id);
        let url = store_url.trim_end_matches('/');
        let own = plain.with_file_name(format!("{volume_id}-{:08x}", crc32c(url.as_bytes())));
        // A replica that has a folder of its own keeps it, also when the plain one becomes free.
        if own.is_dir() {
            return Ok(own);
        }
        // A folder without this file is from a version without replicas; it belongs to the first
        // volume that asks.
        let of = fs::read_to_string(plain.join(STORE_FILE));
        Ok(if of.is_ok_and(|of| of.trim_end_matches('/') != url) { own } else { plain })
    }

    /// The read cache that all volumes of a user share.
    pub(crate) fn cache_path(&self) -> Result<PathBuf> {
        Ok(self.state_folder()?.join("cache"))
    }

    /// The folder of a device with a driver.
    pub(crate) fn driver_folder(&self, name: &str) -> Result<PathBuf> {
        // The name becomes a folder and must not lead elsewhere.
        check_name(name)?;
        Ok(self.state_folder()?.join(DRIVERS_FOLDER).join(name))
    }

    /// The folder for the sockets of link ends.
    pub(crate) fn links_folder(&self) -> Result<PathBuf> {
        Ok(self.state_folder()?.join(LINKS_FOLDER))
    }

    /// The folder for the state of exports.
    pub(crate) fn exports_folder(&self) -> Result<PathBuf> {
        Ok(self.state_folder()?.join(EXPORTS_FOLDER))
    }

    /// The default socket of the NBD door.
    pub(crate) fn nbd_socket(&self) -> Result<PathBuf> {
        match &self.runtime {
            Some(folder) if folder.is_dir() => Ok(folder.join("sawmill/nbd.sock")),
            _ => Ok(self.state_folder()?.join("nbd.sock")),
        }
    }

    /// Resolves `text` to a store and a name: a name in the default store, or a URL that ends in
    /// the name.
    pub(crate) fn resolve(&self, text: &str) -> Result<VolumeAddress> {
        if text.contains(':') || text.starts_with('/') {
            let (store_url, name) = sawmill_store::split_volume_url(text)?;
            check_name(&name)?;
            return Ok(VolumeAddress { store_url, name, cut: None });
        }
        if text.contains('/') {
            return Err(Failure::usage(format!(
                "'{text}' is neither a name nor a URL; for a folder write \
                 file:///path/of/folder/name, for a volume of the default store its name alone"
            )));
        }
        check_name(text)?;
        Ok(VolumeAddress { store_url: self.default_store()?, name: text.to_owned(), cut: None })
    }

    /// As [`resolve`](Self::resolve), with or without `@` and a state of the past after the name.
    pub(crate) fn resolve_cut(&self, text: &str) -> Result<VolumeAddress> {
        // Only the last part can have a cut: folders may have an @ in their names.
        let name_at = text.rfind('/').map_or(0, |slash| slash + 1);
        let Some(at) = text[name_at..].find('@') else { return self.resolve(text) };
        let cut = &text[name_at + at + 1..];
        let address = self.resolve(&text[..name_at + at])?;
        Ok(VolumeAddress { cut: Some((cut.to_owned(), parse_cut(cut)?)), ..address })
    }

    fn home_folder(
        &self,
        xdg: Option<&PathBuf>,
        below_home: &str,
        variable: &str,
    ) -> Result<PathBuf> {
        match (xdg, &self.home) {
            (Some(folder), _) => Ok(folder.clone()),
            (None, Some(home)) => Ok(home.join(below_home)),
            (None, None) => Err(Failure::usage(format!(
                "neither HOME nor {variable} is set; set one to an absolute path"
            ))),
        }
    }
}

/// Refuses names that no volume can have, before any request to a store.
pub(crate) fn check_name(name: &str) -> Result<()> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let well_formed = name.chars().all(allowed) && !name.starts_with('.');
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !well_formed {
        return Err(Failure::usage(format!(
            "'{name}' is not a valid name; use 1 to {NAME_BYTES_MAX} letters, digits, '_', '-' and \
             '.', not starting with '.'"
        )));
    }
    Ok(())
}

/// Characters that need no encoding in a URL's path (RFC 3986).
const PLAIN: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');

/// The `file://` URL of an absolute path, with what a URL cannot hold percent-encoded.
pub(crate) fn file_url(path: &Path) -> String {
    format!("file://{}", percent_encode(path.as_os_str().as_encoded_bytes(), PLAIN))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths() -> Paths {
        Paths { home: Some("/home/ada".into()), ..Paths::default() }
    }

    #[test]
    fn a_plain_name_is_in_the_default_store() {
        let address = paths().resolve("disk1").unwrap();
        assert_eq!(address.store_url, "file:///home/ada/.local/share/sawmill/store");
        assert_eq!(address.name, "disk1");
        let elsewhere = Paths { store: Some("s3://bucket/disks".into()), ..paths() };
        assert_eq!(elsewhere.resolve("disk1").unwrap().store_url, "s3://bucket/disks");
    }

    #[test]
    fn xdg_folders_come_before_home() {
        let paths =
            Paths { data_home: Some("/d".into()), state_home: Some("/s".into()), ..paths() };
        assert_eq!(paths.default_store().unwrap(), "file:///d/sawmill/store");
        assert_eq!(paths.cache_path().unwrap(), Path::new("/s/sawmill/cache"));
        assert_eq!(paths.volume_folder("ab", "s3://b").unwrap(), Path::new("/s/sawmill/ab"));
        assert_eq!(paths.nbd_socket().unwrap(), Path::new("/s/sawmill/nbd.sock"));
    }

    #[test]
    fn a_volume_and_its_replica_have_folders_of_their_own() {
        let state = tempfile::tempdir().unwrap();
        let paths = Paths { state_home: Some(state.path().into()), ..paths() };
        let first = paths.volume_folder("ab", "s3://one").unwrap();
        crate::folders::make_volume_folder(&first, "s3://one").unwrap();
        let second = paths.volume_folder("ab", "s3://two").unwrap();
        assert_ne!(first, second);
        crate::folders::make_volume_folder(&second, "s3://two").unwrap();
        assert_eq!(paths.volume_folder("ab", "s3://one/").unwrap(), first);
        assert_eq!(paths.volume_folder("ab", "s3://two/").unwrap(), second);
        // A folder from an earlier version names no store, and is found.
        std::fs::remove_file(first.join(STORE_FILE)).unwrap();
        assert_eq!(paths.volume_folder("ab", "s3://one").unwrap(), first);
    }

    #[test]
    fn a_url_names_store_and_volume() {
        let address = paths().resolve("file:///srv/sawmill/disk1").unwrap();
        assert_eq!(address.name, "disk1");
        assert!(address.store_url.starts_with("file:///srv/sawmill"), "{address:?}");
        let address = paths().resolve("s3://bucket/prefix/disk1").unwrap();
        assert_eq!(address.name, "disk1");
        assert!(address.store_url.starts_with("s3://bucket/prefix"), "{address:?}");
    }

    #[test]
    fn a_cut_follows_the_name() {
        let address = paths().resolve_cut("file:///srv/a@b/disk1@2026-11-21T10:00:00Z").unwrap();
        assert_eq!(
            (address.name.as_str(), address.display_name().as_str()),
            ("disk1", "disk1@2026-11-21T10:00:00Z")
        );
        assert!(matches!(address.cut, Some((_, Cut::Time(_)))));
        assert_eq!(paths().resolve_cut("disk1").unwrap().cut, None);
        assert!(paths().resolve_cut("disk1@").is_err());
    }

    #[test]
    fn a_path_is_refused_with_the_url_to_write() {
        let error = paths().resolve("./disks/disk1").unwrap_err().to_string();
        assert!(error.contains("file:///"), "{error}");
    }

    #[test]
    fn names_that_no_volume_can_have_are_refused() {
        for name in ["", ".hidden", "a b", "disk*", &"x".repeat(129)] {
            let error = paths().resolve(name).unwrap_err();
            assert!(error.to_string().contains("is not a valid name"), "{error}");
        }
    }

    #[test]
    fn without_a_home_the_error_names_what_to_set() {
        let error = Paths::default().state_folder().unwrap_err().to_string();
        assert!(error.contains("HOME") && error.contains("XDG_STATE_HOME"), "{error}");
    }

    #[test]
    fn a_path_with_spaces_becomes_a_valid_url() {
        assert_eq!(file_url(Path::new("/a b/c%")), "file:///a%20b/c%25");
    }
}
