"""More ring collectives: reduce, gather and scatter, with a root, and all-to-all.

    n = 4, root 0. What is sent to the right, and who keeps it:

    reduce    1 --x1--> 2 --x1+x2--> 3 --x1+x2+x3--> 0       the root keeps the sum

    gather    1 --c1--> 2 --c2,c1--> 3 --c3,c2,c1--> 0       ck: chunk k, of rank k

    scatter   0 --c3,c2,c1--> 1 --c3,c2--> 2 --c3--> 3       each keeps the last

    all-to-all, one round after the other; rank r sends first its own, then passes on:

        round 1   rank 0 sends 0>1 0>2 0>3     a>b: the chunk that rank a has for b
        round 2   rank 0 sends 3>1 3>2         (it has kept 3>0)
        round 3   rank 0 sends 2>1

They are scripts for `ring.pump`, as those of ring.py are. All take the n chunks of one
array: chunk k belongs to rank k.

Cost, in bytes per link: reduce B; gather and scatter up to (n-1)/n B; all-to-all
(n-1)/2 B, where direct links between all pairs would need (n-1)/n B in all.

In PyTorch: gloo's gather.cc, scatter.cc and alltoall.cc, which send directly from rank
to rank; its reduce.cc is a reduce-scatter whose chunks then go to the root.

Left out: direct links, for which see mailbox.py.
"""

from collections import deque
from typing import Any

import numpy as np

from minddp.combine import combiner
from minddp.frame import Header
from minddp.net import Bytes, Deadline
from minddp.ring import (
    Links,
    Script,
    as_bytes,
    chunk,
    fill,
    run_collective,
    segments,
)

Array = np.ndarray[Any, Any]


def reduce(links: Links, x: Array, call: Header, deadline: Deadline) -> None:
    """After it, the root's x holds the reduction over all; other ranks' x is as it
    was."""
    r, n, root, add = links.rank, links.world_size, call.root, combiner(call)
    first = (root + 1) % n
    ready: deque[Bytes] = deque([as_bytes(x)] if r == first else [])

    def script() -> Script:
        for part in segments(slice(0, len(x)), x.itemsize) if r != first else ():
            segment = x[part]
            received = np.empty_like(segment)
            yield as_bytes(received)
            if r != root:
                add(received, segment, out=received)
                ready.append(as_bytes(received))
                continue
            add(received, segment, out=segment)
            if call.reduce == "avg":
                segment /= n

    run_collective(links, ready, script(), call, deadline)


def gather(links: Links, x: Array, call: Header, deadline: Deadline) -> None:
    """Before it, chunk r of rank r's x is right; after it, all of the root's x is."""
    r, n, root = links.rank, links.world_size, call.root
    ready: deque[Bytes] = deque([] if r == root else [as_bytes(x[chunk(len(x), n, r)])])

    def script() -> Script:
        for k in range(r - 1, r - 1 - (r - root - 1) % n, -1):
            theirs = x[chunk(len(x), n, k)]
            if r == root:
                yield from fill(theirs)
            else:
                yield from fill(np.empty_like(theirs), ready)

    run_collective(links, ready, script(), call, deadline)


def scatter(links: Links, x: Array, call: Header, deadline: Deadline) -> None:
    """Before it, the root's x is right; after it, chunk r of every rank r's x is."""
    r, n, root = links.rank, links.world_size, call.root
    farthest_first = [(root - distance) % n for distance in range(1, n)]
    ready: deque[Bytes] = deque()
    if r == root:
        ready.extend(as_bytes(x[chunk(len(x), n, k)]) for k in farthest_first)

    def script() -> Script:
        for k in farthest_first if r != root else ():
            mine = x[chunk(len(x), n, k)]
            if k == r:
                yield from fill(mine)
                return
            yield from fill(np.empty_like(mine), ready)

    run_collective(links, ready, script(), call, deadline)


def all_to_all(links: Links, x: Array, call: Header, deadline: Deadline) -> None:
    """Chunk k of rank r's x, before it, is chunk r of rank k's x after it."""
    r, n = links.rank, links.world_size
    outgoing = x.copy()  # what is still to be sent must not be overwritten
    ready: deque[Bytes] = deque(
        as_bytes(outgoing[chunk(len(x), n, r + distance)]) for distance in range(1, n)
    )

    def script() -> Script:
        for s in range(1, n):  # these have come s hops; the first of them is for us
            mine = x[chunk(len(x), n, r - s)]
            yield from fill(mine)
            for _ in range(n - s - 1):
                yield from fill(np.empty_like(mine), ready)

    run_collective(links, ready, script(), call, deadline)
