"""A group that has Polder for the CPU and another backend for the GPU: gloo, which needs no GPU to be made, or nccl."""

import sys

import torch
import torch.distributed as dist
from torch_meet import meet

from polder.torch.backend import ProcessGroupPolder
from polder.torch.meeting import attachments

other = sys.argv[3]
if other == "nccl":
    torch.cuda.set_device(int(sys.argv[1]))
# c10d's own map, also of a backend that cannot be made here.
assert dist.distributed_c10d.BackendConfig("cpu:polder,cuda:nccl").device_backend_map == {
    "cpu": "polder",
    "cuda": "nccl",
}
meet(f"cpu:polder,cuda:{other}")
rank, size = dist.get_rank(), dist.get_world_size()
world = dist.group.WORLD
assert not isinstance(world, ProcessGroupPolder)
assert world._get_backend(torch.device("cpu")).getBackendName() == "polder"
assert world._get_backend(torch.device("cuda")).name() == other
assert len(attachments) == 1

# Each call on tensors of the CPU comes to Polder's group.
dist.all_reduce(total := torch.full((3,), float(rank)))
assert total.tolist() == [1.0] * 3
work = dist.all_reduce(total, async_op=True)
while not work.get_future().done():
    pass
assert total.tolist() == [2.0] * 3
dist.broadcast(total := torch.full((3,), float(rank)), 1)
assert total.tolist() == [1.0] * 3
dist.all_gather(parts := [torch.zeros(2), torch.zeros(2)], torch.full((2,), float(rank)))
assert [part[0].item() for part in parts] == [0, 1]
dist.all_gather_into_tensor(whole := torch.zeros(2), torch.full((1,), float(rank)))
assert whole.tolist() == [0, 1]
dist.reduce_scatter_tensor(part := torch.zeros(1), whole)
assert part.item() == 2 * rank
dist.all_to_all_single(swapped := torch.zeros(2), whole + 10 * rank)
assert swapped.tolist() == [rank, rank + 10]
dist.gather(part, parts := list(torch.zeros(2, 1)) if rank == 0 else None, 0)
assert parts is None or [each.item() for each in parts] == [0, 2]
dist.scatter(part, [torch.ones(1), torch.zeros(1)] if rank == 0 else None, 0)
assert part.item() == 1 - rank
if rank == 0:
    dist.send(torch.ones(4), 1)
else:
    dist.recv(came := torch.zeros(4), 0)
    assert came.sum() == 4
told: list[object] = [None] * size
dist.all_gather_object(told, {"rank": rank})
assert told == [{"rank": 0}, {"rank": 1}]
dist.monitored_barrier()
if other == "gloo":
    dist.barrier()
if other == "nccl":
    dist.all_reduce(on_gpu := torch.full((3,), float(rank), device="cuda"))
    assert on_gpu.tolist() == [1.0] * 3
dist.destroy_process_group()
assert not attachments
print("equal")
