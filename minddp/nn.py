"""Neural-network layers and losses, under PyTorch's names. (Networking is in net.py.)

    layer = nn.Linear(64, 128)      makes parameters, initialized as PyTorch documents
    layer(x)                        F.linear(x, layer.weight, layer.bias)

Rule.  A layer holds parameters and settings; what it computes is one function of
functional.py.

Invariant.  Parameters and buffers have the names, shapes and layouts that they have in
PyTorch, so a `state_dict` from there fits here. Saved by `numpy.savez` or as
safetensors, it is read by `numpy.load`, or by `safetensors.numpy.load_file`, and goes
into `load_state_dict`; and back.

In PyTorch: `torch.nn`. For clipping, `torch.nn.utils`.

Left out: lazy modules, which learn their shapes from the first input.
"""

import math
from collections.abc import Sequence
from numbers import Real
from types import SimpleNamespace
from typing import Any

import numpy as np

from minddp import functional as F
from minddp import functional as functional  # nn.functional, as in PyTorch
from minddp import init as init  # nn.init
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
    "ELU",
    "GELU",
    "AdaptiveAvgPool2d",
    "AvgPool2d",
    "BCEWithLogitsLoss",
    "BatchNorm",
    "BatchNorm1d",
    "BatchNorm2d",
    "Buffer",
    "Conv1d",
    "Conv2d",
    "ConvTranspose2d",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "Flatten",
    "Identity",
    "KLDivLoss",
    "L1Loss",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LogSoftmax",
    "MSELoss",
    "MaxPool2d",
    "Module",
    "ModuleDict",
    "ModuleList",
    "NLLLoss",
    "Parameter",
    "RMSNorm",
    "ReLU",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "SmoothL1Loss",
    "Softmax",
    "Softplus",
    "Tanh",
    "Upsample",
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

    The table (num_embeddings, embedding_dim) starts standard normal, except for the row
    padding_idx: it starts as 0 and gets no gradient.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        dtype: Any = "float32",
    ):
        rows = generator().standard_normal((num_embeddings, embedding_dim))
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise UsageError(
                    f"Embedding: padding_idx {padding_idx} is none of the "
                    f"{num_embeddings} rows"
                )
            padding_idx %= num_embeddings
            rows[padding_idx] = 0
        self.padding_idx = padding_idx
        self.weight = Parameter(rows.astype(dtype))

    def forward(self, ids: Any) -> Tensor:
        return F.embedding(ids, self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        padding = (
            "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        )
        return ", ".join(map(str, self.weight.shape)) + padding


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
    pool: Any = None  # whose batch (neural_ops.BatchNorm)

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


class LayerNorm(Module):
    """Rows with mean 0 and variance 1, times weight, plus bias (F.layer_norm).

    A row is what the last axes hold, whose sizes are normalized_shape, as are those of
    weight, which starts as 1, and bias, which starts as 0.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        dtype: Any = "float32",
    ):
        self.normalized_shape = _shape(normalized_shape)
        self.eps, self.elementwise_affine = eps, elementwise_affine
        ones, zeros = (f(self.normalized_shape, dtype) for f in (np.ones, np.zeros))
        self.weight = Parameter(ones) if elementwise_affine else None
        self.bias = Parameter(zeros) if elementwise_affine and bias else None

    def forward(self, x: Any) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return (
            f"{self.normalized_shape}, eps={self.eps}, elementwise_affine="
            f"{self.elementwise_affine}, bias={self.bias is not None}"
        )


class RMSNorm(Module):
    """Rows with mean square 1, times weight (F.rms_norm)."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        dtype: Any = "float32",
    ):
        self.normalized_shape = _shape(normalized_shape)
        self.eps, self.elementwise_affine = eps, elementwise_affine
        ones = np.ones(self.normalized_shape, dtype)
        self.weight = Parameter(ones) if elementwise_affine else None

    def forward(self, x: Any) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return (
            f"{self.normalized_shape}, eps={self.eps}, "
            f"elementwise_affine={self.elementwise_affine}"
        )


def _shape(sizes: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(sizes) if isinstance(sizes, Sequence) else (sizes,)


class ReLU(Module):
    """max(x, 0). `inplace` is accepted and makes no difference."""

    def __init__(self, inplace: bool = False):
        self.inplace = inplace

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
    """x times the normal distribution function, or with "tanh" nearly so (F.gelu)."""

    def __init__(self, approximate: str = "none"):
        self.approximate = approximate

    def forward(self, x: Any) -> Tensor:
        return F.gelu(x, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class SiLU(Module):
    """x sigmoid(x)."""

    def forward(self, x: Any) -> Tensor:
        return F.silu(x)


class Softplus(Module):
    """log(1 + exp(beta x)) / beta, and x where beta x is above the threshold."""

    def __init__(self, beta: float = 1.0, threshold: float = 20.0):
        self.beta, self.threshold = beta, threshold

    def forward(self, x: Any) -> Tensor:
        return F.softplus(x, self.beta, self.threshold)


class LeakyReLU(Module):
    """x where x > 0, else negative_slope x."""

    def __init__(self, negative_slope: float = 0.01):
        self.negative_slope = negative_slope

    def forward(self, x: Any) -> Tensor:
        return F.leaky_relu(x, self.negative_slope)


class ELU(Module):
    """x where x > 0, else alpha (exp(x) - 1)."""

    def __init__(self, alpha: float = 1.0):
        self.alpha = alpha

    def forward(self, x: Any) -> Tensor:
        return F.elu(x, self.alpha)


class Softmax(Module):
    """exp(x) / sum(exp(x)) along dim."""

    def __init__(self, dim: int = -1):
        self.dim = dim

    def forward(self, x: Any) -> Tensor:
        return F.softmax(x, self.dim)


class LogSoftmax(Module):
    """log(softmax(x)) along dim."""

    def __init__(self, dim: int = -1):
        self.dim = dim

    def forward(self, x: Any) -> Tensor:
        return F.log_softmax(x, self.dim)


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


# ---- Layers of images ----


class _Conv(Module):
    """What the convolutions share: a weight (rows, columns / groups, *kernel) and a
    bias.

    Both start uniform in (-k, k), with k = 1 / sqrt(fan_in), where fan_in is the size
    of weight[0]: PyTorch's default, kaiming_uniform_(a=sqrt(5)).
    """

    def _make(
        self,
        rows: int,
        columns: int,
        kernel: tuple[int, ...],
        groups: int,
        bias: bool,
        dtype: Any,
        transposed: bool = False,
    ) -> None:
        """Set the parameters. Raises: UsageError for sizes that do not divide."""
        if groups < 1 or any(n < 1 or n % groups for n in (rows, columns)):
            raise UsageError(
                f"{type(self).__name__}: in_channels and out_channels must be positive "
                f"multiples of groups, not {columns}, {rows} and {groups}"
            )
        shape = (rows, columns // groups, *kernel)
        ends = (rows, columns) if transposed else (columns, rows)
        self.in_channels, self.out_channels = ends
        self.kernel_size, self.groups = kernel, groups
        k = 1 / math.prod(shape[1:]) ** 0.5
        self.weight = Parameter(_uniform(shape, k, dtype))
        self.bias = Parameter(_uniform((ends[1],), k, dtype)) if bias else None

    def extra_repr(self) -> str:
        settings = _listed(self, "kernel_size", "stride", "padding", "groups")
        channels = f"{self.in_channels}, {self.out_channels}"
        return f"{channels}, {settings}, bias={self.bias is not None}"


class Conv2d(_Conv):
    """F.conv2d;  (N, in_channels, H, W) -> (N, out_channels, oh, ow).

    weight (out_channels, in_channels / groups, kh, kw) and bias (out_channels,) start
    uniform in (-k, k), with k = 1 / sqrt(in_channels / groups kh kw).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        dtype: Any = "float32",
    ):
        _check_padding_mode(padding_mode)
        self.stride, self.padding, self.dilation = stride, padding, dilation
        kernel = _kernel(kernel_size, 2)
        self._make(out_channels, in_channels, kernel, groups, bias, dtype)

    def forward(self, x: Any) -> Tensor:
        settings = self.stride, self.padding, self.dilation, self.groups
        return F.conv2d(x, self.weight, self.bias, *settings)


class Conv1d(_Conv):
    """F.conv1d;  (N, in_channels, L) -> (N, out_channels, length).

    weight (out_channels, in_channels / groups, k), as for Conv2d.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        dtype: Any = "float32",
    ):
        _check_padding_mode(padding_mode)
        self.stride, self.padding, self.dilation = stride, padding, dilation
        kernel = _kernel(kernel_size, 1)
        self._make(out_channels, in_channels, kernel, groups, bias, dtype)

    def forward(self, x: Any) -> Tensor:
        settings = self.stride, self.padding, self.dilation, self.groups
        return F.conv1d(x, self.weight, self.bias, *settings)


class ConvTranspose2d(_Conv):
    """F.conv_transpose2d;  (N, in_channels, H, W) -> (N, out_channels, oh, ow).

    weight (in_channels, out_channels / groups, kh, kw) and bias (out_channels,) start
    uniform in (-k, k), with k = 1 / sqrt(out_channels / groups kh kw).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Any = 1,
        padding_mode: str = "zeros",
        dtype: Any = "float32",
    ):
        _check_padding_mode(padding_mode)
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.output_padding = output_padding
        kernel = _kernel(kernel_size, 2)
        self._make(in_channels, out_channels, kernel, groups, bias, dtype, True)

    def forward(self, x: Any) -> Tensor:
        return F.conv_transpose2d(
            *(x, self.weight, self.bias, self.stride, self.padding),
            *(self.output_padding, self.groups, self.dilation),
        )


def _check_padding_mode(mode: str) -> None:
    if mode != "zeros":
        raise UsageError(
            f"padding_mode={mode!r}: minddp pads with zeros only; pad x before the "
            "layer, and give it padding=0"
        )


def _kernel(size: Any, n: int) -> tuple[int, ...]:
    """One size for all n axes, or one for each, as a tuple. Raises: UsageError."""
    sizes = tuple(size) if isinstance(size, Sequence) else (size,) * n
    if len(sizes) != n or not all(isinstance(k, int) and k > 0 for k in sizes):
        raise UsageError(f"kernel_size: {n} positive integer(s) are needed, not {size}")
    return sizes


class MaxPool2d(Module):
    """F.max_pool2d;  (N, C, H, W) -> (N, C, oh, ow)."""

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
    ):
        if return_indices:
            raise UsageError("MaxPool2d: return_indices=True is left out")
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.dilation, self.ceil_mode = dilation, ceil_mode

    def forward(self, x: Any) -> Tensor:
        return F.max_pool2d(
            *(x, self.kernel_size, self.stride, self.padding),
            *(self.dilation, self.ceil_mode),
        )

    def extra_repr(self) -> str:
        return _listed(self, "kernel_size", "stride", "padding")


class AvgPool2d(Module):
    """F.avg_pool2d;  (N, C, H, W) -> (N, C, oh, ow)."""

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ):
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.ceil_mode, self.count_include_pad = ceil_mode, count_include_pad
        self.divisor_override = divisor_override

    def forward(self, x: Any) -> Tensor:
        return F.avg_pool2d(
            *(x, self.kernel_size, self.stride, self.padding),
            *(self.ceil_mode, self.count_include_pad, self.divisor_override),
        )

    def extra_repr(self) -> str:
        return _listed(self, "kernel_size", "stride", "padding")


class AdaptiveAvgPool2d(Module):
    """F.adaptive_avg_pool2d;  (N, C, H, W) -> (N, C, *output_size)."""

    def __init__(self, output_size: Any):
        self.output_size = output_size

    def forward(self, x: Any) -> Tensor:
        return F.adaptive_avg_pool2d(x, self.output_size)

    def extra_repr(self) -> str:
        return _listed(self, "output_size")


class Upsample(Module):
    """F.interpolate;  (N, C, H, W) -> (N, C, oh, ow)."""

    def __init__(
        self,
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
    ):
        self.size, self.scale_factor = size, scale_factor
        self.mode, self.align_corners = mode, align_corners

    def forward(self, x: Any) -> Tensor:
        return F.interpolate(
            x, self.size, self.scale_factor, self.mode, self.align_corners
        )

    def extra_repr(self) -> str:
        return _listed(self, "size" if self.size else "scale_factor", "mode")


def _listed(module: Module, *names: str) -> str:
    """Settings as name=value, with commas between."""
    return ", ".join(f"{name}={vars(module)[name]!r}" for name in names)


# ---- Losses ----


class CrossEntropyLoss(Module):
    """F.cross_entropy as a module; `weight` moves with it, as a buffer."""

    def __init__(
        self,
        weight: Any = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ):
        self.weight = None if weight is None else Buffer(weight)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing = label_smoothing

    def forward(self, logits: Any, target: Any) -> Tensor:
        return F.cross_entropy(
            logits,
            target,
            self.weight,
            self.ignore_index,
            self.reduction,
            self.label_smoothing,
        )


class NLLLoss(Module):
    """F.nll_loss as a module; `weight` moves with it, as a buffer."""

    def __init__(
        self, weight: Any = None, ignore_index: int = -100, reduction: str = "mean"
    ):
        self.weight = None if weight is None else Buffer(weight)
        self.ignore_index, self.reduction = ignore_index, reduction

    def forward(self, log_probs: Any, target: Any) -> Tensor:
        return F.nll_loss(
            log_probs, target, self.weight, self.ignore_index, self.reduction
        )


class KLDivLoss(Module):
    """F.kl_div as a module."""

    def __init__(self, reduction: str = "mean", log_target: bool = False):
        self.reduction, self.log_target = reduction, log_target

    def forward(self, x: Any, target: Any) -> Tensor:
        return F.kl_div(x, target, self.reduction, self.log_target)


class L1Loss(Module):
    """F.l1_loss as a module."""

    def __init__(self, reduction: str = "mean"):
        self.reduction = reduction

    def forward(self, x: Any, target: Any) -> Tensor:
        return F.l1_loss(x, target, self.reduction)


class SmoothL1Loss(Module):
    """F.smooth_l1_loss as a module."""

    def __init__(self, reduction: str = "mean", beta: float = 1.0):
        self.reduction, self.beta = reduction, beta

    def forward(self, x: Any, target: Any) -> Tensor:
        return F.smooth_l1_loss(x, target, self.reduction, self.beta)


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
