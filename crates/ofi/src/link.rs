//! The pool's endpoint, of whatever memory: the one place that calls it.

use std::sync::Arc;

use polder_attach::session::AnyPool;
use polder_mem::{Coherent, Software, Wrapped};
use polder_pool::endpoint::{Address, Arrival, CompleteWhen, Completion, Filter, Label};
use polder_pool::{PoolError, endpoint};

use crate::operation::Operation;
use crate::span::Span;

/// An endpoint in a pool of one of the memories that an edge meets.
pub(crate) enum Link {
    Coherent(endpoint::Endpoint<Coherent, Span, Operation>),
    Software(endpoint::Endpoint<Software, Span, Operation>),
    Wrapped(endpoint::Endpoint<Wrapped, Span, Operation>),
}

macro_rules! each_link {
    ($any:expr, $link:ident => $body:expr) => {
        match $any {
            Link::Coherent($link) => $body,
            Link::Software($link) => $body,
            Link::Wrapped($link) => $body,
        }
    };
}

impl Link {
    pub(crate) fn open(pool: &AnyPool) -> Result<Self, PoolError> {
        let options = endpoint::EndpointOptions::default();
        Ok(match pool {
            AnyPool::Coherent(pool) => Self::Coherent(endpoint::Endpoint::open(Arc::clone(pool), options)?),
            AnyPool::Software(pool) => Self::Software(endpoint::Endpoint::open(Arc::clone(pool), options)?),
            AnyPool::Wrapped(pool) => Self::Wrapped(endpoint::Endpoint::open(Arc::clone(pool), options)?),
        })
    }

    pub(crate) fn address(&self) -> Address {
        each_link!(self, link => link.address())
    }

    pub(crate) fn connect(&mut self, to: Address) -> u32 {
        each_link!(self, link => link.connect(to))
    }

    pub(crate) fn send(
        &mut self,
        to: u32,
        label: Label,
        span: Span,
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
        span: Span,
        operation: Operation,
    ) -> Result<(), PoolError> {
        each_link!(self, link => link.send_until(until, to, label, span, operation))
    }

    pub(crate) fn inject(&mut self, to: u32, label: Label, bytes: &[u8]) -> Result<(), PoolError> {
        each_link!(self, link => link.inject(to, label, bytes))
    }

    pub(crate) fn receive(&mut self, filter: Filter, span: Span, operation: Operation) {
        each_link!(self, link => link.receive(filter, span, operation));
    }

    pub(crate) fn receive_first(&mut self, filter: Filter, span: Span, operation: Operation) {
        each_link!(self, link => link.receive_first(filter, span, operation));
    }

    pub(crate) fn cancel(&mut self, is: impl Fn(&Operation) -> bool) -> Option<(Span, Operation)> {
        each_link!(self, link => link.cancel(is))
    }

    pub(crate) fn peek(&self, filter: Filter) -> Option<Arrival> {
        each_link!(self, link => link.peek(filter))
    }

    pub(crate) fn address_of(&self, peer: u32) -> Option<Address> {
        each_link!(self, link => link.address_of(peer))
    }

    pub(crate) fn sent_bytes(&self) -> u64 {
        each_link!(self, link => link.sent_bytes())
    }

    /// Leaves when the peers have what was sent to them.
    pub(crate) fn close(self) -> Result<(), PoolError> {
        each_link!(self, link => link.close())
    }

    #[inline(always)]
    pub(crate) fn step(&mut self) -> Result<Option<Completion<Span, Operation>>, PoolError> {
        each_link!(self, link => link.step())
    }

    #[inline(always)]
    pub(crate) fn completion(&mut self) -> Option<Completion<Span, Operation>> {
        each_link!(self, link => link.completion())
    }
}
