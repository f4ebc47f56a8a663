"""Back ends: what carries the collectives of a group.

    ProcessGroup  -- call, array, deadline -->  Backend.perform     the array, reduced

    name      where                  what moves the bytes
    tcp       ring.py, rooted.py     TCP links between neighbours, on any hosts
    shm       shm.py                 memory that the ranks of one host share

The group numbers calls, checks arguments, keeps the order, judges failures and sends
messages, over TCP, whatever the back end is. So a back end is small: it performs a
collective that all ranks have entered, on a 1-D array.

Rule 1.  `perform` has the result in x, or raises a PeerError that names the culprit. It
         waits for nobody longer than the deadline, and looks at the group's alarm.
Rule 2.  It compares the callers' headers before any array is changed.
Rule 3.  All ranks get the same bits.

The choice (`meet`) is made by all ranks together, over the ring, which is there by
then: each says what it wishes, and they go on if they agree.

In PyTorch: `c10d::Backend`, with ProcessGroupGloo, -NCCL and -MPI behind one interface.

Left out: a back end for each kind of device, as "cpu:gloo,cuda:nccl".
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from minddp import ring, rooted, shm
from minddp.environment import TRANSPORTS
from minddp.errors import UsageError
from minddp.frame import HEADER_BYTES, Header
from minddp.net import Alarm, Deadline, RingLinks

Array = np.ndarray[Any, Any]
Rows = Callable[[Any], Array]  # ProcessGroup.all_gather_rows


class Backend(Protocol):
    """What a group needs of whatever carries its collectives."""

    name: str

    def perform(self, call: Header, x: Array, deadline: Deadline) -> None:
        """Perform this collective on the 1-D array x. Raises: PeerError."""

    def zeros(self, count: int, dtype: Any, all_gather_rows: Rows) -> Array:
        """A 1-D array of zeros that this back end reduces best. All ranks call it."""

    def stats(self) -> dict[str, int]:
        """messages, bytes_sent, bytes_received and header_bytes, as far as it has sent
        them itself."""

    def close(self) -> None:
        """Let go of what it holds; waits for nobody. Closing twice is fine."""


RING = {
    collective.__name__: collective
    for collective in (
        *(ring.all_reduce, ring.reduce_scatter, ring.all_gather, ring.broadcast),
        *(rooted.reduce, rooted.gather, rooted.scatter, rooted.all_to_all),
        ring.barrier,
    )
}


class Ring:
    """The ring of all ranks over TCP."""

    name = "tcp"

    def __init__(self, links: RingLinks):
        self._links = links
        self._messages = self._headers = 0

    def perform(self, call: Header, x: Array, deadline: Deadline) -> None:
        RING[call.op](self._links, x, call, deadline)
        r, n = self._links.rank, self._links.world_size
        self._messages += len(ring.arrivals(call, (r + 1) % n, n))  # what right gets
        self._headers += HEADER_BYTES

    def zeros(self, count: int, dtype: Any, all_gather_rows: Rows) -> Array:
        return np.zeros(count, dtype)

    def stats(self) -> dict[str, int]:
        return {
            "messages": self._messages,
            "bytes_sent": self._links.bytes_sent,
            "bytes_received": self._links.bytes_received,
            "header_bytes": self._headers,
        }

    def close(self) -> None:
        self._links.close()


class SharedMemory:
    """Memory that all ranks see."""

    name = "shm"

    def __init__(self, memory: shm.Memory):
        self._memory = memory

    def perform(self, call: Header, x: Array, deadline: Deadline) -> None:
        shm.COLLECTIVES[call.op](self._memory, x, call, deadline)

    def zeros(self, count: int, dtype: Any, all_gather_rows: Rows) -> Array:
        return shm.shared_zeros(self._memory, count, dtype, all_gather_rows)

    def stats(self) -> dict[str, int]:
        return dict.fromkeys(NOTHING_SENT, 0)

    def close(self) -> None:
        self._memory.close()


NOTHING_SENT = ("messages", "bytes_sent", "bytes_received", "header_bytes")


def meet(wish: str, links: RingLinks, alarm: Alarm, deadline: Deadline) -> Backend:
    """The back end that all ranks have agreed on; each says what it wishes.

    Raises: UsageError on all ranks, if they disagree or it cannot be; PeerError.
    """
    check_agreement(wish, links, deadline)
    if wish != "tcp" and (memory := shm.meet(links, alarm, deadline, wish == "shm")):
        return SharedMemory(memory)
    return Ring(links)


def check_agreement(wish: str, links: RingLinks, deadline: Deadline) -> None:
    """Raises: UsageError on all ranks, if not all wish the same."""
    wishes = ring.rows_of_all(links, [TRANSPORTS.index(wish)], deadline)[:, 0]
    if (wishes != wishes[0]).any():
        other = int(np.argmax(wishes != wishes[0]))
        a, b = (TRANSPORTS[wishes[k]] for k in (0, other))
        raise UsageError(
            f"rank 0 wants the transport {a!r}, but rank {other} {b!r}. Give all ranks "
            "the same `transport`, or the same MINDDP_TRANSPORT."
        )
