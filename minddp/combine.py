"""How arrays are added: which function, in which order, in how large pieces.

    combine([a, b, c], [x, y], call)     x and y become a + b + c, in this order

                blocks       a     b     c
    128 KiB    |---0---|     a0 +  b0 -> scratch,  scratch + c0 -> x0,  copied to y0
               |---1---|     a1 +  b1 -> ...

Rule.  Adding is bound by memory, not by arithmetic. So whatever is added is used while
it is in the cache: copied, divided, and only then is the next block begun.

An average is a sum and one division by n, by whoever completes a chunk: one pass over
1/n of the array.

In PyTorch: gloo/math.h; NCCL's device/reduce_kernel.h.

Left out: summation in higher precision (but see bfloat16.py), compensated summation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minddp.bfloat16 import add_bfloat16
from minddp.frame import Header

Array = np.ndarray[Any, Any]

BLOCK_BYTES = 128 * 1024  # added at a time, so that it is copied from the L2 cache

COMBINE: dict[str, Callable[..., Array]] = {
    "sum": np.add,
    "avg": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
}


def combiner(call: Header) -> Callable[..., Array]:
    """How this call combines two arrays: f(a, b, out=b)."""
    return add_bfloat16 if call.dtype == "bfloat16" else COMBINE[call.reduce]


def combine(arrays: Sequence[Array], results: Sequence[Array], call: Header) -> None:
    """All results become a0 + a1 + ..., in this order, or whatever the call says.

    A result may be one of the arrays.
    """
    add, step = combiner(call), BLOCK_BYTES // arrays[0].itemsize
    shortest = min(step, len(arrays[0])) if len(arrays) > 2 else 0
    scratch = np.empty(shortest, arrays[0].dtype)
    for start in range(0, len(arrays[0]), step):
        total, *rest = (x[start : start + step] for x in arrays)
        result, *copies = (x[start : start + step] for x in results)
        for x in rest[:-1]:
            total = add(total, x, out=scratch[: len(x)])
        add(total, rest[-1], out=result)
        if call.reduce == "avg":
            result /= len(arrays)
        for copy in copies:
            copy[...] = result


def hand_out(sums: Array, copies: Sequence[Array], divisor: int) -> None:
    """Divide what is summed, and copy it; in blocks, which are copied from cache."""
    step = BLOCK_BYTES // sums.itemsize
    for start in range(0, len(sums), step):
        block = sums[start : start + step]
        if divisor > 1:
            block /= divisor
        for copy in copies:
            copy[start : start + step] = block
