"""Payload: which arrays may go into a collective, and what they are on the wire.

What can be reduced:

                             sum  prod   avg   min  max
    float16, 32, 64          yes  yes    yes   yes  yes    float16 adds in float16
    int8 to int64, uint8     yes  yes     -    yes  yes    overflow wraps, as in NumPy
    bool                      -    -      -    yes  yes    min is "and", max is "or"
    bfloat16 (bfloat16.py)   yes   -      -     -    -     adds in float32, and rounds

Worked example.  `all_reduce(x.T)` of a float32 matrix: its memory is not one row, so
`native_flat` makes a copy that is, the ring reduces the copy, and `bring_home` writes
it into `x.T`. Of a contiguous little-endian array it is a view, and nothing is copied.

Rule.  What is refused is refused before anything is sent or written, by a UsageError
that names op, dtype and what would do.

In PyTorch: the checks at the top of each function of distributed_c10d.py.

Left out: complex numbers; dates.
"""

import operator
from functools import lru_cache
from typing import Any

import numpy as np

from minddp.bfloat16 import BFLOAT16
from minddp.errors import UsageError
from minddp.frame import DTYPES, REDUCTIONS
from minddp.net import LONGEST_SECONDS

Array = np.ndarray[Any, Any]


def positive_seconds(name: str, value: float) -> float:
    """`value` as a float. Raises: UsageError."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not seconds > 0:
        raise UsageError(f"{name} must be a positive number of seconds, not {value!r}")
    return min(seconds, LONGEST_SECONDS)


def whole(what: str, value: int, low: int, high: int) -> int:
    """`value` as an int from low to high. Raises: UsageError."""
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if not low <= number <= high:
        raise UsageError(f"{what} {value!r}: it is a whole number from {low} to {high}")
    return number


def check_array(op: str, array: Array, writes: bool = True) -> None:
    """Raises: UsageError if this array cannot go through a collective."""
    if not isinstance(array, np.ndarray) or hasattr(array, "mask"):
        raise UsageError(
            f"{op} takes a NumPy array, not {type(array).__module__}."
            f"{type(array).__name__}: it is changed in place, on the host"
        )
    name = wire_name(array.dtype)
    if name not in DTYPES[1:]:
        raise UsageError(f"{op} of {name}: it can move {', '.join(DTYPES[1:])}")
    if writes and not array.flags.writeable:
        raise UsageError(f"{op} changes the array in place, but this one is read-only")


def check_reduction(op: str, array: Array, reduce: str) -> None:
    """Raises: UsageError if this array cannot be reduced in this way."""
    check_array(op, array)
    if reduce not in REDUCTIONS[1:]:
        raise UsageError(f"{op} by {reduce!r}: it can be {', '.join(REDUCTIONS[1:])}")
    name, kind = wire_name(array.dtype), array.dtype.kind
    if (
        (kind == "b" and reduce not in ("min", "max"))
        or (kind in "iu" and reduce == "avg")
        or (name == "bfloat16" and reduce != "sum")
    ):
        hint = "min or max" if kind == "b" else "sum, and divide as you see fit"
        raise UsageError(f"{op} of {name} by {reduce!r} has no meaning; use {hint}")


@lru_cache(maxsize=64)  # NumPy works a dtype's name out anew each time it is asked
def wire_name(dtype: Any) -> str:
    """A dtype's name in the table of frame.py, if it is there."""
    return "bfloat16" if dtype == BFLOAT16 else str(dtype.name)


def native_flat(array: Array) -> Array:
    """`array` as one row of little-endian memory: a view if it is that already."""
    little_endian = array.dtype.newbyteorder("<")
    return np.ascontiguousarray(array, dtype=little_endian).reshape(-1)


def bring_home(flat: Array, array: Array) -> None:
    """Write a result into the caller's array, if `flat` was a copy of it."""
    if not np.may_share_memory(flat, array):
        array[...] = flat.reshape(array.shape)
