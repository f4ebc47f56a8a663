"""Names that `torch` has for methods of its tensors: torch.exp(x) is x.exp().

    import minddp as torch
    z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)

The first argument may be an array as well as a Tensor. What has no method is in
functional.py or creation.py.

In PyTorch: torch/functional.py, and the generated functions of `torch`.

Left out: `out=`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from minddp.autograd import Tensor, as_tensor
from minddp.device import generator, to_host
from minddp.errors import UsageError
from minddp.functional import matmul


def _method(name: str) -> Callable[..., Any]:
    """Tensor's method of that name as a function."""

    def function(input: Any, *args: Any, **settings: Any) -> Any:
        return getattr(as_tensor(input), name)(*args, **settings)

    function.__name__, function.__doc__ = name, f"x.{name}(...)."
    return function


exp = _method("exp")
log = _method("log")
sqrt = _method("sqrt")
sum = _method("sum")
mean = _method("mean")
max = _method("max")
min = _method("min")
argmax = _method("argmax")
argmin = _method("argmin")
sigmoid = _method("sigmoid")
tanh = _method("tanh")
relu = _method("relu")
softmax = _method("softmax")
log_softmax = _method("log_softmax")
clamp = _method("clamp")
abs = _method("abs")
flatten = _method("flatten")
tril = _method("tril")
triu = _method("triu")
topk = _method("topk")
sort = _method("sort")
cumsum = _method("cumsum")
chunk = _method("chunk")
split = _method("split")
squeeze = _method("squeeze")
unsqueeze = _method("unsqueeze")
transpose = _method("transpose")
permute = _method("permute")
reshape = _method("reshape")
var = _method("var")
std = _method("std")
any = _method("any")
all = _method("all")
sin = _method("sin")
cos = _method("cos")
pow = _method("pow")
argsort = _method("argsort")
gather = _method("gather")
masked_fill = _method("masked_fill")
flip = _method("flip")
repeat = _method("repeat")
amax = _method("amax")
amin = _method("amin")
prod = _method("prod")
square = _method("square")
rsqrt = _method("rsqrt")
unbind = _method("unbind")
erf = _method("erf")
sign = _method("sign")

mm = bmm = matmul


def randn_like(x: Any) -> Tensor:
    """Normal, of the shape, dtype and device of x."""
    x = as_tensor(x)
    if x.dtype.kind != "f":
        raise UsageError(f"randn_like: {x.dtype} has no fractions")
    values = generator().standard_normal(x.shape).astype(x.dtype)
    return Tensor(x.device.put(values))


def isnan(x: Any) -> Tensor:
    """Where x is NaN."""
    x = as_tensor(x)
    return Tensor(x.data != x.data)


def isfinite(x: Any) -> Tensor:
    """Where x is neither infinite nor NaN."""
    x = as_tensor(x)
    return Tensor(abs(x.data) < float("inf"))


def allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """Whether |a - b| <= atol + rtol |b| everywhere."""
    a, b = (to_host(as_tensor(x).data) for x in (a, b))
    return bool(np.allclose(a, b, rtol, atol))
