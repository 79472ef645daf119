//! A hostile writer of a store, driven by bytes: whatever its objects say, the victim's calls end with a whole version or an error.
//!
//! The victim and the peer are processes of hosts of their own. The peer makes objects of versions and writes into them heads and
//! manifests that are almost right, with checksums that are right. It also publishes whole versions, removes any, writes any word of
//! the store's objects, and says in the marks whatever it likes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use polder_mem::{Heap, LINE, Memory, Offset, ProcessSlot};
use twox_hash::XxHash3_128;

use super::manifest::{HEAD_LINE, Head, MANIFEST_LINE, Manifest, Other, Tensor, stamp, start};
use super::{Store, Version};
use crate::entry::halves;
use crate::format::Geometry;
use crate::object::{InitialContents, Object};
use crate::owned::{Identity, Kind};
use crate::script::Script;
use crate::testing::formatted;
use crate::{Member, Pool, PoolError, line, word};

const GEOMETRY: Geometry =
    Geometry { hosts: 2, processes: 1, names: 31, levels: 3, chunk_bytes: 1024, opens: 8, keepers: 1 };
const BYTES: u64 = 64 << 10;
const NAME: &str = "s";
const VICTIM: u16 = 0;
/// Numbers that the peer gives to versions: the last ones have none after them.
const NUMBERS: [u64; 7] = [1, 2, 3, 4, (1 << word::BITS) - 1, 1 << word::BITS, u64::MAX];
/// The names of tensors.
const TENSORS: [&str; 3] = ["a", "b", ""];

/// Runs the script `bytes`.
///
/// # Panics
/// When the victim does, writes what belongs to the peer, or reads a tensor that is not what was published.
pub fn drive(bytes: &[u8]) {
    let mut script = Script(bytes);
    let mut stage = Stage::new();
    while !script.0.is_empty() {
        for _ in 0..script.byte() % 4 {
            stage.write(&mut script);
        }
        let before = stage.theirs();
        stage.act(&mut script);
        assert!(stage.theirs() == before, "the victim wrote in an object of the peer's");
    }
}

/// The victim's store, and the peer with the objects that it holds open.
struct Stage {
    victim: Store<Heap>,
    peer: Store<Heap>,
    objects: Vec<(u64, Object)>,
}

impl Stage {
    fn new() -> Self {
        let heap = formatted(&GEOMETRY, BYTES);
        let store = |host: u16, memory| {
            // Nobody is waited for: every wait ends at its first look.
            let (timeout, silence) = (Duration::ZERO, Duration::ZERO);
            let member = Member { timeout, silence, ..Member::new(host, 1) };
            let pool = Pool::attach(memory, member).expect("a new pool");
            Store::new(Arc::new(pool), NAME).expect("a good name")
        };
        let peer = store(1 - VICTIM, heap.process(1 - VICTIM, ProcessSlot(0)));
        Self { victim: store(VICTIM, heap), peer, objects: vec![] }
    }

    fn memory(&self) -> &Heap {
        self.peer.pool.memory()
    }

    /// The bytes of the objects that the peer holds. The victim's line of the marks is its own.
    fn theirs(&self) -> Vec<u8> {
        let mut all = vec![];
        for (_, object) in &self.objects {
            let mut bytes = vec![0; object.bytes() as usize];
            object.read_at(self.memory(), 0, &mut bytes).expect("ordinary memory");
            all.extend(bytes);
        }
        all
    }

    // The hostile hand.

    fn write(&mut self, script: &mut Script<'_>) {
        match script.byte() % 8 {
            0 | 1 => self.make(script),
            2..=4 => self.write_version(script),
            5 => self.write_word(script),
            6 => self.write_mark(script),
            _ => match script.byte() % 4 {
                0 => {
                    let name = self.peer.object_name(script.of(&NUMBERS));
                    drop(self.peer.pool.destroy(&name));
                }
                1 => {
                    if let Some((_, object)) = self.objects.pop() {
                        self.peer.pool.close(object);
                    }
                }
                2 => drop(self.peer.remove()),
                _ => drop(self.peer.publish(&[("a", &[script.byte(); 64]), ("b", &[7; 200])])),
            },
        }
    }

    /// Makes an object of a version. Its writer lives or not.
    fn make(&mut self, script: &mut Script<'_>) {
        let number = script.of(&NUMBERS);
        let bytes = script.of(&[0, 64, 128, 200, 1000, 3000]);
        let process = self.peer.pool.this_process().identity().map(|word| script.near(word));
        let process = crate::Process::from_identity(process);
        let identity = Identity { kind: Kind::Version, process, own: [0; 3] }.encode();
        let name = self.peer.object_name(number);
        let made = self.peer.pool.create_filled(&name, bytes, InitialContents::Line(identity));
        self.objects.extend(made.ok().map(|object| (number, object)));
    }

    /// Writes a head and the manifest that it leads to, both almost right.
    fn write_version(&self, script: &mut Script<'_>) {
        if self.objects.is_empty() {
            return;
        }
        let any = |script: &mut Script<'_>| &self.objects[usize::from(script.byte()) % self.objects.len()];
        let (number, object) = any(script);
        if object.bytes() < MANIFEST_LINE * LINE {
            return;
        }
        let mut others = vec![];
        for _ in 0..script.byte() % 3 {
            let (number, other) = any(script);
            let [number, stamp, bytes] = [*number, stamp(other), other.bytes()].map(|word| script.near(word));
            others.push(Other { number, stamp, bytes });
        }
        let mut tensors = BTreeMap::new();
        for name in &TENSORS[..usize::from(script.byte() % 4)] {
            let usual = u64::from(script.byte()) % (others.len() as u64 + 1);
            let of = script.near(usual) as u32;
            let (offset, bytes) = (script.near(start(200)), script.near(64));
            // Of what stands there, where that is in the object.
            let mut there = vec![0; 64];
            let sum = match object.read_at(self.memory(), offset, &mut there) {
                Ok(()) if script.byte() < 192 => XxHash3_128::oneshot(&there),
                _ => u128::from(script.word()),
            };
            tensors.insert((*name).to_owned(), Tensor { object: of, offset, bytes, sum });
        }
        let mut encoded = Manifest { others, tensors }.encode();
        for _ in 0..script.byte() % 2 {
            let at = usize::from(script.byte()) % encoded.len();
            encoded[at] = script.byte();
        }
        let room = (object.bytes() - MANIFEST_LINE * LINE) as usize;
        let fits = &encoded[..encoded.len().min(room)];
        object.write_at(self.memory(), MANIFEST_LINE * LINE, fits).expect("ordinary memory");
        let head = Head {
            manifest_bytes: script.near(fits.len() as u64),
            sum: XxHash3_128::oneshot(fits),
            attempt: 0,
        };
        let [low, high] = halves(head.sum);
        let words = [*number, stamp(object), head.manifest_bytes, low, high, 0, 0];
        let mut words = words.map(|word| if script.byte() < 16 { script.near(word) } else { word });
        // Whether the head is any is a matter of these two.
        words[0] = if script.byte() < 16 { script.near(*number) } else { *number };
        line::publish(self.memory(), object.at().lines(HEAD_LINE), &words);
    }

    /// Writes any word of any object of the store, also of the victim's.
    fn write_word(&self, script: &mut Script<'_>) {
        let listed = self.peer.pool.list("/version/").unwrap_or_default();
        let Some(object) = listed.get(usize::from(script.byte()) % listed.len().max(1)) else { return };
        if object.bytes >= 8 {
            let at = object.at.word(script.word() % (object.bytes / 8));
            self.memory().store(at, script.word());
        }
    }

    /// Says in the marks that some version is published.
    fn write_mark(&self, script: &mut Script<'_>) {
        let Ok(marks) = self.peer.marks_or_new() else { return };
        let at: Offset = marks.at().lines((script.byte() % 2).into());
        let number = script.of(&NUMBERS) & ((1 << word::BITS) - 1);
        let sealed = word::seal(number);
        self.memory().store(at, script.near(sealed));
        self.peer.pool.close(marks);
    }

    // The victim.

    fn act(&self, script: &mut Script<'_>) {
        let number = script.of(&NUMBERS);
        match script.byte() % 8 {
            0 | 1 => self.judge(self.victim.newest(), script),
            2 => self.judge(self.victim.open(number), script),
            3 => {
                let versions = self.victim.versions().unwrap_or_default();
                assert!(versions.is_sorted(), "{versions:?}");
            }
            4 => self.publish(script, Some(number)),
            5 => drop(self.victim.remove()),
            _ => self.publish(script, None),
        }
        // What a host gives back is room for the next.
        if script.byte() < 64 {
            drop((self.victim.pool.maintain(), self.peer.pool.maintain()));
        }
    }

    /// A version: its bytes lie in the region, and match their checksums.
    fn judge(&self, found: Result<Version<Heap>, PoolError>, script: &mut Script<'_>) {
        let Ok(version) = found else { return };
        let tensors: Vec<_> = version.tensors().map(|(name, bytes)| (name.to_owned(), bytes)).collect();
        for (name, bytes) in tensors {
            assert!(bytes <= BYTES, "{name} has {bytes} bytes");
            let mut into = vec![0; bytes as usize];
            match version.read(&name, &mut into) {
                Ok(()) | Err(PoolError::Corrupt { .. }) => {}
                Err(error) => panic!("{name} of {}: {error}", version.number()),
            }
        }
        let strange = version.read("none of it", &mut vec![0; script.byte().into()]);
        assert!(matches!(strange, Err(PoolError::Argument { .. })), "{strange:?}");
    }

    /// What was published, and what nobody has touched since, is found.
    fn publish(&self, script: &mut Script<'_>, over: Option<u64>) {
        let byte = script.byte();
        let bytes = [vec![byte; script.of(&[0, 64, 100])], vec![7; 200]];
        let tensors = [("a", &bytes[0][..]), ("b", &bytes[1][..])];
        let Ok(published) = self.victim.publish_over(&tensors, over) else { return };
        assert_eq!(published.copied + published.shared, (bytes[0].len() + bytes[1].len()) as u64);
        let version = self.victim.open(published.version).expect("it was published");
        for (name, bytes) in tensors {
            let mut read_back = vec![0; bytes.len()];
            match version.read(name, &mut read_back) {
                Ok(()) => assert!(read_back == bytes, "{name} of {published:?} holds other bytes"),
                // The peer may have said of other bytes that they are these.
                Err(PoolError::Corrupt { .. }) if published.shared > 0 => {}
                Err(error) => panic!("{name} of {published:?}: {error}"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hostile::tests::play;

    #[test]
    fn hostile_writers_cause_errors_and_never_a_panic() {
        play(2000, 600, drive);
    }
}
