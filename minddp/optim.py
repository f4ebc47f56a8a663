"""Optimizers: from gradients to new parameters, in place.

    loss.backward()        p.grad.data holds the gradient g
    optimizer.step()       p.data   -=  lr * direction(g, state of p)
    optimizer.zero_grad()  p.grad is None again

    SGD      v = m v + g                       direction  v   (g, without momentum)
    Adam     m = mean of g,  v = mean of g^2   direction  m / (sqrt(v) + eps)
    AdamW    the same, and p shrinks by lr * weight_decay, apart from the gradient

Rule.  An update depends on p, its gradient and its state, on nothing else. Replicas
that start with equal bits and see equal gradients therefore stay equal, and DDP has to
send gradients only, never parameters or optimizer state.

Worked example, SGD with lr = 0.1 and momentum 0.9, a gradient that is always 1:

    step    1        2        3
    v       1        1.9      2.71
    p       -0.1     -0.29    -0.561

Invariants.
1.  Parameters are numbered in the order of the list they came in; state is saved under
    these numbers. A set is refused: its order differs from process to process.
2.  A parameter without gradient is skipped, state and all.
3.  Arrays are written in place, so whoever holds them sees the update. Gradients are
    only read: under DDP they lie in buckets, which are not the optimizer's.

Cost.  NumPy performs one operation at a time, so an update is a number of walks over
arrays: 4 for SGD with momentum, 13 for AdamW. If each went through the memory, it would
cost more than the arithmetic. So all walks go over the first block of every array, then
all over the second, and what the first walk brings into the cache, the others find:

    x, g, m, v     | block | block | block | ...
    scratch        | block |                        the same for all, and in every step

State: one array as large as the parameter for momentum, two for Adam.
        [Adam: Kingma & Ba 2015, algorithm 1; AdamW: Loshchilov & Hutter 2019]

In PyTorch: `torch.optim`; with `fused=True` it also works block by block, and does all
operations on a number while it is in a register. `foreach` and `fused` choose among
PyTorch's ways to compute the same numbers: they are accepted, and change nothing here.

Left out:
- closures, amsgrad, maximize, and sparse gradients;
- an lr that is a Tensor: an lr is a number in `param_groups`, which you may change.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, TypeAlias

import numpy as np

from minddp import lr_scheduler as lr_scheduler  # optim.lr_scheduler, as in PyTorch
from minddp.autograd import Tensor, as_tensor, note_write
from minddp.device import Array, array_module
from minddp.errors import UsageError

Group: TypeAlias = dict[str, Any]

BLOCK_BYTES = 192 * 1024  # of each of Adam's 5 arrays: together they fit in 1 MiB


class Optimizer:
    """What all optimizers share: groups of parameters with settings, and their state.

    `params` is an iterable of Tensors, or one of dicts {"params": ..., "lr": ...}, each
    of which may override the defaults. A subclass defines `update`, and names what it
    keeps for each parameter: arrays of the parameter's shape, or a count "step".
    """

    state_names: tuple[str, ...] = ()

    def __init__(self, params: Iterable[Any], defaults: Group):
        self.defaults = defaults
        self.param_groups: list[Group] = []
        self.state: dict[Tensor, dict[str, Any]] = {}
        self._scratch: dict[Any, Array] = {}  # by dtype and shape
        params = _listed(params)
        if not params:
            raise UsageError("optimizer: the list of parameters is empty")
        if not isinstance(params[0], dict):
            params = [{"params": params}]
        for group in params:
            self.add_param_group(group)

    def add_param_group(self, group: Group) -> None:
        """Take in more parameters, with the defaults for what the group leaves open."""
        if not isinstance(group, Mapping) or "params" not in group:
            raise UsageError(f"optimizer: a group is a dict with 'params', not {group}")
        group = {**self.defaults, **group, "params": _listed(group["params"])}
        _check_settings(group)
        known = [id(p) for p in self._parameters()]
        for i, p in enumerate(group["params"]):
            if not isinstance(p, Tensor) or not p.is_leaf:
                raise UsageError(f"optimizer: parameter {i} is no Tensor, or no leaf")
            if id(p) in known:
                raise UsageError(f"optimizer: parameter {i} of a group was given twice")
            known.append(id(p))
        self.param_groups.append(group)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or set them to zero where they are."""
        for p in self._parameters():
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state.setdefault(p, {})
                    self.update(p.data, p.grad.data, state, group)
                    note_write(p.data)

    def update(self, x: Array, g: Array, state: dict[str, Any], group: Group) -> None:
        """Change the parameter x in place, given its gradient g, which is only read."""
        raise UsageError(f"{type(self).__name__} does not define update")

    def _blocks(self, *arrays: Array) -> Iterable[Sequence[Array]]:
        """The arrays, all of one shape, in blocks, each time with a scratch block.

        Whole if they are no larger than a block, or do not lie in memory one number
        after the other, or are on a GPU, where a call costs more than a walk.
        """
        x, xp = arrays[0], array_module(arrays[0])
        if xp is not np:
            return [(*arrays, xp.empty_like(x))]
        length = BLOCK_BYTES // x.itemsize
        is_small = x.size <= length
        key = x.dtype, x.shape if is_small else (length,)
        scratch = self._scratch.get(key)
        if scratch is None:
            scratch = self._scratch[key] = np.empty(key[1], x.dtype)
        if is_small:
            return [(*arrays, scratch)]
        if not all(a.flags.c_contiguous for a in arrays):
            return [(*arrays, np.empty_like(x))]
        return _cut([a.reshape(-1) for a in arrays], scratch)

    def state_dict(self) -> dict[str, Any]:
        """State and settings, with parameters as numbers; shares the state's arrays."""
        number = {p: i for i, p in enumerate(self._parameters())}
        return {
            "state": {number[p]: dict(state) for p, state in self.state.items()},
            "param_groups": [
                {**group, "params": [number[p] for p in group["params"]]}
                for group in self.param_groups
            ],
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a saved state, copied.

        Raises UsageError if it does not fit; then nothing was loaded.
        """
        try:
            groups = self._loaded_groups(saved["param_groups"])
            state = self._loaded_state(saved["state"])
        except UsageError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise UsageError(
                f"load_state_dict: this is no saved {type(self).__name__}: {exc!r}"
            ) from exc
        self.state = state
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update(loaded)

    def _loaded_groups(self, saved: Iterable[Group]) -> list[Group]:
        """The saved settings, with the parameters that are here."""
        here = [len(group["params"]) for group in self.param_groups]
        there = [len(group["params"]) for group in saved]
        if here != there:
            raise UsageError(
                f"load_state_dict: the groups here have {here} parameters, in the "
                f"saved state {there}"
            )
        groups = []
        for group, settings in zip(self.param_groups, saved, strict=True):
            if missing := [name for name in self.defaults if name not in settings]:
                raise UsageError(
                    f"load_state_dict: the saved settings lack {missing}. Were they "
                    f"saved by another optimizer than {type(self).__name__}?"
                )
            groups.append({**settings, "params": group["params"]})
            _check_settings(groups[-1])
        return groups

    def _loaded_state(self, saved: Mapping[Any, Any]) -> dict[Tensor, dict[str, Any]]:
        """The saved state, copied, for the parameters that have those numbers here."""
        numbered = {str(i): p for i, p in enumerate(self._parameters())}
        state = {}
        for number, values in saved.items():  # numbers, or text from JSON
            if str(number) not in numbered:
                raise UsageError(f"load_state_dict: there is no parameter {number}")
            p = numbered[str(number)]
            held = {name: v for name, v in values.items() if v is not None}
            given = {name: as_tensor(value) for name, value in held.items()}
            names = self.state_names if given else ()
            due = {name: () if name == "step" else p.shape for name in names}
            shapes = {name: t.shape for name, t in given.items()}
            if shapes != due:
                raise UsageError(
                    f"load_state_dict: the state of parameter {number} must have the "
                    f"shapes {due}, not {shapes}"
                )
            state[p] = {name: _copied(name, t, p) for name, t in given.items()}
        return state


def _copied(name: str, value: Tensor, p: Tensor) -> Any:
    """The count as a number; an array as a new one like p, on p's device."""
    if name == "step":
        return int(value)
    return p.device.put(value.data).astype(p.dtype)


def _cut(flat: list[Array], scratch: Array) -> Iterator[list[Array]]:
    """The 1-D arrays in blocks as long as scratch, which goes with every one."""
    for begin in range(0, flat[0].size, scratch.size):
        block = [a[begin : begin + scratch.size] for a in flat]
        yield [*block, scratch[: block[0].size]]


def _listed(params: Iterable[Any]) -> list[Any]:
    if isinstance(params, set | frozenset):
        raise UsageError(
            "optimizer: give the parameters as a list, not as a set. A set has another "
            "order in each process, and ranks would update different parameters."
        )
    if isinstance(params, Tensor):
        raise UsageError("optimizer: give a list of parameters, not a single Tensor")
    if not isinstance(params, Iterable):
        raise UsageError(f"optimizer: give a list of parameters, not {params!r}")
    return list(params)


def _check_settings(group: Group) -> None:
    for name in ("lr", "momentum", "dampening", "weight_decay", "eps"):
        value = group.get(name, 0)
        # "not >=" and not "<", so that NaN fails, too
        if not isinstance(value, Real) or not float(value) >= 0:
            raise UsageError(f"optimizer: {name} must be 0 or more, not {value!r}")
    betas = group.get("betas", (0, 0))
    if not (isinstance(betas, tuple | list) and len(betas) == 2) or not all(
        isinstance(beta, Real) and 0 <= float(beta) < 1 for beta in betas
    ):
        raise UsageError(f"optimizer: betas are two numbers in [0, 1), not {betas!r}")
    if group.get("nesterov") and (not group["momentum"] or group["dampening"]):
        raise UsageError("optimizer: nesterov needs momentum > 0 and dampening = 0")


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, weight decay, Nesterov's variant.

        g = g + weight_decay p
        v = momentum v + (1 - dampening) g          (v = g in the first step)
        p = p - lr v                                (nesterov: lr (g + momentum v))

    In PyTorch: `torch.optim.SGD`.
    """

    state_names = ("momentum_buffer",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
    ):
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)

    def update(self, x: Array, g: Array, state: dict[str, Any], group: Group) -> None:
        xp, lr, momentum = array_module(x), float(group["lr"]), group["momentum"]
        v, share = state.get("momentum_buffer"), 1.0
        if v is not None:
            share -= group["dampening"]
        elif momentum:
            v = state["momentum_buffer"] = xp.zeros_like(x)
        blocks = self._blocks(x, g, v) if momentum else self._blocks(x, g)
        for x, g, *buffers, s in blocks:
            if group["weight_decay"]:
                xp.multiply(x, group["weight_decay"], out=s)
                s += g
                g = s
            rate = lr
            if momentum:
                v = buffers[0]
                v *= momentum
                v += g if share == 1 else xp.multiply(g, share, out=s)
                if group["nesterov"]:
                    x -= xp.multiply(g, lr, out=s)
                    rate = lr * momentum
                g = v
            x -= xp.multiply(g, rate, out=s)


class Adam(Optimizer):
    """Adam: steps scaled by the running mean and mean square of the gradient.

        g = g + weight_decay p
        m = b1 m + (1 - b1) g            M = m / (1 - b1^t)        t = 1, 2, 3, ...
        v = b2 v + (1 - b2) g^2          V = v / (1 - b2^t)
        p = p - lr M / (sqrt(V) + eps)

    m and v start at 0 and are too small at first; M and V make up for it. With c =
    sqrt(1 - b2^t), the last line is p - lr c / (1 - b1^t) m / (sqrt(v) + c eps): the
    factors are numbers, and neither M nor V is computed.

    In PyTorch: `torch.optim.Adam`.
    """

    state_names = ("step", "exp_avg", "exp_avg_sq")
    decoupled = False  # weight decay on p itself (AdamW), not by way of the gradient

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def update(self, x: Array, g: Array, state: dict[str, Any], group: Group) -> None:
        xp, lr, (b1, b2) = array_module(x), float(group["lr"]), group["betas"]
        if not state:
            state.update(step=0, exp_avg=xp.zeros_like(x), exp_avg_sq=xp.zeros_like(x))
        t = state["step"] = state["step"] + 1
        c, decay = math.sqrt(1 - b2**t), group["weight_decay"]
        if self.decoupled:
            decay = 1 - lr * decay
        numbers = [b1, 1 - b1, b2, (1 - b2) / (1 - b1) ** 2, decay]
        numbers += [c * group["eps"], c * lr / (1 - b1**t)]
        if xp is np:  # or each operation on each block would convert them
            numbers = [np.array(number, x.dtype) for number in numbers]
        keep_m, to_m, keep_v, to_v, decay, eps, rate = numbers
        blocks = self._blocks(x, g, state["exp_avg"], state["exp_avg_sq"])
        for x, g, m, v, s in blocks:
            if group["weight_decay"] and self.decoupled:
                x *= decay
            elif group["weight_decay"]:
                xp.multiply(x, decay, out=s)
                s += g
                g = s
            xp.multiply(g, to_m, out=s)  # (1 - b1) g
            m *= keep_m
            m += s
            s *= s
            s *= to_v  # (1 - b2) g^2
            v *= keep_v
            v += s
            xp.sqrt(v, out=s)
            s += eps
            xp.divide(m, s, out=s)
            s *= rate
            x -= s


class AdamW(Adam):
    """Adam whose weight decay acts on p itself:  p = (1 - lr weight_decay) p  first.

    In PyTorch: `torch.optim.AdamW`.
    """

    decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
    ):
        super().__init__(params, lr, betas, eps, weight_decay)
