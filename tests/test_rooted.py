"""reduce, gather, scatter and all-to-all: what ends where, and what is left alone."""

import numpy as np
import pytest

from minddp import ring, rooted
from minddp.errors import PeerMismatch, UsageError
from minddp.frame import HEADER_BYTES, Header, Kind
from minddp.net import Deadline
from minddp.testing import run_groups, run_ranks

WORLDS = [2, 3, 4, 5]
OPS = ["reduce", "gather", "scatter", "all_to_all"]


def call(op, x, root=0, reduce="sum"):
    reduce = reduce if op == "reduce" else ""
    fields = op, reduce, x.dtype.name, root, -1, x.size, x.nbytes
    return Header(Kind.DATA, 1, *fields)


def revealing(rank, length):
    return 1000.0 * rank + np.arange(length)


def perform(links, op, length, root=0, reduce="sum"):
    x = revealing(links.rank, length)
    header = call(op, x, root, reduce)
    getattr(rooted, op)(links, x, header, Deadline(10))
    return x


def sizes(n, op):
    whole = [0, n, 3 * n, 40 * n]
    return whole if op == "all_to_all" else [*whole, 1, n - 1, 7 * n + 2]


@pytest.fixture(params=[16, ring.SEGMENT_BYTES])
def segment_bytes(request, monkeypatch):
    monkeypatch.setattr(ring, "SEGMENT_BYTES", request.param)


def expected(op, n, length, root, reduce="sum"):
    """What every rank has afterwards."""
    before = [revealing(r, length) for r in range(n)]
    after = [x.copy() for x in before]
    chunks = [ring.chunk(length, n, k) for k in range(n)]
    if op == "reduce":
        combine = {"sum": np.sum, "avg": np.mean, "max": np.max}[reduce]
        after[root] = combine(before, axis=0)
    for k, part in enumerate(chunks):
        if op == "gather":
            after[root][part] = before[k][part]
        elif op == "scatter":
            after[k][part] = before[root][part]
        elif op == "all_to_all":
            for r in range(n):
                after[r][part] = before[k][chunks[r]]
    return after


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", WORLDS)
def test_everything_lands_where_it_should_and_nothing_else_is_written(
    n, op, segment_bytes
):
    for length in sizes(n, op):
        for root in range(n):
            results = run_ranks(
                n,
                lambda links, length=length, root=root: perform(
                    links, op, length, root
                ),
                seed=root,
                capacity=48,
            )
            for x, y in zip(results, expected(op, n, length, root), strict=True):
                assert x.tolist() == y.tolist(), (length, root)


@pytest.mark.parametrize("reduce", ["avg", "max"])
def test_the_root_may_take_the_average_or_the_largest(reduce):
    results = run_ranks(3, lambda links: perform(links, "reduce", 10, 1, reduce))
    for x, y in zip(results, expected("reduce", 3, 10, 1, reduce), strict=True):
        assert x.tolist() == y.tolist()


@pytest.mark.parametrize("op", OPS)
def test_the_bytes_on_the_wire_are_those_of_the_plan(op):
    for n in WORLDS:
        for length in sizes(n, op):
            header = call(op, np.zeros(length), root=1)

            def body(links, op=op, length=length):
                perform(links, op, length, root=1)
                return links.bytes_sent, links.bytes_received

            for r, (sent, received) in enumerate(run_ranks(n, body)):
                right = (r + 1) % n
                assert received == HEADER_BYTES + sum(ring.arrivals(header, r, n))
                assert sent == HEADER_BYTES + sum(ring.arrivals(header, right, n))


def test_what_each_rank_receives():
    x = np.zeros(8)
    reduce, gather, scatter, exchange = (call(op, x, root=1) for op in OPS)
    assert [ring.arrivals(reduce, r, 4) for r in range(4)] == [[64], [64], [], [64]]
    assert [len(ring.arrivals(gather, r, 4)) for r in range(4)] == [2, 3, 0, 1]
    assert [len(ring.arrivals(scatter, r, 4)) for r in range(4)] == [1, 0, 3, 2]
    assert [sum(ring.arrivals(exchange, r, 4)) for r in range(4)] == [6 * 16] * 4


# ---- In a process group ----


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_group_offers_them_for_arrays_of_any_strides(n, transport):
    def body(pg):
        x = np.full((n, 4), float(pg.rank))
        pg.reduce(x.T, root=n - 1)
        assert (x == (sum(range(n)) if pg.rank == n - 1 else pg.rank)).all()
        table = np.full((n, 2), -1.0)
        table[pg.rank] = pg.rank
        pg.gather(table, root=n - 1)
        if pg.rank == n - 1:
            assert table[:, 0].tolist() == list(range(n))
        table[...] = 10 * pg.rank + np.arange(n)[:, None]
        pg.scatter(table, root=n - 1, async_op=True).wait()
        assert table[pg.rank].tolist() == [10 * (n - 1) + pg.rank] * 2
        table[...] = 10 * pg.rank + np.arange(n)[:, None]
        pg.all_to_all(table)
        assert table[:, 1].tolist() == [10 * r + pg.rank for r in range(n)]

    run_groups(n, body, transport=transport)


def test_objects_are_broadcast_as_json():
    content = {"lr": 0.1, "layers": [1, 2, {"é": None}], "empty": "", "ok": True}

    def body(pg):
        told = pg.broadcast_object(content if pg.rank == 1 else None, root=1)
        nothing = pg.broadcast_object("" if pg.rank == 0 else 3)
        return told, nothing

    assert run_groups(3, body) == [(content, "")] * 3


def test_what_json_cannot_say_is_refused():
    def body(pg):
        with pytest.raises(UsageError, match="JSON cannot say"):
            pg.broadcast_object({1, 2})

    run_groups(1, body)


def test_wrong_calls_are_refused_before_anything_is_sent():
    def body(pg):
        for wrong, says in (
            (lambda: pg.all_to_all(np.zeros(3)), "multiple of the 2 ranks"),
            (lambda: pg.reduce(np.zeros(3), root=2), "reduce to root 2"),
            (lambda: pg.reduce(np.zeros(3), op="mean"), "sum, avg"),
            (lambda: pg.gather([1.0], root=0), "NumPy array"),
            (lambda: pg.scatter(np.zeros(3), root=-1), "scatter from root -1"),
        ):
            with pytest.raises(UsageError, match=says):
                wrong()
        pg.barrier()

    run_groups(2, body)


def test_two_roots_are_a_mismatch_that_names_both():
    with pytest.raises(PeerMismatch) as caught:
        run_groups(2, lambda pg: pg.gather(np.zeros(4), root=pg.rank))
    for error in caught.value.of_ranks:
        assert "root 0" in str(error)
        assert "root 1" in str(error)
