//! A training step, priced in closed form: how it is laid out, on what, and what each part of it takes.

pub(crate) mod block;
pub(crate) mod closed_form;
pub(crate) mod cost;
pub(crate) mod figures;
pub(crate) mod flows;
pub(crate) mod given;
pub(crate) mod job;
pub(crate) mod layout;
pub(crate) mod machine;
pub(crate) mod model;
pub(crate) mod order;
pub(crate) mod routes;
pub(crate) mod timeline;
