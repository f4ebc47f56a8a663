"""What ranks do in the tests of more than one file."""

import numpy as np

import minddp
from minddp import functional as F
from minddp import nn
from minddp.device import manual_seed


def add_strided_arrays_without_waiting(pg):
    """Every element tells which call wrote it, and whether one was written to that lies
    between."""
    n, tables = pg.world_size, [np.full((30, 40), float(pg.rank + i)) for i in range(5)]
    works = [pg.all_reduce(t.T[::-1, 1::2], async_op=True) for t in tables]
    pg.barrier()
    for i, (t, work) in enumerate(zip(tables, works, strict=True)):
        work.wait()
        assert (t[1::2] == n * (n - 1) / 2 + n * i).all()
        assert (t[::2] == pg.rank + i).all()


def train_two_layers(pg):
    """A DDP model after four steps, in buckets of which some have several KB."""
    manual_seed(0)
    layers = nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10)
    model = minddp.DistributedDataParallel(
        nn.Sequential(*layers), pg, bucket_cap_mb=0.01
    )
    optimizer = minddp.optim.SGD(model.parameters(), lr=0.1)
    random = np.random.default_rng(pg.rank)
    for _ in range(4):
        x = random.standard_normal((8, 64), np.float32)
        optimizer.zero_grad()
        F.cross_entropy(model(x), random.integers(0, 10, 8)).backward()
        optimizer.step()
    return model
