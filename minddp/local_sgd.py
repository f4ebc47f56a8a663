"""Local SGD: average the parameters now and then, not the gradients in every step.

    step            1   2   3   4   5   6   7   8          period = 4
    DDP             a   a   a   a   a   a   a   a          a: all gradients
    local SGD       A               A                      A: all parameters

Between two averages each rank trains on its own data alone, and the replicas drift
apart; then all take the mean of their parameters. Traffic falls by the period. What
comes out is not what one process would compute, so it is a trade: too long a period,
and the mean of good models is a bad one. It is common to begin with plain DDP and go
over to local steps when gradients have calmed down.

    averager = PeriodicModelAverager(period=4, process_group=pg)
    for x, y in loader:
        with ddp.no_sync():                        # a local step
            loss(ddp(x), y).backward()
        optimizer.step()
        averager.average_parameters(model.parameters())

Rule.  All ranks call `average_parameters` after every step, with the same parameters.

        [Stich 2019, arXiv 1805.09767; post-local: Lin et al. 2020, arXiv 1808.07217]

In PyTorch: torch/distributed/algorithms/model_averaging/averagers.py and
ddp_comm_hooks/post_localSGD_hook.py.

Left out: averages within subgroups first; averages of momentum (SlowMo).
"""

from collections.abc import Iterable

import numpy as np

from minddp.autograd import Tensor
from minddp.buckets import Bucket
from minddp.comm_hooks import allreduce_hook
from minddp.device import Array
from minddp.errors import UsageError
from minddp.group import ProcessGroup
from minddp.work import After, Work


class PeriodicModelAverager:
    """Averages parameters over all ranks in one step, and then in every period-th.

    warmup_steps: how many steps to leave out at the start, because DDP averages there.
    """

    def __init__(
        self, period: int, warmup_steps: int = 0, *, process_group: ProcessGroup
    ):
        if period < 1 or warmup_steps < 0:
            raise UsageError(
                f"PeriodicModelAverager(period={period}, warmup_steps={warmup_steps}): "
                "a period is 1 or more, a number of steps 0 or more"
            )
        self.period, self.warmup_steps = period, warmup_steps
        self.process_group, self.step = process_group, 0

    def average_parameters(self, parameters: Iterable[Tensor]) -> None:
        """After each step of the optimizer. Raises: PeerError."""
        local = self.step - self.warmup_steps
        self.step += 1
        if local >= 0 and local % self.period == 0:
            average_parameters(parameters, self.process_group)


def average_parameters(parameters: Iterable[Tensor], pg: ProcessGroup) -> None:
    """Every parameter becomes its mean over all ranks; one all-reduce for each dtype.

    Raises: PeerError.
    """
    by_dtype: dict[str, list[Array]] = {}
    for p in parameters:
        by_dtype.setdefault(str(p.dtype), []).append(p.data)
    for arrays in by_dtype.values():
        flat = np.concatenate([x.ravel() for x in arrays])
        pg.all_reduce(flat, "avg")
        ends = np.cumsum([x.size for x in arrays])
        for x, part in zip(arrays, np.split(flat, ends[:-1]), strict=True):
            x[...] = part.reshape(x.shape)


class PostLocalSGDState:
    """Plain averages up to step `start_localSGD_iter`, none from then on."""

    def __init__(
        self,
        process_group: ProcessGroup,
        start_localSGD_iter: int,
    ):
        self.process_group, self.start = process_group, start_localSGD_iter
        self.iteration = 0


def post_localSGD_hook(state: PostLocalSGDState, bucket: Bucket) -> Work | After:
    """DDP at first, local steps later: a hook for DDP(..., check_sync_every=0).

    The replicas differ from then on, which the check would report.
    """
    state.iteration += bucket.index == 0
    if state.iteration <= state.start:
        return allreduce_hook(state.process_group, bucket)
    return After(None, lambda: None)
