//! The pool of this process: attached when a program first asks what there is, and kept until libfabric ends.

use std::io::Write;
use std::sync::{Arc, Once};

use polder_attach::session::{ProcessSession, Session};

use crate::log;

static KEPT: ProcessSession = ProcessSession::new();

/// The pool that the environment or a config file names.
///
/// # Errors
/// One line that says what is wrong and what to do.
pub(crate) fn session() -> Result<Arc<Session>, String> {
    KEPT.get(|_| ())
}

/// Which pool it is, once it is attached.
pub(crate) fn uuid() -> Option<u128> {
    KEPT.uuid().map(|uuid| uuid.0)
}

/// Says why there is no pool: to whoever asked for this provider by name on stderr, once, else in the log.
pub(crate) fn complain(why: &str) {
    static SAID: Once = Once::new();
    let named =
        std::env::var("FI_PROVIDER").is_ok_and(|names| names.contains("polder") && !names.starts_with('^'));
    if named {
        SAID.call_once(|| log::say(why));
    }
    tracing::info!("not offered: {why}");
}

/// Tells `polder mpi run` how many bytes of messages an endpoint of this process was given to send, where that asks for it.
pub(crate) fn tally(bytes: u64) {
    let Some(file) = std::env::var_os("POLDER_MPI_TALLY") else { return };
    // The file is that command's, which made it; on another machine there is none.
    let told = std::fs::OpenOptions::new()
        .append(true)
        .open(file)
        .and_then(|mut file| file.write_all(format!("{} {bytes}\n", std::process::id()).as_bytes()));
    if let Err(error) = told {
        tracing::debug!("what was sent is not counted: {error}");
    }
}

/// Called by libfabric when it ends.
pub(crate) unsafe extern "C" fn cleanup() {
    crate::guard::status(|| {
        drop(KEPT.take());
        Ok(())
    });
}
