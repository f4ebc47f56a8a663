"""Gradients that are infinite or NaN: found on all ranks, whichever has them.

    rank 0   gradients     fine           inf or nan in the average, on both ranks;
    rank 1   2.weight      nan            both are told: rank 1, 2.weight

One NaN on one rank is a NaN in the average, and after the optimizer's step in the
parameters of every replica: a night of training is lost. What to do about it is a
setting of DDP, the same on all ranks:

    nan="ignore"    nothing (the default, as in PyTorch)
    nan="raise"     NonFiniteError on all ranks, naming rank and parameter
    nan="skip"      no gradient at all, so that optimizers skip the step; rank 0 warns

Rule.  The decision is taken together. A rank that skipped a step alone would be another
model from then on. So after every backward each rank tells what it has found: before
its buckets left, or else in what came back (an overflow in a compressing hook).

Cost.  Two passes over the gradients and an all-gather of 16 bytes a rank.

In PyTorch: nothing for DDP; `GradScaler` skips a step by its own rank's gradients,
which DDP has made equal.

Left out: which example it was; the forward.
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from minddp.autograd import Tensor
from minddp.buckets import Bucket
from minddp.errors import NonFiniteError, UsageError
from minddp.group import ProcessGroup

log = logging.getLogger("minddp")

POLICIES = ("ignore", "raise", "skip")
NOWHERE, HERE, AVERAGE = 0, 1, 2  # where a rank has found one


class NonFiniteWatch:
    """Looks at every bucket before it leaves and after it has come back."""

    def __init__(self, policy: str, names: Sequence[str], process_group: ProcessGroup):
        if policy not in POLICIES:
            raise UsageError(f"nan={policy!r}: it can be {', '.join(POLICIES)}")
        self.skipped = 0  # steps
        self._policy, self._names, self._group = policy, names, process_group
        self._found = NOWHERE, 0

    def before(self, bucket: Bucket, number: Mapping[Tensor, int]) -> None:
        """This rank's own gradients, or sums of them, are about to leave."""
        if self._policy != "ignore":
            self._look(HERE, bucket, number)

    def after(self, buckets: Sequence[Bucket], number: Mapping[Tensor, int]) -> None:
        """The averages are there: decide, on all ranks alike.

        Raises: NonFiniteError.
        """
        if self._policy == "ignore":
            return
        for bucket in buckets:
            self._look(AVERAGE, bucket, number)
        found = self._group.all_gather_rows(self._found)
        self._found = NOWHERE, 0
        places = found[:, 0]
        if not places.any():
            return
        where = HERE if (places == HERE).any() else AVERAGE
        rank = int(np.flatnonzero(places == where)[0])
        text = f"the gradient of {self._names[found[rank, 1]]!r} is not finite "
        text += f"on rank {rank}" if where == HERE else "once it is averaged"
        if self._policy == "raise":
            raise NonFiniteError(f"{text}. The step was not taken.")
        self.skipped += 1
        if self._group.rank == 0:
            log.warning("all ranks skip a step: %s", text)
        for bucket in buckets:
            for p in bucket.parameters:
                p.grad = None

    def _look(self, where: int, bucket: Bucket, number: Mapping[Tensor, int]) -> None:
        if self._found[0] or np.isfinite(bucket.flat).all():
            return
        for p, view in zip(bucket.parameters, bucket.views, strict=True):
            if not np.isfinite(view).all():
                self._found = where, number[p]
                return
