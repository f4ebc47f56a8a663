r"""Shared memory: the collectives of ranks on one host, without a byte on a socket.

On a loopback link a byte is copied into the kernel and out again. Ranks on one host can
let the others look into their memory instead: every rank makes a file that lies in
memory only, and all map all of them.

    rank r's file   | page: counter, header | area 0 | area 1 | area 2 |
                                              \___ slot 0 | ... | slot n-1

An array goes in *pieces* that fit: piece p holds part p of each of the n chunks of
ring.py, and slot k of an area holds the part of chunk k.

All-reduce of one piece.  Rank r is the one who adds chunk r:

    give      copy the parts of all other chunks into my area's slots
    -------   barrier; now all headers are compared, and no array has changed yet
    add       chunk r: slot r of all others + my own, into my array and my slot r
    -------   barrier
    take      copy every other chunk k from slot k of rank k

The stages of several pieces overlap, so that there is one barrier a piece, not two:

    interval    0      1      2      3      4        every line is a barrier for all
    piece 0     give | add  | take |      |
    piece 1          | give | add  | take |
    piece 2          |      | give | add  | take     interval i gives into area i % 3

Rule 1.  In interval i a rank gives into its area i % 3. It reads all areas (i-1) % 3
         and writes slot r of its own there. It reads the areas (i-2) % 3. No two ranks
         are in different intervals, so nothing is overwritten while it is read. The
         count of intervals goes on from one call to the next: no call needs a barrier
         at its end.
Rule 2.  The first barrier of a call comes before any array is changed, and after it
         every rank compares all headers with its own. So a mismatch leaves arrays as
         they were, and all ranks count the same barriers.
Rule 3.  Chunk k is added in the order k+1, k+2, ..., k, as in ring.py: shared memory
         and TCP give the same bits.
Rule 4.  Who waits spins for some microseconds, lets others run for some more, then
         sleeps in `poll` on its *bell*, a pipe that all others can write to, and on the
         group's alarm. It says first for whom it waits; a rank that arrives rings for
         those who wait for it. A rank that gives up takes its arrival back: nobody who
         comes later goes on as if it had stayed. A rank that moves bytes elsewhere
         meanwhile (hierarchy.py) counts in its page, and sleepers do not give up.
Rule 5.  Nothing has a name in a file system. Others open the file as /proc/PID/fd/N,
         and its descriptor is closed once all have. When its last rank has ended,
         however it ended, the memory is gone. Its size is sealed: nobody can shrink it
         under the feet of the others.

Without a copy.  An array that the group itself has made (`ProcessGroup.zeros`; DDP's
buckets are such) lies in a file of its own, a *window*, which all ranks map. Rank r
adds chunk r over all windows and writes the sum into all of them: two barriers, nothing
given and nothing taken. After the second nobody but its owner touches a window. Ranks
show the window's number with the header; if they differ, all copy as before.

What makes a store visible?  A barrier says: whoever sees my counter sees all that I
wrote before. Processors may reorder a store and a later load (x86), or any two accesses
(ARM); a Python program has no fence instruction. But the interpreter's locks are atomic
read-modify-writes. `fence` releases and takes a lock that nobody else knows:

    x86     a locked instruction is a full fence, also for streaming stores
    ARM     release, then acquire: what was before stays before, what is after stays
            after (by the rules of its manual; measured and tested on x86 only)

It stands between my data and my counter; between my counter and the look at who waits
(and, at the sleeper, between saying so and looking at the counter: one of the two sees
the other); and between the others' counters and their data. A counter is 8 aligned
bytes, written by one rank alone; `memoryview` moves them by one instruction. Were a
bell missed all the same, the sleeper looks by itself after 0.1 s.

Worked example.  Two ranks, all_reduce of 4 float32, a small array, which is given whole
and added by everybody: one barrier.

    rank 0 gives [1 2 3 4], counts 1, sees that rank 1 has counted 1, compares headers,
    and adds: chunk 0 = [10 20] + [1 2], chunk 1 = [3 4] + [30 40]

A killed rank is noticed by the control plane, whose alarm wakes all; a stopped one by
the deadline.

In PyTorch: gloo's allreduce_shm.cc, for ranks on one node; NCCL's transport/shm.cc;
MPICH's POSIX segments (ch4/shm).

Left out: send and recv, which stay on TCP; NUMA; systems without memfd and /proc. For
several hosts with several ranks each, see hierarchy.py.
"""

import fcntl
import mmap
import os
import secrets
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from minddp import ring
from minddp.combine import combine
from minddp.errors import PeerTimeout, UsageError
from minddp.frame import HEADER_BYTES, Header
from minddp.net import Alarm, Deadline
from minddp.ring import add_in_order, chunk, mismatch

Array = np.ndarray[Any, Any]
Stage = Callable[[int], None]  # what happens to piece p

AREAS = 3
PAGE = 4096
LINE = 64  # bytes that processors move at once: what others write does not share one
# What is where on the page: counters of 8 bytes, and a header for each area.
ARRIVED_AT, AWAITS_AT, HEADERS_AT = 0, LINE, 2 * LINE
PROGRESS_AT = HEADERS_AT + AREAS * LINE
NUMBER_AT = 48  # of a window, from the beginning of the header before it
AREA_BYTES = 1 << 20  # as measured: what is given is still in a cache when it is taken
SMALL_BYTES = 32 * 1024  # up to here everybody adds everything
FILE_BYTES = PAGE + AREAS * AREA_BYTES
SPINS = 100  # looks at a counter without a system call: 5 us
YIELD_SECONDS = 100e-6  # as long as it may take to fall asleep and be woken
NAP_SECONDS = 0.1  # a sleeper looks by itself


# ---- One rank's file, and those of the others ----


@dataclass(frozen=True)
class Window:
    """An array of each rank that all can see; the memory of a bucket."""

    number: int  # the same on all ranks
    mine: "weakref.ref[Array]"
    of_all: list[Array]


class Bells:
    """Pipes by which ranks wake each other. of_all: every rank's, to write to. mine:
    where this rank reads."""

    def __init__(self, of_all: Sequence[int], mine: int, alarm: Alarm):
        self._of_all, self._mine = of_all, mine
        self._poll = select.poll()
        self._poll.register(mine, select.POLLIN)
        self._poll.register(alarm, select.POLLIN)

    def ring(self, k: int) -> None:
        """Wake rank k, if it sleeps."""
        with suppress(BlockingIOError, BrokenPipeError):  # it is full, or nobody's
            os.write(self._of_all[k], b"!")

    def nap(self, seconds: float) -> None:
        """Sleep until this rank's bell rings, or the alarm, or for so long."""
        for fd, _ in self._poll.poll(seconds * 1000 + 1):
            if fd == self._mine:
                os.read(fd, PAGE)

    def close(self) -> None:
        for fd in {*self._of_all, self._mine}:
            os.close(fd)
        self._mine = -1  # a signal handler may have come between poll and read


class Memory:
    """The memory of all ranks as one of them sees it, and where it is in the protocol.

    ranks: their numbers in the group, for errors; in here they are 0, 1, ... in this
    order. maps: every rank's file.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        maps: list[mmap.mmap],
        bells: Bells,
        alarm: Alarm,
    ):
        self.rank, self.world_size, self.ranks = rank, len(maps), ranks
        self.others = [(rank + i) % len(maps) for i in range(1, len(maps))]
        self.interval = 0
        self._first = 0  # the interval in which the present call began
        self._mine = b""  # the header of the present call
        self._maps, self._bells, self._alarm = maps, bells, alarm
        self._pages = [memoryview(file)[:PAGE] for file in maps]
        self._arrived = self._counters(ARRIVED_AT)
        self._awaits = self._counters(AWAITS_AT)
        self._progress = self._counters(PROGRESS_AT)
        self._areas = [
            np.frombuffer(file, np.uint8, AREAS * AREA_BYTES, PAGE).reshape(AREAS, -1)
            for file in maps
        ]
        self._windows: dict[int, Window] = {}  # by the id of my array
        self._windows_made = 0
        self._lock = threading.Lock()
        self._lock.acquire()

    def _counters(self, at: int) -> list[memoryview]:
        """Every rank's counter at this place of its page."""
        return [page[at : at + 8].cast("Q") for page in self._pages]

    def area(self, owner: int, piece: int) -> Array:
        """The bytes into which that rank gives a piece of the present call."""
        area: Array = self._areas[owner][(self._first + piece) % AREAS]
        return area

    def add_window(self, mine: Array, of_all: list[Array]) -> None:
        """From now on, until `mine` is forgotten, a call on it finds those of all."""
        self._windows_made += 1
        key = id(mine)
        reference = weakref.ref(mine, lambda _: self._windows.pop(key, None))
        self._windows[key] = Window(self._windows_made, reference, of_all)

    def common_window(
        self, x: Array, call: Header, deadline: Deadline
    ) -> list[Array] | None:
        """Every rank's array, if all reduce one that they share; costs a barrier.

        While there is none to be shared, costs nothing.
        """
        if not self._windows_made:
            return None
        base = x if x.base is None else x.base
        window = self._windows.get(id(base))
        if window and (window.mine() is not base or base.nbytes != x.nbytes):
            window = None
        self.begin(call)
        where = self._header(self.interval).start + NUMBER_AT
        numbers = self._counters(where)
        numbers[self.rank][0] = window.number if window else 0
        self.barrier(call, deadline)
        if window is None or any(each[0] != window.number for each in numbers):
            return None
        return [array.view(x.dtype) for array in window.of_all]

    def close(self) -> None:
        """Close what is open; the memory goes with the last array that lies in it."""
        for view in (*self._arrived, *self._awaits, *self._progress, *self._pages):
            view.release()
        self._areas.clear()
        self._windows.clear()
        for file in self._maps:
            with suppress(BufferError):  # arrays of a call that is cut short
                file.close()
        self._bells.close()

    # ---- Barriers ----

    def begin(self, call: Header) -> None:
        """Show the others which call this is; they look after the first barrier."""
        self._first, self._mine = self.interval, call.pack()
        self._pages[self.rank][self._header(self.interval)] = self._mine

    def barrier(self, call: Header, deadline: Deadline) -> None:
        """Into the next interval, when all ranks have ended this one.

        Raises: PeerMismatch, PeerTimeout, or the error of the group.
        """
        self.interval += 1
        self._fence()
        self._arrived[self.rank][0] = self.interval
        self._fence()
        for k in self.others:
            if self._awaits[k][0] == self.rank + 1:
                self._bells.ring(k)
        while (late := self._behind()) is not None:
            self._wait_for(late, call, deadline)
        self._fence()
        deadline.restart()
        if self.interval == self._first + 1:
            self._compare(call)

    def show_progress(self) -> None:
        """Those who wait for this rank see that it moves bytes elsewhere, and go on
        waiting."""
        self._progress[self.rank][0] += 1

    def _behind(self) -> int | None:
        """A rank that has not come to this interval, or has taken its arrival back."""
        for k in self.others:
            if self._arrived[k][0] < self.interval:
                return k
        return None

    def _fence(self) -> None:
        self._lock.release()
        self._lock.acquire()

    def _compare(self, call: Header) -> None:
        where = self._header(self._first)
        for k in reversed(self.others):  # the left neighbour first
            theirs = bytes(self._pages[k][where])
            if theirs != self._mine:
                raise mismatch(self.ranks[self.rank], self.ranks[k], call, theirs)

    def _header(self, interval: int) -> slice:
        start = HEADERS_AT + interval % AREAS * LINE
        return slice(start, start + HEADER_BYTES)

    def _wait_for(self, k: int, call: Header, deadline: Deadline) -> None:
        """Until rank k has come to this interval: spin, then sleep."""
        counter = self._arrived[k]
        for _ in range(SPINS):
            if counter[0] >= self.interval:
                return
        end = time.perf_counter() + YIELD_SECONDS
        while counter[0] < self.interval:
            if time.perf_counter() > end:
                return self._sleep_until(k, call, deadline)
            os.sched_yield()

    def _sleep_until(self, k: int, call: Header, deadline: Deadline) -> None:
        self._awaits[self.rank][0] = k + 1
        self._fence()
        progress = self._progress[k][0]
        try:
            while self._arrived[k][0] < self.interval:
                if self._alarm.error:
                    raise self._alarm.error
                if self._progress[k][0] != progress:
                    progress = self._progress[k][0]
                    deadline.restart()
                if not deadline.left():
                    raise PeerTimeout(
                        f"rank {self.ranks[self.rank]} waits in vain for rank "
                        f"{self.ranks[k]} (in shared memory) during {call}: nothing "
                        f"moved for {deadline.seconds:g} s.",
                        self.ranks[k],
                    )
                self._bells.nap(min(deadline.left(), NAP_SECONDS))
        except BaseException:
            # Nobody is to go on with us.
            self._arrived[self.rank][0] = self.interval - 1
            raise
        self._awaits[self.rank][0] = 0


def meet(
    links: ring.Links,
    alarm: Alarm,
    deadline: Deadline,
    mates: Sequence[int],
    insist: bool,
) -> Memory | None:
    """The memory of `mates`, the ranks of this host, if the ranks of every host can
    reach each other's; else None.

    All ranks of all hosts call it, and get the same answer. Their ring is used to ask.

    Raises: UsageError on all ranks, if they insist and it cannot be; PeerError.
    """
    with ExitStack() as offered, ExitStack() as kept:
        row, my_pipe = offer(offered, kept)
        table = ring.rows_of_all(links, row, deadline)
        maps, pipes, why = open_all(table[mates].tolist(), kept)
        missed = mates[len(pipes)] if len(pipes) < len(mates) else -1
        missed_by = ring.rows_of_all(links, [missed], deadline)[:, 0]
        # Now all have opened what they could, so what was offered is closed.
        if (missed_by < 0).all():
            kept.pop_all()
            bells = Bells(pipes, my_pipe, alarm)
            return Memory(mates.index(links.rank), mates, maps, bells, alarm)
    if insist:
        who = int(np.argmax(missed_by >= 0))
        raise UsageError(
            f"transport='shm': rank {who} cannot map the memory of rank "
            f"{missed_by[who]}{why if who == links.rank else ''}. It needs Linux, and "
            "the ranks of a host in one pid namespace, of one user. transport='auto' "
            "takes TCP instead."
        )
    return None


def offer(offered: ExitStack, kept: ExitStack) -> tuple[list[int], int]:
    """Make this rank's file and its bell, a pipe. What the others need in order to
    open them: [process, file, pipe, name]; and the end of the pipe where it reads.

    On a system that lacks them they are -1. offered: will close what the others are to
    open; kept: what this rank reads.
    """
    name = secrets.randbits(63)
    file = pipe = my_pipe = -1
    with suppress(OSError, AttributeError):
        file = make_file(name, FILE_BYTES)
        offered.callback(os.close, file)
        my_pipe, pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        offered.callback(os.close, pipe)
        kept.callback(os.close, my_pipe)
    return [os.getpid(), file, pipe, name], my_pipe


def open_all(
    rows: Iterable[Sequence[int]], kept: ExitStack
) -> tuple[list[mmap.mmap], list[int], str]:
    """The files, mapped, and the pipes that the ranks of this host have offered; as
    many as can be had, and why the next one cannot. kept: will close them."""
    maps: list[mmap.mmap] = []
    pipes: list[int] = []
    try:
        for pid, file, pipe, name in rows:
            maps.append(map_file(pid, file, name, FILE_BYTES))
            kept.callback(maps[-1].close)
            pipes.append(open_of(pid, pipe, os.O_WRONLY | os.O_NONBLOCK))
            kept.callback(os.close, pipes[-1])
    except (OSError, ValueError) as exc:
        return maps, pipes, f" ({exc})"
    return maps, pipes, ""


def make_file(name: int, nbytes: int) -> int:
    """The descriptor of a new file in memory; pages exist from their first use on.

    Its name tells it from what has this descriptor in another process.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    fd = os.memfd_create(f"minddp-{name:x}", flags)
    os.ftruncate(fd, nbytes)
    seals = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def open_of(pid: int, fd: int, flags: int) -> int:
    """A descriptor of our own for what another process has open."""
    return os.open(f"/proc/{pid}/fd/{fd}", flags | os.O_CLOEXEC)


def map_file(pid: int, fd: int, name: int, nbytes: int) -> mmap.mmap:
    """That process's file, mapped. Raises: OSError if it is not there, or another."""
    if os.readlink(f"/proc/{pid}/fd/{fd}") != f"/memfd:minddp-{name:x} (deleted)":
        raise OSError(f"process {pid} of this host is another one")
    opened = open_of(pid, fd, os.O_RDWR)
    try:
        return mmap.mmap(opened, nbytes)
    finally:
        os.close(opened)


def shared_zeros(
    memory: Memory, count: int, dtype: Any, all_gather_rows: Callable[[Any], Array]
) -> Array:
    """An array that `all_reduce` reduces where it lies; each rank gets its own.

    All ranks of the group call it alike, for `all_gather_rows` is the group's. Without
    memory to share it is a plain array, on all ranks of this host.
    """
    nbytes, name, file = count * np.dtype(dtype).itemsize, secrets.randbits(63), -1
    if nbytes <= SMALL_BYTES:
        return np.zeros(count, dtype)
    with suppress(OSError):
        file = make_file(name, nbytes)
    table = all_gather_rows([os.getpid(), file, name])
    arrays: list[Array] = []
    with suppress(OSError, ValueError):
        for pid, fd, named in table[memory.ranks].tolist():
            file_of_rank = map_file(pid, fd, named, nbytes)
            arrays.append(np.frombuffer(file_of_rank, dtype, count))
    reached = all_gather_rows(len(arrays))
    if file >= 0:
        os.close(file)
    if (reached[memory.ranks] < memory.world_size).any():
        return np.zeros(count, dtype)
    mine = arrays[memory.rank]
    arrays[memory.rank] = mine[:0].copy()  # else it would keep itself alive
    memory.add_window(mine, arrays)
    return mine


# ---- Pieces ----


class Cut:
    """An array in pieces: piece p is part p of each of its n chunks."""

    def __init__(self, memory: Memory, x: Array):
        self._memory, self._x, n = memory, x, memory.world_size
        self._slot_bytes = AREA_BYTES // n // LINE * LINE
        self._part_length = self._slot_bytes // x.itemsize
        self.pieces = -(-len(x) // (n * self._part_length))
        self._chunks = [chunk(len(x), n, k) for k in range(n)]

    def part(self, k: int, p: int) -> Array:
        """Part p of chunk k of this rank's array."""
        whole = self._chunks[k]
        start = min(whole.start + p * self._part_length, whole.stop)
        return self._x[start : min(start + self._part_length, whole.stop)]

    def slot(self, owner: int, k: int, p: int) -> Array:
        """Slot k of a rank's area, as large as part p of chunk k."""
        part = self.part(k, p)
        start = k * self._slot_bytes
        area = self._memory.area(owner, p)
        return area[start : start + part.nbytes].view(self._x.dtype)

    def give(self, chunks: Iterable[int], p: int) -> None:
        """Copy part p of these chunks of this rank's array into this rank's slots."""
        for k in chunks:
            self.slot(self._memory.rank, k, p)[...] = self.part(k, p)


def perform(
    memory: Memory, call: Header, deadline: Deadline, pieces: int, *stages: Stage
) -> None:
    """Stage s of piece p in interval p + s; an array without elements has a barrier."""
    memory.begin(call)
    intervals = max(pieces, 1) + len(stages) - 1
    for i in range(intervals):
        if i:
            memory.barrier(call, deadline)
        for s, stage in enumerate(stages):
            if 0 <= i - s < pieces:
                stage(i - s)


# ---- Collectives: their names are those of ring.py and rooted.py ----


def all_reduce(memory: Memory, x: Array, call: Header, deadline: Deadline) -> None:
    """After it, the 1-D array x holds the reduction over all ranks, on all ranks."""
    if x.nbytes <= SMALL_BYTES:
        all_reduce_whole(memory, x, call, deadline)
        return
    if arrays := memory.common_window(x, call, deadline):
        all_reduce_in_place(memory, x, arrays, call, deadline)
        return
    r, others, cut = memory.rank, memory.others, Cut(memory, x)

    def give(p: int) -> None:
        cut.give(others, p)

    def add(p: int) -> None:
        mine = cut.part(r, p)
        arrays = [*(cut.slot(k, r, p) for k in others), mine]
        combine(arrays, [mine, cut.slot(r, r, p)], call)

    def take(p: int) -> None:
        for k in others:
            cut.part(k, p)[...] = cut.slot(k, k, p)

    perform(memory, call, deadline, cut.pieces, give, add, take)


def all_reduce_in_place(
    memory: Memory, x: Array, of_all: list[Array], call: Header, deadline: Deadline
) -> None:
    """Rank r adds chunk r of all arrays and writes it into all: no copies."""
    part = chunk(len(x), memory.world_size, memory.rank)
    theirs, mine = [of_all[k][part] for k in memory.others], x[part]
    combine([*theirs, mine], [mine, *theirs], call)
    memory.barrier(call, deadline)


def all_reduce_whole(
    memory: Memory, x: Array, call: Header, deadline: Deadline
) -> None:
    """Everybody adds everything: more work, but one barrier."""
    n = memory.world_size

    def whole(owner: int) -> Array:
        return memory.area(owner, 0)[: x.nbytes].view(x.dtype)

    def give(p: int) -> None:
        whole(memory.rank)[...] = x

    def add(p: int) -> None:
        add_in_order([whole(k) for k in range(n)], x, call)

    perform(memory, call, deadline, 1, give, add)


def reduce_scatter(memory: Memory, x: Array, call: Header, deadline: Deadline) -> None:
    """After it, chunk r of rank r's x is complete; the others are as they were."""
    r, others, cut = memory.rank, memory.others, Cut(memory, x)

    def give(p: int) -> None:
        cut.give(others, p)

    def add(p: int) -> None:
        mine = cut.part(r, p)
        combine([*(cut.slot(k, r, p) for k in others), mine], [mine], call)

    perform(memory, call, deadline, cut.pieces, give, add)


def reduce(memory: Memory, x: Array, call: Header, deadline: Deadline) -> None:
    """After it, the root's x holds the reduction over all; other ranks' x is as it
    was."""
    r, n, root, cut = memory.rank, memory.world_size, call.root, Cut(memory, x)

    def give(p: int) -> None:
        cut.give(range(n) if r != root else (), p)

    def add(p: int) -> None:
        for k in range(n) if r == root else ():
            mine = cut.part(k, p)
            combine([*(cut.slot(j, k, p) for j in memory.others), mine], [mine], call)

    perform(memory, call, deadline, cut.pieces, give, add)


def move(
    memory: Memory,
    x: Array,
    call: Header,
    deadline: Deadline,
    gives: Iterable[int] = (),
    takes: Iterable[tuple[int, int, int]] = (),
) -> None:
    """What only copies. gives: the chunks that this rank shows. takes: (owner, k, into)
    for chunk k of that rank, which becomes chunk `into` of ours."""
    cut = Cut(memory, x)
    gives, takes = list(gives), list(takes)

    def give(p: int) -> None:
        cut.give(gives, p)

    def take(p: int) -> None:
        for owner, k, into in takes:
            cut.part(into, p)[...] = cut.slot(owner, k, p)

    perform(memory, call, deadline, cut.pieces, give, take)


def all_gather(memory: Memory, x: Array, call: Header, deadline: Deadline) -> None:
    """Before it, chunk r of rank r's x is right; after it, all of x is, on all
    ranks."""
    takes = [(k, k, k) for k in memory.others]
    move(memory, x, call, deadline, [memory.rank], takes)


def broadcast(memory: Memory, x: Array, call: Header, deadline: Deadline) -> None:
    """After it, the 1-D array x is the root's, on all ranks."""
    chunks = range(memory.world_size)
    if memory.rank == call.root:
        move(memory, x, call, deadline, gives=chunks)
    else:
        takes = [(call.root, k, k) for k in chunks]
        move(memory, x, call, deadline, takes=takes)


def gather(memory: Memory, x: Array, call: Header, deadline: Deadline) -> None:
    """Before it, chunk r of rank r's x is right; after it, all of the root's x is."""
    if memory.rank == call.root:
        move(memory, x, call, deadline, takes=[(k, k, k) for k in memory.others])
    else:
        move(memory, x, call, deadline, gives=[memory.rank])


def scatter(memory: Memory, x: Array, call: Header, deadline: Deadline) -> None:
    """Before it, the root's x is right; after it, chunk r of every rank r's x is."""
    if memory.rank == call.root:
        move(memory, x, call, deadline, gives=memory.others)
    else:
        takes = [(call.root, memory.rank, memory.rank)]
        move(memory, x, call, deadline, takes=takes)


def all_to_all(memory: Memory, x: Array, call: Header, deadline: Deadline) -> None:
    """Chunk k of rank r's x, before it, is chunk r of rank k's x after it."""
    takes = [(k, memory.rank, k) for k in memory.others]
    move(memory, x, call, deadline, memory.others, takes)


def barrier(memory: Memory, x: Array, call: Header, deadline: Deadline) -> None:
    """Returns when all ranks have entered."""
    move(memory, x, call, deadline)


COLLECTIVES = {
    collective.__name__: collective
    for collective in (
        *(all_reduce, reduce_scatter, all_gather, broadcast, barrier),
        *(reduce, gather, scatter, all_to_all),
    )
}
