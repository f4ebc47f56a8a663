"""How long a step's parts took: the numbers of `ddp.logging_data()`.

    forward starts    backward starts       compute ends         backward ends
         |-- forward -------|-- backward compute ---|-- exposed -------|
                                  [ bucket 0 ][ bucket 1 ][ bucket 2 ]
                                     communication, of which "exposed" could not hide

    backward_comm_time                    time in which buckets were under way
    backward_compute_comm_overlap_time    the part of it that backward has hidden
    backward_comm_exposed_time            the part that was waited for

The overlap is what buckets are for. If it is 0, the network only starts when backward
ends: one bucket, or a first layer that is last in the plan. If "exposed" is long, the
network is the bottleneck, and smaller gradients (comm_hooks.py) or fewer averages
(`no_sync`) are what helps.

In PyTorch: logger.cpp, whose names these are, in nanoseconds. It measures communication
from the first launch to the end of the last wait, and overlap from the first launch to
the end of compute, whether or not a bucket was under way; here the buckets' own time is
taken, in which waiting for slower ranks is included. `exposed` and bytes are ours.

Left out: GPU events; collectives other than the buckets', such as a roll call or those
of SyncBatchNorm, which count as computing.
"""

import time
from collections import Counter

from minddp.group import ProcessGroup

DURATIONS = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
    "backward_comm_exposed_time",
)


class Logger:
    """Four moments of each step that averages, and the sums over all steps."""

    def __init__(self, process_group: ProcessGroup):
        self._group = process_group
        self._forward = self._backward = self._compute_end = 0
        self._before = process_group.stats()
        self._latest: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._steps = 0

    def forward_starts(self) -> None:
        self._forward = time.perf_counter_ns()

    def backward_starts(self) -> None:
        self._backward = time.perf_counter_ns()
        self._before = self._group.stats()

    def compute_ends(self) -> None:
        self._compute_end = time.perf_counter_ns()

    def backward_ends(self, comm: int) -> None:
        """comm: how long buckets were under way, in nanoseconds."""
        exposed = time.perf_counter_ns() - self._compute_end
        now, before = self._group.stats(), self._before
        durations = (
            self._backward - self._forward,
            self._compute_end - self._backward,
            comm,
            max(0, comm - exposed),
            min(comm, exposed),
        )
        self._latest = Counter(dict(zip(DURATIONS, durations, strict=True)))
        self._latest["bytes_sent"] = now["bytes_sent"] - before["bytes_sent"]
        self._sums.update(self._latest)
        self._steps += 1

    def data(self) -> dict[str, int]:
        """Nanoseconds, and bytes_sent, of the latest step; averages under avg_..."""
        steps = max(1, self._steps)
        names = (*DURATIONS, "bytes_sent")
        averages = {f"avg_{name}": self._sums[name] // steps for name in names}
        return {name: self._latest[name] for name in names} | averages
