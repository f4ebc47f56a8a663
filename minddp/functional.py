"""Differentiable functions under PyTorch's names: `from minddp import functional as F`.

    F.cross_entropy(logits, labels)
        |    checks shapes, takes arrays where a Tensor without gradient will do
        v
    apply(ops.CrossEntropy(labels), logits)
        |    records                        autograd.py
        v
    CrossEntropy.forward, backward          tensor_ops.py: the formula

Rule.  No arithmetic here: each function checks its arguments, picks the op, applies
it. Methods of Tensor (`x.exp()`) are not repeated, except for activations.

Worked example.  Two rows, two classes, both rows undecided:

    F.cross_entropy(zeros((2, 2)), [0, 1])                      log 2 = 0.693
    F.cross_entropy(zeros((2, 2)), [0, 1], reduction="sum")     1.386

Invariant.  Every function records its result or raises: no gradient is lost silently.

In PyTorch: `torch.nn.functional`, and of `torch` itself `cat`, `stack`, `where`,
`maximum`, `minimum`, `matmul`, `broadcast_to`.

Left out:
- class weights and label smoothing in cross_entropy;
- the exact GELU: it needs erf, which NumPy does not have.
"""

from collections.abc import Sequence
from numbers import Real
from typing import Any

from minddp import tensor_ops as ops
from minddp.autograd import Tensor, apply, as_tensor
from minddp.device import Array, array_module
from minddp.errors import UsageError

# ---- Activations ----


def relu(x: Any) -> Tensor:
    """max(x, 0), elementwise."""
    return apply(ops.ReLU(), as_tensor(x))


def tanh(x: Any) -> Tensor:
    """Hyperbolic tangent, elementwise."""
    return apply(ops.Tanh(), as_tensor(x))


def sigmoid(x: Any) -> Tensor:
    """1 / (1 + exp(-x)), elementwise, without overflow."""
    return apply(ops.Sigmoid(), as_tensor(x))


def gelu(x: Any, approximate: str = "tanh") -> Tensor:
    """x times the normal distribution function, in the tanh approximation."""
    if approximate != "tanh":
        raise UsageError(
            f"gelu(approximate={approximate!r}): minddp has the form 'tanh' only, for "
            "NumPy has no erf. The two differ by less than 0.0005."
        )
    return apply(ops.GELU(), as_tensor(x))


def softmax(x: Any, dim: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) along dim: positive, summing to 1."""
    return apply(ops.Softmax(dim), as_tensor(x))


def log_softmax(x: Any, dim: int = -1) -> Tensor:
    """log(softmax(x)), without the overflow that writing it so would bring."""
    return apply(ops.LogSoftmax(dim), as_tensor(x))


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
    return apply(ops.Linear(), *inputs)


def embedding(ids: Any, weight: Any) -> Tensor:
    """Row ids[i] of the table `weight` for every i;  (...), (rows, d) -> (..., d)."""
    return apply(ops.Embedding(_integers(ids)), as_tensor(weight))


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
    return apply(ops.Dropout(p), as_tensor(x)) if training and p else as_tensor(x)


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
    `momentum`. Otherwise with the running ones. pool: see tensor_ops.BatchNorm.

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
    op = ops.BatchNorm(eps, None if training else (running[0], running[1]), pool)
    y = apply(op, x, weight, bias)
    if training and running:
        op.update(running[0], running[1], momentum)
    return y


# ---- Losses: one number per row or element, then reduced ----


def cross_entropy(
    logits: Any, target: Any, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """-log softmax(logits)[label]: how surprised the model is by the labels.

    logits (N, classes) go with integer labels (N,), or with class probabilities, floats
    of the shape of the logits. Without N, both shapes lose it. The mean is over the
    rows that are not ignored. Raises UsageError for a label out of range.
    """
    logits, target = as_tensor(logits), as_tensor(target)
    if target.dtype.kind == "f" and target.shape == logits.shape:
        return _reduce(-(target * log_softmax(logits, -1)).sum(-1), reduction)
    if logits.ndim == 1 and target.ndim == 0:
        logits, target = logits.reshape(1, -1), target.reshape(1)
    if logits.ndim != 2 or target.shape != logits.shape[:1]:
        raise UsageError(
            f"cross_entropy: logits {logits.shape} and target {target.shape} do not "
            "fit. Give (N, classes) with integer labels (N,), or with probabilities "
            "of the same shape as the logits."
        )
    labels = _integers(target)
    losses = apply(ops.CrossEntropy(labels, ignore_index), logits)
    kept = labels != ignore_index
    if reduction == "mean" and not kept.all():
        losses = losses[kept]
    return _reduce(losses, reduction)


def mse_loss(x: Any, target: Any, reduction: str = "mean") -> Tensor:
    """(x - target)^2, by default its mean over all elements."""
    x, target = _same_shape("mse_loss", x, target)
    return _reduce(apply(ops.SquaredError(), x, target), reduction)


def binary_cross_entropy_with_logits(
    x: Any, target: Any, reduction: str = "mean"
) -> Tensor:
    """-t log(sigmoid(x)) - (1 - t) log(1 - sigmoid(x)), stable for large |x|."""
    x, target = _same_shape("binary_cross_entropy_with_logits", x, target)
    return _reduce(apply(ops.BinaryCrossEntropy(), x, target), reduction)


def _same_shape(name: str, x: Any, target: Any) -> tuple[Tensor, Tensor]:
    """Both as Tensors. (N, 1) against (N,) would broadcast to (N, N): refused."""
    x = as_tensor(x)
    target = as_tensor(target, like=x)
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
    ops.check_range(ids, num_classes, "label", "classes")
    return Tensor(array_module(ids).eye(num_classes, dtype="int64")[ids])
