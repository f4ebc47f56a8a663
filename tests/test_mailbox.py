"""send and recv: any rank to any other, in order, without a hang."""

import socket
import threading
import time

import numpy as np
import pytest

from minddp.bfloat16 import from_bfloat16, to_bfloat16
from minddp.errors import (
    MindDPError,
    PeerLost,
    PeerMismatch,
    PeerTimeout,
    UsageError,
)
from minddp.frame import HEADER_BYTES
from minddp.testing import run_groups


def errors_of(n, body, cause=MindDPError, **settings):
    with pytest.raises(cause) as caught:
        run_groups(n, body, **settings)
    return caught.value.of_ranks


# ---- What arrives ----


@pytest.mark.parametrize("n", [2, 3, 5])
def test_every_rank_can_send_to_every_other(n):
    def body(pg):
        others = [r for r in range(n) if r != pg.rank]
        sent = [pg.isend(np.array([pg.rank, r]), r) for r in others]
        got = []
        for r in others:
            x = np.zeros(2, np.int64)
            pg.recv(x, r)
            got.append(x.tolist())
        for work in sent:
            work.wait()
        return got == [[r, pg.rank] for r in others]

    assert run_groups(n, body) == [True] * n


def test_messages_of_a_pair_arrive_in_order_whatever_their_sizes():
    sizes = [1, 300_000, 0, 7, 1_000_000, 2]

    def body(pg):
        if pg.rank == 0:
            works = [
                pg.isend(np.full(size, float(i)), 1) for i, size in enumerate(sizes)
            ]
            for work in works:
                work.wait()
            return True
        arrays = [np.full(size, -1.0) for size in sizes]
        works = [pg.irecv(x, 0) for x in arrays]
        for work in works:
            work.wait()
        return all((x == i).all() for i, x in enumerate(arrays))

    assert run_groups(2, body) == [True, True]


def test_both_ways_at_once_with_arrays_larger_than_any_buffer():
    def body(pg):
        x, y = np.full(1 << 21, pg.rank + 1.0), np.zeros(1 << 21)
        work = pg.isend(x, 1 - pg.rank)
        pg.recv(y, 1 - pg.rank)
        work.wait()
        return (y == 2 - pg.rank).all()

    assert all(run_groups(2, body))


def test_a_ring_by_hand_sums_what_all_ranks_have():
    """The classic exercise: each rank sends to the right and receives from the left."""

    def body(pg):
        n, r = pg.world_size, pg.rank
        total = np.array([float(r)])
        sent, got = total.copy(), np.zeros(1)
        for _ in range(n - 1):
            work = pg.isend(sent, (r + 1) % n)
            pg.recv(got, (r - 1) % n)
            work.wait()
            total += got
            sent[...] = got
        return total.item()

    assert run_groups(4, body) == [6.0] * 4


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "int64", "bool"])
def test_dtypes_strides_and_read_only_sources(dtype):
    def body(pg):
        if pg.rank == 0:
            x = np.arange(12).reshape(3, 4).astype(dtype).T
            x.flags.writeable = False
            pg.send(x, 1)
            return None
        whole = np.ones((4, 6)).astype(dtype)
        pg.recv(whole[:, ::2], 0)
        expected = np.ones((4, 6)).astype(dtype)
        expected[:, ::2] = np.arange(12).reshape(3, 4).astype(dtype).T
        return (whole == expected).all()

    assert run_groups(2, body)[1]


def test_scalars_empty_arrays_and_bfloat16():
    def body(pg):
        if pg.rank == 0:
            pg.send(np.array(3.5), 1)
            pg.send(np.zeros((0, 3)), 1)
            pg.send(to_bfloat16([1.5]), 1)
            return None
        x, empty, half = np.array(0.0), np.zeros((0, 3)), to_bfloat16([0.0])
        pg.recv(x, 0)
        pg.recv(empty, 0)
        pg.recv(half, 0)
        return x.item(), from_bfloat16(half).item()

    assert run_groups(2, body)[1] == (3.5, 1.5)


def test_isend_returns_at_once_and_the_message_moves_while_the_sender_is_elsewhere():
    """In a collective, for example, that the receiver enters only afterwards."""

    def body(pg):
        x = np.full(1 << 21, 7.0)
        if pg.rank == 0:
            start = time.monotonic()
            work = pg.isend(x, 1)
            at_once = time.monotonic() - start < 0.2
            pg.barrier()
            work.wait()
            return at_once
        time.sleep(0.3)
        x[:] = 0
        pg.recv(x, 0)
        pg.barrier()
        return (x == 7).all()

    assert all(run_groups(2, body))


def test_messages_are_counted_apart_from_collectives():
    def body(pg):
        before = pg.stats()
        if pg.rank == 0:
            pg.send(np.zeros(10), 1)
        else:
            pg.recv(np.zeros(10), 0)
        after = pg.stats()
        assert after["collectives"] == before["collectives"]
        assert after["bytes_sent"] == before["bytes_sent"]
        return after["mail_bytes_sent"], after["mail_bytes_received"]

    assert run_groups(2, body) == [(80 + HEADER_BYTES, 0), (0, 80 + HEADER_BYTES)]


# ---- What goes wrong ----


@pytest.mark.parametrize(
    ("sent", "expected", "said"),
    [
        (np.zeros(3), np.zeros(4), ("of 3 float64", "of 4 float64")),
        (np.zeros(3), np.zeros(3, "f4"), ("3 float64", "3 float32")),
    ],
)
def test_a_message_that_does_not_fit_is_refused_on_both_sides(sent, expected, said):
    def body(pg):
        if pg.rank == 0:
            pg.send(sent, 1)
            pg.barrier()
        else:
            pg.recv(expected, 0)

    errors = errors_of(2, body, PeerMismatch)
    for error in errors:
        assert isinstance(error, PeerMismatch)
        assert all(text in str(error) for text in said)
        assert "rank 0 sent" in str(error)


def test_tags_must_agree():
    def body(pg):
        if pg.rank == 0:
            pg.send(np.zeros(1), 1, tag=5)
            pg.barrier()
        else:
            pg.recv(np.zeros(1), 0, tag=6)

    for error in errors_of(2, body, PeerMismatch):
        assert "tag 5" in str(error)
        assert "tag 6" in str(error)


def test_a_message_that_nobody_receives_times_out_and_says_what_is_missing():
    def body(pg):
        if pg.rank == 0:
            pg.send(np.zeros(3), 1)
        else:
            time.sleep(3)
            pg.barrier()

    errors = errors_of(2, body, timeout=1.0)
    assert isinstance(errors[0], PeerTimeout)
    assert "send #1 of 3 float64 (tag 0) to rank 1" in str(errors[0])
    assert "Does rank 1 call recv" in str(errors[0])
    assert "Does rank 1 call recv" in str(errors[1])


def test_a_message_that_nobody_sends_times_out():
    def body(pg):
        if pg.rank == 0:
            pg.recv(np.zeros(3), 1)
        else:
            time.sleep(3)
            pg.barrier()

    errors = errors_of(2, body, timeout=1.0)
    assert isinstance(errors[0], PeerTimeout)
    assert "Does rank 1 call send" in str(errors[0])


@pytest.mark.parametrize("verb", ["send", "recv"])
def test_a_rank_that_has_left_is_not_waited_for(verb):
    def body(pg):
        if pg.rank == 1:
            return
        start = time.monotonic()
        with pytest.raises(PeerLost, match="rank 1 closed its group after 0"):
            getattr(pg, verb)(np.zeros(3), 1)
        assert time.monotonic() - start < 10

    run_groups(2, body, timeout=20.0)


def test_rank_0_may_leave_once_all_have_sent_something():
    def body(pg):
        others = [r for r in range(4) if r != pg.rank]
        sent = [pg.isend(np.zeros(1), r) for r in others]
        for r in others:
            pg.recv(np.zeros(1), r)
        for work in sent:
            work.wait()
        if pg.rank == 0:
            return True
        while 0 not in pg._control.departed:
            time.sleep(0.01)
        others.remove(0)
        works = [pg.isend(np.array([7.0]), r) for r in others]
        for r in others:
            x = np.zeros(1)
            pg.recv(x, r)
            assert x.item() == 7.0
        for work in works:
            work.wait()
        return True

    assert run_groups(4, body, timeout=20.0) == [True] * 4


def test_a_first_message_after_rank_0_has_left_ends_at_once_with_its_name():
    def body(pg):
        if pg.rank == 0:
            return
        while 0 not in pg._control.departed:
            time.sleep(0.01)
        start = time.monotonic()
        with pytest.raises(PeerLost, match="rank 0 closed its group after 0"):
            if pg.rank == 1:
                pg.send(np.zeros(1), 2)
            else:
                pg.recv(np.zeros(1), 1)
        assert time.monotonic() - start < 10

    run_groups(3, body, timeout=20.0)


def test_a_rank_that_fails_ends_the_messages_of_all_others():
    def body(pg):
        if pg.rank == 2:
            time.sleep(0.2)
            raise ValueError("its own")
        pg.recv(np.zeros(3), 1 - pg.rank)

    errors = errors_of(3, body, ValueError)
    for error in errors[:2]:
        assert isinstance(error, PeerLost)
        assert error.culprit == 2
        assert "its own" in str(error)


def test_after_a_failure_every_further_message_raises_the_same():
    def body(pg):
        if pg.rank == 0:
            with pytest.raises(PeerTimeout) as first:
                pg.recv(np.zeros(3), 1)
            with pytest.raises(PeerTimeout) as second:
                pg.isend(np.zeros(3), 1)
            return str(first.value) == str(second.value)
        time.sleep(2)
        return None

    assert run_groups(2, body, timeout=0.5)[0]


def test_wrong_calls_are_refused_before_anything_happens():
    def body(pg):
        x = np.zeros(3)
        frozen = np.zeros(3)
        frozen.flags.writeable = False
        for call, says in (
            (lambda: pg.send(x, pg.rank), "this rank itself"),
            (lambda: pg.send(x, 2), "whole number from 0 to 1"),
            (lambda: pg.recv(x, -1), "whole number from 0 to 1"),
            (lambda: pg.send([1.0], 1 - pg.rank), "NumPy array"),
            (lambda: pg.recv(frozen, 1 - pg.rank), "read-only"),
            (lambda: pg.send(x, 1 - pg.rank, tag=-2), "tag"),
            (lambda: pg.send(np.zeros(2, complex), 1 - pg.rank), "complex128"),
        ):
            with pytest.raises(UsageError, match=says):
                call()
        assert pg.stats()["mail_bytes_sent"] == 0
        pg.barrier()

    run_groups(2, body)


def test_what_was_sent_before_closing_arrives_if_somebody_waits_for_it():
    def body(pg):
        if pg.rank == 0:
            time.sleep(0.3)
            pg.isend(np.arange(1000.0), 1)
            return None  # and the group closes at once
        x = np.zeros(1000)
        pg.recv(x, 0)
        return x.sum()

    for _ in range(5):
        assert run_groups(2, body)[1] == 499_500.0


def test_a_request_that_is_never_waited_for_does_not_hold_up_the_end():
    def body(pg):
        pg.isend(np.zeros(3), 1 - pg.rank)  # nobody receives it
        return pg.irecv(np.zeros(3), 1 - pg.rank) if pg.rank == 1 else None

    start = time.monotonic()
    run_groups(2, body, timeout=20.0)
    assert time.monotonic() - start < 10


# ---- Who may send ----


def test_no_port_is_open_before_a_receiver_waits_and_strangers_are_dropped():
    def body(pg):
        if pg.rank == 0:
            pg.barrier()
            pg.recv(np.zeros(3), 1)
            return None
        assert pg._mailbox is None
        pg.barrier()
        while 0 not in pg._control.mailboxes:
            time.sleep(0.01)
        host, port = pg._control.mailboxes[0]
        assert host == "127.0.0.1"
        strangers = [socket.create_connection((host, port), 2) for _ in range(20)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        strangers[1].sendall(b"mddp" + bytes(60))
        pg.send(np.zeros(3), 0)
        for stranger in strangers:
            stranger.close()
        return None

    run_groups(2, body, token=b"a secret")


def test_closing_ends_the_thread_and_closes_every_descriptor():
    def threads():
        return [t.name for t in threading.enumerate() if t.name == "minddp-mail"]

    def body(pg):
        work = pg.isend(np.zeros(3), 1 - pg.rank)
        pg.recv(np.zeros(3), 1 - pg.rank)
        work.wait()
        pg.barrier()
        assert threads()

    run_groups(2, body)
    assert not threads()
