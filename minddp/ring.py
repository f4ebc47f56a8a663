r"""Ring collectives: n ranks sum an array while each talks only to its two neighbours.

    r, n     this rank, the number of ranks        right = (r + 1) % n
    k        a chunk: one of n near-equal parts    left  = (r - 1) % n
    s        a step, 0 .. n-2

              .--> 0 --.
             /          \           every rank sends to the right
            3            1          and receives from the left,
             \          /           at the same moment
              '--- 2 <-'

Phase 1, reduce-scatter.  Chunk k sets out from rank k+1, is added to at every stop, and
comes home to rank k with the sum of all ranks.

    step s:   rank r sends chunk (r-1-s) % n,  receives and adds chunk (r-2-s) % n

    n = 4     s=0         s=1         s=2
    0 sends   3           2           1
    1 sends   0           3           2         follow chunk 0:
    2 sends   1           0           3         1 -> 2 -> 3 -> 0
    3 sends   2           1           0

    After it:  rank r owns chunk r, complete.

Phase 2, all-gather.  The same walk with finished chunks: chunk k sets out from rank k.

    step s:   rank r sends chunk (r-s) % n,  receives and keeps chunk (r-1-s) % n

Both phases are written twice below. `*_stepwise` reads like the picture: n-1 exchanges,
each of a whole chunk. The others are what runs. They rest on one observation: what a
rank sends in a step is exactly what it received and finished in the step before. So
nobody needs to wait for a whole chunk. Each rank forwards every *segment* as soon as it
is finished, and the whole all-reduce becomes one stream in which sending trails
receiving by one chunk:

    receive   | chunk r-2 | chunk r-3 |    ...    |  chunk r  | chunk r-1 | ...
    send      | chunk r-1 | chunk r-2 | chunk r-3 |    ...    |  chunk r  | ...

Small arrays.  Where a step's latency outweighs its bytes, chunks only cost time. Such
an array is passed on whole (`goes_whole`), and when a rank has those of all others it
adds them by itself, each chunk in the order in which the ring adds it:

    n = 4     s=0         s=1         s=2
    0 sends   x0          x3          x2          then every rank adds x0, x1, x2, x3

For two ranks this is the direct exchange, one message each way for the same bytes.

Invariants.

  Bytes.  Each rank sends 2 (n-1)/n * B bytes in 2 (n-1) steps. No algorithm can do with
          fewer bytes [Patarasuk & Yuan 2009]; the price is latency, which grows with n.
          A small array costs (n-1) * B bytes in n-1 steps, half as many.
  Bits.   Each chunk is summed along one path and then copied, so all ranks end with the
          same bits. For n = 2 these are the bits of x0 + x1. For n > 2 chunk k is added
          in the order k+1, k+2, ..., k, so another n may give other last bits.
  No deadlock.  A rank never waits to send before it looks for what has come (`pump`).

In PyTorch: gloo's allreduce_ring_chunked.h; NCCL's `runRing` in all_reduce.h.

Left out: trees and recursive doubling, which need log2(n) steps for small arrays, but
links to ranks other than the neighbours; several rings at once. Collectives with a root
are in rooted.py.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from minddp.combine import combiner
from minddp.errors import PeerError, PeerLost, PeerMismatch, PeerTimeout
from minddp.frame import HEADER_BYTES, FrameError, Header, Kind
from minddp.net import Deadline

Array = np.ndarray[Any, Any]
Bytes = bytes | bytearray | memoryview
Script = Iterator[bytearray | memoryview]  # yields each buffer that it wants filled

# As measured from 64 KiB to 1 MiB: smaller ones cost more system calls than they hide,
# larger ones leave the L2 cache before they are added.
SEGMENT_BYTES = 512 * 1024

# Bytes that may be sent more for each step that is saved: 1 Gbit/s carries as many in
# 0.13 ms, about what a step takes anyway. On loopback, 16 KiB in chunks took 1.5 times
# as long as whole with 2 ranks, 1.6 with 4, 1.9 with 16 (two cores, medians of 300).
STEP_BYTES = 16 * 1024
# Larger ones must be cut, or nothing is added while the next bytes come: with 2 ranks
# both ways are level from here to 512 KiB.
WHOLE_BYTES = 256 * 1024


class Neighbour(Protocol):
    """Who is at the other end of a link."""

    peer: int
    address: str


class Links(Protocol):
    """What a ring needs of a network (net.RingLinks, testing.MemoryLinks)."""

    rank: int
    world_size: int
    me: int  # this rank, as errors name it

    @property
    def left(self) -> Neighbour: ...
    @property
    def right(self) -> Neighbour: ...
    def send_some(self, buffers: Iterable[Bytes]) -> int: ...
    def recv_some(self, buffer: bytearray | memoryview) -> int: ...
    def wait(self, sending: bool, receiving: bool, deadline: Deadline) -> bool: ...


# ---- Chunks and segments: who owns what ----


def chunk(length: int, n: int, k: int) -> slice:
    """Chunk k of n of an array of `length` elements; the first length % n have one
    more.

    chunk(10, 4, k) for k = 0 .. 3 is 0:3, 3:6, 6:8, 8:10. Any integer k is taken modulo
    n.
    """
    size, longer = divmod(length, n)
    k %= n
    start = k * size + min(k, longer)
    return slice(start, start + size + (k < longer))


def segments(part: slice, itemsize: int) -> Iterator[slice]:
    """The pieces of a chunk that travel as a unit, none of them empty."""
    step = SEGMENT_BYTES // itemsize
    for start in range(part.start, part.stop, step):
        yield slice(start, min(start + step, part.stop))


def as_bytes(x: Array) -> memoryview:
    """The memory of a contiguous array."""
    return x.view(np.uint8).data if x.size else memoryview(b"")


# ---- Moving bytes: both directions at once ----


def pump(
    links: Links, ready: deque[Bytes], script: Script, call: Header, deadline: Deadline
) -> None:
    """Send what is `ready` and fill what `script` asks for, until both have ended.

    The script appends to `ready` what may go on to the right. Sending and receiving
    take turns without ever blocking. Were all ranks to send first and receive
    afterwards, each would block as soon as its message exceeded the kernel's buffers,
    for ever. Buffers without a byte, here or there, are passed over.

    Raises: PeerLost, PeerTimeout, or the error of the group. The ring is then out of
    step and of no more use; arrays that were being received are undefined.
    """
    wanted, received = next_wanted(script), 0
    drop_sent(ready, 0)
    while wanted or ready:
        try:
            moved = links.send_some(ready) if ready else 0
            drop_sent(ready, moved)
            got = links.recv_some(wanted) if wanted else 0
        except PeerLost as lost:
            raise explained(lost, links, received, call) from lost.__cause__
        if got:
            received += got
            wanted = wanted[got:]
            if not wanted:  # it is full: the script uses it and asks for the next
                wanted = next_wanted(script)
        if moved or got:
            deadline.restart()
        elif not links.wait(bool(ready), bool(wanted), deadline):
            silent = links.left if wanted else links.right
            late = PeerTimeout(f"no byte moved for {deadline.seconds:g} s", silent.peer)
            raise explained(late, links, received, call)


def next_wanted(script: Script) -> memoryview:
    """The next memory that the script wants filled; empty if it has ended."""
    return next((memoryview(buffer) for buffer in script if buffer), memoryview(b""))


def drop_sent(ready: deque[Bytes], count: int) -> None:
    """Take `count` bytes off the front of these buffers, and those that are empty."""
    while ready and count >= len(ready[0]):
        count -= len(ready.popleft())
    if count:
        ready[0] = memoryview(ready[0])[count:]


def exchange(
    links: Links, out: Array, into: Array, call: Header, deadline: Deadline
) -> None:
    """Send one array to the right while another comes from the left."""
    pump(links, deque([as_bytes(out)]), iter([as_bytes(into)]), call, deadline)


def compare_headers(links: Links, call: Header, deadline: Deadline) -> None:
    """Pass the header on, and nothing else.

    Raises: PeerMismatch if the left neighbour is in another call; and as `pump`.
    """
    run_collective(links, deque(), iter(()), call, deadline)


def run_collective(
    links: Links, ready: deque[Bytes], script: Script, call: Header, deadline: Deadline
) -> None:
    """Pump with fingerprints first, so that no byte of another call is used.

    Raises: PeerMismatch if the left neighbour is in another call, before any array
    changed; and as `pump`.
    """
    mine, theirs = call.pack(), bytearray(HEADER_BYTES)

    def fingerprint_then_script() -> Script:
        yield theirs
        if theirs != mine:
            raise mismatch(links.me, links.left.peer, call, bytes(theirs))
        yield from script

    ready.appendleft(mine)
    pump(links, ready, fingerprint_then_script(), call, deadline)


# ---- The ring, step by step: reads like the picture ----


def reduce_scatter_stepwise(
    links: Links, x: Array, call: Header, deadline: Deadline
) -> None:
    """After it, chunk r of rank r's 1-D array x is complete; other chunks are
    partial."""
    r, n = links.rank, links.world_size
    add = combiner(call)
    for s in range(n - 1):
        sent, mine = chunk(len(x), n, r - 1 - s), chunk(len(x), n, r - 2 - s)
        received = np.empty_like(x[mine])
        exchange(links, x[sent], received, call, deadline)
        add(received, x[mine], out=x[mine])
    if call.reduce == "avg":
        x[chunk(len(x), n, r)] /= n


def all_gather_stepwise(
    links: Links, x: Array, call: Header, deadline: Deadline
) -> None:
    """Before it, chunk r of rank r's x is right; after it, all of x is, on all
    ranks."""
    r, n = links.rank, links.world_size
    for s in range(n - 1):
        sent, kept = chunk(len(x), n, r - s), chunk(len(x), n, r - 1 - s)
        exchange(links, x[sent], x[kept], call, deadline)


def all_reduce_stepwise(
    links: Links, x: Array, call: Header, deadline: Deadline
) -> None:
    """After it, the 1-D array x holds the reduction over all ranks, on all ranks."""
    reduce_scatter_stepwise(links, x, call, deadline)
    all_gather_stepwise(links, x, call, deadline)


# ---- The ring as one stream: what runs ----


def reduce_scatter(links: Links, x: Array, call: Header, deadline: Deadline) -> None:
    """As `reduce_scatter_stepwise`, in segments."""
    ready = start_with(links, x, links.rank - 1)
    run_collective(links, ready, add_all(links, x, call, ready, False), call, deadline)


def all_gather(links: Links, x: Array, call: Header, deadline: Deadline) -> None:
    """As `all_gather_stepwise`, in segments."""
    ready = start_with(links, x, links.rank)
    run_collective(links, ready, keep_all(links, x, ready), call, deadline)


def all_reduce(links: Links, x: Array, call: Header, deadline: Deadline) -> None:
    """As `all_reduce_stepwise`, in segments, without a pause between the phases.

    A small array goes whole.
    """
    if goes_whole(x.nbytes, links.world_size):
        all_reduce_whole(links, x, call, deadline)
        return
    ready = start_with(links, x, links.rank - 1)

    def script() -> Script:
        yield from add_all(links, x, call, ready, True)
        yield from keep_all(links, x, ready)

    run_collective(links, ready, script(), call, deadline)


def goes_whole(nbytes: int, n: int) -> bool:
    """Whether an array of this size is passed on whole by an all-reduce of n ranks.

    That saves n-1 steps and costs (n-1) (1 - 2/n) nbytes more on every link, so each
    step (1 - 2/n) nbytes; for 2 ranks nothing.
    """
    return nbytes <= WHOLE_BYTES and (n - 2) * nbytes <= n * STEP_BYTES


def all_reduce_whole(links: Links, x: Array, call: Header, deadline: Deadline) -> None:
    """As `all_reduce_stepwise`, with whole arrays in half as many steps."""
    r, n = links.rank, links.world_size
    given = [np.empty_like(x) for _ in range(n)]
    given[r][...] = x
    ready: deque[Bytes] = deque([as_bytes(given[r])])

    def script() -> Script:
        for s in range(n - 1):
            yield from fill(given[(r - 1 - s) % n], ready if s < n - 2 else None)
        add_in_order(given, x, call)

    run_collective(links, ready, script(), call, deadline)


def add_in_order(given: Sequence[Array], x: Array, call: Header) -> None:
    """x becomes the reduction of what all ranks have given, to the ring's bits: chunk k
    is added in the order k+1, k+2, ..., k. x is none of `given`."""
    n, add = len(given), combiner(call)
    for k in range(n):
        part = chunk(len(x), n, k)
        result, total = x[part], given[(k + 1) % n][part]
        for i in range(2, n + 1):
            total = add(total, given[(k + i) % n][part], out=result)
    if call.reduce == "avg":
        np.divide(x, n, out=x)


def start_with(links: Links, x: Array, k: int) -> deque[Bytes]:
    """What sets out from this rank: the bytes of chunk k."""
    return deque([as_bytes(x[chunk(len(x), links.world_size, k)])])


def add_all(
    links: Links, x: Array, call: Header, ready: deque[Bytes], chunk_r_too: bool
) -> Script:
    """Phase 1: receive, add, pass on. What is complete at the end is chunk r.

    `chunk_r_too` passes even that on, as phase 2 wants it; a reduce-scatter does not.
    """
    r, n, add = links.rank, links.world_size, combiner(call)
    scratch = np.empty(min(SEGMENT_BYTES // x.itemsize, -(-len(x) // n)), x.dtype)
    for s in range(n - 1):
        for part in segments(chunk(len(x), n, r - 2 - s), x.itemsize):
            segment, received = x[part], scratch[: part.stop - part.start]
            yield as_bytes(received)
            add(received, segment, out=segment)
            if call.reduce == "avg" and s == n - 2:
                segment /= n  # by its owner alone: one pass over 1/n of the array
            if chunk_r_too or s < n - 2:
                ready.append(as_bytes(segment))


def keep_all(links: Links, x: Array, ready: deque[Bytes]) -> Script:
    """Phase 2: receive in place, and pass on all but the last chunk, which is right's
    own."""
    r, n = links.rank, links.world_size
    for s in range(n - 1):
        kept = x[chunk(len(x), n, r - 1 - s)]
        yield from fill(kept, ready if s < n - 2 else None)


def fill(x: Array, ready: deque[Bytes] | None = None) -> Script:
    """Receive into x, segment by segment, and pass each on if there is `ready`."""
    for part in segments(slice(0, len(x)), x.itemsize):
        segment = as_bytes(x[part])
        yield segment
        if ready is not None:
            ready.append(segment)


def broadcast(links: Links, x: Array, call: Header, deadline: Deadline) -> None:
    """After it, the 1-D array x is the root's, on all ranks.

    It walks the ring from the root to the root's left neighbour. In segments, so that
    the last rank starts to receive n-2 segments after the first, and not n-2 arrays.
    """
    r, n, root = links.rank, links.world_size, call.root
    ready: deque[Bytes] = deque([as_bytes(x)] if r == root else [])
    last = r == (root - 1) % n
    script = iter(()) if r == root else fill(x, None if last else ready)
    run_collective(links, ready, script, call, deadline)


def barrier(links: Links, x: Array, call: Header, deadline: Deadline) -> None:
    """Returns when all ranks have entered: nobody knows a sum before all have added to
    it.

    `x` is one element, of no other use.
    """
    all_reduce(links, x, call, deadline)


def rows_of_all(links: Links, row: Sequence[int], deadline: Deadline) -> Array:
    """A table of what every rank has given, int64 (world size, len(row)).

    For ranks that have just met: no user has called it, so it has no number.
    """
    table = np.zeros((links.world_size, len(row)), np.int64)
    table[links.rank] = row
    flat = table.reshape(-1)
    what = "all_gather", "", "int64", 0, -1, flat.size, flat.nbytes
    all_gather(links, flat, Header(Kind.DATA, 0, *what), deadline)
    return table


# ---- What a rank expects, and what to say when it does not come ----


def arrivals(call: Header, r: int, n: int) -> list[int]:
    """The bytes that rank r receives in each step of this call, without its header.

    For an all-reduce of 10,001 float32, rank 0 of 4 receives chunks 2, 1, 0, 3, 2, 1,
    which gives [10000, 10000, 10004, 10000, 10000, 10000].
    """
    root = call.root
    if call.op in ("all_reduce", "barrier") and goes_whole(call.nbytes, n):
        return [call.nbytes] * (n - 1)
    if call.op in ("broadcast", "reduce"):
        starts = root if call.op == "broadcast" else (root + 1) % n  # receives nothing
        return [] if r == starts else [call.nbytes]
    match call.op:
        case "all_reduce" | "barrier":
            chunks = [r - 2 - t for t in range(2 * (n - 1))]
        case "reduce_scatter":
            chunks = [r - 2 - t for t in range(n - 1)]
        case "all_gather":
            chunks = [r - 1 - t for t in range(n - 1)]
        case "gather":
            chunks = [r - 1 - t for t in range((r - root - 1) % n)]
        case "scatter":
            chunks = [root - t for t in range(1, n - (r - root) % n + 1) if r != root]
        case "all_to_all":
            chunks = [r - s for s in range(1, n) for _ in range(n - s)]
    itemsize = call.nbytes // call.count if call.count else 0
    parts = [chunk(call.count, n, k) for k in chunks]
    return [(part.stop - part.start) * itemsize for part in parts]


def explained(error: PeerError, links: Links, received: int, call: Header) -> PeerError:
    """The same error, told in full: who, in which call, how far it came, what to do.

    `received`: the bytes that had come from the left in this call, with its header.
    """
    r, n, p = links.rank, links.world_size, error.culprit
    link = links.left if p == links.left.peer else links.right
    side = "" if n == 2 else "left " if link is links.left else "right "
    lost = isinstance(error, PeerLost)
    text = (
        f"rank {links.me} {'lost' if lost else 'waits in vain for'} rank {p} "
        f"(its {side}neighbour, {link.address}) during {call}"
        f"{progress(call, r, n, received)}: {error}."
    )
    if lost:
        text += f" Rank {p} probably crashed or was killed: read its log first."
    return type(error)(text, p)


def progress(call: Header, r: int, n: int, received: int) -> str:
    """ ", step 2 of 4, after 500 of 800 bytes", if there was anything to receive."""
    steps = list(itertools.accumulate(arrivals(call, r, n)))
    payload = max(0, received - HEADER_BYTES)
    step = sum(payload >= total for total in steps) + 1
    if step > len(steps):
        return ""
    return f", step {step} of {len(steps)}, after {payload:,} of {steps[-1]:,} bytes"


def mismatch(r: int, peer: int, call: Header, theirs: bytes) -> PeerMismatch:
    """Both sides of a disagreement of rank r with another, often its left
    neighbour."""
    try:
        what = str(Header.unpack(theirs))
    except FrameError as exc:
        what = f"something else ({exc})"
    return PeerMismatch(
        f"rank {r} is in {call}, but rank {peer} sent {what}. All ranks must call "
        "collectives in the same order with equal shapes and dtypes. Did the ranks "
        "build different models, or does one skip a call?",
        peer,
    )
