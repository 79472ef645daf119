//! Data files: by name from those that Polder brings along, or by path; one line for what is wrong in one.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use include_dir::{Dir, include_dir};
use serde::de::{Deserialize, DeserializeOwned, Deserializer};
use serde_path_to_error::Track;
use toml::{Table, Value};

/// What is wrong with a data file: which file, which key, what was expected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct DataError {
    /// The file, or the name that it was asked for by.
    pub file: String,
    /// The key, with dots; empty when it is the file itself.
    pub key: String,
    /// What was expected, and what was found.
    pub problem: String,
}

impl DataError {
    /// What is wrong at `key` of `file`.
    #[must_use]
    pub fn new(file: &str, key: &str, problem: impl Into<String>) -> Self {
        Self { file: file.into(), key: key.into(), problem: problem.into() }
    }
}

impl fmt::Display for DataError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Keys and values come from the file: they may hold anything.
        let (file, key, problem) = (quoted(&self.file), quoted(&self.key), printable(&self.problem));
        match key.is_empty() {
            true => write!(f, "{file}: {problem}"),
            false => write!(f, "{file}: {key}: {problem}"),
        }
    }
}

/// Whether a terminal shows `character` as itself: control characters, and those that change the direction of text, are commands.
fn is_printable(character: char) -> bool {
    !character.is_control() && !matches!(character, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// `text` with escapes such as `\u{1b}` in place of what a terminal takes as a command.
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    if text.chars().all(is_printable) {
        return text.into();
    }
    let escaped = text.chars().map(|it| match is_printable(it) {
        true => it.to_string(),
        false => it.escape_default().to_string(),
    });
    escaped.collect::<String>().into()
}

/// Bytes of a text from outside that an error quotes.
const QUOTED_BYTES: usize = 200;

/// What an error quotes of a name, a path or a line of a file from outside: as [`printable`] has it, and cut after 200 bytes.
///
/// ```
/// use polder_platform::quoted;
///
/// assert_eq!(quoted("/train/\u{1b}"), "/train/\\u{1b}");
/// assert!(quoted(&"x".repeat(5000)).ends_with("xx… (5000 bytes)"));
/// ```
#[must_use]
pub fn quoted(text: &(impl AsRef<OsStr> + ?Sized)) -> String {
    let text = text.as_ref().to_string_lossy();
    if text.len() <= QUOTED_BYTES {
        return printable(&text).into_owned();
    }
    let end = (0..=QUOTED_BYTES).rfind(|&at| text.is_char_boundary(at)).unwrap_or(0);
    format!("{}… ({} bytes)", printable(&text[..end]), text.len())
}

/// A text whose words are each quoted as by [`quoted`]: for messages that say again what a user gave.
///
/// ```
/// use polder_platform::quoted_words;
///
/// let said = format!("unknown field `{}`, expected `job`", "x".repeat(5000));
/// assert!(quoted_words(&said).starts_with("unknown field `xx") && quoted_words(&said).len() < 300);
/// ```
#[must_use]
pub fn quoted_words(text: &str) -> String {
    // The colon behind a word is not the word's.
    let word = |word: &str| match word.strip_suffix(':') {
        Some(word) => quoted(word) + ":",
        None => quoted(word),
    };
    text.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

/// A word as a shell reads it: a command that is printed can be copied, whatever its paths are called.
///
/// ```
/// use polder_platform::shell_word;
///
/// assert_eq!(["/tmp/host", "/tmp/ho st", "it's", ""].map(shell_word), ["/tmp/host", "'/tmp/ho st'", r"'it'\''s'", "''"]);
/// ```
#[must_use]
pub fn shell_word(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-=:,+@%".contains(&byte);
    match !word.is_empty() && word.bytes().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// A number of bytes, as errors say it: in the largest unit of which it is a whole number, with a rounded one where that is bytes.
///
/// ```
/// use polder_platform::sized;
///
/// assert_eq!([4 << 20, 1000].map(sized), ["4 MiB", "1000 bytes"]);
/// assert_eq!(sized((4 << 20) + 320), "4194624 bytes (4.0 MiB)");
/// ```
#[must_use]
pub fn sized(bytes: u64) -> String {
    let unit = |power: u64| ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"][power as usize];
    let whole = if bytes == 0 { 0 } else { u64::from(bytes.trailing_zeros() / 10) };
    let largest = u64::from(bytes.max(1).ilog2() / 10);
    match whole {
        0 if largest > 0 && bytes >= 10_000 => {
            format!(
                "{bytes} bytes ({:.1} {})",
                bytes as f64 / (1_u64 << (10 * largest)) as f64,
                unit(largest)
            )
        }
        _ => format!("{} {}", bytes >> (10 * whole), unit(whole)),
    }
}

/// Reads a text that is printed later: see [`printable`].
///
/// # Errors
/// When it is no string.
pub fn printable_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    String::deserialize(deserializer).map(|text| printable(&text).into_owned())
}

/// Whether `name` can stand in tables and messages: what is wrong otherwise.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    match name.chars().all(is_printable) {
        true => Ok(()),
        false => Err(format!("expected a name without control characters, found \"{}\"", quoted(name))),
    }
}

/// A folder of data that Polder brings along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Folder {
    /// Machines.
    Platforms,
    /// Models that are trained.
    Models,
    /// Tables that were published, to be judged against.
    Published,
    /// Tables of fabrics and memory that were published, to be judged against apart from training steps.
    Fabrics,
    /// Figures that were published, to be made again.
    Figures,
    /// What machines cost.
    Prices,
}

// Each folder by itself: what lies beside them in `data` is read by scripts and tests alone.
static PLATFORMS: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../data/platforms");
static MODELS: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../data/models");
static PUBLISHED: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../data/published");
static FABRICS: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../data/fabrics");
static FIGURES: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../data/figures");
static PRICES: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../data/prices");

impl Folder {
    const fn files(self) -> &'static Dir<'static> {
        match self {
            Self::Platforms => &PLATFORMS,
            Self::Models => &MODELS,
            Self::Published => &PUBLISHED,
            Self::Fabrics => &FABRICS,
            Self::Figures => &FIGURES,
            Self::Prices => &PRICES,
        }
    }

    const fn singular(self) -> &'static str {
        match self {
            Self::Platforms => "platform",
            Self::Models => "model",
            Self::Published => "published table",
            Self::Fabrics => "published table",
            Self::Figures => "figure",
            Self::Prices => "file of prices",
        }
    }
}

/// The names of what lies in a folder, sorted.
#[must_use]
pub fn names(folder: Folder) -> Vec<&'static str> {
    let names =
        folder.files().files().filter_map(|file| file.path().file_name()?.to_str()?.strip_suffix(".toml"));
    names.collect::<BTreeSet<_>>().into_iter().collect()
}

/// The text of a file: of one that Polder brings along by its name, of any other by its path.
///
/// # Errors
/// When there is no such file, with the names that there are.
pub fn text(folder: Folder, name: &str) -> Result<String, DataError> {
    let known = folder.files().get_file(format!("{name}.toml"));
    if let Some(text) = known.and_then(|file| file.contents_utf8()) {
        return Ok(text.into());
    }
    if !name.contains('/') && Path::new(name).extension().is_none() {
        let known = names(folder).join(", ");
        let one = folder.singular();
        if name.is_empty() {
            let problem = format!("the name of a {one} is empty; there are {known}, or give a path");
            return Err(DataError::new("\"\"", "", problem));
        }
        return Err(DataError::new(
            name,
            "",
            format!("no {one} of this name; there are {known}, or give a path"),
        ));
    }
    text_of(name)
}

/// The text of the file at `path`.
///
/// # Errors
/// When it cannot be read, is no regular file, or is larger than 16 MiB. When `path` has control characters.
pub fn text_of(path: &str) -> Result<String, DataError> {
    text_within(path, 16)
}

/// The text of a trace or a record at `path`, which grows with what it is of.
///
/// # Errors
/// When it cannot be read, is no regular file, or is larger than 1 GiB. When `path` has control characters.
pub fn recorded_text_of(path: &str) -> Result<String, DataError> {
    text_within(path, 1024)
}

/// The paths of a folder's files whose names are such, in order; `remedy` says how one comes there.
///
/// # Errors
/// When the folder cannot be read, or has no such file.
pub fn files_of(
    folder: &Path,
    is_such: impl Fn(&str) -> bool,
    remedy: &str,
) -> Result<Vec<String>, DataError> {
    let wrong = |problem: String| DataError::new(&folder.to_string_lossy(), "", problem);
    let mut paths = std::fs::read_dir(folder)
        .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>, _>>())
        .map_err(|error| wrong(format!("cannot read the folder: {error}")))?;
    paths.retain(|path| path.file_name().is_some_and(|name| is_such(&name.to_string_lossy())));
    paths.sort();
    match paths.is_empty() {
        true => Err(wrong(remedy.into())),
        false => Ok(paths.iter().map(|path| path.display().to_string()).collect()),
    }
}

/// The files that were read so far, by their own paths.
static READ: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Whether this process has read the file at `path`, which it would lose by writing there.
#[must_use]
pub fn was_read(path: &Path) -> bool {
    let read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    path.canonicalize().is_ok_and(|path| read.contains(&path))
}

/// The text of a regular file of so many MiB at most.
fn text_within(path: &str, most_mib: u64) -> Result<String, DataError> {
    let most_bytes = most_mib << 20;
    let cannot = |error: std::io::Error| DataError::new(path, "", format!("cannot read it: {error}"));
    // Titles and columns show it.
    check_name(path).map_err(|problem| DataError::new(path, "", problem))?;
    // Before it is opened: a FIFO would wait for a writer.
    let metadata = std::fs::metadata(path).map_err(cannot)?;
    if !metadata.is_file() {
        let kind = if metadata.is_dir() { "a folder" } else { "a device, a pipe or a socket" };
        return Err(DataError::new(path, "", format!("expected a regular file, found {kind}")));
    }
    let own = Path::new(path).canonicalize().map_err(cannot)?;
    READ.lock().unwrap_or_else(PoisonError::into_inner).insert(own);
    let mut text = String::new();
    // What a file says of its size may change while it is read.
    if metadata.len() <= most_bytes {
        let limited = File::open(path).map(|file| file.take(most_bytes + 1));
        limited.and_then(|mut file| file.read_to_string(&mut text)).map_err(cannot)?;
    }
    match metadata.len().max(text.len() as u64) > most_bytes {
        true => {
            let problem = format!("expected a file of {most_mib} MiB at most, found a larger one");
            Err(DataError::new(path, "", problem))
        }
        false => Ok(text),
    }
}

/// Reads a data file as a `T`. A file with the key `extends` is laid over the one that this names; `defaults` are what
/// each `row` has that says nothing else.
///
/// # Errors
/// When it cannot be read, is no TOML, or says what no `T` has.
pub fn read<T: DeserializeOwned>(folder: Folder, name: &str) -> Result<T, DataError> {
    let table = with_bases(folder, name, &mut vec![])?;
    let mut track = Track::new();
    let value = serde_path_to_error::Deserializer::new(Value::Table(table), &mut track);
    // Erased, because each `T` would have code of its own for each kind of value otherwise.
    let mut erased = <dyn erased_serde::Deserializer<'_>>::erase(value);
    let read = T::deserialize(&mut erased as &mut dyn erased_serde::Deserializer<'_>);
    read.map_err(|error| {
        let key = track.path().to_string();
        let key = if key == "." { "" } else { &key };
        let message = error.to_string();
        // TOML has added each key on a line of its own.
        DataError::new(name, key, in_words(message.split("\nin `").next().unwrap_or_default()))
    })
}

/// The text of a data file as TOML.
fn table(folder: Folder, name: &str) -> Result<Table, DataError> {
    let text = text(folder, name)?;
    let table: Table = toml::from_str(&text).map_err(|error| {
        let line = error.span().map_or(1, |span| text[..span.start.min(text.len())].lines().count().max(1));
        DataError::new(name, &format!("line {line}"), quoted(&one_line(error.message())))
    })?;
    if table.is_empty() {
        let (one, known) = (folder.singular(), names(folder).join(", "));
        let problem =
            format!("expected a {one}, and the file has no keys; give another path, or one of {known}");
        return Err(DataError::new(name, "", problem));
    }
    Ok(table)
}

/// The files that a data file extends, the nearest first, each with its `source`.
///
/// # Errors
/// As [`read`].
pub fn extended(folder: Folder, name: &str) -> Result<Vec<(String, String)>, DataError> {
    with_bases(folder, name, &mut vec![])?;
    let base = |name: &str| -> Result<Option<String>, DataError> {
        Ok(table(folder, name)?.get("extends").and_then(Value::as_str).map(str::to_owned))
    };
    let mut bases = vec![];
    let mut next = base(name)?;
    while let Some(name) = next {
        next = base(&name)?;
        let source =
            table(folder, &name)?.get("source").and_then(Value::as_str).map(printable).map(Cow::into_owned);
        bases.push((name, source.unwrap_or_default()));
    }
    Ok(bases)
}

fn with_bases(folder: Folder, name: &str, seen: &mut Vec<String>) -> Result<Table, DataError> {
    let mut table = table(folder, name)?;
    spread_defaults(&mut table);
    let Some(base) = table.remove("extends") else { return Ok(table) };
    let Value::String(base) = base else {
        return Err(DataError::new(
            name,
            "extends",
            format!("expected the name of a file, found a {}", base.type_str()),
        ));
    };
    seen.push(name.into());
    if seen.contains(&base) {
        return Err(DataError::new(
            name,
            "extends",
            format!("\"{}\" extends this file itself", quoted(&base)),
        ));
    }
    let mut under = with_bases(folder, &base, seen).map_err(|error| match error.key.as_str() {
        "" => DataError::new(name, "extends", error.to_string()),
        _ => error,
    })?;
    merge_tables(&mut under, table);
    Ok(under)
}

/// Lays each of the rows of a table over what its `defaults` say.
fn spread_defaults(table: &mut Table) {
    let Some(Value::Table(defaults)) = table.remove("defaults") else { return };
    let Some(Value::Array(rows)) = table.get_mut("row") else { return };
    for row in rows.iter_mut().filter_map(Value::as_table_mut) {
        let over = std::mem::replace(row, defaults.clone());
        merge_tables(row, over);
    }
}

/// Tables of one kind are joined; anything else takes the place of what was there.
fn merge_tables(under: &mut Table, over: Table) {
    for (key, value) in over {
        match (under.get_mut(&key), value) {
            (Some(Value::Table(under)), Value::Table(over))
                if over.get("kind").is_none_or(|kind| under.get("kind") == Some(kind)) =>
            {
                merge_tables(under, over);
            }
            (_, value) => drop(under.insert(key, value)),
        }
    }
}

/// What serde says of a value that does not fit, in one line and without names of Rust's types.
#[must_use]
pub fn in_words(message: &str) -> String {
    let message = one_line(message);
    // What is expected is ours, and stands last.
    let Some((actual, expected)) = message.rsplit_once(", expected ") else { return message };
    let expected = match expected {
        "u16" | "u32" | "u64" => "a whole number from 0 on",
        "f64" => "a number",
        "a boolean" => "true or false",
        "a sequence" => "a list",
        other if other.starts_with("struct ") || other == "a map" => "a table",
        other => other,
    };
    format!("{}, expected {expected}", quoted(actual))
}

fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}
