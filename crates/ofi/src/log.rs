//! Everything that is logged goes where libfabric's own log goes, `FI_LOG_LEVEL` and its filters included.

use std::collections::BTreeSet;
use std::ffi::{CString, c_int};
use std::fmt::Write;
use std::io::Write as _;
use std::sync::{Mutex, PoisonError};

use polder_attach::log::LogFilter;
use polder_attach::settings::{TIMEOUT, in_terms_of};
use polder_pool::PoolError;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::ffi::{Errno, Provider, flag};
use crate::libfabric;

/// What a user of MPI can do: a rank cannot come back to its job.
const END: &str = "the MPI job cannot go on: end it, and start it again";

/// libfabric's levels: warn, trace, info, debug.
const WARN: c_int = 0;
const TRACE: c_int = 1;
const INFO: c_int = 2;
const DEBUG: c_int = 3;
/// The part of the log that belongs to whole fabrics.
const FABRIC: c_int = 1;

/// Forwards to libfabric, and to stderr what `POLDER_LOG` asks for. The provider is never freed.
pub(crate) fn start(provider: *const Provider) {
    // The session, which reads it again, refuses one that is wrong.
    let filter = std::env::var("POLDER_LOG").ok().and_then(|filter| filter.parse::<LogFilter>().ok());
    let stderr = filter.map(|filter| filter.layer());
    let libfabric = ToLibfabric { provider: provider as usize, alone: stderr.is_none() };
    // This library has a subscriber of its own, whoever loads it: a second load finds the first one's.
    drop(tracing_subscriber::registry().with(libfabric).with(stderr).try_init());
}

/// An error in the words of a program that libfabric serves.
pub(crate) fn words(error: &PoolError) -> String {
    in_terms_of(TIMEOUT, error)
}

/// Logs an error. That a peer is dead or of another job, or the pool is full, stands on stderr too, once, with what a user of MPI can do: programs
/// show no more of it than a number.
pub(crate) fn tell(error: &PoolError) {
    tracing::error!("{}", words(error));
    static SAID: Mutex<BTreeSet<(&str, u16, u32)>> = Mutex::new(BTreeSet::new());
    let what = match error {
        PoolError::PeerDead { peer, .. } => ("dead", peer.host, peer.pid),
        PoolError::Evicted { host, .. } => ("evicted", *host, 0),
        PoolError::OtherJob { .. } => ("another job", 0, 0),
        PoolError::Full { .. } | PoolError::Quota { .. } | PoolError::DirectoryFull { .. } => ("full", 0, 0),
        _ => return,
    };
    if SAID.lock().unwrap_or_else(PoisonError::into_inner).insert(what) {
        say(&format!("{}; {END}", words(error)));
    }
}

/// Refuses a call for those of its flags that are not offered there, if there are any, and logs their names.
pub(crate) fn expect_flags(call: &str, flags: u64, offered: u64) -> Result<(), Errno> {
    match flags & !offered {
        0 => Ok(()),
        refused => Err(refuse(call, refused)),
    }
}

/// The refusal of a call for these flags, whose names are logged.
pub(crate) fn refuse(call: &str, flags: u64) -> Errno {
    tracing::warn!("{call} is refused: {} is not offered here", flag::names(flags));
    Errno::BADFLAGS
}

/// Writes a line to stderr in one piece, for what a launcher mixes with others'.
pub(crate) fn say(line: &str) {
    // Who cannot be told is not told.
    drop(std::io::stderr().write_all(format!("polder: {line}\n").as_bytes()));
}

struct ToLibfabric {
    /// Where the provider's structure stands, for libfabric alone to look into.
    provider: usize,
    /// Whether nobody else listens.
    alone: bool,
}

impl<S: Subscriber> Layer<S> for ToLibfabric {
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        let provider = self.provider as *const Provider;
        !self.alone
            || libfabric::core().is_some_and(|core| {
                // SAFETY: the provider is never freed, and the numbers are libfabric's.
                unsafe { (core.log_enabled)(provider, level(*metadata.level()), FABRIC) != 0 }
            })
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        let (Some(core), Ok(text)) = (libfabric::core(), CString::new(line.0)) else { return };
        let provider = self.provider as *const Provider;
        let level = level(*event.metadata().level());
        // SAFETY: as above; the format takes one C string, which outlives the call, as does the name.
        unsafe {
            if (core.log_enabled)(provider, level, FABRIC) != 0 {
                (core.log)(provider, level, FABRIC, c"polder".as_ptr(), 0, c"%s\n".as_ptr(), text.as_ptr());
            }
        }
    }
}

fn level(level: Level) -> c_int {
    match level {
        Level::ERROR | Level::WARN => WARN,
        Level::INFO => INFO,
        Level::DEBUG => DEBUG,
        Level::TRACE => TRACE,
    }
}

/// An event in one line: its message, and then what else it says.
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        // Writing to a string cannot fail.
        let _ = match field.name() {
            "message" => write!(self.0, "{value:?} "),
            name => write!(self.0, "{name}={value:?} "),
        };
    }
}
