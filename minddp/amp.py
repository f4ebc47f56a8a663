"""Mixed precision: products in half precision, and a loss large enough to survive it.

    scaler = GradScaler()
    for x, y in batches:
        with autocast("cpu", dtype="float16"):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()           gradients, times 65,536
        scaler.unscale_(optimizer)              gradients as they are, to clip them, say
        scaler.step(optimizer)                  optimizer.step(), if all are finite
        scaler.update()                         a scale for the next step
        optimizer.zero_grad()

A float16 has 5 bits of exponent: above 65,504 is infinity, below 6e-8 is 0, and it is
below that many gradients lie. The chain rule is linear: a loss times 65,536 makes all
gradients 65,536 times as large, on their way back through float16 as well; at the
parameters, in float32, they are divided again. How much is too much is found out by
trying: after growth_interval good steps the scale is doubled, and when a gradient came
out infinite that step is left out and the scale halved.

`autocast` decides op by op, and parameters stay float32:

    HALF     matmul, linear, einsum, attention, convolutions    inputs become half
    FLOAT    exp, log, powers, sums, softmax, norms, losses     inputs become float32
    others                                                      as their inputs are

NumPy has no fast arithmetic for half precision, so here an op of HALF rounds its inputs
to it, computes in float32, and rounds the result; its gradients likewise. That is what
GPUs do, whose products of float16 are added in float32. You get what mixed precision
does to the numbers, not what it is for: here it takes more time and memory, not less.

Rule.  The step is skipped by all ranks or by none: a rank that skipped alone would be
another model from then on. With DDP this holds without a word. Each rank looks at
averaged gradients, which have the same bits everywhere, and one infinity on one rank
makes the average infinite on all. Where gradients differ (no DDP; local SGD; averages
by hand, later), give process_group: then an all-reduce asks whether any rank has found
one. All ranks must call `unscale_` or `step` equally often.

Worked example.  A gradient of 1e-8 is 0 in float16. Times 65,536 it is 0.000655, and
after unscale_ 1e-8 again, to 3 digits.

Invariants.
1.  `unscale_` writes into the gradients, in the bucket views of a DDP too: call it
    after the last backward of a step, once for each optimizer.
2.  A scale is a power of 2 if it begins as one: to scale and unscale loses nothing.

In PyTorch: `torch.amp.autocast` (aten/src/ATen/autocast_mode.cpp has the lists),
`torch.amp.GradScaler`. There, GradScaler() without a GPU does nothing; here it works.

Left out:
- arrays of bfloat16, which NumPy does not have: such values lie in float32 arrays;
- `torch.cuda.amp` with its other order of arguments; the cache of rounded weights;
- autocast's `cache_enabled`; setters for GradScaler's factors.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ContextDecorator
from typing import Any

import numpy as np

from minddp import neural_ops as neural
from minddp import spatial_ops
from minddp import tensor_ops as ops
from minddp.autograd import Tensor, substitute
from minddp.bfloat16 import BFLOAT16, from_bfloat16, to_bfloat16
from minddp.device import Array, Device, array_module, to_host
from minddp.errors import UsageError
from minddp.group import ProcessGroup

# ---- autocast ----

HALF = (
    *(ops.MatMul, neural.Linear, ops.Einsum, neural.Attention),
    *(spatial_ops.Conv2d, spatial_ops.ConvTranspose2d),
)
FLOAT = (
    *(ops.Exp, ops.Expm1, ops.Log, ops.Log1p, ops.Pow, ops.PowNumber, ops.Rsqrt),
    *(
        ops.Sum,
        ops.CumSum,
        ops.Prod,
        neural.Softmax,
        neural.LogSoftmax,
        neural.LayerNorm,
    ),
    *(neural.CrossEntropy, neural.KLDivergence, neural.BinaryCrossEntropy),
    *(neural.SquaredError, neural.SmoothL1),
)

Rounding = Callable[[Array], Array]


class Rounded(ops.Op):
    """Another op on rounded inputs: computed in float32, with a rounded result.

    x  --> round --> float32 --> [ op ] --> round --> y
    gx <-- dtype of x <-- round <-- [ op ] <-- float32 <-- gy
    """

    def __init__(self, op: ops.Op, rounded: Rounding):
        self.op, self.rounded = op, rounded

    def forward(self, *arrays: Array) -> Array:
        self.op.needs, self.dtypes = self.needs, [x.dtype for x in arrays]
        return self.rounded(self.op.forward(*[_wide(self.rounded(x)) for x in arrays]))

    def backward(self, gy: Array) -> ops.Grads:
        grads = self.op.backward(_wide(self.rounded(gy)))
        return tuple(
            [
                None if g is None else self.rounded(g).astype(dtype, copy=False)
                for g, dtype in zip(grads, self.dtypes, strict=True)
            ]
        )


def _wide(x: Array) -> Array:
    return x.astype("float32", copy=False)


def _to_float16(x: Array) -> Array:
    """x as float16; too large becomes infinite, which is a GradScaler's business."""
    with np.errstate(over="ignore"):
        return x.astype("float16", copy=False)


def _to_bfloat16_values(x: Array) -> Array:
    """x rounded to bfloat16, as float32."""
    if array_module(x) is not np:
        raise UsageError("autocast: bfloat16 is for the host, use float16 on a GPU")
    return from_bfloat16(to_bfloat16(x)).reshape(x.shape)


class autocast(substitute, ContextDecorator):
    """`with autocast("cpu", dtype="float16"):` or `@autocast("cpu")` above a function.

    device_type: "cpu" or "cuda"; ops on arrays elsewhere stay as they are. dtype:
    float16 or bfloat16 (the usual one on "cpu"); float32 is as enabled=False, which
    inside of another autocast switches it off. float64 arrays are left alone.

    For the forward and the loss; backward computes as its forward did, and is called
    outside.
    """

    def __init__(self, device_type: str, dtype: Any = None, enabled: bool = True):
        self._device_type = str(device_type)
        if self._device_type not in ("cpu", "cuda"):
            raise UsageError(f"autocast: no device_type {device_type!r}: 'cpu', 'cuda'")
        self._rounded = _rounding(dtype, self._device_type)
        self._enabled = enabled and self._rounded is not _wide
        super().__init__(self._cast)

    def _cast(self, op: ops.Op, inputs: Iterable[Tensor]) -> ops.Op:
        """op, or a Rounded of it."""
        dtypes = {x.dtype for x in inputs}
        devices = {x.device.type for x in inputs}
        if not self._enabled or devices != {self._device_type}:
            return op
        if not dtypes <= {np.dtype("float16"), np.dtype("float32")}:
            return op
        if isinstance(op, HALF):
            return Rounded(op, self._rounded)
        if isinstance(op, FLOAT) and np.dtype("float16") in dtypes:
            return Rounded(op, _wide)
        return op


def _rounding(dtype: Any, device_type: str) -> Rounding:
    if dtype is None:
        dtype = "bfloat16" if device_type == "cpu" else "float16"
    name = "bfloat16" if dtype == BFLOAT16 else str(dtype)
    known = {
        "float16": _to_float16,
        "bfloat16": _to_bfloat16_values,
        "float32": _wide,
    }
    if name not in known:
        raise UsageError(f"autocast: dtype is float16 or bfloat16, not {dtype!r}")
    return known[name]


# ---- GradScaler ----


class GradScaler:
    """Scales the loss, unscales the gradients, and skips steps that overflowed.

    device: accepted, as in PyTorch; it goes by the gradients. init_scale: the first
    scale. After growth_interval steps without overflow it is multiplied by
    growth_factor, after one with it by backoff_factor. enabled=False: does nothing.
    process_group: ask all its ranks whether one has found an overflow.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: ProcessGroup | None = None,
    ):
        if not isinstance(device, str | Device):
            raise UsageError(
                f"GradScaler: the first argument is a device, not {device!r}. Write "
                "init_scale=..."
            )
        if not (init_scale > 0 and growth_factor > 1 and 0 < backoff_factor < 1):
            raise UsageError(
                "GradScaler: init_scale > 0, growth_factor > 1 and backoff_factor "
                f"between 0 and 1, not {init_scale}, {growth_factor}, {backoff_factor}"
            )
        self._scale = float(init_scale)
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval = growth_interval
        self._growth_tracker = 0  # good steps since the scale was changed
        self._enabled, self._group = enabled, process_group
        self._found: dict[Any, bool] = {}  # optimizer -> whether it has an overflow
        self._stepped: list[Any] = []

    def scale(self, outputs: Any) -> Any:
        """The loss times the scale, float32 or more; or a list or tuple of losses."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, list | tuple):
            return type(outputs)([self.scale(output) for output in outputs])
        factor = outputs.device.put(np.array(self._scale, "float32"))
        return outputs * Tensor(factor)

    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients of its parameters by the scale, in place, and look.

        Raises UsageError if it has been done already in this step, if there is no
        gradient, or if one is float16. PeerError, with a process group.
        """
        if not self._enabled:
            return
        if optimizer in self._found:
            raise UsageError(
                "GradScaler: the gradients of this optimizer were unscaled already. "
                "Once in a step, before step(), and update() at its end."
            )
        found = _unscale(self._gradients(optimizer), 1 / self._scale)
        if self._group:
            flag = np.array([found], np.uint8)
            self._group.all_reduce(flag, "max")
            found = bool(flag[0])
        self._found[optimizer] = found

    def _gradients(self, optimizer: Any) -> list[Array]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        grads = [p.grad.data for p in parameters if p.grad is not None]
        if not grads:
            raise UsageError(
                "GradScaler: this optimizer has no gradient to look at. Was backward "
                "called? With DDP, leave its nan='ignore': the scaler skips by itself, "
                "and has to see the overflow."
            )
        if any(g.dtype == "float16" for g in grads):
            raise UsageError(
                "GradScaler: a gradient is float16, so what it lost is lost. Keep the "
                "parameters float32, and use autocast."
            )
        return grads

    def step(self, optimizer: Any) -> None:
        """optimizer.step(), unless a gradient is infinite or NaN, on any rank.

        Raises: as unscale_, which it calls if you have not.
        """
        if not self._enabled:
            optimizer.step()
            return
        if optimizer in self._stepped:
            raise UsageError("GradScaler: step() twice without update()")
        if optimizer not in self._found:
            self.unscale_(optimizer)
        self._stepped.append(optimizer)
        if not self._found[optimizer]:
            optimizer.step()

    def update(self, new_scale: float | None = None) -> None:
        """Set the scale for the next step, to new_scale if given.

        Raises UsageError if no gradients were looked at since the last update.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = float(new_scale)
        elif not self._found:
            raise UsageError("GradScaler: update() before step(), or twice")
        elif any(self._found.values()):
            self._scale *= self._backoff_factor
            self._growth_tracker = 0
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self._growth_interval:
                self._scale *= self._growth_factor
                self._growth_tracker = 0
        self._found, self._stepped = {}, []

    def get_scale(self) -> float:
        """The scale; 1 if disabled."""
        return self._scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """The scale and the settings, for a checkpoint; {} if disabled."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved scale. Raises UsageError if it is not one."""
        own = self.state_dict()
        if not self._enabled:
            return
        if not isinstance(state, Mapping) or set(state) != set(own):
            raise UsageError(
                f"load_state_dict: a GradScaler has saved {list(own)}, this is {state} "
                "(a disabled one saves {})"
            )
        self._scale = float(state["scale"])
        self._growth_factor = float(state["growth_factor"])
        self._backoff_factor = float(state["backoff_factor"])
        self._growth_interval = int(state["growth_interval"])
        self._growth_tracker = int(state["_growth_tracker"])


def _unscale(grads: Iterable[Array], factor: float) -> bool:
    """Multiply by the factor, in place; whether something is infinite or NaN."""
    found = False
    for g in grads:
        g *= factor
        found = found or not to_host(array_module(g).isfinite(g).all())
    return found
