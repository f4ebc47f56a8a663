"""Write ddp.npz: what PyTorch's DistributedDataParallel makes of the trainings here.

    pip install torch==2.13.0 numpy
    python tests/golden/make_ddp.py

Run by hand, once for a PyTorch version or whenever training.py changes. The tests need
the file, not PyTorch. For n = 2 and n = 4, n processes on this host train every case of
n ranks over gloo; a second run writes the same bytes.

    x, y                  the batches (training.py says whose is which)
    initial.MODEL         weights before training, all in one array
    CASE.losses           (n, the case's micro-batches), NaN where a rank had none
    CASE.weights          weights after training: the same bits on all ranks
    torch                 the version of PyTorch
"""

import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from training import (
    CASES,
    CLASSES,
    FEATURES,
    RANKS,
    ROWS,
    STEPS,
    Case,
    Library,
    build,
    read_weights,
    train,
)

FILE = Path(__file__).parent / "ddp.npz"


def wrap(module, case: Case):
    ddp = DistributedDataParallel(
        module, find_unused_parameters=case.find_unused_parameters
    )
    if case.fp16:
        ddp.register_comm_hook(None, fp16_compress_hook)
    return ddp


PYTORCH = Library(
    nn=torch.nn,
    optim=torch.optim,
    float64=torch.float64,
    tensor=torch.from_numpy,
    array=lambda p: p.detach().numpy(),
    wrap=wrap,
)


def draw_inputs():
    """The batches, and for each model its initial weights."""
    draw = np.random.default_rng(2013)
    micro_batches = STEPS * max(case.micro_batches for case in CASES.values())
    shape = micro_batches, RANKS, ROWS
    inputs = {
        "x": draw.standard_normal((*shape, FEATURES)),
        "y": draw.integers(0, CLASSES, shape),
    }
    for model in sorted({case.model for case in CASES.values()}):
        count = read_weights(PYTORCH, build(PYTORCH, model)).size
        inputs[f"initial.{model}"] = draw.uniform(-0.5, 0.5, count)
    return inputs


def train_cases(rank, n, folder, inputs):
    """Rank `rank` of n processes: train, and leave the results in the folder."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=n
    )
    results = {}
    for name, case in CASES.items():
        if case.n == n:
            initial = inputs[f"initial.{case.model}"]
            results[f"{name}.losses"], results[f"{name}.weights"] = train(
                PYTORCH, case, rank, initial, inputs["x"], inputs["y"]
            )
    np.savez(f"{folder}/{rank}.npz", **results)
    dist.destroy_process_group()


def results_of(n, inputs):
    """The results of n processes, by name; their weights must be the same."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train_cases, (n, folder, inputs), nprocs=n)
        ranks = [dict(np.load(f"{folder}/{rank}.npz")) for rank in range(n)]
    results = {}
    for name, first in ranks[0].items():
        of_ranks = np.stack([rank[name] for rank in ranks])
        if name.endswith(".weights"):
            assert all(w.tobytes() == first.tobytes() for w in of_ranks), name
        results[name] = of_ranks if name.endswith(".losses") else first
    return results


def main():
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if os.uname().sysname == "Linux" else "lo0"
    inputs = draw_inputs()
    results = {}
    for n in sorted({case.n for case in CASES.values()}):
        results |= results_of(n, inputs)
    inputs["y"] = inputs["y"].astype(np.int8)
    version = np.array(torch.__version__)
    np.savez_compressed(FILE, torch=version, **inputs, **results)
    print(f"{FILE.name}: {len(CASES)} cases, {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
