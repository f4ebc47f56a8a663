"""What the launcher shows of n ranks: whole lines, tagged, and the first failure first.

n programs write to one terminal. Every byte passes through here. This file decides what
is shown of it, and knows no pipes and no processes:

    rank 0 stdout --bytes--> Lines ---------------------> [rank 0] epoch 1
    rank 1 stderr --bytes--> Lines --> Stderr ----------> [rank 1] a warning
                                          |
                                          | tracebacks
                                          v
           exit codes --------> report(endings) --------> minddp run: rank 1 failed
                                                          first, exit code 1 (...)

Rule 1.  A line is shown whole or not at all, so that lines of two ranks never mix.
Rule 2.  What a carriage return has overwritten was a draft: only the last one counts. A
         progress bar is a line that is still being drafted; a terminal shows it at its
         foot (`repaint`).
Rule 3.  A traceback waits. If one rank fails, its neighbours lose it and fail as well,
         and n tracebacks in order of arrival would bury the one that matters. So it is
         kept until its rank has ended, or for 2 seconds: a rank that lives on has only
         logged it.

Who failed first?  Of the ranks that failed for a reason of their own, the one that
ended first. A rank whose last exception is a PeerError (errors.py) says itself that the
cause is another one.

    rank 0   ends first   PeerLost: rank 0 lost rank 1 ...       a consequence
    rank 1   ends next    ZeroDivisionError: division by zero    failed first
    rank 2   is stopped   was still waiting for the others       no failure

In PyTorch: `record` and `ChildFailedError` (torch/distributed/elastic/multiprocessing),
which go by time alone.

Left out: a log file per rank, colours, and unfinished lines other than bars (a prompt
is shown when its line ends).
"""

import signal
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

HOLD_SECONDS = 2.0  # a crashed interpreter has ended by then, a logging one goes on
EXCEPTION_LIMIT = 160  # characters of an exception in a note; the traceback has all
LINE_LIMIT = 1 << 20  # bytes; a longer line is cut, for the launcher has to keep it

OUT, ERR = 1, 2  # descriptors of the launcher
Piece = tuple[int, bytes]  # where to, and what

# To column 1, and erase to the end of the line (ECMA-48, EL).
NOTHING_LEFT = b"\r\x1b[K"


def tagged(rank: int, lines: Sequence[bytes]) -> bytes:
    """These lines, each with its rank in front: b"[rank 1] epoch 3\\n"."""
    return b"".join(b"[rank %d] %s\n" % (rank, line) for line in lines)


class Lines:
    """Cuts a stream of bytes, in whatever pieces it arrives, into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that these bytes complete, without their ends."""
        *lines, rest = (self._rest + data).split(b"\n")
        # A last b"\r" may be half of b"\r\n": it overwrites nothing yet.
        self._rest = rest[max(0, rest.rstrip(b"\r").rfind(b"\r")) :]
        if len(self._rest) > LINE_LIMIT:
            lines, self._rest = [*lines, self._rest], b""
        return [_last_draft(line) for line in lines]

    def finish(self) -> list[bytes]:
        """The last line, if the stream ended in the middle of it."""
        return self.feed(b"\n") if self._rest else []

    @property
    def draft(self) -> bytes:
        """What a progress bar shows now; empty for a line that just grows."""
        return _last_draft(self._rest) if self._rest.startswith(b"\r") else b""


def _last_draft(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Stderr:
    """The lines of one rank's stderr; a traceback is kept until it is understood."""

    def __init__(self) -> None:
        self.traceback: list[bytes] = []  # the latest, with all that followed it
        self.kept = False  # not shown yet
        self.last_line = b""
        self._since = 0.0

    def feed(self, lines: Sequence[bytes], now: float) -> list[bytes]:
        """Those of these lines that can be shown at once."""
        shown: list[bytes] = []
        for line in lines:
            if not self.kept and _opens_traceback(line):
                self.traceback, self.kept, self._since = [], True, now
            (self.traceback if self.kept else shown).append(line)
            self.last_line = line or self.last_line
        return shown

    def overdue(self, now: float) -> list[bytes]:
        """The traceback, once it has waited so long that it was only logged."""
        return self.release() if self.waits(now) == 0.0 else []

    def waits(self, now: float) -> float | None:
        """Seconds until the traceback is overdue; None if none is kept."""
        return max(0.0, self._since + HOLD_SECONDS - now) if self.kept else None

    def release(self) -> list[bytes]:
        """The traceback that was kept; from now on it counts as shown."""
        kept, self.kept = self.kept, False
        return self.traceback if kept else []

    def exception(self) -> str:
        """ "ZeroDivisionError: division by zero", or "" without a traceback."""
        return exception_line(self.traceback)


def _opens_traceback(line: bytes) -> bool:
    # The second is how Python begins if an exception strikes where none can be raised.
    return b"Traceback (most recent call last)" in line or line.startswith(
        b"Exception ignored in"
    )


def exception_line(traceback: Sequence[bytes]) -> str:
    """The line that names the exception: after the last header the first not indented.

    Not the last line: the text of an exception may have several.
    """
    found, searching = b"", False
    for line in traceback:
        if _opens_traceback(line):
            searching = True
        elif searching and line and not line.startswith(b" "):
            found, searching = line, False
    return found.decode(errors="replace").removeprefix("minddp.errors.")


# ---- The verdict ----


@dataclass(frozen=True)
class Ending:
    """How one rank ended."""

    rank: int
    returncode: int  # as subprocess has it: -9 is "killed by signal 9"
    stderr: Stderr
    stopped: bool = False  # it was still running when the launcher ended the job

    @property
    def exit_code(self) -> int:
        """As a shell has it: 128 + the signal."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    @property
    def failed(self) -> bool:
        return self.returncode != 0 and not self.stopped

    @property
    def is_consequence(self) -> bool:
        """Its exception says that another rank is the cause."""
        return self.stderr.exception().startswith(
            ("PeerError", "PeerLost", "PeerTimeout", "PeerMismatch")
        )

    @property
    def is_echo(self) -> bool:
        """We ended it, and its exception says no more than that."""
        interrupted = self.stderr.exception().startswith("KeyboardInterrupt")
        return self.stopped and (interrupted or self.is_consequence)

    def __str__(self) -> str:
        """'exit code 1 (ValueError: no data)' or 'killed by SIGKILL'."""
        text = self.stderr.exception().rstrip(".:")  # the sentence goes on
        exception = textwrap.shorten(text, EXCEPTION_LIMIT, placeholder=" ...")
        return _how(self.returncode) + (f" ({exception})" if exception else "")


def _how(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal, which has no name
        return f"killed by signal {-returncode}"


def first_failure(endings: Sequence[Ending]) -> Ending | None:
    """The rank to look at first, of `endings` in the order in which they came."""
    failures = [ending for ending in endings if ending.failed]
    causes = [ending for ending in failures if not ending.is_consequence]
    return next(iter(causes or failures), None)


def report(endings: Sequence[Ending]) -> bytes:
    """What to print at the end: the first failure, then a line for each other rank."""
    first = first_failure(endings)
    if first is None:
        return b""
    others = sorted(endings, key=lambda ending: ending.rank)
    notes = [_note(ending, first) for ending in others if ending is not first]
    return _headline(first) + b"".join(say(note) for note in notes if note)


def say(text: str) -> bytes:
    """A line in the launcher's own name."""
    return f"minddp run: {text}\n".encode(errors="replace")


def _headline(first: Ending) -> bytes:
    text = f"rank {first.rank} failed first, {first}."
    stderr = first.stderr
    if stderr.kept:
        return say(f"{text} Its traceback:") + tagged(first.rank, stderr.release())
    if stderr.traceback:
        return say(f"{text} Its traceback is above.")
    if stderr.last_line:
        last = stderr.last_line.decode(errors="replace")
        return say(f"{text} Its last line on stderr: {last}")
    return say(f"{text} It left no word on stderr.")


def _note(ending: Ending, first: Ending) -> str:
    who = f"rank {ending.rank}"
    if ending.stopped:
        return f"{who} was still running and was stopped."
    if ending.failed and ending.is_consequence:
        return f"{who} failed as a consequence, {ending}."
    if ending.failed:
        return f"{who} failed as well, {ending}."
    # A rank that left early is no failure in itself, but it explains those who lost it.
    return f"{who} had ended with exit code 0." if first.is_consequence else ""


# ---- A progress bar at the foot of a terminal ----


def repaint(pieces: Sequence[Piece], before: bytes, after: bytes) -> list[Piece]:
    """These pieces, printed above a bar that changes from `before` to `after`.

    Without erasing the bar first, a line would be printed into the middle of it.
    """
    if not pieces and before == after:
        return []
    erase = [(ERR, NOTHING_LEFT)] if before else []
    draw = [(ERR, after)] if after else []
    return [*erase, *pieces, *draw]


def fitted(bar: bytes, columns: int) -> bytes:
    """A bar that leaves the last column free: once wrapped it could not be erased."""
    return bar.decode(errors="replace")[: columns - 1].encode()
