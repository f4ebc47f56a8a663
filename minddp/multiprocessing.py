"""Spawn: n processes that run one function, for scripts that start their own ranks.

    from minddp.multiprocessing import spawn

    def train(rank, world_size): ...         called as train(0, 2) and as train(1, 2)

    if __name__ == "__main__":
        spawn(train, args=(2,), nprocs=2)

    parent --.--> process 0: train(0, 2)     returns, or raises: then the others are
             '--> process 1: train(1, 2)     ended, and the parent raises its error

`minddp run` does more for a job: it hands out ranks, ports and a token, and labels what
ranks print. This is for scripts that were written so, and for notebooks' helpers.

Rule 1.  Each process imports the script anew ("spawn"; a fork would copy threads and
         sockets in the middle of what they do). So the function must be found by its
         name in a module, and the script's own work must stand below `if __name__`.
Rule 2.  The first error counts. A rank that fails makes the others fail, with errors
         that name it; those are shown only if there is no other.

In PyTorch: torch/multiprocessing/spawn.py.

Left out: other start methods.
"""

import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from minddp.environment import THREAD_VARIABLES, usable_cores
from minddp.errors import MindDPError, PeerError, UsageError

GRACE_SECONDS = 2.0  # for the others to end by themselves, after the first has failed


class ProcessRaisedException(MindDPError):
    """A process has raised; the text has its traceback, `error_index` its number."""

    def __init__(self, text: str, error_index: int):
        super().__init__(text)
        self.error_index = error_index


class ProcessExitedException(MindDPError):
    """A process has ended without an exception, by a signal or by an exit code."""

    def __init__(self, text: str, error_index: int, exit_code: int):
        super().__init__(text)
        self.error_index, self.exit_code = error_index, exit_code


class ProcessContext:
    """The processes of one `spawn`."""

    def __init__(self, processes: Sequence[Any], pipes: Sequence[Any]):
        self.processes, self._pipes = list(processes), pipes

    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def join(self, timeout: float | None = None) -> bool:
        """Wait until all have ended; False if the timeout (seconds) came first.

        Raises: ProcessRaisedException, ProcessExitedException, after all have ended.
        """
        from multiprocessing import connection  # not before: it takes 10 ms

        end = None if timeout is None else time.monotonic() + timeout
        running = list(self.processes)
        while running and not any(p.exitcode for p in self.processes):
            left = None if end is None else max(0.0, end - time.monotonic())
            if not connection.wait([p.sentinel for p in running], left):
                return False
            running = [p for p in running if p.exitcode is None]
        self._end(running)
        errors = [self._error(i) for i in range(len(self.processes))]
        for error in sorted((e for e in errors if e), key=lambda pair: pair[0]):
            raise error[1]
        return True

    def _end(self, running: Sequence[Any]) -> None:
        """The others: they are failing by themselves, or they are made to end."""
        late = time.monotonic() + GRACE_SECONDS
        for process in running:
            process.join(max(0.0, late - time.monotonic()))
        for process in running:
            process.terminate()
            process.join(GRACE_SECONDS)
            if process.exitcode is None:
                process.kill()
                process.join()

    def _error(self, i: int) -> tuple[int, MindDPError] | None:
        """How process i failed, and how far from the cause that is."""
        process, pipe = self.processes[i], self._pipes[i]
        try:
            told = json.loads(pipe.recv_bytes())
        except EOFError:  # it had nothing to say
            told = None
        if told:
            text = f"process {i} of spawn raised:\n\n{told['text']}"
            return int(told["consequence"]), ProcessRaisedException(text, i)
        if code := process.exitcode:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            text = f"process {i} of spawn ended with {how}"
            # One that we have ended ourselves is a consequence, too.
            return 2 if code < 0 else 1, ProcessExitedException(text, i, code)
        return None


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Run fn(i, *args) in processes i = 0, ..., nprocs - 1.

    join: wait for all of them; else return their ProcessContext. Each gets its share of
    the cores, as with `minddp run`.

    Raises: UsageError; ProcessRaisedException and ProcessExitedException, once all have
    ended.
    """
    if start_method != "spawn":
        raise UsageError(f"spawn: start_method={start_method!r}; only 'spawn' is safe")
    if nprocs < 1:
        raise UsageError(f"spawn: nprocs={nprocs}; at least 1 process must run")
    from multiprocessing import get_context

    context = get_context("spawn")
    processes, pipes = [], []
    share = str(max(1, usable_cores() // nprocs))
    ours = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update({name: value or share for name, value in ours.items()})
    try:
        for i in range(nprocs):
            ours_end, its_end = context.Pipe(duplex=False)
            process = context.Process(
                target=_run, args=(fn, i, tuple(args), its_end), daemon=daemon
            )
            process.start()
            its_end.close()
            processes.append(process)
            pipes.append(ours_end)
    except BaseException:
        ProcessContext(processes, pipes)._end(processes)
        raise
    finally:
        for name, value in ours.items():
            if value is None:
                os.environ.pop(name)
    spawned = ProcessContext(processes, pipes)
    if not join:
        return spawned
    try:
        spawned.join()
    except KeyboardInterrupt:
        spawned._end(processes)
        raise
    return None


def _run(fn: Callable[..., Any], i: int, args: tuple[Any, ...], pipe: Any) -> None:
    """What process i does."""
    try:
        fn(i, *args)
    except KeyboardInterrupt:
        os._exit(130)  # the parent has got it as well
    except Exception as error:
        consequence = isinstance(error, PeerError)
        told = {"text": traceback.format_exc(), "consequence": consequence}
        pipe.send_bytes(json.dumps(told).encode())
        raise SystemExit(1) from None
