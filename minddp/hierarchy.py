r"""Hosts with several ranks each: shared memory inside a host, a ring between hosts.

       host 0                      host 1
    .------------------.        .------------------.
    | rank 1   rank 3  |        | rank 4   rank 5  |
    |     \    /       |        |     \    /       |
    |      memory      |        |      memory      |
    |        |         |  TCP   |        |         |
    |      rank 0 -----+--------+----- rank 2      |
    '------------------'        '------------------'

The first rank of each host is its *leader*. Leaders have a ring of their own, in which
a host is what a rank is in ring.py; inside a host all is as in shm.py. An all-reduce:

    up       the ranks of a host add their arrays; the sum goes to the leader
    across   the leaders all-reduce these sums over their ring
    down     all ranks of a host take the leader's result

    ranks 0, 1, 3 have [1] [2] [4], ranks 2, 4, 5 have [8] [16] [32]
    up: 0 has [7], 2 has [56]     across: both have [63]     down: all have [63]

Broadcast goes up from the root, across, and down; a barrier is the same without data.
An average is summed up and across and divided once by the number of all ranks: hosts
may have unequally many, so an average of averages would be wrong.

Bytes.  n ranks on h hosts, an array of B bytes that travels in chunks. What one
        host sends over its cable:

            ring of all ranks, each host's in a row    2 (n-1)/n B
            ring of leaders                            2 (h-1)/h B

        For 2 hosts with 2 ranks each that is 1.5 B and 1 B; for 2 with 8 each nearly 2.
        If the numbers of the ranks alternate between hosts, as 0 2 | 1 3, the ring of
        all crosses a cable at every step and each host sends n/h times 2 (n-1)/n B.
Steps.  2 (h-1) of TCP in place of 2 (n-1) (half as many if the array is small), and
        those inside a host cost microseconds.

Rule 1.  Every call begins on the ring of all ranks: neighbours there compare headers,
         as in ring.py, before anything else. So a mismatch is found and judged as ever,
         whatever the two calls would have gone on with.
Rule 2.  What has no such path (reduce_scatter, all_gather, reduce, gather, scatter,
         all_to_all) takes the ring of all ranks entirely. Over each cable go (n-1)/n B
         for reduce_scatter and all_gather, and what rooted.py says for the others; n/h
         times that if the numbers alternate.
Rule 3.  Who waits in memory for its leader does not give up while the leader moves
         bytes: the leader counts in its page whenever some have moved, and who sleeps
         restarts its deadline whenever a look finds the count changed. So within a call
         nobody is late because a network is slow. From call to call one can be: a host
         that is through waits in the next one for a header, and the timeout must be
         longer than the slowest host needs for the rest of its call.
Rule 4.  Nobody leaves a call before its leader is through. It would wait in the next
         one for a header on the ring of all ranks, and there Rule 3 does not help it.
Rule 5.  All ranks have the leaders' bits, which the ring makes equal. They are not
         those of TCP alone, which adds in another order.

An array that lies in shared memory (`ProcessGroup.zeros`, DDP's buckets) is never
copied on the way up. Rank k of the L ranks of a host adds chunk k of all arrays into
the leader's; the leader's goes over the network; then rank k copies chunk k of it into
all other arrays. So all cores of a host share the work.

Which ranks share a host?  Those for which the kernel says so: the same boot, network
and pid namespace (a container with a network of its own is a host of its own); or those
that have the same MINDDP_HOSTID. And they must be able to open each other's memory.

Measured, 2 hosts with 2 ranks each: 25 MiB at 1 Gbit/s take 230 ms, over the ring of
all 330, or 650 if the numbers alternate; without a limit 35 and 57. 1 KiB takes 0.2 ms
in place of 0.1: so few ranks have few steps to save, and each rank first compares
headers with a neighbour.

In PyTorch: NCCL's trees, which are chains inside a host and a tree between hosts, and
NCCL_HOSTID. For averages of parameters, model_averaging/hierarchical_model_averager.py.

Left out: overlap of up, across and down, piece by piece (at 1 Gbit/s up and down are a
tenth); a ring for each local rank, for hosts with several network cards; more tiers.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np

from minddp import ring, shm
from minddp.combine import combine, hand_out
from minddp.environment import boot_id
from minddp.frame import HEADER_BYTES, Header
from minddp.net import Alarm, Bytes, Deadline, Link, RingLinks
from minddp.rendezvous import Rendezvous
from minddp.ring import chunk

Array = np.ndarray[Any, Any]
NAMESPACES = "/proc/self/ns/net", "/proc/self/ns/pid"
Hosts = list[list[int]]  # the ranks of every host, in order; the first is the leader
Collective = Callable[..., None]  # of ring.py or shm.py


# ---- Who is where ----


def hosts_of_all(links: ring.Links, host_id: str, deadline: Deadline) -> Hosts:
    """The ranks of every host, hosts in the order of their leaders. All ranks ask.

    host_id: Job.host_id. Raises: PeerError.
    """
    mine = sha256(os.fsencode(host_id or kernels_word())).digest()
    row = [int.from_bytes(mine[:8], "big", signed=True)]
    hosts: dict[int, list[int]] = {}
    for rank, host in enumerate(ring.rows_of_all(links, row, deadline)[:, 0].tolist()):
        hosts.setdefault(host, []).append(rank)
    return list(hosts.values())


def kernels_word() -> str:
    """What is the same for processes that share a machine, its network and its pids."""
    names = [boot_id()]
    with suppress(OSError):  # other systems have no namespaces
        names += [os.readlink(namespace) for namespace in NAMESPACES]
    return f"kernel: {' '.join(names)}"


# ---- Two tiers ----


class LeaderLinks(RingLinks):
    """A leader's links to the leaders beside it; its host sees when bytes move."""

    def __init__(
        self,
        place: int,
        hosts: Hosts,
        ends: tuple[Link, Link],
        memory: shm.Memory,
        alarm: Alarm,
    ):
        super().__init__(place, len(hosts), *ends, alarm)
        self.me = hosts[place][0]
        self._memory = memory

    def send_some(self, buffers: Iterable[Bytes]) -> int:
        sent = super().send_some(buffers)
        if sent:
            self._memory.show_progress()
        return sent

    def recv_some(self, buffer: bytearray | memoryview) -> int:
        received = super().recv_some(buffer)
        if received:
            self._memory.show_progress()
        return received


class Tiers:
    """Both tiers, as one rank sees them. leader_links: None on a rank that is no
    leader."""

    def __init__(
        self, hosts: Hosts, memory: shm.Memory, leader_links: LeaderLinks | None
    ):
        self.hosts, self.memory, self.leader_links = hosts, memory, leader_links
        self.world_size = sum(map(len, hosts))
        self._messages = self._headers = 0

    def place(self, rank: int) -> tuple[int, int]:
        """The number of this rank's host, and its own number there."""
        host = next(h for h, ranks in enumerate(self.hosts) if rank in ranks)
        return host, self.hosts[host].index(rank)

    def inside(
        self, collective: Collective, x: Array, call: Header, deadline: Deadline
    ) -> None:
        """Perform a collective of shm.py; a rank that is alone has nobody to do it
        with."""
        if self.memory.others:
            collective(self.memory, x, call, deadline)

    def across(
        self, collective: Collective, x: Array, call: Header, deadline: Deadline
    ) -> None:
        """Perform a collective of ring.py between hosts, if this rank is a leader."""
        if self.leader_links:
            collective(self.leader_links, x, call, deadline)
            h, right = len(self.hosts), self.leader_links.rank + 1
            self._messages += len(ring.arrivals(call, right % h, h))
            self._headers += HEADER_BYTES

    def stats(self) -> dict[str, int]:
        """What has been sent and received across."""
        links = self.leader_links
        return {
            "messages": self._messages,
            "bytes_sent": links.bytes_sent if links else 0,
            "bytes_received": links.bytes_received if links else 0,
            "header_bytes": self._headers,
        }

    def close(self) -> None:
        """Closing twice is fine."""
        if self.leader_links:
            self.leader_links.close()
        self.memory.close()


def connect(
    hosts: Hosts,
    memory: shm.Memory,
    links: RingLinks,
    rendezvous: Rendezvous,
    deadline: Deadline,
) -> Tiers:
    """The tiers, once the leaders have found each other; all ranks call it.

    links: the ring of all ranks. Raises: PeerError, UsageError.
    """
    members = [ranks[0] for ranks in hosts]
    leads = links.rank in members
    port = rendezvous.open_port(links.left.local_host) if leads else None
    try:
        row = [port.port if port else 0]
        ports = ring.rows_of_all(links, row, deadline)[:, 0].tolist()
        if not port:
            return Tiers(hosts, memory, None)
        assert rendezvous.control.table, "the ring of all ranks came from it"
        addresses = (host for host, _ in rendezvous.control.table)
        table = list(zip(addresses, ports, strict=True))
        ends = rendezvous.join_ring(members, port, table, deadline)
    finally:
        if port:
            port.close()
    place = members.index(links.rank)
    leader_links = LeaderLinks(place, hosts, ends, memory, rendezvous.alarm)
    return Tiers(hosts, memory, leader_links)


# ---- Calls and parts of calls ----


@dataclass(frozen=True, slots=True)
class Part(Header):
    """What one tier does of a call: performed as its own fields say; to other ranks,
    and in errors, it is the call itself."""

    call: Header = field(kw_only=True)

    def pack(self) -> bytes:
        return self.call.pack()

    def __str__(self) -> str:
        return str(self.call)


def part_of(call: Header, **changes: Any) -> Part:
    """The call with these fields changed, for one tier."""
    fields = {name: getattr(call, name) for name in Header.__slots__}
    return Part(**(fields | changes), call=call)


# ---- Collectives: their names are those of ring.py and shm.py ----


def all_reduce(tiers: Tiers, x: Array, call: Header, deadline: Deadline) -> None:
    """After it, the 1-D array x holds the reduction over all ranks, on all ranks."""
    part = part_of(call, reduce="sum" if call.reduce == "avg" else call.reduce, root=0)
    large = x.nbytes > shm.SMALL_BYTES
    if large and (arrays := tiers.memory.common_window(x, call, deadline)):
        all_reduce_in_place(tiers, x, arrays, part, deadline)
        return
    tiers.inside(shm.reduce, x, part, deadline)
    tiers.across(ring.all_reduce, x, part, deadline)
    if call.reduce == "avg" and tiers.leader_links:
        x /= tiers.world_size
    tiers.inside(shm.broadcast, x, part, deadline)


def all_reduce_in_place(
    tiers: Tiers, x: Array, of_all: Sequence[Array], part: Part, deadline: Deadline
) -> None:
    """Rank k of a host adds chunk k of all arrays into the leader's, and later copies
    it from there into all: nothing is given and nothing taken."""
    memory = tiers.memory
    mine, order = chunk(len(x), memory.world_size, memory.rank), memory.others
    arrays = [*(of_all[k][mine] for k in order), x[mine]]
    at = [*order, memory.rank].index(0)  # the leader's
    sums, copies = arrays[at], arrays[:at] + arrays[at + 1 :]
    if copies:
        combine(arrays, [sums], part)
    memory.barrier(part, deadline)
    tiers.across(ring.all_reduce, x, part, deadline)
    memory.barrier(part, deadline)
    divisor = tiers.world_size if part.call.reduce == "avg" else 1
    hand_out(sums, copies, divisor)
    memory.barrier(part, deadline)


def broadcast(tiers: Tiers, x: Array, call: Header, deadline: Deadline) -> None:
    """After it, the 1-D array x is the root's, on all ranks."""
    host, number = tiers.place(call.root)
    at_home = call.root in tiers.memory.ranks
    if at_home:
        tiers.inside(shm.broadcast, x, part_of(call, root=number), deadline)
    tiers.across(ring.broadcast, x, part_of(call, root=host), deadline)
    down = shm.barrier if at_home else shm.broadcast
    tiers.inside(down, x, part_of(call, root=0), deadline)


def barrier(tiers: Tiers, x: Array, call: Header, deadline: Deadline) -> None:
    """Returns when all ranks have entered."""
    tiers.inside(shm.barrier, x, call, deadline)
    tiers.across(ring.barrier, x, call, deadline)
    tiers.inside(shm.barrier, x, call, deadline)


COLLECTIVES = {
    collective.__name__: collective for collective in (all_reduce, broadcast, barrier)
}
