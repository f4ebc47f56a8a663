"""Differentiable functions under PyTorch's names: `from minddp import functional as F`.

    F.cross_entropy(logits, labels)
        |    checks shapes, takes arrays where a Tensor without gradient will do
        v
    apply(neural.CrossEntropy(labels), logits)
        |    records                        autograd.py
        v
    CrossEntropy.forward, backward          neural_ops.py: the formula

Rule.  No arithmetic here: each function checks its arguments, picks the op, applies
it. Methods of Tensor (`x.exp()`) are not repeated, except for activations.

Worked example.  Two rows, two classes, both rows undecided:

    F.cross_entropy(zeros((2, 2)), [0, 1])                      log 2 = 0.693
    F.cross_entropy(zeros((2, 2)), [0, 1], reduction="sum")     1.386

Invariant.  Every function records its result or raises: no gradient is lost silently.

In PyTorch: `torch.nn.functional`, and of `torch` itself `cat`, `stack`, `where`,
`maximum`, `minimum`, `matmul`, `einsum`, `broadcast_to`.

Left out:
- `size_average` and `reduce`, which PyTorch's losses had before `reduction`.
"""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from numpy import finfo, result_type

from minddp import neural_ops as neural
from minddp import spatial_ops as spatial
from minddp import tensor_ops as ops
from minddp.autograd import Tensor, apply, as_tensor
from minddp.device import Array, array_module
from minddp.errors import UsageError

# ---- Activations ----


def relu(x: Any, inplace: bool = False) -> Tensor:
    """max(x, 0), elementwise. `inplace` is accepted and makes no difference."""
    return apply(ops.ReLU(), as_tensor(x))


def tanh(x: Any) -> Tensor:
    """Hyperbolic tangent, elementwise."""
    return apply(ops.Tanh(), as_tensor(x))


def sigmoid(x: Any) -> Tensor:
    """1 / (1 + exp(-x)), elementwise, without overflow."""
    return apply(ops.Sigmoid(), as_tensor(x))


def gelu(x: Any, approximate: str = "none") -> Tensor:
    """x times the normal distribution function P(x).

    approximate="tanh" has (1 + tanh(u)) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3), in
    place of P(x): off by less than 0.0005, and faster.
    """
    if approximate not in ("none", "tanh"):
        raise UsageError(f"gelu: approximate is 'none' or 'tanh', not {approximate!r}")
    return apply(
        neural.TanhGELU() if approximate == "tanh" else neural.GELU(), as_tensor(x)
    )


def silu(x: Any) -> Tensor:
    """x sigmoid(x), elementwise; also known as swish."""
    return apply(neural.SiLU(), as_tensor(x))


def softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + exp(beta x)) / beta, a smooth relu; just x where beta x > threshold."""
    return apply(neural.Softplus(beta, threshold), as_tensor(x))


def leaky_relu(x: Any, negative_slope: float = 0.01) -> Tensor:
    """x where x > 0, else negative_slope x."""
    return apply(neural.LeakyReLU(negative_slope), as_tensor(x))


def elu(x: Any, alpha: float = 1.0) -> Tensor:
    """x where x > 0, else alpha (exp(x) - 1)."""
    return apply(neural.ELU(alpha), as_tensor(x))


def softmax(x: Any, dim: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) along dim: positive, summing to 1."""
    return apply(neural.Softmax(dim), as_tensor(x))


def log_softmax(x: Any, dim: int = -1) -> Tensor:
    """log(softmax(x)), without the overflow that writing it so would bring."""
    return apply(neural.LogSoftmax(dim), as_tensor(x))


# ---- Layers ----


def linear(x: Any, weight: Any, bias: Any = None) -> Tensor:
    """x @ weight.T + bias;  (..., in), (out, in), (out,) -> (..., out)."""
    inputs = [as_tensor(x), as_tensor(weight)]
    if bias is not None:
        inputs.append(as_tensor(bias))
    W, b = inputs[1].shape, inputs[-1].shape
    if len(W) != 2 or (bias is not None and b != W[:1]):
        shapes = " and ".join(str(x.shape) for x in inputs[1:])
        raise UsageError(
            f"linear: weight and bias must be (out, in) and (out,), not {shapes}"
        )
    return apply(neural.Linear(), *inputs)


def embedding(ids: Any, weight: Any, padding_idx: int | None = None) -> Tensor:
    """Row ids[i] of the table `weight` for every i;  (...), (rows, d) -> (..., d).

    The row padding_idx, which may count from the end, gets no gradient.
    """
    weight = as_tensor(weight)
    if padding_idx is not None and not -len(weight) <= padding_idx < len(weight):
        raise UsageError(f"embedding: there is no row {padding_idx} in {weight.shape}")
    return apply(neural.Embedding(_integers(ids), padding_idx), weight)


def _integers(ids: Any) -> Array:
    """ids as an array for an op that wants integers, which [] becomes only here."""
    array = as_tensor(ids).data
    return array if array.size else array.astype("int64")


def dropout(x: Any, p: float = 0.5, training: bool = True) -> Tensor:
    """x with each element zeroed with probability p and the rest scaled to 1 / (1 - p).

    The expectation stays x, so that evaluation (`training=False`) is the identity. The
    mask comes from the host generator: seed it differently on each rank.
    """
    if not isinstance(p, Real) or not 0 <= float(p) <= 1:
        raise UsageError(f"dropout: p is a probability, so not {p!r}")
    return apply(neural.Dropout(p), as_tensor(x)) if training and p else as_tensor(x)


def batch_norm(
    x: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    pool: Any = None,
) -> Tensor:
    """x with each channel brought to mean 0 and variance 1, times weight, plus bias.

    x is (N, C, ...), the others are (C,) or None. Training: with mean and variance of
    the batch, towards which the running ones, Tensors or arrays, move in place by
    `momentum`. Otherwise with the running ones. pool: see neural_ops.BatchNorm.

    Raises UsageError for wrong shapes, and in training for less than 2 values per
    channel; nothing has been written then.
    """
    x = as_tensor(x)
    xp, channels = array_module(x.data), x.shape[1:2]
    weight = as_tensor(xp.ones(channels, x.dtype) if weight is None else weight)
    bias = as_tensor(xp.zeros(channels, x.dtype) if bias is None else bias)
    given = [as_tensor(t) for t in (running_mean, running_var) if t is not None]
    running = [t.data for t in given]
    shapes = [t.shape for t in (*given, weight, bias)]
    if x.dtype.kind != "f" or x.ndim < 2 or any(s != channels for s in shapes):
        raise UsageError(
            "batch_norm: x must be floats (N, C, ...) and all else (C,); x is "
            f"{x.shape} {x.dtype}, the others are {', '.join(map(str, shapes))}"
        )
    if len(running) == 1 or not (training or running):
        raise UsageError(
            "batch_norm: give both of running_mean and running_var; only in training "
            "both can be None"
        )
    op = neural.BatchNorm(eps, None if training else (running[0], running[1]), pool)
    y = apply(op, x, weight, bias)
    if training and running:
        op.update(running[0], running[1], momentum)
    return y


def layer_norm(
    x: Any,
    normalized_shape: int | Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, over the last axes of x.

    These have the sizes normalized_shape, as have weight and bias; each of them may be
    None, for 1 and 0. Raises UsageError if the shapes do not fit.
    """
    inputs = _normalized("layer_norm", x, normalized_shape, weight, bias)
    return apply(neural.LayerNorm(eps), *inputs)


def rms_norm(
    x: Any,
    normalized_shape: int | Sequence[int],
    weight: Any = None,
    eps: float | None = None,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last axes of x.

    As layer_norm, without mean and bias. eps None: the distance from 1 to the next
    number in the dtype of x, for float16 in float32.
    """
    inputs = _normalized("rms_norm", x, normalized_shape, weight)
    if eps is None:
        eps = float(finfo(result_type(inputs[0].dtype, "float32")).eps)
    return apply(neural.RMSNorm(eps), *inputs)


def _normalized(
    name: str, x: Any, shape: Any, weight: Any, bias: Any = None
) -> list[Tensor]:
    """x, weight and, unless it is None, bias. Raises UsageError if they do not fit."""
    x = as_tensor(x)
    shape = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    xp = array_module(x.data)
    weight = as_tensor(xp.ones(shape, x.dtype) if weight is None else weight)
    inputs = [x, weight] if bias is None else [x, weight, as_tensor(bias)]
    shapes = [t.shape for t in inputs]
    if (
        x.dtype.kind != "f"
        or not shape
        or x.shape[-len(shape) :] != shape
        or any(s != shape for s in shapes[1:])
    ):
        raise UsageError(
            f"{name}: x must be floats (..., {', '.join(map(str, shape))}), and the "
            f"weights have the shape {shape}; x is {x.shape} {x.dtype}, they are "
            f"{', '.join(map(str, shapes[1:]))}"
        )
    return inputs


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale query key^T + mask) value: a mean of values for each query.

    query (..., T, d), key (..., S, d), value (..., S, e) -> (..., T, e); the axes
    before are broadcast. scale: 1 / sqrt(d) unless given.

    attn_mask: booleans, True where a query may look, or floats that are added; of a
    shape that broadcasts to (..., T, S). is_causal: query i sees keys 0 ... i; not
    together with attn_mask. A query that sees nothing gets 0.

    dropout_p: drops probabilities, and is 0 in evaluation: it knows of no `training`.

    enable_gqa: grouped queries. The third axis from the end counts heads; key and value
    have fewer, and each of theirs serves as many of query's in a row. Theirs must
    divide query's.
    """
    q, k, v = (as_tensor(x) for x in (query, key, value))
    mask = _mask(q, k, attn_mask, is_causal)
    _check_attention(q, k, v, mask, dropout_p, enable_gqa)
    scale = float(scale if scale is not None else q.shape[-1] ** -0.5)
    op = neural.Attention(scale, dropout_p)
    inputs = [q, k, v] if mask is None else [q, k, v, mask]
    if not enable_gqa or q.shape[-3] == k.shape[-3]:
        return apply(op, *inputs)
    groups = k.shape[-3]
    y = apply(op, *[_grouped(x, groups) for x in inputs])
    return y.reshape(*y.shape[:-4], q.shape[-3], *y.shape[-2:])


def _mask(q: Tensor, k: Tensor, mask: Any, is_causal: bool) -> Tensor | None:
    """What is added to the scores, in the dtype of q, or None."""
    if is_causal and mask is not None:
        raise UsageError(
            "scaled_dot_product_attention: attn_mask or is_causal, not both"
        )
    xp = array_module(q.data)
    if is_causal:
        mask = xp.tri(q.shape[-2], k.shape[-2], dtype="bool")
    elif mask is None:
        return None
    added = as_tensor(mask)
    if added.dtype == "bool":
        zero, hidden = q.dtype.type(0), q.dtype.type("-inf")
        added = Tensor(xp.where(added.data, zero, hidden))
    if added.ndim < 2:
        added = added.reshape(*[1] * (2 - added.ndim), *added.shape)
    return added.to(q.dtype)


def _check_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, gqa: bool
) -> None:
    """Raises: UsageError unless all fit together."""
    tensors = [t for t in (q, k, v, mask) if t is not None]
    ok = (
        all(t.ndim >= 2 and t.dtype == q.dtype for t in (q, k, v))
        and q.dtype.kind == "f"
        and q.shape[-1] == k.shape[-1]
        and k.shape[-2] == v.shape[-2]
        and 0 <= p < 1
    )
    if ok and mask is not None:
        ok = mask.shape[-2] in (1, q.shape[-2]) and mask.shape[-1] in (1, k.shape[-2])
    if ok and gqa:
        ok = all(t.ndim >= 3 for t in (q, k, v)) and k.shape[-3] == v.shape[-3]
        ok = ok and k.shape[-3] > 0 and q.shape[-3] % k.shape[-3] == 0
    if not ok:
        given = ", ".join(f"{t.shape} {t.dtype}" for t in tensors)
        raise UsageError(
            "scaled_dot_product_attention: query (..., T, d), key (..., S, d), value "
            "(..., S, e), floats of one dtype, mask (..., T, S), dropout_p from 0 to "
            "below 1, and with enable_gqa heads of key and value, equally many, that "
            f"divide those of query; given are {given}, dropout_p={p}"
        )


def _grouped(x: Tensor, groups: int) -> Tensor:
    """(..., heads, n, m) -> (..., groups, heads in a group, n, m)."""
    if x.ndim < 3:  # a mask for all heads
        return x
    heads = x.shape[-3]
    sizes = (heads, 1) if heads in (1, groups) else (groups, heads // groups)
    return x.reshape(*x.shape[:-3], *sizes, *x.shape[-2:])


def rotary(x: Any, positions: Any = None, base: float = 10000.0) -> Tensor:
    """x (..., T, d) with a position built into its directions: rotary embedding.

    Number i of the last axis and number i + d/2 are the sides of a vector, which is
    turned by positions[t] / base^(2i / d). The product of two rows then depends on
    the difference of their positions alone: for the queries and keys of attention.

    positions: (T,), or what broadcasts to (..., T); 0 to T - 1 unless given. In
    PyTorch there is no such function. This pairing is that of GPT-NeoX, and of Llama
    as Hugging Face stores it; Meta's Llama pairs 2i with 2i + 1.
    """
    x = as_tensor(x)
    if x.ndim < 2 or x.shape[-1] % 2 or x.dtype.kind != "f":
        raise UsageError(f"rotary: x is floats (..., T, even), not {x.shape} {x.dtype}")
    xp = array_module(x.data)
    t = xp.arange(x.shape[-2]) if positions is None else as_tensor(positions).data
    if not t.ndim or t.shape[-1] not in (1, x.shape[-2]):
        raise UsageError(f"rotary: positions {t.shape} do not fit x {x.shape}")
    steps = xp.arange(0, x.shape[-1], 2) / x.shape[-1]
    angles = t[..., None] / base**steps
    cos, sin = (f(angles).astype(x.dtype) for f in (xp.cos, xp.sin))
    return apply(neural.Rotary(cos, sin), x)


# ---- Images: (N, C, H, W), or (C, H, W) for one without N ----


def conv2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """Each output pixel is a product of `weight` with a window of x, plus bias.

    x (N, C, H, W), weight (O, C / groups, kh, kw), bias (O,) -> (N, O, oh, ow), with
    oh = floor((H + 2 padding - dilation (kh - 1) - 1) / stride) + 1. The settings are
    integers or pairs of them, vertical and horizontal. padding: also "valid", none, and
    "same", as much as keeps H and W at stride 1.

    Raises UsageError if the shapes do not fit together, or no window fits into x.
    """
    inputs = _convolved("conv2d", x, weight, bias, groups, 1)
    kernel = inputs[1].shape[2:]
    windows = _windows("conv2d", kernel, stride, padding, dilation)
    return _on_images(spatial.Conv2d(windows, groups), *inputs)


def conv1d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """conv2d of images that are one pixel high.

    x (N, C, L) or (C, L), weight (O, C / groups, k), bias (O,) -> (N, O, length).
    """
    x, weight = as_tensor(x), as_tensor(weight)
    if x.ndim not in (2, 3) or weight.ndim != 3:
        raise UsageError(
            "conv1d: x and weight must be (N, C, L) or (C, L), and (O, C / groups, k), "
            f"not {x.shape} and {weight.shape}"
        )
    y = conv2d(
        x.reshape(*x.shape[:-1], 1, x.shape[-1]),
        weight.reshape(*weight.shape[:2], 1, weight.shape[2]),
        bias,
        (1, _one(stride)),
        padding if isinstance(padding, str) else (0, _one(padding)),
        (1, _one(dilation)),
        groups,
    )
    return apply(ops.Reshape((*y.shape[:-2], y.shape[-1])), y)


def conv_transpose2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    """Each pixel of x, times `weight`, is added to a window of the output.

    x (N, C, H, W), weight (C, O / groups, kh, kw), bias (O,) -> (N, O, oh, ow), with
    oh = (H - 1) stride - 2 padding + dilation (kh - 1) + output_padding + 1: the H of
    which conv2d, with these settings, makes H. As there may be several, output_padding
    says which; it is below stride or dilation. Raises UsageError, as conv2d.
    """
    name = "conv_transpose2d"
    inputs = _convolved(name, x, weight, bias, groups, 0)
    if isinstance(padding, str):
        raise UsageError(f"{name}: padding is an integer or a pair, not {padding!r}")
    kernel = inputs[1].shape[2:]
    windows = _windows(name, kernel, stride, padding, dilation)
    more = _two(name, "output_padding", output_padding, 0)
    steps = zip(more, windows.stride, windows.dilation, strict=True)
    if any(m >= max(s, d) for m, s, d in steps):
        raise UsageError(
            f"{name}: output_padding {more} must be below the stride {windows.stride} "
            f"or the dilation {windows.dilation}"
        )
    return _on_images(spatial.ConvTranspose2d(windows, groups, more), *inputs)


def max_pool2d(
    x: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """The largest pixel of each window; the windows are side by side by default.

    With ceil_mode a last window may hang over the end. Where pixels tie, the first gets
    the gradient. Padding never wins.
    """
    windows = _pool("max_pool2d", kernel_size, stride, padding, dilation, ceil_mode)
    return _on_images(spatial.MaxPool2d(windows), _floats("max_pool2d", x))


def avg_pool2d(
    x: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """The mean of each window; the windows are side by side by default.

    With ceil_mode a last window may hang over the end. Padding counts as zeros, or
    without count_include_pad not at all; divisor_override replaces the count.
    """
    if divisor_override == 0:
        raise UsageError("avg_pool2d: divisor_override must not be 0")
    windows = _pool("avg_pool2d", kernel_size, stride, padding, 1, ceil_mode)
    op = spatial.AvgPool2d(windows, count_include_pad, divisor_override)
    return _on_images(op, _floats("avg_pool2d", x))


def adaptive_avg_pool2d(x: Any, output_size: Any) -> Tensor:
    """The means of output_size windows, which cover x: an integer or a pair.

    None, in a pair, stands for the size that x has.
    """
    x = _floats("adaptive_avg_pool2d", x)
    pair = output_size if isinstance(output_size, Sequence) else (output_size,) * 2
    out = [x.shape[i - 2] if n is None else n for i, n in enumerate(pair)]
    op = spatial.AdaptiveAvgPool2d(_two("adaptive_avg_pool2d", "output_size", out, 1))
    return _on_images(op, x)


def interpolate(
    x: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
) -> Tensor:
    """x (N, C, H, W) in another size: `size`, or floor(H scale_factor) by the same.

    mode: "nearest" takes one pixel for each, "bilinear" a mean of four. With
    align_corners the corner pixels of input and output are in the same places, else
    the corners of these pixels are.
    """
    x = _floats("interpolate", x)
    if x.ndim != 4:
        raise UsageError(f"interpolate: x must be (N, C, H, W), not {x.shape}")
    if mode not in ("nearest", "bilinear"):
        raise UsageError(f"interpolate: mode is 'nearest' or 'bilinear', not {mode!r}")
    if mode == "nearest" and align_corners is not None:
        raise UsageError("interpolate: align_corners goes with mode='bilinear' only")
    taps = []
    for n, (out, scale) in zip(
        x.shape[2:], _sizes(x.shape[2:], size, scale_factor), strict=True
    ):
        if mode == "nearest":
            taps.append(spatial.nearest(n, out, scale))
        else:
            taps.append(spatial.linear(n, out, scale, bool(align_corners)))
    return apply(spatial.Interpolate(taps[0], taps[1]), x)


def _sizes(image: Any, size: Any, factor: Any) -> list[tuple[int, float]]:
    """For each axis its new size, and how many old pixels a new one is wide."""
    if (size is None) == (factor is None):
        raise UsageError("interpolate: give one of size and scale_factor")
    if factor is None:
        out = _two("interpolate", "size", size, 1)
        return [(n, old / n) for old, n in zip(image, out, strict=True)]
    pair = tuple(factor) if isinstance(factor, Sequence) else (factor, factor)
    if len(pair) != 2 or not all(isinstance(f, Real) and float(f) > 0 for f in pair):
        raise UsageError(
            f"interpolate: scale_factor is above 0, or a pair of such, not {factor!r}"
        )
    new = [
        (int(old * float(f)), 1 / float(f)) for old, f in zip(image, pair, strict=True)
    ]
    if any(n < 1 for n, _ in new):
        raise UsageError(
            f"interpolate: scale_factor {factor!r} leaves nothing of {tuple(image)}"
        )
    return new


def _convolved(
    name: str, x: Any, weight: Any, bias: Any, groups: int, channels_at: int
) -> list[Tensor]:
    """The inputs of a convolution; its weight has the channels of x on channels_at.

    Raises: UsageError unless their shapes fit together.
    """
    inputs = [as_tensor(t) for t in (x, weight, bias) if t is not None]
    W, channels = inputs[1].shape, inputs[0].shape[-3:-2]
    (groups,) = _integers_from(name, "groups", (groups,), 1)
    fits = inputs[0].ndim in (3, 4) and len(W) == 4 and W[0] % groups == 0
    if fits:
        per_group = [W[0] // groups, W[1]]
        fits = channels == (per_group[channels_at] * groups,)
        out = per_group[1 - channels_at] * groups
        fits = fits and all(b.shape == (out,) for b in inputs[2:])
    if not fits:
        form = ("(C, O / groups, kh, kw)", "(O, C / groups, kh, kw)")[channels_at]
        shapes = ", ".join(str(t.shape) for t in inputs)
        raise UsageError(
            f"{name}: x, weight and bias must be (N, C, H, W) or (C, H, W), {form} and "
            f"(O,), with both C and O multiples of groups; they are {shapes}, with "
            f"groups={groups}"
        )
    return inputs


def _windows(
    name: str,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool = False,
) -> spatial.Windows:
    """The settings of a layer, checked. Raises: UsageError."""
    kernel = _two(name, "kernel_size", kernel, 1)
    stride = _two(name, "stride", stride, 1)
    dilation = _two(name, "dilation", dilation, 1)
    if padding == "same":
        if stride != (1, 1):
            raise UsageError(f"{name}: padding='same' needs stride 1, not {stride}")
        more = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        pads = [(n // 2, n - n // 2) for n in more]
    elif padding == "valid":
        pads = [(0, 0), (0, 0)]
    else:
        pads = [(n, n) for n in _two(name, "padding", padding, 0)]
    return spatial.Windows(kernel, stride, (pads[0], pads[1]), dilation, ceil_mode)


def _pool(
    name: str, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> spatial.Windows:
    """The settings of a pool: windows side by side, if there is no stride."""
    stride = kernel if stride is None else stride
    padding = _two(name, "padding", padding, 0)
    windows = _windows(name, kernel, stride, padding, dilation, ceil_mode)
    if any(2 * n > span for n, span in zip(padding, windows.span, strict=True)):
        raise UsageError(
            f"{name}: padding {padding} must be at most half of the window, which is "
            f"{windows.span}: else a window could see nothing but padding"
        )
    return windows


def _two(name: str, what: str, value: Any, least: int) -> tuple[int, int]:
    """An integer twice, or a pair of them. Raises: UsageError."""
    pair = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(pair) != 2:
        raise UsageError(f"{name}: {what} is an integer or a pair, not {value!r}")
    a, b = _integers_from(name, what, pair, least)
    return a, b


def _integers_from(name: str, what: str, values: Any, least: int) -> list[int]:
    """The values as ints. Raises: UsageError if one is none, or is below `least`."""
    if not all(isinstance(n, Integral) and int(n) >= least for n in values):
        raise UsageError(f"{name}: {what} must be integers from {least}, not {values}")
    return [int(n) for n in values]


def _one(value: Any) -> Any:
    """The element of a list of one, as PyTorch has it for settings along one axis."""
    return value[0] if isinstance(value, Sequence) and len(value) == 1 else value


def _floats(name: str, x: Any) -> Tensor:
    """x as a Tensor of floats, (N, C, H, W) or (C, H, W), neither H nor W 0."""
    images = as_tensor(x)
    shape, dtype = images.shape, images.dtype
    if len(shape) not in (3, 4) or dtype.kind != "f" or 0 in shape[-2:]:
        raise UsageError(
            f"{name}: x must be floats (N, C, H, W) or (C, H, W), with pixels, not "
            f"{shape} {dtype}"
        )
    return images


def _on_images(op: ops.Op, x: Tensor, *others: Tensor) -> Tensor:
    """The op applied; to one image as to a batch of one."""
    if x.ndim == 4:
        return apply(op, x, *others)
    y = apply(op, x.reshape(1, *x.shape), *others)
    return apply(ops.Reshape(y.shape[1:]), y)


# ---- Losses: one number per row or element, then reduced ----


def cross_entropy(
    logits: Any,
    target: Any,
    weight: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """-log softmax(logits)[label]: how surprised the model is by the labels.

    logits (N, classes, ...) go with integer labels (N, ...), or with class
    probabilities, floats of the shape of the logits. Without N, both shapes lose it.

    weight: (classes,), factors for the classes. label_smoothing: so much of a label's
    share goes to all classes, in equal parts. The mean over labels is weighted, and
    leaves out those equal to ignore_index; that over probabilities is over all.

    Raises UsageError for shapes that do not fit or a label out of range.
    """
    logits, target = as_tensor(logits), as_tensor(target)
    if not 0 <= label_smoothing <= 1:
        raise UsageError(
            f"cross_entropy: label_smoothing is from 0 to 1, not {label_smoothing}"
        )
    axis = 0 if logits.ndim == 1 else 1
    shape = logits.shape[:axis] + logits.shape[axis + 1 :]
    chances = target.dtype.kind == "f" and target.shape == logits.shape
    if not logits.ndim or not (chances or target.shape == shape):
        raise UsageError(
            f"cross_entropy: logits {logits.shape} and target {target.shape} do not "
            "fit. Give (N, classes, ...) with integer labels (N, ...), or with "
            "probabilities of the same shape as the logits."
        )
    classes = logits.shape[axis]
    weights = _class_weights("cross_entropy", weight, classes, logits)
    if chances:
        if label_smoothing:
            target = target * (1 - label_smoothing) + label_smoothing / classes
        if weights is not None:
            target = target * weights.reshape(-1, *[1] * (logits.ndim - axis - 1))
        return _reduce(-(target * log_softmax(logits, axis)).sum(axis), reduction)
    labels = _integers(target).reshape(-1)
    op = neural.CrossEntropy(labels, ignore_index, weights, label_smoothing)
    losses = apply(op, _class_last(logits, axis)).reshape(*shape)
    loss = _reduce_rows(losses, labels, ignore_index, weights, reduction)
    return loss.to(losses.dtype)  # which autocast may have widened


def nll_loss(
    log_probs: Any,
    target: Any,
    weight: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """-log_probs[label]: cross_entropy of what is a log_softmax already.

    Shapes, weights and the mean are those of cross_entropy.
    """
    log_probs, target = as_tensor(log_probs), as_tensor(target)
    axis = 0 if log_probs.ndim == 1 else 1
    shape = log_probs.shape[:axis] + log_probs.shape[axis + 1 :]
    if not log_probs.ndim or target.shape != shape:
        raise UsageError(
            f"nll_loss: log_probs {log_probs.shape} and target {target.shape} do not "
            "fit. Give (N, classes, ...) with integer labels (N, ...)."
        )
    classes = log_probs.shape[axis]
    weights = _class_weights("nll_loss", weight, classes, log_probs)
    labels = _integers(target).reshape(-1)
    neural.check_range(labels, classes, "label", "classes", ignore_index)
    xp = array_module(log_probs.data)
    kept = xp.asarray(labels != ignore_index)
    safe = xp.where(kept, xp.asarray(labels), 0)
    rows = _class_last(log_probs, axis)
    picked = -rows[xp.arange(len(safe)), safe]
    losses = where(kept, picked if weights is None else picked * weights[safe], 0.0)
    return _reduce_rows(
        losses.reshape(*shape), labels, ignore_index, weights, reduction
    )


def _class_weights(name: str, weight: Any, classes: int, x: Tensor) -> Array | None:
    """The weights as an array in the dtype of x, or None."""
    if weight is None:
        return None
    given = as_tensor(weight)
    if given.shape != (classes,) or given.requires_grad:
        raise UsageError(
            f"{name}: weight is one factor for each of the {classes} classes, without "
            f"gradient; it is {given.shape}, requires_grad={given.requires_grad}"
        )
    weights: Array = given.data.astype(x.dtype)
    return weights


def _class_last(x: Tensor, axis: int) -> Tensor:
    """(N, classes, ...) as (rows, classes)."""
    if x.ndim == 2:
        return x
    order = [i for i in range(x.ndim) if i != axis] + [axis]
    rows = math.prod(x.shape) // max(x.shape[axis], 1)
    return x.permute(*order).reshape(rows, x.shape[axis])


def _reduce_rows(
    losses: Tensor, labels: Array, ignore: int, weights: Array | None, reduction: str
) -> Tensor:
    """As _reduce; the mean is over the rows whose label is not `ignore`, weighted."""
    kept = labels != ignore
    if reduction != "mean" or (weights is None and kept.all()):
        return _reduce(losses, reduction)
    if weights is None:
        return losses.reshape(-1)[kept].mean()
    counted = array_module(weights).asarray(labels[kept])
    return losses.sum() / float(weights[counted].sum(dtype="float64"))


def kl_div(
    x: Any, target: Any, reduction: str = "mean", log_target: bool = False
) -> Tensor:
    """target (log target - x), elementwise: how far target is from exp(x).

    x are log-probabilities, and so are those of target with log_target. "batchmean"
    is the sum divided by the length of axis 0, and what the divergence is by
    definition; "mean" divides by the number of elements, as in PyTorch.
    """
    x, target = _same_shape("kl_div", x, target)
    losses = apply(neural.KLDivergence(log_target), x, target)
    if reduction == "batchmean":
        return losses.sum() / (x.shape[0] if x.ndim else 1)
    return _reduce(losses, reduction)


def l1_loss(x: Any, target: Any, reduction: str = "mean") -> Tensor:
    """|x - target|, by default its mean over all elements."""
    x, target = _same_shape("l1_loss", x, target)
    return _reduce((x - target).abs(), reduction)


def smooth_l1_loss(
    x: Any, target: Any, reduction: str = "mean", beta: float = 1.0
) -> Tensor:
    """d^2 / (2 beta) where d = |x - target| < beta, and d - beta / 2 elsewhere."""
    x, target = _same_shape("smooth_l1_loss", x, target)
    if not beta >= 0:
        raise UsageError(f"smooth_l1_loss: beta is 0 or more, not {beta}")
    return _reduce(apply(neural.SmoothL1(beta), x, target), reduction)


def mse_loss(x: Any, target: Any, reduction: str = "mean") -> Tensor:
    """(x - target)^2, by default its mean over all elements."""
    x, target = _same_shape("mse_loss", x, target)
    return _reduce(apply(neural.SquaredError(), x, target), reduction)


def binary_cross_entropy_with_logits(
    x: Any, target: Any, reduction: str = "mean"
) -> Tensor:
    """-t log(sigmoid(x)) - (1 - t) log(1 - sigmoid(x)), stable for large |x|."""
    x, target = _same_shape("binary_cross_entropy_with_logits", x, target)
    return _reduce(apply(neural.BinaryCrossEntropy(), x, target), reduction)


def _same_shape(name: str, x: Any, target: Any) -> tuple[Tensor, Tensor]:
    """Both as Tensors. (N, 1) against (N,) would broadcast to (N, N): refused."""
    x = as_tensor(x)
    target = as_tensor(target, like=x)
    if x.dtype.kind == "f" and target.dtype.kind != "f":
        target = target.to(x.dtype)
    if x.shape != target.shape:
        raise UsageError(
            f"{name}: input {x.shape} and target {target.shape} must have one shape; "
            "reshape one of them"
        )
    return x, target


def _reduce(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "mean":
        return losses.mean()
    if reduction == "sum":
        return losses.sum()
    if reduction == "none":
        return losses
    raise UsageError(f"reduction is 'mean', 'sum' or 'none', not {reduction!r}")


# ---- Of the `torch` namespace ----


def matmul(a: Any, b: Any) -> Tensor:
    """a @ b, as NumPy's matmul: batch axes broadcast, 1-D operands are vectors."""
    return apply(ops.MatMul(), as_tensor(a), as_tensor(b))


def einsum(equation: str, *operands: Any) -> Tensor:
    """The sum of products that the equation describes: "bij,bjk->bik" is a matmul.

    A letter names an axis. Products are summed over the letters that are missing on
    the right; without "->", those that occur once stay, in alphabetical order. "..."
    stands for axes that broadcast. An operand may be a list of the tensors.

    Raises UsageError for what is none of that.
    """
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    tensors = [as_tensor(x) for x in operands]
    inputs, output = _subscripts(equation, [t.ndim for t in tensors])
    return apply(ops.Einsum(inputs, output), *tensors)


def _subscripts(equation: str, ndims: list[int]) -> tuple[list[str], str]:
    """The letters of each operand and of the result, with letters in place of "..."."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    spare = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
    bare = [part.replace("...", "", 1) for part in parts]
    axes = [
        n - len(letters) if letters != part else 0
        for n, letters, part in zip(ndims, bare, parts, strict=False)
    ]
    widest = max(axes, default=0)
    fits = (
        len(parts) == len(ndims) and min(axes, default=0) >= 0 and widest <= len(spare)
    )
    names = spare[:widest]
    if fits:
        parts = [
            part.replace("...", "".join(names[widest - n :]))
            for part, n in zip(parts, axes, strict=True)
        ]
    if not arrow:
        letters = sorted("".join(bare))
        right = "..." + "".join([c for c in letters if letters.count(c) == 1])
    output = right.replace("...", "".join(names), 1)
    used = "".join([*parts, output])
    fits = fits and all(len(p) == n for p, n in zip(parts, ndims, strict=True))
    if (
        not fits
        or (used and not (used.isascii() and used.isalpha()))
        or len(set(output)) != len(output)
        or not set(output) <= set("".join(parts))
    ):
        raise UsageError(
            f"einsum: {equation!r} does not describe {len(ndims)} operands with "
            f"{ndims} axes. Each is a letter per axis; the right side takes each of "
            "its letters from the left, once."
        )
    return parts, output


def pad(
    x: Any, pad: Sequence[int], mode: str = "constant", value: float = 0.0
) -> Tensor:
    """x with `value` around it.

    pad: (before, after) for the last axis, then for the one before it, and so on. A
    negative number takes elements away. Of PyTorch's modes there is "constant".
    """
    x = as_tensor(x)
    given = [(pad[i], pad[i + 1]) for i in range(0, len(pad) - 1, 2)][::-1]
    widths = [(0, 0)] * (x.ndim - len(given)) + given
    sizes = zip(x.shape, widths, strict=False)
    if (
        mode != "constant"
        or len(pad) % 2
        or len(given) > x.ndim
        or any(n + min(a, 0) + min(b, 0) < 0 for n, (a, b) in sizes)
    ):
        raise UsageError(
            f"pad: cannot pad {x.shape} by {tuple(pad)}, mode {mode!r}. Give pairs "
            "(before, after), the last axis first, that leave no axis less than 0; "
            "the mode is 'constant'."
        )
    return apply(ops.Pad(widths, value), x)


def maximum(a: Any, b: Any) -> Tensor:
    """The larger, elementwise; where they tie, each gets half of the gradient."""
    return apply(ops.Maximum(), *_pair(a, b))


def minimum(a: Any, b: Any) -> Tensor:
    """The smaller, elementwise; where they tie, each gets half of the gradient."""
    return apply(ops.Minimum(), *_pair(a, b))


def where(condition: Any, a: Any, b: Any) -> Tensor:
    """a where the condition holds, b elsewhere."""
    return apply(ops.Where(as_tensor(condition).data), *_pair(a, b))


def _pair(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Both as Tensors; if one is a number, in the dtype of the other."""
    if isinstance(b, Tensor):
        return as_tensor(a, like=b), b
    a = as_tensor(a)
    return a, as_tensor(b, like=a)


def cat(tensors: Sequence[Any], dim: int = 0) -> Tensor:
    """The tensors, one after the other along an axis that they have."""
    return apply(ops.Concatenate(dim), *_some("cat", tensors))


def stack(tensors: Sequence[Any], dim: int = 0) -> Tensor:
    """The tensors, side by side along a new axis."""
    return apply(ops.Stack(dim), *_some("stack", tensors))


def _some(name: str, tensors: Sequence[Any]) -> list[Tensor]:
    """All as Tensors; there must be at least one."""
    some = [as_tensor(x) for x in tensors]
    if not some:
        raise UsageError(f"{name}: there is no tensor in the list")
    return some


def broadcast_to(x: Any, shape: tuple[int, ...]) -> Tensor:
    """x stretched to a larger shape; its gradient sums over what was stretched."""
    return apply(ops.BroadcastTo(shape), as_tensor(x))


def one_hot(labels: Any, num_classes: int) -> Tensor:
    """Rows with a 1 at the label, (...) -> (..., num_classes), int64, no gradient."""
    ids = _integers(labels)
    neural.check_range(ids, num_classes, "label", "classes")
    return Tensor(array_module(ids).eye(num_classes, dtype="int64")[ids])
