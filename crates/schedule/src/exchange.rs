//! What clients and proxies of a parameter service exchange in a step: which shards, over which proxy, in what order.

/// Bytes of one tensor that are synchronised together, and the proxy that sums them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shard {
    /// The tensor's number, the same to all clients.
    pub tensor: u32,
    /// The first byte of it in the tensor.
    pub start: u64,
    /// How many bytes it has, at least one.
    pub bytes: u64,
    /// The proxy that sums it.
    pub proxy: u16,
}

/// Which of the shards that wait goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ShardOrder {
    /// As their gradients come.
    FirstInFirstOut,
    /// Those of the first layers, whose gradients come last: the next forward pass needs them first.
    #[default]
    FirstLayersFirst,
}

/// The shards of a step. Their order is that in which a client has them to push: the order of gradients. Clients may push
/// in any order; each shard once a step.
///
/// Every shard has a proxy, and its place in a buffer of each client and of this proxy: what belongs to a proxy lies side by
/// side, each shard from a multiple of [`Exchange::GRAIN`] on.
///
/// A buffer with [`Exchange::windowed`] is a window: shards use its bytes one after another in each step, as in a ring.
///
/// ```
/// use polder_schedule::{Exchange, Shard};
///
/// let shard = |tensor, proxy| Shard { tensor, start: 0, bytes: 100, proxy };
/// let exchange = Exchange::new(vec![shard(0, 0), shard(1, 1), shard(2, 0)], 2)?;
/// assert_eq!(exchange.of_proxy(0), [0, 2]);
/// assert_eq!([0, 1, 2].map(|shard| exchange.place(shard)), [0, 0, 128]);
/// assert_eq!(exchange.buffer_bytes(0), 256);
/// # Ok::<(), polder_schedule::ExchangeError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange {
    shards: Vec<Shard>,
    places: Vec<u64>,
    /// For each proxy its shards, and the bytes of its buffer.
    parts: Vec<(Vec<u32>, u64)>,
    order: ShardOrder,
    /// The bytes of a window that were asked for, and what follows from them; none where no byte is used twice.
    windows: Option<(u64, Windows)>,
}

/// Where shards lie whose bytes are used by others in the same step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Windows {
    places: Vec<u64>,
    /// The shards whose bytes each shard takes over.
    before: Vec<Vec<u32>>,
    /// The bytes of each proxy's window.
    bytes: Vec<u64>,
}

/// Why shards are none of an exchange.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExchangeError {
    /// A service without proxies, or with too many.
    #[error("a service of {proxies} proxies; give it 1 to {limit}")]
    Proxies {
        /// How many.
        proxies: u16,
        /// At most.
        limit: u16,
    },
    /// Too many shards.
    #[error("{shards} shards in a step; the limit is {limit}: take larger ones")]
    Shards {
        /// How many.
        shards: usize,
        /// At most.
        limit: usize,
    },
    /// A shard that no proxy sums.
    #[error("shard {shard} goes to proxy {proxy}; there are {proxies}, counted from 0")]
    Route {
        /// The shard.
        shard: usize,
        /// Where it goes.
        proxy: u16,
        /// How many proxies there are.
        proxies: u16,
    },
    /// A shard without bytes, or with more than any memory has.
    #[error("shard {shard} has {bytes} bytes from {start} on; it needs at least one, and an end")]
    Bytes {
        /// The shard.
        shard: usize,
        /// Its first byte.
        start: u64,
        /// How many.
        bytes: u64,
    },
    /// Two shards with a common byte.
    #[error("shards {one} and {other} of tensor {tensor} share byte {byte}; each byte belongs to one shard")]
    Overlap {
        /// A shard.
        one: usize,
        /// Another.
        other: usize,
        /// Their tensor.
        tensor: u32,
        /// The byte.
        byte: u64,
    },
}

impl Exchange {
    /// Shards begin at multiples of so many bytes in a buffer.
    pub const GRAIN: u64 = 64;
    /// The most shards of a step.
    pub const MOST_SHARDS: usize = 1 << 20;
    /// The most proxies.
    pub const MOST_PROXIES: u16 = 1024;
    /// The most bytes of a buffer.
    pub const MOST_BYTES: u64 = 1 << 48;

    /// The exchange of these shards over so many proxies. A proxy may have none.
    ///
    /// # Errors
    /// [`ExchangeError`] when a shard has no bytes, no such proxy, or a byte of another.
    pub fn new(shards: Vec<Shard>, proxies: u16) -> Result<Self, ExchangeError> {
        if proxies == 0 || proxies > Self::MOST_PROXIES {
            return Err(ExchangeError::Proxies { proxies, limit: Self::MOST_PROXIES });
        }
        if shards.len() > Self::MOST_SHARDS {
            return Err(ExchangeError::Shards { shards: shards.len(), limit: Self::MOST_SHARDS });
        }
        let mut parts = vec![(vec![], 0); usize::from(proxies)];
        let mut places = vec![];
        for (shard, &Shard { start, bytes, proxy, .. }) in shards.iter().enumerate() {
            let Some((of, end)) = parts.get_mut(usize::from(proxy)) else {
                return Err(ExchangeError::Route { shard, proxy, proxies });
            };
            let fits = start.checked_add(bytes).is_some_and(|end| end <= Self::MOST_BYTES);
            if bytes == 0 || !fits || *end > Self::MOST_BYTES {
                return Err(ExchangeError::Bytes { shard, start, bytes });
            }
            of.push(shard as u32);
            places.push(*end);
            *end = (*end + bytes).next_multiple_of(Self::GRAIN);
        }
        expect_apart(&shards)?;
        Ok(Self { shards, places, parts, order: ShardOrder::default(), windows: None })
    }

    /// With windows of so many bytes for each proxy, or of its largest shard where that is larger; 0 uses no byte twice.
    ///
    /// ```
    /// # use polder_schedule::{Exchange, Shard};
    /// let shard = |tensor| Shard { tensor, start: 0, bytes: 64, proxy: 0 };
    /// let exchange = Exchange::new((0..3).map(shard).collect(), 1)?.windowed(128);
    /// assert_eq!([0, 1, 2].map(|shard| exchange.window(shard)), [0, 64, 0]);
    /// assert_eq!((exchange.window_bytes(0), exchange.before(2)), (128, &[0][..]));
    /// # Ok::<(), polder_schedule::ExchangeError>(())
    /// ```
    #[must_use]
    pub fn windowed(mut self, bytes: u64) -> Self {
        self.windows = (bytes > 0).then(|| (bytes, self.windows_of(bytes)));
        self
    }

    fn windows_of(&self, bytes: u64) -> Windows {
        let room = |shard: u32| self.shards[shard as usize].bytes.next_multiple_of(Self::GRAIN);
        let mut windows = Windows {
            places: vec![0; self.shards.len()],
            before: vec![vec![]; self.shards.len()],
            bytes: vec![],
        };
        for (shards, _) in &self.parts {
            let limit = shards.iter().map(|&shard| room(shard)).max().unwrap_or(0).max(bytes);
            // Who has which bytes, without gaps but in no order.
            let mut owners: Vec<(u64, u64, u32)> = vec![];
            let (mut at, mut most) = (0, 0);
            for &shard in shards {
                if at + room(shard) > limit {
                    at = 0;
                }
                let end = at + room(shard);
                let (taken, mut left): (Vec<_>, Vec<_>) =
                    owners.into_iter().partition(|(from, to, _)| *from < end && at < *to);
                let keep = |(from, to, of): &(u64, u64, u32)| {
                    [(*from, at.min(*to), *of), (end.max(*from), *to, *of)]
                        .into_iter()
                        .filter(|(from, to, _)| from < to)
                };
                left.extend(taken.iter().flat_map(keep).collect::<Vec<_>>());
                windows.before[shard as usize] = taken.iter().map(|(_, _, of)| *of).collect();
                left.push((at, end, shard));
                owners = left;
                windows.places[shard as usize] = at;
                (at, most) = (end, most.max(end));
            }
            windows.bytes.push(most);
        }
        windows
    }

    /// With another order of the shards that wait.
    #[must_use]
    pub fn ordered(self, order: ShardOrder) -> Self {
        Self { order, ..self }
    }

    /// Which of the shards that wait goes first.
    #[must_use]
    pub fn order(&self) -> ShardOrder {
        self.order
    }

    /// The rank of a shard among those that wait: the lowest goes first, and of equals the one that came first.
    #[must_use]
    pub fn rank(&self, shard: u32) -> u32 {
        match self.order {
            ShardOrder::FirstInFirstOut => 0,
            ShardOrder::FirstLayersFirst => u32::MAX - shard,
        }
    }

    /// The shards, in the order of gradients.
    #[must_use]
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// How many proxies there are.
    #[must_use]
    pub fn proxies(&self) -> u16 {
        self.parts.len() as u16
    }

    /// The shards of a proxy, in the order of gradients.
    #[must_use]
    pub fn of_proxy(&self, proxy: u16) -> &[u32] {
        &self.parts[usize::from(proxy)].0
    }

    /// The bytes of a window that were asked for; 0 where no byte is used twice.
    #[must_use]
    pub fn asked_window_bytes(&self) -> u64 {
        self.windows.as_ref().map_or(0, |(asked, _)| *asked)
    }

    /// Where a shard begins in the windows of its proxy.
    #[must_use]
    pub fn window(&self, shard: u32) -> u64 {
        self.windows.as_ref().map_or_else(|| self.place(shard), |(_, windows)| windows.places[shard as usize])
    }

    /// Bytes of a window of this proxy.
    #[must_use]
    pub fn window_bytes(&self, proxy: u16) -> u64 {
        self.windows
            .as_ref()
            .map_or_else(|| self.buffer_bytes(proxy), |(_, windows)| windows.bytes[usize::from(proxy)])
    }

    /// The shards, earlier in the order of gradients, whose bytes of the window a shard takes over.
    #[must_use]
    pub fn before(&self, shard: u32) -> &[u32] {
        self.windows.as_ref().map_or(&[], |(_, windows)| &windows.before[shard as usize])
    }

    /// Where a shard begins in a buffer of its proxy that uses no byte twice.
    #[must_use]
    pub fn place(&self, shard: u32) -> u64 {
        self.places[shard as usize]
    }

    /// Bytes of a buffer of this proxy that uses no byte twice.
    #[must_use]
    pub fn buffer_bytes(&self, proxy: u16) -> u64 {
        self.parts[usize::from(proxy)].1
    }
}

/// Whether each byte of a tensor belongs to one shard.
fn expect_apart(shards: &[Shard]) -> Result<(), ExchangeError> {
    let mut order: Vec<usize> = (0..shards.len()).collect();
    order.sort_by_key(|&index| (shards[index].tensor, shards[index].start));
    for pair in order.windows(2) {
        let [one, other] = [shards[pair[0]], shards[pair[1]]];
        if one.tensor == other.tensor && other.start < one.start + one.bytes {
            let (tensor, byte) = (one.tensor, other.start);
            return Err(ExchangeError::Overlap { one: pair[0], other: pair[1], tensor, byte });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(tensor: u32, start: u64, bytes: u64, proxy: u16) -> Shard {
        Shard { tensor, start, bytes, proxy }
    }

    #[test]
    fn shards_of_a_proxy_lie_side_by_side_in_the_order_of_gradients() {
        let shards = vec![shard(5, 0, 65, 1), shard(5, 65, 1, 1), shard(0, 7, 128, 0), shard(2, 0, 64, 1)];
        let exchange = Exchange::new(shards, 3).unwrap();
        assert_eq!((0..4).map(|index| exchange.place(index)).collect::<Vec<_>>(), [0, 128, 0, 192]);
        assert_eq!([0, 1, 2].map(|proxy| exchange.buffer_bytes(proxy)), [128, 256, 0]);
        assert_eq!(exchange.of_proxy(1), [0, 1, 3]);
        assert_eq!(exchange.of_proxy(2), [0; 0]);
    }

    #[test]
    fn the_shards_of_the_first_layers_go_first_unless_the_order_is_that_of_their_gradients() {
        let exchange = Exchange::new(vec![shard(0, 0, 8, 0), shard(1, 0, 8, 0)], 1).unwrap();
        assert!(exchange.rank(1) < exchange.rank(0));
        let exchange = exchange.ordered(ShardOrder::FirstInFirstOut);
        assert_eq!(exchange.rank(1), exchange.rank(0));
    }

    #[test]
    fn a_shard_takes_over_the_bytes_of_all_that_had_them_last() {
        let sizes = [64, 128, 64, 192, 64, 64, 128, 320];
        let shards = (0..).zip(sizes).map(|(tensor, bytes)| shard(tensor, 0, bytes, 0)).collect();
        let exchange = Exchange::new(shards, 2).unwrap().windowed(256);
        let found: Vec<_> =
            (0..8).map(|index| (exchange.window(index), exchange.before(index).to_vec())).collect();
        // The last one is larger than what was asked for, so that all lie in a window of its bytes.
        let expected: [(u64, &[u32]); 8] = [
            (0, &[]),
            (64, &[]),
            (192, &[]),
            (0, &[0, 1]),
            (192, &[2]),
            (256, &[]),
            (0, &[3]),
            (0, &[4, 5, 3, 6]),
        ];
        for ((place, mut before), (at, mut last)) in
            found.into_iter().zip(expected.map(|(at, last)| (at, last.to_vec())))
        {
            before.sort_unstable();
            last.sort_unstable();
            assert_eq!((place, before), (at, last));
        }
        assert_eq!([0, 1].map(|proxy| exchange.window_bytes(proxy)), [320, 0]);
        assert_eq!(exchange.clone().windowed(0).window_bytes(0), exchange.buffer_bytes(0));
    }

    #[test]
    fn what_is_no_exchange_is_named() {
        let refused =
            |shards: &[Shard], proxies| Exchange::new(shards.to_vec(), proxies).unwrap_err().to_string();
        assert_eq!(refused(&[], 0), "a service of 0 proxies; give it 1 to 1024");
        assert_eq!(refused(&[shard(0, 0, 1, 2)], 2), "shard 0 goes to proxy 2; there are 2, counted from 0");
        assert_eq!(
            refused(&[shard(0, 4, 0, 0)], 1),
            "shard 0 has 0 bytes from 4 on; it needs at least one, and an end"
        );
        refused(&[shard(0, u64::MAX, 1, 0)], 1);
        assert_eq!(
            refused(&[shard(1, 8, 9, 0), shard(0, 0, 9, 0), shard(1, 0, 9, 1)], 2),
            "shards 2 and 0 of tensor 1 share byte 8; each byte belongs to one shard"
        );
    }
}
