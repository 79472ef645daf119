//! Every collective against the plainest thing that could compute it.

use std::sync::Mutex;

use super::*;
use crate::group::GroupOptions;
use crate::group::tests::{on_threads, on_threads_with, quick};

/// One host, a host for each rank, and mixed hosts.
const PLACES: [&[u16]; 7] =
    [&[0], &[0, 0], &[0, 1], &[0, 1, 2], &[0, 0, 1, 1], &[1, 0, 1, 1, 2], &[0, 0, 1, 1, 2, 2, 3, 3]];

/// Elements of 4 bytes: none, one, odd, over a segment, over many.
const COUNTS: [usize; 6] = [0, 1, 7, 100, 1001, 5000];

/// GroupOptions with which a few kilobytes take many rounds.
fn small() -> GroupOptions {
    GroupOptions { staging_bytes: 8192, segment_bytes: 256, direct_bytes: 64, ..quick() }
}

fn input(rank: usize, salt: usize, count: usize) -> Vec<u32> {
    (0..count).map(|index| (index * 31 + rank * 1009 + salt * 7 + 1) as u32).collect()
}

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn sum(ranks: usize, salt: usize, count: usize) -> Vec<u32> {
    let add = |sum: Vec<u32>, rank| sum.iter().zip(input(rank, salt, count)).map(|(a, b)| a + b).collect();
    (0..ranks).fold(vec![0; count], add)
}

const SUM: Operation = Operation::reducing(Collective::ReduceScatter, Op::Sum, Dtype::U32);

/// `collective` with `root`, from `input` to `output`; a reduce-scatter sums.
fn apart(
    group: &mut Group<polder_mem::Heap>,
    (collective, root): (Collective, usize),
    input: &[u8],
    output: &mut [u8],
) -> Result<(), PoolError> {
    let combines = matches!(collective, Collective::ReduceScatter | Collective::AllReduce);
    let operation = Operation { collective, root, dtype: Dtype::U32, reduction: combines.then_some(Op::Sum) };
    group.run(&operation, Buffers::Apart { input, output })
}

/// Runs `body` for all places and counts: (group, root, count).
fn everywhere(body: impl Fn(&mut Group<polder_mem::Heap>, usize, usize) + Sync) {
    for hosts in PLACES {
        on_threads(hosts, small(), |group| {
            for (round, count) in COUNTS.into_iter().enumerate() {
                body(group, round % group.size(), count);
            }
            group.barrier().unwrap();
        });
    }
}

#[test]
fn all_reduce_gives_every_rank_the_sum() {
    everywhere(|group, salt, count| {
        let expected = bytes(&sum(group.size(), salt, count));
        let mut data = bytes(&input(group.rank(), salt, count));
        let mut output = vec![0xee; data.len()];
        apart(group, (Collective::AllReduce, 0), &data, &mut output).unwrap();
        group.all_reduce(Op::Sum, Dtype::U32, &mut data).unwrap();
        assert!(output == expected && data == expected, "{count} elements on rank {}", group.rank());
    });
}

#[test]
fn reduce_gives_the_root_the_sum_and_leaves_the_others_data() {
    everywhere(|group, root, count| {
        let own = bytes(&input(group.rank(), 3, count));
        let mut data = own.clone();
        let reduce = Operation { collective: Collective::Reduce, root, ..SUM };
        group.run(&reduce, Buffers::InPlace(&mut data)).unwrap();
        let expected = if group.rank() == root { bytes(&sum(group.size(), 3, count)) } else { own };
        assert!(data == expected, "{count} elements on rank {} for root {root}", group.rank());
    });
}

#[test]
fn broadcast_gives_every_rank_the_roots_data() {
    everywhere(|group, root, count| {
        let mut data = bytes(&input(group.rank(), 5, count));
        group.broadcast(root, Dtype::U32, &mut data).unwrap();
        assert!(data == bytes(&input(root, 5, count)), "{count} elements on rank {}", group.rank());
    });
}

#[test]
fn reduce_scatter_gives_every_rank_its_chunk_of_the_sum() {
    everywhere(|group, salt, count| {
        let (rank, ranks) = (group.rank(), group.size());
        let mut data = bytes(&input(rank, salt, count * ranks));
        let expected = &bytes(&sum(ranks, salt, count * ranks))[rank * count * 4..(rank + 1) * count * 4];
        let mut output = vec![0xee; count * 4];
        apart(group, (Collective::ReduceScatter, 0), &data, &mut output).unwrap();
        group.run(&SUM, Buffers::InPlace(&mut data)).unwrap();
        assert!(output == expected, "{count} elements on rank {rank}");
        let mut in_place = bytes(&input(rank, salt, count * ranks));
        in_place[rank * count * 4..(rank + 1) * count * 4].copy_from_slice(expected);
        assert!(data == in_place, "{count} elements in place on rank {rank}");
    });
}

#[test]
fn all_gather_gives_every_rank_all_inputs() {
    everywhere(|group, salt, count| {
        let (rank, ranks) = (group.rank(), group.size());
        let own = bytes(&input(rank, salt, count));
        let expected: Vec<u8> = (0..ranks).flat_map(|peer| bytes(&input(peer, salt, count))).collect();
        let (mut output, mut data) = (vec![0xee; expected.len()], vec![0xee; expected.len()]);
        data[rank * count * 4..(rank + 1) * count * 4].copy_from_slice(&own);
        apart(group, (Collective::AllGather, 0), &own, &mut output).unwrap();
        let gather = Operation::moving(Collective::AllGather, Dtype::U32);
        group.run(&gather, Buffers::InPlace(&mut data)).unwrap();
        assert!(output == expected && data == expected, "{count} elements on rank {rank}");
    });
}

#[test]
fn gather_and_scatter_are_each_others_inverse() {
    everywhere(|group, root, count| {
        let (rank, ranks) = (group.rank(), group.size());
        let own = bytes(&input(rank, 9, count));
        let mut all = if rank == root { vec![0xee; own.len() * ranks] } else { vec![] };
        apart(group, (Collective::Gather, root), &own, &mut all).unwrap();
        if rank == root {
            assert!(all == (0..ranks).flat_map(|peer| bytes(&input(peer, 9, count))).collect::<Vec<_>>());
        }
        let mut back = vec![0xee; own.len()];
        apart(group, (Collective::Scatter, root), &all, &mut back).unwrap();
        assert!(back == own, "{count} elements on rank {rank}");
    });
}

#[test]
fn all_to_all_transposes() {
    everywhere(|group, salt, count| {
        let (rank, ranks) = (group.rank(), group.size());
        let own = bytes(&input(rank, salt, count * ranks));
        let mut output = vec![0xee; own.len()];
        apart(group, (Collective::AllToAll, 0), &own, &mut output).unwrap();
        let chunk = |peer| {
            bytes(&input(peer, salt, count * ranks))[rank * count * 4..(rank + 1) * count * 4].to_vec()
        };
        assert!(output == (0..ranks).flat_map(chunk).collect::<Vec<_>>(), "{count} elements on rank {rank}");
    });
}

#[test]
fn lists_of_buffers_give_what_one_buffer_gives() {
    everywhere(|group, root, count| {
        let (rank, ranks, chunk) = (group.rank(), group.size(), count * 4);
        let own = bytes(&input(rank, 13, count * ranks));
        let parts: Vec<&[u8]> = (0..ranks).map(|at| &own[at * chunk..(at + 1) * chunk]).collect();
        let is_root = rank == root;
        for collective in [
            Collective::AllGather,
            Collective::Gather,
            Collective::Scatter,
            Collective::ReduceScatter,
            Collective::AllToAll,
        ] {
            let (sends_all, takes_all) = match collective {
                Collective::AllGather => (false, true),
                Collective::Gather => (false, is_root),
                Collective::Scatter => (is_root, false),
                Collective::ReduceScatter => (true, false),
                _ => (true, true),
            };
            let mut whole = vec![0xee; if takes_all { chunk * ranks } else { chunk }];
            let all = if sends_all { &own[..] } else { parts[0] };
            let into = if collective == Collective::Gather && !is_root { &mut [] } else { &mut whole[..] };
            apart(group, (collective, root), all, into).unwrap();
            let mut listed = vec![vec![0xee; chunk]; if takes_all { ranks } else { 1 }];
            let mut output: Vec<&mut [u8]> = listed.iter_mut().map(Vec::as_mut_slice).collect();
            let sends_none = collective == Collective::Scatter && !is_root;
            let takes_none = collective == Collective::Gather && !is_root;
            let input = if sends_none {
                &[]
            } else if sends_all {
                &parts[..]
            } else {
                &parts[..1]
            };
            let output = if takes_none { &mut [] } else { &mut output[..] };
            let reduction = SUM.reduction.filter(|_| collective == Collective::ReduceScatter);
            let operation = Operation { collective, root, reduction, ..SUM };
            group.run(&operation, Buffers::Lists { input, output }).unwrap();
            assert!(listed.concat() == whole, "{collective} of {count} elements on rank {rank}");
        }
        for operation in [SUM, Operation::moving(Collective::AllGather, Dtype::U32)] {
            let refused = group.run(&operation, Buffers::Lists { input: &parts, output: &mut [] });
            assert!(matches!(refused, Err(PoolError::Argument { .. })), "{refused:?}");
        }
    });
}

/// What rank `from` has for rank `to`: of many lengths, and nothing for some.
fn part(from: usize, to: usize, count: usize) -> Vec<u8> {
    bytes(&input(from, to, count * ((from * 2 + to * 3) % 4)))
}

#[test]
fn an_all_to_all_takes_parts_whose_lengths_only_their_two_ranks_know() {
    everywhere(|group, salt, count| {
        let (rank, ranks) = (group.rank(), group.size());
        let given: Vec<Vec<u8>> = (0..ranks).map(|to| part(rank, to, count)).collect();
        let given: Vec<&[u8]> = given.iter().map(Vec::as_slice).collect();
        let expected: Vec<Vec<u8>> = (0..ranks).map(|from| part(from, rank, count)).collect();
        let mut taken: Vec<Vec<u8>> = expected.iter().map(|part| vec![0xee; part.len()]).collect();
        let operation = Operation::moving(Collective::AllToAll, Dtype::U32);
        let mut output: Vec<&mut [u8]> = taken.iter_mut().map(Vec::as_mut_slice).collect();
        group.run(&operation, Buffers::Lists { input: &given, output: &mut output }).unwrap();
        assert!(taken == expected, "{count} elements on rank {rank}");

        // Rank 0 expects a word less of the last than it sends. Only rank 0 is told, and all go on.
        let last = ranks - 1;
        let odd = rank == 0 && last > 0 && !expected[last].is_empty();
        if odd {
            taken[last].truncate(expected[last].len() - 4);
        }
        let mut output: Vec<&mut [u8]> = taken.iter_mut().map(Vec::as_mut_slice).collect();
        let outcome = group.run(&operation, Buffers::Lists { input: &given, output: &mut output });
        match outcome {
            Err(PoolError::Mismatch { peer, theirs, ours, .. }) if odd => {
                let bytes = expected[last].len();
                assert_eq!(peer.rank, Some(last as u32));
                assert_eq!(theirs, format!("send of {bytes} bytes (uint32)"));
                assert_eq!(ours, format!("receive of {} bytes (uint32)", bytes - 4));
            }
            outcome => assert!(outcome.is_ok() && !odd, "rank {rank}: {outcome:?}"),
        }
        let cut = |at: usize| if odd && at == last { taken[at].len() } else { expected[at].len() };
        assert!((0..ranks).all(|at| taken[at] == expected[at][..cut(at)]), "{salt} {count} on rank {rank}");
    });
}

#[test]
fn lists_of_several_lengths_that_all_ranks_know_are_gathered_and_reduced() {
    everywhere(|group, _, count| {
        let (rank, ranks) = (group.rank(), group.size());
        let of = |from: usize, at: usize| bytes(&input(from, at, count * at));
        let mut gathered: Vec<Vec<u8>> = (0..ranks).map(|at| vec![0xee; of(at, at).len()]).collect();
        let mut output: Vec<&mut [u8]> = gathered.iter_mut().map(Vec::as_mut_slice).collect();
        let gather = Operation::moving(Collective::AllGather, Dtype::U32);
        let own = of(rank, rank);
        group.run(&gather, Buffers::Lists { input: &[&own], output: &mut output }).unwrap();
        assert!((0..ranks).all(|at| gathered[at] == of(at, at)), "{count} on rank {rank}");
        let parts: Vec<Vec<u8>> = (0..ranks).map(|at| of(rank, at)).collect();
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        let mut reduced = vec![0xee; own.len()];
        group.run(&SUM, Buffers::Lists { input: &parts, output: &mut [&mut reduced] }).unwrap();
        assert!(reduced == bytes(&sum(ranks, rank, count * rank)), "{count} on rank {rank}");
    });
}

#[test]
fn odd_bytes_go_through_every_collective() {
    on_threads(&[0, 0, 1], small(), |group| {
        for count in [1, 63, 65, 777] {
            let own: Vec<u8> = (0..count).map(|index| (index * 7 + group.rank() * 50) as u8).collect();
            let mut output = vec![0; own.len() * 3];
            let gather = Operation::moving(Collective::AllGather, Dtype::U8);
            group.run(&gather, Buffers::Apart { input: &own, output: &mut output }).unwrap();
            let mut sum = own.clone();
            group.all_reduce(Op::Sum, Dtype::U8, &mut sum).unwrap();
            let expected: Vec<u8> = (0..count)
                .map(|index| (0..3).fold(0u8, |sum, rank| sum.wrapping_add(output[rank * count + index])))
                .collect();
            assert!(output[group.rank() * count..][..count] == own && sum == expected, "{count} bytes");
        }
    });
}

#[test]
fn floats_have_the_same_bits_on_every_rank() {
    for hosts in [&[0, 0, 0, 0][..], &[0, 0, 1, 1], &[0, 1, 2, 3]] {
        for count in [9, 3000] {
            let results = Mutex::new(Vec::new());
            on_threads(hosts, small(), |group| {
                let value = |index: usize| (1.0 + index as f32).powi(group.rank() as i32 * 9 - 13);
                let mut data: Vec<u8> = (0..count).flat_map(|index| value(index).to_le_bytes()).collect();
                group.all_reduce(Op::Average, Dtype::F32, &mut data).unwrap();
                results.lock().unwrap().push(data);
                group.barrier().unwrap();
            });
            let results = results.into_inner().unwrap();
            assert!(results.iter().all(|result| *result == results[0]));
        }
    }
}

#[test]
fn an_average_is_divided_once() {
    for hosts in PLACES {
        on_threads(hosts, small(), |group| {
            let ranks = group.size() as u32;
            for count in [1, 2000] {
                let mut data = bytes(&vec![(group.rank() as u32 + 1) * 2; count]);
                group.all_reduce(Op::Average, Dtype::U32, &mut data).unwrap();
                assert!(data == bytes(&vec![ranks + 1; count]), "{hosts:?}");
            }
            group.barrier().unwrap();
        });
    }
}

#[test]
fn data_in_the_pool_is_combined_where_it_is() {
    for hosts in PLACES {
        on_threads_with(hosts, small(), 1 << 17, |group, at| {
            let (rank, ranks) = (group.rank(), group.size());
            for (salt, count) in [1, 16, 777, 2500].into_iter().enumerate() {
                let memory = group.memory().clone();
                let read = |bytes: usize| {
                    let mut data = vec![0; bytes];
                    memory.copy_out(at, &mut data).unwrap();
                    data
                };
                let bytes_of = (count * 4) as u64;
                memory.copy_in(at, &bytes(&input(rank, salt, count))).unwrap();
                let reduce = Operation { collective: Collective::AllReduce, ..SUM };
                group.run(&reduce, Buffers::Pool { at, bytes: bytes_of }).unwrap();
                assert!(read(count * 4) == bytes(&sum(ranks, salt, count)), "{count} on rank {rank}");

                let all = count * ranks;
                memory.copy_in(at, &bytes(&input(rank, salt, all))).unwrap();
                group.run(&SUM, Buffers::Pool { at, bytes: (all * 4) as u64 }).unwrap();
                let mut expected = bytes(&input(rank, salt, all));
                let own = rank * count * 4..(rank + 1) * count * 4;
                expected[own.clone()].copy_from_slice(&bytes(&sum(ranks, salt, all))[own]);
                assert!(read(all * 4) == expected, "{count} on rank {rank}");

                let gather = Operation::moving(Collective::AllGather, Dtype::U32);
                group.run(&gather, Buffers::Pool { at, bytes: (all * 4) as u64 }).unwrap();
                assert!(read(all * 4) == bytes(&sum(ranks, salt, all)), "{count} on rank {rank}");

                memory.copy_in(at, &bytes(&input(rank, salt, count))).unwrap();
                let root = salt % ranks;
                let copy = Operation::moving(Collective::Broadcast, Dtype::U32).with_root(root);
                group.run(&copy, Buffers::Pool { at, bytes: bytes_of }).unwrap();
                assert!(read(count * 4) == bytes(&input(root, salt, count)), "{count} on rank {rank}");
            }
        });
    }
}

/// Barriers whose windows are counted: what a rank does in the pool to pass one, at a time when all have ended the operation before.
#[test]
fn the_window_behind_what_all_took_part_in_needs_no_look_at_them() {
    let hosts = [0, 0, 0, 0, 1, 1, 1, 1];
    let meet = std::sync::Barrier::new(hosts.len());
    let window = |group: &mut Group<polder_mem::Heap>| {
        meet.wait();
        let barrier = group.operation(Signature::new(Collective::Barrier, 0, 0), |group| {
            let before = group.memory().counts();
            group.pass_window()?;
            let after = group.memory().counts();
            group.publish_step(1);
            group.await_steps(1)?;
            Ok((after.loads + after.flushes) - (before.loads + before.flushes))
        });
        meet.wait();
        barrier.unwrap()
    };
    on_threads(&hosts, small(), |group| {
        let mut data = vec![1; 4096];
        group.all_reduce(Op::Sum, Dtype::U8, &mut data).unwrap();
        assert_eq!(window(group), 0, "rank {} looked", group.rank());
        group.broadcast(0, Dtype::U8, &mut data[..8]).unwrap();
        assert!(window(group) > 0, "rank {} did not look", group.rank());
        let (own, mut all) = (vec![1; 1024], vec![0; 8192]);
        let gather = Operation::moving(Collective::AllGather, Dtype::U8);
        group.run(&gather, Buffers::Apart { input: &own, output: &mut all }).unwrap();
        assert_eq!(window(group), 0, "rank {} looked", group.rank());
    });
}

#[test]
fn ranks_that_call_different_operations_find_out() {
    on_threads(&[0, 1], small(), |group| {
        let mut data = vec![0; 4096];
        let error = match group.rank() {
            0 => group.all_reduce(Op::Sum, Dtype::F32, &mut data),
            _ => group.broadcast(0, Dtype::F32, &mut data),
        }
        .unwrap_err();
        let PoolError::Mismatch { theirs, ours, sequence: 1, .. } = error else { panic!("{error}") };
        let (sum, copy) =
            ("all-reduce of 4096 bytes (sum of float32)", "broadcast of 4096 bytes (float32) with root 0");
        assert_eq!(
            (theirs.as_str(), ours.as_str()),
            if group.rank() == 0 { (copy, sum) } else { (sum, copy) }
        );
    });
}

/// Ranks that call what is alike in bytes but not in root or type: none gets past the operation after, and each is told what
/// both called. Two, three and four ranks, on one host and several, 50 rounds each.
#[test]
fn ranks_that_name_different_roots_or_types_find_out_by_the_next_operation() {
    type Odd = fn(&mut Group<polder_mem::Heap>, bool, &mut [u8]) -> Result<(), PoolError>;
    let calls: [Odd; 4] = [
        |group, odd, data| group.broadcast(usize::from(odd), Dtype::I32, data),
        |group, odd, data| group.broadcast(0, if odd { Dtype::F32 } else { Dtype::I32 }, data),
        |group, odd, data| {
            let all = data.repeat(group.size());
            let scatter = Operation::moving(Collective::Scatter, Dtype::I32).with_root(usize::from(odd));
            group.run(&scatter, Buffers::Apart { input: &all, output: data })
        },
        |group, odd, data| {
            let sum =
                Operation::reducing(Collective::Reduce, Op::Sum, Dtype::I32).with_root(usize::from(odd));
            group.run(&sum, Buffers::InPlace(data))
        },
    ];
    for hosts in [&[0, 0][..], &[0, 1], &[0, 1, 2], &[1, 0, 0, 1]] {
        for round in 0..50 {
            let call = calls[round % calls.len()];
            on_threads(hosts, small(), |group| {
                let is_odd = group.rank() == 1;
                let outcome = call(group, is_odd, &mut [7; 8]).and_then(|()| group.barrier());
                match outcome.expect_err("the ranks kept different values") {
                    PoolError::Mismatch { peer, theirs, ours, sequence: 1, .. } => {
                        assert_eq!(peer.rank == Some(1), !is_odd, "{peer}");
                        assert!(theirs != ours && theirs.contains("8 bytes"), "{theirs}, {ours}");
                    }
                    error => panic!("rank {}: {error}", group.rank()),
                }
            });
        }
    }
}

#[test]
fn arguments_that_do_not_fit_are_refused_and_break_nothing() {
    on_threads(&[0, 0], small(), |group| {
        let mut data = vec![0; 10];
        let sum = Operation::reducing(Collective::AllReduce, Op::Sum, Dtype::U8);
        let moving = |collective| Operation::moving(collective, Dtype::U8);
        let calls = [
            group.all_reduce(Op::Sum, Dtype::F32, &mut data),
            group.all_reduce(Op::BitXor, Dtype::F32, &mut data[..8]),
            group.run(&sum, Buffers::Apart { input: &[0; 9], output: &mut data }),
            group.broadcast(2, Dtype::U8, &mut data),
            group.broadcast(1, Dtype::F32, &mut data),
            group.run(&moving(Collective::AllGather), Buffers::Apart { input: &[0; 4], output: &mut data }),
            group.run(&sum, Buffers::Pool { at: Offset(8), bytes: 64 }),
            group.run(&sum, Buffers::Pool { at: Offset(64), bytes: u64::MAX - 8 }),
            group.run(&moving(Collective::AllReduce), Buffers::InPlace(&mut data)),
            group.run(
                &Operation { reduction: Some(Op::Sum), ..moving(Collective::AllGather) },
                Buffers::InPlace(&mut data),
            ),
            group.run(&moving(Collective::AllToAll), Buffers::InPlace(&mut data)),
            group.run(&moving(Collective::Gather), Buffers::Pool { at: Offset(64), bytes: 64 }),
            group.run(
                &Operation { collective: Collective::Reduce, ..sum },
                Buffers::Pool { at: Offset(64), bytes: 64 },
            ),
            group.run(&sum, Buffers::Lists { input: &[&[0]], output: &mut [&mut [0]] }),
            group.run(
                &moving(Collective::AllToAll),
                Buffers::Lists { input: &[&[0], &[0, 0]], output: &mut [&mut [0, 0], &mut [0]] },
            ),
        ];
        assert!(calls.iter().all(|call| matches!(call, Err(PoolError::Argument { .. }))), "{calls:?}");
        group.barrier().unwrap();
    });
}
