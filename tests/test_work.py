"""Asynchronous collectives: the order, the errors, and who owns the arrays."""

import gc
import threading
import time

import numpy as np
import pytest

from minddp.errors import PeerLost, PeerMismatch
from minddp.frame import Header, Kind
from minddp.testing import run_groups
from minddp.work import Work, WorkQueue

CALL = Header(Kind.DATA, 1, "barrier")


def test_works_are_performed_in_the_order_of_submission_one_at_a_time():
    queue, seen, running = WorkQueue(), [], []

    def perform(i):
        running.append(i)
        assert len(running) == 1
        time.sleep(0.001 * (5 - i % 5))
        seen.append(running.pop())

    works = [Work(CALL, lambda i=i: perform(i)) for i in range(20)]
    for work in works:
        queue.submit(work)
    for work in works:
        work.wait()
    assert seen == list(range(20))
    queue.close()


def test_a_work_keeps_its_error_for_every_wait():
    work = Work(CALL, lambda: 1 / 0)
    assert not work.is_completed() and work.exception() is None
    work.run()
    assert work.is_completed()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            work.wait()
    assert isinstance(work.exception(), ZeroDivisionError)


def test_closing_a_queue_performs_what_is_pending_and_ends_its_thread():
    queue, seen = WorkQueue(), []
    for i in range(5):
        queue.submit(Work(CALL, lambda i=i: seen.append(i)))
    queue.close()
    assert seen == [0, 1, 2, 3, 4]
    assert queue.idle


@pytest.mark.parametrize("n", [1, 2, 3])
def test_asynchronous_collectives_give_the_same_as_synchronous_ones(n):
    def body(pg):
        arrays = [np.arange(1000.0 * (i + 1)) + pg.rank for i in range(8)]
        works = [pg.all_reduce(x, "avg", async_op=True) for x in arrays]
        last = np.full(3, pg.rank)
        pg.broadcast(last, root=n - 1)  # waits for those before it
        assert all(work.is_completed() for work in works)
        for work in works:
            work.wait()
        assert last.tolist() == [n - 1] * 3
        mean = (n - 1) / 2
        assert all((x == np.arange(len(x)) + mean).all() for x in arrays)
        return pg.stats()["collectives"]

    assert run_groups(n, body) == [9] * n


def test_an_asynchronous_call_returns_before_the_others_have_come():
    submitted = threading.Event()

    def body(pg):
        if pg.rank == 1:
            assert submitted.wait(5)
        x = np.ones(100_000)
        work = pg.all_reduce(x, async_op=True)
        if pg.rank == 0:
            assert not work.is_completed()
            submitted.set()
        work.wait()
        return x[-1]

    assert run_groups(2, body) == [2.0, 2.0]


def test_the_caller_may_forget_array_and_work():
    def body(pg):
        for _ in range(3):
            pg.all_reduce(np.ones(100_000), async_op=True)
            gc.collect()
        x = np.full(10, pg.rank + 1.0)
        pg.all_reduce(x)
        return x.tolist()

    assert run_groups(2, body) == [[3.0] * 10] * 2


def test_a_result_lands_in_a_strided_array_too():
    def body(pg):
        whole = np.zeros((6, 4))
        pg.all_reduce(whole[::2, 1], async_op=True).wait()
        whole[::2, 1] += pg.rank
        pg.all_reduce(whole[::2, 1], async_op=True).wait()
        return whole[::2, 1].tolist(), whole.sum()

    assert run_groups(2, body) == [([1.0] * 3, 3.0)] * 2


def test_an_error_ends_every_pending_work_and_every_later_call():
    def body(pg):
        sizes = [10, 20 + pg.rank, 30, 40]  # the second does not fit
        works = [pg.all_reduce(np.ones(k), async_op=True) for k in sizes]
        works[0].wait()
        texts = []
        for work in works[1:]:
            with pytest.raises(PeerMismatch) as caught:
                work.wait()
            texts.append(str(caught.value))
        with pytest.raises(PeerMismatch) as later:
            pg.barrier()
        assert {*texts, str(later.value)} == {texts[0]}
        return len(texts)

    assert run_groups(2, body) == [3, 3]


def test_a_rank_that_ends_by_an_error_ends_what_the_others_wait_for():
    def body(pg):
        pg.barrier()
        if pg.rank == 1:
            raise ValueError("no data")
        work = pg.all_reduce(np.ones(10), async_op=True)
        with pytest.raises(PeerLost, match="ValueError: no data"):
            work.wait()
        return "told"

    with pytest.raises(ValueError, match="no data") as caught:
        run_groups(3, body)
    assert [error is None for error in caught.value.of_ranks] == [True, False, True]


def test_closing_the_group_waits_for_what_is_under_way():
    def body(pg):
        x = np.ones(200_000)
        work = pg.all_reduce(x, async_op=True)
        pg.close()
        assert work.is_completed()
        return x[-1]

    assert run_groups(2, body) == [2.0, 2.0]


def test_a_work_that_has_ended_stays_ended_while_others_wait_for_it():
    work = Work(CALL)
    work.end()
    with work._under_way:  # as whoever waits holds it, for a moment
        assert work.is_completed()
