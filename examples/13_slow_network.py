"""The curves of DDP on a slow network: size of a bucket, overlap, no_sync, hooks.

    minddp run -n 3 examples/13_slow_network.py --quick

Printed: ms for a batch in the network lab (netlab.py), on 2 ranks and on 3. At the end:

    [rank 0] all on an emulated network: rate=200mbit, delay=0.3ms
"""

import argparse
import os
import time

import charts  # beside this file
import numpy as np

import minddp
from minddp import functional as F
from minddp import nn, optim
from minddp.comm_hooks import allreduce_hook, fp16_compress_hook
from minddp.ddp import DistributedDataParallel as DDP
from minddp.powersgd import PowerSGDState, powerSGD_hook

HOOKS = {"none": allreduce_hook, "fp16": fp16_compress_hook, "PowerSGD": powerSGD_hook}
CAPS = {"0.5 KiB": 0.0005, "0.1 MiB": 0.1, "0.3 MiB": 0.3, "0.6 MiB": 0.6}
ONE, BEST = (2, "none", 1), (0.3, "none", 1)  # in one bucket, nothing overlaps
CURVES = {  # what is varied: {how: (MiB a bucket, hook, batches a step)}
    "bucket": {how: (CAPS[how], "none", 1) for how in CAPS} | {"one bucket": ONE},
    "overlap": {"no network": (2, "none", None), "one bucket": ONE, "0.3 MiB": BEST},
    "batches a step": {str(k): (0.3, "none", k) for k in (1, 2, 4)},
    "hook": {how: (0.3, how, 1) for how in HOOKS},
}


def batches(pg, cap, hook, every):
    """Yields ms a batch; gradients, 1 MiB, are averaged after `every` (None: never)."""
    layers = [layer for _ in range(12) for layer in (nn.ReLU(), nn.Linear(144, 144))]
    ddp = DDP(nn.Sequential(*layers), pg, bucket_cap_mb=cap, check_sync_every=0)
    state = PowerSGDState(pg, 2, 2) if hook == "PowerSGD" else pg
    ddp.register_comm_hook(state, HOOKS[hook])
    optimizer = optim.SGD(ddp.parameters(), lr=1e-6)
    x = np.random.default_rng(pg.rank).standard_normal((4096, 144), np.float32)
    while True:
        start = time.perf_counter()
        for i in range(every or 1):
            ddp.require_backward_grad_sync = i + 1 == every
            F.mse_loss(ddp(x), x, reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
        yield (time.perf_counter() - start) / (every or 1) * 1e3


def measure(pg, rounds):
    """{curve: {how: median ms}}. All take turns, so that a disturbance hits all."""
    runs = {k: batches(pg, *k) for hows in CURVES.values() for k in hows.values()}
    ms = {k: [] for k in runs}
    for _ in range(1 + rounds):  # in the first, DDP makes its buckets anew
        for kind, run in runs.items():
            pg.barrier()
            ms[kind].append(next(run))
    return {c: {h: np.median(ms[k][1:]) for h, k in CURVES[c].items()} for c in CURVES}


parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true")
parser.add_argument("--plot", metavar="FILE", help="draw the curves into it")
options = parser.parse_args()
os.environ.setdefault("MINDDP_NETLAB", "rate=200mbit, delay=0.3ms")
world = minddp.init_process_group()
results = {}
for n in range(2, world.world_size + 1):
    if pg := world.split(0 if world.rank < n else None):
        results[n] = measure(pg, 1 if options.quick else 8)
        pg.close()
if world.rank == 0:
    charts.show(results)
    if options.plot:
        charts.draw(results, f"ms for a batch, emulated: {world.netlab}", options.plot)
    print(f"all on an emulated network: {world.netlab}")
world.close()
