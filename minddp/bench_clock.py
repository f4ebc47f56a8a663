"""The stopwatch of the benchmarks: what is compared takes turns.

    prepare | barrier | run | barrier | check      of the first trial
    prepare | barrier | run | barrier | check      of the second, and so on: a round
                      <----->
                     what is timed, on each rank

Rule 1.  Trials that are compared alternate in every round, so that what disturbs the
         machine disturbs all of them. Measured one after the other, the two halves of a
         comparison may fall on a quiet and on a busy minute.
Rule 2.  A rank that is ready early waits before it prepares or checks anything: its
         work would take the core of a rank that is still being timed.
Rule 3.  A wrong result has no time: `check` raises, outside of what is timed.

In PyTorch: torch.utils.benchmark.Timer, which times one thing in one process.

Left out: choosing the number of rounds by the spread of the times.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from minddp.group import ProcessGroup

Row = dict[str, Any]  # what is told of one measurement: an object of `--json`


def nothing() -> None:
    pass


class Trial(NamedTuple):
    """What is timed, what must be done before it each time, and who judges it."""

    run: Callable[[], object]
    prepare: Callable[[], object] = nothing
    check: Callable[[], object] = nothing


def take_turns(
    pg: ProcessGroup, trials: Sequence[Trial], rounds: Iterable[object]
) -> list[list[float]]:
    """The seconds that each trial took on this rank, round by round.

    Raises: what a trial raises; PeerError.
    """
    seconds: list[list[float]] = [[] for _ in trials]
    for _ in rounds:
        for trial, times in zip(trials, seconds, strict=True):
            trial.prepare()
            pg.barrier()
            start = time.perf_counter()
            trial.run()
            times.append(time.perf_counter() - start)
            pg.barrier()
            trial.check()
    return seconds


# ---- What several benchmarks tell ----


def median(ordered: Sequence[float]) -> float:
    """The middle one of sorted numbers, the upper one of two."""
    return ordered[len(ordered) // 2]


def network(pg: ProcessGroup) -> Row:
    """The fields that say what carried the bytes; "netlab" only if it was emulated."""
    netlab = {"netlab": pg.netlab} if pg.netlab else {}
    return {"transport": pg.transport, **netlab}


def peak_mb() -> float:
    """The most memory that this process has had, in MB, as the kernel counts it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (peak if sys.platform == "darwin" else peak * 1024) / 1e6
