"""The ops of GPT- and Llama-like models: formulas written anew, finite differences."""

import math

import numpy as np
import pytest
from gradcheck import gradcheck
from hypothesis import given, settings
from hypothesis import strategies as st

from minddp import functional as F
from minddp import nn
from minddp.autograd import Tensor
from minddp.device import manual_seed
from minddp.errors import UsageError

attention = F.scaled_dot_product_attention


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def chances(*shape, seed=0):
    x = np.random.default_rng(seed).uniform(0.1, 1, shape)
    return x / x.sum(-1, keepdims=True)


def leaf(x):
    return Tensor(np.array(x, "float64"), requires_grad=True)


# ---- erf and what is made of it ----


def test_erf_is_right_to_the_last_digits():
    x = np.concatenate([np.linspace(-7, 7, 5001), [0.0, -0.0, 0.46875, 1e300, -np.inf]])
    y = Tensor(x).erf().data
    np.testing.assert_allclose(y, [math.erf(v) for v in x], rtol=1e-15, atol=3e-16)
    assert np.isnan(Tensor([math.nan]).erf().item())


def test_gelu_has_digits_left_where_almost_nothing_is_left():
    """1 + erf cancels for negative x: at -6 it would have 6 digits, at -9 none."""
    x = np.linspace(-20, 8, 301)
    right = [v * 0.5 * math.erfc(-v / math.sqrt(2)) for v in x]
    np.testing.assert_allclose(F.gelu(x).data, right, rtol=1e-8)
    np.testing.assert_allclose(F.gelu(x[140:]).data, right[140:], rtol=1e-12)
    narrow = F.gelu(x.astype("float32"))
    assert narrow.dtype == np.float32
    off = abs(narrow.data - right)
    assert (off <= 5e-7 * np.maximum(1, np.abs(right))).all()
    assert (off <= 0.04 * np.abs(right))[x > -12].all()


def test_the_derivative_at_a_kink_is_that_of_the_left_side():
    for f, slope in (
        (F.leaky_relu, 0.01),
        (lambda x: F.leaky_relu(x, 0.3), 0.3),
        (lambda x: F.elu(x, 0.5), 0.5),
    ):
        x = leaf([0.0])
        f(x).backward()
        assert x.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize("f", [F.gelu, F.silu, F.softplus, F.elu, F.leaky_relu])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_activations_far_out_are_x_or_0_and_never_overflow(f, dtype):
    most = np.finfo(dtype).max / 4
    far = np.array([-most, -300, 300, most], dtype)
    x = Tensor(far, requires_grad=True)
    with np.errstate(over="raise", invalid="raise"):
        y = f(x)
        y.backward(np.ones(4))
    assert y.dtype == x.grad.dtype == dtype
    assert y.tolist()[2:] == far.tolist()[2:]
    assert x.grad.tolist()[2:] == [1, 1]
    assert (abs(y.data[:2]) <= abs(far[:2]) / 100).all()
    assert (x.grad.data[:2] <= 0.01).all()


def test_an_activation_of_many_elements_is_computed_part_by_part_without_seams():
    x = numbers(3, 30_001)
    for f in (F.gelu, F.silu):
        whole, last = leaf(x), leaf(x[2:])
        f(whole).sum().backward()
        f(last).sum().backward()
        assert (f(x).data[2:] == f(x[2:]).data).all()
        assert (whole.grad.data[2:] == last.grad.data).all()


def test_softplus_is_x_itself_above_its_threshold():
    y = F.softplus([9.0, 11.0], beta=2.0, threshold=20.0)
    assert y.tolist() == [pytest.approx(9 + math.exp(-18) / 2), 11]


# ---- Norms ----

ROWS = [
    ((3,), 1),
    ((2, 3), 1),
    ((2, 3, 4), 1),
    ((2, 3, 4), 2),
    ((0, 3), 1),
    ((1, 2), 2),
]


def standardized(x, axes, eps, centred):
    """By NumPy's own mean and variance."""
    if not centred:
        return x / np.sqrt((x**2).mean(axes, keepdims=True) + eps)
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


@pytest.mark.parametrize(("shape", "k"), ROWS)
def test_norms_over_the_last_axes(shape, k):
    x, inner, axes = numbers(*shape), shape[-k:], tuple(range(-k, 0))
    W, b = numbers(*inner, seed=1), numbers(*inner, seed=2)
    y = F.layer_norm(x, inner, W, b, 0.1).data
    np.testing.assert_allclose(y, standardized(x, axes, 0.1, True) * W + b)
    y = F.rms_norm(x, inner, W, 0.1).data
    np.testing.assert_allclose(y, standardized(x, axes, 0.1, False) * W)
    gradcheck(lambda x, W, b: F.layer_norm(x, inner, W, b, 0.1), x, W, b)
    gradcheck(lambda x, W: F.layer_norm(x, inner, W, None, 0.1), x, W)
    gradcheck(lambda x, b: F.layer_norm(x, inner, None, b, 0.1), x, b)
    gradcheck(lambda x, W: F.rms_norm(x, inner, W, 0.1), x, W)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
@settings(max_examples=15, deadline=None)
def test_norms_of_drawn_shapes(shape, data):
    inner = tuple(shape[-data.draw(st.integers(1, len(shape))) :])
    x, W = numbers(*shape), numbers(*inner, seed=1)
    gradcheck(lambda x, W, b: F.layer_norm(x, inner, W, b, 0.5), x, W, W[::-1])
    gradcheck(lambda x, W: F.rms_norm(x, inner, W, 0.5), x, W)


def test_float16_rows_are_normalized_in_float32():
    """The square of 300 is no float16, and neither is the sum of 1000 times 100."""
    x = np.full((2, 1000), 100.0)
    x[:, ::2] = 300
    for f in (F.layer_norm, F.rms_norm):
        narrow, wide = Tensor(x.astype("float16"), requires_grad=True), leaf(x)
        for t in (narrow, wide):
            f(t, 1000).backward(np.cos(np.arange(2000.0)).reshape(2, 1000))
        assert narrow.grad.dtype == np.float16
        y = f(narrow.detach(), 1000)
        np.testing.assert_allclose(y.data, f(x, 1000).data, rtol=2e-3)
        np.testing.assert_allclose(narrow.grad.data, wide.grad.data, atol=1e-4)


def test_a_large_mean_does_not_spoil_the_variance():
    x = numbers(2, 256)
    y = F.layer_norm((x + 3000).astype("float32"), 256)
    np.testing.assert_allclose(y.data, F.layer_norm(x, 256).data, atol=2e-3)


def test_norm_modules_hold_what_torchs_hold():
    layer = nn.LayerNorm((3, 2), bias=False)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert layer.weight.shape == (3, 2)
    assert list(nn.LayerNorm(3).state_dict()) == ["weight", "bias"]
    assert list(nn.LayerNorm(3, elementwise_affine=False).parameters()) == []
    assert list(nn.RMSNorm(3).state_dict()) == ["weight"]
    x = numbers(2, 3).astype("float32")
    eps = np.finfo("float32").eps
    np.testing.assert_array_equal(nn.RMSNorm(3)(x).data, F.rms_norm(x, 3, eps=eps).data)


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.layer_norm(np.ones((2, 3)), 2),
        lambda: F.layer_norm(np.ones((2, 3)), (2, 3, 1)),
        lambda: F.layer_norm(np.ones((2, 3)), 3, np.ones(1)),
        lambda: F.layer_norm(np.ones((2, 3)), 3, np.ones(3), np.ones((2, 3))),
        lambda: F.layer_norm(np.ones((2, 3)), ()),
        lambda: F.rms_norm(np.ones((2, 3), int), 3),
    ],
)
def test_norms_refuse_what_would_broadcast(call):
    with pytest.raises(UsageError, match="_norm: x must be"):
        call()


# ---- Attention ----


def attended(q, k, v, mask=None, scale=None):
    """One query and one key at a time; the mask is what is added, -inf to hide."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    y = np.zeros((*q.shape[:-1], v.shape[-1]))
    for *outer, t in np.ndindex(q.shape[:-1]):
        i = tuple(outer)
        scores = [scale * float(q[i][t] @ row) for row in k[i]]
        if mask is not None:
            full = np.broadcast_to(mask, (*q.shape[:-1], k.shape[-2]))
            scores = [s + m for s, m in zip(scores, full[(*i, t)], strict=True)]
        shares = [math.exp(s) for s in scores]
        for share, row in zip(shares, v[i], strict=True):
            y[(*i, t)] += share / max(sum(shares), 1e-300) * row
    return y


ATTENTION = [
    ((), 3, 3, 4, 4),
    ((2,), 1, 4, 2, 3),
    ((2, 2), 3, 2, 1, 2),
    ((0,), 2, 2, 2, 2),
]


@pytest.mark.parametrize(("outer", "t", "s", "d", "e"), ATTENTION)
def test_attention_is_a_weighted_mean_of_values(outer, t, s, d, e):
    q, k, v = numbers(*outer, t, d), numbers(*outer, s, d), numbers(*outer, s, e)
    causal = np.where(np.tri(t, s), 0, -np.inf)
    seen = np.random.default_rng(0).random((t, s)) < 0.5
    added = numbers(t, s, seed=3)
    for settings_, mask in (
        ({}, None),
        ({"scale": 0.3}, None),
        ({"is_causal": True}, causal),
        ({"attn_mask": seen}, np.where(seen, 0, -np.inf)),
        ({"attn_mask": added}, added),
    ):
        y = attention(q, k, v, **settings_).data
        right = attended(q, k, v, mask, settings_.get("scale"))
        np.testing.assert_allclose(y, right, atol=1e-14)
        gradcheck(lambda q, k, v, s=settings_: attention(q, k, v, **s), q, k, v)
    gradcheck(lambda m: attention(q, k, v, m), added)


def test_a_mask_may_differ_between_heads_or_be_shared_and_learns():
    q, k, v = numbers(2, 3, 4, 2), numbers(2, 3, 5, 2), numbers(2, 3, 5, 2)
    for shape in [(2, 1, 4, 5), (3, 1, 5), (4, 1), (1,), ()]:
        mask = numbers(*shape)
        np.testing.assert_allclose(
            attention(q, k, v, mask).data, attended(q, k, v, mask), atol=1e-14
        )
        gradcheck(lambda m: attention(q, k, v, m), mask)


def test_axes_before_the_last_two_are_broadcast():
    for a, b in [((2, 1), (1, 3)), ((1,), (2,)), ((), (2, 2)), ((2, 2), ())]:
        q, k, v = numbers(*a, 2, 3), numbers(*b, 4, 3), numbers(*b, 4, 2)
        outer = np.broadcast_shapes(a, b)
        full = [np.broadcast_to(x, (*outer, *x.shape[-2:])) for x in (q, k, v)]
        np.testing.assert_allclose(attention(q, k, v).data, attended(*full))
        gradcheck(attention, q, k, v)


def test_a_query_that_sees_nothing_gets_0_and_hands_back_no_nan():
    q, k, v = leaf(numbers(2, 3)), leaf(numbers(2, 3)), leaf(numbers(2, 3))
    y = attention(q, k, v, np.array([[False, False], [True, True]]))
    y.sum().backward()
    assert y.data[0].tolist() == [0, 0, 0]
    assert q.grad.data[0].tolist() == [0, 0, 0]
    assert all(np.isfinite(t.grad.data).all() for t in (q, k, v))


def test_no_query_learns_from_later_keys():
    q, k, v = (numbers(1, 5, 4, seed=i) for i in range(3))
    before = attention(q, k, v, is_causal=True).data
    k[:, 3:], v[:, 3:] = 1e6, -1e6
    after = attention(q, k, v, is_causal=True).data
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert (before[:, 3:] != after[:, 3:]).all()


def test_scores_that_exp_cannot_take_are_no_obstacle():
    q = np.float32([[1e3, 0]])
    y = attention(q, np.float32([[1e3, 0], [0, 1e3]]), np.float32([[1, 2], [3, 4]]))
    assert y.tolist() == [[1, 2]]


def test_attention_of_float16_is_computed_in_float32():
    x = numbers(2, 4, 300) * 100  # scores are over 65,504, the largest float16
    narrow = Tensor(x.astype("float16"), requires_grad=True)
    wide = leaf(narrow.data)
    for t in (narrow, wide):
        attention(t, t, t, is_causal=True).sum().backward()
    assert narrow.grad.dtype == np.float16
    np.testing.assert_allclose(narrow.grad.data, wide.grad.data, rtol=1e-2, atol=1e-2)


def test_transposed_views_change_nothing():
    """Heads are split by view and transpose: rows then lie apart in memory."""
    x = numbers(2, 5, 3, 4)  # batch, time, heads, width
    heads = [leaf(x).transpose(1, 2) for _ in range(3)]
    copies = [leaf(h.data.copy()) for h in heads]
    views = [leaf(x) for _ in range(3)]
    split = [t.transpose(1, 2) for t in views]
    weights = numbers(2, 3, 5, 4, seed=9)
    a, b = attention(*copies, is_causal=True), attention(*split, is_causal=True)
    np.testing.assert_allclose(a.data, b.data, rtol=1e-13)
    a.backward(weights)
    b.backward(weights)
    for copied, view in zip(copies, views, strict=True):
        np.testing.assert_allclose(
            copied.grad.data.swapaxes(1, 2), view.grad.data, rtol=1e-12, atol=1e-14
        )


def test_dropped_attention_keeps_its_expectation_and_one_mask_both_ways():
    q, k, v = numbers(2, 3), numbers(400, 3), np.ones((400, 2))
    manual_seed(0)
    y = attention(q * 0, k, v, dropout_p=0.25).data
    assert y == pytest.approx(np.ones((2, 2)), abs=0.1)
    assert (y != 1).all()

    def seeded(q, k, v):
        manual_seed(3)
        return attention(q, k, v, dropout_p=0.5)

    gradcheck(seeded, numbers(3, 2), numbers(4, 2, seed=1), numbers(4, 2, seed=2))


@pytest.mark.parametrize("mask", [None, (3, 5), (6, 3, 5), (2, 1, 3, 5)])
def test_grouped_queries_share_keys_and_values(mask):
    q, k, v = numbers(2, 6, 3, 2), numbers(2, 2, 5, 2), numbers(2, 2, 5, 3)
    mask = None if mask is None else numbers(*mask)
    y = attention(q, k, v, mask, enable_gqa=True)
    each = attended(q, k.repeat(3, axis=1), v.repeat(3, axis=1), mask)
    np.testing.assert_allclose(y.data, each, atol=1e-14)
    gradcheck(lambda *x: attention(*x, mask, enable_gqa=True), q, k, v)


@pytest.mark.parametrize(
    ("shapes", "settings_"),
    [
        ([(3,), (3, 3), (3, 3)], {}),
        ([(2, 3), (4, 2), (4, 2)], {}),
        ([(2, 3), (4, 3), (5, 2)], {}),
        ([(2, 3), (4, 3), (4, 2)], {"attn_mask": np.ones((4, 2), bool)}),
        ([(2, 3), (4, 3), (4, 2)], {"dropout_p": 1.0}),
        ([(3, 2, 3), (2, 4, 3), (2, 4, 3)], {"enable_gqa": True}),
        ([(2, 3), (4, 3), (4, 3)], {"enable_gqa": True}),
        ([(2, 3), (2, 3), (2, 3)], {"attn_mask": [[True]], "is_causal": True}),
    ],
)
def test_attention_refuses_what_does_not_fit(shapes, settings_):
    with pytest.raises(UsageError, match="scaled_dot_product_attention"):
        attention(*[np.ones(shape) for shape in shapes], **settings_)
    x = np.ones((2, 2))
    with pytest.raises(UsageError, match="one dtype"):
        attention(x.astype("float32"), x, x)
    with pytest.raises(UsageError, match="one dtype"):
        attention(x.astype(int), x.astype(int), x.astype(int))


# ---- Rotary embedding ----


def test_products_of_rotated_rows_depend_on_their_distance_alone():
    q, k = np.tile(numbers(6), (20, 1)), np.tile(numbers(6, seed=1), (20, 1))
    products = F.rotary(q).data @ F.rotary(k).data.T
    for distance in range(-19, 20):
        along = np.diagonal(products, distance)
        np.testing.assert_allclose(along, along[0], atol=1e-12)
    assert len(set(products[0].round(6))) == 20


def test_rotary_turns_pairs_half_the_width_apart():
    y = F.rotary(np.array([[1.0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]]), base=100.0)
    right = [[1, 0, 0, 0], [math.cos(1), 0, math.sin(1), 0]]
    right.append([0, math.cos(0.2), 0, math.sin(0.2)])
    np.testing.assert_allclose(y.data, right)


def test_rotary_takes_positions_and_has_a_gradient():
    x = numbers(2, 3, 4)
    late = F.rotary(x[:, 1:], positions=[1, 2])
    np.testing.assert_allclose(late.data, F.rotary(x).data[:, 1:])
    own = F.rotary(x, positions=np.array([[0, 1, 2], [5, 6, 7]]))
    np.testing.assert_allclose(own.data[1], F.rotary(x[1], positions=[5, 6, 7]).data)
    gradcheck(F.rotary, x)
    gradcheck(F.rotary, numbers(0, 4))
    assert F.rotary(x.astype("float32")).dtype == np.float32
    for bad in (np.ones((2, 3)), np.ones(4), np.ones((2, 4), int)):
        with pytest.raises(UsageError, match="rotary"):
            F.rotary(bad)
    with pytest.raises(UsageError, match="positions"):
        F.rotary(x, positions=[1, 2])


# ---- Cross entropy and its relatives ----

LABELS = np.array([2, 0, -100, 3])


def surprise(x, labels, weights, smoothing):
    """Losses and their weighted mean, one row after the other, from the definition."""
    losses, total = [], 0.0
    for row, label in zip(x, labels, strict=True):
        if label == -100:
            losses.append(0.0)
            continue
        logs = row - math.log(sum(math.exp(z) for z in row))
        shares = [smoothing / len(row)] * len(row)
        shares[label] += 1 - smoothing
        parts = zip(shares, weights, logs, strict=True)
        losses.append(-sum(share * w * z for share, w, z in parts))
        total += weights[label]
    return np.array(losses), sum(losses) / total


@pytest.mark.parametrize("smoothing", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_with_weights_and_smoothing(smoothing, weighted):
    x, w = numbers(4, 5), np.array([1.0, 0.5, 2.0, 3.0, 0.1])
    weight = w if weighted else None
    losses, mean = surprise(x, LABELS, w if weighted else np.ones(5), smoothing)
    images = np.stack([x, x[::-1]]).transpose(0, 2, 1)  # (2, 5, 4): classes on axis 1
    labels = np.stack([LABELS, LABELS[::-1]])
    for reduction, right in (("none", losses), ("sum", losses.sum()), ("mean", mean)):

        def f(x, labels=LABELS, reduction=reduction):
            return F.cross_entropy(
                x, labels, weight, reduction=reduction, label_smoothing=smoothing
            )

        np.testing.assert_allclose(f(x).data, right)
        gradcheck(f, x)
        y = f(images, labels)
        if reduction == "none":
            np.testing.assert_allclose(y.data, [losses, losses[::-1]])
        else:
            assert y.item() == pytest.approx(right * (2 if reduction == "sum" else 1))
        gradcheck(lambda x, f=f: f(x, labels), images)


def test_smoothed_labels_equal_the_probabilities_they_stand_for():
    x, labels = numbers(4, 5), np.array([2, 0, 1, 3])
    for settings_ in ({}, {"weight": np.arange(1.0, 6)}, {"label_smoothing": 0.3}):
        mixed = F.one_hot(labels, 5).data * 1.0
        a = F.cross_entropy(x, labels, reduction="sum", **settings_)
        b = F.cross_entropy(x, mixed, reduction="sum", **settings_)
        assert a.item() == pytest.approx(b.item())
        gradcheck(lambda x, s=settings_, m=mixed: F.cross_entropy(x, m, **s), x)


def test_nll_loss_of_log_softmax_is_cross_entropy():
    for shape, labels in (((4, 5), LABELS), ((5,), np.array(3)), ((4, 5, 1), LABELS)):
        x = numbers(*shape)
        labels = labels.reshape(*shape[:1], *shape[2:]) if len(shape) > 1 else labels
        for weight in (None, np.arange(1.0, 6)):
            for reduction in ("mean", "sum", "none"):
                a = F.cross_entropy(x, labels, weight, reduction=reduction)
                logs = F.log_softmax(x, 1 if x.ndim > 1 else 0)
                b = F.nll_loss(logs, labels, weight, reduction=reduction)
                np.testing.assert_allclose(a.data, b.data)
            gradcheck(lambda x, n=labels, w=weight: F.nll_loss(x, n, w), x)


def test_a_class_weight_that_would_lose_its_gradient_is_refused():
    x, labels = numbers(2, 3), [0, 1]
    for weight in (leaf(np.ones(3)), np.ones(2), np.ones((1, 3))):
        for f in (F.cross_entropy, F.nll_loss):
            with pytest.raises(UsageError, match="weight is one factor"):
                f(x, labels, weight)
    with pytest.raises(UsageError, match="label_smoothing"):
        F.cross_entropy(x, labels, label_smoothing=1.5)
    with pytest.raises(UsageError, match="do not fit"):
        F.cross_entropy(numbers(2, 3, 4), np.zeros((2, 3), int))
    with pytest.raises(UsageError, match="do not fit"):
        F.nll_loss(x, [0, 1, 2])
    with pytest.raises(UsageError, match="label 3"):
        F.nll_loss(x, [0, 3])


def test_an_ignored_row_may_even_be_infinite():
    x = leaf([[-np.inf, 0.0], [1.0, 2.0]])
    F.cross_entropy(x, [-100, 0]).backward()
    assert x.grad.data[0].tolist() == [0, 0]
    assert np.isfinite(F.cross_entropy(x, [-100, 0]).item())


def test_kl_div_is_how_far_two_distributions_are_apart():
    p, q = chances(3, 4), chances(3, 4, seed=1)
    apart = sum(t * math.log(t / s) for t, s in zip(p.ravel(), q.ravel(), strict=True))
    logs = np.log(q)
    for target, log_target in ((p, False), (np.log(p), True)):

        def f(x, t, reduction="batchmean", log_target=log_target):
            return F.kl_div(x, t, reduction, log_target)

        assert f(logs, target).item() == pytest.approx(apart / 3)
        assert f(logs, target, "mean").item() == pytest.approx(apart / 12)
        assert f(logs, target, "sum").item() == pytest.approx(apart)
        gradcheck(f, logs, target)
    assert F.kl_div(np.log(p), p).item() == pytest.approx(0)
    assert F.kl_div([[-1.0, -2.0]], [[0.0, 1.0]], "sum").item() == pytest.approx(2)


def test_absolute_losses():
    a, b = np.array([0.0, 0.5, -3.0]), np.array([0.1, -0.1, 1.0])
    assert F.l1_loss(a, b).item() == pytest.approx((0.1 + 0.6 + 4) / 3)
    y = F.smooth_l1_loss(a, b, "none", beta=0.5).tolist()
    assert y == pytest.approx([0.01, 0.6 - 0.25, 4 - 0.25])
    assert F.smooth_l1_loss(a, b, beta=0).item() == pytest.approx(
        F.l1_loss(a, b).item()
    )
    for beta in (1.0, 0.3, 0.0):
        gradcheck(lambda a, b, beta=beta: F.smooth_l1_loss(a, b, "none", beta), a, b)
    gradcheck(F.l1_loss, a, b)


def test_modules_pass_their_settings_on():
    x, logs = numbers(4, 5), np.log(chances(4, 5))
    w = np.arange(1.0, 6)
    for module, y in (
        (
            nn.CrossEntropyLoss(w, -100, "sum", 0.1),
            surprise(x, LABELS, w, 0.1)[0].sum(),
        ),
        (nn.NLLLoss(w, reduction="sum"), F.nll_loss(x, LABELS, w, reduction="sum")),
    ):
        assert module(x, LABELS).item() == pytest.approx(float(y))
        assert list(module.state_dict()) == ["weight"]
    kl = nn.KLDivLoss("batchmean", log_target=True)(logs, logs * 2)
    assert kl.item() == F.kl_div(logs, logs * 2, "batchmean", True).item()
    assert nn.SmoothL1Loss("sum", 2.0)(x, logs).item() == (
        F.smooth_l1_loss(x, logs, "sum", 2.0).item()
    )
    assert nn.L1Loss("sum")(x, logs).item() == F.l1_loss(x, logs, "sum").item()
    for module, f in (
        (nn.SiLU(), F.silu),
        (nn.ELU(0.3), lambda x: F.elu(x, 0.3)),
        (nn.LeakyReLU(0.3), lambda x: F.leaky_relu(x, 0.3)),
        (nn.Softplus(2.0, 3.0), lambda x: F.softplus(x, 2.0, 3.0)),
        (nn.GELU(), lambda x: F.gelu(x, "none")),
        (nn.GELU("tanh"), lambda x: F.gelu(x, "tanh")),
        (nn.Softmax(0), lambda x: F.softmax(x, 0)),
        (nn.LogSoftmax(0), lambda x: F.log_softmax(x, 0)),
    ):
        np.testing.assert_array_equal(module(x).data, f(x).data)


# ---- Products ----

EINSUMS = {
    "ij,jk->ik": [(2, 3), (3, 4)],
    "bhqd,bhkd->bhqk": [(2, 2, 3, 2), (2, 2, 4, 2)],
    "ij,jk": [(2, 3), (3, 4)],
    "ba": [(2, 3)],
    "ij->": [(2, 3)],
    "i,j->ji": [(2,), (3,)],
    "ij,kl->i": [(2, 3), (4, 2)],
    "ii->i": [(3, 3)],
    "iij,j->": [(2, 2, 3), (3,)],
    "...ij,...jk->...ik": [(2, 1, 2, 3), (2, 3, 4)],
    "...i,i": [(2, 3), (3,)],
    "ij,j,jk->ik": [(2, 3), (3,), (3, 2)],
    "ij,jk -> ki": [(2, 1), (3, 4)],
    ",i->i": [(), (3,)],
    "bij,bjk->bik": [(2, 0, 3), (2, 3, 2)],
}


@pytest.mark.parametrize("equation", EINSUMS)
def test_einsum_and_its_gradients(equation):
    arrays = [numbers(*s, seed=i) for i, s in enumerate(EINSUMS[equation])]
    y = F.einsum(equation, *arrays)
    np.testing.assert_allclose(y.data, np.einsum(equation, *arrays), atol=1e-14)
    gradcheck(lambda *xs: F.einsum(equation, list(xs)), *arrays)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk->ik", [(2, 3)]),
        ("ij->ik", [(2, 3)]),
        ("ij->ii", [(2, 3)]),
        ("ijk->i", [(2, 3)]),
        ("...ijk->i", [(2, 3)]),
        ("i1->i", [(2, 3)]),
        ("ij,jk->ik", [(2, 3), (4, 2)]),
    ],
)
def test_einsum_refuses_what_it_cannot_do(equation, shapes):
    with pytest.raises(UsageError, match=r"einsum|Einsum"):
        F.einsum(equation, *[np.ones(shape) for shape in shapes])


def test_linear_joins_the_axes_before_the_last():
    x, W, b = numbers(2, 3, 4), numbers(5, 4, seed=1), numbers(5, seed=2)
    gradcheck(lambda x, W, b: F.linear(x.transpose(0, 1), W, b), x, W, b)
    gradcheck(F.linear, numbers(2, 0, 4), W, b)
    assert F.linear(numbers(2, 0, 4), W).shape == (2, 0, 5)
    with pytest.raises(UsageError, match="last axis of x must be 4"):
        F.linear(numbers(4, 3), W)


def test_a_bias_adds_up_float16_in_float32():
    """2048 + 1 is 2048 in float16."""
    b = Tensor(np.zeros(2, "float16"), requires_grad=True)
    y = F.linear(np.ones((4096, 1), "float16"), np.ones((2, 1), "float16"), b)
    y.backward(np.ones((4096, 2)))
    assert b.grad.tolist() == [4096, 4096]


# ---- Tables ----


def test_a_table_collects_the_gradients_of_all_its_uses():
    ids = np.random.default_rng(0).integers(0, 7, (50, 3))
    gy = numbers(50, 3, 2)
    right = np.zeros((9, 2))
    for i in np.ndindex(ids.shape):
        right[ids[i]] += gy[i]
    for look_up in (lambda w: F.embedding(ids, w), lambda w: w[ids - 9]):
        w = leaf(np.zeros((9, 2)))
        look_up(w).backward(gy)
        np.testing.assert_allclose(w.grad.data, right, atol=1e-13)


def test_a_tables_first_gradient_is_written_where_it_is_at_home():
    w = leaf(numbers(4, 2))
    w.grad_home = np.full((4, 2), np.nan)
    for count in (1, 2):
        F.embedding([1, 3, 1], w).sum().backward()
        assert w.grad.data is w.grad_home
        right = np.array([0, 2, 0, 1])[:, None] * [count, count]
        assert w.grad.tolist() == right.tolist()
    strided = leaf(numbers(4, 2))
    strided.grad_home = np.full((4, 4), np.nan)[:, :2]
    F.embedding([1, 3, 1], strided).sum().backward()
    assert strided.grad.tolist() == [[0, 0], [2, 2], [0, 0], [1, 1]]


def test_the_padding_row_gets_no_gradient():
    for padding in (1, -3):
        w = leaf(numbers(4, 2))
        F.embedding([1, 3, 1], w, padding).sum().backward()
        assert w.grad.tolist() == [[0, 0], [0, 0], [0, 0], [1, 1]]
    layer = nn.Embedding(4, 2, padding_idx=-1)
    assert layer.padding_idx == 3
    assert layer.weight.tolist()[3] == [0, 0]
    assert (layer.weight.data[:3] != 0).all()
    layer([3, 0]).sum().backward()
    assert layer.weight.grad.tolist()[3] == [0, 0]
    for call in (lambda: nn.Embedding(4, 2, 4), lambda: F.embedding([0], w, -5)):
        with pytest.raises(UsageError, match="mbedding"):
            call()


# ---- Statistics and running sums ----


@pytest.mark.parametrize("dim", [None, 0, -1, (0, 2), (2, 1)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_variance_over_any_axes(dim, keepdim):
    x = numbers(3, 4, 2)
    for settings_, ddof in (
        ({}, 1),
        ({"unbiased": False}, 0),
        ({"correction": 1.5}, 1.5),
    ):
        for name in ("var", "std"):
            y = getattr(Tensor(x), name)(dim, keepdim=keepdim, **settings_)
            right = getattr(x, name)(axis=dim, keepdims=keepdim, ddof=ddof)
            np.testing.assert_allclose(y.data, right)
            gradcheck(
                lambda x, n=name, s=settings_: getattr(x, n)(dim, keepdim=keepdim, **s),
                x,
            )


def test_the_deviation_of_equal_numbers_has_the_gradient_0():
    x = leaf(np.ones((2, 3)))
    x.std(1).sum().backward()
    assert x.grad.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_a_product_with_zeros_still_has_a_gradient():
    for x in ([2.0, 3.0, 5.0], [2.0, 0.0, 5.0], [0.0, 3.0, 0.0], [4.0], []):
        gradcheck(lambda x: x.prod(), np.array(x))
    x = numbers(3, 2, 2) * (np.arange(12).reshape(3, 2, 2) % 5 > 0)
    for dim in (0, 1, -1):
        gradcheck(lambda x, dim=dim: x.prod(dim), x)
        gradcheck(lambda x, dim=dim: x.prod(dim, keepdim=True), x)
        gradcheck(lambda x, dim=dim: x.cumsum(dim), x)
    np.testing.assert_array_equal(Tensor(x).cumsum(1).data, x.cumsum(1))
    assert Tensor(numbers()).prod().shape == ()


def test_any_and_all():
    x = Tensor([[0.0, 2.0], [1.0, 3.0]])
    assert x.any().item() is True
    assert x.all().item() is False
    assert x.all(1).tolist() == [False, True]
    assert x.any(0, keepdim=True).shape == (1, 2)


def test_a_power_of_a_negative_number_is_nan_only_where_it_must_be():
    x, p = leaf([-2.0, -2.0, 0.0, 0.0]), leaf([3.0, 0.0, 0.0, -1.0])
    with np.errstate(all="ignore"):
        (x**p).sum().backward()
    assert x.grad.tolist() == [12, 0, 0, -np.inf]
    assert np.isnan(p.grad.data[:2]).all()
    assert p.grad.tolist()[2:] == [0, -np.inf]
    x = leaf([-2.0, 3.0])
    (x ** np.array([2.0, -1.0])).sum().backward()
    assert x.grad.tolist() == pytest.approx([-4, -1 / 9])


# ---- Limits, masks, shapes ----


def test_the_gradient_passes_at_the_bounds_of_clamp():
    x = leaf([-2.0, -1.0, 0.0, 1.0, 2.0])
    x.clamp(-1, 1).backward(np.full(5, np.inf))
    assert x.grad.tolist() == [0, np.inf, np.inf, np.inf, 0]
    assert Tensor([1.0, 5.0]).clamp(max=2).tolist() == [1, 2]
    assert Tensor([1.0, 5.0]).clip(min=2).tolist() == [2, 5]


def test_masked_fill_stops_the_gradient_where_it_fills():
    x = leaf([[1.0, 2.0], [3.0, 4.0]])
    y = x.masked_fill([True, False], -math.inf)
    y.exp().sum().backward()
    assert y.tolist() == [[-math.inf, 2], [-math.inf, 4]]
    assert x.grad.data[:, 0].tolist() == [0, 0]
    assert Tensor(np.float32([1])).masked_fill([True], 0.5).dtype == np.float32


SHAPES = {
    "squeeze": (lambda x: x.squeeze(), lambda x: x.squeeze()),
    "squeeze of one": (lambda x: x.squeeze(-1), lambda x: x.squeeze(-1)),
    "squeeze of a long axis": (lambda x: x.squeeze(0), lambda x: x),
    "squeeze of two": (lambda x: x.squeeze((1, 3)), lambda x: x.squeeze()),
    "unsqueeze": (lambda x: x.unsqueeze(1), lambda x: x[:, None]),
    "unsqueeze at the end": (lambda x: x.unsqueeze(-1), lambda x: x[..., None]),
    "expand": (
        lambda x: x.expand(2, -1, 3, 4, -1),
        lambda x: np.broadcast_to(x, (2, 2, 3, 4, 1)),
    ),
    "repeat": (
        lambda x: x.repeat(3, 1, 2, 1, 2),
        lambda x: np.tile(x, (3, 1, 2, 1, 2)),
    ),
    "repeat 0 times": (lambda x: x.repeat(1, 0, 1, 1), lambda x: x[:, :0]),
    "flip": (lambda x: x.flip(0, -2), lambda x: x[::-1, :, ::-1]),
    "chunk": (lambda x: F.cat(x.chunk(3, 2)[::-1], 2), lambda x: x[:, :, [2, 3, 0, 1]]),
    "unbind": (lambda x: x.unbind(2)[3], lambda x: x[:, :, 3]),
    "tril": (lambda x: x[:, 0].tril(), lambda x: np.tril(x[:, 0])),
    "triu": (lambda x: x.squeeze().triu(2), lambda x: np.triu(x.squeeze(), 2)),
    "triu below": (lambda x: x.squeeze().triu(-1), lambda x: np.triu(x.squeeze(), -1)),
    "tril above": (lambda x: x.squeeze().tril(1), lambda x: np.tril(x.squeeze(), 1)),
    "pad": (
        lambda x: F.pad(x, (1, 0, 2, 1), value=7.0),
        lambda x: np.pad(x, [(0, 0), (0, 0), (2, 1), (1, 0)], constant_values=7),
    ),
    "pad that cuts": (lambda x: F.pad(x, (0, 0, -1, -2)), lambda x: x[:, :, 1:2]),
    "gather": (
        lambda x: x.gather(2, np.array([[[[3], [0], [0], [0], [1]]]])),
        lambda x: x[:1][:, :, [3, 0, 0, 0, 1]],
    ),
    "sort": (lambda x: x.sort(2).values, lambda x: np.sort(x, 2)),
    "sort, descending": (
        lambda x: x.sort(0, descending=True)[0],
        lambda x: np.sort(x, 0)[::-1],
    ),
    "topk": (lambda x: x.topk(2, 2).values, lambda x: np.sort(x, 2)[:, :, :1:-1]),
    "topk, smallest": (
        lambda x: x.topk(3, 2, largest=False).values,
        lambda x: np.sort(x, 2)[:, :, :3],
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_elements_rearranged(name):
    f, right = SHAPES[name]
    x = numbers(2, 1, 4, 1)
    np.testing.assert_array_equal(f(Tensor(x)).data, right(x))
    gradcheck(f, x)


def test_pad_refuses_what_leaves_less_than_nothing():
    for pad, mode in (((1,), "constant"), ((0, -4), "constant"), ((1, 1), "reflect")):
        with pytest.raises(UsageError, match="pad: cannot"):
            F.pad(np.ones(3), pad, mode)
    with pytest.raises(UsageError, match="pad: cannot"):
        F.pad(np.ones(3), (0, 0, 1, 1))


def test_equals_keep_their_order_whichever_way_they_are_sorted():
    x = Tensor([1.0, 3.0, 1.0, 3.0, math.nan])
    assert x.argsort().tolist() == [0, 2, 1, 3, 4]
    assert x.argsort(descending=True).tolist() == [4, 1, 3, 0, 2]
    assert x.topk(3).indices.tolist() == [4, 1, 3]
    assert x.argmin().dtype == np.int64
    assert Tensor([[1.0, 0.0]]).argmin(1, keepdim=True).tolist() == [[1]]


# ---- Draws ----


def test_multinomial_draws_in_proportion_from_the_seeded_generator():
    weights = Tensor([[0.0, 1.0, 3.0], [2.0, 2.0, 0.0]])
    manual_seed(0)
    drawn = weights.multinomial(4000, replacement=True)
    shares = [np.bincount(row, minlength=3) / 4000 for row in drawn.data]
    np.testing.assert_allclose(shares, [[0, 0.25, 0.75], [0.5, 0.5, 0]], atol=0.03)
    firsts = [weights.multinomial(2).tolist() for _ in range(300)]
    assert all({*row} == {1, 2} for row, _ in firsts)
    assert 0.65 < np.mean([row[0] == 2 for row, _ in firsts]) < 0.85
    manual_seed(5)
    some = weights[0].multinomial(50, replacement=True)
    manual_seed(5)
    assert weights[0].multinomial(50, replacement=True).tolist() == some.tolist()
    assert (some.shape, some.dtype) == ((50,), np.int64)
    with pytest.raises(UsageError, match="at least 3 above 0"):
        weights.multinomial(3)


def test_dtypes_by_name():
    x = Tensor([0.0, 1.5])
    assert [x.half().dtype, x.double().dtype] == [np.float16, np.float64]
    assert (x.int().dtype, x.int().tolist()) == (np.int32, [0, 1])
    assert x.bool().tolist() == [False, True]
    assert x.type_as(x.half()).dtype == np.float16
