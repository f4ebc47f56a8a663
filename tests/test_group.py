"""ProcessGroup over real TCP on loopback, and in shared memory where nothing asks for
TCP; the ranks are threads of this process."""

import threading
import time

import numpy as np
import pytest

import minddp
from minddp.errors import (
    MindDPError,
    PeerLost,
    PeerMismatch,
    PeerTimeout,
    UsageError,
)
from minddp.frame import DTYPES, HEADER_BYTES
from minddp.testing import run_groups

FLOATS = ["float16", "float32", "float64"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8"]


@pytest.fixture(params=["tcp", "shm"])
def transport(request):
    return request.param


def revealing(rank, shape, dtype=np.float64):
    return (100 * rank + np.arange(np.prod(shape)).reshape(shape)).astype(dtype)


def errors_of(n, body, cause=MindDPError, **settings):
    """The error of each rank, None where there was none; `cause` is the root cause."""
    with pytest.raises(cause) as caught:
        run_groups(n, body, **settings)
    return caught.value.of_ranks


# ---- Results ----


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_every_collective_gives_the_right_array(n, transport):
    def body(pg):
        x = revealing(pg.rank, (n, 3))
        pg.all_reduce(x)
        assert (x == sum(revealing(r, (n, 3)) for r in range(n))).all()

        x = revealing(pg.rank, (n, 3))
        pg.all_reduce(x, op="avg")
        assert (x == np.mean([revealing(r, (n, 3)) for r in range(n)], axis=0)).all()

        x = revealing(pg.rank, (n, 3))
        mine = pg.reduce_scatter(x)
        assert (mine == sum(revealing(r, (n, 3)) for r in range(n))[pg.rank]).all()

        table = np.zeros((n, 3))
        table[pg.rank] = pg.rank
        pg.all_gather(table)
        assert (table == np.arange(n)[:, None]).all()

        x = revealing(pg.rank, (n, 3))
        pg.broadcast(x, root=n - 1)
        assert (x == revealing(n - 1, (n, 3))).all()

        pg.barrier()
        return pg.stats()["collectives"]

    assert run_groups(n, body, transport=transport) == [6] * n


@pytest.mark.parametrize("n", [2, 3])
def test_the_result_lands_in_the_callers_array_whatever_its_strides(n, transport):
    def views():
        yield lambda a: a[:, 0]
        yield lambda a: a.T
        yield lambda a: a[::-1]
        yield lambda a: a[::2, 1:]
        yield lambda a: np.asfortranarray(a)
        yield lambda a: a[0, 0, ...]  # 0-d
        yield lambda a: a[:0]  # empty
        yield lambda a: a.astype(a.dtype.newbyteorder(">"))

    def body(pg):
        for view in views():
            whole = revealing(pg.rank, (6, 4))
            x = view(whole)
            untouched = whole.copy()
            pg.all_reduce(x)
            expected = sum(view(revealing(r, (6, 4))) for r in range(n))
            assert x.tolist() == expected.tolist()
            if x.base is not None:
                view(untouched)[...] = expected
                assert (whole == untouched).all(), "a neighbour element was written"

    run_groups(n, body, transport=transport)


def allowed(dtype, op):
    if dtype == "bool":
        return op in ("min", "max")
    return dtype in FLOATS or op != "avg"


def test_the_table_of_dtypes_and_reductions_holds(transport):
    def body(pg):
        for dtype in DTYPES[1:-1]:
            for op in ("sum", "avg", "min", "max", "prod"):
                x = np.array([1, 0, 1]).astype(dtype) + np.array(pg.rank).astype(dtype)
                ranks = [
                    np.array([1, 0, 1]).astype(dtype) + np.array(r).astype(dtype)
                    for r in range(3)
                ]
                if not allowed(dtype, op):
                    with pytest.raises(UsageError, match=f"{dtype} by '{op}'"):
                        pg.all_reduce(x, op)
                    continue
                pg.all_reduce(x, op)
                expected = {
                    "sum": np.sum,
                    "avg": np.mean,
                    "min": np.min,
                    "max": np.max,
                    "prod": np.prod,
                }[op](ranks, axis=0)
                assert x.tolist() == expected.astype(dtype).tolist(), (dtype, op)

    run_groups(3, body, transport=transport)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (
            lambda pg: pg.all_reduce([1.0, 2.0]),
            "takes a NumPy array, not builtins.list",
        ),
        (lambda pg: pg.all_reduce(np.float64(1)), "not numpy.float64"),
        (lambda pg: pg.all_reduce(np.ones(3, complex)), "all_reduce of complex128"),
        (lambda pg: pg.all_reduce(np.array(["a"])), "all_reduce of str32"),
        (lambda pg: pg.all_reduce(np.ones(3), "mean"), "by 'mean': it can be sum, avg"),
        (lambda pg: pg.all_reduce(np.ones(3), ""), "by '': it can be sum"),
        (lambda pg: pg.all_reduce(np.ones(3), None), "by None: it can be sum"),
        (lambda pg: pg.all_reduce(np.ma.ones(3)), "not numpy.ma.MaskedArray"),
        (lambda pg: pg.all_reduce(np.ones(3), bucket=40000), "number from -1 to 32767"),
        (lambda pg: pg.all_reduce(np.ones(3), bucket="x"), "for bucket 'x'"),
        (lambda pg: pg.broadcast(np.ones(3), root=1.0), "from root 1.0"),
        (lambda pg: pg.broadcast(np.ones(3), root=None), "from root None"),
        (
            lambda pg: pg.broadcast(np.ones(3), root=2),
            "root 2: it is a whole number from 0 to 1",
        ),
        (
            lambda pg: pg.all_reduce(np.broadcast_to(np.ones(1), 3)),
            "in place, but this one is read-only",
        ),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_sent(bad, says):
    def body(pg):
        with pytest.raises(UsageError, match=says):
            bad(pg)
        assert pg.stats()["bytes_sent"] == 0
        x = np.ones(3)
        pg.all_reduce(x)  # the group lives on
        return x.tolist()

    assert run_groups(2, body) == [[2.0] * 3] * 2


# ---- Bytes ----


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_bytes_of_a_socket_equal_the_formula(n):
    def body(pg):
        x = np.ones(12 * 10_000, np.float32)
        for _ in range(5):
            pg.all_reduce(x)
        return pg.stats(), x.nbytes

    for stats, nbytes in run_groups(n, body):
        payload = 5 * 2 * (n - 1) * nbytes // n
        assert stats["header_bytes"] == 5 * HEADER_BYTES
        assert stats["bytes_sent"] == stats["bytes_received"] == payload + 220
        assert stats["messages"] == 5 * 2 * (n - 1)
        assert stats["collectives"] == 5


def test_a_world_of_one_sends_nothing():
    with minddp.init_process_group(rank=0, world_size=1) as pg:
        x = np.arange(3.0)
        pg.all_reduce(x, op="avg")
        pg.broadcast(x)
        pg.all_gather(x)
        pg.barrier()
        assert pg.reduce_scatter(x).tolist() == x.tolist() == [0, 1, 2]
        assert pg.stats()["bytes_sent"] == 0


# ---- Failures ----


@pytest.mark.parametrize(
    ("odd", "shown"),
    [
        (lambda pg: pg.broadcast(np.ones(3)), "broadcast #6 of 3 float64"),
        (lambda pg: pg.all_reduce(np.ones(4)), "all_reduce #6 of 4 float64"),
        (lambda pg: pg.all_reduce(np.ones(3, "f4")), "all_reduce #6 of 3 float32"),
        (lambda pg: pg.all_reduce(np.ones(3), "max"), "of 3 float64 (max)"),
        (lambda pg: pg.barrier(), "barrier #6"),
    ],
)
def test_one_rank_of_three_in_another_call_is_named_on_all(odd, shown, transport):
    def body(pg):
        for _ in range(5):
            pg.barrier()
        if pg.rank == 1:
            odd(pg)
        else:
            pg.all_reduce(np.ones(3))

    for error in errors_of(3, body, transport=transport):
        assert isinstance(error, PeerMismatch)
        assert error.culprit == 1
        assert shown in str(error)
        assert "all_reduce #6 of 3 float64 (sum)" in str(error)
        assert "Rank 1 is the odd one out" in str(error)


@pytest.mark.parametrize("extra", range(3))
def test_one_rank_that_makes_a_call_too_many_is_told_so(extra, transport):
    """All others leave in good order, in any order: nobody crashed."""

    def body(pg):
        for _ in range(6 + (pg.rank == extra)):
            pg.barrier()

    for rank, error in enumerate(errors_of(3, body, transport=transport)):
        if rank == extra:
            assert isinstance(error, PeerLost)
            assert "closed its group after 6 collectives" in str(error)
            assert "crashed" not in str(error)


def test_with_two_ranks_a_mismatch_shows_both_sides(transport):
    def body(pg):
        pg.all_reduce(np.ones(100 if pg.rank == 0 else 200))

    for error in errors_of(2, body, transport=transport):
        assert isinstance(error, PeerMismatch)
        assert "of 100 float64" in str(error)
        assert "of 200 float64" in str(error)


def test_an_exception_on_one_rank_is_told_to_all(transport):
    def body(pg):
        pg.barrier()
        if pg.rank == 2:
            raise ValueError("no such file: digits")
        pg.all_reduce(np.ones(3))

    errors = errors_of(4, body, ValueError, transport=transport)
    for rank in (0, 1, 3):
        assert isinstance(errors[rank], PeerLost)
        assert errors[rank].culprit == 2
        assert "rank 2 ended with ValueError: no such file: digits" in str(errors[rank])


def test_a_rank_that_leaves_early_is_named_by_those_that_go_on(transport):
    def body(pg):
        pg.barrier()
        if pg.rank != 1:
            pg.barrier()

    for rank, error in enumerate(errors_of(3, body, transport=transport)):
        if rank != 1:
            assert isinstance(error, PeerLost)
            assert error.culprit == 1
            assert "rank 1 closed its group after 1 collectives" in str(error)


def test_a_rank_that_closes_one_call_short_finds_out_when_it_closes():
    left = threading.Event()

    def body(pg):
        if pg.rank == 2:
            left.wait(5)
            time.sleep(0.1)  # until the goodbye has come
        else:
            # Rank 1 only needs to hear that rank 0 is there; rank 0 waits for rank 2.
            pg.broadcast(np.ones(1), root=1)
            pg.close()
            left.set()

    errors = errors_of(3, body)
    assert errors[1] is None
    assert isinstance(errors[0], PeerLost)
    assert isinstance(errors[2], PeerMismatch)
    assert "rank 2 closes its group after 0 collectives, but rank 1 made 1" in str(
        errors[2]
    )


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_rank_that_is_alive_but_elsewhere_is_named(late, transport):
    gone = threading.Event()

    def body(pg):
        pg.barrier()
        if pg.rank == late:
            gone.wait(10)
        try:
            pg.all_reduce(np.ones(3))
            pg.barrier()  # the late one may find all of #2 there, but not the rest
        finally:
            gone.set()

    for error in errors_of(3, body, timeout=0.8, transport=transport):
        assert isinstance(error, PeerTimeout)
        assert error.culprit == late
        assert f"rank {late} is alive but has not entered collective #2" in str(error)


def test_a_dead_group_stays_dead_and_says_why_at_once(transport):
    def body(pg):
        x = np.ones(3 + (pg.rank == 1))
        with pytest.raises(PeerMismatch) as first:
            pg.all_reduce(x)
        start = time.monotonic()
        for _ in range(100):
            with pytest.raises(PeerMismatch) as again:
                pg.barrier()
            assert str(again.value) == str(first.value)
        assert time.monotonic() - start < 1.0
        assert x.tolist() == [1.0] * len(x), "a mismatch leaves arrays as they were"

    run_groups(2, body, transport=transport)


def test_an_interrupt_in_a_collective_ends_the_group_on_all_ranks(monkeypatch):
    from minddp import ring
    from minddp.backends import tcp

    waiting = threading.Event()

    def interrupted(links, *rest):
        if links.rank == 1:
            raise KeyboardInterrupt
        ring.all_reduce(links, *rest)

    monkeypatch.setitem(tcp.RING, "all_reduce", interrupted)

    def body(pg):
        try:
            pg.all_reduce(np.ones(3))
        except KeyboardInterrupt:
            waiting.set()
            with pytest.raises(PeerLost, match="rank 1 failed in all_reduce #1"):
                pg.barrier()

    errors = errors_of(2, body)
    assert waiting.is_set()
    assert isinstance(errors[0], PeerLost)
    assert errors[0].culprit == 1
    assert "KeyboardInterrupt" in str(errors[0])


def test_a_group_that_a_signal_handler_closes_in_a_collective_ends_on_all_ranks():
    """The handler runs in the thread that holds the group's lock."""
    from minddp import ring

    original = ring.pump

    def body(pg):
        pg.barrier()
        if pg.rank == 1:
            time.sleep(0.3)
            with pytest.raises(PeerLost, match="closed its group during a collective"):
                pg.barrier()
            return None

        def pump_with_signal(*args):
            with pytest.raises(UsageError, match="is in a collective already"):
                pg.barrier()
            pg.close()
            return original(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ring, "pump", pump_with_signal)
            with pytest.raises(UsageError, match="was aborted while it was in barrier"):
                pg.barrier()
        return "ended"

    assert run_groups(2, body) == ["ended", None]


def test_a_closed_group_refuses_calls_and_closes_twice(transport):
    def body(pg):
        pg.barrier()
        pg.close()
        pg.close()
        with pytest.raises(UsageError, match=r"of rank [01] is closed"):
            pg.barrier()

    run_groups(2, body, transport=transport)


def test_what_one_rank_completed_all_can_complete(transport):
    """Ranks that close at once after the last call do not cut off the slower ones."""

    def body(pg):
        for i in range(30):
            x = np.full(20_000, float(pg.rank + i))
            pg.all_reduce(x)
        return x[-1]

    for _ in range(5):
        assert run_groups(3, body, transport=transport) == [90.0] * 3


@pytest.mark.parametrize("seconds", [np.float32(5), float("inf"), 1e9, True])
def test_a_timeout_may_be_any_positive_number(seconds):
    def body(pg):
        x = np.ones(3)
        pg.all_reduce(x)
        return x.tolist()

    assert run_groups(2, body, timeout=seconds) == [[2.0] * 3] * 2


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), None, "abc"])
def test_a_timeout_must_be_positive(seconds):
    with pytest.raises(UsageError, match="timeout must be a positive number"):
        minddp.init_process_group(rank=0, world_size=1, timeout=seconds)


@pytest.mark.parametrize("n", [1, 3])
def test_rows_of_all_ranks_make_a_table(n):
    def body(pg):
        table = pg.all_gather_rows([pg.rank, 10 * pg.rank])
        deep = pg.all_gather_rows(np.full((2, 3), pg.rank, np.float32))
        alone = pg.all_gather_rows(pg.rank)
        return table.tolist(), deep.shape, str(deep.dtype), alone.tolist()

    rows = [[r, 10 * r] for r in range(n)]
    expected = rows, (n, 2, 3), "float32", list(range(n))
    assert run_groups(n, body) == [expected] * n
