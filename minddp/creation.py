"""Tensors from nothing, under the names they have in `torch`.

    zeros(2, 3)      zeros((2, 3))      one shape, written either way

    one value        shape like x       counted             drawn
    zeros  ones      zeros_like(x)      arange  linspace    rand  randn
    full   empty     ones_like(x)       eye                 randint  randperm

and `tensor(data)`, which copies, next to `from_numpy(array)`, which shares.

The functions here make arrays. What makes them a Tensor adds two keywords to each:

    requires_grad    whether ops on the tensor are recorded; False unless given
    device           "cpu", "cuda", "cuda:1"; None for the host, or where x is

`dtype` is a NumPy dtype or its name, or None for the usual one.

Rule.  The usual dtype is int64 for whole numbers, bool for truth, float32 for all else.
An array keeps its own.

Worked example.  `tensor([1, 2])` and `arange(3)` are int64, `tensor([1., 2.])` and
`arange(0, 1, 0.5)` are float32, `full((2,), True)` is bool.

Invariants.
1.  Numbers are drawn on the host and then moved: one seed gives one set of numbers on
    every device.
2.  A bad size, range or dtype is a UsageError that shows the call.

In PyTorch: the "creation ops" and "random sampling" of `torch`.

Left out:
- layout and memory_format, which have no meaning here;
- `generator=`: there is one stream per thread, see `manual_seed`.
"""

import reprlib
from collections.abc import Callable
from functools import wraps
from operator import index
from typing import Any

import numpy as np

from minddp.autograd import Tensor, as_tensor
from minddp.device import Array, Device, array_module, generator
from minddp.errors import UsageError

float16, float32, float64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")
uint8, int32, int64 = np.dtype("u1"), np.dtype("i4"), np.dtype("i8")
half, double, long = float16, float64, int64


def _creates(make: Callable[..., Array]) -> Callable[..., Tensor]:
    """`make`, which returns an array, as a function that returns a Tensor."""

    @wraps(make)
    def create(
        *args: Any, requires_grad: bool = False, device: Any = None, **kwargs: Any
    ) -> Tensor:
        try:
            x = Tensor(make(*args, **kwargs), requires_grad)
        except (ValueError, TypeError, ArithmeticError) as exc:
            call = [reprlib.repr(arg) for arg in args]
            call += [f"{name}={reprlib.repr(arg)}" for name, arg in kwargs.items()]
            raise UsageError(f"{make.__name__}({', '.join(call)}): {exc}") from exc
        return (
            x if device is None else Tensor(Device(device).put(x.data), requires_grad)
        )

    return create


def _size(size: Any) -> tuple[int, ...]:
    """(2, 3) from the arguments (2, 3) as well as from ((2, 3),)."""
    if len(size) == 1 and isinstance(size[0], tuple | list):
        (size,) = size
    lengths = tuple([index(n) for n in size])
    if min(lengths, default=0) < 0:
        raise ValueError("a length is 0 or more")
    return lengths


def _floating(dtype: Any) -> Any:
    dtype = np.dtype(dtype or float32)
    if dtype.kind != "f":
        raise TypeError(f"{dtype} has no fractions. Use a floating dtype.")
    return dtype


# ---- From data ----


@_creates
def tensor(data: Any, *, dtype: Any = None) -> Array:
    """A copy of data: of a number, nested lists, an array or a Tensor."""
    x = Tensor(data, dtype=dtype).data
    return array_module(x).array(x)


@_creates
def from_numpy(array: Array) -> Array:
    """A Tensor in the memory of this NumPy array: to write to one changes both."""
    if not isinstance(array, np.ndarray):
        raise TypeError("this is no NumPy array. Use tensor(), which copies.")
    return array


# ---- One value ----


@_creates
def zeros(*size: Any, dtype: Any = None) -> Array:
    """0 everywhere: zeros(2, 3) or zeros((2, 3)); zeros() has one element, no axis."""
    return np.zeros(_size(size), dtype or float32)


@_creates
def ones(*size: Any, dtype: Any = None) -> Array:
    """1 everywhere; sizes as for zeros."""
    return np.ones(_size(size), dtype or float32)


@_creates
def empty(*size: Any, dtype: Any = None) -> Array:
    """Whatever was in memory: to be written before it is read."""
    return np.empty(_size(size), dtype or float32)


@_creates
def full(size: Any, fill_value: Any, *, dtype: Any = None) -> Array:
    """One number everywhere; it decides on the dtype: full((2,), 1) is int64."""
    return np.full(_size((size,)), Tensor(fill_value, dtype=dtype).data)


@_creates
def zeros_like(x: Any, *, dtype: Any = None) -> Array:
    """Of the shape of x, and of its dtype and on its device unless others are given."""
    x = as_tensor(x)
    return x.device.put(np.zeros(x.shape, dtype or x.dtype))


@_creates
def ones_like(x: Any, *, dtype: Any = None) -> Array:
    """Of the shape of x, and of its dtype and on its device unless others are given."""
    x = as_tensor(x)
    return x.device.put(np.ones(x.shape, dtype or x.dtype))


# ---- Counted ----


@_creates
def arange(start: Any, end: Any = None, step: Any = 1, *, dtype: Any = None) -> Array:
    """start, start + step, ... before end; arange(n) is 0, ..., n - 1."""
    if end is None:
        start, end = 0, start
    x = np.arange(start, end, step)
    return x.astype(dtype or (float32 if x.dtype.kind == "f" else int64))


@_creates
def linspace(start: Any, end: Any, steps: int, *, dtype: Any = None) -> Array:
    """`steps` numbers at equal distances, of which the last is end itself."""
    return np.linspace(start, end, steps).astype(dtype or float32)


@_creates
def eye(n: int, m: int | None = None, *, dtype: Any = None) -> Array:
    """(n, m), with ones on the diagonal and zeros elsewhere; m is n unless given."""
    return np.eye(*_size((n, n if m is None else m)), dtype=dtype or float32)


# ---- Drawn ----


@_creates
def rand(*size: Any, dtype: Any = None) -> Array:
    """Uniform in [0, 1): multiples of 2^-24 in float32, of 2^-53 in float64.

    To draw a float64 and round it would now and then give 1.
    """
    dtype = _floating(dtype)
    values = 2 ** (np.finfo(dtype).nmant + 1)
    return (generator().integers(0, values, _size(size)) / values).astype(dtype)


@_creates
def randn(*size: Any, dtype: Any = None) -> Array:
    """Normal, mean 0, variance 1."""
    return np.asarray(generator().standard_normal(_size(size)), _floating(dtype))


@_creates
def randint(
    low: int = 0, high: Any = None, size: Any = None, *, dtype: Any = None
) -> Array:
    """Whole numbers from low to high - 1: randint(low, high, size).

    Or from 0, as randint(high, size).
    """
    if size is None:
        low, high, size = 0, low, high
    elif high is None:
        low, high = 0, low
    limits = index(low), index(high)
    return generator().integers(*limits, _size((size,)), dtype or int64)


@_creates
def randperm(n: int, *, dtype: Any = None) -> Array:
    """0, ..., n - 1 in random order."""
    return generator().permutation(*_size((n,))).astype(dtype or int64)
