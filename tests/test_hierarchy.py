"""Hosts with several ranks each: right sums, few bytes on the cable, nobody misjudged.

A layout is a string, one letter a rank: "AABB" has ranks 0 and 1 on host A.
"""

import gc
import os
import random
import re
import signal
import threading
import time

import numpy as np
import pytest
from bodies import add_strided_arrays_without_waiting, train_two_layers
from hosts import PORT, Hosts
from ranks import Ranks, attempt, descriptors, join, mapped, reduce_for_ever, tell

from minddp import hierarchy, ring, shm
from minddp.bfloat16 import from_bfloat16, to_bfloat16
from minddp.environment import from_environment
from minddp.errors import PeerLost, PeerMismatch, PeerTimeout, UsageError
from minddp.frame import DTYPES, HEADER_BYTES, Header, Kind
from minddp.net import Deadline
from minddp.testing import run_groups

LAYOUTS = ["AABB", "AAAB", "ABB", "ABAB", "BAACCA"]
NUMPY = {
    "sum": np.add,
    "avg": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
}


def across(layout, body, transport="auto", **settings):
    """What body gives on each rank."""
    return run_groups(len(layout), body, transport=transport, hosts=layout, **settings)


@pytest.fixture
def small_areas(monkeypatch):
    """Areas that a thousand numbers do not fit into, and no array is small."""
    monkeypatch.setattr(shm, "AREA_BYTES", 1024)
    monkeypatch.setattr(shm, "FILE_BYTES", shm.PAGE + shm.AREAS * 1024)
    monkeypatch.setattr(shm, "SMALL_BYTES", 64)
    monkeypatch.setattr("minddp.combine.BLOCK_BYTES", 64)
    monkeypatch.setattr(ring, "WHOLE_BYTES", 64)


def whole_numbers(rank, length, dtype="float64"):
    """1, 2 and 3, differently mixed on every rank; sums are exact in any dtype."""
    x = np.random.default_rng(rank).integers(1, 4, length)
    if dtype == "bfloat16":
        return to_bfloat16(x.astype("f4"))
    return (x > 1) if dtype == "bool" else x.astype(dtype)


def noise(rank, length):
    """Numbers whose sum depends on the order of addition."""
    random = np.random.default_rng(rank)
    return random.standard_normal(length) * 10.0 ** random.integers(-4, 4, length)


def expected(n, length, dtype, reduce):
    """What NumPy makes of the whole numbers of n ranks."""
    arrays = [whole_numbers(rank, length, dtype) for rank in range(n)]
    if dtype == "bfloat16":
        return to_bfloat16(np.sum([from_bfloat16(x) for x in arrays], 0, "f4"))
    total = NUMPY[reduce].reduce(arrays, axis=0, dtype=dtype)
    return total / np.array(n, dtype) if reduce == "avg" else total


# ---- Results ----


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_dtype_and_reduction_gives_what_numpy_gives(layout, small_areas):
    def body(pg):
        assert pg.transport == "shm+tcp"
        done = 0
        for dtype in DTYPES[1:]:
            for reduce in NUMPY:
                x = whole_numbers(pg.rank, 999, dtype)
                try:
                    pg.all_reduce(x, reduce)
                except UsageError:
                    continue
                want = expected(pg.world_size, 999, dtype, reduce)
                assert x.dtype == want.dtype
                assert (x == want).all(), (dtype, reduce)
                done += 1
        return done

    assert across(layout, body) == [3 * 5 + 5 * 4 + 2 + 1] * len(layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_of_any_length_and_those_of_the_group(layout, small_areas):
    def body(pg):
        for length in (0, 1, 2, 7, 100, 5000):
            for reduce in ("sum", "avg"):
                own, shared = np.empty(length), pg.zeros(length, np.float64)
                for x in own, shared:
                    x[...] = whole_numbers(pg.rank, length)
                    pg.all_reduce(x, reduce)
                    want = expected(pg.world_size, length, "float64", reduce)
                    assert (x == want).all(), (length, reduce)

    across(layout, body)


@pytest.mark.parametrize("layout", ["AABB", "BAACCA"])
def test_all_ranks_have_the_same_bits(layout):
    def body(pg):
        got = []
        for length in (3, 1000, 50_001):
            for x in np.empty(length), pg.zeros(length, np.float64):
                for reduce in ("sum", "avg"):
                    x[...] = noise(pg.rank, length)
                    pg.all_reduce(x, reduce)
                    got.append(x.tobytes())
        return got

    results = across(layout, body)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_other_collective_gives_what_tcp_gives(layout, small_areas):
    def body(pg):
        n, got = pg.world_size, []
        for length in (0, n, 600 * n):
            for op in ("reduce_scatter", "all_gather", "all_to_all"):
                x = whole_numbers(pg.rank, length)
                result = getattr(pg, op)(x)
                got.append((result if op == "reduce_scatter" else x).tobytes())
            for op in ("broadcast", "reduce", "gather", "scatter"):
                for root in range(n):
                    x = whole_numbers(pg.rank, length)
                    getattr(pg, op)(x, root)
                    got.append(x.tobytes())
        pg.barrier()
        return got

    assert across(layout, body) == across(layout, body, "tcp")


def test_calls_that_are_not_waited_for_and_arrays_of_any_strides(small_areas):
    across("ABB", add_strided_arrays_without_waiting)


def test_nobody_returns_while_another_still_copies_from_or_to_its_array(
    small_areas, monkeypatch
):
    copy = hierarchy.hand_out

    def late(*args):
        time.sleep(2e-3 * random.random())
        copy(*args)

    monkeypatch.setattr(hierarchy, "hand_out", late)

    def body(pg):
        x = pg.zeros(1000, np.float64)
        for i in range(30):
            x[...] = pg.rank + i
            pg.all_reduce(x)
            assert (x == 3 + 3 * i).all()

    across("ABB", body)
    across("AAB", body)


def test_a_barrier_waits_for_all_ranks_of_all_hosts():
    came = []

    def body(pg):
        for late in range(pg.world_size):
            if pg.rank == late:
                time.sleep(0.05)
                came.append(late)
            pg.barrier()
            assert late in came

    across("AABB", body)


def test_ddp_trains_alike_on_all_ranks_in_buckets_that_a_host_shares(monkeypatch):
    monkeypatch.setattr(shm, "SMALL_BYTES", 1000)

    def body(pg):
        model = train_two_layers(pg)
        if pg.transport == "shm+tcp":
            large = [b for b in model.buckets if b.flat.nbytes > shm.SMALL_BYTES]
            assert len(pg._backend._tiers.memory._windows) == len(large) > 0
        return [p.data.copy() for p in model.parameters()]

    tcp, here = across("AABB", body, "tcp"), across("AABB", body)
    for result in here:
        for p, same, near in zip(result, here[0], tcp[0], strict=True):
            assert p.tobytes() == same.tobytes()
            np.testing.assert_allclose(p, near, rtol=1e-5, atol=1e-6)


# ---- What it costs ----


@pytest.mark.parametrize("layout", ["AABB", "BAACCA"])
@pytest.mark.parametrize("shared", [False, True])
def test_the_bytes_between_hosts_are_those_of_a_ring_of_hosts(layout, shared):
    def body(pg):
        length = 6 * 20_000
        x = pg.zeros(length, np.float32) if shared else np.ones(length, np.float32)
        before = pg.stats()
        pg.all_reduce(x, "avg")
        after = pg.stats()
        names = "bytes_sent", "bytes_received", "header_bytes", "messages"
        return x.nbytes, *(after[name] - before[name] for name in names)

    hosts = len(set(layout))
    for rank, result in enumerate(across(layout, body)):
        nbytes, sent, received, headers, messages = result
        if layout.index(layout[rank]) == rank:
            moved = 2 * (hosts - 1) * nbytes // hosts + 2 * HEADER_BYTES
            assert (sent, received, headers) == (moved, moved, 2 * HEADER_BYTES)
            assert messages == 2 * (hosts - 1)
        else:
            assert (sent, received, headers) == (HEADER_BYTES,) * 3
            assert messages == 0


# ---- Who shares a host? ----


def chosen(pg):
    pg.barrier()
    return pg.transport


@pytest.mark.parametrize(
    ("layout", "auto"),
    [("AAA", "shm"), ("AB", "tcp"), ("ABC", "tcp"), ("AAB", "shm+tcp"), ("", "shm")],
)
def test_auto_shares_what_can_be_shared(layout, auto):
    n = len(layout) or 2
    assert run_groups(n, chosen, transport="auto", hosts=layout) == [auto] * n


def test_a_host_may_have_any_name():
    # the first is what the system gives for bytes that are no text
    odd, other = "\udcff", "h\u00f4te"
    assert across([odd, odd, other], chosen) == ["shm+tcp"] * 3


def test_shm_insists_that_some_ranks_share_a_host():
    assert across("ABA", chosen, "shm") == ["shm+tcp"] * 3
    before = descriptors()
    with pytest.raises(UsageError) as caught:
        across("ABC", chosen, "shm")
    for error in caught.value.of_ranks:
        assert isinstance(error, UsageError)
        assert "the 3 ranks are on as many hosts" in str(error)
    assert descriptors() == before


def test_a_host_whose_ranks_do_not_reach_each_other_takes_tcp_or_is_named(monkeypatch):
    look, here = shm.map_file, os.getpid()

    def map_file(pid, fd, name, nbytes):
        if threading.current_thread() is blind:
            raise PermissionError("not yours")
        return look(here, fd, name, nbytes)

    monkeypatch.setattr(shm, "map_file", map_file)
    meet = shm.meet

    def meet_blindly(links, *args):
        nonlocal blind
        if links.rank == 3:
            blind = threading.current_thread()
        return meet(links, *args)

    blind = None
    monkeypatch.setattr(shm, "meet", meet_blindly)
    before = descriptors()
    assert across("AABB", chosen) == ["tcp"] * 4
    with pytest.raises(UsageError) as caught:
        across("AABB", chosen, "shm")
    for rank, error in enumerate(caught.value.of_ranks):
        assert "rank 3 cannot map the memory of rank 2" in str(error)
        assert ("(not yours)" in str(error)) == (rank == 3)
    del caught, error
    assert descriptors() == before


def test_leaders_who_do_not_find_each_other_leave_nothing_behind(monkeypatch):
    def refuse(rendezvous, members, *args):
        if tuple(members) == (0, 2) and rendezvous.job.rank == 2:
            raise ValueError("no way")
        return join_ring(rendezvous, members, *args)

    join_ring = hierarchy.Rendezvous.join_ring
    monkeypatch.setattr(hierarchy.Rendezvous, "join_ring", refuse)
    before = descriptors()
    with pytest.raises(ValueError, match="no way") as caught:
        across("AABB", chosen)
    errors = caught.value.of_ranks
    assert [getattr(error, "culprit", None) for error in errors] == [2, 2, None, 2]
    del caught, errors
    gc.collect()
    assert descriptors() == before


def test_the_host_id_is_a_variable_and_the_kernels_word_does_without():
    assert from_environment({"MINDDP_HOSTID": "left"}).host_id == "left"
    assert from_environment({}).host_id == ""
    assert hierarchy.kernels_word() == hierarchy.kernels_word()
    assert "net:[" in hierarchy.kernels_word()


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_a_sub_group_chooses_for_itself(transport):
    def body(pg):
        x, got = np.full(10_000, float(pg.rank)), []
        for color in pg.rank // 2, pg.rank % 2, 0:
            group = pg.split(color)
            y = x.copy()
            group.all_reduce(y)
            got.append((group.transport, y[0]))
            group.close()
        return got

    results = across("AABB", body, transport)
    for rank, (host, column, all_ranks) in enumerate(results):
        assert host == ("shm", [1, 5][rank // 2])
        assert column == ("tcp", [2, 4][rank % 2])
        assert all_ranks == ("shm+tcp", 6)


# ---- Failures ----


@pytest.mark.parametrize("shared", [False, True])
def test_a_slow_network_is_waited_for_as_long_as_bytes_move(shared, monkeypatch):
    """Also by ranks that see none of it, and by those who have had their data."""

    def slowly(links, buffers):
        time.sleep(0.01)
        return send(links, [memoryview(next(iter(buffers)))[:2000]])

    send = hierarchy.LeaderLinks.send_some
    monkeypatch.setattr(hierarchy.LeaderLinks, "send_some", slowly)

    def body(pg):
        x = pg.zeros(30_000) if shared else np.zeros(30_000, np.float32)
        pg.barrier()
        start = time.monotonic()
        x[...] = 1
        pg.all_reduce(x)
        pg.broadcast(x, root=1)
        pg.barrier()
        assert (x == 4).all()
        return time.monotonic() - start

    timeout = 0.4
    assert min(across("AABB", body, timeout=timeout)) > 2 * timeout


@pytest.mark.parametrize("odd", [0, 1, 3])
@pytest.mark.parametrize("other", ["all_reduce", "gather"])
def test_a_mismatch_is_named_on_all_hosts(odd, other):
    """And no array takes a byte of another call."""

    def body(pg):
        pg.barrier()
        x = np.arange(40_000.0)
        with pytest.raises(PeerMismatch) as caught:
            if pg.rank == odd:
                getattr(pg, other)(
                    x, **({"op": "max"} if other == "all_reduce" else {})
                )
            else:
                pg.all_reduce(x, "avg")
        assert pg.rank // 2 != odd // 2 or (x == np.arange(40_000)).all()
        return caught.value.culprit, str(caught.value)

    for culprit, text in across("AABB", body):
        assert culprit == odd
        assert "(avg)" in text
        assert ("(max)" if other == "all_reduce" else "gather") in text


def test_of_two_camps_on_one_host_no_array_takes_a_byte_of_the_other():
    """Every rank of host A agrees with its left neighbour, who is on host B."""

    def body(pg):
        pg.barrier()
        x = np.arange(40_000.0)
        with pytest.raises(PeerMismatch):
            pg.all_reduce(x, "avg" if pg.rank in (1, 2) else "sum")
        assert (x == np.arange(40_000)).all()

    across("ABAB", body)


def test_errors_between_hosts_name_ranks_of_the_group_and_the_whole_call():
    """Not the numbers of hosts, nor the sum that is a part of an average."""

    def body(pg):
        pg.barrier()
        if pg.rank == 2:
            pg._backend._tiers.leader_links.close()
            time.sleep(0.2)
        pg.all_reduce(np.ones(300_000), "avg")

    with pytest.raises(PeerLost) as caught:
        across("AABBCC", body)
    for error in caught.value.of_ranks:
        assert re.search(
            r"rank (0 lost rank 2 \(its right|4 lost rank 2 \(its left) neighbour, "
            r"127\.0\.0\.1:\d+\) during all_reduce #2 of 300,000 float64 \(avg\), step",
            str(error),
        )


def test_errors_inside_a_host_name_ranks_of_the_group():
    def body(pg):
        memory, x = pg._backend._tiers.memory, np.ones(1)
        with pytest.raises(PeerMismatch, match=r"rank \d is in barrier #\d") as caught:
            shm.barrier(memory, x, Header(Kind.DATA, pg.rank, "barrier"), Deadline(9))
        other = pg.rank ^ 1
        assert caught.value.culprit == other
        assert str(caught.value).startswith(f"rank {pg.rank} is in")
        assert f"but rank {other} sent" in str(caught.value)
        pg.barrier()
        if pg.rank == 2:
            with pytest.raises(
                PeerTimeout, match="rank 2 waits in vain for rank 3"
            ) as late:
                shm.barrier(memory, x, Header(Kind.DATA, 9, "barrier"), Deadline(0.1))
            assert late.value.culprit == 3

    across("AABB", body)


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
    across("ABB", closes)
    with pytest.raises(ValueError, match="a reason") as caught:
        across("ABB", fails)
    for error in caught.value.of_ranks[::2]:
        assert isinstance(error, PeerLost)
        assert "ValueError: a reason" in str(error)
    del caught, error
    gc.collect()
    assert (descriptors(), threading.active_count()) == before
    assert not mapped()


HOST_OF = {rank: {"MINDDP_HOSTID": "AABB"[rank]} for rank in range(4)}


@pytest.mark.processes
@pytest.mark.parametrize("victim", [1, 2])
def test_a_killed_rank_is_named_on_all_hosts_within_a_second(victim):
    def loop():
        pg = join(transport="auto")
        assert pg.transport == "shm+tcp"
        attempt(lambda: reduce_for_ever(pg, 1 << 18))
        pg.close()
        attempt(lambda: pg.barrier())

    with Ranks(4, loop, env_of=HOST_OF) as ranks:
        for rank in range(4):
            ranks.wait_for(rank, "looping")
        at = ranks.signal(victim, signal.SIGKILL)
        results = ranks.results(ranks=[r for r in range(4) if r != victim])
    for result in results:
        first, second = result.told("raised")
        assert (first["kind"], first["culprit"]) == ("PeerLost", victim)
        assert first["at"] - at < 1.0 + 1.0
        assert second["kind"] == "UsageError"
        assert (result.code, result.err) == (0, "")


@pytest.mark.processes
@pytest.mark.parametrize("victim", [2, 3])
def test_a_stopped_rank_is_named_on_all_hosts(victim):
    def loop():
        pg = join(transport="auto", timeout=1.5)
        attempt(lambda: reduce_for_ever(pg, 1 << 18))

    with Ranks(4, loop, env_of=HOST_OF) as ranks:
        for rank in range(4):
            ranks.wait_for(rank, "looping")
        ranks.signal(victim, signal.SIGSTOP)
        results = ranks.results(ranks=[r for r in range(4) if r != victim])
    for result in results:
        assert result.raised["culprit"] == victim
        assert result.raised["kind"] == "PeerTimeout"
        assert "not responding" in result.raised["text"]


# ---- Two hosts, as far as the kernel can tell ----


@pytest.mark.netns
def test_processes_in_two_network_namespaces_find_out_by_themselves():
    def sum_up():
        with join(transport="auto", timeout=5.0) as pg:
            x, bucket = np.full(300_000, 1.0 + pg.rank), pg.zeros(300_000, np.float64)
            bucket[...] = x
            pg.all_reduce(x)
            pg.all_reduce(bucket, "avg")
            assert (x == 10).all() and (bucket == 2.5).all()
            pg.barrier()
            tell("done", transport=pg.transport, sent=pg.stats()["bytes_sent"])

    with Hosts(2) as hosts:
        env = {"MASTER_ADDR": hosts.address(0)}
        inside = lambda rank: hosts.inside(rank // 2)  # noqa: E731
        with Ranks(4, sum_up, env=env, port=PORT, prefix=inside) as ranks:
            results = ranks.results()
    for result in results:
        assert (result.code, result.err) == (0, "")
        assert result.facts["done"]["transport"] == "shm+tcp"
        sent = result.facts["done"]["sent"]
        assert (sent > 2 * 2_400_000) == (result.rank in (0, 2))
        assert sent < 2 * 2_400_000 + 10_000
