//! An address vector as the domain keeps it.

use polder_pool::endpoint::Address;

/// The addresses that were inserted.
#[derive(Default)]
pub(crate) struct Vector {
    pub(crate) places: Vec<Option<Address>>,
    /// Endpoints that use it.
    pub(crate) bound: usize,
}

impl Vector {
    #[inline]
    pub(crate) fn get(&self, place: u64) -> Option<&Address> {
        self.places.get(usize::try_from(place).ok()?)?.as_ref()
    }

    /// The first place of an address.
    pub(crate) fn place_of(&self, address: Address) -> Option<u64> {
        let place = self.places.iter().position(|known| *known == Some(address))?;
        Some(place as u64)
    }
}
