"""NCCL behind the process group, on the double of CuPy: fakecupy.py, fakenccl.py."""

import os
import sys
import threading
import time

import fakecupy
import fakenccl
import numpy as np
import pytest
from gpu_checks import PROBES, everything, probe, train

import minddp
import minddp.distributed as dist
from minddp.autograd import Tensor
from minddp.backends import nccl
from minddp.bfloat16 import BFLOAT16, to_bfloat16
from minddp.comm_hooks import allreduce_hook, fp16_compress_hook
from minddp.errors import (
    MindDPError,
    PeerLost,
    PeerMismatch,
    PeerTimeout,
    UsageError,
)
from minddp.frame import HEADER_BYTES
from minddp.testing import run_groups


@pytest.fixture
def faults(monkeypatch):
    return fakecupy.install(monkeypatch)


def on_gpus(n, body, **settings):
    """As run_groups over NCCL, every rank on a GPU of its own, but not that number."""

    def on_own_gpu(pg):
        sys.modules["cupy"].cuda.Device(n - pg.rank).use()
        return body(pg)

    return run_groups(n, on_own_gpu, **{"transport": "nccl", **settings})


def errors_of(n, body, cause=MindDPError, **settings):
    with pytest.raises(cause) as caught:
        on_gpus(n, body, **settings)
    return caught.value.of_ranks


def gpu(x, dtype=None):
    return sys.modules["cupy"].asarray(np.asarray(x), dtype)


# ---- The double ----


@pytest.mark.parametrize("what", PROBES)
def test_the_double_refuses_and_gives_what_cupy_does(what, faults):
    assert probe(what, sys.modules["cupy"]) == PROBES[what][1]


# ---- Results ----


@pytest.mark.parametrize("n", [2, 3])
def test_every_collective_gives_what_the_ring_gives(n, faults):
    lengths = 0, 1, 2 * n, 2 * n + 1  # without elements, with empty chunks, (un)equal
    over_nccl = on_gpus(n, lambda pg: everything(pg, gpu, lengths))
    over_tcp = run_groups(n, lambda pg: everything(pg, np.array, lengths))
    for rank in range(n):
        assert over_nccl[rank] == over_tcp[rank]
    called = {name for name, _ in faults.calls}
    assert {"allReduce", "reduceScatter", "allGather", "broadcast"} <= called
    assert {"reduce", "send", "recv", "destroy"} <= called
    assert "abort" not in called


@pytest.mark.parametrize("transport", ["nccl", "tcp", "shm"])
def test_arrays_on_a_gpu_are_taken_by_every_back_end_whatever_their_strides(
    transport, faults
):
    views = [
        lambda a: a,
        lambda a: a[:, 1],
        lambda a: a.T,
        lambda a: a[::2, 1:],
        lambda a: a[0, 0, ...],
        lambda a: a[:0],
    ]

    def body(pg):
        for view in views:
            wholes = [np.arange(24.0).reshape(6, 4) * 10**r for r in range(2)]
            whole = gpu(wholes[pg.rank])
            pg.all_reduce(view(whole))
            expected = wholes[pg.rank].copy()
            view(expected)[...] = view(wholes[0] + wholes[1])
            assert whole.tolist() == expected.tolist()
        table = pg.all_gather_rows(gpu([pg.rank, 7]))
        mine = pg.reduce_scatter(gpu([1.0, 2.0, 3.0]))
        zeros = pg.zeros(3, "f4", like=whole)
        arrived = gpu(np.zeros(3))
        peer = 1 - pg.rank
        work = pg.isend(gpu([1.0, 2.0, 3.0]) * pg.rank, peer)
        pg.recv(arrived, peer)
        work.wait()
        assert arrived.tolist() == [peer, 2 * peer, 3 * peer]
        kinds = {type(x) for x in (table, mine, zeros)}
        assert kinds == {fakecupy.ndarray}
        assert {x.device.id for x in (table, mine, zeros)} == {2 - pg.rank}
        pg.barrier()
        return table.tolist(), mine.tolist(), zeros.tolist()

    for rank, found in enumerate(on_gpus(2, body, transport=transport)):
        mine = [[2.0, 4.0], [6.0]][rank]
        assert found == ([[0, 7], [1, 7]], mine, [0.0, 0.0, 0.0])


@pytest.mark.parametrize("transport", ["nccl", "tcp"])
def test_bfloat16_on_a_gpu_is_added(transport, faults):
    def body(pg):
        x = gpu(to_bfloat16(np.array([1.0, 3.0])))
        assert x.dtype == BFLOAT16
        pg.all_reduce(x)
        return x.tobytes()

    expected = to_bfloat16(np.array([2.0, 6.0])).tobytes()
    assert on_gpus(2, body, transport=transport) == [expected] * 2


def test_sub_groups_have_communicators_of_their_own(faults):
    def body(pg):
        x = gpu([1.0 + pg.rank])
        with pg.split(pg.rank % 2) as half:
            half.all_reduce(x)
        pg.all_reduce(x, "max")
        return x.item()

    assert on_gpus(4, body) == [6.0] * 4  # 1 + 3, 2 + 4
    assert len(fakenccl.cliques) == 3


def test_a_world_of_one_needs_no_nccl(faults):
    with minddp.init_process_group(rank=0, world_size=1, transport="nccl") as pg:
        x = gpu(np.arange(6.0).reshape(2, 3).T)
        pg.all_reduce(x, "avg")
        assert pg.reduce_scatter(x).tolist() == [0, 3, 1, 4, 2, 5]
    assert faults.calls == []


# ---- Who waits for what ----


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("transport", ["nccl", "tcp"])
def test_a_collective_begins_behind_what_the_callers_stream_has_yet_to_write(
    async_op, transport, faults
):
    def body(pg):
        side = sys.modules["cupy"].cuda.Stream(non_blocking=True)
        x = gpu(np.zeros(4))
        with side:
            fakecupy.late(x, pg.rank + 1.0)
            pg.all_reduce(x, async_op=async_op).wait()
        return x.tolist()

    assert on_gpus(2, body, transport=transport) == [[3.0] * 4] * 2


@pytest.mark.parametrize("op", ["all_reduce", "all_to_all", "broadcast"])
def test_the_result_is_there_for_every_stream_when_wait_returns(
    op, faults, monkeypatch
):
    monkeypatch.setattr(fakenccl, "LATE_SECONDS", 0.05)

    def body(pg):
        x = gpu([10.0 + pg.rank, 20.0 + pg.rank])
        work = getattr(pg, op)(x, async_op=True)
        time.sleep(0.01)
        work.wait()
        return x._host.tolist()  # without waiting for any stream

    expected = {
        "all_reduce": [[21.0, 41.0]] * 2,
        "all_to_all": [[10.0, 11.0], [20.0, 21.0]],
        "broadcast": [[10.0, 20.0]] * 2,
    }
    assert on_gpus(2, body) == expected[op]


@pytest.mark.parametrize("transport", ["nccl", "tcp"])
def test_an_array_need_not_be_on_the_threads_current_gpu(transport, faults):
    def body(pg):
        other = sys.modules["cupy"].cuda.Device(4 + pg.rank)
        with other:
            whole = gpu(np.arange(6.0).reshape(2, 3))
            x, y = whole.T, gpu([0.0])
            fakecupy.late(y, 1.0)
            fakecupy.late(whole, 1.0)
        pg.all_reduce(y, async_op=True).wait()
        pg.all_reduce(x)
        assert x.device.id == 4 + pg.rank
        return whole.get().tolist(), y.get().tolist()

    assert on_gpus(2, body, transport=transport) == [([[2.0] * 3] * 2, [2.0])] * 2


# ---- What is refused ----


def test_what_nccl_cannot_do_is_refused_before_anything_is_sent(faults):
    def body(pg):
        pg.all_reduce(gpu([1.0]))
        sent = pg.stats()["bytes_sent"]
        with pytest.raises(UsageError, match="NCCL cannot reduce int16"):
            pg.all_reduce(gpu([1], "int16"))
        elsewhere = fakecupy.at(7, lambda: gpu([1.0]))
        with pytest.raises(UsageError, match=r"rank . uses NCCL on cuda:.*on cuda:7"):
            pg.all_reduce(elsewhere)
        assert pg.stats()["bytes_sent"] == sent
        x = gpu([pg.rank], "int16")
        pg.broadcast(x, root=1)  # moved, not added
        return x.item(), pg.stats()["bytes_sent"] - sent

    assert on_gpus(2, body) == [(1, HEADER_BYTES)] * 2


def test_a_rank_that_lacks_nccl_is_named_by_all(faults, monkeypatch):
    order, lock = [], threading.Lock()

    def find():
        with lock:
            order.append(threading.get_ident())
        if len(order) == 1:
            raise UsageError("it has no CuPy")
        return sys.modules["cupy"], sys.modules["cupy.cuda.nccl"]

    monkeypatch.setattr(nccl, "find", find)
    errors = errors_of(3, lambda pg: None, UsageError)
    assert len({str(error) for error in errors}) == 1
    assert "cannot use NCCL: it has no CuPy. transport='tcp' takes" in str(errors[0])
    assert "rank " in str(errors[0])


@pytest.mark.parametrize("missing", ["cupy", "GPU", "driver", "NCCL"])
def test_what_is_missing_is_said(missing, faults, monkeypatch):
    cupy = sys.modules["cupy"]

    def no_driver():
        raise fakecupy.CUDARuntimeError("cudaErrorInsufficientDriver")

    if missing == "cupy":
        monkeypatch.setitem(sys.modules, "cupy", None)
    elif missing == "GPU":
        cupy.cuda.runtime.getDeviceCount = lambda: 0
    elif missing == "driver":
        cupy.cuda.runtime.getDeviceCount = no_driver
    else:
        sys.modules["cupy.cuda.nccl"].available = False
    says = {"cupy": "no CuPy", "GPU": "sees no GPU", "driver": "InsufficientDriver"}
    with pytest.raises(UsageError, match=says.get(missing, "finds no NCCL")):
        nccl.find()
    assert not nccl.usable()


def test_two_ranks_on_one_gpu_are_told_and_can_move(faults):
    def body(pg):
        use = sys.modules["cupy"].cuda.Device
        use((0, 3, 1, 3)[pg.rank]).use()
        with pytest.raises(UsageError) as caught:
            pg.all_reduce(gpu([1.0]))
        use(pg.local_rank).use()
        x = gpu([1.0])
        pg.all_reduce(x)
        return str(caught.value), x.item()

    for said, total in run_groups(4, body, transport="nccl"):
        assert said.startswith("ranks 1 and 3 have their arrays on one GPU")
        assert "0000:03:00.0" in said
        assert "cupy.cuda.Device(pg.local_rank).use()" in said
        assert total == 4


@pytest.mark.parametrize(
    "why", ["NCCL_ERROR_SYSTEM_ERROR", "its CuPy is older than 14"]
)
def test_rank_0_without_an_id_is_no_riddle_to_the_others(why, faults):
    if "older" in why:
        sys.modules["cupy.cuda.nccl"].get_unique_id = lambda: (-128,) * 128
    else:
        faults.id_error = why

    def body(pg):
        with pytest.raises(UsageError) as caught:
            pg.all_reduce(gpu([1.0]))
        pg.barrier()  # the group lives on
        return str(caught.value)

    said = on_gpus(3, body)
    assert set(said) == {said[0]}
    assert f"rank 0 cannot use NCCL: {why}" in said[0]


def test_bytes_of_any_value_reach_all_ranks_as_they_are(faults):
    def body(pg):
        said = bytes(range(256)) if pg.rank else bytes(reversed(range(256)))
        deadline = minddp.net.Deadline(3)
        return nccl.bytes_of_all(pg._links, said, 256, deadline)

    for told in on_gpus(2, body):
        assert told == [bytes(reversed(range(256))), bytes(range(256))]


# ---- Failures ----


@pytest.mark.parametrize(
    ("odd", "shown"),
    [
        (lambda pg: pg.all_reduce(gpu(np.ones(4))), "#2 of 4 float64 (sum, on GPUs)"),
        (lambda pg: pg.broadcast(gpu(np.ones(3))), "of 3 float64 (root 0, on GPUs)"),
        (lambda pg: pg.all_reduce(np.ones(3)), "#2 of 3 float64 (sum), but"),
        (lambda pg: pg.barrier(), "barrier #2"),
    ],
)
def test_a_rank_in_another_call_is_named_before_anything_moves(odd, shown, faults):
    def body(pg):
        pg.all_reduce(gpu([1.0]))
        x = gpu(np.ones(3))
        try:
            odd(pg) if pg.rank == 1 else pg.all_reduce(x)
        finally:
            assert x.tolist() == [1, 1, 1]

    for error in errors_of(3, body):
        assert isinstance(error, PeerMismatch)
        assert error.culprit == 1
        said = str(error)
        assert shown in said or shown.removesuffix(", but") + ". All" in said
        assert "all_reduce #2 of 3 float64 (sum, on GPUs)" in said


def test_a_rank_whose_gpu_is_stuck_is_a_timeout_and_not_a_hang(faults):
    def body(pg):
        pg.all_reduce(gpu([1.0]))
        pg.barrier()
        faults.silent = {1}
        start = time.monotonic()
        try:
            pg.all_reduce(gpu([1.0]))
        finally:
            assert time.monotonic() - start < 5

    for error in errors_of(3, body, timeout=0.5):
        assert isinstance(error, PeerTimeout)
        assert "in vain for NCCL during all_reduce #3" in str(error)
    assert {("abort", rank) for rank in range(3)} <= set(faults.calls)
    assert "destroy" not in {name for name, _ in faults.calls}


def test_a_call_of_nccl_that_does_not_return_is_ended_by_the_watchdog(faults):
    def body(pg):
        pg.all_reduce(gpu([1.0]))
        pg.barrier()
        faults.stuck = {0, 1}
        pg.all_reduce(gpu([1.0]))

    for error in errors_of(2, body, timeout=0.5):
        assert isinstance(error, PeerTimeout)
    assert {("abort", 0), ("abort", 1)} <= set(faults.calls)


def test_a_rank_that_dies_after_its_header_is_lost_at_once(faults):
    def body(pg):
        pg.all_reduce(gpu([1.0]))
        pg.barrier()
        faults.silent = {1}
        work = pg.all_reduce(gpu([1.0]), async_op=True)
        if pg.rank == 1:
            time.sleep(0.1)
            raise ValueError("out of luck")
        work.wait()

    errors = errors_of(3, body, ValueError, timeout=20)
    for rank in (0, 2):
        assert isinstance(errors[rank], PeerLost)
        assert errors[rank].culprit == 1
        assert "out of luck" in str(errors[rank])
        assert ("abort", rank) in faults.calls


def test_an_error_that_nccl_finds_later_ends_the_group(faults):
    def body(pg):
        pg.all_reduce(gpu([1.0]))
        pg.barrier()
        faults.silent, faults.error = {1}, "NCCL_ERROR_REMOTE_ERROR"
        pg.all_reduce(gpu([1.0]))

    for error in errors_of(2, body, timeout=20):
        assert isinstance(error, PeerLost)
        assert "NCCL_ERROR_REMOTE_ERROR" in str(error)
        assert "NCCL_DEBUG" in str(error)


def test_a_communicator_is_let_go_once_and_not_by_a_forked_child(faults, monkeypatch):
    def body(pg):
        pg.all_reduce(gpu([1.0]))
        pg.barrier()
        if pg.rank == 0:  # what a child would see
            with monkeypatch.context() as patch:
                patch.setattr(os, "getpid", lambda: 1)
                pg._backend._communicator.close()
        pg.barrier()
        assert ("destroy", 0) not in faults.calls
        pg.barrier()

    on_gpus(2, body)
    left = [call for call in faults.calls if call[0] in ("destroy", "abort")]
    assert sorted(left) == [("destroy", 0), ("destroy", 1)]


# ---- Training ----


@pytest.mark.parametrize("hook", [allreduce_hook, fp16_compress_hook])
@pytest.mark.parametrize("transport", ["nccl", "tcp", "shm"])
def test_training_on_gpus_is_training_on_the_host(transport, hook, faults):
    host = run_groups(2, lambda pg: train(pg, "cpu", hook))
    gpus = on_gpus(2, lambda pg: train(pg, "cuda", hook), transport=transport)
    for (losses, parameters), (expected, others) in zip(gpus, host, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)
        for p, q in zip(parameters, others, strict=True):
            np.testing.assert_allclose(p, q, rtol=1e-4, atol=1e-6)


# ---- torch.distributed ----


def test_backend_nccl_means_nccl_where_it_is(faults, monkeypatch):
    monkeypatch.delenv("MINDDP_TRANSPORT", raising=False)
    assert dist._transport("nccl") == "nccl"
    assert dist._transport("gloo") is None
    monkeypatch.setenv("MINDDP_TRANSPORT", "tcp")
    assert dist._transport("nccl") is None
    monkeypatch.delenv("MINDDP_TRANSPORT")
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert dist._transport("nccl") is None


def test_module_functions_take_arrays_and_tensors_on_gpus(faults):
    def body(pg):
        group = {"group": pg}
        mine, rows = gpu([1.0 + pg.rank, 5.0]), [gpu(np.zeros(2)) for _ in range(2)]
        t = Tensor(gpu([1.0 + pg.rank]))
        dist.all_reduce(t, **group)
        dist.all_gather(rows, mine, **group)
        gathered = [gpu(np.zeros(2)) for _ in range(2)]
        dist.gather(mine, gathered if pg.rank == 0 else None, **group)
        dist.scatter(mine, rows if pg.rank == 1 else None, src=1, **group)
        both = [x.tolist() for x in gathered] if pg.rank == 0 else None
        return (
            dist.get_backend(pg),
            t.item(),
            [x.tolist() for x in rows],
            both,
            mine.tolist(),
        )

    rows = [[1.0, 5.0], [2.0, 5.0]]
    assert on_gpus(2, body) == [
        ("nccl", 3.0, rows, rows, rows[0]),
        ("nccl", 3.0, rows, None, rows[1]),
    ]
