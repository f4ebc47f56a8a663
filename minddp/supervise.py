"""Supervise n processes: start them, move their output, pass signals on, leave nothing behind.

One loop around one `select`. Whatever can happen makes a descriptor ready, or is a deadline:

    a rank has written        its pipe       -->  relay.py decides what is shown  --> queue
    there is room to write    our stdout     <--  the queue, a piece at a time
    a signal has come         wake-up pipe   -->  SIGCHLD: a rank has ended
                                                  SIGINT, SIGTERM, SIGHUP: pass it on
    patience has run out      the timeout    -->  send the next order

How a job ends before its time:

    a rank fails     --2 s-->  SIGTERM  --2 s-->  SIGKILL      the others may still end by
                                                               themselves, and say why
    we are signaled  --------> the same signal  --2 s-->  SIGKILL       a second one: at once

Rule 1.  Nothing blocks except `select`. A write to a slow reader would otherwise keep a
         Ctrl-C waiting. While the queue is full the ranks' pipes are not read: then the ranks
         wait for that reader, as they would without us, and no byte is lost.
Rule 2.  Every rank leads a session, and so a process group, of its own. A signal reaches a
         rank with all that it has started, and a Ctrl-C of the terminal reaches only us.
Rule 3.  The ranks do not outlive us. Linux kills them even if we are killed by SIGKILL
         (PR_SET_PDEATHSIG, prctl(2)). On other systems they go on until they miss a rank.

Invariant.  When `supervise` returns or raises, every rank has been reaped, its group has been
killed and its pipes are closed.

In PyTorch: `PContext` and the agent's loop (torch/distributed/elastic), which polls ten times
a second; here an end is seen at once.

Left out: a terminal's stop key (Ctrl-Z stops us, the ranks run on until their pipes are full),
standard input (n readers of one terminal would take each other's lines), and machines with
more than 500 ranks (select ends at descriptor 1,023).
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
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from minddp.errors import MindDPError, UsageError
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
    listen_fd: int | None = None,
) -> Outcome:
    """Run the program once in each environment, as ranks first_rank, first_rank + 1, ...

    Rank 0 inherits `listen_fd`. Works in the main thread only, for it takes signals.

    Raises: UsageError if the program cannot be started, MindDPError if the output cannot be
    written. No rank is left then.
    """
    with _signals_as_bytes() as wakeup:
        supervisor = Supervisor(wakeup)
        try:
            for rank, env in enumerate(environments, first_rank):
                fds = (listen_fd,) if listen_fd is not None and rank == 0 else ()
                supervisor.ranks.append(RankProcess(rank, program, env, fds))
            return supervisor.run()
        except OSError as exc:
            raise UsageError(f"cannot start {program[0]}: {exc.strerror}") from exc
        finally:
            supervisor.close()


class RankProcess:
    """One rank: its process, the two pipes it writes into, and what came out of them."""

    def __init__(
        self,
        rank: int,
        program: Sequence[str],
        env: dict[str, str],
        pass_fds: tuple[int, ...] = (),
    ):
        self.rank = rank
        self.stderr = Stderr()
        self.lines = {OUT: Lines(), ERR: Lines()}
        self.pipes: dict[int, int] = {}  # the end that we read -> OUT or ERR
        own_ends = []
        for target in (OUT, ERR):
            read_end, write_end = os.pipe()
            self.pipes[read_end] = target
            own_ends.append(write_end)
        try:
            self.process = subprocess.Popen(
                program,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=own_ends[0],
                stderr=own_ends[1],
                pass_fds=pass_fds,
                start_new_session=True,
                preexec_fn=_dies_with_us(),
            )
        finally:
            for fd in own_ends:
                os.close(fd)
