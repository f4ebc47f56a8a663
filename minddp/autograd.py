"""Autograd: array operations are recorded as they run, and replayed backwards.

    h = x * w                       x ---.
    y = (h + w).sum()                    #0 Mul ---- #1 Add ---- #2 Sum ---- y
                                    w --<           /
                                         '---------'

Each recorded op is a `Node`. It has a serial number, which counts up, and it points to
where its inputs came from: to the node that made the input, to the input itself if it
is a *leaf* that requires a gradient, or to nothing.

Rule.  Backward runs the nodes that y can reach from the youngest to the oldest. A node
is made after its inputs, hence all consumers of a value run before the op that made it,
and the order is the same in every process: no `set` and no address decides it.

Worked example, x = 2, w = 3 (and `sum` does nothing, there is one element).

    node     gy    hands back                 then
    #2 Sum   1     1 to #1
    #1 Add   1     1 to #0, 1 to w            w has one more use, so it waits
    #0 Mul   1     3 to x, 2 to w             x.grad = 3, and w.grad = 1 + 2 = 3

Invariants.
1.  A leaf's hooks run the moment its last use has delivered, not at the end: this is
    how a DDP can send late layers' gradients while early layers still compute.
2.  The gradient of a leaf has its shape and dtype. Once there, its array is added to in
    place and never replaced: a DDP may have made it a view into a bucket. An op may
    write the first gradient of a leaf straight into its `grad_home`, which saves the
    copy into that bucket.
3.  An array that an op handed out is not written to, for others may hold it as well.
4.  References point from results to inputs only. Without cycles, an array is freed when
    its last user lets go, with no need of the garbage collector.
5.  What an op has kept for backward is not written to in between, or backward raises
    (`note_write`).

Cost.  About 5 us per recorded op, forward and backward together, plus the arithmetic.

In PyTorch: `torch::autograd::Engine` (engine.cpp), whose queue is ordered by the same
serial number, `sequence_nr`.

Left out:
- gradients of gradients: backward works on arrays, which record nothing;
- writes that go past the Tensor, `x.data[0] = 1`: they are not seen, and an op that had
  kept the old values computes with the new ones;
- gradients of intermediate results: only leaves keep theirs.
"""

from __future__ import annotations

import builtins
import inspect
import itertools
import math
import reprlib
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from operator import attrgetter, index
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from minddp import neural_ops as neural
from minddp import tensor_ops as ops
from minddp.device import (
    Array,
    Device,
    array_module,
    device_of,
    generator,
    to_host,
)
from minddp.errors import UsageError

# ---- Memory ----


def _keep_freed_memory() -> None:
    """Have glibc keep what is freed, up to 64 MB, instead of returning it at once.

    Each backward frees what its forward has kept, and the next forward wants as much
    again; pages that come back from the system are zeroed first, which took a third of
    a GPT's step. glibc returns memory by a threshold which grows to twice the largest
    block that was returned, of at most 32 MB: so one such block is. It is not written
    to, so it costs nothing, and other allocators do not mind.
    """
    np.empty((32 << 20) - (64 << 10), "uint8")


_keep_freed_memory()

# ---- Recording ----


class _State(threading.local):
    """What a thread is doing; per thread, because ranks may be threads."""

    recording = True  # False inside no_grad and during backward
    depth = 0  # backward calls that are running: a hook may start another
    passing: Pass | None = None  # the outermost of them

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []
        self.outside: list[bool] = []  # `recording` around each no_grad we are in
        self.choosers: list[Chooser] = []  # of each `substitute` we are in


Chooser: TypeAlias = "Callable[[ops.Op, tuple[Tensor, ...]], ops.Op]"
_state = _State()
_serials = itertools.count()


class no_grad:
    """Record nothing inside: `with no_grad():`, or `@no_grad()` above a function."""

    def __enter__(self) -> None:
        _state.outside.append(_state.recording)
        _state.recording = False

    def __exit__(self, *exc: object) -> None:
        _state.recording = _state.outside.pop()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if any(is_lazy(function) for is_lazy in _LAZY):
            raise UsageError(
                f"@no_grad() above {function.__name__}: calling it only prepares it, "
                "and its body runs later. Write `with no_grad():` in the body."
            )

        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return inside


class set_grad_enabled:
    """Switch recording on or off: at once, and until the end of a `with` block."""

    def __init__(self, mode: bool):
        self._before, _state.recording = _state.recording, bool(mode)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        _state.recording = self._before


class substitute:
    """Inside, `apply` runs choose(op, inputs) where it was given op (see amp.py)."""

    def __init__(self, choose: Chooser):
        self._choose = choose

    def __enter__(self) -> None:
        _state.choosers.append(self._choose)

    def __exit__(self, *exc: object) -> None:
        _state.choosers.pop()


_LAZY = (
    inspect.isgeneratorfunction,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
)


class Node:
    """One recorded op; `targets[i]` is where the gradient of input i goes.

    In PyTorch: `torch::autograd::Node`, what `tensor.grad_fn` shows.
    """

    __slots__ = ("__weakref__", "op", "serial", "targets", "writes")

    def __init__(self, op: ops.Op, targets: tuple[Node | Tensor | None, ...]):
        self.op: ops.Op | None = op
        self.targets = targets
        self.serial = next(_serials)
        self.writes = _writes.count  # so many had been before it was made

    def release(self) -> None:
        """Let go of the arrays that the op kept and of the graph behind it."""
        self.op, self.targets = None, ()


def apply(op: ops.Op, *inputs: Tensor) -> Tensor:
    """The op's result, recorded if an input requires a gradient and recording is on.

    A result of integers is not: it cannot move a little, so no gradient gets through.
    """
    if _state.choosers:
        op = _state.choosers[-1](op, inputs)
    op.needs = needs = [x._requires_grad for x in inputs]
    y = Tensor(_forward(op, [x.data for x in inputs]))
    if _state.recording and True in needs and y.data.dtype.kind == "f":
        y._requires_grad = True
        y._node = Node(op, tuple([_target(x) for x in inputs]))
    return y


class BadIndex(UsageError, IndexError):
    """An IndexError as well: that is how a `for` loop over `x[i]` learns of the end."""


def _forward(op: ops.Op, arrays: list[Array]) -> Array:
    """The op's result. Raises UsageError that names the op, the shapes and dtypes."""
    try:
        return op.forward(*arrays)
    except UsageError:
        raise
    except (ValueError, TypeError, IndexError, OverflowError) as exc:
        shapes = ", ".join(f"{x.shape} {x.dtype}" for x in arrays)
        kind = BadIndex if isinstance(exc, IndexError) else UsageError
        raise kind(f"{type(op).__name__} cannot take {shapes}: {exc}") from exc


def _target(x: Tensor) -> Node | Tensor | None:
    """Where x's gradient goes: to the node that made x, to the leaf x, or nowhere."""
    return (x._node or x) if x._requires_grad else None


# ---- Writes between forward and backward ----


class _Writes:
    """When arrays were last written to in place: by number, 1 for the first write.

    By the array that owns the memory, since a view of it may be what an op has kept.
    """

    def __init__(self) -> None:
        self.count = 0
        self._latest: dict[int, tuple[Any, int]] = {}  # id -> (weak reference, number)

    def note(self, x: Array) -> None:
        owner = _owner(x)
        key = id(owner)
        self.count += 1
        try:
            seen = weakref.ref(owner, lambda _: self._latest.pop(key, None))
        except TypeError:  # memory that is not an array's
            return
        self._latest[key] = seen, self.count

    def latest(self, x: Array) -> int:
        """The number of the latest write to x, 0 if there was none."""
        return self._latest.get(id(_owner(x)), (None, 0))[1]


_writes = _Writes()
note_write = _writes.note  # called by whoever writes to a tensor's array in place


def _owner(x: Array) -> Any:
    """The array that owns the memory which x is a view of."""
    while getattr(x, "base", None) is not None:
        x = x.base
    return x


def kept_by(x: Any) -> Iterator[Array]:
    """The arrays that an op keeps for backward: in its attributes, in tuples and
    Tensors there, and in ops within it."""
    if isinstance(x, Tensor):
        yield x.data
    elif isinstance(x, ops.Op):
        for name, value in vars(x).items():
            if name != "homes":  # where gradients go to; nobody reads them there
                yield from kept_by(value)
    elif isinstance(x, tuple | list):
        for part in x:
            yield from kept_by(part)
    elif hasattr(x, "nbytes") and hasattr(x, "strides"):
        yield x


def _check_unwritten(node: Node) -> None:
    """Raises: UsageError if what this op has kept was written to after it ran."""
    for kept in kept_by(node.op):
        if _writes.latest(kept) > node.writes:
            raise UsageError(
                f"backward of {type(node.op).__name__}: an array of shape {kept.shape} "
                "that it needs was modified in place after forward, so its gradient "
                "would be wrong. Modify a copy, x.clone(), or do it after backward."
            )


# ---- Replaying ----


def backward(root: Tensor, gy: Array, retain_graph: bool) -> None:
    """Add d root / d leaf, weighted by gy, to the grad of every leaf behind root.

    Raises whatever an op or a hook raises; gradients are then partly accumulated, and
    callbacks that were queued are dropped.
    """
    recording, _state.recording = _state.recording, False
    _state.depth += 1
    try:
        _replay(root, gy, retain_graph)
        if _state.depth == 1:
            for callback in _state.callbacks:  # may grow while it runs
                callback()
    finally:
        _state.depth -= 1
        _state.recording = recording
        if _state.depth == 0:
            _state.passing = None
            _state.callbacks.clear()


class Pass:
    """One backward, the outermost: the ops that it runs and the leaves it comes to.

    What a backward within it (`checkpoint`) runs is not in here.
    """

    __slots__ = ("leaves", "nodes", "token")

    def __init__(self, nodes: set[Node], leaves: set[Tensor]):
        self.nodes, self.leaves = nodes, leaves
        self.token = object()  # tells it from others, without keeping its nodes


def current_pass() -> Pass:
    """The backward that is running now; for hooks. Raises: UsageError outside of
    one."""
    if _state.passing is None:
        raise UsageError("no backward is running: ask from a gradient hook")
    return _state.passing


def is_recording() -> bool:
    """Whether ops are recorded: not inside `no_grad`."""
    return _state.recording


def bytes_held(root: Tensor) -> int:
    """The bytes of all arrays that backward from this tensor needs, each once.

    Parameters and inputs are counted as well, where an op has kept them.
    """
    owners: dict[int, int] = {}
    for node in _reachable(root._node)[0] if root._node else ():
        for kept in kept_by(node.op):
            owner = _owner(kept)
            owners[id(owner)] = getattr(owner, "nbytes", kept.nbytes)
    return sum(owners.values())


def queue_callback(callback: Callable[[], None]) -> None:
    """Call this once when the backward that is running now, the outermost, has ended.

    However often it is queued.

    In PyTorch: `Variable._execution_engine.queue_callback`.
    """
    if _state.depth == 0:
        raise UsageError(
            "queue_callback outside of backward: it would never be called. Call it "
            "from a gradient hook."
        )
    if callback not in _state.callbacks:
        _state.callbacks.append(callback)


def _replay(root: Tensor, gy: Array, retain_graph: bool) -> None:
    """Run the ops behind root backward, youngest first; free each one that has run."""
    nodes, uses = _reachable(root._node) if root._node else ([], {root: 1})
    if _state.depth == 1:
        _state.passing = Pass(set(nodes), set(uses))
    if root._node is None:  # root is itself a leaf
        _accumulate(root, gy, adopt=False)
        _run_hooks(root)
        return
    gradients = {root._node: gy}
    for node in sorted(nodes, key=attrgetter("serial"), reverse=True):
        _step(node, gradients.pop(node), gradients, uses)
        if not retain_graph:
            node.release()


def _reachable(root: Node) -> tuple[list[Node], dict[Tensor, int]]:
    """The nodes that root depends on, and how often they use each leaf.

    A list of what is still to visit takes the place of recursion, which would end at
    a chain of a thousand ops.
    """
    nodes, seen = [root], {root}  # seen answers "in it?", its order is never used
    uses: dict[Tensor, int] = {}
    for node in nodes:  # grows while it runs
        if node.op is None:
            raise UsageError(
                "backward has already been through this part of the graph and freed "
                "it. To go through it twice, use retain_graph=True the first time, or "
                "compute the forward again."
            )
        for target in node.targets:
            if isinstance(target, Tensor):
                uses[target] = uses.get(target, 0) + 1
            elif target is not None and target not in seen:
                seen.add(target)
                nodes.append(target)
    return nodes, uses


def _step(
    node: Node, gy: Array, gradients: dict[Node, Array], uses: dict[Tensor, int]
) -> None:
    """Run one op backward and deliver what it hands back."""
    if node.op is None:
        raise UsageError(
            "backward came to a part of the graph that a backward within it, of a "
            "`checkpoint` or a hook, had freed. Give the function of a checkpoint all "
            "tensors that it uses as inputs."
        )
    if node.writes != _writes.count:
        _check_unwritten(node)
    node.op.homes = [_home(target) for target in node.targets]
    # The last input first: a layer's bias, then its weight, the reverse of definition.
    pairs = list(zip(node.targets, node.op.backward(gy), strict=True))
    for target, gx in reversed(pairs):
        if isinstance(target, Tensor):
            _accumulate(target, gx, adopt=gx is not gy)
            uses[target] -= 1
            if uses[target] == 0:
                _run_hooks(target)
        elif target is not None:
            # A new sum, not +=: the first gradient may be in use elsewhere as well.
            gradients[target] = gradients[target] + gx if target in gradients else gx


def _home(target: Node | Tensor | None) -> Array | None:
    """Where the first gradient of a leaf is at home, if it has such a place."""
    if isinstance(target, Tensor) and target.grad is None:
        return target.grad_home
    return None


def _accumulate(leaf: Tensor, gx: Array, adopt: bool) -> None:
    """Add gx to the leaf's gradient; adopt the first if nobody else can hold it."""
    assert gx.shape == leaf.data.shape, f"got {gx.shape} for leaf {leaf.data.shape}"
    if leaf.grad is not None:
        leaf.grad.data += gx
    elif gx is leaf.grad_home or (
        adopt and gx.dtype == leaf.data.dtype and _owns_memory(gx)
    ):
        leaf.grad = Tensor(gx)
    else:
        leaf.grad = Tensor(array_module(leaf.data).array(gx, leaf.data.dtype))


def _owns_memory(x: Array) -> bool:
    """Whether x is an array with memory of its own: no view, no NumPy scalar."""
    return not isinstance(x, np.generic) and bool(x.flags.owndata)


def _run_hooks(leaf: Tensor) -> None:
    if leaf._hooks:
        for hook in list(leaf._hooks.values()):
            hook(leaf)


class RemovableHandle:
    """Takes one hook off its tensor again."""

    def __init__(self, hooks: dict[object, Any], hook: Any):
        self._hooks, self._key = hooks, object()  # self as the key would be a cycle
        hooks[self._key] = hook

    def remove(self) -> None:
        """The hook is not called any more; a second remove does nothing."""
        self._hooks.pop(self._key, None)


# ---- Computing again instead of keeping ----


class _Recompute(ops.Op):
    """A function as one op that keeps its inputs only, and runs again in backward."""

    def __init__(self, function: Callable[..., Tensor], inputs: tuple[Any, ...]):
        self.function, self.inputs = function, inputs
        self.random = generator().bit_generator.state
        self.choosers = list(_state.choosers)

    def forward(self, *arrays: Array) -> Array:
        with no_grad():
            y = self.function(*self.inputs)
        if not isinstance(y, Tensor):
            raise UsageError(
                f"checkpoint: the function must return one Tensor, not {type(y)}"
            )
        return y.data

    def backward(self, gy: Array) -> ops.Grads:
        inputs = [
            x.detach().requires_grad_(x._requires_grad) if isinstance(x, Tensor) else x
            for x in self.inputs
        ]
        random = generator().bit_generator
        now, random.state = random.state, self.random  # dropout is to drop the same
        choosers, _state.choosers = _state.choosers, self.choosers
        _state.recording = True
        try:
            y = self.function(*inputs)
        finally:
            _state.recording = False
            random.state, _state.choosers = now, choosers
        if y._requires_grad:
            backward(y, gy, retain_graph=False)
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        for x in tensors:
            if x._requires_grad and x.grad is None:  # the function did not use it
                x.grad = Tensor(array_module(x.data).zeros_like(x.data))
        return tuple([x.grad.data if x.grad is not None else None for x in tensors])


def checkpoint(
    function: Callable[..., Tensor], *inputs: Any, use_reentrant: bool = True
) -> Tensor:
    """function(*inputs), of which only the inputs are kept: backward computes it again.

    The memory of one more forward in exchange for its time. `function` returns one
    Tensor, and gives the same when it runs again; random numbers are repeated.

    Parameters inside get their gradients in a backward within backward. Under DDP one
    that is also used elsewhere needs static_graph=True. `use_reentrant` is accepted for
    PyTorch's sake.

    In PyTorch: `torch.utils.checkpoint.checkpoint`.
    """
    if not _state.recording:
        return function(*inputs)
    op = _Recompute(function, inputs)
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    y = Tensor(_forward(op, [x.data for x in tensors]))
    if y.dtype.kind == "f":  # whatever the inputs are, parameters may be inside
        y._requires_grad = True
        y._node = Node(op, tuple([_target(x) for x in tensors]))
    return y


# ---- Tensor ----


class Picked(NamedTuple):
    """What sort, topk, and max and min along an axis return, as in PyTorch."""

    values: Tensor
    indices: Tensor


class Tensor:
    """An array that knows how it was computed, and what its gradient is.

    data            the array, NumPy or CuPy, shared with whoever passed it in
    requires_grad   whether ops on it are recorded
    grad            None, or after backward, for a leaf, a Tensor of the same shape
    grad_home       None, or the array that backward may write that gradient into

    Names and arguments are those of `torch.Tensor`. Where it differs: `+=` on a tensor
    whose history is recorded makes a new tensor, of which views and other names do not
    know; dtypes are NumPy's; and a number never loses its fraction by being written
    into integers.
    """

    __slots__ = (
        *("__weakref__", "_hooks", "_node", "_requires_grad"),
        *("data", "grad", "grad_home"),
    )
    __array_ufunc__ = None  # so that `array * tensor` comes here, to __rmul__

    def __init__(self, data: Any, requires_grad: bool = False, dtype: Any = None):
        self.data = _as_array(data, dtype)
        self.grad: Tensor | None = None
        self.grad_home: Array | None = None
        self._requires_grad = False
        self._node: Node | None = None
        self._hooks: dict[object, Callable[[Tensor], Any]] | None = None
        if requires_grad:
            self.requires_grad = True

    def __getstate__(self) -> Any:
        """What copy.deepcopy and pickle take along: data and grad, no hooks, no graph.

        A hook belongs to whoever put it on this very tensor, such as a DDP.
        """
        if self._node is not None:
            raise UsageError("only leaves can be copied: write .detach() first")
        values = {
            "data": self.data,
            "grad": self.grad,
            "grad_home": None,
            "_requires_grad": self._requires_grad,
            "_node": None,
            "_hooks": None,
        }
        return getattr(self, "__dict__", None), values

    # -- gradients --

    @property
    def requires_grad(self) -> bool:
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        if self._node is not None:
            raise UsageError(
                "requires_grad can be set on leaves only, and this tensor was computed "
                "from others. Use .detach() for a leaf with its values."
            )
        if flag and self.dtype.kind != "f":
            raise UsageError(
                f"a tensor of {self.dtype} cannot require a gradient: its values "
                "cannot move a little. Use a floating dtype."
            )
        self._requires_grad = flag

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Set requires_grad and return the tensor."""
        self.requires_grad = requires_grad
        return self

    @property
    def node(self) -> Node | None:
        """What made it, if that was recorded (torch: `grad_fn`)."""
        return self._node

    @property
    def is_leaf(self) -> bool:
        """Whether no recorded op made this tensor."""
        return self._node is None

    def backward(
        self,
        gradient: Any = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Add the gradient of this tensor to the `grad` of every leaf behind it.

        `gradient` weighs the elements; it may be left out if there is only one. The
        graph is freed on the way, unless it is retained for another backward.
        """
        if create_graph:
            raise UsageError("create_graph=True: minddp has no gradients of gradients")
        if not self._requires_grad:
            raise UsageError(
                "backward on a tensor that does not require grad: no input of it did, "
                "or it was computed under no_grad, or it was detached"
            )
        backward(self, self._weights(gradient), retain_graph)

    def _weights(self, gradient: Any) -> Array:
        if gradient is None and self.data.size != 1:
            raise UsageError(
                f"backward on a tensor of shape {self.shape} needs gradient=, an array "
                "of that shape. Or reduce it first, with .sum() or .mean()."
            )
        if gradient is None:
            return array_module(self.data).ones_like(self.data)
        gy = as_tensor(gradient, self).data
        if gy.shape != self.shape:
            raise UsageError(f"gradient is {gy.shape}, but the tensor is {self.shape}")
        return gy.astype(self.dtype, copy=False)

    def register_post_accumulate_grad_hook(
        self, hook: Callable[[Tensor], Any]
    ) -> RemovableHandle:
        """Call hook(self) in every backward, as soon as self.grad is complete."""
        if self._node is not None or not self._requires_grad:
            raise UsageError("gradient hooks go on leaves that require grad")
        if self._hooks is None:
            self._hooks = {}
        return RemovableHandle(self._hooks, hook)

    def graph(self) -> str:
        """How this tensor was computed, in Graphviz' DOT language.

        Boxes are ops, with their serial numbers, which backward runs from the highest
        down; ovals are leaves that get a gradient. To see it: `dot -Tsvg`, or
        `graphviz.Source(y.graph())` in a notebook.
        """
        lines = ["digraph {", "  rankdir=BT", f'  y [label="{self.shape}"]']
        nodes, leaves = _reachable(self._node) if self._node else ([], {})
        names: dict[Any, str] = {node: f"op{node.serial}" for node in nodes}
        names |= {leaf: f"leaf{i}" for i, leaf in enumerate(leaves)}
        for node in nodes:
            label = f"{type(node.op).__name__} #{node.serial}"
            lines.append(f'  {names[node]} [shape=box label="{label}"]')
        for leaf in leaves:
            kind = f"{type(leaf).__name__} {leaf.shape}"
            lines.append(f'  {names[leaf]} [label="{kind}"]')
        for node in nodes:
            lines += [
                f"  {names[t]} -> {names[node]}" for t in node.targets if t in names
            ]
        lines += [f"  {names[self._node]} -> y"] if self._node else []
        return "\n".join([*lines, "}"])

    def detach(self) -> Tensor:
        """A leaf without gradient that shares this tensor's array."""
        return Tensor(self.data)

    # -- the array inside --

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.data.shape
        return shape

    @property
    def dtype(self) -> Any:
        return self.data.dtype

    @property
    def ndim(self) -> int:
        return len(self.data.shape)

    @property
    def device(self) -> Device:
        return device_of(self.data)

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the length of one of its axes."""
        return self.shape if dim is None else self.shape[self._axis(dim)]

    def _axis(self, dim: int) -> int:
        """dim, which may count from the end, as a number from 0 to ndim - 1."""
        if not _is_int(dim) or not -self.ndim <= dim < self.ndim:
            raise UsageError(f"a tensor of shape {self.shape} has no axis {dim!r}")
        return dim % self.ndim

    def numel(self) -> int:
        """The number of elements."""
        return int(self.data.size)

    def item(self) -> Any:
        """The only element, as a Python number."""
        return self.data.item()

    def numpy(self) -> Array:
        """The values as a NumPy array, which shares memory unless they are on a GPU."""
        if self._requires_grad:
            raise UsageError(
                "numpy() would drop the history of a tensor that requires grad. Write "
                ".detach().numpy() if that is meant."
            )
        return to_host(self.data)

    def tolist(self) -> Any:
        return self.data.tolist()

    def zero_(self) -> Tensor:
        """Fill with zeros in place; not recorded, and refused if it had to be."""
        return self.fill_(0)

    def fill_(self, value: Any) -> Tensor:
        """Fill with a number, as zero_."""
        if self._must_record(value):
            raise UsageError(
                "a tensor that was computed cannot be filled in place: its history "
                "would be wrong. Make a new one, or write under no_grad."
            )
        self._write(..., _like(value, self))
        return self

    def copy_(self, source: Any) -> Tensor:
        """Take on the values of another, as zero_; broadcast to this shape."""
        values = as_tensor(source).data
        return self.fill_(Tensor(values.astype(self.dtype)))

    def add_(self, b: Any, alpha: Any = 1) -> Tensor:
        """self += alpha * b; under no_grad in place."""
        return self.__iadd__(b if alpha == 1 else as_tensor(b) * alpha)

    def sub_(self, b: Any, alpha: Any = 1) -> Tensor:
        """self -= alpha * b; under no_grad in place."""
        return self.__isub__(b if alpha == 1 else as_tensor(b) * alpha)

    def mul_(self, b: Any) -> Tensor:
        """self *= b; under no_grad in place."""
        return self.__imul__(b)

    def div_(self, b: Any) -> Tensor:
        """self /= b; under no_grad in place."""
        return self.__itruediv__(b)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.numpy(), dtype, copy=copy)

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __float__(self) -> builtins.float:
        return float(self.data)

    def __int__(self) -> int:
        return int(self.data)

    def __index__(self) -> int:
        return index(self.data.item())

    def __bool__(self) -> bool:
        return bool(self.data)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 else format(str(self), spec)

    def __repr__(self) -> str:
        values = np.array2string(to_host(self.data), separator=", ", prefix="Tensor(")
        grad = ", requires_grad=True" if self._requires_grad else ""
        return f"Tensor({values}, dtype={self.dtype}{grad})"

    # -- operators; `a` or `b` is a Tensor, an array or a number --
    # fmt: off

    def __add__(self, b: Any) -> Tensor:       return _apply2(ops.Add(), self, b)
    def __radd__(self, a: Any) -> Tensor:      return _apply2(ops.Add(), a, self)
    def __sub__(self, b: Any) -> Tensor:       return _apply2(ops.Sub(), self, b)
    def __rsub__(self, a: Any) -> Tensor:      return _apply2(ops.Sub(), a, self)
    def __mul__(self, b: Any) -> Tensor:       return _apply2(ops.Mul(), self, b)
    def __rmul__(self, a: Any) -> Tensor:      return _apply2(ops.Mul(), a, self)
    def __truediv__(self, b: Any) -> Tensor:   return _apply2(ops.Div(), self, b)
    def __rtruediv__(self, a: Any) -> Tensor:  return _apply2(ops.Div(), a, self)
    def __matmul__(self, b: Any) -> Tensor:    return _apply2(ops.MatMul(), self, b)
    def __rmatmul__(self, a: Any) -> Tensor:   return _apply2(ops.MatMul(), a, self)
    def __rpow__(self, a: Any) -> Tensor:      return _apply2(ops.Pow(), a, self)

    # In place on a tensor that nothing is recorded of, such as a parameter in no_grad.
    def __iadd__(self, b: Any) -> Tensor:      return self._in_place(ops.Add(), b)
    def __isub__(self, b: Any) -> Tensor:      return self._in_place(ops.Sub(), b)
    def __imul__(self, b: Any) -> Tensor:      return self._in_place(ops.Mul(), b)
    def __itruediv__(self, b: Any) -> Tensor:  return self._in_place(ops.Div(), b)

    def __neg__(self) -> Tensor:               return apply(ops.Neg(), self)
    def __abs__(self) -> Tensor:               return apply(ops.Abs(), self)

    # Comparisons give a Tensor of bool, which has no gradient.
    def __lt__(self, b: Any) -> Tensor:   return Tensor(self.data < _like(b, self))
    def __le__(self, b: Any) -> Tensor:   return Tensor(self.data <= _like(b, self))
    def __gt__(self, b: Any) -> Tensor:   return Tensor(self.data > _like(b, self))
    def __ge__(self, b: Any) -> Tensor:   return Tensor(self.data >= _like(b, self))
    def __eq__(self, b: object) -> Any:   return self._same(b, lambda x, y: x == y)
    def __ne__(self, b: object) -> Any:   return self._same(b, lambda x, y: x != y)
    def _same(self, b: object, compare: Callable[[Array, Array], Array]) -> Any:
        """Elementwise with numbers; `tensor == None` is simply False, as in PyTorch."""
        if b is None or isinstance(b, str):
            return NotImplemented
        return Tensor(compare(self.data, _like(b, self)))

    __hash__ = object.__hash__  # == compares elements, so dicts go by identity

    def exp(self) -> Tensor:                   return apply(ops.Exp(), self)
    def log(self) -> Tensor:                   return apply(ops.Log(), self)
    def sqrt(self) -> Tensor:                  return apply(ops.Sqrt(), self)
    def abs(self) -> Tensor:                   return apply(ops.Abs(), self)
    def tanh(self) -> Tensor:                  return apply(ops.Tanh(), self)
    def sigmoid(self) -> Tensor:               return apply(ops.Sigmoid(), self)
    def relu(self) -> Tensor:                  return apply(ops.ReLU(), self)
    def log1p(self) -> Tensor:                 return apply(ops.Log1p(), self)
    def expm1(self) -> Tensor:                 return apply(ops.Expm1(), self)
    def sin(self) -> Tensor:                   return apply(ops.Sin(), self)
    def cos(self) -> Tensor:                   return apply(ops.Cos(), self)
    def erf(self) -> Tensor:                   return apply(neural.Erf(), self)
    def rsqrt(self) -> Tensor:                 return apply(ops.Rsqrt(), self)
    def reciprocal(self) -> Tensor:            return self ** -1.0
    def square(self) -> Tensor:                return self ** 2
    def sign(self) -> Tensor:                  return apply(ops.Sign(), self)
    def softmax(self, dim: int) -> Tensor:     return apply(neural.Softmax(dim), self)
    def log_softmax(self, dim: int) -> Tensor:
        return apply(neural.LogSoftmax(dim), self)
    def pow(self, exponent: Any) -> Tensor:    return self.__pow__(exponent)
    def float(self) -> Tensor:                 return self.to("float32")
    def long(self) -> Tensor:                  return self.to("int64")
    def clone(self) -> Tensor:                 return apply(ops.Cast(self.dtype), self)
    # fmt: on

    def __pow__(self, b: Any) -> Tensor:
        if isinstance(b, int | float):
            return apply(ops.PowNumber(b if type(b) is int else float(b)), self)
        return _apply2(ops.Pow(), self, b)

    def __setitem__(self, index: Any, b: Any) -> None:
        if self._must_record(b):
            raise UsageError(
                "assignment to elements is not recorded; use F.where, or assign under "
                "no_grad"
            )
        first, index = _numbers_first(_plain_index(index))
        part = self if first is None else Tensor(self.data[first])
        part._write(index, _like(b, self))

    def _in_place(self, op: ops.Op, b: Any) -> Tensor:
        if self._must_record(b):
            return _apply2(op, self, b)
        self._write(..., _forward(op, [self.data, _like(b, self)]))
        return self

    def _write(self, index: Any, y: Array) -> None:
        """self.data[index] = y, unless y would lose its fraction, sign or shape."""
        if not np.can_cast(y.dtype, self.dtype, "same_kind"):
            raise UsageError(
                f"{y.dtype} does not fit into a tensor of {self.dtype}: convert one of "
                "them with .to(), or write x = x + y, which makes a new tensor"
            )
        try:
            self.data[index] = y
            note_write(self.data)
        except (ValueError, IndexError) as exc:
            raise UsageError(
                f"{y.shape} cannot be written into a tensor of {self.shape}: {exc}"
            ) from exc

    def _must_record(self, b: Any) -> bool:
        """Whether writing in place would lose history, so that a new tensor is due."""
        b_requires_grad = isinstance(b, Tensor) and b._requires_grad
        if not _state.recording or not (self._requires_grad or b_requires_grad):
            return False
        if self._requires_grad and self._node is None:
            raise UsageError(
                "a leaf that requires grad cannot be changed in place while ops are "
                "recorded: write `with no_grad():` around the update"
            )
        return True

    # -- reductions: dim is an int, a tuple, or None for all --

    def sum(self, dim: ops.Axis = None, keepdim: bool = False) -> Tensor:
        return apply(ops.Sum(dim, keepdim), self)

    def mean(self, dim: ops.Axis = None, keepdim: bool = False) -> Tensor:
        return apply(ops.Mean(dim, keepdim), self)

    def max(self, dim: int | None = None, keepdim: bool = False) -> Any:
        """The largest value, those that tie sharing the gradient; or along an axis
        (values, indices), of which the first that ties gets all of it."""
        if dim is None:
            return apply(ops.Max(None, keepdim), self)
        return self._picked(self.data.argmax(self._axis(dim)), dim, keepdim)

    def min(self, dim: int | None = None, keepdim: bool = False) -> Any:
        """As max, of the smallest."""
        if dim is None:
            return apply(ops.Min(None, keepdim), self)
        return self._picked(self.data.argmin(self._axis(dim)), dim, keepdim)

    def _picked(self, where: Array, dim: int, keepdim: bool) -> Picked:
        """The elements at these positions along the axis, and the positions."""
        indices = Tensor(where).unsqueeze(self._axis(dim))
        values = self.gather(self._axis(dim), indices)
        if keepdim:
            return Picked(values, indices)
        axis = self._axis(dim)
        return Picked(values.squeeze(axis), indices.squeeze(axis))

    def amax(self, dim: ops.Axis = None, keepdim: bool = False) -> Tensor:
        """`max` under the name that it has in PyTorch."""
        return apply(ops.Max(dim, keepdim), self)

    def amin(self, dim: ops.Axis = None, keepdim: bool = False) -> Tensor:
        """`min` under the name that it has in PyTorch."""
        return apply(ops.Min(dim, keepdim), self)

    def var(
        self,
        dim: ops.Axis = None,
        unbiased: bool = True,
        keepdim: bool = False,
        *,
        correction: builtins.float | None = None,
    ) -> Tensor:
        """The variance: squares summed, divided by n - correction.

        correction: 1 if unbiased, else 0, unless it is given.
        """
        return apply(self._spread(ops.Var, dim, unbiased, keepdim, correction), self)

    def std(
        self,
        dim: ops.Axis = None,
        unbiased: bool = True,
        keepdim: bool = False,
        *,
        correction: builtins.float | None = None,
    ) -> Tensor:
        """The square root of `var`; where it is 0, the gradient is 0."""
        return apply(self._spread(ops.Std, dim, unbiased, keepdim, correction), self)

    def _spread(
        self,
        op: type[ops.Var],
        dim: ops.Axis,
        unbiased: bool,
        keepdim: bool,
        correction: builtins.float | None,
    ) -> ops.Var:
        if isinstance(dim, bool) or self.dtype.kind != "f":
            raise UsageError(
                "var and std are of floats, over dim, an axis or several; write "
                f"unbiased={dim} with its name. dim is {dim!r}, and the tensor of "
                f"{self.dtype}."
            )
        return op(dim, keepdim, unbiased if correction is None else correction)

    def prod(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """The product along an axis, or of all elements."""
        if dim is None:
            return self.reshape(-1).prod(0)
        return apply(ops.Prod(self._axis(dim), keepdim), self)

    def cumsum(self, dim: int) -> Tensor:
        """Running sums along an axis."""
        return apply(ops.CumSum(self._axis(dim)), self)

    def any(self, dim: ops.Axis = None, keepdim: bool = False) -> Tensor:
        """Whether one is not 0."""
        return Tensor(self.data.astype("bool").any(dim, keepdims=keepdim))

    def all(self, dim: ops.Axis = None, keepdim: bool = False) -> Tensor:
        """Whether none is 0."""
        return Tensor(self.data.astype("bool").all(dim, keepdims=keepdim))

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Where the largest element is; positions have no gradient."""
        axis = None if dim is None else self._axis(dim)
        return Tensor(self.data.argmax(axis, keepdims=keepdim))

    def argmin(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Where the smallest element is; positions have no gradient."""
        axis = None if dim is None else self._axis(dim)
        return Tensor(self.data.argmin(axis, keepdims=keepdim))

    # -- order --

    def argsort(self, dim: int = -1, descending: bool = False) -> Tensor:
        """Where the smallest is, and the next, and so on; equals keep their order.

        NaN counts as the largest.
        """
        xp, axis = array_module(self.data), self._axis(dim)
        if not descending:
            return Tensor(xp.argsort(self.data, axis, kind="stable"))
        order = xp.argsort(xp.flip(self.data, axis), axis, kind="stable")
        return Tensor(self.shape[axis] - 1 - xp.flip(order, axis))

    def sort(self, dim: int = -1, descending: bool = False) -> Picked:
        """The elements in order along an axis, and where they were."""
        order = self.argsort(dim, descending)
        return Picked(self.gather(dim, order), order)

    def topk(
        self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
    ) -> Picked:
        """The k largest, or smallest, along an axis, in order, and where they are."""
        axis = self._axis(dim)
        if not _is_int(k) or not 0 <= k <= self.shape[axis]:
            raise UsageError(f"topk: {k!r} of {self.shape[axis]} elements")
        order = self.argsort(dim, descending=largest)
        order = order[(slice(None),) * axis + (slice(k),)]
        return Picked(self.gather(dim, order), order)

    def gather(self, dim: int, index: Any) -> Tensor:
        """Elements at places along an axis: y[i][j] = x[index[i][j]][j] for dim 0.

        index has as many axes as the tensor, the others no longer than it.
        """
        axis, places = self._axis(dim), as_tensor(index).data
        fits = places.ndim == self.ndim and all(
            n <= m or i == axis
            for i, (n, m) in enumerate(zip(places.shape, self.shape, strict=False))
        )
        if not fits:
            raise UsageError(f"gather: index {places.shape} does not fit {self.shape}")
        neural.check_range(places, self.shape[axis], "index", "elements")
        return apply(ops.Gather(places, axis), self)

    def multinomial(self, num_samples: int, replacement: bool = False) -> Tensor:
        """Draw positions, with probability in proportion to the elements.

        (n,) -> (num_samples,), (rows, n) -> (rows, num_samples). From the host
        generator: seed it. Raises UsageError for a negative or infinite element, and
        for fewer than can be drawn, a row of zeros included.
        """
        weights = to_host(self.data).astype("float64")
        rows = weights.reshape(-1, self.shape[-1]) if 1 <= self.ndim <= 2 else weights
        least = 1 if replacement else num_samples
        if (
            rows.ndim != 2
            or num_samples < 1
            or not (np.isfinite(rows) & (rows >= 0)).all()
            or ((rows > 0).sum(1) < least).any()
        ):
            raise UsageError(
                f"multinomial: cannot draw {num_samples} from {self.shape}. Elements "
                f"are 0 or more and finite, at least {least} above 0 in a row."
            )
        # The first of n arrivals, at rates w: its place has probability w / sum(w).
        count = num_samples if replacement else 1
        waits = generator().exponential(size=(count, *rows.shape))
        with np.errstate(divide="ignore"):
            waits = np.where(rows > 0, waits / rows, np.inf)
        if replacement:
            drawn = waits.argmin(-1).T
        else:
            drawn = waits[0].argsort(-1, kind="stable")[:, :num_samples]
        drawn = drawn.reshape(*self.shape[:-1], num_samples)
        return Tensor(self.device.put(drawn))

    # -- limits and masks --

    def clamp(
        self,
        min: builtins.float | None = None,
        max: builtins.float | None = None,
    ) -> Tensor:
        """At least min, at most max, which are numbers.

        The gradient passes where the element is within, the bounds included.
        """
        for bound in (min, max):
            if isinstance(bound, Tensor | np.ndarray) or min is max is None:
                raise UsageError(
                    "clamp: give min, max or both, as numbers; for tensors there are "
                    "F.maximum and F.minimum"
                )
        return apply(ops.Clip(min, max), self)

    def clip(
        self,
        min: builtins.float | None = None,
        max: builtins.float | None = None,
    ) -> Tensor:
        """clamp."""
        return self.clamp(min, max)

    def masked_fill(self, mask: Any, value: Any) -> Tensor:
        """`value` where the mask is True; there the gradient is 0."""
        chosen = as_tensor(mask).data
        if chosen.dtype != "bool":
            raise UsageError(f"masked_fill: the mask must be bool, not {chosen.dtype}")
        return _apply2(ops.Where(chosen), value, self)

    def tril(self, diagonal: int = 0) -> Tensor:
        """The last two axes with 0 above the diagonal, or the diagonal-th above it."""
        return self._triangle(diagonal, lower=True)

    def triu(self, diagonal: int = 0) -> Tensor:
        """The last two axes with 0 below the diagonal, or the diagonal-th above it."""
        return self._triangle(diagonal - 1, lower=False)

    def _triangle(self, diagonal: int, lower: bool) -> Tensor:
        if self.ndim < 2:
            raise UsageError(f"tril and triu need two axes, and this is {self.shape}")
        below = array_module(self.data).tri(*self.shape[-2:], diagonal, dtype="bool")
        return self.masked_fill(~below if lower else below, 0)

    # -- shape --

    def reshape(self, *shape: Any) -> Tensor:
        """The same elements in another shape, `reshape(2, 3)` or `reshape((2, 3))`."""
        return apply(ops.Reshape(_unpacked(shape)), self)

    def view(self, *shape: Any) -> Tensor:
        """reshape; unlike torch, it copies where the memory layout demands it."""
        return apply(ops.Reshape(_unpacked(shape)), self)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        """The axes from start_dim to end_dim, both included, joined into one."""
        if self.ndim == 0:
            return self.reshape(1)
        start, end = self._axis(start_dim), self._axis(end_dim)
        if start > end:
            raise UsageError(f"flatten: axis {start} does not come before {end}")
        joined = math.prod(self.shape[start : end + 1])
        return self.reshape(*self.shape[:start], joined, *self.shape[end + 1 :])

    def permute(self, *axes: Any) -> Tensor:
        """The axes in another order: axis i of the result is axis axes[i]."""
        return apply(ops.Transpose(_unpacked(axes)), self)

    def transpose(self, dim0: int, dim1: int) -> Tensor:
        """Two axes, exchanged."""
        axes, i, j = list(range(self.ndim)), self._axis(dim0), self._axis(dim1)
        axes[i], axes[j] = j, i
        return apply(ops.Transpose(tuple(axes)), self)

    @property
    def T(self) -> Tensor:
        return apply(ops.Transpose(tuple(reversed(range(self.ndim)))), self)

    def split(self, size: int, dim: int = 0) -> list[Tensor]:
        """Pieces of `size` along an axis; the last may be shorter."""
        before = (slice(None),) * self._axis(dim)
        if not _is_int(size) or size < 1:
            raise UsageError(f"split: the size of a piece is 1 or more, not {size!r}")
        starts = range(0, self.shape[dim], size)
        return [self[(*before, slice(i, i + size))] for i in starts]

    def chunk(self, chunks: int, dim: int = 0) -> list[Tensor]:
        """At most `chunks` pieces along an axis, all but the last of equal length."""
        if not _is_int(chunks) or chunks < 1:
            raise UsageError(f"chunk: the number of pieces is 1 or more, not {chunks}")
        return self.split(max(-(-self.size(dim) // chunks), 1), dim)

    def unbind(self, dim: int = 0) -> list[Tensor]:
        """The slices along an axis, without it."""
        before = (slice(None),) * self._axis(dim)
        return [self[(*before, i)] for i in range(self.shape[dim])]

    def squeeze(self, dim: int | tuple[int, ...] | None = None) -> Tensor:
        """Without the axes of length 1, or without those of them in dim."""
        dims: Any = range(self.ndim) if dim is None else dim
        chosen = [self._axis(i) for i in ((dims,) if _is_int(dims) else dims)]
        shape = [n for i, n in enumerate(self.shape) if i not in chosen or n != 1]
        return self.reshape(*shape)

    def unsqueeze(self, dim: int) -> Tensor:
        """With a new axis of length 1 at `dim`, which may count from the end."""
        if not _is_int(dim) or not -self.ndim - 1 <= dim <= self.ndim:
            raise UsageError(f"unsqueeze: {self.shape} has no room at {dim!r}")
        at = dim % (self.ndim + 1)
        return self.reshape(*self.shape[:at], 1, *self.shape[at:])

    def expand(self, *sizes: Any) -> Tensor:
        """Stretched to these sizes, where axes of length 1 grow; -1 leaves one."""
        shape = list(_unpacked(sizes))
        added = len(shape) - self.ndim
        for i, n in enumerate(shape):
            if n == -1 and i >= added:
                shape[i] = self.shape[i - added]
        return apply(ops.BroadcastTo(tuple(shape)), self)

    def expand_as(self, other: Tensor) -> Tensor:
        """expand(other.shape)."""
        return self.expand(*other.shape)

    def repeat(self, *sizes: Any) -> Tensor:
        """sizes[i] copies side by side along axis i; new axes come first."""
        counts = _unpacked(sizes)
        shape = (1,) * (len(counts) - self.ndim) + self.shape
        if len(counts) < self.ndim or not all(_is_int(n) and n >= 0 for n in counts):
            raise UsageError(f"repeat: {counts} are no counts for axes of {self.shape}")
        apart = [n for size in shape for n in (1, size)]
        spread = [n for pair in zip(counts, shape, strict=True) for n in pair]
        joined = [n * size for n, size in zip(counts, shape, strict=True)]
        return self.reshape(*apart).expand(*spread).reshape(*joined)

    def flip(self, *dims: Any) -> Tensor:
        """The axes in dims, backwards."""
        turned = [self._axis(dim) for dim in _unpacked(dims)]
        step = [slice(None, None, -1 if i in turned else 1) for i in range(self.ndim)]
        return self[tuple(step)].clone()  # not a view, as in torch

    def __getitem__(self, index: Any) -> Tensor:
        first, index = _numbers_first(_plain_index(index))
        x = self if first is None else apply(ops.GetItem(first), self)
        return apply(ops.GetItem(index), x)

    # -- dtype and device --

    def to(
        self,
        *targets: Any,
        device: Any = None,
        dtype: Any = None,
        non_blocking: bool = False,
    ) -> Tensor:
        """In another dtype or on another device; itself if nothing has to change.

        A target is a Device, "cpu", "cuda", "cuda:1", a dtype, or a Tensor to be like.
        `non_blocking` is accepted for torch's sake and makes no difference.
        """
        x = self
        given = [t for t in (device, dtype) if t is not None]
        if not targets and not given:
            raise UsageError("to(): say where to, or which dtype")
        for target in [*targets, *given]:
            if isinstance(target, Tensor):
                x = x.to(target.device, target.dtype)
                continue
            goal = device_or_dtype(target)
            if isinstance(goal, Device):
                x = x if goal == x.device else apply(ops.Move(goal), x)
            else:
                x = x if goal == x.dtype else apply(ops.Cast(goal), x)
        return x

    def cpu(self) -> Tensor:
        """On the host."""
        return self.to("cpu")

    def type_as(self, other: Tensor) -> Tensor:
        """In the dtype of another tensor."""
        return self.to(other.dtype)

    if not TYPE_CHECKING:  # for the annotations above, these are names of types
        # fmt: off
        def half(self) -> Tensor:    return self.to("float16")
        def double(self) -> Tensor:  return self.to("float64")
        def int(self) -> Tensor:     return self.to("int32")
        def bool(self) -> Tensor:    return self.to("bool")
        # fmt: on

    def contiguous(self) -> Tensor:
        """In memory in the order of its axes: itself if it is, else a copy."""
        return self if self.data.flags.c_contiguous else apply(ops.Contiguous(), self)

    def pin_memory(self) -> Tensor:
        """Itself: minddp has no page-locked tensors."""
        return self


def device_or_dtype(target: Any) -> Any:
    """The Device or the NumPy dtype that `x.to(target)` means."""
    if isinstance(target, Device) or str(target).startswith(("cpu", "cuda")):
        return Device(target)
    try:
        return np.dtype("None" if target is None else target)  # None is float64 there
    except (TypeError, ValueError) as exc:
        raise UsageError(f"to({target!r}): this is neither device nor dtype") from exc


def as_tensor(x: Any, like: Tensor | None = None) -> Tensor:
    """x as a Tensor; a bare number takes on the dtype of `like`, where it has one."""
    if isinstance(x, Tensor):
        return x
    return Tensor(x if like is None else _like(x, like))


def _apply2(op: ops.Op, a: Any, b: Any) -> Tensor:
    """op on a and b, of which at least one is a Tensor."""
    a = a if isinstance(a, Tensor) else Tensor(_like(a, b))
    b = b if isinstance(b, Tensor) else Tensor(_like(b, a))
    if a.data.dtype != b.data.dtype:
        a, b = _aligned(a, b)
    if a.data.dtype.kind != "f" and isinstance(op, ops.Div):
        a, b = a.to("float32"), b.to("float32")
    return apply(op, a, b)


def _aligned(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one dtype, where NumPy's would be a wider one than PyTorch's.

    Integers take on a floating dtype beside them, and a number without axes that of a
    tensor with some.
    """
    for x, y in ((a, b), (b, a)):
        both = x.dtype.kind == y.dtype.kind == "f"
        if y.dtype.kind == "f" and (
            x.dtype.kind != "f" or (both and x.ndim == 0 and y.ndim > 0)
        ):
            x = x.to(y.dtype)
            return (x, y) if y is b else (y, x)
    return a, b


_NUMBERS = (int, float, np.bool, np.integer, np.floating)


def _like(x: Any, tensor: Tensor) -> Array:
    """x as an array to compute with `tensor`.

    A number takes on a floating tensor's dtype: 2.0 * x stays float32 if x is, even if
    2.0 came as a NumPy float64.
    """
    if isinstance(x, Tensor):
        return x.data
    dtype = None
    if isinstance(x, _NUMBERS):
        dtype = tensor.dtype
        if dtype.kind != "f":
            fraction = isinstance(x, float | np.floating)
            dtype = np.float32 if fraction else np.result_type(dtype, x)
    return _numbers(array_module(tensor.data), x, dtype)


def _as_array(data: Any, dtype: Any) -> Array:
    """The array in a Tensor: arrays as they are; Python floats become float32."""
    if type(data) is np.ndarray and data.dtype.kind in "biuf" and dtype is None:
        return data
    if isinstance(data, Tensor):
        data = data.data
    x = _numbers(array_module(data), data, dtype)
    as_given = dtype is not None or hasattr(data, "dtype")
    return x if as_given or x.dtype != np.float64 else x.astype(np.float32)


def _numbers(xp: Any, data: Any, dtype: Any) -> Array:
    """data as an array of xp: itself if it is one. Refused unless of real numbers."""
    try:
        x = xp.asarray(data, dtype)
    except (ValueError, TypeError, OverflowError) as exc:
        raise UsageError(f"no Tensor can hold {reprlib.repr(data)}: {exc}") from exc
    if x.dtype.kind not in "biuf":
        raise UsageError(
            f"a Tensor holds real numbers, not {x.dtype}: {reprlib.repr(data)}"
        )
    return x


def _plain_index(index: Any) -> Any:
    """The index with arrays in place of Tensors."""
    if isinstance(index, tuple):
        return tuple([_plain_index(part) for part in index])
    return index.data if isinstance(index, Tensor) else index


def _numbers_first(index: Any) -> tuple[Any, Any]:
    """x[index] as x[first][rest], if numbers stand beside arrays (else: None, index).

    NumPy takes a number beside an array for an array, too, and x[1, :, rows] would have
    the axis of the rows before that of the slice. PyTorch applies numbers on their own.
    """
    if not isinstance(index, tuple):
        return None, index
    numbers = [_is_int(part) for part in index]
    if not any(numbers) or not any(hasattr(part, "ndim") for part in index):
        return None, index
    first: list[Any] = []
    for part, number in zip(index, numbers, strict=True):
        if number or part is Ellipsis:
            first.append(part)
        elif part is not None:  # a mask stands for as many axes as it has
            mask = hasattr(part, "dtype") and part.dtype.kind == "b"
            first += [slice(None)] * (part.ndim if mask else 1)
    rest = [p for p, number in zip(index, numbers, strict=True) if not number]
    return tuple(first), tuple(rest)


def _unpacked(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    """(2, 3) from f(2, 3) as well as from f((2, 3))."""
    one = len(sizes) == 1 and isinstance(sizes[0], tuple | list)
    return tuple(sizes[0]) if one else sizes


def _is_int(x: Any) -> bool:
    return hasattr(x, "__index__") and not hasattr(x, "__len__")
