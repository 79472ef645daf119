//! Bytes a second at which accelerators read a memory over a fabric, if all that serve read it at once: by flows, or flit by flit.

use polder_platform::Fabric;

use crate::contention::{
    FlitCount, FlitOptions, FlitWork, MOST_FLOWS, Network, NetworkError, Routing, TransferError, Transfers,
};
use crate::fidelity::Fidelity;

/// What damage to flits is drawn from.
const SEED: u64 = 1;

/// Endpoints of a fabric that hold a memory. Accelerators are the endpoints before those of memory nodes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Holders {
    /// What data come over.
    pub(super) fabric: Fabric,
    /// The first of them; accelerators that serve lie before it, and hold nothing for others.
    pub(super) first: u32,
    /// How many endpoints there are in all.
    pub(super) endpoints: u32,
    /// What each can read of the memory that it holds, in bytes a second.
    pub(super) read: f64,
}

/// Accelerators that read, and how closely their reads are looked at.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Readers {
    /// How many: the first of the fabric.
    pub(super) count: u32,
    pub(super) fidelity: Fidelity,
    pub(super) flits: FlitOptions,
}

/// What each reader asks for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ReadRequest {
    /// In all.
    pub(super) bytes: f64,
    /// In so many accesses, each to one holder.
    pub(super) accesses: f64,
}

impl Holders {
    /// Those that do not serve.
    fn holders(&self, readers: &Readers) -> u32 {
        self.endpoints - self.first.max(readers.count)
    }

    /// Messages to each reader: one from each holder, or from as many as it has accesses.
    pub(super) fn messages_each(&self, readers: &Readers, asked: ReadRequest) -> u32 {
        asked.accesses.ceil().clamp(1.0, self.holders(readers).into()) as u32
    }

    /// Messages that begin together. Where readers have fewer than there are holders, the next reader goes on with the next holder.
    fn messages(
        &self,
        readers: &Readers,
        asked: ReadRequest,
    ) -> Result<(Vec<(u32, u32)>, u32), TransferError> {
        let (first, holders) = (self.first.max(readers.count), self.holders(readers));
        let each = self.messages_each(readers, asked);
        let parts = u64::from(readers.count) * u64::from(each) * u64::from(self.fabric.links);
        if parts > MOST_FLOWS {
            return Err(TransferError::TooManyFlows { parts, most: MOST_FLOWS });
        }
        let holder = |reader: u32, place: u32| {
            let turn = u64::from(reader) * u64::from(each) + u64::from(place);
            first + (turn % u64::from(holders)) as u32
        };
        let pairs = (0..readers.count).flat_map(|to| (0..each).map(move |place| (holder(to, place), to)));
        Ok((pairs.collect(), each))
    }

    fn network(&self) -> Result<Network, TransferError> {
        let asked = u64::from(self.endpoints) * u64::from(self.fabric.links);
        let too_many = |_| NetworkError::TooMany { asked, ports: self.fabric.ports() };
        Ok(Network::new(&self.fabric, u32::try_from(asked).map_err(too_many)?)?)
    }

    const fn transfers(&self, readers: &Readers, bytes: f64) -> Transfers<'_> {
        Transfers {
            fabric: &self.fabric,
            // What collectives reach is fitted; what loads and copies reach is not.
            reached: 1.0,
            bytes,
            step_s: 0.0,
            routing: Routing::Minimal,
            seed: SEED,
            fidelity: readers.fidelity,
            flits: readers.flits,
        }
    }

    /// The flits of what readers ask for.
    ///
    /// # Errors
    /// As [`Self::rate`], but that nothing is followed.
    pub(super) fn work(&self, readers: &Readers, asked: ReadRequest) -> Result<FlitWork, TransferError> {
        let (pairs, each) = self.messages(readers, asked)?;
        let transfers = self.transfers(readers, asked.bytes / f64::from(each));
        Ok(transfers.work(&transfers.ways(&mut self.network()?, &pairs)?))
    }

    /// Bytes a second that reach the slowest reader once its first byte is there, and what was followed for it. Holders read no faster than their
    /// memory.
    ///
    /// # Errors
    /// When there are too many messages; of flits also when they are too many, or are given what cannot be.
    pub(super) fn rate(
        &self,
        readers: &Readers,
        asked: ReadRequest,
    ) -> Result<(f64, Option<FlitCount>), TransferError> {
        let (pairs, each) = self.messages(readers, asked)?;
        let bytes = asked.bytes / f64::from(each);
        let times = self.transfers(readers, bytes).times(&mut self.network()?, &pairs)?;
        let last = |of: &[f64]| of.iter().copied().fold(0.0, f64::max);
        let empty_s = last(&times.alone) - bytes / self.fabric.payload().value();
        let asked_of = (u64::from(readers.count) * u64::from(each)).min(self.holders(readers).into());
        let read = self.read * asked_of as f64 / f64::from(readers.count);
        Ok(((asked.bytes / (last(&times.ends) - empty_s)).min(read), times.flits))
    }
}
