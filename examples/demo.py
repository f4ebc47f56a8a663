"""The demo of `make demo`: train the digits on n processes, then prove what happened.

    minddp run -n 2 examples/demo.py

An MLP learns handwritten digits. In every step, each rank computes the gradient of its
part of the batch, and our ring averages the gradients over TCP. Then rank 0 trains the
same model alone on the whole batches, in float32 and in float64, and compares.
"""

import hashlib

import numpy as np

import minddp
from minddp import functional as F
from minddp import nn, optim
from minddp.data import DataLoader, DistributedSampler, load_digits
from minddp.ddp import DistributedDataParallel as DDP
from minddp.progress import progress
from minddp.ring import chunk

EPOCHS = 20
BATCH = 64  # of all ranks together
LEARNING_RATE = 0.1


def build(dtype):
    """The same start on every rank, and in the process that trains alone."""
    minddp.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128, dtype=dtype), nn.ReLU(), nn.Linear(128, 10, dtype=dtype)
    )


def train(model, rank, world_size, show=False):
    """Train on this rank's share of every batch; the number of steps."""
    dataset = load_digits("train")
    sampler = DistributedSampler(dataset, world_size, rank)
    share = max(1, BATCH // n) * n // world_size
    loader = DataLoader(dataset, share, sampler=sampler, drop_last=True)
    optimizer = optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    dtype = next(model.parameters()).dtype
    for epoch in progress(range(EPOCHS), desc=f"training {dtype}", show=show):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(dtype)), y).backward()
            optimizer.step()
    return EPOCHS * len(loader)


def accuracy(model, pg):
    """The share of test digits that are recognized; each rank looks at its part."""
    dataset = load_digits("test")
    mine = DistributedSampler(dataset, pg.world_size, pg.rank, shuffle=False, pad=False)
    x, y = dataset[mine.indices()]
    with minddp.no_grad():
        right = np.array((model(x).argmax(-1) == y).numpy().sum())
    pg.all_reduce(right)
    return right.item() / len(dataset)


def hash_of(model):
    """A fingerprint of all parameters, bit for bit."""
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.data.tobytes())
    return digest.digest()


def predicted_bytes(ddp, steps, rank):
    """2 (n-1)/n * B a step, made exact where a bucket has no n equal parts."""
    sent = 0
    for bucket in ddp.buckets:
        for t in range(2 * (n - 1)):
            part = chunk(bucket.flat.size, n, rank - 1 - t)
            sent += (part.stop - part.start) * bucket.flat.itemsize
    return sent * steps


def difference(a, b):
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float(abs(p.data - q.data).max()) for p, q in pairs)


with minddp.init_process_group() as pg:
    n, first = pg.world_size, pg.rank == 0
    replicas, differences, hashes = {}, {}, {}
    for dtype in ("float64", "float32"):
        replica = DDP(build(dtype), pg, check_sync_every=0)  # we do it ourselves
        before = pg.stats()
        steps = train(replica, pg.rank, n, show=first)
        after = pg.stats()
        table = np.zeros((n, 32), np.uint8)
        table[pg.rank] = np.frombuffer(hash_of(replica), np.uint8)
        pg.all_gather(table)
        replicas[dtype], hashes[dtype] = replica, table
        if first:
            alone = build(dtype)
            train(alone, rank=0, world_size=1, show=True)
            differences[dtype] = difference(replica, alone)
    correct = accuracy(replicas["float32"], pg)

    if first:
        headers = after["header_bytes"] - before["header_bytes"]
        payload = after["bytes_sent"] - before["bytes_sent"] - headers
        predicted = predicted_bytes(replicas["float32"], steps, pg.rank)
        arrivals = 8 * len(list(replicas["float32"].parameters())) * (n > 1)
        counted = pg.transport == "tcp"  # others than the ring move bytes unseen
        print(f"\n{n} processes, {steps} steps of {max(1, BATCH // n)} digits each\n")
        print(f"test accuracy               {correct:.4f}")
        for rank, row in enumerate(hashes["float32"]):
            print(f"parameters of rank {rank}        {row.tobytes().hex()[:16]}")
        print(f"against one process         {differences['float32']:.1e} in float32")
        print(f"  (largest difference)      {differences['float64']:.1e} in float64")
        if counted:
            print(f"bytes sent by rank 0        {payload:,}")
            print(f"  2 (n-1)/n * B * steps =   {predicted:,} of gradients")
            print(f"  once, how they arrived    {arrivals:,}")
            print(f"  headers besides           {headers:,}")
        else:
            print(f"bytes sent by rank 0        not counted: carried by {pg.transport}")
        same = all(
            (row == table[0]).all() for table in hashes.values() for row in table
        )
        close = differences["float32"] < 1e-4 and differences["float64"] < 1e-10
        good = same and close and correct >= 0.95
        good = good and (not counted or payload == predicted + arrivals)
        print("\n" + ("All as it should be." if good else "SOMETHING IS WRONG."))
        print("Read next: minddp/ring.py, how ranks add without a middleman.")
        if not good:
            raise SystemExit(1)
