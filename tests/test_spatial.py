"""Spatial ops: against loops over every pixel, and against finite differences."""

import itertools
import math
from unittest import mock

import numpy as np
import pytest
from gradcheck import gradcheck
from hypothesis import given, settings
from hypothesis import strategies as st

from minddp import functional as F
from minddp import nn, optim, spatial_ops
from minddp.autograd import Tensor
from minddp.ddp import DistributedDataParallel
from minddp.device import manual_seed
from minddp.errors import UsageError
from minddp.testing import run_groups


def integers(*shape, seed=0):
    """Small integers as float64: their sums and products are exact in any order."""
    return np.random.default_rng(seed).integers(-9, 10, shape).astype("float64")


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


# ---- The references: what the definitions say, pixel by pixel, without padding ----


def seen_by(at, i, j, stride, padding, dilation):
    """Which pixel the window at `at` sees with position (i, j) of its kernel."""
    y = at[0] * stride[0] - padding[0] + i * dilation[0]
    x = at[1] * stride[1] - padding[1] + j * dilation[1]
    return y, x


def inside(pixel, shape):
    return 0 <= pixel[0] < shape[0] and 0 <= pixel[1] < shape[1]


def conv2d_by_loops(x, W, stride, padding, dilation, groups):
    N, _, H, width = x.shape
    channels, per_group, kh, kw = W.shape
    out = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, p, d, k, s in zip(
            (H, width), padding, dilation, (kh, kw), stride, strict=True
        )
    ]
    y = np.zeros((N, channels, *out))
    for n, o, *at in np.ndindex(y.shape):
        group = o // (channels // groups)
        for c, i, j in np.ndindex(per_group, kh, kw):
            pixel = seen_by(at, i, j, stride, padding, dilation)
            if inside(pixel, (H, width)):
                y[(n, o, *at)] += W[o, c, i, j] * x[(n, group * per_group + c, *pixel)]
    return y


def conv_transpose2d_by_loops(x, W, stride, padding, more, groups, dilation):
    N, C, H, width = x.shape
    _, per_group, kh, kw = W.shape
    out = [
        (size - 1) * s - 2 * p + d * (k - 1) + m + 1
        for size, s, p, d, k, m in zip(
            (H, width), stride, padding, dilation, (kh, kw), more, strict=True
        )
    ]
    y = np.zeros((N, per_group * groups, *out))
    for n, c, *at in np.ndindex(x.shape):
        group = c // (C // groups)
        for o, i, j in np.ndindex(per_group, kh, kw):
            pixel = seen_by(at, i, j, stride, padding, dilation)
            if inside(pixel, out):
                value = W[c, o, i, j] * x[(n, c, *at)]
                y[(n, group * per_group + o, *pixel)] += value
    return y


def windows_by_loops(shape, kernel, stride, padding, dilation, ceil_mode):
    """For every window (oh, ow), the list of its pixels, without those outside."""
    counts = []
    for axis in (0, 1):
        last = shape[axis] + padding[axis]  # a window must begin before it
        end = last + padding[axis] - dilation[axis] * (kernel[axis] - 1) - 1
        begins = range(0, (last if ceil_mode else end + 1), stride[axis])
        # With ceil_mode the first window that reaches the end is the last one.
        over = [b for b in begins if b >= end]
        counts.append(
            sum(b < end for b in begins) + bool(over) if ceil_mode else len(begins)
        )
    return {
        at: [
            pixel
            for i, j in np.ndindex(*kernel)
            if inside(pixel := seen_by(at, i, j, stride, padding, dilation), shape)
        ]
        for at in itertools.product(*map(range, counts))
    }


# ---- Convolutions ----

pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))
paddings = st.tuples(st.integers(0, 2), st.integers(0, 2))
# Of columns at a time: one row of windows each, some, or all.
bands = st.sampled_from([1, 2000, 1 << 20])


@st.composite
def convolutions(draw):
    """x, W and settings with which there is a window."""
    groups, dilation, padding = draw(st.integers(1, 2)), draw(pairs), draw(paddings)
    kernel = draw(pairs)
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    image = [
        draw(st.integers(max(1, span - 2 * p), span + 4))
        for span, p in zip(spans, padding, strict=True)
    ]
    N, C, channels = (draw(st.integers(low, 2)) for low in (0, 1, 1))
    x = integers(N, C * groups, *image)
    W = integers(channels * groups, C, *kernel, seed=1)
    return x, W, draw(pairs), padding, dilation, groups


def check_linear(f, reference, x, W):
    """f(x, W) is the reference, and so are its gradients, by <gy, f(x')> = <gx, x'>."""
    a, b = Tensor(x, requires_grad=True), Tensor(W, requires_grad=True)
    y = f(a, b)
    np.testing.assert_array_equal(y.data, reference(x, W))
    gy = integers(*y.shape, seed=2)
    y.backward(gy)
    other_x, other_W = integers(*x.shape, seed=3), integers(*W.shape, seed=4)
    assert (a.grad.data * other_x).sum() == (gy * reference(other_x, W)).sum()
    assert (b.grad.data * other_W).sum() == (gy * reference(x, other_W)).sum()


@given(convolutions(), bands)
@settings(max_examples=60, deadline=None)
def test_a_convolution_and_its_gradients_are_those_of_the_loops(drawn, band):
    x, W, *rest = drawn
    with mock.patch.object(spatial_ops, "BAND_BYTES", band):
        check_linear(
            lambda x, W: F.conv2d(x, W, None, *rest),
            lambda x, W: conv2d_by_loops(x, W, *rest),
            x,
            W,
        )


@given(convolutions(), paddings, bands)
@settings(max_examples=60, deadline=None)
def test_a_transposed_convolution_and_its_gradients_are_those_of_the_loops(
    drawn, more, band
):
    x, W, stride, padding, dilation, groups = drawn
    W = integers(x.shape[1], W.shape[0] // groups, *W.shape[2:], seed=1)
    limits = [max(s, d) - 1 for s, d in zip(stride, dilation, strict=True)]
    more = tuple(map(min, more, limits))
    ends = zip(x.shape[2:], stride, padding, dilation, W.shape[2:], more, strict=True)
    if any((n - 1) * s - 2 * p + d * (k - 1) + m < 0 for n, s, p, d, k, m in ends):
        padding = (0, 0)
    rest = stride, padding, more, groups, dilation
    with mock.patch.object(spatial_ops, "BAND_BYTES", band):
        check_linear(
            lambda x, W: F.conv_transpose2d(x, W, None, *rest),
            lambda x, W: conv_transpose2d_by_loops(x, W, *rest),
            x,
            W,
        )


def test_convolutions_agree_with_finite_differences():
    x, W, b = numbers(2, 4, 5, 4), numbers(6, 2, 3, 2, seed=1), numbers(6, seed=2)
    gradcheck(lambda x, W, b: F.conv2d(x, W, b, (2, 1), (1, 0), (1, 2), 2), x, W, b)
    gradcheck(lambda x, W: F.conv2d(x, W, groups=2), x, W)
    x, W, b = numbers(2, 4, 3, 2), numbers(4, 3, 2, 3, seed=1), numbers(6, seed=2)
    gradcheck(
        lambda x, W, b: F.conv_transpose2d(x, W, b, (2, 3), (1, 2), (1, 2), 2), x, W, b
    )
    x, W, b = numbers(2, 2, 5), numbers(3, 2, 3, seed=1), numbers(3, seed=2)
    gradcheck(lambda x, W, b: F.conv1d(x, W, b, 2, 1), x, W, b)


def test_the_bias_is_added_to_its_channel_and_gets_the_sum_over_all_else():
    x, W, b = np.zeros((2, 1, 3, 4)), np.zeros((2, 1, 1, 1)), np.array([10.0, 20.0])
    bias = Tensor(b, requires_grad=True)
    y = F.conv2d(x, W, bias)
    assert (y.data == b.reshape(1, 2, 1, 1)).all()
    y.sum().backward()
    assert bias.grad.tolist() == [24, 24]
    y = F.conv_transpose2d(x, np.zeros((1, 2, 3, 3)), b, padding=1)
    assert (y.data == b.reshape(1, 2, 1, 1)).all()


def test_a_transposed_convolution_is_the_gradient_of_a_convolution():
    x, W, gy = numbers(2, 4, 7, 6), numbers(6, 2, 3, 2, seed=1), numbers(2, 6, 4, 3)
    x = Tensor(x, requires_grad=True)
    F.conv2d(x, W, None, 2, (1, 0), 1, 2).backward(gy)
    gx = F.conv_transpose2d(gy, W, None, 2, (1, 0), (0, 0), 2)
    np.testing.assert_allclose(gx.data, x.grad.data)


@pytest.mark.parametrize("kernel", [(3, 3), (2, 5), (4, 1)])
@pytest.mark.parametrize("dilation", [1, 2])
def test_padding_same_keeps_the_size_and_puts_an_odd_rest_at_the_end(kernel, dilation):
    x, W = integers(1, 2, 6, 7), integers(3, 2, *kernel, seed=1)
    y = F.conv2d(x, W, padding="same", dilation=dilation)
    assert y.shape == (1, 3, 6, 7)
    rest = [dilation * (k - 1) for k in kernel]
    x = np.pad(x, ((0, 0), (0, 0), *((n // 2, n - n // 2) for n in rest)))
    np.testing.assert_array_equal(y.data, F.conv2d(x, W, dilation=dilation).data)
    valid = F.conv2d(x, W, padding="valid", dilation=dilation)
    np.testing.assert_array_equal(y.data, valid.data)


def test_conv1d_is_what_numpy_calls_correlate():
    x, W = integers(2, 3, 9), integers(4, 3, 3, seed=1)
    expected = [[sum(map(np.correlate, row, k)) for k in W] for row in x]
    np.testing.assert_array_equal(F.conv1d(x, W).data, expected)
    np.testing.assert_array_equal(F.conv1d(x[0], W).data, expected[0])
    assert F.conv1d(x, W, stride=[2], padding=(1,)).shape == (2, 4, 5)
    assert F.conv1d(x, W, padding="same").shape == (2, 4, 9)


def test_an_empty_batch_gives_zero_gradients_to_the_weights():
    W = Tensor(np.ones((2, 3, 2, 2)), requires_grad=True)
    b = Tensor(np.ones(2), requires_grad=True)
    y = F.conv2d(np.ones((0, 3, 5, 4)), W, b)
    assert y.shape == (0, 2, 4, 3)
    y.sum().backward()
    assert not W.grad.data.any()
    assert not b.grad.data.any()


# ---- Memory: layout, homes ----


def test_outputs_are_flattened_without_a_copy():
    """The batch is last in memory, and so (C, H, W) is one axis of even steps."""
    x = F.max_pool2d(F.relu(F.conv2d(numbers(5, 2, 8, 6), numbers(3, 2, 3, 3))), 2)
    assert x.data.transpose(1, 2, 3, 0).flags.c_contiguous
    flat = x.flatten(1)
    assert flat.shape == (5, 3 * 3 * 2)
    assert np.shares_memory(flat.data, x.data)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_no_result_depends_on_the_order_in_memory(order):
    back = np.argsort(order)
    x, W = integers(2, 3, 5, 4), integers(3, 3, 2, 2, seed=1)
    layers = (
        lambda x: F.conv2d(x, W),
        lambda x: F.conv_transpose2d(x, W),
        lambda x: F.max_pool2d(x, 2, 1),
        lambda x: F.avg_pool2d(x, 2, 1, 1),
        lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
        lambda x: F.interpolate(x, (7, 3), mode="bilinear"),
    )
    for f in layers:
        a = Tensor(x, requires_grad=True)
        other = np.ascontiguousarray(x.transpose(order)).transpose(back)
        b = Tensor(other, requires_grad=True)
        y, z = f(a), f(b)
        gy = integers(*y.shape, seed=2)
        y.backward(gy)
        z.backward(np.asfortranarray(gy))
        np.testing.assert_array_equal(y.data, z.data)
        np.testing.assert_array_equal(a.grad.data, b.grad.data)


@pytest.mark.parametrize("f", [F.conv2d, F.conv_transpose2d])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_weights_first_gradient_is_written_where_it_is_at_home(f, dtype):
    x, values = integers(2, 2, 4, 3).astype(dtype), integers(2, 2, 2, 2).astype(dtype)
    W, other = (Tensor(values, requires_grad=True) for _ in range(2))
    W.grad_home = np.full(20, np.nan, dtype)[2:18].reshape(W.shape)  # in a bucket
    for weight in (W, other):
        f(f(x, weight), weight).sum().backward()
    assert W.grad.data is W.grad_home
    np.testing.assert_array_equal(W.grad.data, other.grad.data)


def test_the_gradient_of_the_data_is_not_computed():
    for op, out in (
        (spatial_ops.Conv2d(spatial_ops.Windows((2, 2))), (2, 3, 3, 3)),
        (spatial_ops.ConvTranspose2d(spatial_ops.Windows((2, 2))), (2, 3, 5, 5)),
    ):
        op.needs = (False, True, True)
        op.forward(np.ones((2, 3, 4, 4)), np.ones((3, 3, 2, 2)), np.ones(3))
        gx, gW, gb = op.backward(np.ones(out))
        assert gx is None
        assert gW.shape == (3, 3, 2, 2)
        assert gb.shape == (3,)


# ---- Pools ----


@st.composite
def pools(draw):
    """x and the settings of a pool; values tie often."""
    kernel, stride, ceil_mode = draw(pairs), draw(pairs), draw(st.booleans())
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    image = [
        draw(st.integers(max(k - 2 * p, 1), k + 5))
        for k, p in zip(kernel, padding, strict=True)
    ]
    x = integers(draw(st.integers(0, 2)), 2, *image, seed=draw(st.integers(0, 99))) // 4
    return x, kernel, stride, padding, ceil_mode


@given(pools(), st.sampled_from([(1, 1), (2, 1), (1, 2)]))
@settings(max_examples=80, deadline=None)
def test_max_pool_takes_the_largest_and_the_first_gets_the_gradient(drawn, dilation):
    x, kernel, stride, padding, ceil_mode = drawn
    spans = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    if spans[0] >= x.shape[2] or spans[1] >= x.shape[3]:
        dilation = (1, 1)  # else a window could see padding only
    windows = windows_by_loops(
        x.shape[2:], kernel, stride, padding, dilation, ceil_mode
    )
    t = Tensor(x, requires_grad=True)
    y = F.max_pool2d(t, kernel, stride, padding, dilation, ceil_mode)
    gy = integers(*y.shape, seed=1)
    y.backward(gy)
    expected, gx = np.zeros(y.shape), np.zeros(x.shape)
    assert list(windows) == list(np.ndindex(y.shape[2:]))
    for n, c in np.ndindex(x.shape[:2]):
        for at, pixels in windows.items():
            best = max(pixels, key=lambda pixel: x[(n, c, *pixel)])  # the first of them
            expected[(n, c, *at)] = x[(n, c, *best)]
            gx[(n, c, *best)] += gy[(n, c, *at)]
    np.testing.assert_array_equal(y.data, expected)
    np.testing.assert_array_equal(t.grad.data, gx)


@given(pools(), st.booleans(), st.sampled_from([None, 3]))
@settings(max_examples=80, deadline=None)
def test_avg_pool_is_the_mean_of_the_loops(drawn, include, divisor):
    x, kernel, stride, padding, ceil_mode = drawn
    windows = windows_by_loops(x.shape[2:], kernel, stride, padding, (1, 1), ceil_mode)
    padded = [n + 2 * p for n, p in zip(x.shape[2:], padding, strict=True)]
    padding_too = windows_by_loops(padded, kernel, stride, (0, 0), (1, 1), ceil_mode)
    t = Tensor(x, requires_grad=True)
    y = F.avg_pool2d(t, kernel, stride, padding, ceil_mode, include, divisor)
    gy = integers(*y.shape, seed=1)
    y.backward(gy)
    expected, gx = np.zeros(y.shape), np.zeros(x.shape)
    for n, c in np.ndindex(x.shape[:2]):
        for at, pixels in windows.items():
            count = divisor or len(padding_too[at] if include else pixels)
            expected[(n, c, *at)] = sum(x[(n, c, *pixel)] for pixel in pixels) / count
            for pixel in pixels:
                gx[(n, c, *pixel)] += gy[(n, c, *at)] / count
    np.testing.assert_allclose(y.data, expected, atol=1e-12)
    np.testing.assert_allclose(t.grad.data, gx, atol=1e-12)


def test_padding_counts_in_a_mean_and_what_hangs_over_it_does_not():
    """Ones, 3 x 1, padded to 5: windows of 4 have rows 0 to 3, then 3 and 4 of 6."""
    x = np.ones((1, 1, 3, 1))
    settings = (4, 1), (3, 1), (1, 0), True
    assert F.avg_pool2d(x, *settings).data.ravel().tolist() == [3 / 4, 1 / 2]
    assert F.avg_pool2d(x, *settings, False).data.ravel().tolist() == [1, 1]
    assert F.avg_pool2d(x, *settings, True, 8).data.ravel().tolist() == [3 / 8, 1 / 8]


def test_pools_agree_with_finite_differences():
    x = numbers(2, 2, 5, 6)
    gradcheck(lambda x: F.max_pool2d(x, (2, 3)), x)
    gradcheck(lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), x)
    gradcheck(lambda x: F.avg_pool2d(x, (3, 2), 2, 1, True, False), x)
    gradcheck(lambda x: F.adaptive_avg_pool2d(x, (3, 4)), x)


def test_padding_never_wins_a_maximum_and_a_nan_always_does():
    x = np.full((1, 1, 3, 3), -7.0)
    assert (F.max_pool2d(x, 3, 1, 1).data == -7).all()
    x[0, 0, 1, 1] = np.nan
    assert np.isnan(F.max_pool2d(x, 2, 1).data).all()


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (5, 4), (7, 9)])
def test_adaptive_windows_cover_the_image_as_evenly_as_they_can(shape):
    x = Tensor(numbers(2, 3, 5, 4), requires_grad=True)
    y = F.adaptive_avg_pool2d(x, shape)
    gy = numbers(*y.shape, seed=1)
    y.backward(gy)
    expected, gx = np.zeros(y.shape), np.zeros(x.shape)
    for i, j in np.ndindex(shape):
        rows = slice(math.floor(i * 5 / shape[0]), math.ceil((i + 1) * 5 / shape[0]))
        cols = slice(math.floor(j * 4 / shape[1]), math.ceil((j + 1) * 4 / shape[1]))
        part = x.data[:, :, rows, cols]
        expected[:, :, i, j] = part.mean((2, 3))
        gx[:, :, rows, cols] += gy[:, :, i, j, None, None] / part[0, 0].size
    np.testing.assert_allclose(y.data, expected)
    np.testing.assert_allclose(x.grad.data, gx)


def test_adaptive_pooling_keeps_an_axis_that_is_none():
    x = numbers(2, 3, 5, 4)
    assert F.adaptive_avg_pool2d(x, (None, 2)).shape == (2, 3, 5, 2)
    np.testing.assert_allclose(
        F.adaptive_avg_pool2d(x, 1).data, x.mean((2, 3), keepdims=True)
    )


# ---- Interpolation ----


@pytest.mark.parametrize("size", [(10, 12), (5, 4), (3, 7), (1, 1), (17, 2)])
@pytest.mark.parametrize("align_corners", [False, True])
def test_bilinear_interpolates_first_along_one_axis_and_then_along_the_other(
    size, align_corners
):
    x = numbers(2, 3, 5, 4)

    def along(row, n):
        if align_corners:
            at = np.linspace(0, len(row) - 1, n)
        else:
            at = (np.arange(n) + 0.5) * len(row) / n - 0.5
        return np.interp(at, np.arange(len(row)), row)

    expected = np.apply_along_axis(along, 2, x, size[0])
    expected = np.apply_along_axis(along, 3, expected, size[1])
    y = F.interpolate(x, size, mode="bilinear", align_corners=align_corners)
    np.testing.assert_allclose(y.data, expected, atol=1e-12)
    gradcheck(lambda x: F.interpolate(x, size, None, "bilinear", align_corners), x)


@pytest.mark.parametrize("size", [(10, 12), (5, 4), (3, 7), (1, 1), (17, 2)])
def test_nearest_takes_the_pixel_in_which_an_output_begins(size):
    x = numbers(2, 3, 5, 4)
    rows = [math.floor(i * 5 / size[0]) for i in range(size[0])]
    cols = [math.floor(i * 4 / size[1]) for i in range(size[1])]
    y = F.interpolate(x, size)
    np.testing.assert_array_equal(y.data, x[:, :, rows][:, :, :, cols])
    gradcheck(lambda x: F.interpolate(x, size), x)


def test_a_scale_factor_says_how_wide_a_pixel_becomes_not_how_wide_the_image():
    """5 pixels times 1.5 are 7 of 7.5, so the last half pixel is cut off."""
    x = numbers(1, 1, 5, 5)
    at = (np.arange(7) + 0.5) / 1.5 - 0.5
    expected = np.interp(at, np.arange(5), x[0, 0, 0])
    y = F.interpolate(x, scale_factor=(1, 1.5), mode="bilinear")
    assert y.shape == (1, 1, 5, 7)
    np.testing.assert_allclose(y.data[0, 0, 0], expected)
    doubled = F.interpolate(x, scale_factor=2)
    np.testing.assert_array_equal(doubled.data, x.repeat(2, 2).repeat(2, 3))


def test_a_scale_that_rounds_to_a_plain_copy_or_to_twins_is_taken_as_that():
    """As PyTorch does: 3 pixels times 2.29 are 6, and 2.29 is forgotten."""
    x = numbers(1, 1, 3, 3)
    y = F.interpolate(x, scale_factor=(1.1, 2.29))
    np.testing.assert_array_equal(y.data, x.repeat(2, 3))
    y = F.interpolate(x, scale_factor=1.1, mode="bilinear")
    np.testing.assert_array_equal(y.data, x)


# ---- What all of them promise ----

K = spatial_ops.Windows((2, 2))
SAMPLES = {
    "Conv2d": (
        *(spatial_ops.Conv2d(K), numbers(2, 3, 4, 4)),
        *(numbers(2, 3, 2, 2), numbers(2)),
    ),
    "ConvTranspose2d": (
        *(spatial_ops.ConvTranspose2d(K), numbers(2, 3, 4, 4)),
        *(numbers(3, 2, 2, 2), numbers(2)),
    ),
    "MaxPool2d": (spatial_ops.MaxPool2d(K), numbers(2, 3, 4, 4)),
    "AvgPool2d": (spatial_ops.AvgPool2d(K), numbers(2, 3, 4, 4)),
    "AdaptiveAvgPool2d": (
        *(spatial_ops.AdaptiveAvgPool2d((3, 2)), numbers(2, 3, 4, 4)),
    ),
    "Interpolate": (
        spatial_ops.Interpolate(
            spatial_ops.nearest(4, 5, 4 / 5), spatial_ops.linear(4, 3, 4 / 3, False)
        ),
        numbers(2, 3, 4, 4),
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_dtype_stays_forward_and_backward(name, dtype):
    op, *arrays = SAMPLES[name]
    y = op.forward(*[x.astype(dtype) for x in arrays])
    assert y.dtype == dtype
    assert {g.dtype for g in op.backward(np.ones_like(y))} == {np.dtype(dtype)}


@pytest.mark.parametrize("name", SAMPLES)
def test_backward_only_reads_gy_and_can_run_again(name):
    op, *arrays = SAMPLES[name]
    y = op.forward(*arrays)
    gy = np.ascontiguousarray(np.ones_like(y).transpose(1, 2, 3, 0))
    gy.setflags(write=False)
    gy = gy.transpose(3, 0, 1, 2)  # in the order that the op would use as it is
    for a, b in zip(op.backward(gy), op.backward(gy), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a is not b


def test_sums_of_float16_do_not_overflow_on_the_way():
    x = np.full((2, 1, 40, 50), 60.0, "float16")
    W = Tensor(np.full((1, 1, 40, 50), 1 / 2000, "float16"), requires_grad=True)
    y = F.conv2d(x, W)
    assert y.data.ravel().tolist() == pytest.approx([60, 60], 0.01)
    y.backward(np.array([[[[1.0]]], [[[-1.0]]]]))
    assert not W.grad.data.any()
    assert F.avg_pool2d(x, (40, 50)).data.ravel().tolist() == [60, 60]
    assert F.adaptive_avg_pool2d(x, 1).data.ravel().tolist() == [60, 60]


@pytest.mark.parametrize(
    "f",
    [
        lambda x: F.conv2d(x, numbers(2, 3, 2, 2)),
        lambda x: F.conv_transpose2d(x, numbers(3, 2, 2, 2)),
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.adaptive_avg_pool2d(x, 2),
    ],
)
def test_one_image_without_a_batch_axis_is_a_batch_of_one(f):
    x = numbers(3, 4, 5)
    alone = Tensor(x, requires_grad=True)
    y = f(alone)
    np.testing.assert_array_equal(y.data, f(x[None]).data[0])
    y.sum().backward()
    assert alone.grad.shape == x.shape


# ---- Refusals ----

X = np.ones((2, 4, 5, 6))
W = np.ones((6, 2, 3, 3))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: F.conv2d(X, W), r"conv2d: .*\(2, 4, 5, 6\), \(6, 2, 3, 3\)"),
        (lambda: F.conv2d(X, W, groups=4), "groups=4"),
        (lambda: F.conv2d(X, W, groups=0), "groups"),
        (lambda: F.conv2d(X, W, np.ones(4), groups=2), r"\(4,\)"),
        (lambda: F.conv2d(X[0, 0], W, groups=2), r"\(5, 6\)"),
        (lambda: F.conv2d(X, W[0], groups=2), r"\(2, 3, 3\)"),
        (lambda: F.conv2d(X[:, :, :2], W, groups=2), r"window of \(3, 3\).*\(2, 6\)"),
        (lambda: F.conv2d(X, W, dilation=3, groups=2), r"window of \(7, 7\)"),
        (lambda: F.conv2d(X, W, stride=0, groups=2), "stride must be integers from 1"),
        (lambda: F.conv2d(X, W, stride=1.5, groups=2), r"stride .*1\.5"),
        (lambda: F.conv2d(X, W, padding=-1, groups=2), "padding"),
        (lambda: F.conv2d(X, W, padding=(1, 1, 1), groups=2), "pair"),
        (lambda: F.conv2d(X, W, padding="full", groups=2), "full"),
        (lambda: F.conv2d(X, W, stride=2, padding="same", groups=2), "same"),
        (lambda: F.conv1d(X, W), "conv1d"),
        (lambda: F.conv_transpose2d(X, W), "conv_transpose2d"),
        (lambda: F.conv_transpose2d(X, W[:4], output_padding=1), "output_padding"),
        (lambda: F.conv_transpose2d(X, W[:4], padding="same"), "same"),
        (lambda: F.conv_transpose2d(X, W[:4], padding=4), r"image of \(-1, 0\)"),
        (lambda: F.max_pool2d(X, 7), r"window of \(7, 7\)"),
        (lambda: F.max_pool2d(X, 2, padding=2), "half"),
        (lambda: F.max_pool2d(X.astype(int), 2), "int64"),
        (lambda: F.max_pool2d(X[0, 0], 2), r"\(5, 6\)"),
        (lambda: F.max_pool2d(X[:, :, :0], 2, padding=1), "with pixels"),
        (lambda: F.avg_pool2d(X, 2, divisor_override=0), "divisor"),
        (lambda: F.avg_pool2d(X, (2, 3, 4)), "pair"),
        (lambda: F.adaptive_avg_pool2d(X, 0), "output_size"),
        (lambda: F.adaptive_avg_pool2d(X, (1, 2, 3)), "pair"),
        (lambda: F.interpolate(X), "one of size and scale_factor"),
        (lambda: F.interpolate(X, 3, 2), "one of size and scale_factor"),
        (lambda: F.interpolate(X, scale_factor=0), "scale_factor"),
        (lambda: F.interpolate(X, scale_factor=0.1), "nothing"),
        (lambda: F.interpolate(X, 3, mode="bicubic"), "bicubic"),
        (lambda: F.interpolate(X, 3, align_corners=True), "align_corners"),
        (lambda: F.interpolate(X[0], 3), r"\(4, 5, 6\)"),
        (lambda: nn.Conv2d(3, 4, 2, groups=2), "multiples of groups"),
        (lambda: nn.Conv2d(3, 4, (2, 2, 2)), "kernel_size"),
        (lambda: nn.Conv2d(3, 4, 3, padding_mode="reflect"), "reflect"),
        (lambda: nn.ConvTranspose2d(3, 4, 3, padding_mode="circular"), "circular"),
        (lambda: nn.MaxPool2d(2, return_indices=True), "return_indices"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(call, match):
    with pytest.raises(UsageError, match=match):
        call()


# ---- Modules ----


@pytest.mark.parametrize(
    ("layer", "x", "shape"),
    [
        (nn.Conv2d(4, 6, (3, 2), 2, (1, 0), groups=2), X, (2, 6, 3, 3)),
        (nn.Conv2d(4, 6, 3, padding="same", bias=False), X, (2, 6, 5, 6)),
        (nn.Conv1d(5, 3, 3, dilation=2), X[0], (4, 3, 2)),
        (nn.ConvTranspose2d(4, 6, 2, 2, 0, 1, 2), X, (2, 6, 11, 13)),
        (nn.MaxPool2d(2, ceil_mode=True), X, (2, 4, 3, 3)),
        (nn.AvgPool2d((2, 3), 1), X, (2, 4, 4, 4)),
        (nn.AdaptiveAvgPool2d((1, None)), X, (2, 4, 1, 6)),
        (nn.Upsample(scale_factor=2), X, (2, 4, 10, 12)),
        (nn.Upsample((7, 3), mode="bilinear", align_corners=True), X, (2, 4, 7, 3)),
    ],
)
def test_layers_pass_their_settings_on(layer, x, shape):
    assert layer(x).shape == shape


def test_settings_are_in_the_order_that_they_have_in_pytorch():
    a = nn.Conv2d(4, 6, 3, 2, 1, 2, 2, False, "zeros")
    assert (a.stride, a.padding, a.dilation, a.groups, a.bias) == (2, 1, 2, 2, None)
    a = nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, 2, False, 2, "zeros")
    assert (a.output_padding, a.groups, a.bias, a.dilation) == (1, 2, None, 2)


def test_weights_have_the_shapes_and_the_range_of_pytorch():
    manual_seed(0)
    for layer, shape, fan_in in (
        (nn.Conv2d(32, 40, (3, 2), groups=2), (40, 16, 3, 2), 96),
        (nn.Conv1d(50, 40, 2), (40, 50, 2), 100),
        (nn.ConvTranspose2d(32, 40, 2, groups=2), (32, 20, 2, 2), 80),
    ):
        assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
        assert layer.weight.shape == shape
        assert layer.bias.shape == (40,)
        for p in layer.parameters():
            assert 0.85 / fan_in**0.5 < abs(p.data).max() <= 1 / fan_in**0.5
            assert p.dtype == np.float32


def test_layers_print_their_settings():
    assert repr(nn.Conv2d(1, 16, 3, padding=1)) == (
        "Conv2d(1, 16, kernel_size=(3, 3), stride=1, padding=1, groups=1, bias=True)"
    )
    assert repr(nn.ConvTranspose2d(4, 2, 3)).startswith("ConvTranspose2d(4, 2, kernel")
    assert repr(nn.MaxPool2d(2)) == "MaxPool2d(kernel_size=2, stride=None, padding=0)"
    assert repr(nn.Upsample(scale_factor=2)) == (
        "Upsample(scale_factor=2, mode='nearest')"
    )


# ---- Together ----


def cnn():
    manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 3, padding=1, dtype="float64"), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.ConvTranspose2d(3, 2, 2, 2, dtype="float64"), nn.Upsample(scale_factor=2)),
        *(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(2 * 6 * 4, 3, dtype="float64")),
    )


def trained(model, part):
    x, labels = numbers(8, 1, 6, 4), np.arange(8) % 3
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x[part]), labels[part]).backward()
        optimizer.step()
    return [p.data.copy() for p in model.parameters()]


def test_a_cnn_on_two_ranks_equals_one_process_on_the_whole_batch():
    """Also: with gradients that are at home in buckets."""
    expected = trained(cnn(), slice(None))

    def body(pg):
        model = DistributedDataParallel(cnn(), pg)
        return trained(model, slice(pg.rank, None, 2))

    for parameters in run_groups(2, body):
        for p, q in zip(parameters, expected, strict=True):
            np.testing.assert_allclose(p, q, atol=1e-12)
