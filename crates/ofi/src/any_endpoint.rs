//! The pool's endpoint, of whatever memory: the one place that calls it.

use std::sync::Arc;

use polder_attach::session::AnyPool;
use polder_mem::{Coherent, Software, Wrapped};
use polder_pool::endpoint::{Address, Arrival, CompleteWhen, Completion, Filter, Label};
use polder_pool::{PoolError, endpoint};

use crate::io_buffer::IoBuffer;
use crate::operation::Operation;

/// An endpoint in a pool of one of the memories that an edge meets.
pub(crate) enum AnyEndpoint {
    Coherent(endpoint::Endpoint<Coherent, IoBuffer, Operation>),
    Software(endpoint::Endpoint<Software, IoBuffer, Operation>),
    Wrapped(endpoint::Endpoint<Wrapped, IoBuffer, Operation>),
}

macro_rules! each_endpoint {
    ($any:expr, $endpoint:ident => $body:expr) => {
        match $any {
            AnyEndpoint::Coherent($endpoint) => $body,
            AnyEndpoint::Software($endpoint) => $body,
            AnyEndpoint::Wrapped($endpoint) => $body,
        }
    };
}

impl AnyEndpoint {
    pub(crate) fn open(pool: &AnyPool) -> Result<Self, PoolError> {
        let options = endpoint::EndpointOptions::default();
        Ok(match pool {
            AnyPool::Coherent(pool) => Self::Coherent(endpoint::Endpoint::open(Arc::clone(pool), options)?),
            AnyPool::Software(pool) => Self::Software(endpoint::Endpoint::open(Arc::clone(pool), options)?),
            AnyPool::Wrapped(pool) => Self::Wrapped(endpoint::Endpoint::open(Arc::clone(pool), options)?),
        })
    }

    pub(crate) fn address(&self) -> Address {
        each_endpoint!(self, endpoint => endpoint.address())
    }

    pub(crate) fn connect(&mut self, to: Address) -> u32 {
        each_endpoint!(self, endpoint => endpoint.connect(to))
    }

    pub(crate) fn send(
        &mut self,
        to: u32,
        label: Label,
        span: IoBuffer,
        operation: Operation,
    ) -> Result<(), PoolError> {
        self.send_until(CompleteWhen::Out, to, label, span, operation)
    }

    #[inline]
    pub(crate) fn send_until(
        &mut self,
        until: CompleteWhen,
        to: u32,
        label: Label,
        span: IoBuffer,
        operation: Operation,
    ) -> Result<(), PoolError> {
        each_endpoint!(self, endpoint => endpoint.send_until(until, to, label, span, operation))
    }

    pub(crate) fn inject(&mut self, to: u32, label: Label, bytes: &[u8]) -> Result<(), PoolError> {
        each_endpoint!(self, endpoint => endpoint.inject(to, label, bytes))
    }

    pub(crate) fn receive(&mut self, filter: Filter, span: IoBuffer, operation: Operation) {
        each_endpoint!(self, endpoint => endpoint.receive(filter, span, operation));
    }

    pub(crate) fn receive_first(&mut self, filter: Filter, span: IoBuffer, operation: Operation) {
        each_endpoint!(self, endpoint => endpoint.receive_first(filter, span, operation));
    }

    pub(crate) fn cancel(&mut self, is: impl Fn(&Operation) -> bool) -> Option<(IoBuffer, Operation)> {
        each_endpoint!(self, endpoint => endpoint.cancel(is))
    }

    pub(crate) fn peek(&self, filter: Filter) -> Option<Arrival> {
        each_endpoint!(self, endpoint => endpoint.peek(filter))
    }

    pub(crate) fn address_of(&self, peer: u32) -> Option<Address> {
        each_endpoint!(self, endpoint => endpoint.address_of(peer))
    }

    pub(crate) fn sent_bytes(&self) -> u64 {
        each_endpoint!(self, endpoint => endpoint.sent_bytes())
    }

    /// Leaves when the peers have what was sent to them.
    pub(crate) fn close(self) -> Result<(), PoolError> {
        each_endpoint!(self, endpoint => endpoint.close())
    }

    #[inline(always)]
    pub(crate) fn step(&mut self) -> Result<Option<Completion<IoBuffer, Operation>>, PoolError> {
        each_endpoint!(self, endpoint => endpoint.step())
    }

    #[inline(always)]
    pub(crate) fn completion(&mut self) -> Option<Completion<IoBuffer, Operation>> {
        each_endpoint!(self, endpoint => endpoint.completion())
    }
}
