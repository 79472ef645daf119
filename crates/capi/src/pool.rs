//! `polder_pool`.

use std::ffi::{c_char, c_int};
use std::path::PathBuf;
use std::sync::Arc;

use polder_attach::session::Session;
use polder_attach::settings::Settings;

use crate::failure::Failure;
use crate::guard::{self, exported};

/// A pool that this process has attached; what was made with it keeps it attached too.
pub(crate) struct Pool(pub(crate) Arc<Session>);

exported! {
    /// Attaches a pool.
    extern "C" fn polder_pool_open(path: *const c_char, host: c_int, pool: *mut *mut Pool) -> c_int {
        let open = || {
            let mut arguments = Settings::default();
            if !path.is_null() {
                arguments.pool = Some(PathBuf::from(guard::text(path, "path")?));
            }
            if host >= 0 {
                let id = u16::try_from(host);
                arguments.host =
                    Some(id.map_err(|_| Failure::argument(format!("host is {host}; ids go from 0 to 63")))?);
            }
            let settings = Settings::load(arguments)?;
            if let Some(filter) = &settings.log {
                filter.start();
            }
            Ok(Pool(Arc::new(Session::open(&settings)?)))
        };
        guard::made(pool, open)
    }

    /// Lets go of a pool.
    extern "C" fn polder_pool_close(pool: *mut Pool) -> c_int {
        guard::close(pool)
    }
}
