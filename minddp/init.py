"""How parameters start: numbers written into them, in place, before training.

    nn.init.xavier_uniform_(layer.weight)      fills it, and returns it
    nn.init.zeros_(layer.bias)

    constant_  zeros_  ones_             one number
    uniform_  normal_  trunc_normal_     drawn, with a scale that you give
    xavier_*  kaiming_*                  drawn, with a scale that follows from the shape
    orthogonal_                          rows (or columns) at right angles

Why a scale?  y = W x adds fan_in products, so with weights of variance s^2

    var(y) = fan_in s^2 var(x)                      forward, from layer to layer
    var(gx) = fan_out s^2 var(gy)                   backward

and after 20 layers of factor 2 the numbers are a million times as large. kaiming makes
the factor 1 in one direction, s = gain / sqrt(fan_in); xavier is between the two, s =
gain sqrt(2 / (fan_in + fan_out)). `gain` makes up for the activation: relu zeroes half
of the numbers, which costs a factor 2 in variance, so its gain is sqrt(2).

    weight                    fan_in                     fan_out
    (out, in)                 in                         out
    (out, in, kh, kw)         in kh kw                   out kh kw

Rule.  Numbers are drawn on the host, from the stream that `manual_seed` seeds, in
float64. Ranks with one seed start from the same weights. DDP does not rely on it: it
sends rank 0's.

Worked example.  A weight (128, 64) before a relu: kaiming_normal_(w,
nonlinearity="relu") draws with standard deviation sqrt(2) / sqrt(64) = 0.177.

In PyTorch: torch/nn/init.py.      [Glorot & Bengio 2010; He et al. 2015; Saxe et al.
2014]

Left out: `generator=`; eye_, dirac_ and sparse_.
"""

import math
from statistics import NormalDist
from typing import Any

import numpy as np

from minddp.autograd import Tensor, note_write
from minddp.device import generator
from minddp.errors import UsageError


def _fill(tensor: Tensor, values: Any) -> Tensor:
    """Write the values, a number or a host array, into the tensor; nothing records."""
    tensor.data[...] = tensor.device.put(np.asarray(values))
    note_write(tensor.data)
    return tensor


# ---- One number ----


def constant_(tensor: Tensor, val: float) -> Tensor:
    """val everywhere."""
    return _fill(tensor, val)


def zeros_(tensor: Tensor) -> Tensor:
    """0 everywhere."""
    return _fill(tensor, 0)


def ones_(tensor: Tensor) -> Tensor:
    """1 everywhere."""
    return _fill(tensor, 1)


# ---- Drawn ----


def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0) -> Tensor:
    """Uniform between a and b."""
    if not a <= b:
        raise UsageError(f"uniform_: nothing lies between {a} and {b}")
    return _fill(tensor, generator().uniform(a, b, tensor.shape))


def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Normal."""
    if not std >= 0:
        raise UsageError(f"normal_: std must be 0 or more, not {std}")
    return _fill(tensor, generator().normal(mean, std, tensor.shape))


def trunc_normal_(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0
) -> Tensor:
    """Normal, but what falls outside of [a, b] is drawn again.

    Raises UsageError if less than 1 % would fall inside.
    """
    normal = NormalDist(mean, std) if std > 0 else None
    if normal is None or not normal.cdf(b) - normal.cdf(a) > 0.01:
        raise UsageError(
            f"trunc_normal_: of normal numbers with mean {mean} and std {std}, less "
            f"than 1 % lie in [{a}, {b}]"
        )
    x = np.asarray(generator().normal(mean, std, tensor.shape))
    while (outside := (x < a) | (x > b)).any():
        x[outside] = generator().normal(mean, std, int(outside.sum()))
    return _fill(tensor, x)


# ---- With the scale that the shape asks for ----


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """By how much to scale weights before this activation.

    param: the slope of leaky_relu for negative numbers, 0.01 unless given.
    """
    if nonlinearity == "leaky_relu":
        return math.sqrt(2 / (1 + (0.01 if param is None else param) ** 2))
    if nonlinearity not in _GAINS:
        known = ", ".join([*_GAINS, "leaky_relu"])
        raise UsageError(f"calculate_gain: {nonlinearity!r} is none of {known}")
    return _GAINS[nonlinearity]


_GAINS = {
    "linear": 1.0,
    "conv1d": 1.0,
    "conv2d": 1.0,
    "conv3d": 1.0,
    "sigmoid": 1.0,
    "tanh": 5 / 3,
    "relu": math.sqrt(2),
    "selu": 3 / 4,
}


def xavier_uniform_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """Uniform, variance gain^2 2 / (fan_in + fan_out)."""
    return _uniform_of_std(tensor, gain * _xavier("xavier_uniform_", tensor))


def xavier_normal_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """Normal, variance gain^2 2 / (fan_in + fan_out)."""
    return normal_(tensor, 0.0, gain * _xavier("xavier_normal_", tensor))


def kaiming_uniform_(
    tensor: Tensor,
    a: float = 0.0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
) -> Tensor:
    """Uniform, variance gain^2 / fan. mode: "fan_in" or "fan_out"; a: as for the gain.

    With a = sqrt(5), as nn.Linear has it in PyTorch, between -k and k, k = 1 /
    sqrt(fan_in).
    """
    fan = _fan("kaiming_uniform_", tensor, mode)
    return _uniform_of_std(tensor, calculate_gain(nonlinearity, a) / fan**0.5)


def kaiming_normal_(
    tensor: Tensor,
    a: float = 0.0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
) -> Tensor:
    """Normal, variance gain^2 / fan; arguments as for kaiming_uniform_."""
    fan = _fan("kaiming_normal_", tensor, mode)
    return normal_(tensor, 0.0, calculate_gain(nonlinearity, a) / fan**0.5)


def _uniform_of_std(tensor: Tensor, std: float) -> Tensor:
    """Uniform in (-k, k): that has variance k^2 / 3."""
    k = math.sqrt(3) * std
    return uniform_(tensor, -k, k)


def _xavier(name: str, tensor: Tensor) -> float:
    return math.sqrt(2 / sum(_fans(name, tensor)))


def _fan(name: str, tensor: Tensor, mode: str) -> int:
    if mode not in ("fan_in", "fan_out"):
        raise UsageError(f"{name}: mode is 'fan_in' or 'fan_out', not {mode!r}")
    return _fans(name, tensor)[mode == "fan_out"]


def _fans(name: str, tensor: Tensor) -> tuple[int, int]:
    """(fan_in, fan_out)."""
    if tensor.ndim < 2 or tensor.numel() == 0:
        raise UsageError(
            f"{name}: the scale follows from a weight (out, in, ...), and this tensor "
            f"is {tensor.shape}"
        )
    outputs, inputs, *window = tensor.shape
    return inputs * math.prod(window), outputs * math.prod(window)


def orthogonal_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """gain times a matrix (shape[0], all the rest) with orthonormal rows or columns.

    Rows if they are no more than the columns: it then keeps the length of gy W, else
    that of W x. All such matrices are equally probable. LAPACK computes it, so unlike
    machines may differ in the last bits.
    """
    if tensor.ndim < 2:
        raise UsageError(f"orthogonal_: a matrix or more, not {tensor.shape}")
    if not tensor.numel():
        return tensor
    rows = tensor.shape[0]
    columns = tensor.numel() // rows
    tall = generator().standard_normal((max(rows, columns), min(rows, columns)))
    q, r = np.linalg.qr(tall)
    q *= np.where(np.diag(r) < 0, -1.0, 1.0)  # without it, LAPACK chooses the signs
    matrix = q if rows >= columns else q.T
    return _fill(tensor, gain * matrix.reshape(tensor.shape))
