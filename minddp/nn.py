"""Neural-network layers and losses, under PyTorch's names. (Networking is in net.py.)

    layer = nn.Linear(64, 128)      makes parameters, initialized as PyTorch documents
    layer(x)                        F.linear(x, layer.weight, layer.bias)

Rule.  A layer holds parameters and settings; what it computes is one function of
functional.py.

Invariant.  Parameters and buffers have the names, shapes and layouts that they have in
PyTorch, so a `state_dict` from there fits here.

In PyTorch: `torch.nn`. For clipping, `torch.nn.utils`.

Left out: lazy modules, which learn their shapes from the first input.
"""

from numbers import Real
from types import SimpleNamespace
from typing import Any

import numpy as np

from minddp import functional as F
from minddp.autograd import Tensor, as_tensor
from minddp.device import Array, array_module, generator
from minddp.errors import UsageError
from minddp.module import (
    Buffer,
    Module,
    ModuleDict,
    ModuleList,
    Parameter,
    Sequential,
)

__all__ = [
    "GELU",
    "BCEWithLogitsLoss",
    "BatchNorm",
    "BatchNorm1d",
    "BatchNorm2d",
    "Buffer",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "Flatten",
    "Identity",
    "Linear",
    "MSELoss",
    "Module",
    "ModuleDict",
    "ModuleList",
    "Parameter",
    "ReLU",
    "Sequential",
    "Sigmoid",
    "Tanh",
    "clip_grad_norm_",
    "clip_grad_value_",
    "utils",
]

# ---- Layers ----


class Linear(Module):
    """x @ weight.T + bias;  (..., in_features) -> (..., out_features).

    Weight (out_features, in_features) and bias start uniform in (-k, k), with
    k = 1 / sqrt(in_features): what torch's kaiming_uniform_(a=sqrt(5)) comes to.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: Any = "float32",
    ):
        k = 1 / max(in_features, 1) ** 0.5
        self.weight = Parameter(_uniform((out_features, in_features), k, dtype))
        self.bias = Parameter(_uniform((out_features,), k, dtype)) if bias else None

    def forward(self, x: Any) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        out_features, in_features = self.weight.shape
        return f"{in_features}, {out_features}, bias={self.bias is not None}"


def _uniform(shape: tuple[int, ...], k: float, dtype: Any) -> Array:
    return generator().uniform(-k, k, shape).astype(dtype)


class Embedding(Module):
    """Rows of a table, by integer;  (...) -> (..., embedding_dim).

    The table (num_embeddings, embedding_dim) starts standard normal.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, dtype: Any = "float32"):
        rows = generator().standard_normal((num_embeddings, embedding_dim))
        self.weight = Parameter(rows.astype(dtype))

    def forward(self, ids: Any) -> Tensor:
        return F.embedding(ids, self.weight)

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.weight.shape))


class Dropout(Module):
    """Zeroes elements with probability p while training, and is the identity else."""

    def __init__(self, p: float = 0.5):
        self.p = p

    def forward(self, x: Any) -> Tensor:
        return F.dropout(x, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class BatchNorm(Module):
    """Each channel with mean 0 and variance 1, times weight, plus bias; (N, C, ...).

                   training                         evaluation
        y          by mean and var of the batch     by running_mean, running_var
        running    r = (1 - m) r + m batch          stays

    m is `momentum`; None makes r the plain average over all batches. y takes the biased
    variance, running_var the unbiased one. Without affine there is no weight and no
    bias; without track_running_stats, evaluation also goes by the batch.

    The examples of a batch depend on each other: under DDP, n ranks with B examples
    each are not one process with n B (see SyncBatchNorm). Raises UsageError for another
    shape, and in training for less than 2 values per channel.
    """

    axes: tuple[int, ...] = ()  # how many the input may have; (): 2 or more
    pool: Any = None  # whose batch (tensor_ops.BatchNorm)

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        dtype: Any = "float32",
    ):
        ones, zeros = np.ones(num_features, dtype), np.zeros(num_features, dtype)
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.affine, self.track_running_stats = affine, track_running_stats
        self.weight = Parameter(ones) if affine else None
        self.bias = Parameter(zeros) if affine else None
        tracked = track_running_stats
        self.running_mean = Buffer(zeros.copy()) if tracked else None
        self.running_var = Buffer(ones.copy()) if tracked else None
        self.num_batches_tracked = Buffer(np.array(0)) if tracked else None

    def forward(self, x: Any) -> Tensor:
        x = as_tensor(x)
        self._check(x)
        count = self.num_batches_tracked if self.training else None
        momentum = self.momentum
        if momentum is None:
            momentum = 1 / (int(count) + 1) if count is not None else 0.0
        y = F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or self.running_mean is None,
            momentum,
            self.eps,
            pool=self.pool if self.training else None,
        )
        if count is not None:
            count.data[...] += 1
        return y

    def _check(self, x: Tensor) -> None:
        """Raises: UsageError unless the channels are on axis 1, and all of them."""
        if x.ndim in (self.axes or (x.ndim,)) and x.shape[1:2] == (self.num_features,):
            return
        more = ["" if n == 2 else ", L" if n == 3 else ", H, W" for n in self.axes]
        forms = " or ".join(f"(N, {self.num_features}{m})" for m in more or [", ..."])
        name = type(self).__name__
        raise UsageError(f"{name}: the input must be {forms}, not {x.shape}")

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, "
            f"affine={self.affine}, track_running_stats={self.track_running_stats}"
        )


class BatchNorm1d(BatchNorm):
    """BatchNorm of (N, C) or (N, C, L)."""

    axes = (2, 3)


class BatchNorm2d(BatchNorm):
    """BatchNorm of (N, C, H, W)."""

    axes = (4,)


class ReLU(Module):
    """max(x, 0)."""

    def forward(self, x: Any) -> Tensor:
        return F.relu(x)


class Tanh(Module):
    """tanh(x)."""

    def forward(self, x: Any) -> Tensor:
        return F.tanh(x)


class Sigmoid(Module):
    """1 / (1 + exp(-x))."""

    def forward(self, x: Any) -> Tensor:
        return F.sigmoid(x)


class GELU(Module):
    """x times the normal distribution function, in its tanh form."""

    def __init__(self, approximate: str = "tanh"):
        self.approximate = approximate

    def forward(self, x: Any) -> Tensor:
        return F.gelu(x, self.approximate)


class Flatten(Module):
    """All axes but the first (or from start_dim to end_dim) joined into one."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1):
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, x: Any) -> Tensor:
        return as_tensor(x).flatten(self.start_dim, self.end_dim)


class Identity(Module):
    """x."""

    def forward(self, x: Any) -> Any:
        return x


# ---- Losses ----


class CrossEntropyLoss(Module):
    """F.cross_entropy as a module."""

    def __init__(self, ignore_index: int = -100, reduction: str = "mean"):
        self.ignore_index, self.reduction = ignore_index, reduction

    def forward(self, logits: Any, target: Any) -> Tensor:
        return F.cross_entropy(logits, target, self.ignore_index, self.reduction)


class MSELoss(Module):
    """F.mse_loss as a module."""

    def __init__(self, reduction: str = "mean"):
        self.reduction = reduction

    def forward(self, x: Any, target: Any) -> Tensor:
        return F.mse_loss(x, target, self.reduction)


class BCEWithLogitsLoss(Module):
    """F.binary_cross_entropy_with_logits as a module."""

    def __init__(self, reduction: str = "mean"):
        self.reduction = reduction

    def forward(self, x: Any, target: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(x, target, self.reduction)


# ---- Gradients: cut between backward and step ----


def clip_grad_norm_(
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients, in place, so that together they are no longer than max_norm.

        norm = (sum |g_i|^p)^(1/p)        over all elements of all gradients
        g    = g min(1, max_norm / (norm + 1e-6))

    Returns the norm before, float64 without axes. It has the same bits on all ranks if
    the gradients have: clip after DDP has averaged them, which is when backward
    returns. norm_type: p > 0, or inf for the largest element.

    Raises UsageError for bad settings, or with error_if_nonfinite if the norm is
    infinite or NaN; nothing has been scaled then. Without, such a norm makes
    gradients 0 or NaN.
    """
    _check_limit("clip_grad_norm_", "max_norm", max_norm)
    if not norm_type > 0:
        raise UsageError(f"clip_grad_norm_: norm_type is > 0 or inf, not {norm_type}")
    grads = _gradients("clip_grad_norm_", parameters)
    norms = [_norm(g, norm_type) for g in grads]
    norm = _norm(np.array(norms), norm_type)
    if error_if_nonfinite and not np.isfinite(norm):
        raise UsageError(
            f"clip_grad_norm_: the norm of the gradients is {norm}, so they cannot be "
            "scaled to a finite one. Skip this step, or find the loss that overflowed."
        )
    scale = np.float64(max_norm / (norm + 1e-6))
    if not scale >= 1:  # also if it is NaN
        for g in grads:
            array_module(g).multiply(g, scale, out=g, casting="same_kind")
    return Tensor(np.array(norm))


def clip_grad_value_(parameters: Any, clip_value: float) -> None:
    """Cut all elements of all gradients, in place, to -clip_value ... clip_value."""
    _check_limit("clip_grad_value_", "clip_value", clip_value)
    for g in _gradients("clip_grad_value_", parameters):
        array_module(g).clip(g, -clip_value, clip_value, out=g)


def _norm(x: Array, p: float) -> float:
    """(sum |x|^p)^(1/p), in float64: in float16 the square of 300 is infinite.

    By sums, not by dot products: their order of addition depends on the processor and
    its threads, and ranks on unlike machines would scale differently.
    """
    x = abs(x.astype("float64"))
    if p == np.inf:
        return float(x.max()) if x.size else 0.0
    return float((x**p).sum() ** (1 / p))


def _gradients(caller: str, parameters: Any) -> list[Array]:
    """The arrays of those that have a gradient; one parameter may come without list."""
    if isinstance(parameters, set | frozenset):
        raise UsageError(
            f"{caller}: give the parameters as a list, not as a set, whose order "
            "differs from rank to rank, and with it the last bits of the norm"
        )
    listed = [parameters] if isinstance(parameters, Tensor) else parameters
    return [p.grad.data for p in listed if p.grad is not None]


def _check_limit(caller: str, name: str, limit: Any) -> None:
    if not isinstance(limit, Real) or not float(limit) >= 0:
        raise UsageError(f"{caller}: {name} must be 0 or more, not {limit!r}")


# `nn.utils.clip_grad_norm_(...)`, as scripts for PyTorch have it.
utils = SimpleNamespace(
    clip_grad_norm_=clip_grad_norm_, clip_grad_value_=clip_grad_value_
)
