"""Spawn: n processes that run one function, for scripts that start their own ranks.

    from minddp.multiprocessing import spawn

    def train(rank, world_size): ...         called as train(0, 2) and as train(1, 2)

    if __name__ == "__main__":
        spawn(train, args=(2,), nprocs=2)

    parent --.--> process 0: train(0, 2)     returns, or raises: then the others are
             '--> process 1: train(1, 2)     ended, and the parent raises its error

`minddp run` does more for a job: it hands out ranks, ports and a token, and labels what
ranks print. This is for scripts that start their own processes.

Rule 1.  Each process imports the script anew ("spawn"; a fork would copy threads and
         sockets in the middle of what they do). So the function must be found by its
         name in a module, and the script's own work must stand below `if __name__`.
Rule 2.  The first error in time counts. A rank that fails makes the others fail, with
         errors that name it (PeerError); those count only if there is no other.

In PyTorch: torch/multiprocessing/spawn.py.

Left out: other start methods.
"""

import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from minddp.environment import THREAD_VARIABLES, usable_cores
from minddp.errors import MindDPError, PeerError, UsageError

CAUSE, CONSEQUENCE = 0, 1  # classes of failures
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
        self.processes = list(processes)
        self._running, self._pipes = dict(enumerate(processes)), dict(enumerate(pipes))
        self._failures: list[tuple[int, Any]] = []  # (its class, error), as they came

    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def join(self, timeout: float | None = None) -> bool:
        """Wait until all have ended; False if the timeout (seconds) came first.

        Raises: ProcessRaisedException, ProcessExitedException, after all have ended.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while self._running and not self._failures:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not self._listen(left):
                return False
        if self._failures:
            self.end()
            raise min(self._failures, key=lambda failure: failure[0])[1]
        return True

    def end(self) -> None:
        """Those that still run fail by themselves soon, or are made to end."""
        late = time.monotonic() + GRACE_SECONDS
        while self._running and self._listen(max(0.0, late - time.monotonic())):
            pass
        for process in self._running.values():
            process.terminate()
            process.join(GRACE_SECONDS)
            if process.exitcode is None:
                process.kill()
                process.join()
        self._running.clear()

    def _listen(self, seconds: float | None) -> bool:
        """Note what processes say and which have ended; False if none did in time."""
        from multiprocessing import connection  # not before: it takes 10 ms

        sentinels = [process.sentinel for process in self._running.values()]
        ready = connection.wait([*sentinels, *self._pipes.values()], seconds)
        for i, pipe in list(self._pipes.items()):
            if pipe in ready:
                self._hear(i, pipe)
        for i, process in list(self._running.items()):
            if process.sentinel in ready:
                process.join()
                if i in self._pipes:  # it may have spoken just before it ended
                    self._hear(i, self._pipes[i])
                self._note_end(i, process.exitcode)
                del self._running[i]
        return bool(ready)

    def _hear(self, i: int, pipe: Any) -> None:
        del self._pipes[i]
        try:
            told = json.loads(pipe.recv_bytes())
        except EOFError:  # it had nothing to say
            return
        text = f"process {i} of spawn raised:\n\n{told['text']}"
        self._failures.append((told["class"], ProcessRaisedException(text, i)))

    def _note_end(self, i: int, code: int) -> None:
        if code and all(error.error_index != i for _, error in self._failures):
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            text = f"process {i} of spawn ended with {how}"
            self._failures.append((CAUSE, ProcessExitedException(text, i, code)))


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
        ProcessContext(processes, pipes).end()
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
        spawned.end()
        raise
    return None


def _end_with_parent() -> None:
    """A process whose parent was killed is nobody's."""
    from multiprocessing import connection, parent_process

    if parent := parent_process():
        connection.wait([parent.sentinel])
        os._exit(1)


def _run(fn: Callable[..., Any], i: int, args: tuple[Any, ...], pipe: Any) -> None:
    """What process i does."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        fn(i, *args)
    except KeyboardInterrupt:
        os._exit(130)  # the parent has got it as well
    except Exception as error:
        kind = CONSEQUENCE if isinstance(error, PeerError) else CAUSE
        told = {"text": traceback.format_exc(), "class": kind}
        pipe.send_bytes(json.dumps(told).encode())
        raise SystemExit(1) from None
