//! What stands in a region before it is formatted: nothing, a pool, what is left of one, or something that would be lost.

use std::ops::Range;

use polder_mem::{LINE, Memory, Offset};

use crate::PoolError;
use crate::format::{Layout, SUPERBLOCK_BYTES, Superblock, read_superblock};
use crate::line;

/// What is known by bytes at a fixed offset. A partition table comes last: others stand beside one.
const SIGNATURES: &[(&str, u64, &[u8])] = &[
    ("an ext2, ext3 or ext4 file system", 1080, &[0x53, 0xef]),
    ("an XFS file system", 0, b"XFSB"),
    ("a btrfs file system", 65_600, b"_BHRfS_M"),
    ("an F2FS file system", 1024, &0xf2f5_2010_u32.to_le_bytes()),
    ("a famfs file system", 0, &0x87b2_82ff_u64.to_le_bytes()),
    ("a squashfs file system", 0, b"hsqs"),
    ("an NTFS file system", 3, b"NTFS    "),
    ("an ISO 9660 file system", 32_769, b"CD001"),
    ("a physical volume of LVM", 536, b"LVM2 001"),
    ("a LUKS volume", 0, b"LUKS\xba\xbe"),
    ("a member of a Linux RAID", 4096, &0xa92b_4efc_u32.to_le_bytes()),
    ("swap space", 4086, b"SWAPSPACE2"),
    ("a GPT partition table", 512, b"EFI PART"),
    ("a GPT partition table", 4096, b"EFI PART"),
    ("a boot sector or a partition table", 510, &[0x55, 0xaa]),
];

/// Bytes that are read at a time.
const PIECE: u64 = 1 << 16;

/// That nothing is lost when the region of `memory` becomes a pool: there is no pool and no known signature, and `parts` are
/// zeros or what is left of a pool that was destroyed.
///
/// # Errors
/// [`PoolError::PoolExists`], [`PoolError::Occupied`] with what was seen and where, [`PoolError::Memory`].
pub fn expect_vacant<M: Memory>(
    memory: &M,
    parts: impl IntoIterator<Item = Range<u64>>,
) -> Result<(), PoolError> {
    match read_superblock(memory) {
        Err(PoolError::NotAPool { .. }) => {}
        Err(PoolError::TooSmall { bytes, .. }) if bytes < SUPERBLOCK_BYTES => {}
        Err(error @ PoolError::Memory(_)) => return Err(error),
        Ok(superblock) => return Err(PoolError::PoolExists { what: format!("pool {}", superblock.uuid) }),
        Err(damage) => {
            return Err(PoolError::PoolExists { what: format!("a pool that cannot be read ({damage})") });
        }
    }
    if let Some((what, offset)) = signature(memory)? {
        return Err(PoolError::Occupied { what, offset });
    }
    if had_pool(memory)? {
        return Ok(());
    }
    for part in parts {
        if let Some(offset) = first_byte(memory, part.start..part.end.min(memory.bytes()))? {
            return Err(PoolError::Occupied { what: "bytes that are not 0 and no pool's", offset });
        }
    }
    Ok(())
}

fn signature<M: Memory>(memory: &M) -> Result<Option<(&'static str, Offset)>, PoolError> {
    for &(what, at, bytes) in SIGNATURES {
        let mut actual = [0; 10];
        let actual = &mut actual[..bytes.len()];
        if at + bytes.len() as u64 <= memory.bytes() {
            read(memory, Offset(at), actual)?;
            if actual == bytes {
                return Ok(Some((what, Offset(at))));
            }
        }
    }
    Ok(None)
}

/// Whether a pool of this region lost its first line and kept the second, as one that was destroyed does, and one whose format
/// did not come to its end.
fn had_pool<M: Memory>(memory: &M) -> Result<bool, PoolError> {
    let (first, second) = (line::read(memory, Offset(0))?, line::read(memory, Offset(LINE))?);
    let (Some(identity @ [0, ..]), Some(division)) = (first, second) else { return Ok(false) };
    let mut old = Superblock::decode(&identity, &division);
    old.bytes = memory.bytes() & !(LINE - 1);
    let layout = Layout::new(&old.geometry, old.bytes);
    Ok(layout.is_ok_and(|layout| old.division(&layout) == division))
}

/// Where the first byte of `part` stands that is not 0.
fn first_byte<M: Memory>(memory: &M, part: Range<u64>) -> Result<Option<Offset>, PoolError> {
    let mut piece = vec![0; PIECE as usize];
    for at in part.clone().step_by(PIECE as usize) {
        let piece = &mut piece[..PIECE.min(part.end - at) as usize];
        read(memory, Offset(at), piece)?;
        if let Some(index) = piece.iter().position(|&byte| byte != 0) {
            return Ok(Some(Offset(at + index as u64)));
        }
    }
    Ok(None)
}

fn read<M: Memory>(memory: &M, at: Offset, into: &mut [u8]) -> Result<(), PoolError> {
    memory.invalidate(at, into.len() as u64);
    // SYNC: pairs with the fence of a host that has wiped the region.
    memory.fence_invalidations();
    Ok(memory.copy_out(at, into)?)
}

#[cfg(test)]
mod tests {
    use polder_mem::{Heap, HeapShape};

    use super::*;
    use crate::format::{Geometry, Overwrite, Uuid, format};

    const TINY: Geometry =
        Geometry { hosts: 2, processes: 2, names: 5, levels: 2, chunk_bytes: 256, opens: 3, keepers: 2 };
    const BYTES: u64 = 128 << 10;

    fn heap() -> Heap {
        Heap::new(HeapShape { bytes: BYTES, hosts: 1, processes: 1, local_words: 0, bells: 0 })
    }

    fn refused(heap: &Heap) -> Option<String> {
        format(heap, &TINY, Uuid(9), Overwrite::Refuse).err().map(|error| error.to_string())
    }

    #[test]
    fn every_known_signature_is_named_with_its_offset_and_stays() {
        for &(what, at, bytes) in SIGNATURES {
            let heap = heap();
            heap.copy_in(Offset(at), bytes).unwrap();
            let error = refused(&heap).unwrap();
            assert!(error.contains(&format!("{what} (seen at offset {at:#x})")), "{error}");
            let mut kept = vec![0; bytes.len()];
            heap.copy_out(Offset(at), &mut kept).unwrap();
            assert_eq!(kept, bytes);
        }
    }

    #[test]
    fn one_byte_anywhere_in_what_would_be_zeroed_is_seen() {
        let metadata = Layout::new(&TINY, BYTES).unwrap().chunk_area().0;
        for at in (0..metadata).step_by(61).chain([metadata - 1]) {
            let heap = heap();
            heap.copy_in(Offset(at), &[1]).unwrap();
            let error = refused(&heap).unwrap();
            assert!(error.contains(&format!("seen at offset {at:#x}")), "{error}");
        }
    }

    #[test]
    fn what_is_left_of_a_destroyed_pool_goes_without_force_and_a_file_system_in_it_does_not() {
        let heap = heap();
        format(&heap, &TINY, Uuid(9), Overwrite::Refuse).unwrap();
        heap.store(Layout::new(&TINY, BYTES).unwrap().entry(1, 0), 7);
        line::publish_and_fence(&heap, Offset(0), &[0; line::WORDS]);
        heap.copy_in(Offset(1080), &[0x53, 0xef]).unwrap();
        assert!(refused(&heap).unwrap().contains("ext4"));
        heap.copy_in(Offset(1080), &[0, 0]).unwrap();
        assert_eq!(refused(&heap), None);
        assert_eq!(heap.load(Layout::new(&TINY, BYTES).unwrap().entry(1, 0)), Ok(0));
    }
}
