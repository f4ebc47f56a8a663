"""Messages between ranks, groups of some, and an all-reduce that one writes oneself.

    minddp run -n 4 examples/torch_style/messages.py

In the manner of a first lesson on torch.distributed. It prints:

    [rank 1] blocking: rank 1 has 1.0
    [rank 3] immediate: rank 3 has 2.0, and rank 2 had gone on: True
    [rank 0] group: ranks 0 and 1 have 2.0
    [rank 1] group: ranks 0 and 1 have 2.0
    [rank 0] ring by hand: 6.0, as dist.all_reduce: 6.0
    [rank 1] ring by hand: 6.0, as dist.all_reduce: 6.0
    [rank 2] ring by hand: 6.0, as dist.all_reduce: 6.0
    [rank 3] ring by hand: 6.0, as dist.all_reduce: 6.0
"""

import time

import minddp as torch
import minddp.distributed as dist


def blocking(rank):
    """Rank 0 sends, rank 1 receives; both wait until it is done."""
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor=tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor=tensor, src=0)
        print(f"blocking: rank {rank} has {tensor[0]}")


def immediate(rank):
    """Rank 2 goes on before its message has been received; rank 3 takes its time."""
    tensor, gone_on = torch.zeros(1), torch.zeros(1)
    if rank == 2:
        tensor += 2
        request = dist.isend(tensor=tensor, dst=3)
        gone_on += not request.is_completed()
        request.wait()
        dist.send(gone_on, dst=3)
    elif rank == 3:
        time.sleep(0.2)
        dist.recv(tensor=tensor, src=2)
        dist.recv(gone_on, src=2)
        print(
            f"immediate: rank {rank} has {tensor[0]}, and rank 2 had gone on: "
            f"{bool(gone_on)}"
        )


def in_a_group(rank):
    group = dist.new_group([0, 1])
    tensor = torch.ones(1)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    if rank in (0, 1):
        print(f"group: ranks 0 and 1 have {tensor[0]}")


def ring_all_reduce(send):
    """What goes round: each rank passes on what it has got, and adds it up."""
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1 + size) % size, (rank + 1) % size
    total, buffer, received = send.clone(), send.clone(), torch.zeros(send.size())
    for _ in range(size - 1):
        request = dist.isend(buffer, right)
        dist.recv(received, left)
        request.wait()
        total += received
        buffer[:] = received
    return total


def run():
    rank = dist.get_rank()
    for lesson in (blocking, immediate, in_a_group):
        lesson(rank)
        dist.barrier()
    tensor = torch.ones(1) * rank
    total = ring_all_reduce(tensor)
    dist.all_reduce(tensor)
    print(f"ring by hand: {total[0]}, as dist.all_reduce: {tensor[0]}")


if __name__ == "__main__":
    dist.init_process_group()
    run()
    dist.destroy_process_group()
