"""Supervise n processes: start them, move what they say, and leave nothing behind.

One loop around one `select`. Whatever happens makes a descriptor ready, or is a time:

    a rank has written     its pipe       --> relay.py decides what is shown --> queue
    there is room          our stdout     <-- the queue, a piece at a time
    a signal has come      wake-up pipe   --> SIGCHLD: a rank has ended
                                              SIGINT, SIGTERM, SIGHUP: pass it on
    patience has run out   the timeout    --> send the next order

How a job ends before its time:

    a rank fails  --2 s-->  SIGTERM  --2 s-->  SIGKILL       the others may end by
                                                             themselves, and say why
    a signal      ------->  the same --2 s-->  SIGKILL       a second signal: at once

Rule 1.  Nothing blocks except `select`: else a slow reader of our output would keep a
         Ctrl-C waiting. While the queue is full the ranks' pipes are not read. Then the
         ranks wait for that reader, as they would without us, and no byte is lost.
Rule 2.  Every rank leads a session of its own, and so a process group. A signal reaches
         it with all that it has started; a Ctrl-C of the terminal reaches only us.
Rule 3.  The ranks do not outlive us. Linux kills them even if we die of SIGKILL (see
         PR_SET_PDEATHSIG in prctl(2)). On other systems they run on until they miss
         each other.

Invariant.  When `supervise` returns or raises, every rank is reaped, its group is
killed, and its pipes are closed.

In PyTorch: `PContext` and the agent's loop (torch/distributed/elastic), which looks ten
times a second; here an end is seen at once.

Left out: Ctrl-Z (it stops us only; the ranks run on until their pipes are full),
standard input (n readers of one terminal would take each other's lines), programs that
make themselves daemons (with a session of their own they are out of reach), and
machines with more than 500 ranks (`select` ends at descriptor 1,023).
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from minddp.errors import MindDPError, UsageError
from minddp.net import Listener
from minddp.relay import (
    ERR,
    OUT,
    Ending,
    Lines,
    Piece,
    Stderr,
    first_failure,
    fitted,
    repaint,
    report,
    say,
    tagged,
)

GRACE_SECONDS = 2.0  # to end by oneself, before the next, harder signal
QUEUE_LIMIT = 16  # pieces; each is what one read brought
READ_BYTES = 1 << 16
PIPE_BYTES = 1 << 20  # the most that a pipe can hold (/proc/sys/fs/pipe-max-size)

PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Outcome:
    """How a job ended: the launcher's exit code, and whether the user ended it."""

    exit_code: int
    interrupted: bool


def supervise(
    program: Sequence[str],
    environments: Sequence[dict[str, str]],
    first_rank: int = 0,
    listener: Listener | None = None,
) -> Outcome:
    """Run the program in each environment, as ranks first_rank, first_rank + 1, ...

    The first of them inherits the listener. Ours is closed then: if that rank dies, the
    others must be refused and not wait in a queue that nobody serves.

    Works in the main thread only, for it takes signals.

    Raises: UsageError if the program cannot be started, MindDPError if output cannot be
    written. No rank is left then.
    """
    with _signals_as_bytes() as wakeup:
        supervisor = Supervisor(wakeup)
        try:
            for rank, env in enumerate(environments, first_rank):
                supervisor.alive.append(RankProcess(rank, program, env, listener))
                if listener is not None:
                    listener.close()
                    listener = None
            return supervisor.run()
        finally:
            supervisor.close()


class RankProcess:
    """One rank: its process, the pipes it writes into, and what came out of them."""

    def __init__(
        self,
        rank: int,
        program: Sequence[str],
        env: dict[str, str],
        listener: Listener | None = None,
    ):
        self.rank = rank
        self.lines = {OUT: Lines(), ERR: Lines()}
        self.stderr = Stderr()
        try:
            self.process = subprocess.Popen(
                program,
                env=env,
                bufsize=0,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[] if listener is None else [listener.fileno()],
                start_new_session=True,
                preexec_fn=_dies_with_us(),
            )
        except OSError as exc:
            raise UsageError(f"cannot start {program[0]}: {exc.strerror}") from exc
        out, err = self.process.stdout, self.process.stderr
        assert out and err, "PIPE makes both"
        self.files = {OUT: out, ERR: err}
        self.pipes = {out.fileno(): OUT, err.fileno(): ERR}  # those not at their end
        for fd in self.pipes:
            os.set_blocking(fd, False)

    def read(self, fd: int, size: int) -> list[Piece]:
        """What one read from a pipe adds to the output; at its end, the last line."""
        target = self.pipes[fd]
        try:
            data = os.read(fd, size)
        except BlockingIOError:
            return []
        if data:
            return self.show(target, self.lines[target].feed(data))
        return self.finish(fd)

    def finish(self, fd: int) -> list[Piece]:
        """The last line of a pipe, which is then read no more."""
        target = self.pipes.pop(fd)
        return self.show(target, self.lines[target].finish())

    def drain(self) -> list[Piece]:
        """All that an ended rank has left in its pipes.

        Their end need not come: a process that has left the group may hold them open.
        """
        pieces = []
        for fd in list(self.pipes):
            pieces += self.read(fd, PIPE_BYTES)
            if fd in self.pipes:
                pieces += self.finish(fd)
        return pieces

    def show(self, target: int, lines: list[bytes]) -> list[Piece]:
        """These lines, tagged, except for those that are kept back."""
        if target == ERR:
            lines = self.stderr.feed(lines, time.monotonic())
        return [(target, tagged(self.rank, lines))]

    def send(self, signum: int) -> None:
        """Signal the rank and all that it has started."""
        # The group may be empty; if only a zombie is left, macOS says "not permitted".
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signum)

    def close(self) -> None:
        """Kill what is left of the group, reap the rank, close the pipes."""
        self.send(signal.SIGKILL)
        self.process.wait()
        for file in self.files.values():
            file.close()


class Supervisor:
    """The loop and what it knows: who is alive, how others ended, what comes next."""

    def __init__(self, wakeup: int):
        self.wakeup = wakeup
        self.alive: list[RankProcess] = []
        self.endings: list[Ending] = []  # in the order in which they came
        self.queue: deque[Piece] = deque()  # to be written
        self.orders: list[tuple[float, int]] = []  # signals to be sent, and when
        self.stopping = False  # one has been sent: who ends now, ends because of us
        self.signalled = 0  # the signal by which the user ended the job
        self.lost: OSError | None = None  # why our output cannot be written
        self.leave_at = float("inf")  # when to give up on a reader that takes nothing
        self.bar = b""  # on the last line of the terminal now
        self.on_terminal = os.isatty(ERR)

    def run(self) -> Outcome:
        """Supervise until every rank has ended and all that they said is written."""
        while self.alive:
            self._step()
        self._show([(ERR, self._last_words())])
        while self.queue and time.monotonic() < self.leave_at:
            self._step()
        return self._outcome()

    def close(self) -> None:
        """Leave nothing behind, whatever has gone wrong."""
        while self.alive:
            self.alive.pop().close()

    def _last_words(self) -> bytes:
        if self.signalled:
            name = signal.Signals(self.signalled).name
            return say(f"stopped by {name}; every rank has ended.")
        return report(self.endings)

    def _outcome(self) -> Outcome:
        lost = self.lost if self.signalled == signal.SIGPIPE else None
        quiet = isinstance(lost, BrokenPipeError)  # as it ends under `| head`
        if lost and not quiet:
            raise MindDPError(f"cannot write the output: {lost.strerror}") from lost
        if self.signalled:
            return Outcome(128 + self.signalled, interrupted=True)
        first = first_failure(self.endings)
        return Outcome(first.exit_code if first else 0, interrupted=False)

    # ---- One turn of the loop ----

    def _step(self) -> None:
        pipes = {fd: rank for rank in self.alive for fd in rank.pipes}
        reads = [*pipes] if len(self.queue) < QUEUE_LIMIT else []
        writes = [self.queue[0][0]] if self.queue else []
        readable, writable, _ = select.select(
            [self.wakeup, *reads], writes, [], self._patience()
        )
        for fd in reads:
            if fd in readable:
                self._show(pipes[fd].read(fd, READ_BYTES))
        if writable:
            self._write()
        # Last, for it closes the pipes of ranks that have ended.
        if self.wakeup in readable:
            self._take_signals()
        self._act_in_time()

    def _patience(self) -> float | None:
        """Seconds until something must be done even if nothing happens."""
        now = time.monotonic()
        waits = [rank.stderr.waits(now) for rank in self.alive]
        waits += [when - now for when, _ in self.orders]
        waits += [self.leave_at - now] if self.signalled else []
        return min((max(0.0, wait) for wait in waits if wait is not None), default=None)

    def _act_in_time(self) -> None:
        now = time.monotonic()
        while self.orders and self.orders[0][0] <= now:
            self._send(self.orders.pop(0)[1])
        for rank in self.alive:
            self._show([(ERR, tagged(rank.rank, rank.stderr.overdue(now)))])

    # ---- Output ----

    def _show(self, pieces: list[Piece]) -> None:
        bar = self._bar_now()
        if not self.lost:
            self.queue += repaint([p for p in pieces if p[1]], self.bar, bar)
        self.bar = bar

    def _bar_now(self) -> bytes:
        """The bar of rank 0, if this machine has rank 0 and a terminal."""
        for rank in self.alive:
            if rank.rank == 0 and self.on_terminal:
                draft = rank.lines[ERR].draft
                bar = tagged(0, [draft]).rstrip(b"\n") if draft.strip() else b""
                return fitted(bar, os.get_terminal_size(ERR).columns or 80)
        return b""

    def _write(self) -> None:
        """Write as much of the first piece as cannot block: PIPE_BUF bytes, pipe(7)."""
        target, data = self.queue[0]
        try:
            written = os.write(target, data[: select.PIPE_BUF])
        except BlockingIOError:
            return  # somebody else, who shares the pipe, was faster
        except OSError as exc:
            self._lose_output(exc)
            return
        self.queue[0] = target, data[written:]
        if written == len(data):
            self.queue.popleft()

    def _lose_output(self, exc: OSError) -> None:
        """Nobody can read what the job says: end it, as SIGPIPE ends other programs."""
        self.lost = exc
        self.queue.clear()
        if (
            not self.signalled
        ):  # else Ctrl-C has ended our reader too, as in `| tee log`
            self._stop(signal.SIGPIPE, send=signal.SIGTERM)

    # ---- Signals and endings ----

    def _take_signals(self) -> None:
        for signum in os.read(self.wakeup, 4096):
            if signum == signal.SIGCHLD:
                self._look_who_ended()
            else:
                self._stop(signum, send=signum)

    def _look_who_ended(self) -> None:
        # All of them: signals of the same kind that come together arrive as one.
        for rank in list(self.alive):
            if rank.process.poll() is not None:
                self._bury(rank)

    def _bury(self, rank: RankProcess) -> None:
        pieces = rank.drain()
        ending = Ending(rank.rank, rank.process.returncode, rank.stderr, self.stopping)
        if not ending.failed and not ending.is_echo:
            pieces.append((ERR, tagged(rank.rank, rank.stderr.release())))
        self._show(pieces)
        self.alive.remove(rank)
        self.endings.append(ending)
        rank.close()
        if ending.failed and not self.orders:
            now = time.monotonic()
            self.orders = [
                (now + GRACE_SECONDS, signal.SIGTERM),
                (now + 2 * GRACE_SECONDS, signal.SIGKILL),
            ]

    def _stop(self, signum: int, send: int) -> None:
        """End the job because of a signal; if it is the second one, at once."""
        now = time.monotonic()
        if self.signalled in (0, signal.SIGPIPE):
            self.signalled, grace = signum, GRACE_SECONDS
            self._send(send)
        else:
            grace = 0.0
        self.orders = [(now + grace, signal.SIGKILL)]
        self.leave_at = now + grace + 0.5

    def _send(self, signum: int) -> None:
        self.stopping = True
        for rank in self.alive:
            rank.send(signum)


# ---- What the operating system needs ----


@contextmanager
def _signals_as_bytes() -> Iterator[int]:
    """A descriptor from which each signal is read as one byte, its number.

    So a signal is one more thing that `select` sees, and no handler has to be careful.
    """
    wakeup, write_end = os.pipe()
    os.set_blocking(write_end, False)  # Python insists, for handlers must not block
    before = {signum: signal.signal(signum, _ignore) for signum in _our_signals()}
    previous = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        yield wakeup
    finally:
        signal.set_wakeup_fd(previous)
        for signum, handler in before.items():
            signal.signal(signum, handler)
        os.close(wakeup)
        os.close(write_end)


def _our_signals() -> list[signal.Signals]:
    """Those that end a job, and SIGCHLD; not SIGHUP under `nohup`, which ignores it."""
    ours = [signal.SIGCHLD, signal.SIGINT, signal.SIGTERM]
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return ours if ignored else [*ours, signal.SIGHUP]


def _ignore(signum: int, frame: FrameType | None) -> None:
    """The byte in the wake-up pipe has said it all."""


def _dies_with_us() -> Callable[[], None] | None:
    """What a rank does between fork and exec, so as not to outlive the launcher."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork: afterwards is unsafe
    launcher = os.getpid()

    def tie() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it has died already, and nobody told us
            os._exit(1)

    return tie
