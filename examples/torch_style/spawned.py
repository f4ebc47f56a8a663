"""Three jobs in a row, each of two processes that this script starts itself.

    python examples/torch_style/spawned.py

One after the other they use the same port. The second saves a checkpoint on rank 0,
and a barrier keeps rank 1 from reading it too early. The third continues from it. It
prints:

    basic: rank 0 of 2 has loss 0.97
    checkpoint: rank 1 has what rank 0 saved: True
    resumed: loss goes on falling: True
"""

import os
import tempfile

import minddp as torch
import minddp.distributed as dist
import minddp.multiprocessing as mp
from minddp import nn, optim
from minddp.ddp import DistributedDataParallel as DDP

CHECKPOINT = os.path.join(tempfile.gettempdir(), f"toy-{os.getpid()}.checkpoint")


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    return DDP(nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)))


def train(model, optimizer, steps=1):
    torch.manual_seed(1 + dist.get_rank())
    x, y = torch.randn(20, 10), torch.randn(20, 5)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.MSELoss()(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


def demo_basic(rank, world_size):
    model = setup(rank, world_size)
    loss = train(model, optim.SGD(model.parameters(), lr=0.001))
    if rank == 0:
        print(f"basic: rank {rank} of {world_size} has loss {loss:.2f}")
    dist.destroy_process_group()


def demo_checkpoint(rank, world_size, path):
    model = setup(rank, world_size)
    train(model, optim.SGD(model.parameters(), lr=0.1), steps=20)
    if rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    saved = torch.load(path, map_location="cpu", weights_only=True)
    same = all((saved[k] == v).data.all() for k, v in model.state_dict().items())
    if rank == 1:
        print(f"checkpoint: rank {rank} has what rank 0 saved: {same}")
    dist.destroy_process_group()


def demo_resume(rank, world_size, path):
    model = setup(rank, world_size)
    fresh = train(model, optim.SGD(model.parameters(), lr=0.0))
    model.load_state_dict(torch.load(path))
    resumed = train(model, optim.SGD(model.parameters(), lr=0.1), steps=5)
    if rank == 0:
        print(f"resumed: loss goes on falling: {resumed < fresh}")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(demo_basic, args=(2,), nprocs=2, join=True)
    mp.spawn(demo_checkpoint, args=(2, CHECKPOINT), nprocs=2, join=True)
    mp.spawn(demo_resume, args=(2, CHECKPOINT), nprocs=2, join=True)
    os.remove(CHECKPOINT)
