"""ProcessGroup: collectives in one order, on one rank of a job.

    pg = minddp.init_process_group()      # who am I, where are the others?
    pg.all_reduce(gradient, op="avg")     # in place; returns when the result is there
    pg.close()                            # or: with minddp.init_process_group() as pg:

What happens to an array on its way:

    caller's array --native_flat--> 1-D view or copy --back end--> caller's array
                                             |
               Header: #17, all_reduce, sum, float32, count     (the call's fingerprint)

Rule 1.  All ranks make the same calls in the same order. A call is numbered, and its
         number travels in the fingerprint, so a rank that skips or repeats one is found
         out.
Rule 2.  A UsageError is raised before any array is sent or written. A PeerError ends
         the group on all ranks: later calls raise the same cause at once.
Rule 3.  The result lands in the caller's array, whatever its strides. Reducing a
         contiguous copy and forgetting to copy back is a bug that no error message
         would show.

In PyTorch: `c10d::ProcessGroup`; `torch.distributed.all_reduce` and its relatives.

Left out: messages over NCCL. Arrays on a GPU are taken everywhere; but all back ends
other than NCCL, and messages, copy them to the host and back (payload.py), which waits
for the GPU.
"""

import atexit
import json
import os
import sys
import threading
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

from minddp import backends, ring
from minddp.backends import mpi
from minddp.backends.tcp import traffic
from minddp.environment import Job, chosen_transport, from_environment
from minddp.errors import (
    PeerError,
    PeerLost,
    PeerMismatch,
    UsageError,
    same_error,
)
from minddp.frame import Header, Kind
from minddp.handshake import MAIL
from minddp.mailbox import Mailbox
from minddp.net import Deadline, RingLinks
from minddp.payload import (
    bring_home,
    check_array,
    check_reduction,
    native_flat,
    on_gpu,
    positive_seconds,
    staged,
    whole,
    wire_name,
    zeros_beside,
)
from minddp.rendezvous import Rendezvous
from minddp.work import Work, WorkQueue

Array = np.ndarray[Any, Any]

open_groups: list["ProcessGroup"] = []


def init_process_group(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    timeout: float = 60.0,
    rendezvous_timeout: float = 300.0,
    transport: str | None = None,
) -> "ProcessGroup":
    """The group of all ranks of this job, once all of them have come.

    What is not given is taken from the environment that the launcher made (`minddp
    run`, torchrun, mpiexec, srun); with neither, the world has one rank.

    timeout: seconds that a collective may go without a byte moving; with NCCL, that it
    may take.
    rendezvous_timeout: seconds to wait for all ranks to come.
    transport: what carries collectives, the same on all ranks: "tcp" (the default),
    "shm", memory that the ranks of a host share (shm.py), with TCP between hosts if
    there are several (hierarchy.py), "auto", which is "shm" if any ranks share a host
    and else "tcp", "mpi" (backends/mpi.py), or "nccl", for arrays on GPUs
    (backends/nccl.py). MINDDP_TRANSPORT sets it too.

    Raises: UsageError (a setting is wrong, the port is taken, there is no memory to
    share), PeerTimeout (names the ranks that did not come).
    """
    transport = chosen_transport(given=transport)
    if transport == "mpi" and not (master_addr or os.environ.get("MASTER_ADDR")):
        job = mpi.found_job(rank, world_size, rendezvous_timeout)
    else:
        job = from_environment(
            rank=rank,
            world_size=world_size,
            master_addr=master_addr,
            master_port=master_port,
        )
    return ProcessGroup(job, timeout, rendezvous_timeout, transport)


class ProcessGroup:
    """This rank's membership in the group; one collective at a time (work.py)."""

    def __init__(
        self,
        job: Job,
        timeout: float = 60.0,
        rendezvous_timeout: float = 300.0,
        transport: str = "tcp",
    ):
        timeout = positive_seconds("timeout", timeout)
        deadline = Deadline(positive_seconds("rendezvous_timeout", rendezvous_timeout))
        self._job, self._wish = job, transport
        self.rank, self.world_size = job.rank, job.world_size
        self.local_rank = job.local_rank
        self.ranks = list(range(job.world_size))  # in the world; `split` has others
        self._legend = ""  # says so in errors
        self.timeout = timeout
        self._sequence = 0
        self._failure: PeerError | None = None
        self._closed = ""  # why, once it is
        # Reentrant for the sake of signal handlers, which may call `close`.
        self._lock = threading.RLock()
        self._performer: int | None = None  # the thread that is in a collective
        self._queue = WorkQueue()
        self._mailbox: Mailbox | None = None  # from the first message on
        self._links: RingLinks | None = None
        self._backend: backends.Backend | None = None
        if self.world_size > 1:
            self._meet(job, deadline)
        open_groups.append(self)

    def _meet(self, job: Job, deadline: Deadline) -> None:
        rendezvous = Rendezvous(job, deadline, self.timeout)
        self._control, self._alarm = rendezvous.control, rendezvous.alarm
        try:
            self._links = rendezvous.meet()
            self._backend = self._choose_backend(self._links, rendezvous)
        except BaseException:
            rendezvous.abandon()
            if self._links:
                self._links.close()
            raise
        self._rendezvous = rendezvous
        self._host = self._links.left.local_host  # where others of this job reach us
        assert rendezvous.control.table, "it was waited for"
        self._hosts = [host for host, _ in rendezvous.control.table]

    def _choose_backend(
        self, links: RingLinks, rendezvous: Rendezvous
    ) -> backends.Backend:
        deadline = Deadline(self.timeout)
        try:
            backend = backends.meet(self._wish, links, rendezvous, deadline)
        except PeerError as error:
            raise self._control.accuse(error) from error.__cause__
        except UsageError:  # all ranks raise it
            raise
        except BaseException as error:
            text = f"rank {self.rank} left the rendezvous: {error!r}"
            self._control.accuse(PeerLost(text, self.rank))
            raise
        links.count_from_here()
        return backend

    @property
    def transport(self) -> str:
        """What carries collectives: the name of a back end (backends/__init__.py), as
        "tcp", "shm" or "shm+tcp"; "tcp" in a world of one."""
        return self._backend.name if self._backend else "tcp"

    @property
    def ring_links(self) -> RingLinks | None:
        """The links to both neighbours, for measuring them; None in a world of one."""
        return self._links

    @property
    def netlab(self) -> str:
        """The emulated network (netlab.py), as MINDDP_NETLAB has it; "" for none."""
        return str(self._rendezvous.lab or "") if self._links else ""

    @property
    def closed(self) -> bool:
        """Whether it has been closed or aborted."""
        return bool(self._closed)

    # ---- Collectives ----

    def all_reduce(
        self,
        array: Array,
        op: str = "sum",
        async_op: bool = False,
        *,
        bucket: int = -1,
    ) -> Work:
        """`array` becomes the reduction of all ranks' arrays, the same bits on all.

        array: any shape and strides, writable. bucket: shown in errors.
        op: sum, avg, min, max or prod. PyTorch's name for it; inside it is `reduce`, as
        `op` is the collective there.
        async_op: return at once; `array` must then be left alone until `wait` returns.

        Raises: UsageError; PeerError, after which the content of `array` is undefined.
        """
        check_reduction("all_reduce", array, op)
        return self._collective(
            "all_reduce", array, reduce=op, bucket=bucket, async_op=async_op
        )

    def reduce_scatter(self, array: Array, op: str = "sum") -> Array:
        """Chunk `rank` of the reduction, as a 1-D array.

        The chunks are n near-equal parts of the flattened array (`ring.chunk`). In
        `array` itself this rank's chunk is then complete too; the others hold partial
        sums.

        Raises: as all_reduce.
        """
        check_reduction("reduce_scatter", array, op)
        self._collective("reduce_scatter", array, reduce=op)
        return native_flat(array)[ring.chunk(array.size, self.world_size, self.rank)]

    def all_gather(self, array: Array, async_op: bool = False) -> Work:
        """Every rank gives its chunk of the flattened `array` and gets all the others.

        Undoes `reduce_scatter`. To gather whole arrays, see `all_gather_rows`.

        Raises: as all_reduce.
        """
        return self._collective("all_gather", array, async_op=async_op)

    def all_gather_rows(self, row: Any) -> Array:
        """A table with what every rank has given, (world_size, *shape of row).

        row: an array or numbers, of one shape and dtype on all ranks.

        Raises: as all_reduce.
        """
        row = row if on_gpu(row) else np.asarray(row)
        table = zeros_beside(row, (self.world_size, *row.shape), row.dtype)
        table[self.rank] = row
        self.all_gather(table)
        return table

    def broadcast(self, array: Array, root: int = 0, async_op: bool = False) -> Work:
        """`array` becomes the root's, bit for bit. Raises: as all_reduce."""
        root = whole("broadcast from root", root, 0, self.world_size - 1)
        return self._collective("broadcast", array, root=root, async_op=async_op)

    def reduce(
        self, array: Array, root: int = 0, op: str = "sum", async_op: bool = False
    ) -> Work:
        """The root's `array` becomes the reduction of all; the others' stays as it was.

        Raises: as all_reduce.
        """
        check_reduction("reduce", array, op)
        root = whole("reduce to root", root, 0, self.world_size - 1)
        return self._collective(
            "reduce", array, reduce=op, root=root, async_op=async_op
        )

    def gather(self, array: Array, root: int = 0, async_op: bool = False) -> Work:
        """The root gets every rank's chunk of the flattened `array` into its own.

        Every rank gives an array of the full size; that of other ranks than the root is
        not written to. Raises: as all_reduce.
        """
        root = whole("gather to root", root, 0, self.world_size - 1)
        return self._collective("gather", array, root=root, async_op=async_op)

    def scatter(self, array: Array, root: int = 0, async_op: bool = False) -> Work:
        """Every rank gets its chunk of the root's flattened `array` into its own.

        What is written is that chunk only. Undoes `gather`. Raises: as all_reduce.
        """
        root = whole("scatter from root", root, 0, self.world_size - 1)
        return self._collective("scatter", array, root=root, async_op=async_op)

    def all_to_all(self, array: Array, async_op: bool = False) -> Work:
        """Chunk k of rank r and chunk r of rank k change places, for all k and r.

        array: its size is a multiple of the world size; with n rows, row k is what this
        rank has for rank k, and then what it got from rank k. Raises: as all_reduce.
        """
        check_array("all_to_all", array)
        if array.size % self.world_size:
            raise UsageError(
                f"all_to_all of {array.size} elements: the size must be a multiple of "
                f"the {self.world_size} ranks, so that all chunks are alike"
            )
        return self._collective("all_to_all", array, async_op=async_op)

    def zeros(self, count: int, dtype: Any = np.float32, like: Any = None) -> Array:
        """A 1-D array of zeros that is made for `all_reduce`; all ranks call it alike.

        like: an array; if that is on a GPU, this will be on the same.

        On TCP a plain array. With shared memory all ranks of a host see it, so it is
        reduced where it lies and never copied: DDP's buckets are made so.

        Raises: UsageError; PeerError.
        """
        count = whole("zeros: count", count, 0, 2**62)
        if self._backend is None or on_gpu(like):
            return zeros_beside(like, count, dtype)
        return self._backend.zeros(count, dtype, self.all_gather_rows)

    def broadcast_object(self, content: Any = None, root: int = 0) -> Any:
        """What the root has given, on all ranks: anything that JSON can say.

        Tuples become lists, and keys strings. Raises: UsageError on the root, and then
        PeerLost on the others; PeerError.
        """
        root = whole("broadcast_object from root", root, 0, self.world_size - 1)
        text = b""
        if self.rank == root:
            try:
                text = json.dumps(content).encode()
            except (TypeError, ValueError, RecursionError) as exc:
                raise UsageError(
                    f"broadcast_object: JSON cannot say this: {exc}"
                ) from exc
        length = np.array(len(text))
        self.broadcast(length, root)
        payload = np.frombuffer(bytearray(text or bytes(int(length))), np.uint8)
        self.broadcast(payload, root)
        return json.loads(payload.tobytes())

    def barrier(self, async_op: bool = False) -> Work:
        """Returns when all ranks have entered. Raises: PeerError."""
        one = np.ones(1, np.uint8)
        return self._collective("barrier", one, reduce="sum", async_op=async_op)

    # ---- Messages ----

    def send(self, array: Array, dst: int, tag: int = 0) -> None:
        """Send to rank dst; returns when the bytes have left.

        The other rank calls `recv` with an array of the same count and dtype, and the
        same tag. Two ranks that first send and then receive wait for each other: let
        one receive first, or use `isend`.

        Raises: UsageError; PeerError, PeerTimeout if nobody receives.
        """
        self.isend(array, dst, tag).wait()

    def recv(self, array: Array, src: int, tag: int = 0) -> None:
        """Fill `array` with the next message of rank src. Raises: as send."""
        self.irecv(array, src, tag).wait()

    def isend(self, array: Array, dst: int, tag: int = 0) -> Work:
        """As send, without waiting; leave `array` alone until `wait` returns."""
        return self._message(array, dst, tag, sends=True)

    def irecv(self, array: Array, src: int, tag: int = 0) -> Work:
        """As recv, without waiting; `array` is filled when `wait` returns."""
        return self._message(array, src, tag, sends=False)

    def _message(self, array: Array, peer: int, tag: int, sends: bool) -> Work:
        verb = "send" if sends else "recv"
        check_array(verb, array, writes=not sends)
        peer = whole(f"{verb}: peer", peer, 0, self.world_size - 1)
        tag = whole(f"{verb}: tag", tag, 0, 2**15 - 1)
        if peer == self.rank:
            raise UsageError(f"{verb}: rank {peer} is this rank itself; copy the array")
        flat = native_flat(array)
        if on_gpu(flat):
            flat = staged(flat)
        with self._lock:
            self._check_alive()
            self._mailbox = self._mailbox or self._open_mailbox()
            line = self._mailbox.line(peer, sends)
            line.count += 1
            source, dtype = self.rank if sends else peer, wire_name(flat.dtype)
            what = "", dtype, source, tag, flat.size, flat.nbytes
            work = Work(
                Header(Kind.MAIL, line.count, "send", *what),
                partial(bring_home, flat, array) if not sends else lambda: None,
            )
            self._mailbox.post(line, work, flat)
        return work

    def _open_mailbox(self) -> Mailbox:
        listener = self._rendezvous.open_port(self._host)
        mailbox = Mailbox(
            replace(self._rendezvous.me, role=MAIL),
            self._rendezvous.job.token,
            self.timeout,
            self._alarm,
            listener=listener,
            invitations=self._control.mailboxes,
            departed=self._control.departed,
            agree=self._agree,
            wrap=self._rendezvous.through_the_lab,
        )
        self._control.mail_came = mailbox.wake
        self._control.invite(listener.host, listener.port)
        return mailbox

    # ---- Sub-groups ----

    def split(self, color: int | None, key: int = 0) -> "ProcessGroup | None":
        """A group of all ranks that give the same color, ordered by (key, rank).

        Every rank of this group must call it; one that gives None gets None. The new
        group has links, numbers and failures of its own.

        Raises: UsageError; PeerError, of either group.
        """
        if color is not None:
            color = whole("split: color", color, 0, 2**31 - 1)
        key = whole("split: key", key, -(2**31), 2**31 - 1)
        n, r = self.world_size, self.rank
        table = self.all_gather_rows([-1 if color is None else color, key])
        if n == 1 and color is not None:
            return ProcessGroup(self._job, self.timeout, self.timeout)
        members = [] if color is None else np.flatnonzero(table[:, 0] == color).tolist()
        members.sort(key=lambda k: (table[k, 1], k))
        leads = members[:1] == [r] and len(members) > 1
        listener = self._rendezvous.open_port(self._host) if leads else None
        ports = self.all_gather_rows(listener.port if listener else 0)
        if not members:
            return None
        job = replace(
            self._job,
            rank=members.index(r),
            world_size=len(members),
            master_addr=self._hosts[members[0]],
            master_port=int(ports[members[0]]),
            job_id=f"{self._job.job_id}/{self._sequence}/{color}",
            listen_fd=os.dup(listener.fileno()) if listener else None,
            world_ranks=tuple(self.ranks[k] for k in members),
        )
        if listener:
            listener.close()
        # No two ranks of a sub-group need share a host, so it must not insist.
        wish = "auto" if self._wish == "shm" else self._wish
        group = ProcessGroup(job, self.timeout, self.timeout, wish)
        group.ranks = [self.ranks[k] for k in members]
        group._legend = f" (Ranks 0, 1, ... of this sub-group are {group.ranks}.)"
        return group

    # ---- What it has cost ----

    def stats(self) -> dict[str, int]:
        """What this rank has sent and received since the group was made.

        collectives; messages (ring steps in which it sent); bytes_sent and
        bytes_received on ring links, of which header_bytes each way are fingerprints;
        mail_bytes_sent and _received, by send and recv with their headers;
        control_bytes_sent, the heartbeats and other small talk with rank 0. TCP's own
        headers are not counted.
        """
        mail = self._mailbox
        return {
            "collectives": self._sequence,
            **(self._backend.stats() if self._backend else traffic()),
            "mail_bytes_sent": mail.bytes_moved(sends=True) if mail else 0,
            "mail_bytes_received": mail.bytes_moved(sends=False) if mail else 0,
            "control_bytes_sent": self._control.bytes_sent if self._links else 0,
        }

    def _collective(
        self,
        op: str,
        array: Array,
        reduce: str = "",
        root: int = 0,
        bucket: int = -1,
        async_op: bool = False,
    ) -> Work:
        """Number the call, and perform it here and now or in its turn.

        Here, if it may be waited for and nothing else is under way: handing it to the
        other thread and back would double the latency of a small array.
        """
        check_array(op, array)
        row = native_flat(array)
        bucket = whole(f"{op} for bucket", bucket, -1, 2**15 - 1)
        with self._lock:
            self._check_alive()
            flat = row
            if self._backend and on_gpu(row):
                flat = self._backend.lend(row, reduce)
            self._sequence += 1
            dtype = wire_name(row.dtype)
            what = op, reduce, dtype, root, bucket, row.size, row.nbytes
            call = Header(Kind.DATA, self._sequence, *what)
            work = Work(call, partial(self._perform, call, flat, array))
            if async_op or not self._queue.idle:
                self._queue.submit(work)
            else:
                work.run()
        if not async_op:
            work.wait()
        return work

    def _perform(self, call: Header, flat: Any, array: Array) -> None:
        """Run a collective and bring its result home into the caller's array."""
        if self._backend:
            self._performer = threading.get_ident()
            try:
                self._enter(call)
                self._backend.perform(call, flat, Deadline(self.timeout))
            except UsageError:  # all ranks raise it, and nothing has been changed
                raise
            except BaseException as error:
                self._fail(error, f"in {call}")
            finally:
                self._performer = None
        bring_home(flat, array)

    # ---- Failing and leaving ----

    def _check_alive(self) -> None:
        if self._closed:
            raise UsageError(f"this process group of rank {self.rank} {self._closed}")
        if self._failure:
            raise same_error(self._failure)
        if self._performer == threading.get_ident():
            raise UsageError(
                f"rank {self.rank} is in a collective already. A signal handler can "
                "close the group, but not call another one."
            )

    def _enter(self, call: Header) -> None:
        """Tell the control plane where we are, and learn from it who has left."""
        if self._failure:
            raise self._failure
        control = self._control
        control.entered = call.sequence
        if self._alarm.error:
            raise self._alarm.error
        for rank, last in list(control.departed.items()):
            if last < call.sequence:
                raise PeerLost(control.why_gone(rank), rank)

    def _fail(self, error: BaseException, where: str) -> NoReturn:
        """End the group on all ranks and raise what all of them agree on.

        An error of this rank's own (Ctrl-C, no memory) leaves half a collective on the
        wire. It is raised as it is, and the others are told that it was this rank.
        """
        first = not self._failure
        agreed = self._agree(error, where)
        if not first or not isinstance(agreed, PeerError):
            raise agreed from None
        assert self._links, "a world of one has nobody to fail it"
        self._links.close()
        if not isinstance(error, PeerError):
            raise error
        raise same_error(agreed) from error.__cause__

    def _agree(self, error: BaseException, where: str) -> PeerError | UsageError:
        """What this rank is to raise: the verdict on `error`, or on an earlier one."""
        if self._closed:  # by a signal handler, whose word this is
            return UsageError(
                f"this process group of rank {self.rank} {self._closed} while it was "
                f"{where}"
            )
        if self._failure is None:
            if not isinstance(error, PeerError):
                text = f"rank {self.rank} failed {where}: {error!r}"
                error = PeerLost(text, self.rank)
            verdict = self._control.accuse(error)
            text = f"{verdict}{self._legend}"
            self._failure = type(verdict)(text, verdict.culprit)
        return self._failure

    def abort(self, error: BaseException) -> None:
        """Leave because of `error`: the other ranks raise PeerLost, naming this
        rank."""
        if self._links and not self._failure and not self._closed:
            said = f"{type(error).__name__}: {error}"
            text = f"rank {self.rank} ended with {said}. Read its log first."
            self._failure = self._control.accuse(PeerLost(text, self.rank))
        self._close("was aborted")

    def close(self) -> None:
        """Leave in good order. Collectives that a rank has completed, all can complete.

        Does not wait for the others. Closing twice is fine; leaving a `with` block
        closes.

        Raises: PeerMismatch if another rank left after more collectives than this one.
        """
        if self._closed:
            return
        if self._performer == threading.get_ident():  # in a signal handler
            self.abort(InterruptedError("it closed its group during a collective"))
            return
        self._close()
        departed = self._control.departed if self._links else {}
        for rank, last in departed.items():
            if last > self._sequence and not self._failure:
                raise PeerMismatch(
                    f"rank {self.rank} closes its group after {self._sequence} "
                    f"collectives, but rank {rank} made {last}. All ranks must make "
                    "the same calls.",
                    rank,
                )

    def _close(self, why: str = "is closed") -> None:
        with self._lock:
            if self._closed:
                return
            if self._performer != threading.get_ident():
                self._queue.close()
            if self._mailbox:
                self._control.mail_came = lambda: None
                self._mailbox.close()
            self._closed = why
            open_groups.remove(self)
            if self._links:
                self._control.leave()
                self._links.close()
                self._alarm.close()
            if self._backend:
                self._backend.close()

    def __deepcopy__(self, memo: Any) -> "ProcessGroup":
        """Itself: a copy of a model that holds its group still belongs to it."""
        return self

    def __enter__(self) -> "ProcessGroup":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort(error)


@atexit.register
def _leave_at_exit() -> None:
    """Scripts that never close the group leave in order too, and say so if they
    crash."""
    error = getattr(sys, "last_value", None)  # the exception that ended the program
    for group in list(open_groups):
        if error is None:
            group._close()
        else:
            group.abort(error)


def _forget_groups() -> None:
    """A forked child is no rank: were it to keep the links, nobody would see its parent
    die; were it to use them, it would speak in its parent's name."""
    for group in list(open_groups):
        group._lock, group._closed = threading.RLock(), "belongs to the parent process"
        group._queue = WorkQueue()
        if group._links:
            group._links.close()
            if group._mailbox:
                group._mailbox.forget()
            group._control.forget()
            group._alarm.close()
            if group._backend:
                group._backend.close()
    open_groups.clear()


os.register_at_fork(after_in_child=_forget_groups)
