r"""MPI: the collectives of ranks that one mpiexec has started, moved by an MPI library.

    mpiexec -n 4 python train.py        with init_process_group(transport="mpi")

MPI (Message Passing Interface) is what supercomputers speak. Its libraries know fast
networks (InfiniBand, Slingshot) that TCP uses badly, and memory that ranks share. Who
outgrows our ring changes one argument. The group stays as it is: TCP links for meeting,
verdicts and messages. MPI has only the collectives.

MPI moves, NumPy adds.  An all-reduce has the two phases of ring.py, each one MPI call:

    n = 3    rank 0       rank 1       rank 2
             a0 a1 a2     b0 b1 b2     c0 c1 c2      chunk k belongs to rank k
    alltoall of the chunks
             a0 b0 c0     a1 b1 c1     a2 b2 c2      everybody has what it is to add
    add, in the order k+1, k+2, ..., k
             S0           S1           S2            b0+c0+a0   c1+a1+b1   a2+b2+c2
    allgather
             S0 S1 S2     S0 S1 S2     S0 S1 S2

MPI has a call that does it all, MPI_Allreduce, whose result the standard requires to be
identical on all ranks. We do not use it: it adds in an order of its own, has no float16
and no bfloat16 on most systems, and does not say what the minimum of 1 and NaN is. This
way the bits are the ring's, for all dtypes. Small arrays are gathered whole, and added
by everybody.

    milliseconds of          two ranks         three         four
    ours, MPI_Allreduce
    25 MiB of float32         7.7    7.6     8.1   15.1    11.2   12.4
    1 KiB                    0.013  0.004

    Medians of alternating calls, 41 and 500; MPICH on one host of two cores.

Rule 1.  Before any array is changed, the headers of all ranks are gathered and
         compared. Their equality also says that everybody has come: what follows takes
         as long as bytes take.
Rule 2.  Nothing blocks. Each MPI call gives a request, and `perform` looks at it again
         and again: it spins, lets others run, then sleeps for up to 1 ms. Between two
         looks it sees the alarm and the deadline. MPI has nothing to wake a sleeper by.
Rule 3.  A collective is a script that yields its requests. A rank that gives up (its
         deadline, another's failure) leaves the script where it is, and the arrays with
         it: MPI may still write into them, as a collective cannot be cancelled.
Rule 4.  All ranks make the same MPI calls in the same order, also those that failed. So
         at the end of the program a rank goes on with the script that it left. Then it
         enters one more comparison of headers, with a farewell for a header, and
         whoever waits for it there is released. The first comparison in which headers
         differ is the last call of all.
Rule 5.  A rank that fails waits for that as long as GRACE_SECONDS; then it ends all
         ranks by MPI_Abort. The alternative is that MPI_Finalize waits for ever.

Worked example.  Rank 1 of 3 raises ValueError in its 7th step. It tells rank 0, as with
any back end; ranks 0 and 2, in the comparison of the next call, see the alarm and raise
PeerLost with rank 1's words. All three print their tracebacks. At its end rank 1 says
farewell; that completes the comparison on 0 and 2, and MPI_Finalize returns on all.

Settings.  None are needed: rank and size are in mpiexec's variables, and `found_job`
tells all ranks over MPI where rank 0 listens, with a token. MASTER_ADDR, if it is set,
wins, and then all is as with TCP.

If a rank is killed, mpiexec ends the others, mostly before they can say why. If a rank
ends before MPI has started, the others wait in MPI_Init, which no signal handler and no
thread can leave: a watchdog ends them after the rendezvous timeout.

In PyTorch: ProcessGroupMPI.cpp, which needs a build of one's own. It blocks in
MPI_Allreduce, in one thread, and cannot time out.

Left out: reductions in the network's switches, which need MPI_Allreduce; memory of
GPUs; messages over MPI. A forked child must end by os._exit, as those of
multiprocessing do: mpi4py would end MPI for its parent.
"""

import atexit
import faulthandler
import importlib.util
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from minddp import ring
from minddp.backends.tcp import traffic
from minddp.combine import combine
from minddp.environment import Job, from_environment, seat
from minddp.errors import PeerError, PeerLost, PeerTimeout, UsageError
from minddp.frame import HEADER_BYTES, FrameError, Header, Kind
from minddp.net import Alarm, Deadline, interface_address, listen_in_range
from minddp.payload import staged
from minddp.ring import add_in_order, chunk, mismatch

Array = np.ndarray[Any, Any]
Script = Iterator[Any]  # yields each MPI request that is to be waited for

PART_BYTES = 1 << 20  # of each chunk, moved at a time; received ones are kept apart
SMALL_BYTES = 32 * 1024  # up to here everybody gathers and adds everything
SPINS = 10  # looks without a pause between them: 2 us
YIELD_SECONDS = 500e-6  # then lets others run, as long as ranks may come late
MOVE_SECONDS = 20e-3  # ... or, once all have come, as long as bytes may take
NAP_SECONDS = 1e-3
LAST_LOOK_SECONDS = 20e-3  # a collective that others have completed is not to fail here
GRACE_SECONDS = 5.0  # for all ranks to come to their end, after a failure
FLUSH_SECONDS = 0.2  # an mpiexec that aborts passes on only what it has read by then
ROW_BYTES = 4096  # of JSON, which a rank says before there is a group

unsettled: list["Mpi"] = []  # on which this rank has MPI calls to make yet
requests: list[Any] = []  # of no Mpi, and perhaps not complete yet
failures: list[str] = []  # why this rank does not wait for ever, at exit


# ---- Waiting ----


def naps(busy: float) -> Iterator[None]:
    """Between two looks: others' turn for `busy` seconds, then sleep."""
    start = time.perf_counter()
    while time.perf_counter() - start < busy:
        os.sched_yield()
        yield
    while True:
        time.sleep(min((time.perf_counter() - start) / 8, NAP_SECONDS))
        yield


def completes_soon(request: Any) -> bool:
    """Whether all the others have done their part, which may still be on its way."""
    end = time.perf_counter() + LAST_LOOK_SECONDS
    while not request.Test():
        if time.perf_counter() > end:
            return False
        os.sched_yield()
    return True


@contextmanager
def watchdog(seconds: float) -> Iterator[None]:
    """Ends the process, with a traceback, if the block takes longer.

    For the few MPI calls that block, some of which hold Python's lock meanwhile. It
    takes the place of another `faulthandler.dump_traceback_later`.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


# ---- The back end ----


class Mpi:
    """A communicator of MPI, and the collective that is under way on it."""

    name = "mpi"

    def __init__(self, mpi: Any, comm: Any, alarm: Alarm):
        self.mpi, self.comm = mpi, comm
        self.rank, self.world_size = comm.Get_rank(), comm.Get_size()
        self._alarm = alarm
        self._headers = bytearray(self.world_size * HEADER_BYTES)
        self._script: Script | None = None  # of the collective that is under way
        self._request: Any = None  # what it waits for; None: it was torn
        self._all_here = False  # the headers of this collective were equal
        self._over = False  # they were not: no MPI call follows
        self.closed = False
        self._scratch = np.empty(0, np.uint8)
        self._array = self._scratch  # that MPI may write to, torn or not
        # By the bytes of an element: as integers, which MPI moves and never looks at.
        self._types = {1: mpi.INT8_T, 2: mpi.INT16_T, 4: mpi.INT32_T, 8: mpi.INT64_T}
        unsettled.append(self)

    def perform(self, call: Header, x: Array, deadline: Deadline) -> None:
        """Perform this collective on the 1-D array x. Raises: PeerError."""
        self._array, self._all_here = x, False
        self._script = self._collective(call, x)
        try:
            while self._advance():
                self._wait(call, deadline)
                deadline.restart()
        except UsageError:
            raise
        except BaseException as error:
            failures.append(f"{type(error).__name__} in {call}")
            raise

    def lend(self, row: Any, reduce: str) -> Any:
        return staged(row)

    def zeros(self, count: int, dtype: Any, all_gather_rows: Any) -> Array:
        return np.zeros(count, dtype)

    def stats(self) -> dict[str, int]:
        """Zeros: MPI does not say what it sends."""
        return traffic()

    def close(self) -> None:
        """Say farewell without waiting; not while a collective is under way, and not
        in a forked child, which is no process of MPI's."""
        if self.closed or self not in unsettled:
            return
        self.closed = True
        if self._alarm.error:
            failures.append(str(self._alarm.error))
        if self._script is None and not self.mpi.Is_finalized():
            self.settle()

    # ---- Scripts, and how they go on ----

    def _collective(self, call: Header, x: Array) -> Script:
        yield from self._compare(call)
        self._all_here = True
        if len(x) >= 2**31 and self.mpi.Get_version() < (4, 0):
            raise UsageError(
                f"{call}: this MPI library counts to 2**31 only. Take one of MPI 4 or "
                "later (pip install mpich), or parts of the array."
            )
        yield from COLLECTIVES[call.op](self, x, call)

    def _compare(self, call: Header) -> Script:
        """Raises: PeerMismatch, or PeerLost if a rank has said farewell instead."""
        mine = call.pack()
        yield self.comm.Iallgather(
            [mine, self.mpi.BYTE], [self._headers, self.mpi.BYTE]
        )
        if self._headers == mine * self.world_size:
            return
        self._over = True
        for i in range(1, self.world_size):
            k = (self.rank - i) % self.world_size  # the left neighbour first
            theirs = bytes(self._headers[k * HEADER_BYTES : (k + 1) * HEADER_BYTES])
            if is_farewell(theirs):
                raise PeerLost(
                    f"rank {self.rank} waits in vain for rank {k} (over MPI) during "
                    f"{call}: it has left the group",
                    k,
                )
            if theirs != mine:
                raise mismatch(self.rank, k, call, theirs)

    def _advance(self) -> bool:
        """On to the script's next request; False once there is none."""
        assert self._script, "one is under way"
        self._request = None
        try:
            self._request = next(self._script)
            return True
        except (StopIteration, PeerError, UsageError) as end:
            self._script, self._array = None, self._scratch
            if not isinstance(end, StopIteration):
                raise
            return False

    def _wait(self, call: Header, deadline: Deadline) -> None:
        request, r, n = self._request, self.rank, self.world_size
        for _ in range(SPINS):
            if request.Test():
                return
        culprit = 1 - r if n == 2 else None  # of more, MPI does not say who is late
        for _ in naps(MOVE_SECONDS if self._all_here else YIELD_SECONDS):
            if request.Test():
                return
            if self._alarm.error:
                if completes_soon(request):
                    return
                raise self._alarm.error
            if not deadline.left():
                raise PeerTimeout(
                    f"rank {r} waits in vain for {'others' if n > 2 else 'the other'} "
                    f"(over MPI) during {call}: nothing moved for "
                    f"{deadline.seconds:g} s.",
                    culprit,
                )

    def settle(self) -> None:
        """Go on with what is under way and say farewell, without waiting; once all of
        it is over, this is no longer `unsettled`."""
        while not self._over:
            with suppress(PeerError, UsageError):  # then it has ended as well
                if self._script is None:
                    farewell = Header(Kind.GOODBYE, root=self.rank)
                    self._script = self._compare(farewell)
                    self._advance()
                if self._request is None or not self._request.Test():
                    return
                self._advance()
        if self in unsettled:
            unsettled.remove(self)
            self.comm.Free()  # a local matter in practice, as the standard expects

    # ---- Memory ----

    def given(self, x: Array, length: int) -> Array:
        """A row of memory for what each rank gives, (n, length), of x's dtype."""
        nbytes = self.world_size * length * x.itemsize
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        table: Array = self._scratch[:nbytes].view(x.dtype)
        return table.reshape(self.world_size, length)

    def buffer(self, x: Array) -> list[Any]:
        """The array as MPI wants it described."""
        return [x.reshape(-1).view(f"i{x.itemsize}"), self._types[x.itemsize]]

    def spread(self, x: Array, parts: Sequence[slice], mine: bool = True) -> list[Any]:
        """The array as MPI wants it described, where part k is rank k's. MPI is slow to
        send to itself: `mine` may be left out."""
        words, its_type = self.buffer(x)
        counts = [part.stop - part.start for part in parts]
        if not mine:
            counts[self.rank] = 0
        return [words, counts, [part.start for part in parts], its_type]


def is_farewell(header: bytes) -> bool:
    with suppress(FrameError):
        return Header.unpack(header).kind == Kind.GOODBYE
    return False


def pieces(x: Array, n: int) -> Iterator[list[slice]]:
    """Where part p of each of the n chunks is, for p = 0, 1, ...; some may be empty."""
    step = PART_BYTES // x.itemsize
    chunks = [chunk(len(x), n, k) for k in range(n)]
    for first in range(0, chunks[0].stop, step):
        yield [
            slice(min(c.start + first, c.stop), min(c.start + first + step, c.stop))
            for c in chunks
        ]


# ---- Collectives: their names are those of ring.py and rooted.py ----


def all_reduce(m: Mpi, x: Array, call: Header) -> Script:
    """After it, the 1-D array x holds the reduction over all ranks, on all ranks."""
    if x.nbytes <= SMALL_BYTES:
        given = m.given(x, len(x))
        yield m.comm.Iallgather(m.buffer(x), m.buffer(given))
        add_in_order(list(given), x, call)
        return
    for parts in pieces(x, m.world_size):
        yield from add(m, x, parts, call, m.rank, x[parts[m.rank]])
        yield m.comm.Iallgatherv(m.mpi.IN_PLACE, m.spread(x, parts))


def reduce_scatter(m: Mpi, x: Array, call: Header) -> Script:
    """After it, chunk r of rank r's x is complete; the others are as they were."""
    for parts in pieces(x, m.world_size):
        yield from add(m, x, parts, call, m.rank, x[parts[m.rank]])


def add(
    m: Mpi, x: Array, parts: list[slice], call: Header, last: int, out: Array
) -> Script:
    """`out` becomes the reduction of this rank's part of all ranks' x, added in the
    order last+1, last+2, ..., last."""
    given = yield from exchange_parts(m, x, parts)
    n = m.world_size
    combine([given[(last + i) % n] for i in range(1, n + 1)], [out], call)


def exchange_parts(m: Mpi, x: Array, parts: list[slice]) -> Any:
    """Part k of x goes to rank k; returns what every rank gave to this one. What it
    gave itself is part of x still."""
    mine = x[parts[m.rank]]
    given = m.given(x, len(mine))
    rows = [slice(k * len(mine), (k + 1) * len(mine)) for k in range(m.world_size)]
    sent, received = m.spread(x, parts, mine=False), m.spread(given, rows, mine=False)
    yield m.comm.Ialltoallv(sent, received)
    return [mine if k == m.rank else row for k, row in enumerate(given)]


def reduce(m: Mpi, x: Array, call: Header) -> Script:
    """After it, the root's x holds the reduction over all; other ranks' x is as it
    was."""
    for parts in pieces(x, m.world_size):
        mine = x[parts[m.rank]]
        if m.rank == call.root:
            yield from add(m, x, parts, call, call.root, mine)
            yield m.comm.Igatherv(m.mpi.IN_PLACE, m.spread(x, parts), call.root)
        else:
            total = np.empty_like(mine)
            yield from add(m, x, parts, call, call.root, total)
            yield m.comm.Igatherv(m.buffer(total), None, call.root)


def all_gather(m: Mpi, x: Array, call: Header) -> Script:
    """Before it, chunk r of rank r's x is right; after it, all of x is, on all
    ranks."""
    for parts in pieces(x, m.world_size):
        yield m.comm.Iallgatherv(m.mpi.IN_PLACE, m.spread(x, parts))


def broadcast(m: Mpi, x: Array, call: Header) -> Script:
    """After it, the 1-D array x is the root's, on all ranks."""
    for (part,) in pieces(x, 1):
        yield m.comm.Ibcast(m.buffer(x[part]), call.root)


def gather(m: Mpi, x: Array, call: Header) -> Script:
    """Before it, chunk r of rank r's x is right; after it, all of the root's x is."""
    for parts in pieces(x, m.world_size):
        if m.rank == call.root:
            yield m.comm.Igatherv(m.mpi.IN_PLACE, m.spread(x, parts), call.root)
        else:
            yield m.comm.Igatherv(m.buffer(x[parts[m.rank]]), None, call.root)


def scatter(m: Mpi, x: Array, call: Header) -> Script:
    """Before it, the root's x is right; after it, chunk r of every rank r's x is."""
    for parts in pieces(x, m.world_size):
        if m.rank == call.root:
            yield m.comm.Iscatterv(m.spread(x, parts), m.mpi.IN_PLACE, call.root)
        else:
            yield m.comm.Iscatterv(None, m.buffer(x[parts[m.rank]]), call.root)


def all_to_all(m: Mpi, x: Array, call: Header) -> Script:
    """Chunk k of rank r's x, before it, is chunk r of rank k's x after it."""
    for parts in pieces(x, m.world_size):
        given = yield from exchange_parts(m, x, parts)
        for part, came in zip(parts, given, strict=True):
            x[part] = came


def barrier(m: Mpi, x: Array, call: Header) -> Script:
    """Returns when all ranks have entered: the headers have said so."""
    return iter(())


COLLECTIVES = {
    collective.__name__: collective
    for collective in (
        *(all_reduce, reduce_scatter, all_gather, broadcast, barrier),
        *(reduce, gather, scatter, all_to_all),
    )
}


# ---- Meeting ----


def meet(links: ring.Links, alarm: Alarm, deadline: Deadline) -> Mpi:
    """The back end over a communicator of exactly these ranks, in this order.

    Raises: UsageError on all ranks, if one has no mpi4py, or they were not started by
    one mpiexec; PeerError.
    """
    here = importlib.util.find_spec("mpi4py") is not None
    have = ring.rows_of_all(links, [here], deadline)[:, 0]
    if not have.all():
        raise UsageError(f"transport='mpi': rank {np.argmin(have)} {NO_MPI4PY}")
    mpi = start(deadline.left())
    world = mpi.COMM_WORLD
    # Groups that are made at the same time are told apart by rank 0's tag, of which MPI
    # promises 15 bits.
    row = world.Get_rank(), world.Get_size(), secrets.randbits(15)
    table = ring.rows_of_all(links, row, deadline)
    numbers, sizes, tags = table.T.tolist()
    if len(set(numbers)) < len(numbers) or len(set(sizes)) > 1:
        raise UsageError(
            f"transport='mpi': one mpiexec has to start all {len(numbers)} ranks, but "
            f"MPI numbers them {numbers}, in worlds of {sizes} processes. Run mpiexec "
            f"-n {len(numbers)} python train.py, with the mpiexec of the MPI that "
            "mpi4py uses; `minddp run` and torchrun will not do."
        )
    settle_what_is_closed()
    of_world = world.Get_group()
    group = of_world.Incl(numbers)
    with watchdog(deadline.left() + GRACE_SECONDS):
        comm = world.Create_group(group, tags[0])
    group.Free()
    of_world.Free()
    return Mpi(mpi, comm, alarm)


def settle_what_is_closed() -> None:
    """Free the communicators of groups that all ranks have closed: there may be no more
    than some thousands."""
    for m in list(unsettled):
        if m.closed:
            m.settle()


NO_MPI4PY = (
    "has no mpi4py. Install it, with an MPI library if there is none: "
    "pip install mpi4py mpich"
)


def start(seconds: float) -> Any:
    """mpi4py's module MPI, once MPI has started on all ranks of this mpiexec.

    Raises: UsageError if it is not there, or was started without threads.
    """
    started = "mpi4py.MPI" in sys.modules  # then another's watchdog may go on
    try:
        with nullcontext() if started else watchdog(max(seconds, 1.0)):
            from mpi4py import MPI
    except (ImportError, RuntimeError) as exc:
        raise UsageError(f"transport='mpi': this process {NO_MPI4PY} ({exc})") from exc
    if MPI.Is_finalized() or MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UsageError(
            "transport='mpi' needs MPI running, with MPI_THREAD_MULTIPLE, as mpi4py "
            "starts it unless mpi4py.rc says otherwise"
        )
    return MPI


# ---- Founding a job without settings ----


def found_job(rank: int | None, world_size: int | None, seconds: float) -> Job:
    """This rank's Job, where rank 0's address, the token and the job's name come over
    MPI; all ranks of this mpiexec call it.

    Raises: UsageError, PeerTimeout.
    """
    r, n = seat(rank=rank, world_size=world_size)
    if n == 1:
        return from_environment(rank=rank, world_size=world_size)
    deadline = Deadline(seconds)
    mpi = start(seconds)
    me = {"rank": r, "node": mpi.Get_processor_name()}
    table = json_of_all(mpi, me, deadline)
    if sorted(row["rank"] for row in table) != list(range(n)):
        raise UsageError(
            f"transport='mpi': rank {r} of {n} is one of {len(table)} processes that "
            "MPI knows. Start all ranks, and nothing else, by one mpiexec: mpiexec -n "
            f"{n} python train.py; or set MASTER_ADDR, MASTER_PORT and MINDDP_TOKEN."
        )
    door: dict[str, Any] = {}
    fd = None
    if r == 0:
        try:
            door, fd = open_door({row["node"] for row in table}, me["node"])
        except UsageError as error:
            # JSON takes up to 6 bytes for a character.
            door = {"error": str(error)[: ROW_BYTES // 8]}
    (door,) = filter(None, json_of_all(mpi, door, deadline))
    if "error" in door:
        raise UsageError(door["error"])
    job = from_environment(
        rank=r, world_size=n, master_addr=door["host"], master_port=door["port"]
    )
    token = os.fsencode(door["token"])
    return replace(job, token=token, job_id=door["job_id"], listen_fd=fd)


def open_door(nodes: set[str], mine: str) -> tuple[dict[str, Any], int]:
    """What ranks on these nodes need in order to join, and the descriptor of rank 0's
    port, on the node `mine`. Raises: UsageError."""
    host, interface = mine, os.environ.get("MINDDP_IFNAME")
    if len(nodes) == 1:
        host = "127.0.0.1"
    elif interface:
        host = interface_address(interface)
    listener = listen_in_range(host, os.environ.get("MINDDP_PORT_RANGE"))
    # Some systems' /etc/hosts has the own name there.
    if len(nodes) > 1 and listener.host.startswith("127."):
        listener.close()
        raise UsageError(
            f"rank 0's machine takes its own name {mine} for {listener.host}, where "
            "other machines cannot reach it. Set MINDDP_IFNAME to its network "
            "interface, or MASTER_ADDR and MINDDP_TOKEN, the same on all ranks."
        )
    door = {
        "host": listener.host,
        "port": listener.port,
        "token": os.environ.get("MINDDP_TOKEN") or secrets.token_hex(32),
        "job_id": os.environ.get("MINDDP_JOB_ID") or secrets.token_hex(8),
    }
    fd = os.dup(listener.fileno())
    listener.close()
    return door, fd


def json_of_all(mpi: Any, content: dict[str, Any], deadline: Deadline) -> list[Any]:
    """What each process of this mpiexec says, by MPI's numbers; a short JSON text.

    Raises: PeerTimeout.
    """
    n = mpi.COMM_WORLD.Get_size()
    text = json.dumps(content).encode().ljust(ROW_BYTES)
    table = bytearray(n * ROW_BYTES)
    request = mpi.COMM_WORLD.Iallgather([text, mpi.BYTE], [table, mpi.BYTE])
    requests.append(request)
    for _ in naps(YIELD_SECONDS):
        if request.Test():
            break
        if not deadline.left():
            failures.append("PeerTimeout in init_process_group")
            raise PeerTimeout(
                f"{deadline.seconds:g} s were not enough for all {n} processes of this "
                "mpiexec to call init_process_group. Does one of them do something "
                "else?"
            )
    return [json.loads(table[k * ROW_BYTES : (k + 1) * ROW_BYTES]) for k in range(n)]


# ---- The end of the program ----


# Registered when group.py imports this, so it runs after groups have been closed; and
# before MPI_Finalize, which mpi4py calls when Python itself has ended.
@atexit.register
def settle_at_exit() -> None:
    """Wait until all ranks have come to their end; without end only if all is well."""
    if not (unsettled or requests):
        return
    from mpi4py import MPI

    if MPI.Is_finalized():
        return
    hurry = failures or hasattr(sys, "last_value")
    deadline = Deadline(GRACE_SECONDS)
    over = False
    try:
        for _ in naps(YIELD_SECONDS):
            over = all_is_over()
            if over or (hurry and not deadline.left()):
                break
    finally:  # also at Ctrl-C
        if not over:
            print(
                f"minddp: not all ranks have ended {GRACE_SECONDS:g} s after "
                f"{failures[0] if failures else 'this one'}: MPI_Abort ends them.",
                file=sys.stderr,
            )
            sys.stdout.flush()
            sys.stderr.flush()
            time.sleep(FLUSH_SECONDS)
            MPI.COMM_WORLD.Abort(1)


def all_is_over() -> bool:
    """Whether MPI can end; without waiting."""
    for m in list(unsettled):
        m.settle()
    return not unsettled and all(request.Test() for request in requests)


os.register_at_fork(after_in_child=unsettled.clear)
os.register_at_fork(after_in_child=requests.clear)
