r"""NCCL: collectives of arrays on GPUs, by NVIDIA's library, through CuPy.

    pg = minddp.init_process_group(transport="nccl")       or MINDDP_TRANSPORT=nccl
    cupy.cuda.Device(pg.local_rank).use()                  a GPU for each rank
    model.to("cuda")

All else stays as it is: calls, order, chunks, errors. What lies on the host, such as a
barrier or the comparison of two models, still goes round the ring of ring.py; what lies
on a GPU goes straight to the other GPUs. A message (`send`) is copied to the host.

Who waits for what?  A GPU works through *streams*, queues of what it was asked to do;
asking returns at once. An *event* is a mark in such a queue.

    caller's thread   backward, backward, *written*, backward, ...      its stream
                                              '.
    comm thread       headers, over the ring    '> wait, all-reduce, *done*    our own
                                                                         '.
    comm thread                                                 looks at it: `perform`
                                                                returns, `wait` as well

1.  NCCL must not read what backward has yet to write. `payload.lend` marks the place in
    the caller's stream, in the caller's thread, since the current stream is a thread's
    own. Our stream waits for the mark; no processor does.
2.  Nobody must read what NCCL has yet to write. `perform` returns when the host has
    seen *done*: what is asked of any stream after that begins after it.
3.  Memory must not be given to others while NCCL uses it. `perform` holds the array
    until *done*, and for ever if it was cut short.

Rule 1.  Headers first: a rank sends its header to the right and compares the one from
         the left, on the ring. Of two neighbours in different calls one at least does
         not begin; the others find out by the alarm. The cost: 44 bytes and one hop,
         about 0.05 ms on one machine. A digest of all ranks would cost n-1 hops.
Rule 2.  A kernel of NCCL that waits for a dead rank waits for ever, and occupies the
         GPU. So whoever waits here looks, between naps, at the alarm, the deadline and
         NCCL's own error, and aborts the communicator. NCCL connects to its peers
         within the first calls, and does not return meanwhile: there a second thread,
         the watchdog, looks at alarm and deadline.
Rule 3.  The communicator is made with the first array on a GPU, on that GPU: by then
         the user has chosen. Whether CuPy and NCCL are there is asked at the beginning.
         Either way all ranks tell each other what they lack, and all raise it.
Rule 4.  One GPU a rank. NCCL would refuse two ranks on one, or hang: they are told.
Rule 5.  NCCL adds in an order of its own, but each element once, and copies the sum:
         all ranks have the same bits, but not those of TCP. The minimum of a NaN and
         a number is up to it.

Chunks are near-equal, as in ring.py. Where NCCL wants equal ones and they are not, the
same is said as n broadcasts or n reductions in one *group*, which NCCL starts together;
gather, scatter and all-to-all, which it does not have, are groups of send and recv.

    NCCL            x = 10 elements on 4 ranks: chunks of 3, 3, 2, 2
    all_gather      group: broadcast 0:3 from 0, 3:6 from 1, 6:8 from 2, 8:10 from 3
    reduce_scatter  group: reduce 0:3 to 0, 3:6 to 1, 6:8 to 2, 8:10 to 3

Cost, in bytes that a GPU sends: as in ring.py, 2 (n-1)/n B for an all-reduce; NCCL may
choose a tree, or let the switch add. all_to_all copies the array first.

The timeout is for a collective as a whole: NCCL does not tell how far it has come. Of
two groups that share GPUs only one should have a call under way at a time, as their
kernels could wait for each other.

Tested on a double of CuPy (tests/fakecupy.py), which performs the same calls late and
in other threads, and not yet on a GPU: `make gpu-check` does that, where there is one.

In PyTorch: `ProcessGroupNCCL` (its ncclStreams_, ncclEndEvent_ and watchdog).

Left out: int16 sums, which NCCL lacks; several GPUs a rank; send and recv; stats of the
bytes NCCL moves; a communicator that is shared by sub-groups (ncclCommSplit); CuPy
before 14, where the id is a tuple whose range depends on the processor.
"""

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from minddp import ring
from minddp.backends.tcp import Ring
from minddp.environment import boot_id
from minddp.errors import PeerLost, PeerTimeout, UsageError
from minddp.frame import HEADER_BYTES, Header, Kind
from minddp.net import Alarm, Deadline, RingLinks
from minddp.payload import OnGpu, lend, wire_name
from minddp.ring import chunk

SPINS = 100  # looks at an event before the first nap
NAP_SECONDS = 50e-6
WATCH_SECONDS = 0.1  # how often the watchdog looks
FAREWELL_SECONDS = 1.0  # how long close and abort wait for NCCL to let go

ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES
PLACE_BYTES = 96  # a machine, up to 64, and a PCI bus
WHY_BYTES = 240

TYPES = {
    "float16": "NCCL_FLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
    "bfloat16": "NCCL_BFLOAT16",
    "int8": "NCCL_INT8",
    "int32": "NCCL_INT32",
    "int64": "NCCL_INT64",
    "uint8": "NCCL_UINT8",
    "bool": "NCCL_UINT8",  # 0 and 1, of which min and max are "and" and "or"
}
REDUCTIONS = {
    "sum": "NCCL_SUM",
    "avg": "NCCL_AVG",
    "min": "NCCL_MIN",
    "max": "NCCL_MAX",
    "prod": "NCCL_PROD",
}


# ---- Is it there? ----


def find() -> tuple[Any, Any]:
    """The modules cupy and cupy.cuda.nccl.

    Raises: UsageError that says what is missing.
    """
    try:
        cupy = importlib.import_module("cupy")
        gpus = cupy.cuda.runtime.getDeviceCount()
        library = importlib.import_module("cupy.cuda.nccl")
    except ImportError as exc:
        raise UsageError(
            "it has no CuPy; install what fits the driver, with pip install "
            "'minddp[cuda12]' or 'minddp[cuda13]'"
        ) from exc
    except RuntimeError as exc:  # CUDARuntimeError: no driver, an old driver, no GPU
        raise UsageError(f"CUDA says {exc}; look at nvidia-smi") from exc
    if not gpus:
        raise UsageError("it sees no GPU; look at CUDA_VISIBLE_DEVICES")
    if not library.available:
        raise UsageError(
            "CuPy finds no NCCL; pip install nvidia-nccl-cu12 or -cu13, as CuPy is"
        )
    return cupy, library


def usable() -> bool:
    """Whether this process could use NCCL."""
    try:
        find()
    except UsageError:
        return False
    return True


def meet(links: RingLinks, alarm: Alarm, deadline: Deadline) -> "Nccl":
    """The back end, if all ranks can have it.

    Raises: UsageError on all ranks, naming one that cannot and why; PeerError.
    """
    cupy = library = None
    why = ""
    try:
        cupy, library = find()
    except UsageError as exc:
        why = str(exc)
    raise_together(links, why, deadline)
    return Nccl(links, alarm, cupy, library)


def bytes_of_all(
    links: ring.Links, mine: bytes, nbytes: int, deadline: Deadline
) -> list[bytes]:
    """What every rank has given, as `nbytes` bytes: cut, or with zeros behind it."""
    row = list(mine[:nbytes].ljust(nbytes, b"\0"))
    return [bytes(row.tolist()) for row in ring.rows_of_all(links, row, deadline)]


def raise_together(links: ring.Links, why: str, deadline: Deadline) -> None:
    """Raises: UsageError on all ranks, if one of them has a reason."""
    reasons = bytes_of_all(links, why.encode(), WHY_BYTES, deadline)
    for rank, row in enumerate(reasons):
        if reason := row.rstrip(b"\0").decode(errors="replace"):
            raise UsageError(
                f"transport='nccl': rank {rank} cannot use NCCL: {reason}. "
                "transport='tcp' takes arrays on a GPU too, by way of the host."
            )


# ---- One rank's GPU ----


class Nccl(Ring):
    """NCCL for arrays on a GPU; those on the host go round the ring."""

    name = "nccl"

    def __init__(self, links: RingLinks, alarm: Alarm, cupy: Any, library: Any):
        super().__init__(links)
        self.rank, self.world_size = links.rank, links.world_size
        self.cupy, self.library, self.alarm = cupy, library, alarm
        self.device: int | None = None  # where the first array was
        self._communicator: Communicator | None = None

    def lend(self, row: Any, reduce: str) -> OnGpu:
        """A row on a GPU as `perform` takes it, in the thread that has written it.

        Raises: UsageError if this array cannot go; nothing has been sent.
        """
        name, device = wire_name(row.dtype), row.device.id
        if reduce and name not in TYPES:
            raise UsageError(
                f"NCCL cannot reduce {name}; convert it to int32, or copy the array to "
                "the host, from where it goes by TCP"
            )
        if self.device is None:
            self.device = device
        if device != self.device:
            raise UsageError(
                f"rank {self.rank} uses NCCL on cuda:{self.device}, but this array is "
                f"on cuda:{device}. A rank has one GPU: move the array there."
            )
        return lend(row)

    def perform(self, call: Header, x: Any, deadline: Deadline) -> None:
        """Perform this collective on an array on the host, or on a row that was lent.

        Raises: UsageError on all ranks, if two are on one GPU; PeerError.
        """
        if not isinstance(x, OnGpu):
            super().perform(call, x, deadline)
            return
        on_gpus = replace(call, kind=Kind.GPU)  # on the host it is another call
        ring.compare_headers(self._links, on_gpus, deadline)
        self._headers += HEADER_BYTES
        if self._communicator is None:
            self._communicator = self._connect(call, deadline)
            deadline.restart()
        if x.row.size:
            self._communicator.perform(call, x, deadline)

    def _connect(self, call: Header, deadline: Deadline) -> "Communicator":
        """With all ranks, once they agree that it can be."""
        place, unique_id, why = "", b"", ""
        try:
            bus = self.cupy.cuda.runtime.deviceGetPCIBusId(self.device)
            place = f"{boot_id()} {bus}"
            if self.rank == 0:
                unique_id = self.library.get_unique_id()
                if not isinstance(unique_id, bytes):
                    raise RuntimeError("its CuPy is older than 14")
        except RuntimeError as exc:  # NCCL's, CUDA's or ours
            why = str(exc)
        raise_together(self._links, why, deadline)
        places = bytes_of_all(self._links, place.encode(), PLACE_BYTES, deadline)
        if len(set(places)) < self.world_size:
            self.device = None  # so that another can be chosen
        refuse_a_shared_gpu(places)
        unique_id = bytes_of_all(self._links, unique_id, ID_BYTES, deadline)[0]
        return Communicator(self, unique_id, call, deadline)

    def close(self) -> None:
        """Let go of the GPU too. Closing twice is fine."""
        super().close()
        if self._communicator:
            self._communicator.close()


def refuse_a_shared_gpu(places: list[bytes]) -> None:
    """Raises: UsageError if two of these (machine and PCI bus) are the same."""
    first: dict[bytes, int] = {}
    for rank, place in enumerate(places):
        other = first.setdefault(place, rank)
        if other != rank:
            bus = place.rstrip(b"\0").decode().split()[-1]
            raise UsageError(
                f"ranks {other} and {rank} have their arrays on one GPU, the one at "
                f"PCI bus {bus} (nvidia-smi shows it), and NCCL wants one for each. "
                "Before you make arrays, call cupy.cuda.Device(pg.local_rank).use(), "
                "or take transport='tcp', by which ranks can share a GPU."
            )


def in_thread(call: Callable[[], None]) -> threading.Thread:
    """A thread that calls it, and that can be left behind: NCCL may never return."""
    thread = threading.Thread(target=call, name="minddp-nccl", daemon=True)
    thread.start()
    return thread


class Communicator:
    """One rank's end of an NCCL communicator, on one GPU, with a stream of its own.

    owner: whose rank, GPU and alarm these are. unique_id: NCCL's, from rank 0. call,
    deadline: of the collective for which it is made; it returns when all have come.
    """

    def __init__(self, owner: Nccl, unique_id: bytes, call: Header, deadline: Deadline):
        self.rank, self.world_size = owner.rank, owner.world_size
        self.library, self._cupy, self._alarm = owner.library, owner.cupy, owner.alarm
        self._device = owner.cupy.cuda.Device(owner.device)
        self._process = os.getpid()
        self._in_use: Any = None  # memory that NCCL may still read or write
        self._launching: Deadline | None = None  # of a call that has not returned
        self._ended = threading.Event()
        self._farewell: Callable[[], None] = lambda: None
        self.nccl = self._made(unique_id, call, deadline)
        with self._device:
            self.stream = self._cupy.cuda.Stream(non_blocking=True)
        self._watchdog = in_thread(self._watch)

    def _made(self, unique_id: bytes, call: Header, deadline: Deadline) -> Any:
        """NCCL's communicator, made in another thread, as nothing ends the wait for the
        other ranks."""
        made: list[Any] = []
        arguments = self.world_size, unique_id, self.rank

        def make() -> None:
            try:
                with self._device:  # a new thread starts on GPU 0
                    made.append(self.library.NcclCommunicator(*arguments))
            except Exception as exc:
                made.append(exc)

        thread = in_thread(make)
        while thread.is_alive():
            thread.join(NAP_SECONDS * 20)
            if thread.is_alive():
                self._be_patient(call, deadline)
        if isinstance(made[0], Exception):
            raise made[0]
        return made[0]

    def _be_patient(self, call: Header, deadline: Deadline) -> None:
        """Raises: the alarm's PeerError, or PeerTimeout at the deadline."""
        if self._alarm.error:
            raise self._alarm.error
        if not deadline.left():
            raise PeerTimeout(
                f"rank {self.rank} waits in vain for NCCL during {call}: not all ranks "
                f"have done their part within {deadline.seconds:g} s."
            )

    def perform(self, call: Header, x: OnGpu, deadline: Deadline) -> None:
        """Returns when the result is in x, for any stream. Raises: PeerError."""
        try:
            with self._device:
                self.stream.wait_event(x.written)
                self._launching = deadline
                self._in_use = x, COLLECTIVES[call.op](self, x.row, call)
                self._launching = None
                done = self._cupy.cuda.Event(disable_timing=True)
                done.record(self.stream)
            self._wait_for(done, call, deadline)
        except BaseException as exc:
            self._in_use = self._in_use or x
            self._let_go(self.nccl.abort)
            if isinstance(exc, self.library.NcclError):  # by the watchdog?
                self._be_patient(call, deadline)
            raise
        self._in_use = None

    def _wait_for(self, done: Any, call: Header, deadline: Deadline) -> None:
        for _ in range(SPINS):
            if done.done:
                return
        while not done.done:
            self._be_patient(call, deadline)
            try:
                self.nccl.check_async_error()
            # KeyError: CuPy does not know all of NCCL's codes.
            except (self.library.NcclError, KeyError) as exc:
                raise PeerLost(
                    f"rank {self.rank} lost another rank during {call}: NCCL says "
                    f"{exc!r}. Set NCCL_DEBUG=WARN to learn more."
                ) from exc
            time.sleep(NAP_SECONDS)

    def _watch(self) -> None:
        """The watchdog: NCCL connects within a call, and only an abort ends that. It
        also lets go in the end, as a program that ends cannot start threads any more.
        """
        while not self._ended.wait(WATCH_SECONDS):
            deadline = self._launching
            if deadline and (self._alarm.error or not deadline.left()):
                self._farewell = self.nccl.abort
                self._ended.set()
        with self._device:
            self._farewell()

    def close(self) -> None:
        """In good order; a forked child leaves its parent's alone."""
        if self._process == os.getpid():
            self._let_go(self.nccl.destroy)

    def _let_go(self, how: Callable[[], None]) -> None:
        """NCCL may wait there for the other ranks of this machine: not for long."""
        if not self._ended.is_set():
            self._farewell = how
            self._ended.set()
        self._watchdog.join(FAREWELL_SECONDS)

    # ---- For the collectives ----

    @contextmanager
    def group(self) -> Iterator[None]:
        """What is asked for inside starts together: none waits for one before it."""
        self.library.groupStart()
        try:
            yield
        finally:
            self.library.groupEnd()

    def how(self, call: Header) -> tuple[int, int, int]:
        """NCCL's numbers for dtype and reduction, and the stream."""
        dtype, op = TYPES[call.dtype], REDUCTIONS[call.reduce]
        return getattr(self.library, dtype), getattr(self.library, op), self.stream.ptr

    def send(self, x: Any, peer: int) -> None:
        if x.size:
            self.nccl.send(x.data.ptr, *self.as_bytes(x), peer, self.stream.ptr)

    def recv(self, x: Any, peer: int) -> None:
        if x.size:
            self.nccl.recv(x.data.ptr, *self.as_bytes(x), peer, self.stream.ptr)

    def as_bytes(self, x: Any) -> tuple[int, int]:
        """How many elements, and of which type, if they are only moved."""
        return x.nbytes, self.library.NCCL_UINT8

    def chunks(self, x: Any) -> list[Any]:
        """The chunks of x, that of rank k at k."""
        n = self.world_size
        return [x[chunk(x.size, n, k)] for k in range(n)]

    def others(self) -> list[int]:
        return [k for k in range(self.world_size) if k != self.rank]


# ---- Collectives, under the names they have in ring.py: started, not waited for ----


def all_reduce(comm: Communicator, x: Any, call: Header) -> None:
    dtype, op, stream = comm.how(call)
    comm.nccl.allReduce(x.data.ptr, x.data.ptr, x.size, dtype, op, stream)


def reduce(comm: Communicator, x: Any, call: Header) -> None:
    reduce_to(comm, x, call.root, call)


def reduce_to(comm: Communicator, x: Any, root: int, call: Header) -> None:
    """On the others x is only read."""
    dtype, op, stream = comm.how(call)
    if x.size:
        comm.nccl.reduce(x.data.ptr, x.data.ptr, x.size, dtype, op, root, stream)


def reduce_scatter(comm: Communicator, x: Any, call: Header) -> None:
    chunks = comm.chunks(x)
    if x.size % comm.world_size == 0:
        mine, (dtype, op, stream) = chunks[comm.rank], comm.how(call)
        comm.nccl.reduceScatter(x.data.ptr, mine.data.ptr, mine.size, dtype, op, stream)
        return
    with comm.group():
        for k, part in enumerate(chunks):
            reduce_to(comm, part, k, call)


def broadcast(comm: Communicator, x: Any, call: Header) -> None:
    broadcast_from(comm, x, call.root)


def broadcast_from(comm: Communicator, x: Any, root: int) -> None:
    stream = comm.stream.ptr
    if x.size:
        comm.nccl.broadcast(x.data.ptr, x.data.ptr, *comm.as_bytes(x), root, stream)


def all_gather(comm: Communicator, x: Any, call: Header) -> None:
    chunks, stream = comm.chunks(x), comm.stream.ptr
    if x.size % comm.world_size == 0:
        mine = chunks[comm.rank]
        comm.nccl.allGather(mine.data.ptr, x.data.ptr, *comm.as_bytes(mine), stream)
        return
    with comm.group():
        for k, part in enumerate(chunks):
            broadcast_from(comm, part, k)


def gather(comm: Communicator, x: Any, call: Header) -> None:
    chunks = comm.chunks(x)
    with comm.group():
        if comm.rank != call.root:
            comm.send(chunks[comm.rank], call.root)
        for k in comm.others() if comm.rank == call.root else ():
            comm.recv(chunks[k], k)


def scatter(comm: Communicator, x: Any, call: Header) -> None:
    chunks = comm.chunks(x)
    with comm.group():
        if comm.rank != call.root:
            comm.recv(chunks[comm.rank], call.root)
        for k in comm.others() if comm.rank == call.root else ():
            comm.send(chunks[k], k)


def all_to_all(comm: Communicator, x: Any, call: Header) -> Any:
    """Gives the copy that is sent, which must live until all is done."""
    with comm.stream:
        outgoing = x.copy()
    theirs, mine = comm.chunks(outgoing), comm.chunks(x)
    with comm.group():
        for k in comm.others():
            comm.send(theirs[k], k)
            comm.recv(mine[k], k)
    return outgoing


COLLECTIVES = {
    collective.__name__: collective
    for collective in (
        *(all_reduce, reduce_scatter, all_gather, broadcast),
        *(reduce, gather, scatter, all_to_all),
    )
}
