"""Spatial ops: what a small window sees as it slides over images.

A kernel of 2 x 3 on an image of 3 x 4 has four windows, 2 x 2. Each of its positions
(i, j) sees one pixel in every window; together they are a picture of 2 x 2, and this
picture is nothing but a part of the image, shifted:

    image            (0,0)  (0,1)  (0,2)  (1,0)  (1,1)  (1,2)
    a b c d          a b    b c    c d    e f    f g    g h
    e f g h          e f    f g    g h    i j    j k    k l
    i j k l

Rule.  An op is a loop over these pictures (`pictures`), which are strided views; no
window is ever visited alone.

    op                  forward                          backward
    --------------------------------------------------------------------------------
    MaxPool2d           the maximum of the pictures      gy to the first that equals it
    AvgPool2d           their sum / count                gy / count, added to each
    Conv2d              W @ columns                      gW = gy @ columns.T
                                                         W.T @ gy, added to the pictures
    ConvTranspose2d     the gx of Conv2d as a forward, and the other way round

The *columns* of a convolution are its pictures, stacked: a matrix (C kh kw, pixels), in
which column p holds all that output pixel p depends on. So a convolution is one matrix
product, with W as (O, C kh kw).       [Chellapilla, Puri & Simard 2006, "unrolling"]

Layout.  Inputs and outputs are (N, C, H, W), as in PyTorch; in memory the batch comes
last, (C, H, W, N). A row of a picture is then one run of W N numbers, or of N if the
stride is not 1, where (N, C, H, W) would have W or 1. Only the first op rearranges
its input: outputs have that memory order already, elementwise ops keep it, and to
flatten (N, C, H, W) for a Linear layer needs no copy.

Cost.  The columns are kh kw times as large as the image, so they are made for a band of
output rows at a time, which fits into the cache, used, and thrown away; backward makes
them again. To copy them is cheap beside the product with O rows.

In PyTorch: `aten/src/ATen/native`, Convolution.cpp, ConvolutionMM2d.cpp, and the
MaxPool, AveragePool, AdaptiveAveragePooling and UpSample files there.

Left out:
- Winograd's and FFT convolutions, which need fewer multiplications;
- padding by other numbers than zero, and return_indices of max_pool2d;
- interpolation other than nearest and bilinear, and antialiasing.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from minddp.device import Array, array_module
from minddp.errors import UsageError
from minddp.tensor_ops import Grads, Op

Pair: TypeAlias = tuple[int, int]  # vertical, horizontal

BAND_BYTES = 1 << 20  # of columns at a time: about a second-level cache


# ---- Windows ----


class Windows(NamedTuple):
    """How a window lies and slides; all pairs are (vertical, horizontal).

    padding: what is put around the image, ((top, bottom), (left, right)).
    ceil_mode: a last window may hang over the end, if it begins before it.
    """

    kernel: Pair
    stride: Pair = (1, 1)
    padding: tuple[Pair, Pair] = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    ceil_mode: bool = False

    @property
    def span(self) -> Pair:
        """The size of the area from the first to the last pixel of a window."""
        (kh, kw), (dh, dw) = self.kernel, self.dilation
        return dh * (kh - 1) + 1, dw * (kw - 1) + 1

    def grid(self, image: Pair) -> Pair:
        """How many windows an image (H, W) has. Raises: UsageError if none."""
        rows, cols = self._along(0, image), self._along(1, image)
        if rows < 1 or cols < 1:
            raise UsageError(
                f"a window of {self.span} does not fit into an image of {tuple(image)} "
                f"with padding {self.padding}: enlarge the image or the padding, or "
                "take a smaller kernel or dilation"
            )
        return rows, cols

    def _along(self, axis: int, image: Pair) -> int:
        before, after = self.padding[axis]
        stride, room = self.stride[axis], image[axis] + before + after - self.span[axis]
        if not self.ceil_mode:
            return room // stride + 1
        n = -(-room // stride) + 1
        return n - 1 if (n - 1) * stride >= image[axis] + before else n

    def canvas(self, image: Pair) -> Pair:
        """The size of the padded image, stretched to where the last window ends."""
        sizes = []
        for axis, n in enumerate(self.grid(image)):
            end = (n - 1) * self.stride[axis] + self.span[axis]
            sizes.append(max(end, image[axis] + sum(self.padding[axis])))
        return sizes[0], sizes[1]


def pictures(x: Array, windows: Windows, rows: range, cols: int) -> Iterator[Array]:
    """For every position of the kernel, the view (C, rows, cols, N) of what it sees.

    x is (C, H, W, N), padded; rows are the rows of windows that are wanted.
    """
    (kh, kw), (sh, sw), _, (dh, dw), _ = windows
    for i in range(kh):
        top = rows.start * sh + i * dh
        for j in range(kw):
            vertical = slice(top, top + (len(rows) - 1) * sh + 1, sh)
            horizontal = slice(j * dw, j * dw + (cols - 1) * sw + 1, sw)
            yield x[:, vertical, horizontal]


# ---- Layout ----


def _batch_last(x: Array, dtype: Any) -> Array:
    """(N, C, H, W) as (C, H, W, N), contiguous; no copy if it is so in memory."""
    return array_module(x).ascontiguousarray(x.transpose(1, 2, 3, 0), dtype)


def _batch_first(x: Array, dtype: Any) -> Array:
    """(C, H, W, N) as (N, C, H, W), a view."""
    return x.transpose(3, 0, 1, 2).astype(dtype, copy=False)


def _pad(x: Array, windows: Windows, canvas: Pair, value: float, dtype: Any) -> Array:
    """x, (N, C, H, W), on a canvas of this size, as (C, H, W, N)."""
    N, C, H, W = x.shape
    if canvas == (H, W):
        return _batch_last(x, dtype)
    padded = array_module(x).full((C, *canvas, N), value, dtype)
    _crop(padded, windows, (H, W))[...] = x.transpose(1, 2, 3, 0)
    return padded


def _crop(padded: Array, windows: Windows, image: Pair) -> Array:
    """The view (C, H, W, N) of the image on its canvas."""
    (top, _), (left, _) = windows.padding
    return padded[:, top : top + image[0], left : left + image[1]]


def _wide(*arrays: Array) -> Any:
    """The dtype to compute in: float16 would overflow in sums, and is slow."""
    return array_module(arrays[0]).result_type(*arrays, "float32")


# ---- Convolution; W is (groups, O / groups, C / groups kh kw) ----


def _bands(x: Array, windows: Windows, rows: int, cols: int) -> Iterator[range]:
    """All rows of windows, as many at a time as have columns of BAND_BYTES."""
    kh, kw = windows.kernel
    row_bytes = len(x) * kh * kw * cols * x.shape[3] * x.itemsize
    step = max(1, BAND_BYTES // max(1, row_bytes))
    for top in range(0, rows, step):
        yield range(top, min(top + step, rows))


def _columns(x: Array, windows: Windows, rows: range, cols: int, groups: int) -> Array:
    """The pictures, stacked: (groups, C / groups kh kw, len(rows) cols N)."""
    kh, kw = windows.kernel
    stack = array_module(x).empty(
        (len(x), kh * kw, len(rows), cols, x.shape[3]), x.dtype
    )
    for k, picture in enumerate(pictures(x, windows, rows, cols)):
        stack[:, k] = picture
    return stack.reshape(groups, len(x) // groups * kh * kw, -1)


def _band(y: Array, rows: range, groups: int) -> Array:
    """The view (groups, O / groups, pixels) of these rows of y, (O, oh, ow, N)."""
    band = y[:, rows.start : rows.stop]
    return band.reshape(groups, len(y) // groups, math.prod(band.shape[1:]))


def _gather(x: Array, W: Array, windows: Windows, out: Pair) -> Array:
    """y (O, oh, ow, N): the products of W with the columns of x (C, H, W, N)."""
    groups, per_group, _ = W.shape
    y = array_module(x).empty((groups * per_group, *out, x.shape[3]), x.dtype)
    for rows in _bands(x, windows, *out):
        columns = _columns(x, windows, rows, out[1], groups)
        array_module(x).matmul(W, columns, out=_band(y, rows, groups))
    return y


def _scatter(y: Array, W: Array, windows: Windows, canvas: Pair) -> Array:
    """The transpose of _gather: x (C, H, W, N), where each y was spread over its
    window, weighted by W."""
    groups, _, size = W.shape
    kh, kw = windows.kernel
    C, (rows, cols, N) = groups * size // (kh * kw), y.shape[1:]
    x = array_module(y).zeros((C, *canvas, N), y.dtype)
    for band in _bands(x, windows, rows, cols):
        columns = W.swapaxes(1, 2) @ _band(y, band, groups)
        stack = columns.reshape(C, kh * kw, len(band), cols, N)
        for k, picture in enumerate(pictures(x, windows, band, cols)):
            picture += stack[:, k]
    return x


def _weight_gradient(x: Array, gy: Array, windows: Windows, groups: int) -> Array:
    """gW (groups, O / groups, C / groups kh kw), summed over the bands.

    gy @ columns.T is taken as (columns @ gy.T).T: more rows are the faster product.
    """
    (kh, kw), (_, rows, cols, _) = windows.kernel, gy.shape
    shape = groups, len(x) // groups * kh * kw, len(gy) // groups
    total = array_module(x).zeros(shape, x.dtype)
    for band in _bands(x, windows, rows, cols):
        columns = _columns(x, windows, band, cols, groups)
        total += columns @ _band(gy, band, groups).swapaxes(1, 2)
    return total.swapaxes(1, 2)


class _Convolution(Op):
    """What both convolutions share: the settings, and whose memory gW is."""

    def __init__(self, windows: Windows, groups: int = 1):
        self.windows, self.groups = windows, groups

    def _take(self, x: Array, W: Array) -> tuple[Any, Array]:
        """The dtype to compute in, and W as (groups, O / groups, C / groups kh kw)."""
        dtype = _wide(x, W)
        self.image, self.shape = x.shape[2:], W.shape
        self.dtype = array_module(x).result_type(x, W)
        return dtype, W.astype(dtype, copy=False).reshape(
            self.groups, len(W) // self.groups, -1
        )

    def _deliver(self, gW: Array) -> Array:
        """gW in the shape of W, at its home if it has one."""
        home = self.homes[1]
        if home is None:
            home = array_module(gW).empty(self.shape, self.dtype)
        home[...] = gW.reshape(self.shape)
        return home


class Conv2d(_Convolution):
    """y[n, o] = b[o] + sum over c, i, j of W[o, c, i, j] x[n, c, .. + i, .. + j]

    x (N, C, H, W), W (O, C / groups, kh, kw), b (O,) or absent -> (N, O, oh, ow).
    Channels are cut into groups, and each group of outputs sees its own of the inputs.
    """

    def forward(self, x: Array, W: Array, b: Array | None = None) -> Array:
        dtype, self.W = self._take(x, W)
        windows, self.has_bias = self.windows, b is not None
        self.x = _pad(x, windows, windows.canvas(self.image), 0, dtype)
        y = _gather(self.x, self.W, windows, windows.grid(self.image))
        if b is not None:
            y += b[:, None, None, None]
        return _batch_first(y, self.dtype)

    def backward(self, gy: Array) -> Grads:
        x, windows, gx, gW = self.x, self.windows, None, None
        gy = _batch_last(gy, x.dtype)
        if self.needs[0]:
            canvas = _scatter(gy, self.W, windows, x.shape[1:3])
            gx = _batch_first(_crop(canvas, windows, self.image), self.dtype)
        if self.needs[1]:
            gW = self._deliver(_weight_gradient(x, gy, windows, self.groups))
        gb = gy.sum((1, 2, 3)).astype(self.dtype, copy=False)
        return (gx, gW, gb) if self.has_bias else (gx, gW)


class ConvTranspose2d(_Convolution):
    """Every pixel of x, times W, is added to a window of y: gx of Conv2d as a forward

    x (N, C, H, W), W (C, O / groups, kh, kw), b (O,) or absent -> (N, O, oh, ow), with
    oh = (H - 1) stride - 2 padding + dilation (kh - 1) + output_padding + 1. The
    windows lie on y, padded; x has a pixel for each of them.
    """

    def __init__(
        self, windows: Windows, groups: int = 1, output_padding: Pair = (0, 0)
    ):
        super().__init__(windows, groups)
        self.output_padding = output_padding

    def forward(self, x: Array, W: Array, b: Array | None = None) -> Array:
        dtype, self.W = self._take(x, W)
        self.x, self.has_bias = _batch_last(x, dtype), b is not None
        self.canvas = self._canvas()
        (top, bottom), (left, right) = self.windows.padding
        out = self.canvas[0] - top - bottom, self.canvas[1] - left - right
        if min(out) < 1:
            raise UsageError(
                f"conv_transpose2d: from {self.image} these settings make an image of "
                f"{out}: take less padding, or a larger kernel or stride"
            )
        y = _crop(
            _scatter(self.x, self.W, self.windows, self.canvas), self.windows, out
        )
        if b is not None:
            y += b[:, None, None, None]
        return _batch_first(y, self.dtype)

    def _canvas(self) -> Pair:
        (H, W), (sh, sw) = self.image, self.windows.stride
        (h, w), (more_h, more_w) = self.windows.span, self.output_padding
        return (H - 1) * sh + h + more_h, (W - 1) * sw + w + more_w

    def backward(self, gy: Array) -> Grads:
        x, windows, gx, gW = self.x, self.windows, None, None
        canvas = _pad(gy, windows, self.canvas, 0, x.dtype)
        if self.needs[0]:
            gx = _batch_first(_gather(canvas, self.W, windows, self.image), self.dtype)
        if self.needs[1]:
            gW = self._deliver(_weight_gradient(canvas, x, windows, self.groups))
        gb = canvas.sum((1, 2, 3)).astype(self.dtype, copy=False)
        return (gx, gW, gb) if self.has_bias else (gx, gW)


# ---- Pooling ----


class _Pool(Op):
    """What both pools share: the windows, and the pictures of a padded x."""

    image: Pair  # set by forward

    def __init__(self, windows: Windows):
        self.windows = windows

    def _pictures(self, x: Array) -> Iterator[Array]:
        rows, cols = self.windows.grid(self.image)
        return pictures(x, self.windows, range(rows), cols)


class MaxPool2d(_Pool):
    """The largest pixel of each window; of several that tie, the first gets all of gy

    (N, C, H, W) -> (N, C, oh, ow). Padding is -inf, so that it never wins.
    """

    def forward(self, x: Array) -> Array:
        windows, self.image = self.windows, x.shape[2:]
        self.x = _pad(x, windows, windows.canvas(self.image), -math.inf, x.dtype)
        first, *others = self._pictures(self.x)
        self.y = first.copy()
        for picture in others:
            array_module(x).maximum(self.y, picture, out=self.y)
        return _batch_first(self.y, x.dtype)

    def backward(self, gy: Array) -> Grads:
        x, y, xp = self.x, self.y, array_module(gy)
        gy, gx = _batch_last(gy, x.dtype), xp.zeros_like(x)
        free = xp.ones(y.shape, bool)  # windows whose gradient nobody has had yet
        pairs = zip(self.windows.stride, self.windows.span, strict=True)
        overlap = any(stride < span for stride, span in pairs)
        both = zip(self._pictures(x), self._pictures(gx), strict=True)
        for picture, gradient in both:
            hit = picture == y
            hit &= free
            free ^= hit
            if overlap:
                gradient += gy * hit
            else:  # no pixel is seen twice, so there is nothing to add to
                xp.multiply(gy, hit, out=gradient)
        return (_batch_first(_crop(gx, self.windows, self.image), x.dtype),)


class AvgPool2d(_Pool):
    """The sum of each window over a count; (N, C, H, W) -> (N, C, oh, ow)

    The count is that of the pixels in the window; padding counts if count_include_pad,
    what hangs over the padding never does. divisor_override takes its place.
    """

    def __init__(
        self,
        windows: Windows,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ):
        super().__init__(windows)
        self.count_include_pad, self.divisor = count_include_pad, divisor_override

    def forward(self, x: Array) -> Array:
        windows, self.image, self.dtype = self.windows, x.shape[2:], x.dtype
        padded = _pad(x, windows, windows.canvas(self.image), 0, _wide(x))
        self.canvas = padded.shape
        y = sum(self._pictures(padded)) / self._count(padded)
        return _batch_first(y, self.dtype)

    def backward(self, gy: Array) -> Grads:
        gy = _batch_last(gy, _wide(gy))
        share = gy / self._count(gy)
        gx = array_module(gy).zeros(self.canvas, gy.dtype)
        for picture in self._pictures(gx):
            picture += share
        return (_batch_first(_crop(gx, self.windows, self.image), self.dtype),)

    def _count(self, like: Array) -> Array:
        """How many pixels each window has, (oh, ow, 1), or the one divisor."""
        xp = array_module(like)
        if self.divisor is not None:
            return xp.asarray(self.divisor, like.dtype)
        counts = []
        for axis, n in enumerate(self.windows.grid(self.image)):
            before, after = self.windows.padding[axis]
            low, high = 0, self.image[axis]
            if self.count_include_pad:
                low, high = -before, high + after
            begin = xp.arange(n) * self.windows.stride[axis] - before
            end = xp.minimum(begin + self.windows.kernel[axis], high)
            counts.append(end - xp.maximum(begin, low))
        return (counts[0][:, None, None] * counts[1][:, None]).astype(like.dtype)


class AdaptiveAvgPool2d(Op):
    """The mean over windows that divide the image as evenly as they can

    (N, C, H, W) -> (N, C, oh, ow). Of n windows along an axis of size H, number i goes
    from floor(i H / n) to ceil((i + 1) H / n): neighbours may share a pixel. First the
    rows of every window are summed, then its columns.
    """

    def __init__(self, out: Pair):
        self.out = out

    def forward(self, x: Array) -> Array:
        (_, _, H, W), xp, self.dtype = x.shape, array_module(x), x.dtype
        self.rows, self.cols = _parts(H, self.out[0]), _parts(W, self.out[1])
        self.image = H, W
        x = _batch_last(x, _wide(x))
        x = xp.stack([x[:, part].sum(1) for part in self.rows], 1)
        x = xp.stack([x[:, :, part].sum(2) for part in self.cols], 2)
        return _batch_first(x / self._count(x), self.dtype)

    def backward(self, gy: Array) -> Grads:
        gy, (H, W), xp = _batch_last(gy, _wide(gy)), self.image, array_module(gy)
        share = gy / self._count(gy)
        C, oh, _, N = gy.shape
        strips, gx = xp.zeros((C, oh, W, N), gy.dtype), xp.zeros((C, H, W, N), gy.dtype)
        for j, part in enumerate(self.cols):
            strips[:, :, part] += share[:, :, j, None]
        for i, part in enumerate(self.rows):
            gx[:, part] += strips[:, i, None]
        return (_batch_first(gx, self.dtype),)

    def _count(self, like: Array) -> Array:
        h = [part.stop - part.start for part in self.rows]
        w = [part.stop - part.start for part in self.cols]
        xp = array_module(like)
        return xp.multiply.outer(xp.asarray(h), xp.asarray(w, like.dtype))[:, :, None]


def _parts(size: int, n: int) -> list[slice]:
    """n near-equal parts that together are 0 .. size - 1."""
    return [slice(i * size // n, -(-(i + 1) * size // n)) for i in range(n)]


# ---- Interpolation ----


class Taps(NamedTuple):
    """How an axis is resampled: out[o] = sum over t of weight[t, o] x[index[t, o]]."""

    index: Array  # (taps, size of the output), integers
    weight: Array  # the same shape


def nearest(size: int, n: int, scale: float) -> Taps:
    """One tap: output o takes element floor(o scale), at most the last.

    As in PyTorch, that is computed in float32, and a scale that only came near to 1 or
    1/2 by its rounding to n is taken as what it became.
    """
    if n in (size, 2 * size):
        scale = size / n
    at = np.floor(np.arange(n, dtype="float32") * np.float32(scale)).astype(int)
    return Taps(np.minimum(at, size - 1)[None], np.ones((1, n)))


def linear(size: int, n: int, scale: float, align_corners: bool) -> Taps:
    """Two taps: output o lies between two elements, and takes more of the nearer one.

    An element is a cell of width 1, with its value in the middle: the middle of output
    o is at (o + 1/2) scale. With align_corners the first and the last elements are
    where the first and the last outputs are. If n is `size`, nothing moves.
    """
    if n == size:
        at = np.arange(n, dtype="float64")
    elif align_corners:
        at = np.arange(n) * ((size - 1) / max(n - 1, 1))
    else:
        at = np.maximum((np.arange(n) + 0.5) * scale - 0.5, 0)
    low = np.minimum(at.astype(int), size - 1)
    high = np.minimum(low + 1, size - 1)
    return Taps(np.stack([low, high]), np.stack([1 - (at - low), at - low]))


def transposed(taps: Taps, size: int) -> Taps:
    """The taps that bring a gradient back: for each of `size` elements, the outputs
    that took it. Who was taken less often than others gets taps of weight 0."""
    T, n = taps.index.shape
    taken = taps.index.ravel()
    order = np.argsort(taken, kind="stable")
    taken = taken[order]
    place = np.arange(T * n) - np.searchsorted(taken, taken)
    index, weight = np.zeros((2, place.max() + 1, size))
    index[place, taken] = order % n
    weight[place, taken] = taps.weight.ravel()[order]
    return Taps(index.astype(int), weight)


class Interpolate(Op):
    """Rows resampled by one list of taps, and columns by another

    (N, C, H, W) -> (N, C, oh, ow).
    """

    def __init__(self, rows: Taps, cols: Taps):
        self.rows, self.cols = rows, cols

    def forward(self, x: Array) -> Array:
        self.image, self.dtype = x.shape[2:], x.dtype
        x = _batch_last(x, _wide(x))
        return _batch_first(_mix(_mix(x, 1, self.rows), 2, self.cols), self.dtype)

    def backward(self, gy: Array) -> Grads:
        (H, W), gy = self.image, _batch_last(gy, _wide(gy))
        gy = _mix(gy, 2, transposed(self.cols, W))
        return (_batch_first(_mix(gy, 1, transposed(self.rows, H)), self.dtype),)


def _mix(x: Array, axis: int, taps: Taps) -> Array:
    """x (C, H, W, N) resampled along an axis."""
    xp, total = array_module(x), 0
    for index, weight in zip(*taps, strict=True):
        along = xp.asarray(weight, x.dtype).reshape(-1, *[1] * (x.ndim - 1 - axis))
        total = total + x.take(xp.asarray(index), axis) * along
    return total
