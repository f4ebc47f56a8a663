"""SyncBatchNorm: batch normalization over the batches of all ranks together.

    rank 0   x (4, C)  --> 4, mean, M2  --.              .--> xhat, y (4, C)
                                          |-- 10, mean, M2
    rank 1   x (6, C)  --> 6, mean, M2  --'              '--> xhat, y (6, C)

                      M2 = sum of (x - mean)^2, the variance times the count

Why.  A batch norm looks at all examples of its batch. Under DDP each rank would look at
its own only, and n ranks with B examples each would train another model than one
process with n B. With small B the means are noise.

Forward.  One all-gather: count, mean and M2 of each rank. All ranks put them together,
from the same bits in the same order, so running statistics stay equal:

    mean = sum of count_r mean_r / count
    M2   = sum of M2_r + count_r (mean_r - mean)^2            [Chan et al. 1979]

Why not all-reduce the sums of x and x^2? The variance would be the difference of two
large numbers. With a mean of 1e6 and a variance of 1, x^2 is 1e12: of the 16 digits of
a float64, 4 would remain.

Backward.  x moves the mean of all ranks, so gx needs all gy: one all-reduce of the sums
of gy and gy xhat. The gradients of weight and bias are the sums over this rank alone,
for DDP averages them like all others. gx is then the gradient of the *sum* of all
ranks' losses; what DDP does behind it, dividing by n, makes it that of their mean.

Worked example: x is [1, 3] on rank 0 and [8] on rank 1.

    rank        count  mean  M2
    0           2      2     2
    1           1      8     0
    together    3      4     2 + 2 (2 - 4)^2 + 0 + 1 (8 - 4)^2 = 26, as of [1, 3, 8]

Rule.  Every rank runs the same SyncBatchNorms in the same order, forward and backward,
if only on an empty batch: each is a collective. They may be mixed with DDP's buckets:
both are submitted by the thread that runs backward, in an order that its graph decides.

Cost.  2 C + 1 numbers a rank forward and 2 C backward, as float64, and the wait: for
the slowest rank, and in backward for the buckets that are under way.

In PyTorch: `torch.nn.SyncBatchNorm` (torch/nn/modules/_functions.py), where forward too
is an all-gather and backward an all-reduce.

Left out: ranks that use different layers or make different numbers of steps, which is a
PeerMismatch; overlap of the messages with computing.
"""

from typing import Any

import numpy as np

from minddp.device import Array, array_module, to_host
from minddp.distributed import default_group
from minddp.group import ProcessGroup
from minddp.nn import BatchNorm, Module


class RankPool:
    """The `pool` of a neural_ops.BatchNorm whose batch lies on all ranks."""

    def __init__(self, process_group: ProcessGroup):
        self.process_group = process_group

    def moments(
        self, count: int, mean: Array, squares: Array
    ) -> tuple[int, Array, Array]:
        """Count, mean and M2 of all ranks from those of this one; mean, M2: (C,)."""
        row = np.concatenate([[count], to_host(mean), to_host(squares)])
        table, channels = self.process_group.all_gather_rows(row), len(mean)
        counts, means, squares_of = np.split(table, [1, 1 + channels], axis=1)
        total = int(counts.sum())
        together = (counts * means).sum(axis=0) / max(total, 1)
        moved = counts * (means - together) ** 2
        put = array_module(mean).asarray
        return total, put(together), put((squares_of + moved).sum(axis=0))

    def sums(self, *sums: Array) -> Array:
        """The sums over all ranks, stacked; each (C,), float64."""
        xp = array_module(sums[0])
        stacked = to_host(xp.stack(sums))
        self.process_group.all_reduce(stacked)
        return xp.asarray(stacked)


class SyncBatchNorm(BatchNorm):
    """nn.BatchNorm of (N, C, ...) over the batches of all ranks in process_group.

    N and what follows C may differ from rank to rank; N may be 0. Together the ranks
    need 2 values per channel. Evaluation does not communicate. process_group: that of
    distributed.py unless given.

    Raises: as nn.BatchNorm; PeerError.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: ProcessGroup | None = None,
        dtype: Any = "float32",
    ):
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, dtype
        )
        self.process_group = process_group

    @property
    def pool(self) -> RankPool:
        return RankPool(self.process_group or default_group())

    @classmethod
    def convert_sync_batchnorm(
        cls, module: Module, process_group: ProcessGroup | None = None
    ) -> Module:
        """`module` with a SyncBatchNorm in place of every BatchNorm.

        They take over the parameters and buffers themselves, so an optimizer that holds
        them stays right. Convert before wrapping in DDP. Returns the module, which is
        another one only if it is a BatchNorm itself.
        """
        return _converted(module, process_group, {})


def _converted(
    module: Module, process_group: ProcessGroup | None, done: dict[Module, Module]
) -> Module:
    """The module converted; `done`: what already is, as a module may have two names."""
    if module not in done:
        done[module] = module
        if isinstance(module, BatchNorm):
            done[module] = sync = SyncBatchNorm.__new__(SyncBatchNorm)
            vars(sync).update(vars(module), process_group=process_group)
        for name, child in list(module.named_children()):
            vars(module)[name] = _converted(child, process_group, done)
    return done[module]
