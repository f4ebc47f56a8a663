"""Ranks as threads over links in memory: collectives without a port, a process or luck.

    run_ranks(4, body)     calls body(links) in 4 threads; the list of what they return

               queue
      rank 0 ========> rank 1       MemoryLinks has the members of net.RingLinks, so
        ^                |          ring.py cannot tell them apart.
        |     queues     v
      rank 3 <======== rank 2

A queue behaves as badly as a network may: it holds few bytes, takes and gives any part
of what is offered (short writes and reads), sometimes nothing for a while (delay), and
can be cut after so many bytes (loss).

Rule.  All misbehaviour is drawn from a seed: a test that fails will fail again.

A rank that raises closes its queues, so its neighbours raise PeerLost, as over TCP.

In PyTorch: MultiThreadedTestCase (torch/testing/_internal), with a threaded back end.

Left out: a control plane. Nobody judges who failed first, so errors name the neighbour.
"""

import os
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from minddp.environment import Job
from minddp.errors import PeerError, PeerLost
from minddp.group import ProcessGroup
from minddp.net import Bytes, Deadline, listen

Result = TypeVar("Result")


class MemoryQueue:
    """One direction of a link, from rank `source` to rank `target`.

    `capacity`: the bytes it holds. `cut_after`: the bytes after which it breaks (None:
    never). What is put into a broken queue is lost; its reader finds it closed.
    """

    def __init__(
        self, source: int, target: int, seed: int, capacity: int, cut_after: int | None
    ):
        self.source, self.target = source, target
        self.closed = False
        self._held = bytearray()
        self._random = random.Random(f"{seed}: {source} -> {target}")
        self._capacity, self._budget = capacity, cut_after

    def put_some(self, data: Bytes) -> int:
        if self.closed:
            raise PeerLost("connection closed", self.target)
        count = self._some(min(len(data), self._capacity - len(self._held)))
        if self._budget is None:
            self._held += data[:count]
        else:
            self._held += data[: min(count, self._budget)]
            self._budget = max(0, self._budget - count)
        return count

    def take_some(self, buffer: bytearray | memoryview) -> int:
        if not self._held and (self.closed or self._budget == 0):
            raise PeerLost("connection closed", self.source)
        count = self._some(min(len(buffer), len(self._held)))
        buffer[:count] = self._held[:count]
        del self._held[:count]
        return count

    def can_put(self) -> bool:
        return self.closed or len(self._held) < self._capacity

    def can_take(self) -> bool:
        return self.closed or self._budget == 0 or bool(self._held)

    def _some(self, count: int) -> int:
        """Any part of what is possible; none of it is as if it were still on its
        way."""
        return self._random.randint(0, count) if count else 0


class MemoryLink:
    """The far end of a queue, as errors name it."""

    def __init__(self, peer: int):
        self.peer, self.address = peer, f"memory of rank {peer}"


class MemoryLinks:
    """A rank's queues from the left and to the right; `changed` is shared by all
    ranks."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        inlet: MemoryQueue,
        outlet: MemoryQueue,
        changed: threading.Condition,
    ):
        self.rank, self.world_size, self.me = rank, world_size, rank
        self.left, self.right = MemoryLink(inlet.source), MemoryLink(outlet.target)
        self.bytes_sent = self.bytes_received = 0
        self._inlet, self._outlet, self._changed = inlet, outlet, changed

    def send_some(self, buffers: Iterable[Bytes]) -> int:
        with self._changed:
            sent = self._outlet.put_some(next(iter(buffers)))
            self.bytes_sent += sent
            self._changed.notify_all()
            return sent

    def recv_some(self, buffer: bytearray | memoryview) -> int:
        with self._changed:
            received = self._inlet.take_some(buffer)
            self.bytes_received += received
            self._changed.notify_all()
            return received

    def wait(self, sending: bool, receiving: bool, deadline: Deadline) -> bool:
        def possible() -> bool:
            return (sending and self._outlet.can_put()) or (
                receiving and self._inlet.can_take()
            )

        with self._changed:
            return self._changed.wait_for(possible, deadline.left())

    def close(self) -> None:
        with self._changed:
            self._inlet.closed = self._outlet.closed = True
            self._changed.notify_all()


def run_ranks(
    n: int,
    body: Callable[[MemoryLinks], Result],
    seed: int = 0,
    capacity: int = 64,
    cut: dict[int, int] | None = None,
) -> list[Result]:
    """What body(links) returns on each of n ranks, in rank order.

    `capacity`: bytes that a link can hold. `cut`: {rank: bytes} after which the link to
    that rank's right neighbour breaks.

    Raises: the error that is no consequence of another, else the first rank's. The
    errors of all ranks are in its attribute `of_ranks`, None where a rank did well.
    """
    changed = threading.Condition()
    queues = [
        MemoryQueue(r, (r + 1) % n, seed, capacity, (cut or {}).get(r))
        for r in range(n)
    ]
    results: list[Result | None] = [None] * n
    errors: list[Exception | None] = [None] * n

    def one_rank(r: int) -> None:
        links = MemoryLinks(r, n, queues[r - 1], queues[r], changed)
        try:
            results[r] = body(links)
        except Exception as exc:
            errors[r] = exc
            links.close()

    _run_threads(n, one_rank)
    raise_first(errors)
    return results  # type: ignore[return-value]


def _run_threads(n: int, one_rank: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=one_rank, args=(r,)) for r in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def raise_first(errors: list[Exception | None]) -> None:
    """Raise the root cause among the errors of all ranks, if there is any."""
    failed = [error for error in errors if error]
    causes = [error for error in failed if not isinstance(error, PeerError)]
    for error in (causes or failed)[:1]:
        error.of_ranks = errors  # type: ignore[attr-defined]
        raise error


def run_groups(
    n: int,
    body: Callable[[ProcessGroup], Result],
    timeout: float = 3.0,
    token: bytes = b"",
    transport: str = "tcp",
    hosts: Sequence[str] = (),
) -> list[Result]:
    """What body(pg) returns on each of n ranks: threads with real TCP links over
    loopback, and memory that they share in the manner of processes (transport="shm").

    hosts: the host on which each rank is to seem, as "AABB"; one for all if empty.

    Raises: as run_ranks.
    """
    results: list[Result | None] = [None] * n
    errors: list[Exception | None] = [None] * n
    listener = listen("127.0.0.1")

    def one_rank(r: int) -> None:
        fd = os.dup(listener.fileno()) if r == 0 else None
        where = "127.0.0.1", listener.port
        job = Job(
            *(r, n, r, n, *where, token, "testing", fd),
            launcher="testing",
            host_id=hosts[r] if hosts else "",
        )
        try:
            with ProcessGroup(job, timeout, timeout, transport) as pg:
                results[r] = body(pg)
        except Exception as exc:
            errors[r] = exc

    _run_threads(n, one_rank)
    listener.close()
    raise_first(errors)
    return results  # type: ignore[return-value]
