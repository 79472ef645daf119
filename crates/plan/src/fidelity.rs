//! `--fidelity`: how closely communication is looked at.

use clap::Args;
use clap::builder::TypedValueParser;
use polder_platform::Bytes;
use polder_sim::contention::FlitOptions;
use polder_sim::{Fidelity, StepFlits, grouped};

use super::option::{choice, given};
use super::table::size;
use crate::Failure;

/// The levels as clap reads them.
fn levels() -> impl TypedValueParser<Value = Fidelity> {
    choice(Fidelity::ALL.map(Fidelity::name))
}

/// How closely transfers over a fabric are looked at.
#[derive(Args)]
pub(super) struct Closeness {
    /// How closely to look at transfers: L0, in closed form, each as if it were alone; L1, as flows that share links; L2, flit by flit,
    /// with credits, virtual channels and arbitration. L2 is refused where it takes too long: give --window, or L1.
    #[arg(long, value_name = "LEVEL", value_parser = levels(), default_value = "L0")]
    fidelity: Fidelity,
    /// Follow the flits of so much of each message alone, such as "1 MiB": the rest takes what the second half of it took (L2).
    #[arg(long, value_name = "SIZE")]
    window: Option<String>,
    /// Virtual channels of a link [default: 1 in a Clos, elsewhere one a link between switches of the longest way] (L2).
    #[arg(long, value_name = "COUNT")]
    virtual_channels: Option<u32>,
    /// Flits that the buffer of a virtual channel holds [default: two round trips to the next switch] (L2).
    #[arg(long, value_name = "FLITS")]
    buffer: Option<u32>,
    /// The part of the flits that arrive damaged and are sent again, such as 1e-6 (L2).
    #[arg(long, value_name = "PART", default_value_t = 0.0)]
    error_rate: f64,
}

impl Closeness {
    /// Refuses all but a closed form where no fabric is given; `why` says so.
    pub(super) fn expect_closed(&self, why: &str) -> Result<(), Failure> {
        self.flits()?.check(self.fidelity)?;
        match self.fidelity {
            Fidelity::L0 => Ok(()),
            more => Err(Failure(format!("--fidelity {}: {why}", more.name()))),
        }
    }

    pub(super) const fn level(&self) -> Fidelity {
        self.fidelity
    }

    /// What flits are given.
    pub(super) fn flits(&self) -> Result<FlitOptions, Failure> {
        Ok(FlitOptions {
            window_bytes: given("--window", self.window.as_deref())?.map(Bytes::value),
            channels: self.virtual_channels,
            buffer: self.buffer,
            error_rate: self.error_rate,
        })
    }
}

/// `--fidelity` of commands in which nothing shares a fabric.
#[derive(Args)]
pub(super) struct ClosedForm {
    /// How closely communication is looked at: here no transfers share links, and L1 and L2 are refused with the reason.
    #[arg(long, value_name = "LEVEL", value_parser = levels(), default_value = "L0")]
    fidelity: Fidelity,
}

impl ClosedForm {
    /// Refuses all but a closed form; `why` says why there is no more, and what has it.
    pub(super) fn check(&self, command: &str, why: &str) -> Result<(), Failure> {
        match self.fidelity {
            Fidelity::L0 => Ok(()),
            more => Err(Failure(format!("--fidelity {}: plan {command} takes L0 alone: {why}", more.name()))),
        }
    }
}

/// What of messages was followed flit by flit.
pub(super) fn followed(it: StepFlits) -> String {
    let StepFlits { window_bytes, flit_hops, replays, steady_window_bytes } = it;
    let window = window_bytes.map_or_else(String::new, |it| {
        format!(" of the first {} of each message{}", size(it), short_window_note(it, steady_window_bytes))
    });
    let [hops, again] = [flit_hops, replays].map(grouped);
    format!("{hops} flit-hops{window}, {again} sent again")
}

/// What has to be said of a window that is shorter than the longest way.
pub(super) fn short_window_note(window_bytes: f64, steady_window_bytes: f64) -> String {
    match window_bytes < steady_window_bytes {
        true => format!(
            " (too short for the longest way: rates are steady from --window {}KiB on)",
            (steady_window_bytes / 1024.0).ceil()
        ),
        false => String::new(),
    }
}
