"""Modules: parameters with names, and the functions that use them (layers: nn.py).

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

In PyTorch: `torch.nn.Module` (torch/nn/modules/module.py). It keeps registers by
`__setattr__`, and lists a module's own parameters before those of its children.

Left out:
- forward and backward hooks on modules; a submodule in a plain list, which nobody
  finds (use ModuleList).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import NoneType
from typing import Any

import numpy as np

from minddp.autograd import Tensor, as_tensor, device_or_dtype, note_write
from minddp.device import Array, Device
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

    def __setattr__(self, name: str, value: Any) -> None:
        """Under the name of a parameter or buffer, a plain Tensor would get lost.

        Raises: UsageError for a parameter; a buffer becomes one with the new values.
        """
        old = vars(self).get(name)
        if isinstance(old, Parameter) and not isinstance(value, Parameter | NoneType):
            raise UsageError(
                f"{type(self).__name__}.{name} is a Parameter, and {type(value)} would "
                "not be trained or saved. Assign a Parameter, or write into it: "
                f"`with no_grad(): module.{name}.copy_(...)`."
            )
        if isinstance(old, Buffer) and isinstance(value, Tensor):
            value = value if isinstance(value, Buffer) else Buffer(value.data)
        super().__setattr__(name, value)

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
            note_write(own[name].data)
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

    def float(self) -> "Module":
        return self.to("float32")

    def double(self) -> "Module":
        return self.to("float64")

    def half(self) -> "Module":
        return self.to("float16")

    def cpu(self) -> "Module":
        return self.to("cpu")

    def cuda(self, device: Any = None) -> "Module":
        return self.to("cuda" if device is None else f"cuda:{device}")

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


def _check_module(container: str, module: Any) -> None:
    """What is no module would not be found: neither called nor trained."""
    if not isinstance(module, Module):
        raise UsageError(
            f"{container} holds modules, not {module!r}; a function such as F.relu has "
            "a module, nn.ReLU()"
        )


class ModuleList(Module):
    """A list whose modules are found."""

    def __init__(self, modules: Iterable[Module] = ()):
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> "ModuleList":
        _check_module(type(self).__name__, module)
        taken = [int(name) for name, _ in self.named_children() if name.isdecimal()]
        vars(self)[str(max(taken, default=-1) + 1)] = module
        return self

    def __len__(self) -> int:
        return len(list(self.children()))

    def __getitem__(self, index: int) -> Module:
        return list(self.children())[index]

    def __iter__(self) -> Iterator[Module]:
        return self.children()


class Sequential(ModuleList):
    """Modules, each called on the result of the one before."""

    def __init__(self, *modules: Any):
        """The modules, or one dict of names and modules."""
        if len(modules) == 1 and isinstance(modules[0], dict):
            for name, module in modules[0].items():
                _check_module("Sequential", module)
                vars(self)[name] = module
        else:
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
        _check_module("ModuleDict", module)
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
