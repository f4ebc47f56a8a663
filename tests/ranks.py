"""Real ranks for tests: one process each, without a launcher.

    results = run(3, body)                   # every rank runs body(), all have ended

    with Ranks(3, body) as ranks:            # ... or with something done to them
        ranks.wait_for(1, "looping")         # until rank 1 has called tell("looping")
        at = ranks.signal(1, signal.SIGKILL)
        results = ranks.results()

A body is a function of the test file whose source is sent to the ranks, so it may use
the names below and what it imports itself, but no variables of the test.

Each rank has a session of its own; signals go to pids that this file has started, and
leaving the `with` block kills and reaps what is left.
"""

import inspect
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import minddp

TOKEN = "a-marker-that-must-not-be-printed-0123456789"  # of all jobs here, unless told
PATIENCE = 20.0  # seconds; nothing here takes so long unless it hangs

# What a launcher, also the one that may run the tests, sets for its ranks.
OF_LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "MINDDP_", "TORCHELASTIC_"),
    *("OMPI_", "PMI_", "MPI_", "SLURM_"),
)


# ---- In the rank: what bodies may use ----


def tell(word: str, **facts: object) -> None:
    """Report to the test; the time is the same clock's in all processes."""
    now = {"word": word, "at": time.monotonic(), "cpu": time.process_time()}
    print(json.dumps(now | facts), flush=True)


def attempt(call: Callable[[], object]) -> None:
    """Call, and tell how it ended: "returned", or "raised" with the error."""
    try:
        call()
    except minddp.MindDPError as error:
        kind, culprit = type(error).__name__, getattr(error, "culprit", None)
        tell("raised", kind=kind, culprit=culprit, text=str(error))
    else:
        tell("returned")


def join(**settings: object) -> minddp.ProcessGroup:
    """The group, with time-outs as short as tests want them."""
    settings = {"timeout": 2.0, "rendezvous_timeout": 15.0} | settings
    return minddp.init_process_group(**settings)


def reduce_for_ever(pg: minddp.ProcessGroup, elements: int = 1 << 20) -> None:
    """All-reduce 8 MB again and again; tells "looping" when it is well under way."""
    x = np.ones(elements)
    for i in itertools.count():
        pg.all_reduce(x, "max")
        assert x[0] == x[-1] == 1.0
        if i == 2:
            tell("looping")


# ---- In the test ----


@dataclass
class Result:
    """How a rank ended; `code` is negative if a signal ended it."""

    rank: int
    code: int
    out: str
    err: str
    facts: dict[str, dict] = field(repr=False)  # by word, the latest of each

    def told(self, word: str) -> list[dict]:
        """All that it told under this word, in order."""
        return [fact for fact in facts_in(self.out) if fact["word"] == word]

    @property
    def raised(self) -> dict:
        """The error that the rank told of."""
        assert "raised" in self.facts, f"rank {self.rank} told of no error: {self}"
        return self.facts["raised"]


def facts_in(out: str) -> list[dict]:
    """What was told in this output; other lines are skipped."""
    return [json.loads(line) for line in out.splitlines() if line.startswith('{"')]


class Process:
    """One process, and threads that collect what it says."""

    def __init__(self, argv: list[str], env: dict[str, str], fds: tuple[int, ...] = ()):
        self.lines: dict[str, list[str]] = {"out": [], "err": []}
        self.said = threading.Condition()
        self.process = subprocess.Popen(
            argv,
            env=env,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=fds,
            start_new_session=True,
        )
        pipes = {"out": self.process.stdout, "err": self.process.stderr}
        self.readers = [
            threading.Thread(target=self._read, args=item, daemon=True)
            for item in pipes.items()
        ]
        for reader in self.readers:
            reader.start()

    def _read(self, name, pipe) -> None:
        with pipe:
            for line in pipe:
                with self.said:
                    self.lines[name].append(line)
                    self.said.notify_all()
        with self.said:
            self.said.notify_all()

    def facts(self) -> dict[str, dict]:
        """What it has told so far."""
        return {fact["word"]: fact for fact in facts_in("".join(self.lines["out"]))}

    def wait_for(self, word: str) -> dict:
        def there() -> bool:
            return word in self.facts() or not self.readers[0].is_alive()

        with self.said:
            self.said.wait_for(there, PATIENCE)
        assert word in self.facts(), f"it did not tell {word!r} but {self.lines}"
        return self.facts()[word]

    def result(self, rank: int, deadline: float) -> Result:
        try:
            code = self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"rank {rank} has not ended; it said {self.lines}"
            ) from None
        for reader in self.readers:
            reader.join(5)
        out, err = ("".join(self.lines[name]) for name in ("out", "err"))
        assert TOKEN not in out + err, f"rank {rank} has printed its token"
        return Result(rank, code, out, err, self.facts())

    def close(self) -> None:
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # its session's only group
        self.process.wait()
        for reader in self.readers:
            reader.join(5)


class Ranks:
    """The ranks of one job, started at once; leaving the block ends them.

    env: for all ranks. env_of: {rank: variables of this rank alone}. only: the ranks to
    start. port: rank 0 binds it itself; without, it gets a socket that is bound
    already, as from `minddp run`. prefix: rank -> the command in front of Python.
    """

    def __init__(
        self,
        n: int,
        body: Callable[[], None] | str,
        *,
        env: dict[str, str] | None = None,
        env_of: dict[int, dict[str, str]] | None = None,
        only: list[int] | None = None,
        port: int | None = None,
        prefix: Callable[[int], list[str]] = lambda rank: [],
    ):
        self.processes: dict[int, Process] = {}
        master = None if port else socket.create_server(("127.0.0.1", 0))
        self.port = port or master.getsockname()[1]
        try:
            for rank in only or range(n):
                own = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(n),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(self.port),
                    "MINDDP_TOKEN": TOKEN,
                    **(env or {}),
                    **(env_of or {}).get(rank, {}),
                }
                fds: tuple[int, ...] = ()
                if master and rank == 0:
                    fds = (master.fileno(),)
                    own["MINDDP_LISTEN_FD"] = str(fds[0])
                argv = [*prefix(rank), sys.executable, "-c", program(body)]
                self.processes[rank] = Process(argv, environment(own), fds)
        except BaseException:
            self.__exit__()
            raise
        finally:
            if master:
                master.close()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.close()

    def pid(self, rank: int) -> int:
        return self.processes[rank].process.pid

    def wait_for(self, rank: int, word: str) -> dict:
        """Until this rank has told the word; the facts that it told."""
        return self.processes[rank].wait_for(word)

    def signal(self, rank: int, signum: int) -> float:
        """Signal one rank; the moment before, on the clock of `tell`."""
        at = time.monotonic()
        self.processes[rank].process.send_signal(signum)
        return at

    def results(self, timeout: float = PATIENCE, ranks=None) -> list[Result]:
        """How the ranks ended, all within the timeout."""
        deadline = time.monotonic() + timeout
        chosen = self.processes if ranks is None else ranks
        return [self.processes[r].result(r, deadline) for r in chosen]


def run(n: int, body, *, timeout: float = PATIENCE, **settings) -> list[Result]:
    """The results of n ranks that run `body`; settings: as for Ranks."""
    with Ranks(n, body, **settings) as ranks:
        return ranks.results(timeout)


def program(body: Callable[[], None] | str) -> str:
    """The source that a rank runs: a text, or a function and its call."""
    if not isinstance(body, str):
        body = f"{textwrap.dedent(inspect.getsource(body))}\n{body.__name__}()\n"
    return "from ranks import *\nfrom ranks import np, minddp, os, time\n" + body


def environment(own: dict[str, str]) -> dict[str, str]:
    """This process's environment without what its launcher set, and with `own`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(OF_LAUNCHERS)}
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    here, package = Path(__file__).parent, Path(minddp.__file__).parent.parent
    return kept | threads | {"PYTHONPATH": f"{here}{os.pathsep}{package}"} | own


def descriptors() -> int:
    """How many descriptors this process has open, and one that looks."""
    return len(os.listdir("/proc/self/fd"))


def mapped() -> list[str]:
    """The shared memory of ranks that this process has mapped."""
    with open("/proc/self/maps") as maps:
        return [line for line in maps if "minddp" in line]


def free_port() -> int:
    """A port that nobody has now, and that the kernel gives to nobody by itself."""
    while True:
        port = random.randrange(15_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def concurrently(case: Callable, *lists) -> list:
    """[case(a, ...) for a, ... in zip(*lists)], all at once."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(case, *lists))
