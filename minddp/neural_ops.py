"""Array formulas of neural networks: activations, layers, norms, attention, losses.

    x (N, in) --> Linear --> GELU --> LayerNorm --> Attention --> CrossEntropy --> loss

Ops as those of tensor_ops.py, which is to be read first. What sets these apart: each is
a formula of several steps whose gradient is simpler than the steps' gradients one after
the other, or whose steps would overflow. So each is one op, "fused", with few passes
over memory.

Worked example, softmax and cross-entropy.  Apart, the first divides exp(x) by a sum and
the second takes a logarithm, of which either may overflow, and the gradient is a matrix
per row. Together the loss is log(sum(exp(x))) - x[label], computed after the largest x
has been taken off, and the gradient is softmax(x) with 1 taken off at the label.

Rule.  Sums over a batch or a row are kept in float64 or float32, whatever x is: a sum
of squares of float16 overflows at a row of a few hundred.

In PyTorch: the kernels in aten/src/ATen/native (layer_norm, batch_norm, softmax,
attention), and `derivatives.yaml`.

Left out: as in tensor_ops.py.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from numpy import broadcast_shapes

from minddp.device import Array, array_module, generator, to_host
from minddp.errors import UsageError
from minddp.tensor_ops import (
    BLOCK,
    ERF,
    ERFC,
    HASTINGS,
    SMALL,
    Grads,
    Op,
    Sigmoid,
    _narrowed,
    _widened,
    add_rows,
    total,
    unbroadcast,
)

# ---- Activations ----


class Activation(Op):
    """What the activations below share: the derivative is found on the way forward

    There the parts that it is made of are at hand, and backward is one product.
    `formula(x, d)` returns y, and writes dy/dx into the array d unless that is None.
    It sees BLOCK elements at a time, 1-D, which stay in the cache from one step of the
    formula to the next. float16 is computed in float32.
    """

    formula: Callable[[Array, Array | None], Array]
    d: Any

    def forward(self, x: Array) -> Array:
        xp, wide = array_module(x), _widened(x).reshape(-1)
        y = xp.empty_like(wide)
        self.d = xp.empty_like(wide) if self.needs[0] else None
        for i in range(0, x.size, BLOCK):
            part = slice(i, i + BLOCK)
            d = None if self.d is None else self.d[part]
            y[part] = self.formula(wide[part], d)
        return _narrowed(y.reshape(x.shape), x)

    def backward(self, gy: Array) -> Grads:
        return (_narrowed(gy * self.d.reshape(gy.shape), gy),)


class GELU(Activation):
    """x P(x), with P the normal distribution function   [Hendrycks & Gimpel 2016]

    dy/dx = P(x) + x P'(x),  P'(x) = exp(-x^2/2) / sqrt(2 pi)
    """

    def formula(self, x: Array, d: Array | None) -> Array:
        xp = array_module(x)
        z = xp.clip(x * math.sqrt(0.5), -30, 30)  # further out, exp(-z^2) is 0
        bell = xp.exp(-z * z)
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
    """x s(x), with s the sigmoid;  dy/dx = s(x) + y (1 - s(x))

    Below -80, or -700 in float64, x is taken as that: y is 0 but for 1e-33, and exp(-x)
    is in range.
    """

    def formula(self, x: Array, d: Array | None) -> Array:
        xp = array_module(x)
        x = xp.maximum(x, -80 if x.dtype == "float32" else -700)
        s = xp.exp(-x)
        s += 1
        xp.divide(1, s, out=s)
        y = x * s
        if d is not None:
            xp.subtract(1, s, out=d)
            d *= y
            d += s
        return y


class Softplus(Activation):
    """log(1 + exp(beta x)) / beta, and just x where beta x is above the threshold"""

    def __init__(self, beta: float, threshold: float):
        self.beta, self.threshold = beta, threshold

    def formula(self, x: Array, d: Array | None) -> Array:
        xp, z = array_module(x), x * self.beta
        if d is not None:
            xp.maximum(Sigmoid().forward(z), z > self.threshold, out=d)
        bend = xp.log1p(xp.exp(-abs(z))) * (z <= self.threshold)
        return (xp.maximum(z, 0) + bend) / self.beta


class LeakyReLU(Activation):
    """x where x > 0, else slope * x"""

    def __init__(self, slope: float):
        self.slope = slope

    def formula(self, x: Array, d: Array | None) -> Array:
        xp = array_module(x)
        if d is not None:
            xp.multiply(x <= 0, x.dtype.type(self.slope), out=d)
            d += x > 0
        return xp.maximum(x, 0) + self.slope * xp.minimum(x, 0)


class ELU(Activation):
    """x where x > 0, else alpha (exp(x) - 1)"""

    def __init__(self, alpha: float):
        self.alpha = alpha

    def formula(self, x: Array, d: Array | None) -> Array:
        xp = array_module(x)
        below = self.alpha * xp.expm1(xp.minimum(x, 0))
        if d is not None:
            xp.multiply(below + self.alpha, x <= 0, out=d)
            d += x > 0
        return xp.maximum(x, 0) + below


class Erf(Activation):
    """The error function, (2 / sqrt pi) times the integral of exp(-t^2) from 0 to x"""

    def formula(self, x: Array, d: Array | None) -> Array:
        xp = array_module(x)
        z = xp.minimum(abs(x), 30)  # further out, exp(-z^2) is 0
        bell = xp.exp(-z * z)
        if d is not None:
            xp.multiply(bell, 2 / math.sqrt(math.pi), out=d)
        y = xp.where(z < SMALL, _erf_small(z), 1 - bell * _erfc_scaled(z))
        return xp.copysign(y, x)


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
    """exp(z^2) (1 - erf(z)), for SMALL <= z <= 30.

    Relative error: below 2e-15 up to z = 4, then growing, to 1e-7 at z = 26; there
    1 - erf(z) is 1e-296.
    """
    y = _polynomial(z, ERFC[0])
    y /= _polynomial(z, ERFC[1])
    return y


def _normal(z: Array, bell: Array) -> Array:
    """(1 + erf(z)) / 2, given bell = exp(-z^2); no digits cancel for z < 0.

    With an error of 4e-16 in float64, and of 1e-7 in float32.
    """
    xp, size = array_module(z), abs(z)
    if z.dtype == "float32":
        t = 1 / (1 + HASTINGS[0] * size)
        y = _polynomial(t, HASTINGS[1])
    else:
        y = _erfc_scaled(size)
    y *= bell
    y *= 0.5
    y += (1 - 2 * y) * (z >= 0)
    if z.dtype != "float32":
        near = size < SMALL
        y[near] = 0.5 + 0.5 * xp.copysign(_erf_small(size[near]), z[near])
    return y


# ---- Dropout and embedding ----


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


class Embedding(Op):
    """Row ids[i] of the table for every i; a row used k times adds k gradients

    The row `padding` gets none.
    """

    def __init__(self, ids: Array, padding: int | None = None):
        self.ids, self.padding = ids, padding

    def forward(self, table: Array) -> Array:
        check_range(self.ids, len(table), "index", "rows")
        self.shape = table.shape
        return table[self.ids]

    def backward(self, gy: Array) -> Grads:
        gtable = self.homes[0]
        if gtable is None or not gtable.flags.c_contiguous:
            gtable = array_module(gy).empty(self.shape, gy.dtype)
        gtable.fill(0)
        add_rows(gtable, self.ids, gy)
        if self.padding is not None:
            gtable[self.padding] = 0
        return (gtable,)


# ---- The linear layer ----


class Linear(Op):
    """x @ W.T + b, fused;  x is (..., in), W is (out, in), b is (out,) or absent

    All axes but the last are joined, for one product of large matrices is faster than
    many of small ones.
    """

    def forward(self, x: Array, W: Array, b: Array | None = None) -> Array:
        self.shape, self.W, self.has_bias = x.shape, W, b is not None
        self.x = self._rows(x, W.shape[1])
        y = self.x @ W.T
        if b is not None:
            y += b
        return y.reshape(*x.shape[:-1], W.shape[0])

    def _rows(self, x: Array, width: int) -> Array:
        """x as a matrix; its last axis must be `width`."""
        if x.shape[-1] != width:
            raise ValueError(f"the last axis of x must be {width}, as in W")
        return x.reshape(math.prod(x.shape[:-1]), width)

    def backward(self, gy: Array) -> Grads:
        x, W, gx, gW = self.x, self.W, None, None
        g = self._rows(gy, W.shape[0])
        if self.needs[0]:
            gx = (g @ W).reshape(self.shape)
        if self.needs[1]:
            gW = array_module(g).matmul(g.T, x, out=self.homes[1])
        return (gx, gW, _sum_rows(g)) if self.has_bias else (gx, gW)


def _sum_rows(g: Array) -> Array:
    """The sum over axis 0; float16 is added up in float32."""
    wide = array_module(g).result_type(g.dtype, "float32")
    return g.sum(0, dtype=wide).astype(g.dtype, copy=False)


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


# ---- Normalization: every row by itself ----


class LayerNorm(Op):
    """(x - mean) / sqrt(var + eps) * W + b over the last axes of x, which W and b have

    With xhat = (x - mean) / std, g = gy W, and means over a row,
                                                          [Ba, Kiros & Hinton 2016]
        gx = (g - mean(g) - xhat mean(g xhat)) / std

    Kept are xhat and a number per row. float16 is computed in float32.
    """

    centred = True

    def __init__(self, eps: float):
        self.eps = eps

    def forward(self, x: Array, W: Array, b: Array | None = None) -> Array:
        xp = array_module(x)
        self.W, self.has_bias = W, b is not None
        rows = self._rows(x)
        if self.centred:
            d = rows - self._mean("ij->i", rows)
        else:
            d = rows.astype(rows.dtype)
        self.inverse = 1 / xp.sqrt(self._mean("ij,ij->i", d, d) + self.eps)
        d *= self.inverse
        self.xhat = d
        y = d * W.reshape(-1)
        if b is not None:
            y += b.reshape(-1)
        return _narrowed(y.reshape(x.shape), x)

    def _rows(self, x: Array) -> Array:
        """x as a matrix; what is normalized together is a row of it."""
        outer = x.shape[: x.ndim - self.W.ndim]
        return _widened(x).reshape(math.prod(outer), self.W.size)

    def _mean(self, equation: str, *arrays: Array) -> Array:
        """The mean of every row, or of a product of rows, as a column."""
        total = array_module(arrays[0]).einsum(equation, *arrays)
        return total[:, None] * (1 / max(self.W.size, 1))

    def backward(self, gy: Array) -> Grads:
        W, xhat, g = self.W, self.xhat, self._rows(gy)
        gW = array_module(g).einsum("ij,ij->j", g, xhat)
        grads = [gW.reshape(W.shape).astype(W.dtype, copy=False)]
        if self.has_bias:
            grads.append(g.sum(0).reshape(W.shape).astype(W.dtype, copy=False))
        if not self.needs[0]:
            return None, *grads
        gx = g * W.reshape(-1)
        shift = xhat * self._mean("ij,ij->i", gx, xhat)
        if self.centred:
            shift += self._mean("ij->i", gx)
        gx -= shift
        gx *= self.inverse
        return _narrowed(gx.reshape(gy.shape), gy), *grads


class RMSNorm(LayerNorm):
    """x / sqrt(mean(x^2) + eps) * W: LayerNorm without a mean   [Zhang & Sennrich 2019]

    gx = (g - xhat mean(g xhat)) / rms
    """

    centred = False


# ---- Attention ----


class Attention(Op):
    """softmax(scale q k^T + mask) v: each query takes a weighted mean of the values

    q is (..., T, d), k (..., S, d), v (..., S, e), the result (..., T, e); the axes
    before are broadcast. The mask, absent or broadcast to (..., T, S), is added, -inf
    where a query must not look. If it may look nowhere, the result is 0.

    With P the probabilities, dP = gy v^T and D = sum(P dP) over a row,

        gv = P^T gy     dS = P (dP - D)     gq = scale dS k     gk = scale dS^T q

    P and dS are kept as (..., S, T): numbers that are added up then lie in one column,
    and all columns are added at once. D is also sum(gy y), which is shorter.
                                        [Vaswani et al. 2017; Dao et al. 2022, app. B]
    dropped: None, or the probability with which an element of P is set to 0, while the
    others are divided by 1 - dropped.
    """

    def __init__(self, scale: float, dropped: float = 0.0):
        self.scale, self.dropped = scale, dropped

    def forward(self, q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        xp, self.shapes = array_module(q), [x.shape for x in (q, k, v)]
        if mask is not None:
            self.shapes.append(mask.shape)
        y_like, self.dtype = q, q.dtype
        q, k, v = _widened(q) * self.scale, _widened(k), _widened(v)
        scores = xp.matmul(k, q.swapaxes(-1, -2))
        if mask is not None:
            scores = self._masked(scores, mask)
        self.p = p = _softmax_columns(scores)
        self.dropout = None
        if self.dropped:
            self.dropout = Dropout(self.dropped)
            p = self.dropout.forward(p)
        self.q, self.k, self.v = q, k, v
        self.y = _matmul_like(y_like, p.swapaxes(-1, -2), v)
        return self.y.astype(self.dtype, copy=False)

    def _masked(self, scores: Array, mask: Array) -> Array:
        """scores + mask, in place unless the mask has axes that are stretched."""
        columns = _widened(mask).swapaxes(-1, -2)
        shape = broadcast_shapes(scores.shape, columns.shape)
        if shape != scores.shape:
            return scores + columns
        scores += columns
        return scores

    def backward(self, gy: Array) -> Grads:
        xp, q, k, v, p = array_module(gy), self.q, self.k, self.v, self.p
        gy = _widened(gy)
        dropout = self.dropout
        used = dropout.backward(p)[0] if dropout else p
        gv = _matmul_like(v, used, gy) if self.needs[2] else None
        dS = xp.matmul(v, gy.swapaxes(-1, -2))
        if dropout:
            dS = dropout.backward(dS)[0]
        dS -= xp.einsum("...i,...i->...", gy, self.y)[..., None, :]
        dS *= p
        gq = _matmul_like(q, dS.swapaxes(-1, -2), k)
        gq *= self.scale
        gk = _matmul_like(k, dS, q)
        grads = [gq, gk, gv, dS.swapaxes(-1, -2)][: len(self.shapes)]
        return tuple(
            [
                None
                if g is None
                else unbroadcast(g, shape).astype(self.dtype, copy=False)
                for g, shape in zip(grads, self.shapes, strict=True)
            ]
        )


def _softmax_columns(x: Array) -> Array:
    """Softmax along axis -2, in place. A column of -inf becomes one of 0."""
    xp = array_module(x)
    top = x.max(-2, keepdims=True)
    x -= xp.where(top == -xp.inf, 0, top)
    xp.exp(x, out=x)
    total = x.sum(-2, keepdims=True)
    x /= xp.where(total == 0, 1, total)
    return x


def _matmul_like(x: Array, a: Array, b: Array) -> Array:
    """a @ b, with its axes in the order in memory that those of x have.

    x may be a transposed view. If so, what is made of the result by transposing it
    back is in order, and to reshape that needs no copy.
    """
    xp = array_module(a)
    outer = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*outer, a.shape[-2], b.shape[-1])
    return xp.matmul(a, b, out=xp.empty_like(x, a.dtype, shape=shape))


class Rotary(Op):
    """Pairs (x[i], x[i + d/2]) of the last axis, turned by an angle each

    cos and sin are (..., d/2) and broadcast to x. Backward turns back.
                                                                  [Su et al. 2021]
    """

    def __init__(self, cos: Array, sin: Array):
        self.cos, self.sin = cos, sin

    def forward(self, x: Array) -> Array:
        return self._turned(x, self.sin)

    def backward(self, gy: Array) -> Grads:
        return (self._turned(gy, -self.sin),)

    def _turned(self, x: Array, sin: Array) -> Array:
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        y = array_module(x).empty_like(x)
        y[..., :half] = a * self.cos - b * sin
        y[..., half:] = b * self.cos + a * sin
        return y


# ---- Softmax and losses: fused where the parts alone would overflow ----


class Softmax(Op):
    """exp(x) / sum(exp(x)) along the axis

    Subtracting the maximum first changes nothing in the quotient and keeps exp <= 1.
    """

    def __init__(self, axis: int = -1):
        self.axis = axis

    def forward(self, x: Array) -> Array:
        xp = array_module(x)
        self.y = _widened(x) - x.max(self.axis, keepdims=True)
        self.y = xp.exp(self.y)
        self.y /= total(self.y, self.axis, keepdims=True)
        return _narrowed(self.y, x)

    def backward(self, gy: Array) -> Grads:
        g = _widened(gy) * self.y
        gx = g - self.y * total(g, self.axis, keepdims=True)
        return (_narrowed(gx, gy),)


class LogSoftmax(Op):
    """log(softmax(x)) along the axis, never taking the log of a number that became 0"""

    def __init__(self, axis: int = -1):
        self.axis = axis

    def forward(self, x: Array) -> Array:
        xp = array_module(x)
        z = _widened(x) - x.max(self.axis, keepdims=True)
        self.y = z - xp.log(total(xp.exp(z), self.axis, keepdims=True))
        return _narrowed(self.y, x)

    def backward(self, gy: Array) -> Grads:
        g, p = _widened(gy), array_module(gy).exp(self.y)
        gx = g - p * total(g, self.axis, keepdims=True)
        return (_narrowed(gx, gy),)


class CrossEntropy(Op):
    """-log softmax(x)[label] of every row, weighted;  (N, classes) -> (N,)

    With Z = log(sum(exp x)), the loss of a row is a (Z - x[label]), where a is the
    weight of its label, 1 unless weights (classes,) are given. The derivative is
    strikingly simple: a times the predicted probabilities, less a at the label.

    Smoothing by s gives the label a share of 1 - s, and s / classes to each class c:

        (1 - s) a (Z - x[label]) + sum_c u[c] (Z - x[c]),    u = s / classes * weights

    Rows whose label is `ignore` count nothing, forward and backward. float16 is
    computed in float32, and so is the result, for the sum of many may be infinite.
    """

    def __init__(
        self,
        labels: Array,
        ignore: int = -100,
        weights: Array | None = None,
        smoothing: float = 0.0,
    ):
        self.labels, self.ignore = labels, ignore
        self.weights, self.smoothing = weights, smoothing

    def forward(self, x: Array) -> Array:
        xp = array_module(x)
        check_range(self.labels, x.shape[1], "label", "classes", self.ignore)
        self.dtype, x = x.dtype, _widened(x)
        labels = xp.asarray(self.labels)  # where x is
        kept = labels != self.ignore
        self.at = xp.arange(len(x)), xp.where(kept, labels, 0)
        self._set_shares(x, kept)
        self.e = x - x.max(axis=1, keepdims=True)
        y = -self.share * xp.where(kept, self.e[self.at], x.dtype.type(0))
        if self.u is not None:
            y -= self.e @ self.u
        xp.exp(self.e, out=self.e)
        self.total = self.e.sum(axis=1)
        return xp.where(kept, y + self.all_shares * xp.log(self.total), x.dtype.type(0))

    def _set_shares(self, x: Array, kept: Array) -> None:
        """What the label of a row counts, each class of any row, and all together."""
        xp, weights, s = array_module(x), self.weights, self.smoothing
        self.kept = kept.astype(x.dtype)
        self.share = self.kept * (1 - s)
        self.u, self.all_shares = None, self.share
        if weights is not None:
            weights = xp.asarray(weights, x.dtype)
            self.share = self.share * weights[self.at[1]]
            self.all_shares = self.share
        if s:
            self.u = xp.full(x.shape[1], s / x.shape[1], x.dtype)
            if weights is not None:
                self.u *= weights
            self.all_shares = self.share + self.u.sum() * self.kept

    def backward(self, gy: Array) -> Grads:
        gx = self.e * (gy * self.all_shares / self.total)[:, None]
        gx[self.at] -= gy * self.share
        if self.u is not None:
            gx -= (gy * self.kept)[:, None] * self.u
        return (gx.astype(self.dtype, copy=False),)


class KLDivergence(Op):
    """t (log t - x), elementwise, x being log-probabilities; 0 where t = 0

    log_target: t comes as its log, and the formula is exp(t) (t - x).
    """

    def __init__(self, log_target: bool = False):
        self.log_target = log_target

    def forward(self, x: Array, t: Array) -> Array:
        xp = array_module(x)
        self.t = xp.exp(t) if self.log_target else t
        log = t if self.log_target else xp.log(xp.where(t == 0, 1, t))
        self.difference = log - x
        return self.t * self.difference

    def backward(self, gy: Array) -> Grads:
        gx = -gy * self.t
        if not self.needs[1]:
            return gx, None
        gt = gy * (self.difference + 1)
        if self.log_target:
            return gx, gt * self.t
        return gx, array_module(gy).where(self.t == 0, -gy * math.inf, gt)


class SmoothL1(Op):
    """d^2 / (2 beta) where |d| < beta, else |d| - beta / 2, with d = a - b"""

    def __init__(self, beta: float):
        self.beta = beta

    def forward(self, a: Array, b: Array) -> Array:
        xp, beta = array_module(a), self.beta
        self.d = a - b
        size = abs(self.d)
        if not beta:
            return size
        near = xp.minimum(size, beta)
        return near * near / (2 * beta) + (size - near)

    def backward(self, gy: Array) -> Grads:
        xp, d = array_module(gy), self.d
        g = gy * (xp.clip(d / self.beta, -1, 1) if self.beta else xp.sign(d))
        return g, (-g if self.needs[1] else None)


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
