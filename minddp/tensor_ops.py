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
    op.forward(3.0, 4.0)        12.0
    op.backward(1.0)            (4.0, 3.0)      a step on a moves the product by b

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

from minddp.device import (
    Array,
    Device,
    array_module,
    device_of,
    generator,
    scatter_add,
    to_host,
)
from minddp.errors import UsageError

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
    return g.sum(axis=(*range(added), *stretched)).reshape(shape)


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
        return x**self.p

    def backward(self, gy: Array) -> Grads:
        p, x = self.p, self.x
        return (gy * (p * x ** (p - 1)) if p else array_module(gy).zeros_like(gy),)


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

    With e = exp(-|x|) nothing overflows, and no 1 - y cancels where y is close to 1.
    """

    def forward(self, x: Array) -> Array:
        xp = array_module(x)
        self.e = xp.exp(-abs(x))
        return xp.where(x >= 0, 1, self.e) / (1 + self.e)

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


class Activation(Op):
    """What the activations below share: the derivative is found on the way forward

    There the parts that it is made of are at hand, and backward is one product.
    `formula(x, d)` returns y, and writes dy/dx into the array d unless that is None.
    float16 is computed in float32.
    """

    formula: Callable[[Array, Array | None], Array]

    def forward(self, x: Array) -> Array:
        wide = _widened(x)
        self.d = array_module(x).empty_like(wide) if self.needs[0] else None
        return _narrowed(self.formula(wide, self.d), x)

    def backward(self, gy: Array) -> Grads:
        return (_narrowed(gy * self.d, gy),)


def _widened(x: Array) -> Array:
    """x as an array of floats: float16 as float32, for its squares and sums."""
    xp = array_module(x)
    return xp.asarray(x, xp.result_type(x.dtype, "float32"))


def _narrowed(y: Array, x: Array) -> Array:
    """y in the dtype of x, if that is float16."""
    return y.astype(x.dtype) if x.dtype == "float16" else y


class GELU(Activation):
    """x P(x), with P the normal distribution function   [Hendrycks & Gimpel 2016]

    dy/dx = P(x) + x P'(x),  P'(x) = exp(-x^2/2) / sqrt(2 pi)
    """

    def formula(self, x: Array, d: Array | None) -> Array:
        z = x * math.sqrt(0.5)
        bell = array_module(x).exp(-z * z)
        chance = _normal(z, bell)
        if d is not None:
            d[...] = x
            d *= bell
            d *= 1 / math.sqrt(2 * math.pi)
            d += chance
        chance *= x
        return chance


class TanhGELU(Activation):
    """GELU with h = (1 + tanh u) / 2 in place of P(x),  u = c (z + k z^3)

    dy/dx = h + 2 z h (1 - h) du/dz.  [Hendrycks & Gimpel 2016, sec. 2] Here z is x, cut
    to where h is 0 or 1 to the last bit: z^3 stays in range.
    """

    c, k = math.sqrt(2 / math.pi), 0.044715

    def formula(self, x: Array, d: Array | None) -> Array:
        xp = array_module(x)
        z = xp.clip(x, -10, 10)
        square = z * z
        h = square * (self.c * self.k)
        h += self.c
        h *= z
        h = xp.tanh(h, out=h)
        h *= 0.5
        h += 0.5
        if d is not None:
            square *= 6 * self.c * self.k
            square += 2 * self.c
            square *= z
            square *= h
            xp.subtract(1, h, out=d)
            d *= square
            d += h
        h *= x
        return h


class SiLU(Activation):
    """x s(x), with s the sigmoid;  dy/dx = s(x) (1 + x (1 - s(x)))"""

    def formula(self, x: Array, d: Array | None) -> Array:
        s = Sigmoid().forward(x)
        if d is not None:
            d[...] = (x * (1 - s) + 1) * s
        return s * x


class Softplus(Activation):
    """log(1 + exp(beta x)) / beta, and just x where beta x is above the threshold"""

    def __init__(self, beta: float, threshold: float):
        self.beta, self.threshold = beta, threshold

    def formula(self, x: Array, d: Array | None) -> Array:
        xp, z = array_module(x), x * self.beta
        if d is not None:
            d[...] = xp.where(z > self.threshold, 1, Sigmoid().forward(z))
        y = (xp.maximum(z, 0) + xp.log1p(xp.exp(-abs(z)))) / self.beta
        return xp.where(z > self.threshold, x, y)


class LeakyReLU(Activation):
    """x where x > 0, else slope * x"""

    def __init__(self, slope: float):
        self.slope = slope

    def formula(self, x: Array, d: Array | None) -> Array:
        xp = array_module(x)
        if d is not None:
            d[...] = xp.where(x > 0, 1, self.slope)
        return xp.where(x > 0, x, x * self.slope)


class ELU(Activation):
    """x where x > 0, else alpha (exp(x) - 1)"""

    def __init__(self, alpha: float):
        self.alpha = alpha

    def formula(self, x: Array, d: Array | None) -> Array:
        xp = array_module(x)
        y = xp.where(x > 0, x, self.alpha * xp.expm1(xp.minimum(x, 0)))
        if d is not None:
            d[...] = xp.where(x > 0, 1, y + self.alpha)
        return y


class Erf(Activation):
    """The error function, (2 / sqrt pi) times the integral of exp(-t^2) from 0 to x"""

    def formula(self, x: Array, d: Array | None) -> Array:
        xp = array_module(x)
        bell = xp.exp(-x * x)
        if d is not None:
            xp.multiply(bell, 2 / math.sqrt(math.pi), out=d)
        z = abs(x)
        y = xp.where(z < SMALL, _erf_small(z), 1 - bell * _erfc_scaled(z))
        return xp.copysign(y, x)


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


def _polynomial(x: Array, coefficients: Sequence[float]) -> Array:
    """By Horner's rule, the coefficient of the highest power first."""
    y = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        y += coefficient
        y *= x
    y += coefficients[-1]
    return y


def _erf_small(z: Array) -> Array:
    """erf(z), for 0 <= z <= SMALL, with an error below 2e-16."""
    square = z * z
    return z * _polynomial(square, ERF[0]) / _polynomial(square, ERF[1])


def _erfc_scaled(z: Array) -> Array:
    """exp(z^2) (1 - erf(z)), for z >= SMALL.

    Relative error: below 2e-15 up to z = 4, then growing, to 1e-7 at z = 26; there the
    value itself is 1e-296. For z from 0 to SMALL it is 5e-12. Beyond 1e4 the powers
    of z would overflow in float32, and the quotient does not change.
    """
    z = array_module(z).minimum(z, 1e4 if z.dtype == "float32" else 1e30)
    y = _polynomial(z, ERFC[0])
    y /= _polynomial(z, ERFC[1])
    return y


def _normal(z: Array, bell: Array) -> Array:
    """(1 + erf(z)) / 2, given bell = exp(-z^2); no digits cancel for z < 0."""
    xp, size = array_module(z), abs(z)
    half = _erfc_scaled(size)
    half *= bell
    half *= 0.5
    y = xp.where(z < 0, half, 1 - half)
    if y.dtype == "float64":
        near = size < SMALL
        y[near] = 0.5 + 0.5 * xp.copysign(_erf_small(size[near]), z[near])
    return y


class Cast(Op):
    """x in another dtype; the gradient returns in the dtype of x"""

    def __init__(self, dtype: Any):
        self.dtype = dtype

    def forward(self, x: Array) -> Array:
        self.before = x.dtype
        return x.astype(self.dtype)

    def backward(self, gy: Array) -> Grads:
        return (gy.astype(self.before),)


class Move(Op):
    """x on another device; the gradient returns to the device of x"""

    def __init__(self, device: Device):
        self.device = device

    def forward(self, x: Array) -> Array:
        self.before = device_of(x)
        return self.device.put(x)

    def backward(self, gy: Array) -> Grads:
        return (self.before.put(gy),)


class Dropout(Op):
    """x with elements zeroed with probability p, the rest times 1 / (1 - p)"""

    def __init__(self, p: float):
        self.p = p

    def forward(self, x: Array) -> Array:
        kept = generator().random(x.shape, dtype="float32") >= self.p
        self.kept = array_module(x).asarray(kept)
        self.scale = 1 / (1 - self.p) if self.p < 1 else 0.0
        return x * self.kept * self.scale

    def backward(self, gy: Array) -> Grads:
        return (gy * self.kept * self.scale,)


# ---- Reductions: over one axis, several, or all (None) ----


def _stretch(g: Array, shape: Shape, axis: Axis, keepdims: bool) -> Array:
    """g, which was reduced over the axis, as a read-only view in the shape before."""
    xp = array_module(g)
    if axis is not None and not keepdims:
        g = xp.expand_dims(g, axis)
    return xp.broadcast_to(g, shape)


class Sum(Op):
    """The sum over the axis: each element of x moves it by as much as itself"""

    def __init__(self, axis: Axis = None, keepdims: bool = False):
        self.axis, self.keepdims = axis, keepdims

    def forward(self, x: Array) -> Array:
        self.shape = x.shape
        return x.sum(axis=self.axis, keepdims=self.keepdims)

    def backward(self, gy: Array) -> Grads:
        return (_stretch(gy, self.shape, self.axis, self.keepdims),)


class Mean(Op):
    """The mean over the axis

    The count is a float64, because a plain 70,000 would become a float16: infinity.
    """

    def __init__(self, axis: Axis = None, keepdims: bool = False):
        self.axis, self.keepdims = axis, keepdims

    def forward(self, x: Array) -> Array:
        y = x.mean(axis=self.axis, keepdims=self.keepdims)
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
        return x[self.index]

    def backward(self, gy: Array) -> Grads:
        gx = array_module(gy).zeros(self.shape, gy.dtype)
        if _may_repeat(self.index):
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


class Embedding(Op):
    """Row ids[i] of the table for every i; a row used k times adds k gradients"""

    def __init__(self, ids: Array):
        self.ids = ids

    def forward(self, table: Array) -> Array:
        check_range(self.ids, len(table), "index", "rows")
        self.shape = table.shape
        return table[self.ids]

    def backward(self, gy: Array) -> Grads:
        gtable = array_module(gy).zeros(self.shape, gy.dtype)
        scatter_add(gtable, self.ids, gy)
        return (gtable,)


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


class Linear(Op):
    """x @ W.T + b, fused;  x is (..., in), W is (out, in), b is (out,) or absent"""

    def forward(self, x: Array, W: Array, b: Array | None = None) -> Array:
        self.x, self.W, self.has_bias = x, W, b is not None
        y = x @ W.T
        if b is not None:
            y += b
        return y

    def backward(self, gy: Array) -> Grads:
        x, W, rows = self.x, self.W, math.prod(self.x.shape[:-1])
        g = gy.reshape(rows, W.shape[0])
        gx = gy @ W if self.needs[0] else None
        gW = None
        if self.needs[1]:
            xp, home = array_module(g), self.homes[1]
            gW = xp.matmul(g.T, x.reshape(rows, W.shape[1]), out=home)
        return (gx, gW, g.sum(axis=0)) if self.has_bias else (gx, gW)


# ---- Normalization: every channel over all the rest of the batch ----


class BatchNorm(Op):
    """(x - mean) / sqrt(var + eps) * W + b;  x is (N, C, ...), W and b are (C,)

    mean and var are those of each channel over the batch, so x moves them too. With
    xhat = (x - mean) / std, and means over the batch,        [Ioffe & Szegedy 2015]

        gx = W / std (gy - mean(gy) - xhat mean(gy xhat))

    fixed: a mean and a var to use instead, which x does not move: gx = W / std gy.
    pool: `moments` and `sums` make those of this x into those of a batch of which x is
    a part (sync_batch_norm.py); without, x is the batch.

    What is kept is d = x - mean. One number per channel is float64, and float16 is
    computed in float32, because a square of 300 is out of its range.
    """

    def __init__(
        self, eps: float, fixed: tuple[Array, Array] | None = None, pool: Any = None
    ):
        self.eps, self.fixed, self.pool = eps, fixed, pool

    def forward(self, x: Array, W: Array, b: Array) -> Array:
        xp = array_module(x)
        self.dtype, self.W = x.dtype, W
        self.axes = (0, *range(2, x.ndim))
        x = x.astype(xp.result_type(x.dtype, "float32"), copy=False)
        if self.fixed:
            mean, self.var = self.fixed
            self.d = x - self._along(x, mean)
        else:
            self._measure(x)
        self.inverse = 1 / xp.sqrt(self.var.astype("float64") + self.eps)
        y = self.d * self._along(x, W * self.inverse)
        y += self._along(x, b)
        return y.astype(self.dtype, copy=False)

    def _measure(self, x: Array) -> None:
        """Set d, and the count, mean and biased var of the batch.

        Squares of d, not of x: E[x^2] - E[x]^2 cancels where the mean is large.
        """
        count = math.prod([x.shape[axis] for axis in self.axes])
        mean = x.sum(self.axes, dtype="float64") / max(count, 1)
        self.d = d = x - self._along(x, mean)
        squares = (d * d).sum(self.axes, dtype="float64")
        self.count, self.mean = count, mean
        if self.pool:
            self.count, self.mean, squares = self.pool.moments(count, mean, squares)
            d += self._along(x, mean - self.mean)
        if self.count < 2:
            raise UsageError(
                f"batch_norm: {self.count} value(s) per channel have no variance; "
                f"training needs 2 or more, and the input is {x.shape}. Drop a last "
                "batch of one, or evaluate: .eval()."
            )
        self.var = squares / self.count

    def backward(self, gy: Array) -> Grads:
        d, inverse = self.d, self.inverse
        gy = gy.astype(d.dtype, copy=False)
        gb = gy.sum(self.axes, dtype="float64")
        gW = (gy * d).sum(self.axes, dtype="float64") * inverse
        if not self.needs[0]:
            return None, gW, gb
        if self.fixed:
            gx = gy * self._along(gy, self.W * inverse)
        else:
            sum_gy, sum_gy_xhat = self.pool.sums(gb, gW) if self.pool else (gb, gW)
            gx = d * self._along(gy, inverse * sum_gy_xhat / -self.count)
            gx += gy
            gx -= self._along(gy, sum_gy / self.count)
            gx *= self._along(gy, self.W * inverse)
        return gx.astype(self.dtype, copy=False), gW, gb

    def _along(self, x: Array, v: Array) -> Array:
        """v, a number per channel, in the dtype of x and along its axis 1."""
        return v.astype(x.dtype, copy=False).reshape(-1, *[1] * (x.ndim - 2))

    def update(self, mean: Array, var: Array, momentum: float) -> None:
        """Move running estimates, in place, towards the batch's mean and unbiased
        var."""
        unbiased = self.var * (self.count / (self.count - 1))
        mean[...] = (1 - momentum) * mean + momentum * self.mean
        var[...] = (1 - momentum) * var + momentum * unbiased


# ---- Softmax and losses: fused where the parts alone would overflow ----


class Softmax(Op):
    """exp(x) / sum(exp(x)) along the axis

    Subtracting the maximum first changes nothing in the quotient and keeps exp <= 1.
    """

    def __init__(self, axis: int = -1):
        self.axis = axis

    def forward(self, x: Array) -> Array:
        e = array_module(x).exp(x - x.max(self.axis, keepdims=True))
        self.y = e / e.sum(self.axis, keepdims=True)
        return self.y

    def backward(self, gy: Array) -> Grads:
        g = gy * self.y
        return (g - self.y * g.sum(self.axis, keepdims=True),)


class LogSoftmax(Op):
    """log(softmax(x)) along the axis, never taking the log of a number that became 0"""

    def __init__(self, axis: int = -1):
        self.axis = axis

    def forward(self, x: Array) -> Array:
        xp = array_module(x)
        z = x - x.max(self.axis, keepdims=True)
        self.y = z - xp.log(xp.exp(z).sum(self.axis, keepdims=True))
        return self.y

    def backward(self, gy: Array) -> Grads:
        p = array_module(gy).exp(self.y)
        return (gy - p * gy.sum(self.axis, keepdims=True),)


class CrossEntropy(Op):
    """-log softmax(x)[label] of every row;  x is (N, classes), the result is (N,)

    The derivative is strikingly simple: the predicted probabilities, less 1 at the
    label. Rows whose label is `ignore` count nothing, forward and backward.
    """

    def __init__(self, labels: Array, ignore: int = -100):
        self.labels, self.ignore = labels, ignore

    def forward(self, x: Array) -> Array:
        xp = array_module(x)
        check_range(self.labels, x.shape[1], "label", "classes", self.ignore)
        labels = xp.asarray(self.labels)  # where x is
        self.kept = labels != self.ignore
        self.at = xp.arange(len(x)), xp.where(self.kept, labels, 0)
        z = x - x.max(axis=1, keepdims=True)
        e = xp.exp(z)
        total = e.sum(axis=1, keepdims=True)
        self.p = e / total
        return (xp.log(total[:, 0]) - z[self.at]) * self.kept

    def backward(self, gy: Array) -> Grads:
        g = gy * self.kept
        gx = self.p * g[:, None]
        gx[self.at] -= g
        return (gx,)


class BinaryCrossEntropy(Op):
    """-t log s(x) - (1 - t) log(1 - s(x)), elementwise, with s the sigmoid

    In the form max(x, 0) - t x + log(1 + exp(-|x|)), where exp never exceeds 1.
    """

    def forward(self, x: Array, t: Array) -> Array:
        xp = array_module(x)
        self.x, self.t = x, t
        return xp.maximum(x, 0) - t * x + xp.log1p(xp.exp(-abs(x)))

    def backward(self, gy: Array) -> Grads:
        return gy * (Sigmoid().forward(self.x) - self.t), -gy * self.x


class SquaredError(Op):
    """(a - b)^2, elementwise"""

    def forward(self, a: Array, b: Array) -> Array:
        self.d = a - b
        return self.d * self.d

    def backward(self, gy: Array) -> Grads:
        g = 2 * gy * self.d
        return g, (-g if self.needs[1] else None)


def check_range(
    ids: Array, size: int, what: str, of: str, ignore: int | None = None
) -> None:
    """Raise UsageError unless 0 <= id < size for all ids except `ignore`.

    On the host, because a GPU would not complain but read another row.
    """
    ids = to_host(ids)
    if ids.dtype.kind not in "iu":
        raise UsageError(f"{what} must be an integer, but the array is {ids.dtype}")
    wrong = (ids < 0) | (ids >= size)
    if ignore is not None:
        wrong &= ids != ignore
    if wrong.any():
        at = array_module(ids).unravel_index(wrong.argmax(), ids.shape)
        raise UsageError(
            f"{what} {ids[at]} at position {', '.join(map(str, at))} is out of range: "
            f"there are {size} {of}, so it must be from 0 to {size - 1}"
        )
