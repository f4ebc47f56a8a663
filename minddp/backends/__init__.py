"""Back ends: what carries the collectives of a group.

    ProcessGroup  -- call, array, deadline -->  Backend.perform     the array, reduced

    name      where                  what moves the bytes
    tcp       ring.py, rooted.py     TCP links between neighbours, on any hosts
    shm       shm.py                 memory that the ranks of one host share
    shm+tcp   hierarchy.py           shared memory inside hosts, TCP between them
    nccl      nccl.py                NVLink, PCIe, InfiniBand, between GPUs; for arrays
                                     on the host the ring of tcp
    mpi       mpi.py                 an MPI library; one mpiexec has started all ranks

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

import zlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from minddp import hierarchy, ring, rooted, shm
from minddp.backends import mpi, nccl
from minddp.environment import TRANSPORTS
from minddp.errors import UsageError
from minddp.frame import HEADER_BYTES, Header
from minddp.net import Deadline, RingLinks
from minddp.payload import OnGpu, lend
from minddp.rendezvous import Rendezvous

Array = np.ndarray[Any, Any]
Rows = Callable[[Any], Array]  # ProcessGroup.all_gather_rows


class Backend(Protocol):
    """What a group needs of whatever carries its collectives."""

    name: str

    def perform(self, call: Header, x: Array, deadline: Deadline) -> None:
        """Perform this collective on the 1-D array x.

        Raises: PeerError; UsageError on all ranks alike, if it cannot be.
        """

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


class Nccl(Ring):
    """NCCL between GPUs. Arrays on the host go round the ring, as without it."""

    name = "nccl"

    def __init__(self, links: RingLinks, gpus: nccl.Gpus):
        super().__init__(links)
        self._gpus = gpus

    def lend(self, row: Any, reduce: str) -> OnGpu:
        """A row on a GPU as `perform` takes it, in the thread that has written it.

        Raises: UsageError if NCCL cannot do this; nothing has been sent.
        """
        self._gpus.check(row, reduce)
        return lend(row)

    def perform(self, call: Header, x: Any, deadline: Deadline) -> None:
        if not isinstance(x, OnGpu):
            super().perform(call, x, deadline)
            return
        self._gpus.perform(call, x, deadline)
        self._messages += 1
        self._headers += HEADER_BYTES

    def close(self) -> None:
        super().close()
        self._gpus.close()


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


class SharedMemoryAndRing(Ring):
    """Shared memory inside hosts, a ring between them; and the ring of all ranks."""

    name = "shm+tcp"

    def __init__(self, links: RingLinks, tiers: hierarchy.Tiers):
        super().__init__(links)
        self._tiers = tiers

    def perform(self, call: Header, x: Array, deadline: Deadline) -> None:
        if call.op not in hierarchy.COLLECTIVES:
            super().perform(call, x, deadline)
            return
        hierarchy.compare_headers(self._links, call, deadline)
        self._headers += HEADER_BYTES
        hierarchy.COLLECTIVES[call.op](self._tiers, x, call, deadline)

    def zeros(self, count: int, dtype: Any, all_gather_rows: Rows) -> Array:
        return shm.shared_zeros(self._tiers.memory, count, dtype, all_gather_rows)

    def stats(self) -> dict[str, int]:
        across = self._tiers.stats()
        return {name: sent + across[name] for name, sent in super().stats().items()}

    def close(self) -> None:
        super().close()
        self._tiers.close()


NOTHING_SENT = ("messages", "bytes_sent", "bytes_received", "header_bytes")


def meet(
    wish: str, links: RingLinks, rendezvous: Rendezvous, deadline: Deadline
) -> Backend:
    """The back end that all ranks have agreed on; each says what it wishes.

    Raises: UsageError on all ranks, if they disagree or it cannot be; PeerError.
    """
    check_agreement(wish, links, deadline)
    if links.emulated:
        check_sockets(wish)
        return Ring(links)
    if wish == "nccl":
        return Nccl(links, nccl.meet(links, rendezvous.alarm, deadline))
    if wish == "mpi":
        return mpi.meet(links, rendezvous.alarm, deadline)
    if wish == "tcp":
        return Ring(links)
    return meet_in_memory(links, rendezvous, deadline, wish == "shm") or Ring(links)


def meet_in_memory(
    links: RingLinks, rendezvous: Rendezvous, deadline: Deadline, insist: bool
) -> Backend | None:
    """Shared memory inside hosts, if there is any to share; else None.

    Raises: UsageError on all ranks, if they insist and there is none; PeerError.
    """
    hosts = hierarchy.hosts_of_all(links, rendezvous.job.host_id, deadline)
    if len(hosts) == links.world_size:
        if insist:
            raise UsageError(
                f"transport='shm': the {len(hosts)} ranks are on as many hosts, so no "
                "two can share memory. A host is what has one kernel, network and pid "
                "namespace, or one MINDDP_HOSTID. transport='auto' takes TCP instead."
            )
        return None
    mates = next(ranks for ranks in hosts if links.rank in ranks)
    memory = shm.meet(links, rendezvous.alarm, deadline, mates, insist)
    if memory is None:
        return None
    if len(hosts) == 1:
        return SharedMemory(memory)
    try:
        tiers = hierarchy.connect(hosts, memory, links, rendezvous, deadline)
    except BaseException:
        memory.close()
        raise
    return SharedMemoryAndRing(links, tiers)


def check_agreement(wish: str, links: RingLinks, deadline: Deadline) -> None:
    """Raises: UsageError on all ranks, if not all wish the same."""
    mine = [TRANSPORTS.index(wish), zlib.crc32(links.emulated.encode())]
    wishes, labs = ring.rows_of_all(links, mine, deadline).T
    if (labs != labs[0]).any():
        raise UsageError(
            f"rank 0 and rank {np.argmax(labs != labs[0])} differ in MINDDP_NETLAB, "
            "which all ranks must have alike, or none of them"
        )
    if (wishes != wishes[0]).any():
        other = int(np.argmax(wishes != wishes[0]))
        a, b = (TRANSPORTS[wishes[k]] for k in (0, other))
        raise UsageError(
            f"rank 0 wants the transport {a!r}, but rank {other} {b!r}. Give all ranks "
            "the same `transport`, or the same MINDDP_TRANSPORT."
        )


def check_sockets(wish: str) -> None:
    """Raises: UsageError if what is wished would pass by the emulated network."""
    if wish not in ("tcp", "auto"):
        raise UsageError(
            f"MINDDP_NETLAB emulates a network, which the transport {wish!r} would not "
            "use. Unset one of them, or take the transport 'tcp' or 'auto'."
        )
