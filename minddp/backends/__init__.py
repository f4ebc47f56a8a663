"""Back ends: what carries the collectives of a group.

    ProcessGroup  -- call, array, deadline -->  Backend.perform     the array, reduced

    name      here        what moves the bytes
    tcp       tcp.py      TCP links between neighbours, on any hosts: ring.py, rooted.py
    shm       memory.py   memory that the ranks of one host share: shm.py
    shm+tcp   memory.py   shared memory inside hosts, TCP between them: hierarchy.py
    nccl      nccl.py     NVLink, PCIe, InfiniBand between GPUs; for arrays on the host
                          the ring of tcp
    mpi       mpi.py      an MPI library; one mpiexec has started all ranks

What a user asks for is one of these, or "auto": shm, shm+tcp or tcp, whichever can be
had first. "shm" too becomes shm+tcp where there are several hosts.

The group numbers calls, checks arguments, keeps the order, judges failures and sends
messages, over TCP, whatever the back end is. So a back end is small: it performs a
collective that all ranks have entered, on a 1-D array.

Rule 1.  `perform` has the result in x, or raises a PeerError that names the culprit. It
         waits for nobody longer than the deadline, and looks at the group's alarm.
Rule 2.  Headers are compared first: no array takes a byte of another call. shm and mpi
         compare all with all, so arrays are as they were; in a ring a rank compares its
         left neighbour's, so an array may hold part of its own call.
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

from minddp import ring
from minddp.backends import memory, mpi, nccl
from minddp.backends.tcp import Ring
from minddp.environment import TRANSPORTS
from minddp.errors import UsageError
from minddp.frame import Header
from minddp.net import Deadline, RingLinks
from minddp.netlab import Lab
from minddp.rendezvous import Rendezvous

Array = np.ndarray[Any, Any]
Rows = Callable[[Any], Array]


class Backend(Protocol):
    """What a group needs of whatever carries its collectives."""

    name: str

    def lend(self, row: Any, reduce: str) -> Any:
        """A 1-D array on a GPU as `perform` takes it, in the thread that wrote it.

        Raises: UsageError if it cannot go; nothing has been sent.
        """

    def perform(self, call: Header, x: Any, deadline: Deadline) -> None:
        """Perform this collective on the 1-D array x, or on what `lend` gave.

        Raises: PeerError; UsageError on all ranks alike, if it cannot be.
        """

    def zeros(self, count: int, dtype: Any, all_gather_rows: Rows) -> Array:
        """A 1-D array of zeros that this back end reduces best. All ranks call it.

        all_gather_rows: ProcessGroup's, as what ranks say here must be in the order of
        their calls.
        """

    def stats(self) -> dict[str, int]:
        """What it has sent itself (`tcp.traffic`)."""

    def close(self) -> None:
        """Let go of what it holds; waits for nobody. Closing twice is fine."""


def meet(
    wish: str, links: RingLinks, rendezvous: Rendezvous, deadline: Deadline
) -> Backend:
    """The back end that all ranks have agreed on; each says what it wishes.

    Raises: UsageError on all ranks, if they disagree or it cannot be; PeerError.
    """
    check_agreement(wish, rendezvous.lab, links, deadline)
    if rendezvous.lab:
        check_lab_allows(wish)
        return Ring(links)
    if wish == "nccl":
        return nccl.meet(links, rendezvous.alarm, deadline)
    if wish == "mpi":
        return mpi.meet(links, rendezvous.alarm, deadline)
    if wish == "tcp":
        return Ring(links)
    return memory.meet(links, rendezvous, deadline, wish == "shm") or Ring(links)


def check_agreement(
    wish: str, lab: Lab | None, links: RingLinks, deadline: Deadline
) -> None:
    """Raises: UsageError on all ranks, if not all wish the same, in the same lab."""
    mine = [TRANSPORTS.index(wish), zlib.crc32(str(lab).encode())]
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


def check_lab_allows(wish: str) -> None:
    """Raises: UsageError if what is wished would pass by the emulated network."""
    if wish not in ("tcp", "auto"):
        raise UsageError(
            f"MINDDP_NETLAB emulates a network, which the transport {wish!r} would not "
            "use. Unset one of them, or take the transport 'tcp' or 'auto'."
        )
