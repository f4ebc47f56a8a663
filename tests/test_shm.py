"""Shared memory: the same bits as TCP, nothing overtakes, nothing is left behind."""

import gc
import os
import signal
import threading
import time

import numpy as np
import pytest
from bodies import add_strided_arrays_without_waiting, train_two_layers
from ranks import (
    Ranks,
    attempt,
    descriptors,
    join,
    mapped,
    reduce_for_ever,
    run,
    tell,
)

import minddp
from minddp import shm
from minddp.bfloat16 import to_bfloat16
from minddp.errors import MindDPError, PeerLost, PeerMismatch, UsageError
from minddp.frame import DTYPES
from minddp.testing import run_groups

OPS = (
    *("all_reduce", "reduce_scatter", "all_gather", "broadcast"),
    *("reduce", "gather", "scatter", "all_to_all"),
)


@pytest.fixture
def small_areas(monkeypatch):
    """Areas that a thousand numbers do not fit into, and no array is small."""
    monkeypatch.setattr(shm, "AREA_BYTES", 1024)
    monkeypatch.setattr(shm, "FILE_BYTES", shm.PAGE + shm.AREAS * 1024)
    monkeypatch.setattr(shm, "SMALL_BYTES", 0)
    monkeypatch.setattr("minddp.combine.BLOCK_BYTES", 64)


def over_both(n, body, **settings):
    """What body gives over TCP, and in shared memory."""
    return [run_groups(n, body, transport=t, **settings) for t in ("tcp", "shm")]


def noise(pg, length, dtype="float64"):
    """Numbers whose sum depends on the order of addition."""
    random = np.random.default_rng(pg.rank)
    x = random.standard_normal(length) * 10.0 ** random.integers(-4, 4, length)
    if dtype == "bfloat16":
        return to_bfloat16(x.astype("f4"))
    return np.clip(x, -30, 30).astype(dtype)


def outcome(pg, op, x, **arguments):
    """The bytes of what the call promises."""
    result = getattr(pg, op)(x, **arguments)
    return (result if op == "reduce_scatter" else x).tobytes()


# ---- Results ----


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_collective_gives_the_bits_that_tcp_gives(n, small_areas):
    def body(pg):
        got = []
        for length in (0, n, 7 * n, 600 * n, *(1, n - 1, 1001)):
            for op in OPS[: -1 if length % n else None]:
                rooted = op in ("broadcast", "reduce", "gather", "scatter")
                for root in range(n) if rooted else [None]:
                    arguments = {} if root is None else {"root": root}
                    got.append(outcome(pg, op, noise(pg, length), **arguments))
        return got

    tcp, shared = over_both(n, body)
    assert tcp == shared


@pytest.mark.parametrize("small_bytes", [0, 1 << 20])
def test_every_dtype_and_reduction_gives_the_bits_that_tcp_gives(
    small_bytes, small_areas, monkeypatch
):
    monkeypatch.setattr(shm, "SMALL_BYTES", small_bytes)
    monkeypatch.setattr(shm, "AREA_BYTES", 8192)
    monkeypatch.setattr(shm, "FILE_BYTES", shm.PAGE + shm.AREAS * 8192)

    def body(pg):
        got = []
        for dtype in DTYPES[1:]:
            for reduce in ("sum", "avg", "min", "max", "prod"):
                x = noise(pg, 500, dtype)
                try:
                    pg.all_reduce(x, reduce)
                except UsageError:
                    continue
                got.append(x.tobytes())
        return got

    tcp, shared = over_both(3, body)
    assert len(tcp[0]) == 3 * 5 + 5 * 4 + 2 + 1
    assert tcp == shared


def test_arrays_of_any_strides_and_calls_that_are_not_waited_for(small_areas):
    run_groups(3, add_strided_arrays_without_waiting, transport="shm")


def test_a_sub_group_shares_memory_of_its_own():
    def body(pg):
        pair = pg.split(pg.rank // 2)
        x = np.full(10_000, float(pg.rank))
        pair.all_reduce(x)
        pg.all_reduce(x)
        assert pair.transport == "shm"
        pair.close()
        return x[0]

    assert run_groups(4, body, transport="shm") == [12.0] * 4


def test_no_rank_overtakes_one_that_reads_and_writes_late(small_areas, monkeypatch):
    reach = shm.Cut.slot

    def slowly(cut, owner, k, p):
        view = reach(cut, owner, k, p)
        if cut._memory.rank == 1 and random.random() < 0.3:
            time.sleep(1e-3)
        return view

    random = np.random.default_rng(0)
    monkeypatch.setattr(shm.Cut, "slot", slowly)

    def body(pg):
        for i in range(20):
            x = np.arange(1000.0) + pg.rank + i
            pg.all_reduce(x)
            assert (x == 3 * np.arange(1000) + 3 + 3 * i).all()
            table = np.full((3, 300), pg.rank + i)
            pg.all_gather(table)
            assert (table == np.arange(i, i + 3)[:, None]).all()

    run_groups(3, body, transport="shm")


# ---- Waiting ----


def test_a_sleeper_is_woken_by_a_bell_and_need_not_look_by_itself(monkeypatch):
    monkeypatch.setattr(shm, "NAP_SECONDS", 60.0)

    def body(pg):
        start = time.monotonic()
        for i in range(10):
            if pg.rank == i % 2:
                time.sleep(0.02)
            pg.barrier()
        return time.monotonic() - start

    assert max(run_groups(2, body, timeout=30.0, transport="shm")) < 10


def test_a_rank_that_gives_up_takes_its_arrival_back(monkeypatch):
    """Who comes later must not complete with it what it has called a failure."""
    gone = threading.Event()

    def body(pg):
        x = np.full(3, float(pg.rank))
        if pg.rank == 0:
            gone.wait(10)
        try:
            pg.all_reduce(x)
        except MindDPError:
            gone.set()
        memory = pg._backend._memory
        return memory.interval - memory._arrived[pg.rank][0], x[0]

    (_, zero), one = run_groups(2, body, timeout=0.3, transport="shm")
    assert zero == 0
    assert one == (1, 1.0)


# ---- Mismatch ----


@pytest.mark.parametrize("length", [10, 5000])
def test_a_mismatch_shows_both_calls_and_changes_no_array(length):
    def body(pg):
        pg.barrier()
        x = np.arange(length) * 1.0
        with pytest.raises(PeerMismatch) as caught:
            pg.all_reduce(x, "max" if pg.rank == 1 else "sum")
        assert (x == np.arange(length)).all()
        return caught.value.culprit, str(caught.value)

    for culprit, text in run_groups(4, body, transport="shm"):
        assert culprit == 1
        assert "float64 (max)" in text
        assert "float64 (sum)" in text


# ---- Is there memory to share? ----


def strangers(monkeypatch):
    """Rank 1's file cannot be found, as if it were on another host."""
    look = shm.map_file
    numbers = iter(range(100))

    def map_file(*args):
        if next(numbers) == 1:
            raise PermissionError("not yours")
        return look(*args)

    monkeypatch.setattr(shm, "map_file", map_file)


def test_auto_takes_tcp_on_all_ranks_if_one_cannot_reach_another(monkeypatch):
    strangers(monkeypatch)

    def body(pg):
        x = np.ones(10)
        pg.all_reduce(x)
        return pg.transport, x[0]

    before = descriptors()
    assert run_groups(3, body, transport="auto") == [("tcp", 3.0)] * 3
    assert descriptors() == before


def test_shm_is_refused_on_all_ranks_if_one_cannot_reach_another(monkeypatch):
    strangers(monkeypatch)
    before = descriptors()
    with pytest.raises(UsageError) as caught:
        run_groups(3, lambda pg: None, transport="shm")
    errors = caught.value.of_ranks
    assert all(isinstance(error, UsageError) for error in errors)
    assert len({str(error).split(" cannot")[0] for error in errors}) == 1
    assert sum("(not yours)" in str(error) for error in errors) == 1
    assert descriptors() == before


def test_a_system_without_memory_files_is_no_crash(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    get = lambda pg: pg.transport  # noqa: E731
    assert run_groups(2, get, transport="auto") == ["tcp"] * 2
    with pytest.raises(UsageError, match="rank 0 cannot map the memory of rank 0"):
        run_groups(2, get, transport="shm")


def test_another_process_with_this_descriptor_is_not_taken_for_a_rank():
    fd = shm.make_file(1, shm.FILE_BYTES)
    try:
        shm.map_file(os.getpid(), fd, 1, shm.FILE_BYTES).close()
        with pytest.raises(OSError, match="another one"):
            shm.map_file(os.getpid(), fd, 2, shm.FILE_BYTES)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def test_the_transport_is_an_argument_or_a_variable_and_must_be_known(monkeypatch):
    with pytest.raises(UsageError, match="transport=rdma is unknown"):
        minddp.init_process_group(rank=0, world_size=1, transport="rdma")
    monkeypatch.setenv("MINDDP_TRANSPORT", "infiniband")
    with pytest.raises(UsageError, match="MINDDP_TRANSPORT=infiniband is unknown"):
        minddp.init_process_group(rank=0, world_size=1)
    with minddp.init_process_group(rank=0, world_size=1, transport="shm") as pg:
        assert pg.transport == "tcp", "a world of one shares nothing"


@pytest.mark.processes
def test_ranks_that_disagree_about_the_transport_end_in_an_error_on_both():
    def meet():
        attempt(lambda: join(rendezvous_timeout=5.0).barrier())

    env_of = {1: {"MINDDP_TRANSPORT": "shm"}}
    for result in run(2, meet, env_of=env_of):
        assert result.raised["kind"] == "UsageError", result
        assert (
            "rank 0 wants the transport 'tcp', but rank 1 'shm'"
            in result.raised["text"]
        )
        assert result.code == 0


# ---- Arrays in shared memory ----


@pytest.mark.parametrize("n", [2, 3, 4])
def test_an_array_of_the_group_is_reduced_where_it_lies_to_the_same_bits(n):
    def body(pg):
        x = pg.zeros(10_001, np.float64)
        assert not x.any()
        got = []
        for reduce in ("sum", "avg", "max"):
            x[...] = noise(pg, len(x))
            pg.all_reduce(x, reduce)
            got.append(x.tobytes())
        x[...] = noise(pg, len(x))
        pg.all_reduce(x.view(np.int64), "max")
        return [*got, x.tobytes()]

    tcp, shared = over_both(n, body)
    assert tcp == shared


def test_it_is_not_copied(monkeypatch):
    def body(pg):
        x = pg.zeros(10_000, np.float32)
        x[...] = 1
        monkeypatch.setattr(shm, "Cut", None)
        pg.all_reduce(x)
        return x[-1]

    assert run_groups(2, body, transport="shm") == [2.0] * 2


def test_where_only_one_rank_takes_its_shared_array_all_copy():
    def body(pg):
        shared = pg.zeros(10_000, np.float64)
        x = shared if pg.rank == 1 else np.empty_like(shared)
        x[...] = pg.rank
        pg.all_reduce(x)
        assert (x == 3).all()
        half = shared[5000:]
        half[...] = 1
        pg.all_reduce(half)
        assert (half == 3).all()

    run_groups(3, body, transport="shm")


def test_its_memory_goes_with_the_array_and_lives_as_long():
    def body(pg):
        x = pg.zeros(10_000, np.float64)
        y = pg.zeros(10_000, np.float64)
        pg.all_reduce(y)
        del y
        pg.barrier()
        windows = len(pg._backend._memory._windows)
        pg.close()
        x[...] = 5
        return windows, x.sum()

    assert run_groups(2, body, transport="shm") == [(1, 50_000.0)] * 2
    gc.collect()
    assert not mapped()


def test_ddp_trains_to_the_bits_that_tcp_gives_in_shared_buckets(monkeypatch):
    monkeypatch.setattr(shm, "SMALL_BYTES", 1000)

    def body(pg):
        model = train_two_layers(pg)
        if pg.transport == "shm":
            large = [b for b in model.buckets if b.flat.nbytes > shm.SMALL_BYTES]
            assert len(pg._backend._memory._windows) == len(large) > 0
        return [p.data.tobytes() for p in model.parameters()]

    tcp, shared = over_both(3, body)
    assert tcp == shared


# ---- Nothing is left ----


def test_a_group_leaves_no_descriptor_no_memory_and_no_thread():
    def closes(pg):
        pg.zeros(10_000)
        pg.all_reduce(np.ones(10_000), async_op=True)

    def fails(pg):
        pg.barrier()
        if pg.rank == 1:
            raise ValueError("a reason")
        pg.all_reduce(np.ones(10_000))

    before = descriptors(), threading.active_count()
    run_groups(3, closes, transport="shm")
    with pytest.raises(ValueError, match="a reason") as caught:
        run_groups(3, fails, transport="shm")
    for error in caught.value.of_ranks[::2]:
        assert isinstance(error, PeerLost)
        assert "ValueError: a reason" in str(error)
    del caught, error
    gc.collect()
    assert (descriptors(), threading.active_count()) == before
    assert not mapped()


@pytest.mark.processes
def test_a_killed_rank_is_named_and_leaves_nothing():
    def loop():
        pg = join(transport="shm")
        bucket = pg.zeros(100_000)
        pg.all_reduce(bucket)
        attempt(lambda: reduce_for_ever(pg))
        pg.close()
        tell("files", open=os.listdir("/proc/self/fd"))

    before = sorted(os.listdir("/dev/shm"))
    with Ranks(3, loop) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "looping")
        at = ranks.signal(1, signal.SIGKILL)
        results = ranks.results(ranks=[0, 2])
    for result in results:
        assert (result.raised["kind"], result.raised["culprit"]) == ("PeerLost", 1)
        assert result.raised["at"] - at < 2.0
        assert (result.code, result.err) == (0, "")
    assert sorted(os.listdir("/dev/shm")) == before


@pytest.mark.processes
def test_who_waits_in_shared_memory_sleeps_and_gives_up_at_the_deadline():
    def wait_for_rank_1():
        import signal

        pg = join(transport="shm")
        x = np.ones(1 << 20)
        pg.all_reduce(x)
        if pg.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        tell("waiting")
        attempt(lambda: pg.all_reduce(x))

    with Ranks(3, wait_for_rank_1) as ranks:
        results = ranks.results(ranks=[0, 2])
        ranks.signal(1, signal.SIGCONT)
        (back,) = ranks.results(ranks=[1])
    for result in [*results, back]:
        assert result.raised["culprit"] == 1
        assert result.raised["kind"] == "PeerTimeout"
        assert "not responding" in result.raised["text"]
    for result in results:
        start, end = result.facts["waiting"], result.raised
        assert 0.9 * 2.0 < end["at"] - start["at"] < 2.0 + 2.0
        assert end["cpu"] - start["cpu"] < 0.05 * (end["at"] - start["at"])


@pytest.mark.processes
def test_processes_find_each_other_by_themselves():
    def sum_up():
        with join(transport="auto") as pg:
            x, shared = np.full(300_000, 1.0 + pg.rank), pg.zeros(300_000, np.float64)
            shared[...] = x
            pg.all_reduce(x)
            pg.all_reduce(shared)
            assert (x == 6).all() and (shared == 6).all()
            tell("done", transport=pg.transport)

    for result in run(3, sum_up):
        assert result.facts["done"]["transport"] == "shm"
        assert (result.code, result.err) == (0, "")
