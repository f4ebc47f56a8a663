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

Arrays on a GPU, which are CuPy's, go one of two ways:

    NCCL            array --native_flat--> row --lend----> OnGpu        bring_home
    other back ends array --native_flat--> row --staged--> on the host  bring_home

`lend` notes a moment: an event on the caller's stream, behind all that was asked of the
GPU so far. What NCCL does later, in another thread and on another stream, begins behind
it. `staged` waits for the GPU and copies. `bring_home` returns when the result is in
the caller's array, so that any stream may use it.

In PyTorch: the checks at the top of each function of distributed_c10d.py.

Left out: complex numbers; dates; page-locked memory to copy through, and copying while
the GPU computes.
"""

import operator
import sys
from dataclasses import dataclass
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
    if not is_array(array) or hasattr(array, "mask"):
        raise UsageError(
            f"{op} takes a NumPy array, not {type(array).__module__}."
            f"{type(array).__name__}: it is changed in place, on the host or, as an "
            "array of CuPy, on a GPU"
        )
    name = wire_name(array.dtype)
    if name not in DTYPES[1:]:
        raise UsageError(f"{op} of {name}: it can move {', '.join(DTYPES[1:])}")
    if writes and not getattr(array.flags, "writeable", True):  # CuPy has no such flag
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


# ---- Where an array is ----


def library_of(array: Any) -> Any:
    """The module whose array this is: cupy, or numpy for all else."""
    cupy = sys.modules.get("cupy")  # no array of its before it was imported
    return cupy if cupy is not None and isinstance(array, cupy.ndarray) else np


def on_gpu(array: Any) -> bool:
    """Whether it is an array of CuPy."""
    return library_of(array) is not np


def is_array(array: Any) -> bool:
    """Whether it is an array, of NumPy or CuPy."""
    return isinstance(array, library_of(array).ndarray)


def zeros_beside(array: Any, shape: Any, dtype: Any) -> Array:
    """Zeros where this array is: on the host, or on its GPU."""
    if on_gpu(array):
        with array.device:
            zeros: Array = library_of(array).zeros(shape, dtype)
            return zeros
    return np.zeros(shape, dtype)


# ---- To one row of memory, and home again ----


def native_flat(array: Any) -> Array:
    """`array` as one row of little-endian memory, where it is: a view if it is that
    already."""
    if on_gpu(array):
        with array.device:
            row: Array = library_of(array).ascontiguousarray(array).reshape(-1)
            return row
    little_endian = array.dtype.newbyteorder("<")
    return np.ascontiguousarray(array, dtype=little_endian).reshape(-1)


@dataclass(frozen=True, eq=False)
class OnGpu:
    """A row on a GPU, and the event behind which it holds what its caller has
    written."""

    row: Any
    written: Any


def lend(row: Any) -> OnGpu:
    """For whoever reads or writes it on another stream, in the thread that wrote it."""
    with row.device:
        written = library_of(row).cuda.Event(disable_timing=True)
        written.record()
    return OnGpu(row, written)


def staged(row: Any) -> Array:
    """A copy on the host, once the caller's stream has come so far."""
    with row.device:
        copy: Array = row.get()
    return copy.view(BFLOAT16) if wire_name(copy.dtype) == "bfloat16" else copy


def bring_home(flat: Any, array: Any) -> None:
    """Write a result into the caller's array, if `flat` was a copy of it.

    flat: what `native_flat`, `lend` or `staged` gave.
    """
    if isinstance(flat, OnGpu):
        flat = flat.row
    xp = library_of(array)
    if xp is np:
        if not np.may_share_memory(flat, array):
            array[...] = flat.reshape(array.shape)
        return
    with array.device:
        if library_of(flat) is np:
            array[...] = xp.asarray(flat.view(array.dtype)).reshape(array.shape)
        elif not xp.may_share_memory(flat, array):
            array[...] = flat.reshape(array.shape)
        else:
            return
        xp.cuda.get_current_stream().synchronize()  # this thread's, not the caller's
