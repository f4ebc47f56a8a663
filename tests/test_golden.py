"""minddp against PyTorch's DDP: the same trainings give the same losses and weights.

PyTorch has written golden/ddp.npz, in 2 and 4 processes (golden/make_ddp.py). Both run
the code of golden/training.py, in float64.
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from golden.training import CASES, Library, train

from minddp import nn, optim
from minddp.autograd import Tensor
from minddp.comm_hooks import fp16_compress_hook
from minddp.ddp import DistributedDataParallel
from minddp.testing import run_groups

GOLDEN = dict(np.load(Path(__file__).parent / "golden" / "ddp.npz"))
BUCKETS = {"one bucket": 25.0, "a bucket for each parameter": 1 / 2**20}


def library(pg, bucket_cap_mb):
    """minddp on this rank, as training.py wants it."""

    def wrap(module, case):
        ddp = DistributedDataParallel(
            module,
            pg,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=case.find_unused_parameters,
        )
        if case.fp16:
            ddp.register_comm_hook(pg, fp16_compress_hook)
        return ddp

    return Library(
        nn=nn,
        optim=optim,
        float64="float64",
        tensor=Tensor,
        array=lambda p: p.data,
        wrap=wrap,
    )


def trained(pg, name, bucket_cap_mb):
    """(losses, final weights) of this rank."""
    case, initial = CASES[name], GOLDEN[f"initial.{CASES[name].model}"]
    batches = GOLDEN["x"], GOLDEN["y"].astype(np.int64)
    return train(library(pg, bucket_cap_mb), case, pg.rank, initial, *batches)


def tolerance(case):
    """Two float16 have one sum. Of four, gloo and our ring add others first."""
    return 1e-3 if case.fp16 and case.n > 2 else 1e-9


@pytest.mark.parametrize("buckets", BUCKETS)
@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights_are_those_of_pytorch_ddp(name, buckets):
    body = partial(trained, name=name, bucket_cap_mb=BUCKETS[buckets])
    results = run_groups(CASES[name].n, body)
    equal = partial(np.testing.assert_allclose, rtol=0, atol=tolerance(CASES[name]))
    for rank, (losses, weights) in enumerate(results):
        equal(losses, GOLDEN[f"{name}.losses"][rank], err_msg=f"losses, rank {rank}")
        equal(weights, GOLDEN[f"{name}.weights"], err_msg=f"weights, rank {rank}")
        assert weights.tobytes() == results[0][1].tobytes(), "the same on all ranks"


def test_the_file_holds_the_cases_and_tells_apart_what_must_differ():
    names = {key.removesuffix(".weights") for key in GOLDEN if key.endswith(".weights")}
    assert names == set(CASES), "run golden/make_ddp.py again"
    for ours, other in (
        ("fp16-2-sgd", "plain-2-sgd"),
        ("join-2-adamw-by-initial", "join-2-adamw-by-active"),
        ("join-4-sgd-by-initial", "join-4-sgd-by-active"),
    ):
        far = abs(GOLDEN[f"{ours}.weights"] - GOLDEN[f"{other}.weights"]).max()
        assert far > 1e4 * tolerance(CASES[ours]), f"{ours} is as {other}"
