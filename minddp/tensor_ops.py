"""Array formulas: what each op computes, and how a gradient goes back through it.

    x, a, b    the inputs          gy    d loss / d y, the gradient that comes in
    y          the output          gx    d loss / d x, the gradient that goes out

           forward                      backward
    x ---> [ op ] ---> y         gx <--- [ op ] <--- gy
             |   keeps on itself           ^
             '---- what backward needs ----'

Rule.  The chain rule: `backward` multiplies gy by the derivative of y, and hands back
one gradient per input. Every op is a class with the same two methods; what is fixed,
such as an axis, goes to `__init__`. After two ops you can predict the third:

    class   y = forward               gradient = backward
    ------------------------------------------------------------------------
    Add     a + b                     gy              gy
    Mul     a * b                     gy * b          gy * a
    Exp     exp(x)                    gy * y
    Sum     x.sum(axis)               gy, stretched over the axis again
    MatMul  a @ b                     gy @ b.T        a.T @ gy

Worked example.

    op = Mul()
    op.forward(np.array(3.0), np.array(4.0))    12.0
    op.backward(np.array(1.0))                  (4.0, 3.0): a step on a moves the
                                                product by b

Invariants, which autograd relies on.
1.  A gradient has the shape of its input. NumPy stretches operands (broadcasting), and
    `unbroadcast` sums the gradient over the axes that were stretched.
2.  gy is only read. It may be shared, and it may be a view in which all elements are
    one number in memory.
3.  Two inputs never get one new array: the receiver may keep what it gets and later add
    to it in place.
4.  Where `op.needs` says False, nobody wants that input's gradient, and the op may
    answer None: the first layer need not compute the gradient of the data.

Cost.  Each class keeps references to arrays, not copies; an elementwise op reads and
writes memory two or three times per direction.

In PyTorch: `derivatives.yaml` and the kernels of ATen.

Left out:
- derivatives of derivatives: backward works on arrays, which record nothing;
- in-place ops, which could overwrite what another op kept for its backward;
- checks for arrays that were changed between forward and backward.
"""

import math
from collections.abc import Callable, Sequence
from types import EllipsisType, NoneType
from typing import Any, TypeAlias

from numpy import broadcast_shapes

from minddp.device import (
    Array,
    Device,
    array_module,
    device_of,
    scatter_add,
)

Grads: TypeAlias = tuple[Array | None, ...]
Axis: TypeAlias = int | tuple[int, ...] | None
Shape: TypeAlias = tuple[int, ...]


class Op:
    """One formula with its derivative, used for one forward and its backward."""

    needs: Sequence[bool] = (True, True, True)  # which inputs want a gradient
    homes: Sequence[Array | None] = (None, None, None)  # where it may be written to
    forward: Callable[..., Array]
    backward: Callable[[Array], Grads]


def unbroadcast(g: Array, shape: Shape) -> Array:
    """g summed to `shape`: the gradient of an input that was stretched to g's shape.

    An element that was used k times collects the gradients of its k uses. For example,
    (5, 4) <- (4,) sums the rows, and (5, 4) <- (5, 1) the columns.
    """
    if g.shape == shape:
        return g
    added = g.ndim - len(shape)
    stretched = tuple(added + i for i, size in enumerate(shape) if size == 1)
    return total(g, (*range(added), *stretched)).reshape(shape)


# ---- Arithmetic: two inputs, broadcast against each other ----


class Add(Op):
    """a + b"""

    def forward(self, a: Array, b: Array) -> Array:
        self.shapes = a.shape, b.shape
        return a + b

    def backward(self, gy: Array) -> Grads:
        return unbroadcast(gy, self.shapes[0]), unbroadcast(gy, self.shapes[1])


class Sub(Op):
    """a - b"""

    def forward(self, a: Array, b: Array) -> Array:
        self.shapes = a.shape, b.shape
        return a - b

    def backward(self, gy: Array) -> Grads:
        return unbroadcast(gy, self.shapes[0]), unbroadcast(-gy, self.shapes[1])


class Mul(Op):
    """a * b"""

    def forward(self, a: Array, b: Array) -> Array:
        self.a, self.b = a, b
        return a * b

    def backward(self, gy: Array) -> Grads:
        a, b, needs = self.a, self.b, self.needs
        ga = unbroadcast(gy * b, a.shape) if needs[0] else None
        gb = unbroadcast(gy * a, b.shape) if needs[1] else None
        return ga, gb


class Div(Op):
    """a / b; the derivative -a / b^2 is taken as -y / b, for b^2 may be out of range"""

    def forward(self, a: Array, b: Array) -> Array:
        self.a, self.b, self.y = a, b, a / b
        return self.y

    def backward(self, gy: Array) -> Grads:
        a, b, y, needs = self.a, self.b, self.y, self.needs
        ga = unbroadcast(gy / b, a.shape) if needs[0] else None
        gb = unbroadcast(-gy * y / b, b.shape) if needs[1] else None
        return ga, gb


class Pow(Op):
    """a ** b, both of them arrays

    The derivatives b * a**(b-1) and y * log(a) are 0 * inf where b = 0 or a = 0 meets
    a = 0. There the finite factor decides: the exponent 1 and log(1) stand in. For
    a < 0 nearby exponents have no real power, and the derivative by b is NaN.
    """

    def forward(self, a: Array, b: Array) -> Array:
        self.a, self.b, self.y = a, b, a**b
        return self.y

    def backward(self, gy: Array) -> Grads:
        a, b, y, needs, xp = self.a, self.b, self.y, self.needs, array_module(gy)
        ga = gb = None
        if needs[0]:
            ga = unbroadcast(gy * b * a ** xp.where(b == 0, 1, b - 1), a.shape)
        if needs[1]:
            known = (a == 0) & (b >= 0)
            gb = unbroadcast(gy * y * xp.log(xp.where(known, 1, a)), b.shape)
        return ga, gb


class Maximum(Op):
    """The larger of a and b; where they tie, each gets half of the gradient"""

    def forward(self, a: Array, b: Array) -> Array:
        self.a, self.b = a, b
        return array_module(a).maximum(a, b)

    def backward(self, gy: Array) -> Grads:
        a, b = self.a, self.b
        ga = gy * _share(a > b, a == b, gy)
        gb = gy * _share(b > a, a == b, gy)
        return unbroadcast(ga, a.shape), unbroadcast(gb, b.shape)


class Minimum(Op):
    """The smaller of a and b; where they tie, each gets half of the gradient"""

    def forward(self, a: Array, b: Array) -> Array:
        self.a, self.b = a, b
        return array_module(a).minimum(a, b)

    def backward(self, gy: Array) -> Grads:
        a, b = self.a, self.b
        ga = gy * _share(a < b, a == b, gy)
        gb = gy * _share(b < a, a == b, gy)
        return unbroadcast(ga, a.shape), unbroadcast(gb, b.shape)


def _share(wins: Array, ties: Array, like: Array) -> Array:
    """1 where an input wins, 1/2 where it ties, 0 elsewhere, in the dtype of `like`."""
    return wins.astype(like.dtype) + ties.astype(like.dtype) * 0.5


class Where(Op):
    """a where the condition holds, else b; each gets the gradient of its own places

    The other places get 0, not 0 * gy: an infinite gy there does not become a NaN.
    """

    def __init__(self, condition: Array):
        self.condition = condition

    def forward(self, a: Array, b: Array) -> Array:
        self.shapes, xp = (a.shape, b.shape), array_module(a)
        self.condition = xp.asarray(self.condition)  # where a and b are
        return xp.where(self.condition, a, b)

    def backward(self, gy: Array) -> Grads:
        xp, zero = array_module(gy), gy.dtype.type(0)
        ga = xp.where(self.condition, gy, zero)
        gb = xp.where(self.condition, zero, gy)
        return unbroadcast(ga, self.shapes[0]), unbroadcast(gb, self.shapes[1])


# ---- Elementwise functions of one input ----


class Neg(Op):
    """-x"""

    def forward(self, x: Array) -> Array:
        return -x

    def backward(self, gy: Array) -> Grads:
        return (-gy,)


class PowNumber(Op):
    """x ** p with a fixed number p; the derivative at p = 0 is 0, also at x = 0"""

    def __init__(self, p: float):
        self.p = p

    def forward(self, x: Array) -> Array:
        self.x = x
        return _power(x, self.p)

    def backward(self, gy: Array) -> Grads:
        p, x = self.p, self.x
        slope = p * _power(x, p - 1) if p else array_module(gy).zeros_like(gy)
        return (gy * slope,)


def _power(x: Array, p: float) -> Array:
    """x ** p; NumPy knows the square, and takes 40 times as long for the cube."""
    return x * x * x if p == 3 else x**p


class Exp(Op):
    """exp(x)"""

    def forward(self, x: Array) -> Array:
        self.y = array_module(x).exp(x)
        return self.y

    def backward(self, gy: Array) -> Grads:
        return (gy * self.y,)


class Log(Op):
    """log(x), natural"""

    def forward(self, x: Array) -> Array:
        self.x = x
        return array_module(x).log(x)

    def backward(self, gy: Array) -> Grads:
        return (gy / self.x,)


class Sqrt(Op):
    """sqrt(x); the derivative at 0 is infinite, as it should be"""

    def forward(self, x: Array) -> Array:
        self.y = array_module(x).sqrt(x)
        return self.y

    def backward(self, gy: Array) -> Grads:
        return (gy / (2 * self.y),)


class Abs(Op):
    """abs(x); the derivative at 0 is taken as 0"""

    def forward(self, x: Array) -> Array:
        self.x = x
        return abs(x)

    def backward(self, gy: Array) -> Grads:
        return (gy * array_module(gy).sign(self.x),)


class Tanh(Op):
    """tanh(x)"""

    def forward(self, x: Array) -> Array:
        self.y = array_module(x).tanh(x)
        return self.y

    def backward(self, gy: Array) -> Grads:
        return (gy * (1 - self.y * self.y),)


class Sigmoid(Op):
    """1 / (1 + exp(-x)), in the form 1 / (1 + e) for x >= 0 and e / (1 + e) else

    With e = exp(-|x|) nothing overflows, and no 1 - y cancels where y is close to 1. As
    e <= 1, the numerator is the larger of e and (x >= 0), which is 0 or 1.
    """

    def forward(self, x: Array) -> Array:
        xp = array_module(x)
        self.e = xp.exp(-abs(x))
        return xp.maximum(self.e, x >= 0) / (1 + self.e)

    def backward(self, gy: Array) -> Grads:
        return (gy * (self.e / (1 + self.e) ** 2),)


class ReLU(Op):
    """max(x, 0); the derivative at 0 is taken as 0"""

    def forward(self, x: Array) -> Array:
        self.y = array_module(x).maximum(x, 0)
        return self.y

    def backward(self, gy: Array) -> Grads:
        return (gy * (self.y > 0),)


class Log1p(Op):
    """log(1 + x), exact for small x"""

    def forward(self, x: Array) -> Array:
        self.x = x
        return array_module(x).log1p(x)

    def backward(self, gy: Array) -> Grads:
        return (gy / (1 + self.x),)


class Expm1(Op):
    """exp(x) - 1, exact for small x"""

    def forward(self, x: Array) -> Array:
        self.y = array_module(x).expm1(x)
        return self.y

    def backward(self, gy: Array) -> Grads:
        return (gy * (self.y + 1),)


class Sin(Op):
    """sin(x)"""

    def forward(self, x: Array) -> Array:
        self.x = x
        return array_module(x).sin(x)

    def backward(self, gy: Array) -> Grads:
        return (gy * array_module(gy).cos(self.x),)


class Cos(Op):
    """cos(x)"""

    def forward(self, x: Array) -> Array:
        self.x = x
        return array_module(x).cos(x)

    def backward(self, gy: Array) -> Grads:
        return (-gy * array_module(gy).sin(self.x),)


class Rsqrt(Op):
    """1 / sqrt(x)"""

    def forward(self, x: Array) -> Array:
        self.y = 1 / array_module(x).sqrt(x)
        return self.y

    def backward(self, gy: Array) -> Grads:
        return (gy * self.y * self.y * self.y * -0.5,)


class Sign(Op):
    """-1, 0 or 1; it is flat, so the gradient is 0"""

    def forward(self, x: Array) -> Array:
        return array_module(x).sign(x)

    def backward(self, gy: Array) -> Grads:
        return (array_module(gy).zeros_like(gy),)


class Clip(Op):
    """x, but at least `low` and at most `high`, either of which may be None

    The gradient passes where x is within, the bounds included.
    """

    def __init__(self, low: float | None, high: float | None):
        self.low, self.high = low, high

    def forward(self, x: Array) -> Array:
        self.x = x
        return array_module(x).clip(x, self.low, self.high)

    def backward(self, gy: Array) -> Grads:
        outside = False
        if self.low is not None:
            outside |= self.x < self.low
        if self.high is not None:
            outside |= self.x > self.high
        return (array_module(gy).where(outside, gy.dtype.type(0), gy),)


BLOCK = 1 << 16


def _widened(x: Array) -> Array:
    """x as an array of floats: float16 as float32, for its squares and sums."""
    xp = array_module(x)
    return xp.asarray(x, xp.result_type(x.dtype, "float32"))


def _narrowed(y: Array, x: Array) -> Array:
    """y in the dtype of x, if that is float16."""
    return y.astype(x.dtype) if x.dtype == "float16" else y


# Rational approximations of the error function, numerators and denominators, each from
# the highest power down.          [Cody, Math. Comp. 23 (1969), p. 631]
SMALL = 0.46875  # where the first ends and the second begins
ERF = (
    (
        *(1.85777706184603153e-1, 3.16112374387056560e0, 1.13864154151050156e2),
        *(3.77485237685302021e2, 3.20937758913846947e3),
    ),
    (
        *(1.0, 2.36012909523441209e1, 2.44024637934444173e2),
        *(1.28261652607737228e3, 2.84423683343917062e3),
    ),
)
ERFC = (
    (
        *(2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e0),
        *(6.61191906371416295e1, 2.98635138197400131e2, 8.81952221241769090e2),
        *(1.71204761263407058e3, 2.05107837782607147e3, 1.23033935479799725e3),
    ),
    (
        *(1.0, 1.57449261107098347e1, 1.17693950891312499e2),
        *(5.37181101862009858e2, 1.62138957456669019e3, 3.29079923573345963e3),
        *(4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3),
    ),
)
# exp(z^2) (1 - erf(z)) as a polynomial in t = 1 / (1 + HASTINGS[0] z), exact enough for
# float32.          [Hastings 1955; Abramowitz & Stegun, 7.1.26]
HASTINGS = (
    0.3275911,
    (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592, 0.0),
)


class Cast(Op):
    """x in another dtype; the gradient returns in the dtype of x"""

    def __init__(self, dtype: Any):
        self.dtype = dtype

    def forward(self, x: Array) -> Array:
        self.before = x.dtype
        return x.astype(self.dtype)

    def backward(self, gy: Array) -> Grads:
        return (gy.astype(self.before),)


class Contiguous(Op):
    """x in a new array, in the order of its axes"""

    def forward(self, x: Array) -> Array:
        return array_module(x).ascontiguousarray(x)

    def backward(self, gy: Array) -> Grads:
        return (gy,)


class Move(Op):
    """x on another device; the gradient returns to the device of x"""

    def __init__(self, device: Device):
        self.device = device

    def forward(self, x: Array) -> Array:
        self.before = device_of(x)
        return self.device.put(x)

    def backward(self, gy: Array) -> Grads:
        return (self.before.put(gy),)


# ---- Reductions: over one axis, several, or all (None) ----


def _stretch(g: Array, shape: Shape, axis: Axis, keepdims: bool) -> Array:
    """g, which was reduced over the axis, as a read-only view in the shape before."""
    xp = array_module(g)
    if axis is not None and not keepdims:
        g = xp.expand_dims(g, axis)
    return xp.broadcast_to(g, shape)


def total(
    x: Array, axis: Axis, keepdims: bool = False, dtype: Any = None, mean: bool = False
) -> Array:
    """The sum, or mean, added up in a wider dtype where x's would drift.

    NumPy adds pairwise along the last axis only. Along others, the n-th number is added
    to a sum of n - 1: after 60,000 times 0.1 a float16 stands at 256, and a float32 has
    lost three digits after a million.
    """
    dtype = dtype or x.dtype
    axes = range(x.ndim) if axis is None else _axes(axis, x.ndim)
    across = math.prod([x.shape[i] for i in axes if i < x.ndim - 1])
    along = x.dtype == "float16" or (x.dtype == "float32" and across > 1024)
    wide = "float64" if along else None
    reduce = x.mean if mean else x.sum
    y = reduce(axis=axis, keepdims=keepdims, dtype=wide)
    return y.astype(dtype) if along else y


def _axes(axis: Any, ndim: int) -> list[int]:
    """The axis or axes, counted from the front; NumPy refuses what is out of range."""
    axes = axis if isinstance(axis, tuple | list) else (axis,)
    return [i % ndim for i in axes if ndim]


class Sum(Op):
    """The sum over the axis: each element of x moves it by as much as itself"""

    def __init__(self, axis: Axis = None, keepdims: bool = False):
        self.axis, self.keepdims = axis, keepdims

    def forward(self, x: Array) -> Array:
        self.shape = x.shape
        return total(x, self.axis, self.keepdims)

    def backward(self, gy: Array) -> Grads:
        return (_stretch(gy, self.shape, self.axis, self.keepdims),)


class Mean(Op):
    """The mean over the axis

    The count is a float64, because a plain 70,000 would become a float16: infinity.
    """

    def __init__(self, axis: Axis = None, keepdims: bool = False):
        self.axis, self.keepdims = axis, keepdims

    def forward(self, x: Array) -> Array:
        y = total(x, self.axis, self.keepdims, mean=True)
        self.shape, self.count = x.shape, x.size // max(y.size, 1)
        return y

    def backward(self, gy: Array) -> Grads:
        share = (gy / array_module(gy).float64(self.count)).astype(gy.dtype)
        return (_stretch(share, self.shape, self.axis, self.keepdims),)


class Max(Op):
    """The largest element over the axis; k that tie get 1/k of the gradient each"""

    def __init__(self, axis: Axis = None, keepdims: bool = False):
        self.axis, self.keepdims = axis, keepdims

    def forward(self, x: Array) -> Array:
        self.x, self.y = x, x.max(axis=self.axis, keepdims=self.keepdims)
        return self.y

    def backward(self, gy: Array) -> Grads:
        return (_to_extremes(gy, self.x, self.y, self.axis, self.keepdims),)


class Min(Op):
    """The smallest element over the axis; k that tie get 1/k of the gradient each"""

    def __init__(self, axis: Axis = None, keepdims: bool = False):
        self.axis, self.keepdims = axis, keepdims

    def forward(self, x: Array) -> Array:
        self.x, self.y = x, x.min(axis=self.axis, keepdims=self.keepdims)
        return self.y

    def backward(self, gy: Array) -> Grads:
        return (_to_extremes(gy, self.x, self.y, self.axis, self.keepdims),)


def _to_extremes(gy: Array, x: Array, y: Array, axis: Axis, keepdims: bool) -> Array:
    """gy at the places where x equals its extreme y, shared equally among them."""
    hit = x == _stretch(y, x.shape, axis, keepdims)
    ties = hit.sum(axis, keepdims=True)
    share = _stretch(gy, ties.shape, axis, keepdims) / ties
    return hit * share.astype(gy.dtype)


class Var(Op):
    """The mean of (x - mean)^2 over the axis, n / (n - correction) times as large"""

    def __init__(
        self, axis: Axis = None, keepdims: bool = False, correction: float = 1
    ):
        self.axis, self.keepdims, self.correction = axis, keepdims, correction

    def forward(self, x: Array) -> Array:
        wide = _widened(x)
        self.d = wide - total(wide, self.axis, keepdims=True, mean=True)
        squares = total(self.d * self.d, self.axis, self.keepdims)
        count = x.size // max(squares.size, 1)
        self.count = squares.dtype.type(max(count - self.correction, 0))
        return _narrowed(squares / self.count, x)

    def backward(self, gy: Array) -> Grads:
        share = _widened(gy) * 2 / self.count
        share = _stretch(share, self.d.shape, self.axis, self.keepdims)
        return (_narrowed(share * self.d, gy),)


class Std(Var):
    """The square root of Var; where it is 0, so is the gradient"""

    def forward(self, x: Array) -> Array:
        self.y = array_module(x).sqrt(super().forward(x))
        return self.y

    def backward(self, gy: Array) -> Grads:
        xp, flat = array_module(gy), self.y == 0
        return super().backward(xp.where(flat, 0, gy / (2 * self.y + flat)))


class CumSum(Op):
    """Running sums along the axis: y[i] = x[0] + ... + x[i], so gx[i] = gy[i] + ..."""

    def __init__(self, axis: int):
        self.axis = axis

    def forward(self, x: Array) -> Array:
        return self._sums(x)

    def backward(self, gy: Array) -> Grads:
        xp = array_module(gy)
        return (xp.flip(self._sums(xp.flip(gy, self.axis)), self.axis),)

    def _sums(self, x: Array) -> Array:
        """In float64, as each sum is added to the one before (see `total`)."""
        if x.dtype.kind != "f":
            return array_module(x).cumsum(x, self.axis)
        sums = array_module(x).cumsum(x, self.axis, dtype="float64")
        return sums.astype(x.dtype, copy=False)


class Prod(Op):
    """The product along the axis; the derivative is that of all the others

    It is computed from those before and those after, so that a 0 is no obstacle.
    """

    def __init__(self, axis: int, keepdims: bool = False):
        self.axis, self.keepdims = axis, keepdims

    def forward(self, x: Array) -> Array:
        self.x = x
        return x.prod(self.axis, keepdims=self.keepdims)

    def backward(self, gy: Array) -> Grads:
        xp, x = array_module(gy), array_module(gy).moveaxis(self.x, self.axis, -1)
        before, after = xp.ones_like(x), xp.ones_like(x)
        before[..., 1:] = xp.cumprod(x[..., :-1], -1)
        after[..., :-1] = xp.cumprod(x[..., :0:-1], -1)[..., ::-1]
        others = xp.moveaxis(before * after, -1, self.axis)
        return (_stretch(gy, self.x.shape, self.axis, self.keepdims) * others,)


# ---- Shape: the numbers stay, their arrangement changes ----


class Reshape(Op):
    """x in another shape with as many elements"""

    def __init__(self, shape: Shape):
        self.shape = shape

    def forward(self, x: Array) -> Array:
        self.before = x.shape
        return x.reshape(self.shape)

    def backward(self, gy: Array) -> Grads:
        return (gy.reshape(self.before),)


class Transpose(Op):
    """x with its axes in another order: axis i of y is axis axes[i] of x"""

    def __init__(self, axes: tuple[int, ...]):
        self.axes = axes

    def forward(self, x: Array) -> Array:
        return x.transpose(self.axes)

    def backward(self, gy: Array) -> Grads:
        axes = [axis % gy.ndim for axis in self.axes]
        return (gy.transpose([axes.index(i) for i in range(gy.ndim)]),)


class BroadcastTo(Op):
    """x stretched to a larger shape"""

    def __init__(self, shape: Shape):
        self.shape = shape

    def forward(self, x: Array) -> Array:
        self.before = x.shape
        return array_module(x).broadcast_to(x, self.shape)

    def backward(self, gy: Array) -> Grads:
        return (unbroadcast(gy, self.before),)


class GetItem(Op):
    """x[index]: slices, integers, masks, or arrays of integers, which may repeat

    A GPU does not check integer arrays: there, an index out of range wraps around.
    """

    def __init__(self, index: Any):
        self.index = index

    def forward(self, x: Array) -> Array:
        self.shape = x.shape
        y = x[self.index]
        if not isinstance(y, type(x)):  # a number: as an array it stays a view of x
            index = self.index if isinstance(self.index, tuple) else (self.index,)
            y = x[(*index, ...)]
        return y

    def backward(self, gy: Array) -> Grads:
        gx = array_module(gy).zeros(self.shape, gy.dtype)
        if getattr(self.index, "dtype", None) in ("int64", "int32"):
            add_rows(gx, self.index, gy)
        elif _may_repeat(self.index):
            scatter_add(gx, self.index, gy)
        else:
            gx[self.index] = gy
        return (gx,)


# With these and masks, an index names no element twice; all else acts like an array.
_ONCE = (int, slice, NoneType, EllipsisType)


def _may_repeat(index: Any) -> bool:
    """Whether the index can name an element twice."""
    parts = index if isinstance(index, tuple) else (index,)
    return not all(
        isinstance(part, _ONCE) or getattr(part, "dtype", None) == "bool"
        for part in parts
    )


class Gather(Op):
    """x at integer places along the axis; `index` has as many axes as x

    y[i][j] = x[index[i][j]][j]  for axis 0, and so on.
    """

    def __init__(self, index: Array, axis: int):
        self.index, self.axis = index, axis

    def forward(self, x: Array) -> Array:
        xp, self.shape = array_module(x), x.shape
        grid = list(xp.ogrid[tuple([slice(n) for n in self.index.shape])])
        grid[self.axis] = self.index
        self.at = tuple(grid)
        return x[self.at]

    def backward(self, gy: Array) -> Grads:
        gx = array_module(gy).zeros(self.shape, gy.dtype)
        scatter_add(gx, self.at, gy)
        return (gx,)


class Pad(Op):
    """x with `value` around it; widths[i] = (before, after) on axis i

    A negative width takes elements away.
    """

    def __init__(self, widths: Sequence[tuple[int, int]], value: float):
        self.widths, self.value = widths, value

    def forward(self, x: Array) -> Array:
        ends = [(max(a, 0), max(b, 0)) for a, b in self.widths]
        cuts = [(max(-a, 0), max(-b, 0)) for a, b in self.widths]
        sizes = zip(x.shape, cuts, strict=True)
        self.shape = x.shape
        self.kept = tuple([slice(a, max(n - b, a)) for n, (a, b) in sizes])
        y = array_module(x).pad(x[self.kept], ends, constant_values=self.value)
        self.inner = tuple(
            [slice(a, n - b) for n, (a, b) in zip(y.shape, ends, strict=True)]
        )
        return y

    def backward(self, gy: Array) -> Grads:
        gx = array_module(gy).zeros(self.shape, gy.dtype)
        gx[self.kept] = gy[self.inner]
        return (gx,)


def add_rows(dst: Array, rows: Array, v: Array) -> None:
    """dst[rows] += v, where a row that occurs k times adds k times; dst is contiguous.

    Element by element, in the order of `rows`: `add.at` is several times faster along
    one axis than with whole rows. Rows may count from the end, and so do their places.
    """
    xp, width = array_module(dst), math.prod(dst.shape[1:])
    places = xp.asarray(rows).reshape(-1, 1) * width + xp.arange(width)
    values = v.reshape(-1).astype(dst.dtype, copy=False)
    scatter_add(dst.reshape(-1), places.reshape(-1), values)


class Concatenate(Op):
    """The inputs, one after the other along an axis"""

    def __init__(self, axis: int = 0):
        self.axis = axis

    def forward(self, *xs: Array) -> Array:
        y = array_module(xs[0]).concatenate(xs, self.axis)
        self.sizes = [x.shape[self.axis] for x in xs]
        return y

    def backward(self, gy: Array) -> Grads:
        ends = [sum(self.sizes[: i + 1]) for i in range(len(self.sizes) - 1)]
        return tuple(array_module(gy).split(gy, ends, self.axis))


class Stack(Op):
    """The inputs, side by side along a new axis"""

    def __init__(self, axis: int = 0):
        self.axis = axis

    def forward(self, *xs: Array) -> Array:
        return array_module(xs[0]).stack(xs, self.axis)

    def backward(self, gy: Array) -> Grads:
        return tuple(array_module(gy).moveaxis(gy, self.axis, 0))


# ---- Products ----


class MatMul(Op):
    """a @ b: the last two axes are matrices, those before are broadcast

    A 1-D operand is a row on the left and a column on the right; that axis of length 1
    is put in before the product and taken out after it, in both directions.
    """

    def forward(self, a: Array, b: Array) -> Array:
        self.a, self.b = a, b
        return array_module(a).matmul(a, b)

    def backward(self, gy: Array) -> Grads:
        xp = array_module(gy)
        a, b, ga, gb = self.a, self.b, None, None
        if b.ndim == 1:
            b, gy = b[:, None], xp.expand_dims(gy, -1)
        if a.ndim == 1:
            a, gy = a[None, :], xp.expand_dims(gy, -2)
        if self.needs[0]:
            ga = unbroadcast(gy @ b.swapaxes(-1, -2), a.shape).reshape(self.a.shape)
        if self.needs[1]:
            gb = unbroadcast(a.swapaxes(-1, -2) @ gy, b.shape).reshape(self.b.shape)
        return ga, gb


class Einsum(Op):
    """A sum of products, `equation` saying which axes are which: "ij,jk->ik"

    The gradient of an input is an einsum as well, in which gy takes its place:

        ij,jk->ik       ga = einsum("ik,jk->ij", gy, b)

    An axis that only that input has gets gy stretched along it.
    """

    def __init__(self, inputs: Sequence[str], output: str):
        self.inputs, self.output = inputs, output

    def forward(self, *xs: Array) -> Array:
        self.xs = xs
        return _einsum(self.inputs, self.output, xs)

    def backward(self, gy: Array) -> Grads:
        grads: list[Array | None] = [None] * len(self.xs)
        for i in range(len(self.xs)):
            if self.needs[i]:
                grads[i] = self._gradient(i, gy)
        return tuple(grads)

    def _gradient(self, i: int, gy: Array) -> Array:
        xp, x, letters = array_module(gy), self.xs[i], self.inputs[i]
        others = [part for j, part in enumerate(self.inputs) if j != i]
        arrays = [array for j, array in enumerate(self.xs) if j != i]
        distinct = "".join(dict.fromkeys(letters))
        elsewhere = self.output + "".join(others)
        known = "".join([c for c in distinct if c in elsewhere])
        g = _einsum([self.output, *others], known, [gy, *arrays])
        g = g[tuple([slice(None) if c in elsewhere else None for c in distinct])]
        shape = _einsum([letters], distinct, [x]).shape
        g = xp.broadcast_to(g, broadcast_shapes(g.shape, shape))
        g = unbroadcast(g, shape)
        if distinct == letters:
            return g
        gx = xp.zeros(x.shape, g.dtype)  # an axis twice, "ii": only the diagonal counts
        _einsum([letters], distinct, [gx])[...] = g
        return gx


def _einsum(inputs: Sequence[str], output: str, xs: Sequence[Array]) -> Array:
    """Two or more go through matrix products; of one it may be a view."""
    equation = f"{','.join(inputs)}->{output}"
    return array_module(xs[0]).einsum(equation, *xs, optimize=len(xs) > 1)
