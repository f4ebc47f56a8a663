"""Calls of functions and modules that PyTorch and minddp both make, as tables.

    make_ops.py          PyTorch --.                      .--> ops.npz
                                   |-- results_of(case) --|
    test_golden_ops.py   minddp  --'                      '--> equal to it?

    CASES      name -> what to call, and with what: functions, methods and operators
    MODULES    name -> a module of `nn`, and its inputs

minddp has PyTorch's names, so one call serves both; a `Library` holds what differs.
Inputs, parameters and the weights of the output come from a formula, not from a
generator of random numbers: nothing of them is in the file.

Rule.  A gradient is that of sum(weights * output): with equal weights, a backward that
mixes up elements would go unseen. All floating inputs and parameters get one.

Left out: dropout, and what else is random.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Library:
    """PyTorch or minddp, computing in one dtype.

    F: functions by name, of `torch.nn.functional` and of `torch`. nn: modules.
    dtype: as `module.to(dtype)` takes it. tensor(array): with floats in that dtype.
    array(tensor): its values, an array that can be written.
    """

    F: Any
    nn: Any
    dtype: Any
    tensor: Callable[[Any], Any]
    array: Callable[[Any], Any]


class Case:
    """call(F, *inputs), where an input is an array, or the shape of `numbers`."""

    def __init__(self, call: Callable[..., Any], *inputs: Any):
        self.call = call
        self.inputs = [
            numbers(*x, seed=i) if isinstance(x, tuple) else x
            for i, x in enumerate(inputs)
        ]


def numbers(*shape: int, seed: int = 0) -> Any:
    """Float64 numbers from -2.25 to 2.25, of which none is within 0.25 of 0.

    They are (i^2 times the golden ratio) modulo 1, cut to multiples of 2^-18: float32
    holds them without rounding, and no two in a small array are equal.
    """
    i = np.arange(math.prod(shape)) + 1000.0 * seed + 1
    parts = np.floor(i * i * 0.6180339887498949 % 1 * 2**20) / 2**18 - 2
    return (parts + np.where(parts < 0, -0.25, 0.25)).reshape(shape)


def positive(*shape: int, seed: int = 0) -> Any:
    return abs(numbers(*shape, seed=seed))


def chances(*shape: int, seed: int = 0) -> Any:
    """Probabilities: positive, and with the sum 1 along the last axis."""
    x = positive(*shape, seed=seed)
    return x / x.sum(-1, keepdims=True)


def mask(*shape: int, seed: int = 5) -> Any:
    return numbers(*shape, seed=seed) > -0.6


def results_of(library: Library, case: Case) -> dict[str, Any]:
    """What the call returns, and all gradients, one after the other in one axis."""
    inputs, leaves = _inputs(library, case)
    return _run(library, lambda: case.call(library.F, *inputs), leaves)


def module_results_of(library: Library, case: Case) -> dict[str, Any]:
    """As results_of; also names and shapes of parameters, and buffers after the call.

    case.call(nn) makes the module. The gradients of parameters come last.
    """
    module = case.call(library.nn).to(library.dtype)
    named = dict(module.named_parameters())
    for i, p in enumerate(named.values()):
        values = library.array(p)
        values[...] = numbers(*values.shape, seed=20 + i)
    inputs, leaves = _inputs(library, case)
    results = _run(library, lambda: module(*inputs), [*leaves, *named.values()])
    state = {name: library.array(t) for name, t in module.state_dict().items()}
    buffers = [x.ravel() for name, x in state.items() if name not in named]
    if state:
        results["state"] = np.array([f"{name} {x.shape}" for name, x in state.items()])
    if buffers:
        results["buffers"] = np.concatenate(buffers)
    return results


def _inputs(library: Library, case: Case) -> tuple[list[Any], list[Any]]:
    """The inputs, and those of them that get a gradient."""
    inputs = [library.tensor(x) for x in case.inputs]
    floating = [x.dtype.kind == "f" for x in case.inputs]
    return inputs, [
        x.requires_grad_() for x, yes in zip(inputs, floating, strict=True) if yes
    ]


def _run(library: Library, call: Callable[[], Any], leaves: list[Any]) -> Any:
    output = call()
    weights = numbers(*output.shape, seed=90)
    output.backward(library.tensor(weights))
    gradients = [library.array(leaf.grad) for leaf in leaves]
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert gradient.shape == tuple(leaf.shape), "a gradient has its input's shape"
    return {
        "output": np.array(library.array(output.detach())),
        "gradients": np.concatenate([g.ravel() for g in gradients]),
    }


def function(name: str, **settings: Any) -> Callable[..., Any]:
    """A call of F.name(*inputs, **settings)."""
    return lambda F, *inputs: getattr(F, name)(*inputs, **settings)


def method(name: str, *args: Any, **settings: Any) -> Callable[..., Any]:
    """A call of x.name(*args, **settings)."""
    return lambda F, x: getattr(x, name)(*args, **settings)


# ---- Elementwise, with two inputs ----

BINARY = {
    "add": lambda F, a, b: a + b,
    "sub": lambda F, a, b: a - b,
    "mul": lambda F, a, b: a * b,
    "div": lambda F, a, b: a / b,
    "maximum": function("maximum"),
    "minimum": function("minimum"),
}
PAIRS = [
    ((3,), (3,)),
    ((2, 3), (3,)),
    ((2, 1, 3), (4, 1)),
    ((), (3,)),
    ((), ()),
    ((0, 3), (3,)),
]
FEW = np.array([-1.0, 0.0, 2.0, -1.0])  # the ends are equal to those of the reverse
EXPONENTS = np.array([[2.0], [-1.0], [3.0], [0.0]])

CASES = {
    f"{name} {a} {b}": Case(call, a, b)
    for name, call in BINARY.items()
    for a, b in PAIRS
}
CASES |= {
    "maximum of equals": Case(function("maximum"), FEW, FEW[::-1].copy()),
    "minimum of equals": Case(function("minimum"), FEW, FEW[::-1].copy()),
    "pow": Case(lambda F, a, b: a**b, positive(2, 3), (3,)),
    "pow of 0-d": Case(lambda F, a, b: a**b, positive(), ()),
    "pow of negative bases": Case(lambda F, a: a ** F.tensor(EXPONENTS), (3,)),
    "pow of zeros": Case(
        lambda F, a, b: a**b, np.zeros((2, 1)), np.array([0.0, 1.0, 2.0, 3.5])
    ),
    "where": Case(function("where"), mask(2, 3), (3,), (2, 1)),
    "where of a number": Case(lambda F, c, a: F.where(c, a, 0.5), mask(2, 3), ()),
}

# ---- Elementwise, with one input ----

UNARY = {
    "neg": lambda F, x: -x,
    "abs": method("abs"),
    "exp": method("exp"),
    "expm1": method("expm1"),
    "sin": method("sin"),
    "cos": method("cos"),
    "erf": method("erf"),
    "reciprocal": method("reciprocal"),
    "square": method("square"),
    "sign": method("sign"),
    "tanh": function("tanh"),
    "sigmoid": function("sigmoid"),
    "relu": function("relu"),
    "gelu": function("gelu"),
    "gelu, none": function("gelu", approximate="none"),
    "gelu, tanh": function("gelu", approximate="tanh"),
    "silu": function("silu"),
    "softplus": function("softplus"),
    "softplus, beta": function("softplus", beta=2.0, threshold=3.0),
    "leaky_relu": function("leaky_relu"),
    "leaky_relu, 0.3": function("leaky_relu", negative_slope=0.3),
    "elu": function("elu"),
    "elu, alpha": function("elu", alpha=0.5),
    "clamp": method("clamp", -1.0, 0.5),
    "clamp, min": method("clamp", min=0.5),
    "clamp, max": method("clamp", max=-1.0),
    "numbers": lambda F, x: 1 - (2 + x * 3) / 4 + 5 / x,
    "x**0": lambda F, x: x**0,
    "x**1": lambda F, x: x**1,
    "x**2": lambda F, x: x**2,
    "x**3": lambda F, x: x**3,
    "x**-1": lambda F, x: x**-1,
    "x**-2": lambda F, x: x**-2,
    "2**x": lambda F, x: 2**x,
}
KINKS = np.array([0.0, -1.0, 0.5, 1.5])
KINKED = ["abs", "relu", "leaky_relu", "elu, alpha", "softplus, beta", "sign"]
KINKED += ["clamp", "clamp, min", "clamp, max", "x**0", "x**1", "x**2"]
FAR = np.array([-800.0, -30.0, -12.0, 0.5, 12.0, 30.0, 800.0])  # where exp overflows
FAR_OUT = ["tanh", "sigmoid", "relu", "silu", "softplus", "gelu, none", "gelu, tanh"]

CASES |= {
    f"{name} {shape}": Case(call, shape)
    for name, call in UNARY.items()
    for shape in [(2, 3), (), (0, 2)]
}
CASES |= {f"{name} at kinks": Case(UNARY[name], KINKS) for name in KINKED}
CASES |= {f"{name} far out": Case(UNARY[name], FAR) for name in FAR_OUT}
CASES |= {
    "log": Case(method("log"), positive(2, 3)),
    "log1p": Case(method("log1p"), positive(2, 3)),
    "rsqrt": Case(method("rsqrt"), positive(2, 3)),
    "log of 0-d": Case(method("log"), positive()),
    "sqrt": Case(method("sqrt"), positive(2, 3)),
    "sqrt of 0": Case(method("sqrt"), np.array([0.0, 4.0])),
    "x**0.5": Case(lambda F, x: x**0.5, positive(2, 3)),
    "x**-1.5": Case(lambda F, x: x**-1.5, positive(2, 3)),
    "masked_fill": Case(
        lambda F, x, m: x.masked_fill(m, -float("inf")), (2, 3), mask(2, 3)
    ),
    "masked_fill, broadcast": Case(
        lambda F, x, m: x.masked_fill(m, 7.0), (2, 2, 3), mask(2, 1)
    ),
}

# ---- Reductions ----

REDUCTIONS = ["sum", "mean", "var", "std", "amax", "amin"]
OVER = {
    "0": {"dim": 0},
    "-1": {"dim": -1, "keepdim": True},
    "0 and 2": {"dim": (0, 2)},
    "2 and 0": {"dim": (2, 0), "keepdim": True},
}
ZEROS = np.array([[0.0, 2.0, 3.0], [0.0, 4.0, 0.0]])
TIES = np.array([[1.0, 5.0, 5.0], [2.0, 2.0, 2.0]])

CASES |= {
    f"{name} over {axes}": Case(method(name, **settings), (2, 3, 4))
    for name in REDUCTIONS
    for axes, settings in OVER.items()
}
CASES |= {
    f"{name} over all": Case(method(name), (2, 3))
    for name in [*REDUCTIONS, "max", "min", "prod"]
}
CASES |= {
    "max of ties": Case(method("max"), TIES),
    "min of ties": Case(method("min"), TIES),
    "amax of ties": Case(method("amax", dim=1), TIES),
    "amin of ties": Case(method("amin", dim=0), TIES),
    "sum of 0-d": Case(method("sum"), ()),
    "mean of 0-d": Case(method("mean"), ()),
    "max of 0-d": Case(method("max"), ()),
    "sum of nothing": Case(method("sum"), (0, 3)),
    "sum over no rows": Case(method("sum", dim=0), (0, 3)),
    "mean of nothing": Case(method("mean"), (0,)),
    "mean of no rows": Case(method("mean", dim=1), (0, 3)),
    "amax of no rows": Case(method("amax", dim=1), (0, 3)),
    "var, correction 0": Case(method("var", dim=1, correction=0), (3, 4)),
    "std, correction 0": Case(method("std", dim=0, correction=0), (3, 4)),
    "var of one": Case(method("var", dim=0), (1, 2)),
    "std of equals": Case(method("std", dim=1), TIES),
    "var of equals": Case(method("var", dim=1), TIES),
    "prod over 1": Case(method("prod", dim=1), (2, 3)),
    "prod over -1, zeros": Case(method("prod", dim=-1, keepdim=True), ZEROS),
    "prod over 0, zeros": Case(method("prod", dim=0), ZEROS),
    "cumsum": Case(method("cumsum", 1), (2, 3)),
    "cumsum over 0": Case(method("cumsum", dim=0), (3, 2, 2)),
    "cumsum of nothing": Case(method("cumsum", -1), (2, 0)),
}

# ---- Shape ----

ROWS = np.array([2, 0, 2])
CASES |= {
    "reshape": Case(method("reshape", 4, -1), (2, 3, 2)),
    "reshape of 0-d": Case(method("reshape", 1, 1), ()),
    "reshape of nothing": Case(method("reshape", 0, 4), (2, 0)),
    "view": Case(method("view", 3, 2), (2, 3)),
    "flatten": Case(method("flatten", 1), (2, 3, 2)),
    "flatten, 0 to 1": Case(method("flatten", 0, 1), (2, 3, 2)),
    "permute": Case(method("permute", 2, 0, 1), (2, 3, 4)),
    "permute from the end": Case(method("permute", -1, 0, -2), (2, 3, 4)),
    "transpose": Case(method("transpose", 0, -1), (2, 3, 4)),
    "T": Case(lambda F, x: x.T, (2, 3)),
    "broadcast_to": Case(lambda F, x: F.broadcast_to(x, (4, 2, 3)), (2, 1)),
    "expand": Case(method("expand", 4, -1, 3), (2, 1)),
    "expand_as": Case(lambda F, a, b: a.expand_as(b) * b, (3,), (2, 3)),
    "repeat": Case(method("repeat", 2, 1, 3), (2, 2)),
    "flip": Case(method("flip", 0, 2), (2, 3, 2)),
    "squeeze": Case(method("squeeze"), (1, 3, 1)),
    "squeeze, one axis": Case(method("squeeze", 0), (1, 3, 1)),
    "unsqueeze": Case(method("unsqueeze", -2), (2, 3)),
    "tril": Case(method("tril"), (2, 3, 3)),
    "tril, diagonal": Case(method("tril", -1), (3, 4)),
    "triu": Case(method("triu"), (3, 4)),
    "triu, diagonal": Case(method("triu", diagonal=1), (3, 2)),
    "clone": Case(lambda F, x: x.clone() * x, (2, 3)),
    "gather": Case(lambda F, x, i: x.gather(1, i), (3, 4), ROWS[:, None] % [3, 2]),
    "gather over 0": Case(lambda F, x, i: x.gather(0, i), (3, 2), ROWS[:, None]),
    "sort": Case(lambda F, x: x.sort()[0], (2, 4)),
    "sort, descending": Case(lambda F, x: x.sort(0, descending=True)[0], (4, 2)),
    "topk": Case(lambda F, x: x.topk(2)[0], (2, 4)),
    "topk, smallest": Case(lambda F, x: x.topk(2, 0, largest=False)[0], (4, 2)),
    "unbind": Case(lambda F, x: x.unbind(1)[2] * x.unbind(1)[0], (2, 3)),
    "chunk": Case(lambda F, x: F.cat(x.chunk(3, dim=1)[::-1], 1), (2, 7)),
    "split": Case(lambda F, x: F.cat(x.split(2, dim=1)[::-1], 1), (2, 5)),
    "split, one part used": Case(lambda F, x: x.split(2)[1], (5, 2)),
    "cat": Case(lambda F, a, b: F.cat([a, b, a]), (2, 3), (1, 3)),
    "cat over -1": Case(lambda F, a, b: F.cat([a, b], dim=-1), (2, 3), (2, 1)),
    "cat with nothing": Case(lambda F, a, b: F.cat([a, b]), (0, 3), (2, 3)),
    "stack": Case(lambda F, a, b: F.stack([a, b]), (2, 3), (2, 3)),
    "stack over -1": Case(lambda F, a, b: F.stack([a, b, b], dim=-1), (2,), (2,)),
    "stack of 0-d": Case(lambda F, a, b: F.stack([a, b]), (), ()),
    "pad": Case(function("pad", pad=(1, 2)), (2, 3)),
    "pad of two axes": Case(function("pad", pad=(1, 0, 2, 1), value=3.0), (2, 1, 3)),
    "pad that cuts": Case(function("pad", pad=(-1, 1)), (2, 3)),
    "pad that cuts the end": Case(function("pad", pad=(2, -1, 0, -1)), (2, 3)),
    "index": Case(lambda F, x: x[1], (3, 4)),
    "index from the end": Case(lambda F, x: x[-1, -2], (3, 4)),
    "index by slices": Case(lambda F, x: x[1:, ::2], (3, 4)),
    "index with a new axis": Case(lambda F, x: x[..., None, 2], (3, 4)),
    "index by a list": Case(lambda F, x: x[[0, 0, 1]], (3,)),
    "index by rows": Case(lambda F, x, i: x[i], (3, 4), ROWS),
    "index by rows from the end": Case(lambda F, x, i: x[i], (3, 4), ROWS - 3),
    "index by columns": Case(lambda F, x, i: x[:, i], (2, 3), ROWS),
    "index by pairs": Case(lambda F, x, i: x[i, i], (3, 4), ROWS),
    "index by a number, a slice and rows": Case(
        lambda F, x, i: x[1, :, i], (2, 2, 3), ROWS
    ),
    "index by a grid": Case(lambda F, x, i: x[i[:, None], i], (3, 3), ROWS),
    "index by a mask": Case(lambda F, x, m: x[m], (3, 4), mask(3, 4)),
    "index by a mask of rows": Case(lambda F, x, m: x[m], (4, 2), mask(4)),
    "index by nothing": Case(lambda F, x, i: x[i], (3, 4), ROWS[:0]),
    "one tensor in many places": Case(lambda F, x: x * x.exp() + x[:1], (3,)),
}

# ---- Products ----

MATRICES = [
    ((2, 3), (3, 4)),
    ((3,), (3,)),
    ((3,), (3, 2)),
    ((2, 3), (3,)),
    ((2, 4, 3), (3, 2)),
    ((3,), (2, 3, 2)),
    ((2, 4, 3), (3,)),
    ((1, 2, 3), (2, 3, 2)),
    ((2, 1, 2, 3), (3, 3, 1)),
    ((2, 0), (0, 3)),
    ((0, 3), (3, 2)),
]
EINSUMS = {
    "ij,jk->ik": [(2, 3), (3, 4)],
    "ij,jk": [(2, 3), (3, 4)],
    "bij,bkj->bik": [(2, 3, 2), (2, 4, 2)],
    "bqhd,bkhd->bhqk": [(1, 3, 2, 2), (1, 2, 2, 2)],
    "i,j->ij": [(2,), (3,)],
    "i,i->": [(3,), (3,)],
    "ij->ji": [(2, 3)],
    "ij->i": [(2, 3)],
    "ij->": [(2, 3)],
    "ii->i": [(3, 3)],
    "ij,ij->j": [(2, 3), (2, 3)],
    "...ij,...jk->...ik": [(2, 1, 2), (2, 2)],
    "ij,jk,kl->il": [(2, 3), (3, 2), (2, 2)],
    "ba": [(2, 3)],
    "ii": [(3, 3)],
    "iij->j": [(2, 2, 3)],
    "i...->...": [(2, 3, 2)],
    "...i,...i": [(2, 3), (4, 1, 3)],
    "ij,->ij": [(2, 3), ()],
    "i,i,i->i": [(3,), (3,), (3,)],
    "ij,kj->": [(2, 3), (2, 3)],
}
IDS = np.array([[0, 3, 3], [2, 3, 0]])


def einsum(equation: str) -> Callable[..., Any]:
    return lambda F, *inputs: F.einsum(equation, *inputs)


CASES |= {f"matmul {a} {b}": Case(function("matmul"), a, b) for a, b in MATRICES}
CASES |= {
    f"einsum {equation}": Case(einsum(equation), *shapes)
    for equation, shapes in EINSUMS.items()
}
CASES |= {
    f"linear {shape}": Case(function("linear"), shape, (4, 3), (4,))
    for shape in [(3,), (2, 3), (2, 2, 3), (0, 3)]
}
CASES |= {
    "@": Case(lambda F, a, b: a @ b, (2, 3), (3, 4)),
    "linear without bias": Case(function("linear"), (2, 3), (4, 3)),
    "embedding": Case(function("embedding"), IDS, (4, 3)),
    "embedding, padding_idx": Case(function("embedding", padding_idx=-1), IDS, (4, 3)),
    "embedding of one": Case(function("embedding"), IDS[1, 0], (4, 3)),
    "embedding of nothing": Case(function("embedding"), IDS[:0], (4, 3)),
}

# ---- Softmax and losses ----

HUGE = np.array([[-431.0, 279.0, 427.0], [1e4, 1e4, 0.0]])
MASKED = np.array([[0.5, -np.inf, 1.0], [-np.inf, 0.0, -np.inf]])
LABELS, SOME_LABELS = np.array([2, 0, 3, 2]), np.array([2, -100, 3, -100])
BITS = np.array([[0.0, 1.0, 0.25], [1.0, 1.0, 0.0]])
CHANCES = chances(3, 4)
LOG_CHANCES = np.log(chances(4, 5, seed=3))

CASES |= {
    f"{name} {shape} over {dim}": Case(function(name, dim=dim), shape)
    for name in ("softmax", "log_softmax")
    for shape, dim in [((4,), 0), ((2, 3), -1), ((2, 3, 2), 1), ((0, 3), -1)]
}
CASES |= {
    "softmax of -inf": Case(function("softmax", dim=-1), MASKED),
    "softmax of huge": Case(function("softmax", dim=-1), HUGE),
    "log_softmax of huge": Case(function("log_softmax", dim=-1), HUGE),
}

# name -> function, settings, inputs
LOSSES: dict[str, tuple[Any, ...]] = {
    "l1_loss": ("l1_loss", {}, (2, 3), (2, 3)),
    "smooth_l1_loss": ("smooth_l1_loss", {}, (2, 3), (2, 3)),
    "smooth_l1_loss, beta": ("smooth_l1_loss", {"beta": 2.5}, (2, 3), (2, 3)),
    "smooth_l1_loss, beta 0": ("smooth_l1_loss", {"beta": 0.0}, (2, 3), (2, 3)),
    "cross_entropy": ("cross_entropy", {}, (4, 5), LABELS),
    "cross_entropy, ignored": ("cross_entropy", {}, (4, 5), SOME_LABELS),
    "cross_entropy, ignored 2": ("cross_entropy", {"ignore_index": 2}, (4, 5), LABELS),
    "cross_entropy, smoothed": (
        "cross_entropy",
        {"label_smoothing": 0.1},
        (4, 5),
        LABELS,
    ),
    "cross_entropy, smoothed, ignored": (
        "cross_entropy",
        {"label_smoothing": 0.3},
        (4, 5),
        SOME_LABELS,
    ),
    "cross_entropy, pixels": ("cross_entropy", {}, (2, 4, 2), LABELS.reshape(2, 2)),
    "cross_entropy, pixels, ignored": (
        "cross_entropy",
        {"label_smoothing": 0.1},
        (2, 4, 2),
        SOME_LABELS.reshape(2, 2),
    ),
    "cross_entropy, chances": ("cross_entropy", {}, (3, 4), CHANCES),
    "cross_entropy, chances of pixels": (
        "cross_entropy",
        {},
        (2, 3, 2),
        chances(2, 2, 3).transpose(0, 2, 1),
    ),
    "cross_entropy, chances, smoothed": (
        "cross_entropy",
        {"label_smoothing": 0.2},
        (3, 4),
        CHANCES,
    ),
    "nll_loss": ("nll_loss", {}, LOG_CHANCES, LABELS),
    "nll_loss, ignored": ("nll_loss", {}, LOG_CHANCES, SOME_LABELS),
    "nll_loss, pixels": ("nll_loss", {}, (2, 4, 2), LABELS.reshape(2, 2)),
    "kl_div": ("kl_div", {}, LOG_CHANCES[:3, :4], CHANCES),
    "kl_div, log_target": (
        "kl_div",
        {"log_target": True},
        LOG_CHANCES[:3, :4],
        np.log(CHANCES),
    ),
    "mse_loss": ("mse_loss", {}, (2, 3), (2, 3)),
    "binary_cross_entropy_with_logits": (
        "binary_cross_entropy_with_logits",
        {},
        (2, 3),
        BITS,
    ),
}

# function, which targets, settings, targets
WEIGHTED: list[tuple[str, str, dict[str, Any], Any]] = [
    ("cross_entropy", "labels", {}, LABELS),
    ("cross_entropy", "ignored", {}, SOME_LABELS),
    ("cross_entropy", "smoothed", {"label_smoothing": 0.3}, SOME_LABELS),
    ("cross_entropy", "chances", {"label_smoothing": 0.3}, chances(4, 5)),
    ("nll_loss", "ignored", {}, SOME_LABELS),
]


def weighted(name: str, **settings: Any) -> Callable[..., Any]:
    """A loss with a weight for each of five classes."""
    return lambda F, x, target: getattr(F, name)(
        x, target, weight=F.tensor(positive(5, seed=4)), **settings
    )


CASES |= {
    f"{name}, {how}": Case(function(loss, reduction=how, **settings), *inputs)
    for name, (loss, settings, *inputs) in LOSSES.items()
    for how in ("mean", "sum", "none")
}
CASES |= {
    f"{name}, {what}, weighted, {how}": Case(
        weighted(name, reduction=how, **settings), (4, 5), target
    )
    for name, what, settings, target in WEIGHTED
    for how in ("mean", "sum", "none")
}
CASES |= {
    "kl_div, batchmean": Case(
        function("kl_div", reduction="batchmean"), LOG_CHANCES[:3, :4], CHANCES
    ),
    "kl_div of zeros": Case(
        lambda F, x: F.kl_div(x, F.tensor(np.eye(3, 4)), reduction="sum"),
        LOG_CHANCES[:3, :4],
    ),
    "cross_entropy of one row": Case(function("cross_entropy"), (4,), np.array(2)),
    "cross_entropy of nothing": Case(
        function("cross_entropy", reduction="sum"), (0, 4), LABELS[:0]
    ),
    "cross_entropy of ignored rows": Case(
        function("cross_entropy"), (2, 4), np.array([-100, -100])
    ),
    "cross_entropy of ignored rows, weighted": Case(
        weighted("cross_entropy"), (2, 5), np.array([-100, -100])
    ),
    "cross_entropy of huge": Case(function("cross_entropy"), HUGE, np.array([0, 2])),
    "mse_loss of 0-d": Case(function("mse_loss"), (), ()),
    "binary_cross_entropy_with_logits far out": Case(
        function("binary_cross_entropy_with_logits"),
        FAR,
        np.array([0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.5]),
    ),
}

# ---- Normalization ----

RUNNING = numbers(3, seed=11), positive(3, seed=12)


def batch_norm(training: bool, running: bool = True) -> Callable[..., Any]:
    """F.batch_norm; behind its output come the running mean and variance it leaves."""

    def call(F: Any, x: Any, *weights: Any) -> Any:
        tensors = [F.tensor(values) if running else None for values in RUNNING]
        y = F.batch_norm(x, *tensors, *weights, training=training, momentum=0.3)
        return F.cat([y.flatten(), *tensors]) if running else y

    return call


def norm(name: str, shape: tuple[int, ...], eps: float) -> Callable[..., Any]:
    return lambda F, x, *weights: getattr(F, name)(x, shape, *weights, eps=eps)


CASES |= {
    "layer_norm": Case(norm("layer_norm", (4,), 1e-5), (2, 3, 4), (4,), (4,)),
    "layer_norm of two axes": Case(
        norm("layer_norm", (3, 2), 0.1), (2, 3, 2), (3, 2), (3, 2)
    ),
    "layer_norm without weights": Case(norm("layer_norm", (4,), 1e-5), (3, 4)),
    "layer_norm without bias": Case(norm("layer_norm", (4,), 1e-5), (3, 4), (4,)),
    "layer_norm without weight": Case(
        lambda F, x, b: F.layer_norm(x, (4,), None, b), (3, 4), (4,)
    ),
    "layer_norm of one row": Case(norm("layer_norm", (4,), 1e-5), (4,)),
    "layer_norm of no rows": Case(norm("layer_norm", (4,), 1e-5), (0, 4), (4,), (4,)),
    "rms_norm": Case(norm("rms_norm", (4,), 1e-5), (2, 3, 4), (4,)),
    "rms_norm of two axes": Case(norm("rms_norm", (3, 2), 0.1), (2, 3, 2), (3, 2)),
    "rms_norm without weights": Case(norm("rms_norm", (4,), 0.1), (3, 4)),
    "rms_norm, default eps": Case(lambda F, x: F.rms_norm(x, (4,)), (3, 4)),
    "batch_norm, training": Case(batch_norm(True), (4, 3), (3,), (3,)),
    "batch_norm, training, two rows": Case(batch_norm(True), (2, 3), (3,), (3,)),
    "batch_norm, training, images": Case(batch_norm(True), (2, 3, 2, 2), (3,), (3,)),
    "batch_norm, training, none running": Case(batch_norm(True, False), (2, 3, 4)),
    "batch_norm, evaluation": Case(batch_norm(False), (4, 3), (3,), (3,)),
    "batch_norm, evaluation, images": Case(batch_norm(False), (2, 3, 1, 2)),
}

# ---- Attention ----

QKV = (2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 2)
ITSELF = (1, 2, 4, 3), (1, 2, 4, 3), (1, 2, 4, 3)
SEEN = np.tri(3, 5, 1, bool)
BLIND = SEEN & (np.arange(3) != 1)[:, None]  # the second query sees nothing
SEEN_BY_BATCH = np.stack([SEEN, SEEN | mask(3, 5)])[:, None]


def attention(**settings: Any) -> Callable[..., Any]:
    return function("scaled_dot_product_attention", **settings)


CASES |= {
    "attention": Case(attention(), *QKV),
    "attention, 2-D": Case(attention(), (3, 4), (2, 4), (2, 3)),
    "attention, causal": Case(attention(is_causal=True), *ITSELF),
    "attention, causal, 3 of 5": Case(attention(is_causal=True), *QKV),
    "attention, scale": Case(attention(scale=0.3), *ITSELF),
    "attention of huge": Case(
        attention(scale=1.0),
        np.array([[30.0, 1.0], [0.0, -30.0]]),
        np.array([[30.0, 0.0], [30.0, 1.0], [0.0, 30.0]]),
        (3, 2),
    ),
    "attention, mask": Case(attention(), *QKV, SEEN),
    "attention, mask for each batch": Case(attention(), *QKV, SEEN_BY_BATCH),
    "attention, mask that hides all": Case(attention(), *QKV, BLIND),
    "attention, added mask": Case(attention(), *QKV, (3, 5)),
    "attention, added mask for each head": Case(attention(), *QKV, (2, 1, 5)),
    "attention, broadcast": Case(attention(), (2, 2, 3, 4), (1, 2, 2, 4), (2, 1, 2, 2)),
    "attention, grouped": Case(
        attention(enable_gqa=True), (2, 4, 3, 2), (2, 2, 3, 2), (2, 2, 3, 2)
    ),
    "attention, grouped, causal": Case(
        attention(enable_gqa=True, is_causal=True),
        (1, 6, 3, 2),
        (1, 2, 3, 2),
        (1, 2, 3, 2),
    ),
}

# ---- Images ----

IMAGES, KERNEL = (2, 3, 5, 4), (4, 3, 3, 2)
CONVS: dict[str, tuple[Any, ...]] = {
    "plain": ({}, IMAGES, KERNEL),
    "stride": ({"stride": 2}, IMAGES, KERNEL),
    "strides": ({"stride": (1, 2)}, IMAGES, KERNEL),
    "padding": ({"padding": 1}, IMAGES, KERNEL),
    "paddings": ({"padding": (2, 1), "stride": (2, 3)}, IMAGES, KERNEL),
    "dilation": ({"dilation": (2, 1)}, IMAGES, KERNEL),
    "groups": ({"groups": 2}, (1, 4, 4, 3), (6, 2, 2, 2)),
    "depthwise": ({"groups": 3, "padding": 1}, (1, 3, 3, 4), (3, 1, 3, 3)),
    "everything": (
        {"stride": 2, "padding": (1, 2), "dilation": (1, 2), "groups": 2},
        (1, 2, 5, 4),
        (2, 1, 3, 2),
    ),
    "same": ({"padding": "same"}, IMAGES, KERNEL),
    "same, dilation": ({"padding": "same", "dilation": (1, 3)}, IMAGES, KERNEL),
    "valid": ({"padding": "valid", "stride": 2}, IMAGES, KERNEL),
    "1x1": ({}, (2, 3, 2, 2), (2, 3, 1, 1)),
    "one image": ({}, (3, 4, 3), (2, 3, 2, 2)),
    "no images": ({}, (0, 3, 5, 4), KERNEL),
}
TURNED = (3, 2, 3, 2)  # the kernel of a transposed convolution: 3 channels to 2
TRANSPOSED: dict[str, tuple[Any, ...]] = {
    "plain": ({}, (2, 3, 3, 2), TURNED),
    "stride": ({"stride": 2}, (2, 3, 3, 2), TURNED),
    "padding": ({"stride": (2, 1), "padding": (1, 0)}, (2, 3, 3, 2), TURNED),
    "output_padding": (
        {"stride": 2, "padding": 1, "output_padding": (1, 0)},
        (1, 3, 2, 3),
        TURNED,
    ),
    "dilation": ({"dilation": (1, 2)}, (1, 3, 2, 3), TURNED),
    "groups": ({"groups": 2, "stride": 2}, (1, 4, 2, 2), (4, 1, 2, 3)),
}
# As behind a ReLU: which of several zeros gets the gradient is a rule, too.
RECTIFIED = np.maximum(numbers(1, 2, 6, 5), 0)

# name -> function, settings, images
RESIZED: dict[str, tuple[Any, ...]] = {
    "max_pool2d": ("max_pool2d", {"kernel_size": 2}, (2, 3, 4, 6)),
    "max_pool2d, cut": ("max_pool2d", {"kernel_size": 2}, (1, 2, 5, 3)),
    "max_pool2d, 1x3": ("max_pool2d", {"kernel_size": (1, 3)}, (1, 2, 2, 6)),
    "max_pool2d, stride": (
        "max_pool2d",
        {"kernel_size": 3, "stride": (1, 2)},
        (1, 2, 5, 6),
    ),
    "max_pool2d, padding": (
        "max_pool2d",
        {"kernel_size": 3, "stride": 2, "padding": 1},
        (1, 2, 5, 4),
    ),
    "max_pool2d, dilation": (
        "max_pool2d",
        {"kernel_size": 2, "stride": 1, "dilation": (2, 1)},
        (1, 2, 5, 4),
    ),
    "max_pool2d, ceil": (
        "max_pool2d",
        {"kernel_size": 2, "stride": 2, "padding": 1, "ceil_mode": True},
        (1, 2, 5, 4),
    ),
    "max_pool2d of ties": (
        "max_pool2d",
        {"kernel_size": 3, "stride": 2, "padding": 1},
        RECTIFIED,
    ),
    "max_pool2d, one image": ("max_pool2d", {"kernel_size": 2}, (2, 4, 4)),
    "avg_pool2d": ("avg_pool2d", {"kernel_size": 2}, (2, 3, 4, 6)),
    "avg_pool2d, cut": ("avg_pool2d", {"kernel_size": 2}, (1, 2, 5, 3)),
    "avg_pool2d, stride": (
        "avg_pool2d",
        {"kernel_size": (3, 2), "stride": 1},
        (1, 2, 5, 4),
    ),
    "avg_pool2d, padding": (
        "avg_pool2d",
        {"kernel_size": 3, "stride": 2, "padding": 1},
        (1, 2, 5, 4),
    ),
    "avg_pool2d, padding not counted": (
        "avg_pool2d",
        {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False},
        (1, 2, 5, 4),
    ),
    "avg_pool2d, ceil": (
        "avg_pool2d",
        {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
        (1, 2, 4, 6),
    ),
    "avg_pool2d, divisor": (
        "avg_pool2d",
        {"kernel_size": 2, "divisor_override": 3},
        (1, 2, 4, 4),
    ),
    "adaptive_avg_pool2d, enlarged": (
        "adaptive_avg_pool2d",
        {"output_size": (None, 5)},
        (1, 2, 2, 3),
    ),
    "adaptive_avg_pool2d": (
        "adaptive_avg_pool2d",
        {"output_size": 1},
        (2, 3, 4, 5),
    ),
    "adaptive_avg_pool2d, uneven": (
        "adaptive_avg_pool2d",
        {"output_size": (3, 2)},
        (1, 2, 7, 5),
    ),
    "interpolate": ("interpolate", {"scale_factor": 2}, (2, 2, 2, 3)),
    "interpolate, nearest": (
        "interpolate",
        {"size": (5, 2), "mode": "nearest"},
        (1, 2, 3, 4),
    ),
    "interpolate, nearest, fractions": (
        "interpolate",
        {"scale_factor": (1.7, 0.6)},
        (1, 2, 3, 5),
    ),
    "interpolate, bilinear, fractions": (
        "interpolate",
        {"scale_factor": (1.7, 0.6), "mode": "bilinear"},
        (1, 2, 3, 5),
    ),
    "interpolate, bilinear": (
        "interpolate",
        {"scale_factor": 2, "mode": "bilinear"},
        (1, 2, 2, 3),
    ),
    "interpolate, bilinear, size": (
        "interpolate",
        {"size": (5, 2), "mode": "bilinear"},
        (1, 2, 3, 4),
    ),
    "interpolate, bilinear, corners": (
        "interpolate",
        {"size": (5, 6), "mode": "bilinear", "align_corners": True},
        (1, 2, 3, 4),
    ),
}

CASES |= {
    f"conv2d, {name}": Case(function("conv2d", **settings), x, W, W[:1])
    for name, (settings, x, W) in CONVS.items()
}
CASES |= {
    f"conv_transpose2d, {name}": Case(
        function("conv_transpose2d", **settings),
        x,
        W,
        (W[1] * settings.get("groups", 1),),
    )
    for name, (settings, x, W) in TRANSPOSED.items()
}
CASES |= {
    name: Case(function(resize, **settings), x)
    for name, (resize, settings, x) in RESIZED.items()
}
CASES |= {
    "conv1d": Case(function("conv1d", stride=2, padding=1), (2, 3, 7), (2, 3, 3), (2,)),
    "conv1d, groups": Case(
        function("conv1d", dilation=2, groups=2), (1, 4, 6), (2, 2, 3), (2,)
    ),
    "conv2d without bias": Case(function("conv2d"), IMAGES, KERNEL),
}

# ---- Modules ----

MODULES = {
    "Linear": Case(lambda nn: nn.Linear(3, 4), (2, 2, 3)),
    "Linear without bias": Case(lambda nn: nn.Linear(3, 4, bias=False), (2, 3)),
    "Embedding": Case(lambda nn: nn.Embedding(4, 3), IDS),
    "BatchNorm1d": Case(lambda nn: nn.BatchNorm1d(3), (4, 3)),
    "BatchNorm1d of sequences": Case(lambda nn: nn.BatchNorm1d(3), (2, 3, 2)),
    "BatchNorm2d": Case(lambda nn: nn.BatchNorm2d(3, momentum=0.3), (2, 3, 2, 2)),
    "BatchNorm2d, average": Case(
        lambda nn: nn.BatchNorm2d(3, momentum=None, affine=False), (2, 3, 2, 2)
    ),
    "BatchNorm2d, evaluation": Case(lambda nn: nn.BatchNorm2d(3).eval(), (2, 3, 2, 2)),
    "LayerNorm": Case(lambda nn: nn.LayerNorm(4), (2, 3, 4)),
    "LayerNorm of two axes": Case(lambda nn: nn.LayerNorm((3, 2), eps=0.1), (2, 3, 2)),
    "LayerNorm without bias": Case(lambda nn: nn.LayerNorm(4, bias=False), (3, 4)),
    "LayerNorm without weights": Case(
        lambda nn: nn.LayerNorm(4, elementwise_affine=False), (3, 4)
    ),
    "RMSNorm": Case(lambda nn: nn.RMSNorm(4), (2, 3, 4)),
    "RMSNorm, eps": Case(lambda nn: nn.RMSNorm(4, eps=0.1), (3, 4)),
    "Conv2d": Case(lambda nn: nn.Conv2d(3, 4, (3, 2), padding=1), IMAGES),
    "Conv2d, groups": Case(
        lambda nn: nn.Conv2d(4, 6, 2, stride=2, dilation=2, groups=2, bias=False),
        (1, 4, 5, 5),
    ),
    "Conv1d": Case(lambda nn: nn.Conv1d(3, 2, 3, padding="same"), (2, 3, 5)),
    "ConvTranspose2d": Case(
        lambda nn: nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1, output_padding=1),
        (1, 3, 2, 3),
    ),
    "MaxPool2d": Case(lambda nn: nn.MaxPool2d(3, stride=2, padding=1), (1, 2, 5, 4)),
    "AvgPool2d": Case(lambda nn: nn.AvgPool2d(2), (1, 2, 4, 5)),
    "AdaptiveAvgPool2d": Case(lambda nn: nn.AdaptiveAvgPool2d((2, 1)), (1, 2, 5, 4)),
    "Upsample": Case(
        lambda nn: nn.Upsample(scale_factor=2, mode="bilinear"), (1, 2, 2, 3)
    ),
    "Flatten": Case(lambda nn: nn.Flatten(), (2, 3, 2)),
    "ReLU": Case(lambda nn: nn.ReLU(), (2, 3)),
    "Tanh": Case(lambda nn: nn.Tanh(), (2, 3)),
    "Sigmoid": Case(lambda nn: nn.Sigmoid(), (2, 3)),
    "GELU": Case(lambda nn: nn.GELU(), (2, 3)),
    "GELU, tanh": Case(lambda nn: nn.GELU(approximate="tanh"), (2, 3)),
    "SiLU": Case(lambda nn: nn.SiLU(), (2, 3)),
    "Softplus": Case(lambda nn: nn.Softplus(), (2, 3)),
    "LeakyReLU": Case(lambda nn: nn.LeakyReLU(0.2), (2, 3)),
    "ELU": Case(lambda nn: nn.ELU(0.5), (2, 3)),
    "Softmax": Case(lambda nn: nn.Softmax(dim=1), (2, 3)),
    "LogSoftmax": Case(lambda nn: nn.LogSoftmax(dim=1), (2, 3)),
    "Identity": Case(lambda nn: nn.Identity(), (2, 3)),
    "CrossEntropyLoss": Case(
        lambda nn: nn.CrossEntropyLoss(label_smoothing=0.1), (4, 5), SOME_LABELS
    ),
    "NLLLoss": Case(lambda nn: nn.NLLLoss(), LOG_CHANCES, LABELS),
    "KLDivLoss": Case(
        lambda nn: nn.KLDivLoss(reduction="batchmean"), LOG_CHANCES[:3, :4], CHANCES
    ),
    "L1Loss": Case(lambda nn: nn.L1Loss(), (2, 3), (2, 3)),
    "SmoothL1Loss": Case(lambda nn: nn.SmoothL1Loss(beta=2.5), (2, 3), (2, 3)),
    "MSELoss": Case(lambda nn: nn.MSELoss(), (2, 3), (2, 3)),
    "BCEWithLogitsLoss": Case(lambda nn: nn.BCEWithLogitsLoss(), (2, 3), BITS),
    "Sequential": Case(
        lambda nn: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (2, 3)
    ),
}
