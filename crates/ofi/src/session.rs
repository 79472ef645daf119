//! The pool of this process: attached when a program first asks what there is, and kept until libfabric ends.

use std::sync::{Arc, Mutex, Once, PoisonError};

use polder_mem::forks;
use polder_pool::each;
use polder_pool::session::Session;
use polder_pool::settings::Settings;

use crate::log;

struct Attached {
    session: Arc<Session>,
    /// Tells the process from its children, whose pool this is not.
    forks: u32,
}

static ATTACHED: Mutex<Option<Attached>> = Mutex::new(None);

/// The pool that the environment or a config file names.
///
/// # Errors
/// One line that says what is wrong and what to do.
pub(crate) fn session() -> Result<Arc<Session>, String> {
    let mut attached = ATTACHED.lock().unwrap_or_else(PoisonError::into_inner);
    // The threads that it would join and the locks that it would give back are the parent's.
    std::mem::forget(attached.take_if(|attached| attached.forks != forks()));
    if let Some(attached) = &*attached {
        return Ok(Arc::clone(&attached.session));
    }
    let settings = Settings::load(Settings::default()).map_err(|error| error.to_string())?;
    let session = Arc::new(Session::open(&settings).map_err(|error| error.to_string())?);
    *attached = Some(Attached { session: Arc::clone(&session), forks: forks() });
    Ok(session)
}

/// Which pool it is, once it is attached.
pub(crate) fn uuid() -> Option<u128> {
    let attached = ATTACHED.lock().unwrap_or_else(PoisonError::into_inner);
    attached.as_ref().map(|attached| each!(attached.session.pool(), pool => pool.superblock().uuid.0))
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

/// Called by libfabric when it ends.
pub(crate) unsafe extern "C" fn cleanup() {
    crate::guard::status(|| {
        let attached = ATTACHED.lock().unwrap_or_else(PoisonError::into_inner).take();
        match attached {
            Some(attached) if attached.forks != forks() => std::mem::forget(attached),
            attached => drop(attached),
        }
        Ok(())
    });
}
