//! What a process of a rack's host does while the dax device that its range lies on loses its driver.

use std::path::Path;
use std::process::ExitCode;

use polder_lab::check::Failed;
use polder_offload::{Range, TierError};

use crate::machine::DEVICE;
use crate::machine::{read, write};

const DRIVER: &str = "/sys/bus/dax/drivers/device_dax";
/// Bytes of the range on the device: what it is aligned to.
const BYTES: usize = 2 << 20;

/// `look` asks the range, `touch` writes to it, once the device is unbound; `bind` binds it again.
pub(crate) fn run(what: &str) -> ExitCode {
    match act(what) {
        Ok(said) => {
            println!("{said}");
            ExitCode::SUCCESS
        }
        Err(why) => {
            println!("{why}");
            ExitCode::FAILURE
        }
    }
}

fn act(what: &str) -> Result<String, Failed> {
    let device = Path::new(DEVICE);
    let name = device.file_name().unwrap_or_default().to_string_lossy();
    if what == "bind" {
        write(&format!("{DRIVER}/bind"), &name)?;
        return Ok(format!("{name} is bound"));
    }
    let mut range = Range::new(2 * BYTES).map_err(text)?;
    range.map(BYTES, BYTES, device).map_err(text)?;
    range.copy_in(0, &vec![7; 2 * BYTES]);
    range.check().map_err(text)?;
    println!("half of the range lies on {name}");
    write(&format!("{DRIVER}/unbind"), &name)?;
    if what == "touch" {
        range.copy_in(BYTES, &[8]);
        return Err(format!("{name} took a byte, although it is unbound"));
    }
    let left = read(&format!("/sys/bus/dax/devices/{name}/size"))?;
    println!("unbound, /sys still gives it {} bytes", left.trim());
    match range.check() {
        Err(gone @ TierError::Gone { .. }) => Ok(gone.to_string()),
        other => Err(format!("expected the device to be gone, found {other:?}")),
    }
}

fn text(error: TierError) -> Failed {
    error.to_string()
}
