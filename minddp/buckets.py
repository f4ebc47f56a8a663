"""Buckets: gradients that travel together, as one flat array.

    parameters, in order of definition       0.weight   0.bias   2.weight   2.bias
    backward makes gradients in the reverse       3         2         1         0
    buckets fill in that order               [ 2.bias 2.weight 0.bias ] [ 0.weight ]
                                               bucket 0, sent first       bucket 1

    bucket 0    flat   | 2.bias | 2.weight | 0.bias |      one all-reduce
                           ^         ^          ^
                        views: each is the `grad` of its parameter

Why buckets?  A message costs latency, whatever its size. A bias of 10 numbers would
cost as many ring steps as a matrix of a million.

Why not one?  It could not leave before the last gradient is there. A small first bucket
leaves early, so the network has work while backward still computes.

Rule 1.  The plan depends on sizes, dtypes, their order and the caps, which are the same
         on all ranks. So is the plan.
Rule 2.  A bucket closes *after* it has reached its cap: it may overshoot. A parameter
         that is larger than the cap closes the bucket that it falls into.
Rule 3.  One dtype a bucket, as a flat array has one, and one kind of device: gradients
         on a GPU have a flat array there.

Worked example.  Sizes 4, 4, 2, 9 in the order in which gradients come, first cap 3, cap
6:

    [4] closes at once (4 >= 3)    [4, 2] closes (6 >= 6)    [9] closes

In PyTorch: `compute_bucket_assignment_by_size` (reducer.cpp); first bucket 1 MiB, then
25 MiB.

Left out: a cap on the number of buckets; sparse gradients, which PyTorch gives their
own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from minddp.autograd import Tensor
from minddp.device import Array
from minddp.nn import Parameter
from minddp.work import After, Work

MIB = 1 << 20
FIRST_BUCKET_BYTES = 1 * MIB  # PyTorch's kDefaultFirstBucketBytes
BUCKET_CAP_MB = 25.0  # PyTorch's default `bucket_cap_mb`, in MiB


@dataclass(frozen=True)
class Size:
    """What a plan needs to know of a parameter."""

    nbytes: int
    dtype: str  # and where it is, if that differs from one to the other


def plan(
    sizes: Sequence[Size], order: Sequence[int], first_bytes: int, cap_bytes: int
) -> list[list[int]]:
    """The numbers of the parameters in each bucket.

    order: the numbers of all parameters, as their gradients are expected to arrive.
    """
    buckets: list[list[int]] = []
    filling: dict[str, list[int]] = {}  # dtype -> the bucket that is not full yet
    cap = {size.dtype: first_bytes for size in sizes}
    for i in order:
        dtype = sizes[i].dtype
        filling.setdefault(dtype, []).append(i)
        if sum(sizes[k].nbytes for k in filling[dtype]) >= cap[dtype]:
            buckets.append(filling.pop(dtype))
            cap[dtype] = cap_bytes
    return buckets + list(filling.values())


class Bucket:
    """Parameters whose gradients are views into one flat array, made by `zeros`.

    In PyTorch: `Reducer::Bucket`.
    """

    def __init__(
        self,
        index: int,
        parameters: Sequence[Parameter],
        as_view: bool = True,
        zeros: Callable[..., Array] = np.zeros,
    ):
        self.index, self.as_view = index, as_view
        self.parameters = list(parameters)
        sizes = [p.data.size for p in parameters]
        ends = np.cumsum([0, *sizes]).tolist()
        first = parameters[0]
        self.flat: Array = zeros(ends[-1], first.dtype, like=first.data)
        self.views: list[Array] = [
            self.flat[start:end].reshape(p.shape)
            for p, start, end in zip(parameters, ends, ends[1:], strict=False)
        ]
        self.expect()

    def expect(self) -> None:
        """Before a backward: no gradient has come, nothing has been sent."""
        self.ready = [False] * len(self.parameters)
        self.missing = len(self.parameters)
        self.work: Work | After | None = None

    def take(self, slot: int, scale: float = 1.0) -> None:
        """Parameter `slot` is ready: its gradient, or zeros, is in the flat array.

        Whatever array backward has left in `grad`, from now on it is the view (or, not
        as_view, it stays, and `give` writes the average into it). `scale`:
        what this rank counts for, in units of an average rank (join.py).
        """
        p, view = self.parameters[slot], self.views[slot]
        if p.grad is None:
            view[...] = 0
        elif p.grad.data is not view:
            view[...] = p.grad.data
            if self.as_view:
                p.grad = Tensor(view)
        if scale == 0:
            view[...] = 0  # a mean over no examples may be infinite, and 0 * inf is NaN
        elif scale != 1:
            view *= view.dtype.type(scale)
        self.missing -= not self.ready[slot]
        self.ready[slot] = True

    def give(self, slot: int) -> None:
        """The parameter's gradient becomes what is in the flat array: view or copy."""
        p, view = self.parameters[slot], self.views[slot]
        if self.as_view:
            p.grad = Tensor(view)
        elif p.grad is None:
            p.grad = Tensor(view.copy())
        else:
            p.grad.data[...] = view

    @property
    def full(self) -> bool:
        return self.missing == 0
