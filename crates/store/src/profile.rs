//! Keys from the AWS shared credentials file, for users who keep them there and not in variables.
//!
//! Only static keys: `aws_access_key_id`, `aws_secret_access_key`, `aws_session_token`.
//!
//! Invariants: credentials in variables win over the file. Of the file, only the profile that
//! `AWS_PROFILE` names is used, or `default` if none is named; a named one that the file lacks is
//! an error.
//!
//! Not here: roles and single sign-on; for these, export variables with the vendor's tool.

use std::path::PathBuf;

use crate::{Result, StoreError, StoreErrorKind};

/// The names that a profile can set, and the variables with the same meaning.
const NAMES: [(&str, &str); 3] = [
    ("aws_access_key_id", "AWS_ACCESS_KEY_ID"),
    ("aws_secret_access_key", "AWS_SECRET_ACCESS_KEY"),
    ("aws_session_token", "AWS_SESSION_TOKEN"),
];

/// The variables of the process: names and values, as the cloud backends read them.
pub(crate) type Environment = [(String, String)];

/// The variables equivalent to the chosen profile. Empty if the environment has its own
/// credentials, or if no profile was asked for and there is no file.
pub(crate) fn credentials(environment: &Environment) -> Result<Vec<(String, String)>> {
    let variable = |name| {
        environment
            .iter()
            .find(|(key, value)| key == name && !value.is_empty())
            .map(|(_, value)| value.as_str())
    };
    // If the environment has any source of credentials, the file must not mix in keys of another
    // account.
    let others = ["AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE"];
    if others.into_iter().any(|name| variable(name).is_some()) {
        return Ok(Vec::new());
    }
    let profile_name = variable("AWS_PROFILE");
    let file_path = variable("AWS_SHARED_CREDENTIALS_FILE").map(PathBuf::from);
    let home = || variable("HOME").map(|home| PathBuf::from(home).join(".aws/credentials"));
    let Some(path) = file_path.or_else(home) else {
        return match profile_name {
            None => Ok(Vec::new()),
            Some(profile) => Err(StoreError::new(
                StoreErrorKind::Invalid,
                format!(
                    "no file has AWS profile {profile:?}: set AWS_SHARED_CREDENTIALS_FILE or HOME"
                ),
            )),
        };
    };
    let profile = profile_name.unwrap_or("default");
    let selection = match std::fs::read_to_string(&path) {
        Ok(text) => select(&text, profile),
        // Nobody asked for a profile: keys may come from elsewhere, so a missing file is no error.
        Err(_) if profile_name.is_none() => None,
        Err(error) => {
            let text =
                format!("cannot read {} for AWS profile {profile:?}: {error}", path.display());
            return Err(StoreError::new(StoreErrorKind::Invalid, text).with_source(error));
        }
    };
    match selection {
        Some(selection) => Ok(selection),
        None if profile_name.is_none() => Ok(Vec::new()),
        None => {
            let text = format!(
                "{} has no profile {profile:?}: correct AWS_PROFILE, or add that profile to \
                 the file",
                path.display()
            );
            Err(StoreError::new(StoreErrorKind::Invalid, text))
        }
    }
}

/// The variables equivalent to section `[profile]` of the file; `None` without that section.
fn select(text: &str, profile: &str) -> Option<Vec<(String, String)>> {
    // Spaces inside the brackets are allowed: `[ other ]` is the same profile.
    let header = |line: &str| Some(line.strip_prefix('[')?.strip_suffix(']')?.trim().to_owned());
    let mut lines = text.lines().map(str::trim);
    lines.find(|line| header(line).as_deref() == Some(profile))?;
    let section = lines.take_while(|line| header(line).is_none());
    let pairs = section
        .filter(|line| !line.starts_with(['#', ';']))
        .filter_map(|line| line.split_once('='));
    let credentials = pairs.filter_map(|(name, value)| {
        let (_, variable) =
            NAMES.iter().find(|(known_name, _)| name.trim().eq_ignore_ascii_case(known_name))?;
        Some(((*variable).to_owned(), value.trim().to_owned()))
    });
    Some(credentials.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "[default]\naws_access_key_id = A\naws_secret_access_key=B=\n\n# a \
        remark\n[ other ]\naws_access_key_id = C\nregion = x\naws_secret_access_key = \
        D\naws_session_token = E\n";

    fn owned(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_profile_stands_for_its_keys() {
        let default = owned(&[("AWS_ACCESS_KEY_ID", "A"), ("AWS_SECRET_ACCESS_KEY", "B=")]);
        let other = owned(&[
            ("AWS_ACCESS_KEY_ID", "C"),
            ("AWS_SECRET_ACCESS_KEY", "D"),
            ("AWS_SESSION_TOKEN", "E"),
        ]);
        assert_eq!(select(FILE, "default"), Some(default));
        assert_eq!(select(FILE, "other"), Some(other));
        assert_eq!(select(FILE, "third"), None);
    }

    #[test]
    fn variables_win_over_the_file_and_a_missing_profile_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("credentials");
        std::fs::write(&path, FILE).unwrap();
        let path = path.to_str().unwrap();
        let file = ("AWS_SHARED_CREDENTIALS_FILE", path);
        assert_eq!(credentials(&owned(&[file, ("AWS_ACCESS_KEY_ID", "X")])).unwrap(), []);
        assert_eq!(credentials(&owned(&[file])).unwrap().len(), 2);
        assert_eq!(credentials(&owned(&[file, ("AWS_PROFILE", "other")])).unwrap().len(), 3);
        let error = credentials(&owned(&[file, ("AWS_PROFILE", "third")])).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Invalid);
        assert_eq!(credentials(&owned(&[("HOME", "/nowhere")])).unwrap(), []);
        let error = credentials(&owned(&[("AWS_PROFILE", "other")])).unwrap_err();
        assert!(error.to_string().contains("AWS_SHARED_CREDENTIALS_FILE"), "{error}");
    }
}
