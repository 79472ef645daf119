//! What fabrics, domains and endpoints carry behind the structures that C knows: the tables of functions find it here.

use std::sync::Arc;

use crate::ffi::{FidDomain, FidEp, FidFabric};
use crate::object::Object;
use crate::state::Domain;

/// A fabric, which knows whether there are domains of it: each holds a part.
#[derive(Default)]
pub(crate) struct OpenFabric {
    pub(crate) domains: Arc<()>,
}

/// A domain, which keeps its fabric open.
pub(crate) struct OpenDomain {
    domain: Arc<Domain>,
    _fabric: Arc<()>,
}

/// An endpoint: its place among those of its domain.
pub(crate) struct OpenEndpoint {
    pub(crate) domain: Arc<Domain>,
    pub(crate) at: usize,
}

pub(crate) type FabricHandle = Object<FidFabric, OpenFabric>;
pub(crate) type DomainHandle = Object<FidDomain, OpenDomain>;
pub(crate) type EndpointHandle = Object<FidEp, OpenEndpoint>;

impl OpenDomain {
    pub(crate) fn new(domain: Domain, fabric: &OpenFabric) -> Self {
        Self { domain: Arc::new(domain), _fabric: Arc::clone(&fabric.domains) }
    }
}

/// What belongs to an open domain.
///
/// # Safety
/// `domain` is one that [`DomainHandle`] handed out, and open.
pub(crate) unsafe fn domain_of<'a>(domain: *const FidDomain) -> &'a Arc<Domain> {
    // SAFETY: by this function's contract.
    unsafe { &DomainHandle::of(domain).domain }
}

/// What belongs to an open endpoint.
///
/// # Safety
/// `ep` is one that [`EndpointHandle`] handed out, and open.
pub(crate) unsafe fn endpoint_of<'a>(ep: *const FidEp) -> &'a OpenEndpoint {
    // SAFETY: by this function's contract.
    unsafe { EndpointHandle::of(ep) }
}
