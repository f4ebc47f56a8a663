"""The network lab: as slow as it says, as exact as ever, and gone when it is closed."""

import os
import signal
import socket
import subprocess
import threading
import time

import numpy as np
import pytest
from hosts import Hosts
from ranks import Ranks, attempt, descriptors, join, reduce_for_ever, run, tell

from minddp import net, netlab
from minddp.errors import PeerLost, PeerTimeout, UsageError
from minddp.net import PAIR_BYTES, Link
from minddp.testing import run_groups

KIB = 1024


@pytest.fixture
def lab(monkeypatch):
    """A function that runs groups in a lab: lab("rate=1gbit", 3, body)."""

    def run_in(text, n, body, timeout=10.0, **settings):
        monkeypatch.setenv("MINDDP_NETLAB", text)
        return run_groups(n, body, timeout, **settings)

    return run_in


def seconds_of(call, pg, times=3):
    """How long each of some runs took; all ranks begin together, within a barrier."""
    seconds = []
    for _ in range(times):
        pg.barrier()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return np.array(seconds)


def all_reduce_seconds(lab, text, n, nbytes):
    """How long an all-reduce of so many bytes takes: the slowest rank of the best
    run."""

    def body(pg):
        x = np.ones(nbytes, np.uint8)
        return seconds_of(lambda: pg.all_reduce(x, "max"), pg)

    return np.max(lab(text, n, body), axis=0).min()


def wire_seconds(n, nbytes, bits):
    """What each rank sends in a ring, with TCP's headers, at this rate."""
    return 2 * (n - 1) / n * nbytes * (1448 + 66) / 1448 * 8 / bits


# ---- What the user writes ----


def test_a_lab_is_written_as_tc_would_have_it():
    one = netlab.parse(
        "rate=1.5gbit, delay=2ms,jitter=500us ; rank 2: rate = 100 mbit; "
        "rank 10: delay=1s"
    )
    assert one.usual == netlab.Quality(1.5e9, 2e-3, 5e-4)
    assert one.special == {
        2: netlab.Quality(1e8, 2e-3, 5e-4),
        10: netlab.Quality(1.5e9, 1.0, 5e-4),
    }
    only = netlab.parse("rank 0: rate=64kbit;")
    assert (only.usual, only.special[0].rate) == (netlab.Quality(), 64e3)


def test_a_link_is_as_bad_as_the_worse_of_its_ends():
    one = netlab.parse("rate=1gbit, delay=1ms; rank 1: rate=2gbit; rank 2: delay=3ms")
    assert one.between(0, 3) == netlab.Quality(1e9, 1e-3)
    assert one.between(1, 0) == netlab.Quality(1e9, 1e-3)
    assert one.between(1, 2) == one.between(2, 1) == netlab.Quality(1e9, 3e-3)


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("speed=1gbit", "'speed' is none of rate, delay, jitter"),
        ("rate", "rate= is no number with a unit of bit, kbit, mbit, gbit"),
        ("rate=100", "rate=100 is no number with a unit"),
        ("rate=-1mbit", "rate=-1mbit is no number"),
        ("rate=1MBit", "rate=1MBit is no number"),
        ("rate=2ms", "unit of bit"),
        ("delay=1e3ms", "delay=1e3ms is no number"),
        ("delay=nan s", "is no number"),
        ("rate=0mbit", "a rate is from 1kbit"),
        ("rate=0.1bit", "a rate is from 1kbit"),
        (f"rate={'9' * 400}gbit", "a rate is from 1kbit"),
        ("delay=999999s", "a delay is at most 60s"),
        (f"rank {'1' * 5000}: rate=1mbit", "is no rank"),
        ("rate=1gbit, rate=2gbit", "rate comes twice"),
        ("rate=1gbit,", "'' is none of"),
        ("rate=1gbit; delay=1ms", "'delay=1ms' comes after the first ';'"),
        ("rank 1: rate=1gbit; delay=1ms", "'delay=1ms' comes after"),
        ("jitter=1ms", "jitter is at most delay"),
        ("delay=1ms,jitter=1ms; rank 1: delay=0ms", "jitter is at most delay"),
        ("rank one: rate=1gbit", "'rank one' is no rank"),
        ("rank -1: rate=1gbit", "'rank -1' is no rank"),
        ("rank 1: rate=1gbit; rank 1: delay=1ms", "'rank 1' is no rank, or comes"),
    ],
)
def test_what_is_wrong_with_a_lab_is_said(text, complaint):
    with pytest.raises(UsageError) as caught:
        netlab.parse(text)
    assert complaint in str(caught.value)
    assert f"MINDDP_NETLAB={text!r}" in str(caught.value)
    assert netlab.EXAMPLE in str(caught.value)


def test_a_rank_that_the_world_does_not_have_is_refused(lab):
    netlab.parse(netlab.EXAMPLE.strip('"')).check(3)
    with pytest.raises(UsageError, match="there is no rank 3 among 3"):
        lab("rank 3: rate=1gbit", 3, lambda pg: None)


# ---- Who is in it ----


def test_without_a_lab_nothing_stands_between(monkeypatch):
    monkeypatch.delenv("MINDDP_NETLAB", raising=False)

    def body(pg):
        names = [thread.name for thread in threading.enumerate()]
        return type(pg._links.right), type(pg._links.left), pg.netlab, names

    for right, left, text, names in run_groups(2, body):
        assert (right, left, text) == (Link, Link, "")
        assert "minddp-cable" not in names


def test_rank_0_says_once_that_the_network_is_emulated(lab, caplog):
    text = "rate=1gbit; rank 1: delay=1ms"
    told = lab(text, 2, lambda pg: (pg.netlab, pg.split(0).close())[0])
    assert told == [text, text]
    assert [r.message for r in caplog.records] == [f"emulated network: {text}"]


@pytest.mark.processes
def test_ranks_in_different_labs_are_refused():
    env_of = {1: {"MINDDP_NETLAB": "rate=1gbit"}}
    for result in run(2, only_join, env_of=env_of):
        assert result.raised["kind"] == "UsageError"
        assert "rank 0 and rank 1 differ in MINDDP_NETLAB" in result.raised["text"]


def only_join():
    attempt(join)


def test_shared_memory_would_pass_by_the_lab(lab):
    with pytest.raises(UsageError, match="'shm' would not use") as caught:
        lab("rate=1gbit", 2, lambda pg: None, transport="shm")
    assert all(caught.value.of_ranks), "all ranks raise it"
    assert lab("rate=1gbit", 2, lambda pg: pg.transport, transport="auto")[0] == "tcp"


def test_a_sub_group_has_the_same_bad_cards_under_other_numbers(lab):
    def body(pg):
        part = pg.split(0 if pg.rank else None)
        rates = [group._links.right._cable._quality.rate for group in (pg, part or pg)]
        if part:
            part.all_reduce(np.ones(3))
            part.close()
        return rates

    slow = lab("rate=1gbit; rank 3: rate=500mbit", 4, body)
    assert slow == [[1e9, 1e9], [1e9, 1e9], [5e8, 5e8], [5e8, 5e8]]


# ---- How slow ----


@pytest.mark.parametrize("n", [2, 3])
def test_half_the_rate_takes_twice_as_long(lab, n):
    nbytes = 400 * KIB
    fast = all_reduce_seconds(lab, "rate=200mbit", n, nbytes)
    slow = all_reduce_seconds(lab, "rate=100mbit", n, nbytes)
    print(f"{fast * 1e3:.1f} and {slow * 1e3:.1f} ms")
    assert slow >= 0.98 * wire_seconds(n, nbytes, 100e6), "faster than its wire"
    assert 1.5 < slow / fast < 2.5


def test_one_slow_rank_slows_down_all(lab):
    nbytes = 400 * KIB
    all_slow = all_reduce_seconds(lab, "rate=100mbit", 3, nbytes)
    one_slow = all_reduce_seconds(lab, "rate=1gbit; rank 1: rate=100mbit", 3, nbytes)
    print(f"{all_slow * 1e3:.1f} and {one_slow * 1e3:.1f} ms")
    assert 0.7 < one_slow / all_slow < 1.4


def test_delay_is_paid_in_each_step_of_the_ring(lab):
    """Both depend on the machine a little, their difference on the delay alone."""
    n, delay, nbytes = 3, 0.02, 300 * KIB
    short = all_reduce_seconds(lab, "rate=10gbit, delay=10us", n, nbytes)
    long = all_reduce_seconds(lab, "rate=10gbit, delay=20ms", n, nbytes)
    steps = 2 * (n - 1)
    print(f"{short * 1e3:.1f} and {long * 1e3:.1f} ms in {steps} steps")
    assert (steps - 1) * delay < long - short < 1.8 * steps * delay


@pytest.mark.parametrize("jitter, shortest", [("0ms", 10.0), ("9ms", 1.0)])
def test_messages_take_their_delay_there_and_back(lab, jitter, shortest):
    def body(pg):
        calls = (pg.send, pg.recv) if pg.rank == 0 else (pg.recv, pg.send)
        x, ways = np.zeros(1), []
        for i in range(12):
            start = time.perf_counter()
            for call in calls:
                call(x, 1 - pg.rank)
            ways.append((time.perf_counter() - start) / 2 * 1e3)
            assert x[0] == i
            x += pg.rank == 0
        return ways[1:]  # the first made the links

    ways = lab(f"delay=10ms, jitter={jitter}", 2, body)[0]
    print(f"{min(ways):.2f} to {max(ways):.2f} ms one way")
    assert min(ways) >= shortest
    assert np.median(ways) < 30
    assert min(ways) < 10 or jitter == "0ms", "every message was late, none early"


def test_a_burst_does_not_pay_for_the_pause_before_it():
    """Time is computed from when the wire is free, which is never in the past."""
    near, far = socket.socketpair()
    quality = netlab.Quality(rate=8e6)  # 1 MB/s
    link = netlab.EmulatedLink(plain_link(near), quality)
    link.send_some([b"first"])
    assert far.recv(5) == b"first"
    time.sleep(0.1)
    start, got = time.perf_counter(), 0
    link.send_some([bytes(50_000)])
    while got < 50_000:
        got += len(far.recv(50_000))
    seconds = time.perf_counter() - start
    link.close()
    far.close()
    assert seconds >= quality.seconds(50_000) - 1e-4


def test_a_sender_feels_that_the_wire_is_slow():
    """It is held up once a buffer is full, and not by the memory of the machine."""
    near, far = socket.socketpair()
    link = netlab.EmulatedLink(plain_link(near), netlab.Quality(rate=8e6))  # 1 MB/s
    start, taken = time.monotonic(), 0
    while time.monotonic() < start + 0.1:
        taken += link.send_some([bytes(100_000)])
    passed = (time.monotonic() - start) * 1e6
    link.close()
    far.close()
    assert taken < 2 * PAIR_BYTES + netlab.BUFFER_SECONDS * 1e6 + passed


def plain_link(sock):
    return Link(sock, 1, "far", "")


# ---- What comes out ----


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_bits_are_those_without_a_lab(lab, monkeypatch, n):
    def body(pg):
        random = np.random.default_rng(pg.rank)
        results = []
        for length in (1, n, 1000, 50_001):
            x = random.standard_normal(length) * 10.0 ** random.integers(-4, 4, length)
            for op in ("sum", "avg", "max"):
                y = x.copy()
                pg.all_reduce(y, op)
                results.append(y.tobytes())
            pg.broadcast(x, n - 1)
            results.append(x.tobytes())
        return results

    slow = lab("rate=1gbit, delay=1ms, jitter=1ms; rank 0: rate=300mbit", n, body)
    monkeypatch.delenv("MINDDP_NETLAB")
    assert slow == run_groups(n, body)


# ---- The end ----


def cables():
    return [t for t in threading.enumerate() if t.name == "minddp-cable"]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_a_closed_group_leaves_no_thread_and_no_descriptor(lab):
    def body(pg):
        x = np.ones(100_000)
        pg.all_reduce(x)
        if pg.rank == 0:
            pg.send(x, 1)
        elif pg.rank == 1:
            pg.recv(x, 0)
        pg.barrier()
        found = len(cables())
        pg.barrier()
        return found

    before = descriptors()
    assert lab("rate=1gbit, delay=1ms", 3, body) == [4, 4, 4]  # one is for messages
    assert cables() == []
    assert descriptors() == before


def test_what_was_sent_arrives_though_the_sender_closes_at_once(lab):
    def body(pg):
        x = np.full(200 * KIB, pg.rank, np.uint8)
        pg.broadcast(x, 1)
        pg.close()
        return bool((x == 1).all())

    assert lab("rate=100mbit, delay=30ms", 3, body) == [True] * 3


@pytest.mark.processes
def test_what_was_sent_arrives_though_the_sender_ends_at_once():
    def broadcast_and_leave():
        pg = join(timeout=8.0)
        x = np.full(200_000, pg.rank, np.uint8)
        pg.broadcast(x, 1)
        tell("got", right=bool((x == 1).all()))

    env = {"MINDDP_NETLAB": "rate=100mbit, delay=30ms"}
    for result in run(3, broadcast_and_leave, env=env):
        assert result.code == 0, result
        assert result.facts["got"]["right"]


def test_a_peer_that_takes_nothing_holds_up_nobody_who_closes(monkeypatch):
    monkeypatch.setattr(netlab, "PATIENCE", 0.2)
    near, far = socket.socketpair()
    link = netlab.EmulatedLink(plain_link(near), netlab.Quality(rate=1e9))
    taken = time.monotonic()
    while time.monotonic() < taken + 0.3:
        if link.send_some([bytes(100_000)]):
            taken = time.monotonic()
        time.sleep(0.01)
    start = time.monotonic()
    link.close()
    assert time.monotonic() - start < 5
    assert cables() == []
    far.close()


def test_of_a_group_that_has_failed_nothing_is_delivered_any_more():
    near, far = socket.socketpair()
    alarm = net.Alarm()
    slow = netlab.Quality(rate=8e3)  # a second for each KB
    link = netlab.EmulatedLink(plain_link(near), slow, alarm)
    link.send_some([bytes(100_000)])
    alarm.sound(PeerLost("gone", 1))
    start = time.monotonic()
    link.close()
    assert time.monotonic() - start < 5, "not the minute and more of what it held"
    assert cables() == []
    alarm.close()
    far.close()


def test_more_descriptors_than_select_can_watch_are_refused(lab, monkeypatch):
    monkeypatch.setattr(netlab, "MOST_DESCRIPTORS", 3)
    with pytest.raises(UsageError, match="descriptors below 3"):
        lab("rate=1gbit", 2, lambda pg: None)
    assert cables() == []


def test_a_peer_that_has_gone_is_found_by_sending():
    near, far = socket.socketpair()
    link = netlab.EmulatedLink(plain_link(near), netlab.Quality(delay=0.01))
    far.close()
    with pytest.raises(PeerLost) as caught:
        for _ in range(1000):
            link.send_some([bytes(1000)])
            time.sleep(0.005)
    assert caught.value.culprit == 1
    link.close()
    assert cables() == []


def test_a_rank_that_raises_is_named_on_all(lab):
    def body(pg):
        pg.all_reduce(np.ones(1000))
        if pg.rank == 1:
            raise ValueError("of rank 1")
        pg.all_reduce(np.ones(100_000))

    with pytest.raises(ValueError, match="of rank 1") as caught:
        lab("rate=100mbit, delay=5ms", 3, body)
    for rank in (0, 2):
        error = caught.value.of_ranks[rank]
        assert isinstance(error, PeerLost)
        assert error.culprit == 1


def test_a_rank_that_does_not_come_is_waited_for_until_the_timeout(lab):
    here = threading.Event()

    def body(pg):
        if pg.rank == 2:
            here.wait(5)
            return
        try:
            pg.all_reduce(np.ones(100_000))
        finally:
            here.set()

    with pytest.raises(PeerTimeout) as caught:
        lab("rate=1gbit, delay=1ms", 3, body, timeout=0.5)
    assert caught.value.culprit == 2


@pytest.mark.processes
def test_a_killed_rank_is_named_on_all():
    def loop():
        pg = join(timeout=5.0)
        attempt(lambda: reduce_for_ever(pg, 1 << 15))

    with Ranks(3, loop, env={"MINDDP_NETLAB": "rate=1gbit, delay=2ms"}) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "looping")
        ranks.signal(1, signal.SIGKILL)
        results = ranks.results(ranks=[0, 2])
    for result in results:
        assert (result.raised["kind"], result.raised["culprit"]) == ("PeerLost", 1)
        assert result.code == 0


@pytest.mark.processes
def test_a_forked_child_leaves_the_cables_to_its_parent():
    def fork_and_go_on():
        with join(timeout=5.0) as pg:
            x = np.ones(10_000)
            pg.all_reduce(x)
            child = os.fork()
            if child == 0:
                os._exit(descriptors())
            _, status = os.waitpid(child, 0)
            pg.all_reduce(x)
            tell("done", sum=float(x[0]), descriptors=os.waitstatus_to_exitcode(status))

    env = {"MINDDP_NETLAB": "rate=1gbit, delay=1ms"}
    for result in run(2, fork_and_go_on, env=env):
        assert result.facts["done"]["sum"] == 4.0, result
        # The three, and that of listdir.
        assert result.facts["done"]["descriptors"] <= 5


# ---- Beside the kernel ----


def time_all_reduces():
    with join(timeout=10.0) as pg:
        x = np.ones(1_000_000, np.float32)
        for _ in range(4):  # the first may find tokens that have been saved
            pg.barrier()
            start = time.perf_counter()
            pg.all_reduce(x, "max")
            tell("took", seconds=time.perf_counter() - start)


def slowest(results):
    """Seconds of the median round, each as long as its slowest rank took."""
    for result in results:
        assert result.code == 0, result
    rounds = np.max([[f["seconds"] for f in r.told("took")] for r in results], axis=0)
    return float(np.median(rounds[1:]))


@pytest.mark.netns
@pytest.mark.parametrize("n", [2, 3])
def test_the_lab_takes_as_long_as_links_that_the_kernel_has_slowed_down(n):
    with Hosts(n) as hosts:
        for host in hosts.hosts:
            tbf = f"tc -n {host} qdisc add dev eth0 root tbf"
            shape = f"{tbf} rate 100mbit burst 32kb latency 50ms"
            made = subprocess.run(shape.split(), capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"cannot slow a link down: {made.stderr.strip()}")
        with hosts.ranks(time_all_reduces) as ranks:
            kernel = slowest(ranks.results())
    ours = slowest(run(n, time_all_reduces, env={"MINDDP_NETLAB": "rate=100mbit"}))
    print(f"n = {n}: kernel {kernel * 1e3:.1f} ms, lab {ours * 1e3:.1f} ms")
    assert 0.85 < ours / kernel < 1.2
