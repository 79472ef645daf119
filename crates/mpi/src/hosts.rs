//! Which ranks of a communicator share memory: those of one host of the pool. A library that was told to send all messages through the
//! pool finds that no two ranks do, and one that looks at the machine takes its emulated hosts for one.

use std::ffi::c_int;

use polder_attach::session;
use polder_attach::settings::Settings;

use crate::abi::Abi;
use crate::failure::Failure;
use crate::library::Library;

/// What each rank sends to the others when a communicator is split: its split type, the boot id of its kernel, and its host in the pool.
type SplitRequest = [i64; 3];

/// A host that nobody has told its id: all of such a kernel are one.
const UNTOLD: i64 = -1;

/// By which color this rank goes when a communicator is split by hosts; nothing where the library shall split it.
///
/// # Errors
/// Those of the library.
pub(crate) fn color<A: Abi>(
    library: &Library<A>,
    comm: A::Handle,
    split_type: c_int,
) -> Result<Option<c_int>, Failure> {
    if library.is_between_groups(comm)? {
        return Ok(None);
    }
    let (rank, ranks) = library.place(comm)?;
    let mut all = vec![SplitRequest::default(); ranks];
    library.gather_all(&split_request(split_type), &mut all, comm)?;
    Ok(color_of::<A>(&all, rank))
}

fn split_request(split_type: c_int) -> SplitRequest {
    let settings = Settings::load(Settings::default()).ok().filter(|settings| settings.pool.is_some());
    let host = settings.as_ref().map(|settings| settings.host.map_or(UNTOLD, i64::from));
    // The library splits as soon as one rank has no pool, or does not know its kernel.
    let Some((host, boot)) = host.zip(session::boot().ok()) else { return [NO_POOL, 0, 0] };
    [i64::from(split_type), boot.cast_signed(), host]
}

/// The type of a rank without a pool: no library has it.
const NO_POOL: i64 = i64::MIN;

/// The color of a rank, which is the first rank of its host.
fn color_of<A: Abi>(all: &[SplitRequest], rank: usize) -> Option<c_int> {
    let (shared, undefined) = (i64::from(A::NUMBERS.comm_type_shared), i64::from(A::NUMBERS.undefined));
    let types = || all.iter().map(|request| request[0]);
    if !types().any(|kind| kind == shared) || !types().all(|kind| kind == shared || kind == undefined) {
        return None;
    }
    let [kind, boot, host] = all[rank];
    let first = all.iter().position(|request| *request == [shared, boot, host]);
    Some(if kind == shared { first? as c_int } else { A::NUMBERS.undefined })
}
