//! Moments of an optimizer in several tiers, and the step over them: what lies on a disk is read ahead and written back behind, while what
//! lies in memory has its turn.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;

use polder_kernels::{Factor, Gradients, KernelError, PIECE, Piece, Update, Work, step};

use crate::buffer::{Buffer, PAGE};
use crate::error::{StepError, TierError};
use crate::range::{Location, Place, Range, located};
use crate::tier::{PendingTransfer, TRANSFER_BYTES, TierFile};

/// Elements whose moments go to or from a disk together.
const TOGETHER: usize = TRANSFER_BYTES / 8;
/// Transfers that are under way at most, and so the memory that stages them.
const STAGED: usize = 6;

/// Moments of an optimizer in a range of elements, each of them 32 bits: the first ones in memory, by tier, the others on disks.
#[derive(Debug)]
pub struct Moments {
    /// Means and squares of what is in memory, each in one range; of Lion there are no squares.
    memory: [Range; 2],
    /// How many moments there are, 1 or 2.
    count: usize,
    /// Where each stripe of it begins, and how many elements it has.
    stripes: Vec<(usize, usize)>,
    in_memory: usize,
    on_disk: usize,
    disks: Vec<Disk>,
    staging: Vec<Buffer>,
    missed: Vec<String>,
}

/// Moments on a disk.
#[derive(Debug)]
struct Disk {
    /// Elements on the disks before it.
    begin: usize,
    elements: usize,
    file: TierFile,
}

/// A tensor of a step.
#[derive(Debug)]
pub struct Tensor<'a> {
    /// Where its elements begin among all: a multiple of [`PIECE`].
    pub begin: usize,
    /// Parameters, updated in place.
    pub parameters: &'a mut [f32],
    /// As many gradients.
    pub gradients: &'a [f32],
    /// The coefficients.
    pub update: Update,
}

impl Tensor<'_> {
    fn end(&self) -> usize {
        self.begin + self.parameters.len()
    }
}

impl Moments {
    /// `kept` lists elements in memory with the place of each, and `files` elements on disks with the folder of each. There are `count`
    /// moments of an element, 1 or 2. All are zeros.
    ///
    /// # Errors
    /// [`StepError`] for another number of moments, for elements that are no whole pages, and for a tier that is not there. What does not fit a
    /// tier of memory lies where the kernel puts it; see [`Moments::missed`].
    pub fn new(
        kept: &[(usize, Option<Place>)],
        files: &[(usize, PathBuf)],
        count: usize,
    ) -> Result<Self, StepError> {
        if !(1..=2).contains(&count) {
            return Err(StepError::Moments { count });
        }
        let mut sizes = kept.iter().map(|it| it.0).chain(files.iter().map(|it| it.0));
        if sizes.any(|elements| !elements.is_multiple_of(PAGE / 4)) {
            return Err(StepError::Pages { elements: PAGE / 4 });
        }
        let (mut stripes, mut in_memory) = (vec![], 0);
        for (elements, _) in kept {
            stripes.push((in_memory, *elements));
            in_memory += elements;
        }
        let squares = if count == 2 { in_memory } else { 0 };
        let mut memory = [Range::new(4 * in_memory)?, Range::new(4 * squares)?];
        let mut missed = vec![];
        for ((begin, elements), (_, place)) in stripes.iter().zip(kept) {
            for range in memory.iter_mut().take(count).filter(|_| *elements > 0) {
                match place.as_ref().map_or(Ok(()), |it| range.put(4 * begin, 4 * elements, it)) {
                    // What does not fit stays where the kernel puts it.
                    Err(error) if error.is_full() => missed.push(error.to_string()),
                    done => done?,
                }
            }
        }
        let (mut disks, mut on_disk) = (vec![], 0);
        for (elements, folder) in files.iter().filter(|(elements, _)| *elements > 0) {
            let file = TierFile::create(folder, (4 * count * elements) as u64)?;
            disks.push(Disk { begin: on_disk, elements: *elements, file });
            on_disk += elements;
        }
        let buffers = if on_disk > 0 { STAGED } else { 0 };
        let staging = (0..buffers).map(|_| Buffer::new(TRANSFER_BYTES)).collect::<Result<_, _>>()?;
        Ok(Self { memory, count, stripes, in_memory, on_disk, disks, staging, missed })
    }

    /// How many moments an element has, 1 or 2.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.count
    }

    /// Steps the optimizer over every tensor, on at most `threads` threads; tensors stand in the order of where they begin.
    ///
    /// # Errors
    /// [`StepError`]. After one of a disk some parameters and moments are those after the step, and the others those before it.
    pub fn step(
        &mut self,
        tensors: &mut [Tensor<'_>],
        factor: Factor,
        threads: usize,
    ) -> Result<(), StepError> {
        let elements = self.in_memory + self.on_disk;
        let mut end = 0;
        for tensor in &*tensors {
            if !tensor.begin.is_multiple_of(PIECE) || tensor.begin < end || tensor.end() > elements {
                return Err(StepError::Tensors { elements });
            }
            let (first, other) = (4 * tensor.parameters.len(), 4 * tensor.gradients.len());
            if first != other {
                return Err(KernelError::Sizes { first, other }.into());
            }
            end = tensor.end();
        }
        if self.disks.is_empty() {
            self.check()?;
            // All at once, so that threads work on every tier all the time.
            let (mean, square) = kept_moments(&mut self.memory, self.count, 0, self.in_memory);
            return Ok(step(work_of(tensors, &self.stripes, mean, square), factor, threads)?);
        }
        let Some(begin) = tensors.first().map(|first| first.begin) else { return Ok(()) };
        let mut failed = None;
        self.each(begin, end, true, |begin, mean, square| {
            let work = work_of(tensors, &[(begin, mean.len())], mean, square);
            if let Err(error) = step(work, factor, threads) {
                failed.get_or_insert(error);
            }
        })?;
        failed.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Copies moments from element `begin` on into `mean` and `square`; the second is empty where there is one moment.
    ///
    /// # Errors
    /// [`StepError`] when there are not so many elements, and when a tier fails.
    ///
    /// # Panics
    /// When the arrays have other lengths than that.
    pub fn save(&mut self, begin: usize, mean: &mut [f32], square: &mut [f32]) -> Result<(), StepError> {
        self.pass(begin, mean.len(), false, |at, kept_mean, kept_square| {
            mean[at..at + kept_mean.len()].copy_from_slice(kept_mean);
            if !kept_square.is_empty() {
                square[at..at + kept_square.len()].copy_from_slice(kept_square);
            }
        })
    }

    /// Copies `mean` and `square` over the moments from element `begin` on; the second is empty where there is one moment.
    ///
    /// # Errors
    /// Those of [`Moments::save`].
    ///
    /// # Panics
    /// As [`Moments::save`].
    pub fn load(&mut self, begin: usize, mean: &[f32], square: &[f32]) -> Result<(), StepError> {
        self.pass(begin, mean.len(), true, |at, kept_mean, kept_square| {
            kept_mean.copy_from_slice(&mean[at..at + kept_mean.len()]);
            if !kept_square.is_empty() {
                kept_square.copy_from_slice(&square[at..at + kept_square.len()]);
            }
        })
    }

    /// Bytes in each place of memory, as the kernel says.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn locate(&self) -> Result<BTreeMap<Location, usize>, TierError> {
        located(self.memory.iter().take(self.count))
    }

    /// Why stripes lie in memory of the kernel's choice: their tiers had no room.
    #[must_use]
    pub fn missed(&self) -> &[String] {
        &self.missed
    }

    /// Bytes of each file, and of the memory that stages them.
    #[must_use]
    pub fn on_disk(&self) -> (Vec<u64>, usize) {
        (self.disks.iter().map(|it| it.file.size()).collect(), self.staging.len() * TRANSFER_BYTES)
    }

    /// Whether all memory that is mapped is still there.
    fn check(&self) -> Result<(), TierError> {
        self.memory.iter().try_for_each(Range::check)
    }

    /// Calls `f` with the moments of a range, piece by piece, and where in the range each begins.
    fn pass(
        &mut self,
        begin: usize,
        elements: usize,
        write: bool,
        mut f: impl FnMut(usize, &mut [f32], &mut [f32]),
    ) -> Result<(), StepError> {
        if begin + elements > self.in_memory + self.on_disk {
            return Err(StepError::End { elements: self.in_memory + self.on_disk });
        }
        self.each(begin, begin + elements, write, |at, mean, square| {
            let (from, to) = (at.max(begin), (at + mean.len()).min(begin + elements));
            let mut square = square;
            f(from - begin, &mut mean[from - at..to - at], behind(&mut square, from - at, to - from));
        })?;
        Ok(())
    }

    /// Calls `f` with every piece that has elements of a range: its beginning and its moments. Pieces on disk are read
    /// ahead, and written back behind, while those in memory have their turn.
    fn each(
        &mut self,
        begin: usize,
        end: usize,
        write: bool,
        mut f: impl FnMut(usize, &mut [f32], &mut [f32]),
    ) -> Result<(), TierError> {
        self.check()?;
        // A transfer that failed has kept its buffer.
        while self.staging.len() < if self.on_disk > 0 { STAGED } else { 0 } {
            self.staging.push(Buffer::new(TRANSFER_BYTES)?);
        }
        let (mut reading, mut writing) = (VecDeque::new(), VecDeque::new());
        let done = self.move_each(begin, end, write, &mut f, &mut reading, &mut writing);
        // After an error a transfer may be under way: what the next call writes must not be overtaken by it.
        for (.., transfer) in reading {
            let _ = transfer.wait();
        }
        for transfer in writing {
            let _ = transfer.wait();
        }
        done
    }

    /// What [`Moments::each`] does. Transfers that are under way are left in the queues only after an error.
    fn move_each(
        &mut self,
        begin: usize,
        end: usize,
        write: bool,
        f: &mut impl FnMut(usize, &mut [f32], &mut [f32]),
        reading: &mut VecDeque<(usize, usize, usize, PendingTransfer)>,
        writing: &mut VecDeque<PendingTransfer>,
    ) -> Result<(), TierError> {
        // Bytes of an element on a disk.
        let (first, width) = (self.in_memory, 4 * self.count);
        let mut kept: VecDeque<(usize, usize)> = self
            .stripes
            .iter()
            .flat_map(|(at, elements)| pieces(*at, *elements))
            .filter(|(at, count)| *at < end && at + count > begin)
            .collect();
        let mut far: VecDeque<(usize, usize, usize)> = in_turn(&self.disks)
            .into_iter()
            .filter(|(_, at, count)| first + at < end && first + at + count > begin)
            .collect();
        let mut ready: Option<(usize, usize, usize, Buffer)> = None;
        loop {
            while let Some((index, at, count)) = far.front().copied() {
                let Some(buffer) = self.staging.pop() else { break };
                far.pop_front();
                let Disk { begin, file, .. } = &self.disks[index];
                let transfer = file.read((width * (at - begin)) as u64, width * count, buffer)?;
                reading.push_back((index, at, count, transfer));
            }
            if ready.is_none()
                && let Some((index, at, count, transfer)) = reading.pop_front()
            {
                // With nothing else to do, waits.
                if kept.is_empty() {
                    ready = Some((index, at, count, transfer.wait()?));
                } else {
                    match transfer.poll()? {
                        Ok(buffer) => ready = Some((index, at, count, buffer)),
                        Err(transfer) => reading.push_front((index, at, count, transfer)),
                    }
                }
            }
            if let Some((index, at, count, mut buffer)) = ready.take() {
                let (mean, square) = floats(&mut buffer[..width * count]).split_at_mut(count);
                f(first + at, mean, square);
                if write {
                    let Disk { begin, file, .. } = &self.disks[index];
                    let transfer = file.write((width * (at - begin)) as u64, width * count, buffer);
                    writing.push_back(transfer?);
                } else {
                    self.staging.push(buffer);
                }
            } else if let Some((at, count)) = kept.pop_front() {
                let (mean, square) = kept_moments(&mut self.memory, self.count, at, count);
                f(at, mean, square);
            } else if reading.is_empty() && far.is_empty() {
                break;
            }
            // The next read needs a buffer that a write has.
            while let Some(transfer) = writing.pop_front() {
                if kept.is_empty() && self.staging.is_empty() && reading.is_empty() {
                    self.staging.push(transfer.wait()?);
                    continue;
                }
                match transfer.poll()? {
                    Ok(buffer) => self.staging.push(buffer),
                    Err(transfer) => {
                        writing.push_front(transfer);
                        break;
                    }
                }
            }
        }
        while let Some(transfer) = writing.pop_front() {
            self.staging.push(transfer.wait()?);
        }
        Ok(())
    }
}

/// What a step does to the moments of adjacent stripes, given by where they begin and how many elements they have: a piece for each tensor that
/// has elements in a stripe.
fn work_of<'a>(
    tensors: &'a mut [Tensor<'_>],
    stripes: &[(usize, usize)],
    mut mean: &'a mut [f32],
    mut square: &'a mut [f32],
) -> Vec<Work<'a>> {
    let mut work = vec![];
    let Some(mut done) = stripes.first().map(|(begin, _)| *begin) else { return work };
    let end = done + mean.len();
    let first = tensors.partition_point(|it| it.end() <= done);
    for tensor in tensors[first..].iter_mut().take_while(|it| it.begin < end) {
        let (last, mut at) = (tensor.end(), tensor.begin);
        let mut parameters = &mut *tensor.parameters;
        for (stripe, (begin, elements)) in stripes.iter().enumerate() {
            // Both ends are multiples of `PIECE` from the tensor's beginning, or the tensor's own.
            let (from, to) = (at.max(*begin), last.min(begin + elements));
            if from >= to {
                continue;
            }
            let (skipped, count) = (from - done, to - from);
            let piece = Piece {
                parameters: behind(&mut parameters, from - at, count),
                gradients: Gradients::F32(&tensor.gradients[from - tensor.begin..to - tensor.begin]),
                mean: behind(&mut mean, skipped, count),
                square: behind(&mut square, skipped, count),
                copy: None,
            };
            (at, done) = (to, to);
            work.push(Work { update: tensor.update, piece, stripe });
        }
    }
    work
}

/// Takes `count` elements that begin after `skipped` out of a slice, and leaves what comes after them. Of an empty slice it
/// takes nothing.
fn behind<'a>(slice: &mut &'a mut [f32], skipped: usize, count: usize) -> &'a mut [f32] {
    if slice.is_empty() {
        return &mut [];
    }
    let (taken, rest) = std::mem::take(slice)[skipped..].split_at_mut(count);
    *slice = rest;
    taken
}

/// What of elements from `begin` on goes together.
fn pieces(begin: usize, elements: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..elements).step_by(TOGETHER).map(move |at| (begin + at, TOGETHER.min(elements - at)))
}

/// Pieces of all disks: the number of each one's disk, its beginning and its elements. Disks take turns, so that all work
/// until the last has done its part.
fn in_turn(disks: &[Disk]) -> Vec<(usize, usize, usize)> {
    let mut all: Vec<(f64, (usize, usize, usize))> = vec![];
    for (index, disk) in disks.iter().enumerate() {
        for (at, count) in pieces(disk.begin, disk.elements) {
            all.push(((at - disk.begin) as f64 / disk.elements as f64, (index, at, count)));
        }
    }
    all.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    all.into_iter().map(|(_, piece)| piece).collect()
}

/// Means and squares of elements in memory; of one moment no squares.
fn kept_moments(
    memory: &mut [Range; 2],
    moments: usize,
    at: usize,
    count: usize,
) -> (&mut [f32], &mut [f32]) {
    let [mean, square] = memory;
    let square = if moments == 2 { elements_of(square, at, count) } else { &mut [] };
    (elements_of(mean, at, count), square)
}

/// Elements of a range of numbers.
fn elements_of(range: &mut Range, at: usize, count: usize) -> &mut [f32] {
    assert!(4 * (at + count) <= range.bytes(), "elements inside the range");
    // SAFETY: inside the range, aligned, of any bits, and borrowed with the range, whose address nothing else has.
    unsafe { std::slice::from_raw_parts_mut(range.address().cast::<f32>().add(at), count) }
}

/// Bytes of a page-aligned buffer as numbers.
fn floats(bytes: &mut [u8]) -> &mut [f32] {
    // SAFETY: every pattern of bits is a float, and the middle of what is aligned to pages is all of it.
    let (before, floats, after) = unsafe { bytes.align_to_mut::<f32>() };
    debug_assert!(before.is_empty() && after.is_empty());
    floats
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use polder_kernels::{Adam, Lion};
    use polder_mem::testing::Scratch;

    use super::*;
    use crate::testing::{disk, full};

    const FACTOR: Factor = Factor { scale: 2.0, clip: 0.5 };
    const ADAM: Adam =
        Adam { lr: 0.01, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, is_decoupled: true };

    fn values(elements: usize, seed: u32) -> Vec<f32> {
        let value = |at: u32| (at ^ seed).wrapping_mul(2_654_435_761) as f32 / u32::MAX as f32 - 0.5;
        (0..elements as u32).map(value).collect()
    }

    /// Parameters and moments after three steps over tensors with gaps between them.
    fn trained(mut moments: Moments, update: impl Fn(f64) -> Update) -> [Vec<f32>; 3] {
        let elements = moments.in_memory + moments.on_disk;
        let mut parameters = values(elements, 1);
        for number in 1..=3 {
            let gradients = values(elements, 10 + number);
            // Neither begins or ends with a stripe or a piece; between the two nothing is touched.
            let (first, second) = parameters.split_at_mut(elements / 2 / PIECE * PIECE);
            let tensor = |begin: usize, parameters| -> Tensor<'_> {
                let update = update(f64::from(number));
                let all: &mut [f32] = parameters;
                Tensor { begin, gradients: &gradients[begin..begin + all.len()], parameters: all, update }
            };
            let at = first.len();
            let mut tensors = [
                tensor(PIECE, &mut first[PIECE..at - 3]),
                tensor(at + 2 * PIECE, &mut second[2 * PIECE..elements - at - 7]),
            ];
            moments.step(&mut tensors, FACTOR, 2).expect("stepped");
        }
        let squares = if moments.count == 2 { elements } else { 0 };
        let (mut mean, mut square) = (vec![0.0; elements], vec![0.0; squares]);
        moments.save(0, &mut mean, &mut square).expect("saved");
        [parameters, mean, square]
    }

    fn bits(of: &[Vec<f32>; 3]) -> Vec<u32> {
        of.iter().flatten().map(|it| it.to_bits()).collect()
    }

    #[test]
    fn a_step_over_stripes_and_disks_has_the_bits_of_a_step_over_memory() {
        let kept = [(TOGETHER + 1024, None), (0, None), (2048, Some(Place::Node(0)))];
        let files = [(2 * TOGETHER + 1024, disk()), (0, disk()), (TOGETHER, disk())];
        let all = 4 * TOGETHER + 4096;
        let made = |kept: &[_], files: &[_], count| Moments::new(kept, files, count).expect("moments");
        let lion = Lion { lr: 0.01, beta1: 0.9, beta2: 0.99, weight_decay: 0.01 };
        let rules: [(usize, &dyn Fn(f64) -> Update); 2] =
            [(2, &|step| ADAM.update(step)), (1, &|_| lion.update())];
        for (count, rule) in rules {
            let plain = bits(&trained(made(&[(all, None)], &[], count), rule));
            let striped = [(TOGETHER, None), (1024, None), (all - TOGETHER - 1024, None)];
            assert!(plain == bits(&trained(made(&striped, &[], count), rule)), "{count}: stripes");
            assert!(plain == bits(&trained(made(&kept, &files, count), rule)), "{count}: disks");
            assert!(
                plain == bits(&trained(made(&[], &[(all, disk())], count), rule)),
                "{count}: a disk alone"
            );
        }
    }

    #[test]
    fn what_lies_on_a_disk_is_read_while_memory_has_its_turn_through_few_buffers() {
        let mut moments =
            Moments::new(&[(20 * TOGETHER, None)], &[(9 * TOGETHER, disk())], 2).expect("moments");
        let mut order = vec![];
        moments
            .each(0, 29 * TOGETHER, true, |at, mean, square| {
                assert_eq!((mean.len(), square.len()), (TOGETHER, TOGETHER));
                std::thread::sleep(Duration::from_millis(10));
                order.push(at / TOGETHER);
            })
            .expect("passed");
        let first = order.iter().position(|it| *it >= 20).expect("on the disk");
        assert!(first < 20, "the disk only had its turn after memory: {order:?}");
        order.sort_unstable();
        assert!(order.into_iter().eq(0..29), "each piece once");
        assert_eq!(moments.on_disk(), (vec![72 * TOGETHER as u64], STAGED * TRANSFER_BYTES));
    }

    #[test]
    fn moments_come_back_as_they_were_loaded() {
        let mut moments =
            Moments::new(&[(TOGETHER, None)], &[(TOGETHER + 1024, disk())], 2).expect("moments");
        let (mean, square) = (values(TOGETHER, 3), values(TOGETHER, 4));
        moments.load(TOGETHER / 2, &mean, &square).expect("loaded");
        let (mut again, mut squares) = (vec![1.0; 2 * TOGETHER + 1024], vec![1.0; 2 * TOGETHER + 1024]);
        moments.save(0, &mut again, &mut squares).expect("saved");
        for (found, given) in [(again, mean), (squares, square)] {
            let (before, rest) = found.split_at(TOGETHER / 2);
            let (within, after) = rest.split_at(TOGETHER);
            assert!(within == given && before.iter().chain(after).all(|it| *it == 0.0));
        }
    }

    /// One step over all elements.
    fn step_all(moments: &mut Moments) -> Result<(), StepError> {
        let elements = moments.in_memory + moments.on_disk;
        let (mut parameters, gradients) = (vec![1.0; elements], vec![1.0; elements]);
        let tensor =
            Tensor { begin: 0, parameters: &mut parameters, gradients: &gradients, update: ADAM.update(1.0) };
        moments.step(&mut [tensor], FACTOR, 1)
    }

    #[test]
    fn a_step_whose_file_was_cut_fails_and_so_does_the_next_without_more_memory() {
        let mut moments = Moments::new(&[(1024, None)], &[(8 * TOGETHER, disk())], 2).expect("moments");
        step_all(&mut moments).expect("whole");
        moments.disks[0].file.cut(3 * TRANSFER_BYTES as u64);
        for _ in 0..3 {
            let failed = step_all(&mut moments).expect_err("cut");
            assert!(matches!(failed, StepError::Tier(TierError::Truncated { .. } | TierError::Holes { .. })));
            assert!(moments.on_disk().1 <= STAGED * TRANSFER_BYTES);
        }
    }

    #[test]
    fn a_disk_without_room_is_found_when_it_is_reserved_and_when_it_is_written() {
        let failed = Moments::new(&[], &[(1 << 46, disk())], 2).expect_err("a disk of 512 TiB");
        assert!(matches!(failed, StepError::Tier(TierError::Full { .. })), "{failed}");
        let mut moments = Moments::new(&[], &[(8 * TOGETHER, disk())], 2).expect("moments");
        moments.disks[0].file = full(8 * TRANSFER_BYTES as u64);
        let failed = step_all(&mut moments).expect_err("full");
        assert!(matches!(failed, StepError::Tier(TierError::Full { .. })), "{failed}");
        let (mut mean, mut square) = (vec![1.0; TOGETHER], vec![1.0; TOGETHER]);
        moments.save(0, &mut mean, &mut square).expect("it is read as zeros");
        assert!(mean.iter().chain(&square).all(|it| *it == 0.0));
    }

    #[test]
    fn a_stripe_that_its_tier_has_no_room_for_lies_in_memory_and_is_named() {
        let scratch = Scratch::new();
        let card = scratch.path().join("card");
        std::fs::write(&card, vec![0_u8; 2 * PAGE]).expect("a file in memory");
        let place = Some(Place::Device(card.clone()));
        let mut moments = Moments::new(&[(1024, place.clone()), (2048, place)], &[], 2).expect("moments");
        assert_eq!(moments.missed().len(), 2, "{:?}", moments.missed());
        assert!(moments.missed()[0].contains("no 8192 bytes in a row are free of its 8192"));
        step_all(&mut moments).expect("stepped");
        let located = moments.locate().expect("asked");
        assert_eq!(located.get(&Location::Mapped(card)), Some(&(2 * PAGE)));
        assert_eq!(located.values().sum::<usize>(), 2 * 4 * 3072);
    }

    #[test]
    fn what_is_no_step_is_refused_before_anything_is_written() {
        let said = |made: Result<Moments, StepError>| made.expect_err("refused").to_string();
        assert_eq!(said(Moments::new(&[], &[], 3)), "expected 1 or 2 moments, found 3");
        assert_eq!(
            said(Moments::new(&[(1023, None)], &[], 2)),
            "states are placed in whole pages of 1024 elements"
        );
        let mut moments = Moments::new(&[(1024, None)], &[], 2).expect("moments");
        for places in [[0, 64], [64, 0], [0, 32], [128, 960]] {
            let (mut parameters, gradients) = (vec![1.0; 256], [1.0; 128]);
            let halves = parameters.chunks_exact_mut(128);
            let mut tensors: Vec<_> = halves
                .zip(places)
                .map(|(parameters, begin)| Tensor {
                    begin,
                    parameters,
                    gradients: &gradients,
                    update: ADAM.update(1.0),
                })
                .collect();
            let said = moments.step(&mut tensors, FACTOR, 1).expect_err("refused").to_string();
            assert!(said.ends_with("begin at multiples of 64 elements and end by 1024"), "{said}");
        }
        let (mut parameters, gradients) = ([1.0; 128], [1.0; 64]);
        let tensor =
            Tensor { begin: 0, parameters: &mut parameters, gradients: &gradients, update: ADAM.update(1.0) };
        let failed = moments.step(&mut [tensor], FACTOR, 1).expect_err("sizes");
        assert!(matches!(failed, StepError::Kernel(_)), "{failed}");
        let failed = moments.load(960, &[1.0; 128], &[1.0; 128]).expect_err("past the end").to_string();
        assert_eq!(failed, "expected elements up to 1024");
        let (mut mean, mut square) = (vec![1.0; 1024], vec![1.0; 1024]);
        moments.save(0, &mut mean, &mut square).expect("saved");
        assert!(mean.iter().chain(&square).all(|it| *it == 0.0));
    }
}
