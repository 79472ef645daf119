//! Operations with a buffer for each chunk, whose lengths may differ.

use polder_mem::Memory;
use polder_schedule::Collective;

use super::{Buffers, Call, Data, Operation};
use crate::PoolError;
use crate::group::{Group, MAX_BYTES};

/// What a rank tells each other before an all-to-all of lists, in words: the bytes of the chunk for it, and the most and the
/// fewest bytes of a chunk that the rank gives or gets.
const WORDS: usize = 3;
const TOLD: usize = WORDS * 8;

impl<M: Memory> Group<M> {
    pub(super) fn run_lists(
        &mut self,
        operation: &Operation,
        input: &[&[u8]],
        output: &mut [&mut [u8]],
    ) -> Result<(), PoolError> {
        let collective = operation.collective;
        if !collective.has_chunks() || (input.len(), output.len()) != self.chunks(operation) {
            return Err(misfit(collective, input, output));
        }
        let given = || input.iter().map(|part| part.len());
        let taken = || output.iter().map(|part| part.len());
        let chunk = given().chain(taken()).next().unwrap_or_default();
        match collective {
            Collective::AllToAll => self.exchange_lists(operation, input, output),
            Collective::AllGather if taken().any(|bytes| bytes != taken().next().unwrap_or_default()) => {
                self.gather_uneven(operation, input[0], output)
            }
            Collective::ReduceScatter if given().any(|bytes| bytes != chunk) => {
                self.scatter_uneven(operation, input, output[0])
            }
            _ if given().chain(taken()).any(|bytes| bytes != chunk) => Err(misfit(collective, input, output)),
            _ => {
                let call = self.call(operation, chunk)?;
                self.perform(&call, Data::lists(input, output, chunk))
            }
        }
    }

    /// An all-to-all in which only the two ranks of a chunk know its length. Ranks tell each other the lengths, and then exchange as
    /// many bytes of each chunk as the longest of any rank has; a chunk's own are copied.
    fn exchange_lists(
        &mut self,
        operation: &Operation,
        input: &[&[u8]],
        output: &mut [&mut [u8]],
    ) -> Result<(), PoolError> {
        let (rank, size) = (self.rank(), self.size());
        let lengths = || input.iter().map(|part| part.len()).chain(output.iter().map(|part| part.len()));
        if input[rank].len() != output[rank].len() {
            return Err(misfit(operation.collective, input, output));
        }
        // As each of them alone has to be.
        lengths().try_for_each(|bytes| self.call(operation, bytes).map(drop))?;
        let bounds = [lengths().max().unwrap_or_default(), lengths().min().unwrap_or_default()];
        let told = input.iter().flat_map(|part| [part.len(), bounds[0], bounds[1]]);
        let told: Vec<u8> = told.flat_map(|word| (word as u64).to_le_bytes()).collect();
        let mut heard = vec![0; size * TOLD];
        let telling = Call { tells_lengths: true, ..self.call(operation, TOLD)? };
        self.perform(&telling, Data::Apart { input: &told, output: &mut heard })?;
        let word = |peer: usize, at: usize| {
            let begin = peer * TOLD + at * 8;
            u64::from_le_bytes(heard[begin..begin + 8].try_into().expect("a word"))
        };
        let chunk = (0..size).map(|peer| word(peer, 1)).max().unwrap_or_default();
        let odd = (0..size).find(|&peer| {
            word(peer, 0) > word(peer, 1)
                || word(peer, 1) > MAX_BYTES
                || !word(peer, 1).is_multiple_of(operation.dtype.bytes() as u64)
        });
        if let Some(peer) = odd {
            return Err(self.fail(self.corrupt(peer)));
        }
        let differs = (0..size).find(|&peer| word(peer, 0) != output[peer].len() as u64);
        let mismatch = differs.map(|peer| PoolError::Mismatch {
            peer: self.peer(peer),
            theirs: format!("send of {} bytes ({})", word(peer, 0), operation.dtype),
            ours: format!("receive of {} bytes ({})", output[peer].len(), operation.dtype),
            sequence: self.sequence(),
        });
        let mut output: Vec<&mut [u8]> = output
            .iter_mut()
            .enumerate()
            .map(|(peer, part)| {
                let bytes = part.len().min(word(peer, 0) as usize);
                &mut part[..bytes]
            })
            .collect();
        let call = self.call(operation, chunk as usize)?;
        self.perform(&call, Data::lists(input, &mut output, chunk as usize))?;
        mismatch.map_or(Ok(()), Err)
    }

    /// An all-gather of chunks of several lengths: each rank's goes to all others by itself.
    fn gather_uneven(
        &mut self,
        operation: &Operation,
        input: &[u8],
        output: &mut [&mut [u8]],
    ) -> Result<(), PoolError> {
        let own = &mut output[self.rank()];
        expect_length(own.len(), input.len())?;
        own.copy_from_slice(input);
        let part = Operation { collective: Collective::Broadcast, ..*operation };
        (0..)
            .zip(output)
            .try_for_each(|(root, chunk)| self.run(&part.with_root(root), Buffers::InPlace(chunk)))
    }

    /// A reduce-scatter of chunks of several lengths: each is reduced to its rank by itself.
    fn scatter_uneven(
        &mut self,
        operation: &Operation,
        input: &[&[u8]],
        output: &mut [u8],
    ) -> Result<(), PoolError> {
        let rank = self.rank();
        expect_length(input[rank].len(), output.len())?;
        output.copy_from_slice(input[rank]);
        let part = Operation { collective: Collective::Reduce, ..*operation };
        (0..).zip(input).try_for_each(|(root, chunk)| match root == rank {
            true => self.run(&part.with_root(root), Buffers::InPlace(output)),
            false => self.run(&part.with_root(root), Buffers::InPlace(&mut chunk.to_vec())),
        })
    }
}

/// That a rank's own chunk and the other side of the call are of one length.
fn expect_length(chunk: usize, other: usize) -> Result<(), PoolError> {
    match chunk == other {
        true => Ok(()),
        false => Err(PoolError::Argument {
            what: "the chunk of this rank",
            value: format!("{chunk} bytes for {other}"),
            expected: "both of one length",
        }),
    }
}

fn misfit(collective: Collective, input: &[&[u8]], output: &[&mut [u8]]) -> PoolError {
    let lengths = input.iter().map(|part| part.len()).chain(output.iter().map(|part| part.len()));
    let value = format!(
        "{collective} of {} buffers to {}, of {:?} bytes",
        input.len(),
        output.len(),
        lengths.collect::<Vec<_>>()
    );
    let expected = "a collective with chunks, and one buffer for each chunk, all of one length";
    PoolError::Argument { what: "the list", value, expected }
}
