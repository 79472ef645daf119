//! What the objects of a job are for.

use crate::owned::Kind;

/// What an object is for, by its name.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Use<'a> {
    /// An endpoint.
    Endpoint,
    /// A ring, with the name and generation of the endpoints at both ends.
    Ring([(String, u64); 2]),
    /// Blocks of the endpoint with this name and generation.
    Blocks((String, u64)),
    /// A segment of the window with this name.
    Segment(&'a str),
    /// Private memory of a process of this host.
    Memory(&'a str),
}

impl<'a> Use<'a> {
    pub(crate) fn of(name: &'a str, job: u64) -> Option<Self> {
        let within = |what: &str| name.strip_prefix(what)?.strip_prefix(&job.to_string())?.strip_prefix('/');
        if within("/window/").is_some() {
            return name.rsplit_once('/').map(|(window, _)| Self::Segment(window));
        }
        if let Some(owner) = within("/memory/") {
            return owner.split_once('.').map(|(host, _)| Self::Memory(host));
        }
        let end = |words: &str| {
            let (place, generation) = words.rsplit_once('.')?;
            Some((format!("/endpoint/{job}/{place}"), generation.parse().ok()?))
        };
        let within = within("/endpoint/")?;
        if let Some((endpoint, _)) = within.split_once("/blocks/") {
            return Some(Self::Blocks(end(endpoint)?));
        }
        let Some((receiver, sender)) = within.split_once("/from/") else { return Some(Self::Endpoint) };
        Some(Self::Ring([end(receiver)?, end(sender)?]))
    }

    /// What the identity of such an object says that it is.
    pub(crate) const fn kind(&self) -> Kind {
        match self {
            Self::Endpoint => Kind::Endpoint,
            Self::Ring(_) => Kind::Ring,
            Self::Blocks(_) => Kind::Blocks,
            Self::Segment(_) => Kind::Segment,
            Self::Memory(_) => Kind::Private,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_known_by_its_name_in_its_own_job_alone() {
        assert_eq!(Use::of("/endpoint/7/1.0", 7), Some(Use::Endpoint));
        let ends = [("/endpoint/7/1.0".to_owned(), 5), ("/endpoint/7/0.3".to_owned(), 9)];
        assert_eq!(Use::of("/endpoint/7/1.0.5/from/0.3.9", 7), Some(Use::Ring(ends)));
        let blocks = Use::Blocks(("/endpoint/7/1.0".to_owned(), 5));
        assert_eq!(Use::of("/endpoint/7/1.0.5/blocks/2", 7), Some(blocks));
        assert_eq!(Use::of("/window/7/some/name/3", 7), Some(Use::Segment("/window/7/some/name")));
        assert_eq!(Use::of("/memory/7/1.99.3", 7), Some(Use::Memory("1")));
        for strange in [
            "/endpoint/71/1.0",
            "/endpoint/7",
            "/memory/7/1",
            "/endpoints/7/1.0",
            "/mine/endpoint/7/1.0",
            "/endpoint/7/1.0/from/x",
        ] {
            assert_eq!(Use::of(strange, 7), None, "{strange}");
        }
    }
}
