"""Neural-network modules: parameters with names, and the functions that use them.

    Sequential                     names            a parameter's full name
    |-- 0: Linear(64, 128)         0                0.weight, 0.bias
    |-- 1: ReLU()                  1
    '-- 2: Linear(128, 10)         2                2.weight, 2.bias

A module is an object whose attributes are parameters (trained), buffers (saved but not
trained) and other modules. There is no register: `vars(self)`, which Python keeps in
the order of assignment, is the list.

Rule.  Parameters come in the order of definition, depth first, in every process. DDP
reduces the k-th parameter of one rank with the k-th of the others, so an order taken
from a set or from addresses would add up unrelated numbers.

Worked example.  For the model above

    [name for name, p in model.named_parameters()]
    ["0.weight", "0.bias", "2.weight", "2.bias"]

Invariants.
1.  Loading and moving write into the Parameter objects that are there: an optimizer or
    DDP that holds them stays right.
2.  A tied parameter, reached under two names, is listed once by `parameters` and twice
    in `state_dict`; it is still tied after loading.

In PyTorch: `torch.nn.Module`. It keeps registers by `__setattr__`, and lists a module's
own parameters before those of its children. For clipping, `torch.nn.utils`.

Left out:
- forward and backward hooks on modules; a submodule in a plain list, which nobody
  finds (use ModuleList);
- assigning a new array to a buffer's name: write into it, `self.mean.data[...] = m`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Real
from types import SimpleNamespace
from typing import Any

import numpy as np

from minddp import functional as F
from minddp.autograd import Tensor, as_tensor, device_or_dtype
from minddp.device import Array, Device, array_module, generator
from minddp.errors import UsageError


class Parameter(Tensor):
    """A Tensor that a module trains: a leaf that requires a gradient."""

    def __init__(self, data: Any, requires_grad: bool = True):
        super().__init__(data, requires_grad)


class Buffer(Tensor):
    """A Tensor that a module saves with its parameters but does not train."""


class Module:
    """Something with parameters that can be called; subclasses define `forward`."""

    training = True
    forward: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    # -- what is inside, in order of definition --

    def named_children(self) -> Iterator[tuple[str, "Module"]]:
        """The modules that are attributes of this one."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value

    def children(self) -> Iterator["Module"]:
        return (child for _, child in self.named_children())

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, "Module"]]:
        """This module and all below it, each once."""
        return _once(self._walk_modules(prefix))

    def modules(self) -> Iterator["Module"]:
        return (module for _, module in self.named_modules())

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """All parameters with their dotted names; a tied one under its first name."""
        return _once(self._walk_tensors(Parameter, prefix))

    def parameters(self) -> Iterator[Parameter]:
        return (p for _, p in self.named_parameters())

    def named_buffers(self, prefix: str = "") -> Iterator[tuple[str, Buffer]]:
        return _once(self._walk_tensors(Buffer, prefix))

    def buffers(self) -> Iterator[Buffer]:
        return (buffer for _, buffer in self.named_buffers())

    def register_buffer(self, name: str, tensor: Any) -> None:
        """self.name = Buffer(tensor)."""
        vars(self)[name] = Buffer(tensor)

    def _walk_modules(self, prefix: str) -> Iterator[tuple[str, "Module"]]:
        yield prefix, self
        for name, child in self.named_children():
            yield from child._walk_modules(_join(prefix, name))

    def _walk_tensors(self, kind: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        """(name, tensor) of that kind or kinds; a tied one as often as it is named."""
        for name, value in vars(self).items():
            if isinstance(value, kind):
                yield _join(prefix, name), value
            elif isinstance(value, Module):
                yield from value._walk_tensors(kind, _join(prefix, name))

    # -- saving and loading --

    def state_dict(self, prefix: str = "") -> dict[str, Tensor]:
        """Name -> tensor for parameters and buffers; shares memory with the module."""
        tensors = self._walk_tensors((Parameter, Buffer), prefix)
        return {name: tensor.detach() for name, tensor in tensors}

    def load_state_dict(
        self, state: Mapping[str, Any], strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Copy the values in; return the names that are missing, and those unexpected.

        Raises UsageError, listing all that is wrong, before anything is written. With
        strict=False, missing and unexpected names are no error; wrong values still are.
        """
        own = dict(self._walk_tensors((Parameter, Buffer), ""))
        missing = [name for name in own if name not in state]
        unexpected = [name for name in state if name not in own]
        shared = [name for name in own if name in state]
        problems = list(_misfits(own, state, shared))
        if strict:
            problems += [f"missing: {name}" for name in missing]
            problems += [f"unexpected: {name}" for name in unexpected]
        if problems:
            lines = "\n  ".join(problems)
            raise UsageError(
                f"load_state_dict: nothing was loaded into {type(self).__name__}, "
                f"for the state does not match it:\n  {lines}"
            )
        for name in shared:
            own[name].data[...] = own[name].device.put(as_tensor(state[name]).data)
        return missing, unexpected

    # -- settings for all below --

    def train(self, mode: bool = True) -> "Module":
        """Switch Dropout and the like on, or with mode=False off."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> "Module":
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or set them to zero where they are."""
        for p in self.parameters():
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()

    def requires_grad_(self, requires_grad: bool = True) -> "Module":
        """Freeze (False) or unfreeze all parameters."""
        for p in self.parameters():
            p.requires_grad = requires_grad
        return self

    def to(self, target: Any) -> "Module":
        """Move parameters and buffers to a device, or their floats to a dtype.

        The Parameter objects stay, their arrays are new: move before wrapping in DDP.
        """
        goal = device_or_dtype(target)
        if not isinstance(goal, Device) and goal.kind != "f":
            raise UsageError(f"to({target!r}): the floats of a module must stay floats")
        for _, tensor in _once(self._walk_tensors((Parameter, Buffer), "")):
            for t in (tensor, tensor.grad):
                if t is not None:
                    t.data = _moved(t, goal)
        return self

    def apply(self, fn: Callable[["Module"], Any]) -> "Module":
        """Call fn on all modules below and then on this one."""
        for child in self.children():
            child.apply(fn)
        fn(self)
        return self

    def extra_repr(self) -> str:
        """What `repr` shows between the parentheses, before the children."""
        return ""

    def __repr__(self) -> str:
        children = [f"({name}): {child!r}" for name, child in self.named_children()]
        head = type(self).__name__
        if not children:
            return f"{head}({self.extra_repr()})"
        inner = "\n".join(children).replace("\n", "\n  ")
        return f"{head}(\n  {inner}\n)"


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _once(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The pairs whose second part has not come before, being the same object."""
    seen: dict[int, Any] = {}  # holds the objects, so that no id is used again
    for name, value in pairs:
        if id(value) not in seen:
            seen[id(value)] = value
            yield name, value


def _misfits(
    own: Mapping[str, Tensor], state: Mapping[str, Any], names: Iterable[str]
) -> Iterator[str]:
    """A line for each name whose value cannot be copied without loss."""
    for name in names:
        try:
            mine, theirs = own[name], as_tensor(state[name])
        except UsageError as exc:
            yield f"no tensor: {name}, {exc}"
            continue
        if mine.shape != theirs.shape:
            yield f"misshapen: {name} is {mine.shape} here, {theirs.shape} in the state"
        elif not np.can_cast(theirs.dtype, mine.dtype, "same_kind"):
            yield f"mistyped: {name} is {mine.dtype} here, {theirs.dtype} in the state"


def _moved(t: Tensor, goal: Any) -> Array:
    """t's array on the device or in the dtype; integers keep theirs."""
    moves = isinstance(goal, Device) or t.dtype.kind == "f"
    return t.detach().to(goal).data if moves else t.data


# ---- Containers ----


class ModuleList(Module):
    """A list whose modules are found."""

    def __init__(self, modules: Iterable[Module] = ()):
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> "ModuleList":
        vars(self)[str(len(self))] = module
        return self

    def __len__(self) -> int:
        return len(list(self.children()))

    def __getitem__(self, index: int) -> Module:
        return list(self.children())[index]

    def __iter__(self) -> Iterator[Module]:
        return self.children()


class Sequential(ModuleList):
    """Modules, each called on the result of the one before."""

    def __init__(self, *modules: Module):
        super().__init__(modules)

    def forward(self, x: Any) -> Any:
        for module in self:
            x = module(x)
        return x


class ModuleDict(Module):
    """A dict of names whose modules are found."""

    def __init__(self, modules: Mapping[str, Module] | None = None):
        for name, module in (modules or {}).items():
            self[name] = module

    def __setitem__(self, name: str, module: Module) -> None:
        if hasattr(self, name) and name not in self:
            raise UsageError(f"ModuleDict: {name!r} is an attribute of it already")
        vars(self)[name] = module

    def __getitem__(self, name: str) -> Module:
        return dict(self.named_children())[name]

    def __contains__(self, name: str) -> bool:
        return name in dict(self.named_children())

    def __len__(self) -> int:
        return len(self.keys())

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> list[str]:
        return [name for name, _ in self.named_children()]

    def values(self) -> list[Module]:
        return list(self.children())

    def items(self) -> list[tuple[str, Module]]:
        return list(self.named_children())


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
