"""bfloat16: the upper half of a float32, which NumPy does not have as a dtype.

    float32     s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm
    bfloat16    s eeeeeeee mmmmmmm                     same range, 2 to 3 digits
    float16     s eeeee mmmmmmmmmm                     up to 65,504, 3 to 4 digits

Here it is the dtype BFLOAT16, which keeps the 16 bits and has a name for the wire, and
three functions. The ring adds in float32 and rounds every partial sum.

Worked example.  1 + 1/256 lies half-way between 1 and 1 + 1/128: it goes to 1, whose
last bit is 0 (round half to even). 3e38 stays finite, where float16 has infinity.

In PyTorch: `torch.bfloat16`; c10/util/BFloat16.h.

Left out: arithmetic but the sum.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# A field's name makes it another dtype than plain 16-bit integers.
BFLOAT16 = np.dtype([("bfloat16", "<u2")])


def to_bfloat16(x: Array) -> Array:
    """x rounded to the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    last_kept = (bits >> 16) & 1
    upper = ((bits + 0x7FFF + last_kept) >> 16).astype("<u2")
    upper[np.isnan(x)] = 0x7FC0  # else the rounding could carry it over to infinity
    return upper.view(BFLOAT16)


def from_bfloat16(x: Array) -> Array:
    """x as float32, exactly."""
    return (x["bfloat16"].astype(np.uint32) << 16).view(np.float32)


def add_bfloat16(a: Array, b: Array, out: Array) -> Array:
    """a + b, rounded, into `out`."""
    out[...] = to_bfloat16(from_bfloat16(a) + from_bfloat16(b))
    return out
