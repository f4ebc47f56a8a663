"""The ring as a back end: collectives over TCP links between neighbours, on any hosts.

    call.op --> RING --> ring.all_reduce(links, x, call, deadline), ...

It is the default, and what the chapters explain. What it adds to ring.py and rooted.py
is the count of messages and headers; bytes are counted by the links.

In PyTorch: ProcessGroupGloo over gloo's transport/tcp.

Left out: nothing; the lesson is in ring.py.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from minddp import ring, rooted
from minddp.frame import HEADER_BYTES, Header
from minddp.net import Deadline, RingLinks
from minddp.payload import staged

Array = np.ndarray[Any, Any]

RING: dict[str, Callable[..., None]] = {
    collective.__name__: collective
    for collective in (
        *(ring.all_reduce, ring.reduce_scatter, ring.all_gather, ring.broadcast),
        *(rooted.reduce, rooted.gather, rooted.scatter, rooted.all_to_all),
        ring.barrier,
    )
}


class Ring:
    """The ring of all ranks."""

    name = "tcp"

    def __init__(self, links: RingLinks):
        self._links = links
        self._messages = self._headers = 0

    def lend(self, row: Any, reduce: str) -> Any:
        return staged(row)

    def perform(self, call: Header, x: Any, deadline: Deadline) -> None:
        RING[call.op](self._links, x, call, deadline)
        r, n = self._links.rank, self._links.world_size
        self._messages += len(ring.arrivals(call, (r + 1) % n, n))  # what right gets
        self._headers += HEADER_BYTES

    def zeros(self, count: int, dtype: Any, all_gather_rows: Any) -> Array:
        return np.zeros(count, dtype)

    def stats(self) -> dict[str, int]:
        return traffic(
            messages=self._messages,
            bytes_sent=self._links.bytes_sent,
            bytes_received=self._links.bytes_received,
            header_bytes=self._headers,
        )

    def close(self) -> None:
        self._links.close()


def traffic(
    messages: int = 0,
    bytes_sent: int = 0,
    bytes_received: int = 0,
    header_bytes: int = 0,
) -> dict[str, int]:
    """What a back end has sent itself, as `ProcessGroup.stats` shows it."""
    return {
        "messages": messages,
        "bytes_sent": bytes_sent,
        "bytes_received": bytes_received,
        "header_bytes": header_bytes,
    }
