//! What a user may set, and where: an argument goes before the environment, the environment before the config file,
//! and the file before the default. Every edge reads its settings here, so that they mean the same everywhere.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use polder_mem::Coherence;
#[cfg(feature = "instruments")]
use polder_mem::{Cost, FlushSite, Trigger, TriggerAction};
use polder_platform::{quoted, quoted_words};
use serde::{Deserialize, Deserializer};

use crate::log::LogFilter;

/// How the pool's memory is kept coherent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum CoherenceChoice {
    /// As the pool was formatted for, or else by the kind of the region: software for dax, fs-dax and famfs, the hardware for everything else.
    #[default]
    Auto,
    /// The hardware of one kernel does it.
    Coherent,
    /// The program does it, with line instructions.
    Software,
    /// The device does it, by back-invalidation. Nothing tells from software whether a device does: the operator has to know.
    HdmDb,
}

impl CoherenceChoice {
    /// The coherence that was chosen; `None` for automatic, which looks at the kind of the region.
    #[must_use]
    pub const fn chosen(self) -> Option<Coherence> {
        match self {
            Self::Auto => None,
            Self::Coherent => Some(Coherence::Coherent),
            Self::Software => Some(Coherence::Software),
            Self::HdmDb => Some(Coherence::HdmDb),
        }
    }
}

impl FromStr for CoherenceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "coherent" => Ok(Self::Coherent),
            "software" => Ok(Self::Software),
            "hdm-db" => Ok(Self::HdmDb),
            _ => Err("expected auto, coherent, software or hdm-db".to_owned()),
        }
    }
}

impl fmt::Display for CoherenceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Coherent => "coherent",
            Self::Software => "software",
            Self::HdmDb => "hdm-db",
        })
    }
}

/// A number of bytes, written as `4096`, `64KiB` or `8 GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteCount(pub u64);

impl FromStr for ByteCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let size = bytesize::ByteSize::from_str(text)
            .map_err(|_| "expected a size such as 64KiB or 8GiB".to_owned())?;
        Ok(Self(size.as_u64()))
    }
}

/// A span of time, written as `30s`, `500ms` or a bare number of seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TimeSpan(pub Duration);

impl TimeSpan {
    /// A century stands for ever: what is added to a clock must have an end.
    const LONGEST: Duration = Duration::from_secs(100 * 365 * 86_400);

    /// So many seconds; nothing where it is no number from 0 on.
    #[must_use]
    pub fn of_seconds(seconds: f64) -> Option<Self> {
        Duration::try_from_secs_f64(seconds).ok().map(Self::at_most_for_ever)
    }

    /// So many milliseconds.
    #[must_use]
    pub fn of_millis(millis: u64) -> Self {
        Self::at_most_for_ever(Duration::from_millis(millis))
    }

    fn at_most_for_ever(span: Duration) -> Self {
        Self(span.min(Self::LONGEST))
    }
}

impl FromStr for TimeSpan {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || "expected a time such as 30s, 500ms or 2min".to_owned();
        match text.parse::<f64>() {
            Ok(seconds) => Self::of_seconds(seconds).ok_or_else(expected),
            Err(_) => humantime::parse_duration(text).map(Self::at_most_for_ever).map_err(|_| expected()),
        }
    }
}

#[cfg(feature = "instruments")]
/// What is wrapped around the memory, for tests and emulation, written as words with commas between them: `shadow`,
/// `without=ring.rs:120`, `kill=5000`, `stop=5000`, `latency_ns=300`, `bytes_per_second=10000000000`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Wrap {
    /// Each host works on a private copy, so that a missing flush shows.
    pub shadow: bool,
    /// Flushes that a shadow leaves out.
    pub without: Option<FlushSite>,
    /// When the process kills or stops itself.
    pub trigger: Option<Trigger>,
    /// Emulated cost of the memory.
    pub cost: Option<Cost>,
}

#[cfg(feature = "instruments")]
impl FromStr for Wrap {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut wrap = Self::default();
        for word in text.split(',') {
            wrap.take(word.trim())?;
        }
        match wrap.without.is_some() && !wrap.shadow {
            true => Err("without= needs shadow: real caches would hide the mistake".to_owned()),
            false => Ok(wrap),
        }
    }
}

#[cfg(feature = "instruments")]
impl Wrap {
    /// Whether each host works on a private copy.
    #[must_use]
    pub const fn is_shadow(&self) -> bool {
        self.shadow
    }

    fn take(&mut self, word: &str) -> Result<(), String> {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        let number = || value.parse::<u64>().map_err(|_| format!("expected a number after {key}="));
        match key {
            "shadow" => self.shadow = true,
            "without" => self.without = Some(value.parse::<FlushSite>().map_err(|error| error.to_string())?),
            "kill" => self.trigger = Some(Trigger { operation: number()?, action: TriggerAction::Kill }),
            "stop" => self.trigger = Some(Trigger { operation: number()?, action: TriggerAction::Stop }),
            "latency_ns" => self.cost.get_or_insert(FREE).latency_ns = number()?,
            "bytes_per_second" => self.cost.get_or_insert(FREE).bytes_per_second = number()?,
            _ => {
                return Err(format!(
                    "{word:?} is none of shadow, without=, kill=, stop=, latency_ns=, bytes_per_second="
                ));
            }
        }
        Ok(())
    }
}

#[cfg(feature = "instruments")]
const FREE: Cost = Cost { latency_ns: 0, bytes_per_second: 0 };

/// Nothing can be wrapped around the memory of this build.
#[cfg(not(feature = "instruments"))]
#[derive(Clone, Debug, PartialEq)]
pub enum Wrap {}

#[cfg(not(feature = "instruments"))]
impl FromStr for Wrap {
    type Err = String;

    fn from_str(_: &str) -> Result<Self, String> {
        Err("this build has no instruments; builds of `make dev` have them, and `polder rehearse` needs none"
            .into())
    }
}

#[cfg(not(feature = "instruments"))]
impl Wrap {
    /// Whether each host works on a private copy.
    #[must_use]
    pub const fn is_shadow(&self) -> bool {
        match *self {}
    }
}

/// The way to wait longer for a program whose calls take no time of their own.
pub const TIMEOUT: &str = "POLDER_TIMEOUT";

/// An error of a pool in the words of another front than Python's, whose argument errors name as the way to wait longer: `longer` is what
/// the reader has instead.
#[must_use]
pub fn in_terms_of(longer: &str, error: &impl fmt::Display) -> String {
    error.to_string().replace("timeout= or POLDER_TIMEOUT", longer)
}

/// What a user has set. `None` leaves the value to a lower source, and at last to the caller's default.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// The region: a dax device, or a file (`POLDER_POOL`).
    pub pool: Option<PathBuf>,
    /// How it is kept coherent (`POLDER_COHERENCE`).
    #[serde(default, deserialize_with = "parsed")]
    pub coherence: Option<CoherenceChoice>,
    /// This host's id in the pool (`POLDER_HOST`).
    pub host: Option<u16>,
    /// The id that a launcher gives this host, for where none is set and no keeper gives one.
    #[serde(skip)]
    pub launched: Option<u16>,
    /// Which machine this is among those of a job of Slurm (`SLURM_NODEID`), for where nothing else is said and memory has
    /// several hosts.
    #[serde(skip)]
    pub node: Option<u16>,
    /// The job that objects are booked to (`POLDER_JOB`).
    pub job: Option<u64>,
    /// What the job may hold on this host (`POLDER_QUOTA`).
    #[serde(default, deserialize_with = "parsed")]
    pub quota: Option<ByteCount>,
    /// What a rank takes of the pool at most for rings of pairs (`POLDER_MEMORY_PER_RANK`).
    #[serde(default, deserialize_with = "parsed")]
    pub memory_per_rank: Option<ByteCount>,
    /// How long a call may wait for another process (`POLDER_TIMEOUT`).
    #[serde(default, deserialize_with = "parsed")]
    pub timeout: Option<TimeSpan>,
    /// What is wrapped around the memory (`POLDER_WRAP`).
    #[serde(default, deserialize_with = "parsed")]
    pub wrap: Option<Wrap>,
    /// Where host-local files live (`POLDER_RUN`).
    pub run: Option<PathBuf>,
    /// What is logged, as a level or as filters such as `polder_pool=debug` (`POLDER_LOG`).
    #[serde(default, deserialize_with = "parsed")]
    pub log: Option<LogFilter>,
}

/// A setting that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// A value that does not parse.
    #[error("{key}={}: {expected}", quoted(value))]
    Value {
        /// The environment variable or key.
        key: String,
        /// Its value.
        value: String,
        /// What was expected.
        expected: String,
    },
    /// A config file that cannot be read or parsed.
    #[error("{path}: {why}")]
    File {
        /// The file.
        path: PathBuf,
        /// Line, key and what was expected.
        why: String,
    },
}

impl Settings {
    /// `arguments` before the environment of this process before the first config file that exists:
    /// `$POLDER_CONFIG` (`/dev/null` for none), `./polder.toml`, `~/.config/polder/config.toml`, `/etc/polder/config.toml`.
    ///
    /// # Errors
    /// [`SettingsError`], naming the variable, or the file and the key.
    pub fn load(arguments: Self) -> Result<Self, SettingsError> {
        let lookup = |key: &str| std::env::var(key).ok().filter(|value| !value.is_empty());
        let file = match config_file(&lookup)? {
            Some(path) => Self::file(&path)?,
            None => Self::default(),
        };
        Ok(arguments.or(Self::environment(lookup)?).or(file))
    }

    /// Reads one config file.
    ///
    /// # Errors
    /// [`SettingsError::File`] when it is missing, unreadable or has a key or value that is not known.
    pub fn file(path: &Path) -> Result<Self, SettingsError> {
        let failed = |why: String| SettingsError::File { path: path.to_owned(), why };
        let mut text = String::new();
        let limited = File::open(path).map(|file| file.take(MOST_BYTES + 1));
        limited
            .and_then(|mut file| file.read_to_string(&mut text))
            .map_err(|error| failed(error.to_string()))?;
        if text.len() as u64 > MOST_BYTES {
            return Err(failed("expected a file of 1 MiB at most, found a larger one".to_owned()));
        }
        toml::from_str(&text).map_err(|error| {
            let line = error.span().map_or(1, |span| 1 + text[..span.start].matches('\n').count());
            failed(format!("line {line}: {}", quoted_words(&error.message().replace('\n', " "))))
        })
    }

    /// Reads the `POLDER_` variables through `lookup`.
    ///
    /// # Errors
    /// [`SettingsError::Value`], naming the variable, its value and what was expected.
    pub fn environment(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, SettingsError> {
        Ok(Self {
            pool: lookup("POLDER_POOL").map(PathBuf::from),
            coherence: variable(&lookup, "POLDER_COHERENCE")?,
            host: number(&lookup, "POLDER_HOST", "expected a host id such as 0")?,
            launched: None,
            node: lookup("SLURM_NODEID").and_then(|node| node.parse().ok()),
            job: number(&lookup, "POLDER_JOB", "expected the number of a job")?,
            quota: variable(&lookup, "POLDER_QUOTA")?,
            memory_per_rank: variable(&lookup, "POLDER_MEMORY_PER_RANK")?,
            timeout: variable(&lookup, "POLDER_TIMEOUT")?,
            wrap: variable(&lookup, "POLDER_WRAP")?,
            run: lookup("POLDER_RUN").map(PathBuf::from),
            log: variable(&lookup, "POLDER_LOG")?,
        })
    }

    /// These settings, with `lower` where nothing is set.
    #[must_use]
    pub fn or(self, lower: Self) -> Self {
        Self {
            pool: self.pool.or(lower.pool),
            coherence: self.coherence.or(lower.coherence),
            host: self.host.or(lower.host),
            launched: self.launched.or(lower.launched),
            node: self.node.or(lower.node),
            job: self.job.or(lower.job),
            quota: self.quota.or(lower.quota),
            memory_per_rank: self.memory_per_rank.or(lower.memory_per_rank),
            timeout: self.timeout.or(lower.timeout),
            wrap: self.wrap.or(lower.wrap),
            run: self.run.or(lower.run),
            log: self.log.or(lower.log),
        }
    }
}

fn config_file(lookup: &impl Fn(&str) -> Option<String>) -> Result<Option<PathBuf>, SettingsError> {
    if let Some(value) = lookup("POLDER_CONFIG") {
        if value == "/dev/null" {
            return Ok(None);
        }
        // A FIFO would wait for a writer, and a device might never end.
        let expected = match std::fs::metadata(&value) {
            Ok(metadata) if metadata.is_file() => return Ok(Some(PathBuf::from(value))),
            Ok(_) => "not a regular file; name a config file, or unset it",
            Err(_) => "no such file; name a config file, or unset it",
        };
        let key = "POLDER_CONFIG".to_owned();
        return Err(SettingsError::Value { key, value, expected: expected.to_owned() });
    }
    let home = lookup("XDG_CONFIG_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(lookup("HOME")?).join(".config")));
    let here = PathBuf::from(HERE);
    if here.is_file() {
        expect_trusted(&here)?;
        return Ok(Some(here));
    }
    let places =
        [home.map(|home| home.join("polder/config.toml")), Some(PathBuf::from("/etc/polder/config.toml"))];
    Ok(places.into_iter().flatten().find(|path| path.is_file()))
}

/// Bytes of a config file, at most.
const MOST_BYTES: u64 = 1 << 20;

/// The config file of the folder in which a process starts.
const HERE: &str = "polder.toml";

/// Refuses a file that nobody named and that another user, root aside, put there: it names pools, and a process would follow it.
fn expect_trusted(path: &Path) -> Result<(), SettingsError> {
    let own = rustix::process::geteuid().as_raw();
    let refused = |why: String| SettingsError::File { path: path.to_owned(), why };
    for found in [path.symlink_metadata(), path.metadata()] {
        let owner = found.map_err(|error| refused(error.to_string()))?.uid();
        if ![0, own].contains(&owner) {
            return Err(refused(format!(
                "it belongs to user {owner}, and this process runs as user {own}; to use it anyway, set POLDER_CONFIG={HERE}"
            )));
        }
    }
    Ok(())
}

fn variable<T: FromStr<Err = String>>(
    lookup: &impl Fn(&str) -> Option<String>,
    key: &str,
) -> Result<Option<T>, SettingsError> {
    let Some(value) = lookup(key) else { return Ok(None) };
    let parsed = value.parse().map(Some);
    parsed.map_err(|expected| SettingsError::Value { key: key.to_owned(), value, expected })
}

fn number<T: FromStr>(
    lookup: &impl Fn(&str) -> Option<String>,
    key: &str,
    expected: &str,
) -> Result<Option<T>, SettingsError> {
    let Some(value) = lookup(key) else { return Ok(None) };
    let parsed = value.parse().ok().map(Some);
    parsed.ok_or_else(|| SettingsError::Value { key: key.to_owned(), value, expected: expected.to_owned() })
}

/// A value as a file may write it: a bare number means what it means in the environment.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected text or a number")]
enum Written {
    Text(String),
    Whole(u64),
    Number(f64),
}

fn parsed<'de, D: Deserializer<'de>, T: FromStr<Err = String>>(from: D) -> Result<Option<T>, D::Error> {
    let text = match Option::<Written>::deserialize(from)? {
        None => return Ok(None),
        Some(Written::Text(text)) => text,
        Some(Written::Whole(number)) => number.to_string(),
        Some(Written::Number(number)) => number.to_string(),
    };
    text.parse().map(Some).map_err(|expected| serde::de::Error::custom(format!("{text:?}: {expected}")))
}

#[cfg(test)]
mod tests {
    use polder_pool::PoolError;

    use super::*;

    fn environment(pairs: &[(&str, &str)]) -> Result<Settings, SettingsError> {
        Settings::environment(|key| {
            pairs.iter().find(|(name, _)| *name == key).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn an_argument_goes_before_the_environment_and_that_before_the_file() {
        let arguments = Settings { host: Some(1), ..Settings::default() };
        let environment = environment(&[
            ("POLDER_HOST", "2"),
            ("POLDER_QUOTA", "8GiB"),
            ("POLDER_MEMORY_PER_RANK", "4MiB"),
        ])
        .unwrap();
        let file: Settings = toml::from_str("host = 3\nquota = 4096\ntimeout = 0.5").unwrap();
        assert_eq!(file.quota, Some(ByteCount(4096)));
        let settings = arguments.or(environment).or(file);
        assert_eq!(settings.host, Some(1));
        assert_eq!(settings.quota, Some(ByteCount(8 << 30)));
        assert_eq!(settings.memory_per_rank, Some(ByteCount(4 << 20)));
        assert_eq!(settings.timeout, Some(TimeSpan(Duration::from_millis(500))));
    }

    #[test]
    fn a_span_can_be_added_to_a_clock_however_long_it_is() {
        for text in ["1e19", "500000000000y", "18000000000000000000"] {
            let TimeSpan(span) = text.parse().unwrap();
            assert!(std::time::Instant::now().checked_add(span).is_some(), "{text}");
        }
        assert_eq!(TimeSpan::of_millis(u64::MAX), "1e19".parse().unwrap(), "one rule for every front");
        for text in ["-1", "nan", "inf", "1e300"] {
            assert!(text.parse::<TimeSpan>().is_err(), "{text}");
        }
    }

    #[test]
    fn an_error_says_to_each_front_how_to_wait_longer_there() {
        let (group, peer) = ("/train".to_owned(), polder_pool::Peer::new(1, 7));
        let absent = PoolError::Absent { rank: 1, group, waited_ms: 50 };
        let late = PoolError::Timeout { peer, what: "a message", epoch: 1, sequence: 2, waited_ms: 50 };
        let broken = PoolError::Broken { what: "ring", cause: Box::new(late.clone()) };
        for error in [absent, late, broken] {
            let text = in_terms_of("timeout_ms", &error);
            assert!(text.contains("raise timeout_ms") && !text.contains("timeout="), "{text}");
        }
    }

    #[test]
    fn a_value_that_does_not_parse_names_its_variable() {
        let error = environment(&[("POLDER_COHERENCE", "hopeful")]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "POLDER_COHERENCE=hopeful: expected auto, coherent, software or hdm-db"
        );
        let error = environment(&[("POLDER_TIMEOUT", "-1")]).unwrap_err();
        assert_eq!(error.to_string(), "POLDER_TIMEOUT=-1: expected a time such as 30s, 500ms or 2min");
        let error = environment(&[("POLDER_HOST", "70000")]).unwrap_err();
        assert_eq!(error.to_string(), "POLDER_HOST=70000: expected a host id such as 0");
        let error = environment(&[("POLDER_HOST", &"7".repeat(5000))]).unwrap_err();
        let text = format!("POLDER_HOST={}… (5000 bytes): expected a host id such as 0", "7".repeat(200));
        assert_eq!(error.to_string(), text);
    }

    #[test]
    fn slurm_says_which_machine_this_is_and_whoever_sets_a_host_id_goes_before() {
        let settings = environment(&[("SLURM_NODEID", "3"), ("POLDER_HOST", "1")]).unwrap();
        assert_eq!((settings.host, settings.node), (Some(1), Some(3)));
        assert_eq!(environment(&[("SLURM_NODEID", "none")]).unwrap().node, None, "it is not ours to check");
    }

    #[test]
    fn wrappers_are_named_in_words() {
        let wrap: Wrap = "shadow, without=ring.rs:12, kill=7".parse().unwrap();
        assert!(wrap.shadow && wrap.without.is_some() && wrap.cost.is_none());
        assert_eq!(wrap.trigger.map(|trigger| trigger.operation), Some(7));
        assert!("shade".parse::<Wrap>().unwrap_err().contains("shadow"));
        assert!("without=ring.rs:12".parse::<Wrap>().unwrap_err().contains("needs shadow"));
    }

    #[test]
    fn an_unknown_key_in_a_file_is_refused_by_name() {
        let path = std::env::temp_dir().join(format!("polder-settings-{}.toml", std::process::id()));
        std::fs::write(&path, "hots = 3\n").unwrap();
        let error = Settings::file(&path).unwrap_err().to_string();
        std::fs::remove_file(&path).unwrap();
        assert!(error.contains("hots") && error.contains("line 1"), "{error}");
    }
}
