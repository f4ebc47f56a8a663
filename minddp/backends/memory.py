"""Shared memory as a back end: "shm" on one host, "shm+tcp" on several.

    all ranks on one host                      SharedMemory           shm.py
    hosts, of which one has several ranks      SharedMemoryAndRing    hierarchy.py
    as many hosts as ranks                     None: there is nothing to share

The choice (`meet`) is made by all ranks together, from the identity of every rank's
host and from whether its ranks really reach each other's memory.

In PyTorch: NCCL chooses so among its transports (p2p, shm, net) for each pair of GPUs.

Left out: hosts of which only some can share: then none does.
"""

from typing import Any

import numpy as np

from minddp import hierarchy, shm
from minddp.backends.tcp import Ring, traffic
from minddp.errors import UsageError
from minddp.frame import HEADER_BYTES, Header
from minddp.net import Deadline, RingLinks
from minddp.payload import staged
from minddp.rendezvous import Rendezvous
from minddp.ring import compare_headers

Array = np.ndarray[Any, Any]


class SharedMemory:
    """Memory that all ranks see."""

    name = "shm"

    def __init__(self, memory: shm.Memory):
        self._memory = memory

    def lend(self, row: Any, reduce: str) -> Any:
        return staged(row)

    def perform(self, call: Header, x: Any, deadline: Deadline) -> None:
        shm.COLLECTIVES[call.op](self._memory, x, call, deadline)

    def zeros(self, count: int, dtype: Any, all_gather_rows: Any) -> Array:
        return shm.shared_zeros(self._memory, count, dtype, all_gather_rows)

    def stats(self) -> dict[str, int]:
        return traffic()

    def close(self) -> None:
        self._memory.close()


class SharedMemoryAndRing(Ring):
    """Shared memory inside hosts, a ring between them; and the ring of all ranks."""

    name = "shm+tcp"

    def __init__(self, links: RingLinks, tiers: hierarchy.Tiers):
        super().__init__(links)
        self._tiers = tiers

    def perform(self, call: Header, x: Any, deadline: Deadline) -> None:
        if call.op not in hierarchy.COLLECTIVES:
            super().perform(call, x, deadline)
            return
        compare_headers(self._links, call, deadline)
        self._headers += HEADER_BYTES
        hierarchy.COLLECTIVES[call.op](self._tiers, x, call, deadline)

    def zeros(self, count: int, dtype: Any, all_gather_rows: Any) -> Array:
        return shm.shared_zeros(self._tiers.memory, count, dtype, all_gather_rows)

    def stats(self) -> dict[str, int]:
        across = self._tiers.stats()
        return {name: sent + across[name] for name, sent in super().stats().items()}

    def close(self) -> None:
        super().close()
        self._tiers.close()


def meet(
    links: RingLinks, rendezvous: Rendezvous, deadline: Deadline, insist: bool
) -> SharedMemory | SharedMemoryAndRing | None:
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
