"""On real GPUs, with CuPy: `make gpu-check`. Skipped, with the reason, without them.

What the double of fakecupy.py takes for granted is asked of CuPy here, and what NCCL
does is compared with the ring. One GPU is enough: then its world has one rank.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from gpu_checks import PROBES, everything, probe, revealing, train

from minddp.backends import nccl
from minddp.comm_hooks import allreduce_hook
from minddp.device import Device
from minddp.errors import UsageError
from minddp.frame import DTYPES, Header, Kind
from minddp.net import Alarm, Deadline
from minddp.payload import lend, native_flat, staged
from minddp.testing import run_groups


def gpus():
    """How many there are; 0 without CuPy."""
    try:
        return Device("cuda:0").xp.cuda.runtime.getDeviceCount()
    except UsageError:
        return 0


def why_not(needs_nccl=False):
    try:
        Device("cuda:0")
        if needs_nccl:
            nccl.find()
    except UsageError as exc:
        return str(exc)
    return ""


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpus(), reason=why_not())]
with_nccl = pytest.mark.skipif(bool(why_not(True)), reason=why_not(True))


@pytest.fixture
def cupy():
    return Device("cuda:0").xp


# ---- Is the double like it? ----


@pytest.mark.parametrize("what", PROBES)
def test_cupy_does_as_the_double_does(what, cupy):
    assert probe(what, cupy) == PROBES[what][1]


# ---- NCCL ----


@with_nccl
def test_every_collective_runs_on_one_gpu(cupy):
    """A world of one has no back end, so this is the communicator itself."""
    _, library = nccl.find()
    unique_id = library.get_unique_id()
    assert type(unique_id) is bytes
    assert len(unique_id) == nccl.ID_BYTES
    links, alarm = SimpleNamespace(rank=0, world_size=1), Alarm()
    owner = nccl.Nccl(links, alarm, cupy, library)
    owner.device = 0
    comm = nccl.Communicator(owner, unique_id, Header(Kind.DATA, 1), Deadline(60))
    for op in nccl.COLLECTIVES:
        for dtype in set(DTYPES[1:]) - {"int16", "bfloat16"}:
            reduce = "max" if "reduce" in op else ""
            x = cupy.asarray(revealing(0, 7, dtype))
            row = native_flat(x)
            what = op, reduce, dtype, 0, -1, row.size, row.nbytes
            call = Header(Kind.DATA, 1, *what)
            comm.perform(call, lend(row), Deadline(60))
            assert x.tolist() == revealing(0, 7, dtype).tolist(), (op, dtype)
    comm.close()
    alarm.close()


@with_nccl
@pytest.mark.skipif(gpus() < 2, reason="it takes two GPUs")
def test_nccl_gives_what_the_ring_gives(cupy):
    n = gpus()

    def over_nccl(pg):
        cupy.cuda.Device(pg.rank).use()
        return everything(pg, cupy.asarray, lengths, skip="bfloat16")

    lengths = 0, 1, 2 * n, 2 * n + 1, 100 * n + 3
    ring = run_groups(n, lambda pg: everything(pg, np.array, lengths, "bfloat16"))
    assert run_groups(n, over_nccl, transport="nccl", timeout=60) == ring


@with_nccl
def test_two_ranks_on_one_gpu_are_told(cupy):
    def body(pg):
        with pytest.raises(UsageError, match="ranks 0 and 1 have their arrays on one"):
            pg.all_reduce(cupy.ones(3))

    run_groups(2, body, transport="nccl", timeout=60)


# ---- By way of the host ----


def test_a_copy_to_the_host_waits_for_the_stream_that_writes(cupy):
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        big, x = cupy.ones((4096, 4096), "f4"), cupy.zeros(1 << 20, "f4")
        for _ in range(20):  # tens of milliseconds, which `x` comes behind
            big = big @ big / 4096
        x[...] = big[0, 0]
        assert (staged(native_flat(x)) == 1).all()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_two_ranks_that_share_a_gpu_train_as_on_the_host(transport, cupy):
    host = run_groups(2, lambda pg: train(pg, "cpu", allreduce_hook))
    shared = run_groups(
        2,
        lambda pg: train(pg, "cuda", allreduce_hook),
        transport=transport,
        timeout=60,
    )
    for (losses, parameters), (expected, others) in zip(shared, host, strict=True):
        assert losses == pytest.approx(expected, rel=1e-4)
        for p, q in zip(parameters, others, strict=True):
            np.testing.assert_allclose(p, q, rtol=1e-3, atol=1e-5)
    for p, q in zip(shared[0][1], shared[1][1], strict=True):
        assert (p == q).all()  # replicas, to the bit
