"""Every op: its gradient agrees with finite differences, and shapes come back."""

from collections import deque

import numpy as np
import pytest
from gradcheck import gradcheck
from hypothesis import given, settings
from hypothesis import strategies as st

from minddp import functional as F
from minddp import neural_ops as neural
from minddp import tensor_ops as ops
from minddp.autograd import Tensor, apply
from minddp.device import manual_seed
from minddp.errors import UsageError


def numbers(*shape, low=-2.0, high=2.0, seed=0):
    """Distinct, reproducible float64 numbers that avoid 0."""
    x = np.random.default_rng(seed).uniform(low, high, shape)
    return x + np.sign(x) * 0.1


def positive(*shape, seed=0):
    return numbers(*shape, low=0.2, high=2.0, seed=seed)


# ---- Two inputs ----

BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "pow": lambda a, b: a**b,
    "maximum": F.maximum,
    "minimum": F.minimum,
    "where": lambda a, b: F.where((a.data + b.data) > 1.5, a, b),
}
SHAPES = [
    ((3,), (3,)),
    ((1,), (5, 4)),
    ((4, 1), (1, 4)),
    ((), (3,)),
    ((), ()),
    ((2, 1, 4, 1), (2, 1, 4, 3)),
    ((3,), (2, 3)),
    ((0,), (2, 0)),
    ((1, 3), (0, 3)),
]


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize(("shape_a", "shape_b"), SHAPES)
def test_a_broadcast_input_gets_a_gradient_of_its_own_shape(name, shape_a, shape_b):
    f, a, b = BINARY[name], positive(*shape_a), positive(*shape_b, seed=1)
    gradcheck(f, a, b)
    gradcheck(lambda b, a: f(a, b), b, a)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_unbroadcast_undoes_every_broadcast(data):
    """The sum over what was stretched: k copies of an element give k times its 1."""
    full = data.draw(st.lists(st.integers(0, 3), max_size=4).map(tuple))
    keep = data.draw(st.integers(0, len(full)))
    mask = data.draw(st.lists(st.booleans(), min_size=keep, max_size=keep))
    tail = full[len(full) - keep :]
    shape = tuple(
        1 if squeeze else size for size, squeeze in zip(tail, mask, strict=True)
    )

    g = ops.unbroadcast(np.ones(full), shape)

    copies = np.prod(full) / np.prod(shape) if np.prod(shape) else 0
    assert g.shape == shape
    assert (g == copies).all()


def test_inputs_that_tie_share_the_gradient():
    for f in (F.maximum, F.minimum):
        a = Tensor([1.0, 2.0], requires_grad=True)
        b = Tensor([1.0, 2.0], requires_grad=True)
        f(a, b).backward([6.0, 8.0])
        assert a.grad.tolist() == [3, 4]
        assert b.grad.tolist() == [3, 4]


def test_where_gives_each_branch_only_its_own_places():
    x = Tensor([-1.0, 2.0], requires_grad=True)
    F.where(x.data > 0, x * 3, x * 5).sum().backward()
    assert x.grad.tolist() == [5, 3]


def test_where_lets_no_nan_through_from_the_branch_not_taken():
    x = Tensor([0.0, 4.0], requires_grad=True)
    safe = F.where(x > 0, x, 1.0)
    F.where(x > 0, safe.log(), 0.0).sum().backward()
    assert x.grad.tolist() == [0, 0.25]


def test_pow_at_zero_is_finite_where_its_limit_is():
    x = Tensor([0.0, 0.0, 0.0], requires_grad=True)
    p = Tensor([0.0, 1.0, 2.0], requires_grad=True)
    (x**p).sum().backward()
    assert x.grad.tolist() == [0, 1, 0]
    assert p.grad.tolist() == [0, 0, 0]
    x = Tensor([0.0], requires_grad=True)
    (x**0).sum().backward()
    assert x.grad.tolist() == [0]


# ---- One input ----

UNARY = {
    "neg": lambda x: -x,
    "exp": lambda x: x.exp(),
    "abs": lambda x: abs(x),
    "tanh": F.tanh,
    "sigmoid": F.sigmoid,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "softplus": F.softplus,
    "softplus, beta": lambda x: F.softplus(x, 2, 3),
    "leaky_relu": F.leaky_relu,
    "elu": lambda x: F.elu(x, 0.5),
    "erf": lambda x: x.erf(),
    "expm1": lambda x: x.expm1(),
    "sin": lambda x: x.sin(),
    "cos": lambda x: x.cos(),
    "sign": lambda x: x.sign(),
    "clamp": lambda x: x.clamp(-1, 0.5),
    "cube": lambda x: x**3,
    "inverse": lambda x: x**-1,
    "x**0": lambda x: x**0,
    "number + x": lambda x: 2 + x * 3,
    "number - x": lambda x: (2 - x) - 1,
    "number / x": lambda x: (2 / x) / 3,
    "number ** x": lambda x: 2**x,
    "softmax": F.softmax,
    "log_softmax": F.log_softmax,
    "clone": lambda x: x.clone(),
    "to": lambda x: x.to("float64").to("cpu"),
}


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("shape", [(3,), (2, 3), (0, 3), (1, 1)])
def test_elementwise_gradients(name, shape):
    gradcheck(UNARY[name], numbers(*shape))


@pytest.mark.parametrize("name", [name for name in UNARY if "softmax" not in name])
def test_elementwise_gradients_of_a_single_number(name):
    gradcheck(UNARY[name], numbers())


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.log(),
        lambda x: x.sqrt(),
        lambda x: x**1.5,
        lambda x: x.log1p(),
        lambda x: x.rsqrt(),
        lambda x: x.reciprocal(),
    ],
)
def test_elementwise_gradients_of_functions_of_positive_numbers(f):
    gradcheck(f, positive(2, 3))
    gradcheck(f, positive())


def test_derivatives_at_kinks_are_the_documented_ones():
    x = Tensor([0.0], requires_grad=True)
    (F.relu(x) * 2 + abs(x) * 4).sum().backward()
    assert x.grad.tolist() == [0]


def test_gelu_has_an_exact_form_and_one_by_tanh_that_is_close_to_it():
    # x P(X <= x) for a normal X, from tables: 0.8413 and 0.9772
    x = [1.0, 2.0]
    np.testing.assert_allclose(F.gelu(x).data, [0.84134, 1.95450], atol=1e-5)
    by_tanh = F.gelu(x, approximate="tanh").data
    assert (abs(by_tanh - F.gelu(x).data) < 5e-4).all()
    assert (by_tanh != F.gelu(x).data).all()
    with pytest.raises(UsageError, match="'none' or 'tanh'"):
        F.gelu(x, approximate="erf")


def test_sigmoid_never_overflows():
    with np.errstate(all="raise", under="ignore"):
        y = F.sigmoid([-1e3, 0.0, 1e3])
    assert y.tolist() == [0, 0.5, 1]


def test_sigmoid_is_accurate_in_its_tails_forward_and_backward():
    """exp(-20) = 2.06e-9 is below the last bit of 1, so 1 - y would lose it."""
    x = Tensor([-20.0, 20.0], requires_grad=True)
    y = F.sigmoid(x)
    y.sum().backward()
    tail = np.exp(-20) / (1 + np.exp(-20))
    assert y.tolist() == pytest.approx([tail, 1], rel=1e-6)
    assert x.grad.tolist() == pytest.approx([tail, tail], rel=1e-6)


@pytest.mark.parametrize("size", [1e20, 1e-23])
def test_a_quotient_in_range_has_a_gradient_in_range(size):
    """The square of 1e20 is infinite in float32, that of 1e-23 is 0."""
    a, b = Tensor([size], requires_grad=True), Tensor([size], requires_grad=True)
    (a / b).backward()
    assert a.grad.item() == pytest.approx(1 / size)
    assert b.grad.item() == pytest.approx(-1 / size)


def test_gelu_of_a_large_number_has_the_gradient_1():
    for approximate in ("none", "tanh"):
        x = Tensor(np.array([2000.0, -2000.0], "float16"), requires_grad=True)
        y = F.gelu(x, approximate)
        y.sum().backward()
        assert y.tolist() == [2000, 0]
        assert x.grad.tolist() == [1, 0]


# ---- Reductions ----


@pytest.mark.parametrize("f", ["sum", "mean", "amax", "amin"])
@pytest.mark.parametrize("dim", [None, 0, -1, (0, 2), (1,), (2, 0, 1)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_reductions_over_any_axes(f, dim, keepdim):
    x = numbers(2, 3, 4)
    gradcheck(lambda x: getattr(x, f)(dim, keepdim), x)
    expected = getattr(np, f)(x, axis=dim, keepdims=keepdim)
    np.testing.assert_array_equal(getattr(Tensor(x), f)(dim, keepdim).data, expected)


@pytest.mark.parametrize("f", ["sum", "mean", "amax", "amin"])
def test_reductions_of_a_single_number(f):
    gradcheck(lambda x: getattr(x, f)(), numbers())


def test_elements_that_tie_share_the_gradient_of_an_extreme():
    x = Tensor([[1.0, 5.0, 5.0], [7.0, 2.0, 3.0]], requires_grad=True)
    x.amax(dim=1).backward([6.0, 4.0])
    assert x.grad.tolist() == [[0, 3, 3], [4, 0, 0]]
    x = Tensor([[1.0, 5.0, 1.0], [7.0, 2.0, 3.0]], requires_grad=True)
    x.amin(dim=1).backward([6.0, 4.0])
    assert x.grad.tolist() == [[3, 0, 3], [0, 4, 0]]


@pytest.mark.parametrize("f", ["mean", "amax", "amin"])
def test_a_count_that_float16_cannot_hold_still_divides_the_gradient(f):
    x = Tensor(np.ones(70_000, "float16"), requires_grad=True)
    y = getattr(x, f)()
    y.backward()
    assert y.item() == 1
    assert y.dtype == x.grad.dtype == np.float16
    np.testing.assert_allclose(x.grad.data, np.full(70_000, 1 / 70_000), rtol=3e-3)


def test_a_sum_over_nothing_gives_gradients_without_elements():
    x = Tensor(np.ones((0, 3)), requires_grad=True)
    x.sum().backward()
    assert x.grad.shape == (0, 3)


# ---- Shape ----


def test_shape_ops():
    x = numbers(2, 3, 4)
    gradcheck(lambda x: x.reshape(4, 6), x)
    gradcheck(lambda x: x.view((3, -1)), x)
    gradcheck(lambda x: x.flatten(1), x)
    gradcheck(lambda x: x.permute(2, 0, 1), x)
    gradcheck(lambda x: x.permute(-1, 0, -2), x)
    gradcheck(lambda x: x.transpose(0, -1), x)
    gradcheck(lambda x: x.T, x)
    gradcheck(lambda x: F.broadcast_to(x, (5, 2, 3, 4)), x)
    gradcheck(lambda x: x.reshape(0, 2), numbers(2, 0))
    gradcheck(lambda x: x.reshape(1, 1), numbers())
    assert Tensor(x).flatten(1).shape == (2, 12)
    assert Tensor(x).flatten(0, 1).shape == (6, 4)


def test_an_explicit_broadcast_sums_its_gradient():
    x = Tensor(np.ones(3), requires_grad=True)
    F.broadcast_to(x, (4, 3)).sum().backward()
    assert x.grad.tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    "index",
    [
        1,
        -1,
        slice(None, None, 2),
        (slice(None), 1),
        (Ellipsis, None, 2),
        np.array([0, 2, 0, 0]),
        [1, 1],
        ((0, 0, 1),),
        (slice(None), (3, 3)),
        (range(2), [1, 1]),
        np.int64(1),
        True,
        (np.array([0, 2, 2]), np.array([1, 3, 3])),
        (slice(1), np.array([[0, 0], [1, 3]])),
        np.arange(12).reshape(3, 4) % 3 == 0,
        np.array([True, False, True]),
        Tensor(np.array([2, 2])),
        np.array([], dtype=int),
    ],
    ids=str,
)
def test_indexing(index):
    gradcheck(lambda x: x[index], numbers(3, 4))


def test_a_row_that_is_taken_twice_gets_both_gradients():
    x = Tensor(np.zeros((3, 1)), requires_grad=True)
    x[np.array([2, 0, 2])].backward([[1.0], [10.0], [100.0]])
    assert x.grad.tolist() == [[10], [0], [101]]


@pytest.mark.parametrize(
    "index", [[0, 0, 1], ((0, 0, 1),), (deque([0, 0, 1]),), np.array([0, 0, 1])]
)
def test_an_element_taken_twice_by_any_sequence_gets_both_gradients(index):
    x = Tensor([0.0, 0.0], requires_grad=True)
    x[index].sum().backward()
    assert x.grad.tolist() == [2, 1]


def test_split_cat_and_stack():
    a, b = numbers(2, 3), numbers(4, 3, seed=1)
    gradcheck(lambda a, b: F.cat([a, b]), a, b)
    gradcheck(lambda a, b: F.cat([a.T, b.T], dim=-1), a, b)
    gradcheck(lambda a: F.stack([a, a * 2, a], dim=1), a)
    gradcheck(lambda b: F.cat(b.split(3)[::-1]), b)
    assert [piece.shape for piece in Tensor(b).split(2, dim=-1)] == [(4, 2), (4, 1)]


# ---- Products ----


@pytest.mark.parametrize(
    ("shape_a", "shape_b"),
    [
        ((2, 3), (3, 4)),
        ((3,), (3,)),
        ((3,), (3, 2)),
        ((2, 3), (3,)),
        ((5, 2, 3), (3, 4)),
        ((3,), (5, 3, 2)),
        ((5, 2, 3), (3,)),
        ((1, 2, 3), (5, 3, 4)),
        ((5, 1, 2, 3), (4, 3, 1)),
        ((3, 0), (0, 4)),
        ((0, 3), (3, 2)),
        ((2, 1), (1, 2)),
    ],
)
def test_matmul_sums_over_the_batch_axes_that_were_stretched(shape_a, shape_b):
    gradcheck(F.matmul, numbers(*shape_a), numbers(*shape_b, seed=1))


def test_matmul_without_elements_has_gradients_without_elements():
    a = Tensor(np.ones((3, 0)), requires_grad=True)
    b = Tensor(np.ones((0, 4)), requires_grad=True)
    (a @ b + 1).sum().backward()
    assert a.grad.shape == (3, 0)
    assert b.grad.shape == (0, 4)


@pytest.mark.parametrize("bias", [(1,), (), (4, 3), (1, 4), (3,)])
def test_linear_refuses_a_bias_that_would_broadcast(bias):
    with pytest.raises(UsageError, match=r"\(4, 3\) and"):
        F.linear(np.ones((4, 3)), np.ones((4, 3)), np.ones(bias))
    with pytest.raises(UsageError, match="linear"):
        F.linear(np.ones((4, 3)), np.ones(3))


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 4, 3), (0, 3)])
def test_linear_is_fused_and_right(shape):
    x, W, b = numbers(*shape), numbers(5, 3, seed=1), numbers(5, seed=2)
    gradcheck(F.linear, x, W, b)
    gradcheck(F.linear, x, W)
    np.testing.assert_allclose(F.linear(x, W, b).data, x @ W.T + b)


def test_linear_on_an_empty_batch_gives_zero_gradients():
    W = Tensor(np.ones((4, 5)), requires_grad=True)
    F.linear(np.ones((0, 5)), W).sum().backward()
    assert W.grad.tolist() == np.zeros((4, 5)).tolist()


def test_the_gradient_of_an_input_that_needs_none_is_not_computed():
    op = neural.Linear()
    op.needs = (False, True, True)
    op.forward(np.ones((2, 3)), np.ones((4, 3)), np.ones(4))
    gx, gW, gb = op.backward(np.ones((2, 4)))
    assert gx is None
    assert gW.shape == (4, 3)
    assert gb.shape == (4,)


def test_embedding_adds_the_gradients_of_rows_used_twice_and_checks_the_ids():
    table = numbers(4, 2)
    gradcheck(lambda table: F.embedding(np.array([[0, 3], [3, 3]]), table), table)
    with pytest.raises(UsageError, match=r"index 4 at position 1, 0 .* 4 rows"):
        F.embedding(np.array([[0, 3], [4, 9]]), table)


def test_an_empty_list_of_ids_is_one_of_integers():
    w = Tensor(np.ones((4, 2)), requires_grad=True)
    y = F.embedding([], w)
    y.sum().backward()
    assert y.shape == F.one_hot([], 2).shape == (0, 2)
    assert w.grad.tolist() == [[0, 0]] * 4
    assert F.cross_entropy(np.ones((0, 3)), [], reduction="sum").item() == 0


# ---- Losses ----


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses(reduction):
    x, labels = numbers(3, 4), np.array([2, 0, 3])
    chances = positive(3, 4, seed=2)
    bits = np.array([[0, 1, 0.5, 1]] * 3)
    for f in (
        lambda x: F.cross_entropy(x, labels, reduction=reduction),
        lambda x: F.cross_entropy(x, [2, -1, 3], ignore_index=-1, reduction=reduction),
        lambda x: F.cross_entropy(x, chances, reduction=reduction),
        lambda x: F.mse_loss(x, chances, reduction),
        lambda x: F.binary_cross_entropy_with_logits(x, bits, reduction),
    ):
        gradcheck(f, x)
    gradcheck(lambda t: F.mse_loss(x, t, reduction), chances)
    gradcheck(lambda t: F.cross_entropy(x, t, reduction=reduction), chances)
    gradcheck(lambda t: F.binary_cross_entropy_with_logits(x, t, reduction), bits)


def test_cross_entropy_of_one_hot_probabilities_equals_that_of_labels():
    x, labels = numbers(3, 4), np.array([2, 0, 3])
    by_label = F.cross_entropy(x, labels)
    by_chance = F.cross_entropy(x, F.one_hot(labels, 4).to("float64"))
    assert by_label.item() == pytest.approx(by_chance.item())


def test_cross_entropy_of_a_single_row():
    gradcheck(lambda x: F.cross_entropy(x, np.array(2)), numbers(4))


def test_an_ignored_row_counts_nothing():
    x = Tensor(numbers(3, 4), requires_grad=True)
    F.cross_entropy(x, [1, -100, 2]).backward()
    assert (x.grad.data[1] == 0).all()
    two = F.cross_entropy(x.data[[0, 2]], [1, 2])
    assert F.cross_entropy(x, [1, -100, 2]).item() == pytest.approx(two.item())


def test_the_mean_over_70_000_rows_of_float16_is_finite():
    """Neither the sum of the losses nor their number is a float16."""
    x, rows = np.zeros((70_000, 2), "float16"), np.arange(70_000)
    for ignored in (rows < 0, rows == 1, rows != 0):
        labels = np.where(ignored, -100, rows % 2)
        logits = Tensor(x, requires_grad=True)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        kept = (labels >= 0).sum()
        assert loss.item() == pytest.approx(np.log(2), rel=1e-3)
        assert logits.grad.data[0, 0] == pytest.approx(-0.5 / kept, rel=1e-2)
    assert F.mse_loss(x + 2, x).item() == 4
    assert F.binary_cross_entropy_with_logits(x, x).item() == pytest.approx(
        np.log(2), rel=1e-3
    )


def test_cross_entropy_stays_finite_where_softmax_then_log_would_not():
    z = Tensor([[-431.0, 279.0, 427.0]], requires_grad=True)
    loss = F.cross_entropy(z, [0])
    loss.backward()
    assert loss.item() == pytest.approx(858)
    assert np.isfinite(z.grad.data).all()
    assert abs(z.grad.data.sum()) < 1e-6
    assert F.cross_entropy([[1e4] * 5], [2]).item() == pytest.approx(np.log(5))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("x", [-1e4, -50.0, 0.0, 50.0, 1e4])
def test_binary_cross_entropy_is_stable_for_large_logits(dtype, x):
    t = Tensor(np.array(x, dtype), requires_grad=True)
    loss = F.binary_cross_entropy_with_logits(t, 1.0)
    loss.backward()
    assert loss.item() == pytest.approx(max(-x, 0) + np.log1p(np.exp(-abs(x))))
    assert t.grad.item() == pytest.approx(-1 / (1 + np.exp(min(x, 700))), abs=1e-7)


def test_a_label_out_of_range_is_named_with_its_place():
    with pytest.raises(UsageError, match=r"label 7 at position 2 .* 5 classes"):
        F.cross_entropy(np.zeros((3, 5)), [0, 4, 7])
    with pytest.raises(UsageError, match="label -1 at position 0"):
        F.cross_entropy(np.zeros((1, 5)), [-1])
    with pytest.raises(UsageError, match="integer"):
        F.cross_entropy(np.zeros((1, 5)), [0.5])


def test_losses_refuse_shapes_that_would_broadcast():
    """(N, 1) against (N,) is (N, N): it trains, but on nonsense."""
    with pytest.raises(UsageError, match=r"\(3, 1\) and target \(3,\)"):
        F.mse_loss(np.zeros((3, 1)), np.zeros(3))
    with pytest.raises(UsageError, match="do not fit"):
        F.cross_entropy(np.zeros((3, 5)), [0, 1])
    with pytest.raises(UsageError, match="reduction"):
        F.mse_loss([1.0], [2.0], reduction="average")


# ---- Dropout ----


def test_dropout_keeps_the_expectation_and_uses_one_mask_both_ways():
    manual_seed(0)
    x = Tensor(np.ones(10_000), requires_grad=True)
    y = F.dropout(x, 0.25)
    y.sum().backward()
    assert set(y.data.tolist()) == {0.0, 1 / 0.75}
    assert y.data.mean() == pytest.approx(1, abs=0.02)
    assert (x.grad.data == y.data).all()


def test_dropout_draws_from_the_seeded_host_generator():
    manual_seed(3)
    first = F.dropout(np.ones(20)).tolist()
    second = F.dropout(np.ones(20)).tolist()
    manual_seed(3)
    assert F.dropout(np.ones(20)).tolist() == first != second


def test_dropout_of_integers_keeps_the_fraction_of_its_scale():
    assert set(F.dropout(np.ones(100, int), 0.25).tolist()) == {0.0, 1 / 0.75}


def test_dropout_at_its_ends():
    assert F.dropout([1.0, 2.0], p=0).tolist() == [1, 2]
    assert F.dropout([1.0, 2.0], p=1).tolist() == [0, 0]
    assert F.dropout([1.0, 2.0], p=0.9, training=False).tolist() == [1, 2]
    with pytest.raises(UsageError, match="probability"):
        F.dropout([1.0], p=1.5)
    with pytest.raises(UsageError, match="probability"):
        F.dropout([1.0], p="half")


# ---- What all ops promise ----

# name -> an op and its inputs
SAMPLES = {
    "Add": (ops.Add(), numbers(2, 3), numbers(3)),
    "Mul": (ops.Mul(), numbers(2, 3), numbers(3)),
    "Div": (ops.Div(), numbers(2, 3), numbers(3)),
    "PowNumber": (ops.PowNumber(3), numbers(2, 3)),
    "Sigmoid": (ops.Sigmoid(), numbers(2, 3)),
    "GELU": (neural.GELU(), numbers(2, 3)),
    "TanhGELU": (neural.TanhGELU(), numbers(2, 3)),
    "SiLU": (neural.SiLU(), numbers(2, 3)),
    "Softplus": (neural.Softplus(1.0, 20.0), numbers(2, 3)),
    "LeakyReLU": (neural.LeakyReLU(0.1), numbers(2, 3)),
    "ELU": (neural.ELU(0.5), numbers(2, 3)),
    "Erf": (neural.Erf(), numbers(2, 3)),
    "Rsqrt": (ops.Rsqrt(), positive(2, 3)),
    "Clip": (ops.Clip(-1.0, 0.5), numbers(2, 3)),
    "Var": (ops.Var(1), numbers(2, 3)),
    "Std": (ops.Std(1), numbers(2, 3)),
    "CumSum": (ops.CumSum(1), numbers(2, 3)),
    "Prod": (ops.Prod(1), numbers(2, 3)),
    "Gather": (ops.Gather(np.array([[0, 1, 1]]), 0), numbers(2, 3)),
    "Pad": (ops.Pad([(0, 1), (-1, 2)], 0.5), numbers(2, 3)),
    "Embedding": (neural.Embedding(np.array([0, 2, 2])), numbers(3, 2)),
    "Einsum": (ops.Einsum(["ij", "jk"], "ik"), numbers(2, 3), numbers(3, 4)),
    "LayerNorm": (neural.LayerNorm(1e-5), numbers(2, 3), numbers(3), numbers(3)),
    "RMSNorm": (neural.RMSNorm(1e-5), numbers(2, 3), numbers(3)),
    "Attention": (neural.Attention(0.5), numbers(2, 3), numbers(4, 3), numbers(4, 2)),
    "Attention, dropped": (
        *(neural.Attention(0.5, 0.5), numbers(2, 3), numbers(4, 3), numbers(4, 2)),
    ),
    "Rotary": (neural.Rotary(np.float32([0.6]), np.float32([0.8])), numbers(3, 2)),
    "KLDivergence": (neural.KLDivergence(), numbers(2, 3), positive(2, 3)),
    "SmoothL1": (neural.SmoothL1(1.0), numbers(2, 3), numbers(2, 3, seed=1)),
    "CrossEntropy, smoothed": (
        neural.CrossEntropy(np.array([0, 2]), smoothing=0.1, weights=positive(3)),
        numbers(2, 3),
    ),
    "ReLU": (ops.ReLU(), numbers(2, 3)),
    "Maximum": (ops.Maximum(), numbers(2, 3), numbers(3)),
    "Where": (ops.Where(np.array([True, False, True])), numbers(2, 3), numbers(3)),
    "Dropout": (neural.Dropout(0.5), numbers(2, 3)),
    "Mean": (ops.Mean(1), numbers(2, 3)),
    "Max": (ops.Max(1), numbers(2, 3)),
    "MatMul": (ops.MatMul(), numbers(2, 3), numbers(3, 2)),
    "Linear": (neural.Linear(), numbers(2, 3), numbers(4, 3), numbers(4)),
    "Softmax": (neural.Softmax(), numbers(2, 3)),
    "LogSoftmax": (neural.LogSoftmax(), numbers(2, 3)),
    "CrossEntropy": (neural.CrossEntropy(np.array([0, 2])), numbers(2, 3)),
    "SquaredError": (neural.SquaredError(), numbers(2, 3), numbers(2, 3)),
    "BinaryCrossEntropy": (neural.BinaryCrossEntropy(), numbers(2, 3), numbers(2, 3)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_float32_stays_float32_forward_and_backward(name):
    op, *arrays = SAMPLES[name]
    y = op.forward(*[x.astype("float32") for x in arrays])
    assert y.dtype == np.float32
    assert {g.dtype for g in op.backward(np.ones_like(y))} == {np.dtype("float32")}


@pytest.mark.parametrize("name", SAMPLES)
def test_backward_only_reads_gy_and_shares_no_new_array(name):
    op, *arrays = SAMPLES[name]
    gy = np.ones_like(op.forward(*arrays))
    gy.setflags(write=False)
    first = op.backward(gy)
    again = op.backward(gy)  # with retain_graph an op runs backward twice
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    fresh = [id(g) for g in first if g is not gy]
    assert len(set(fresh)) == len(fresh)


def test_shapes_that_do_not_fit_are_named_with_the_op():
    with pytest.raises(UsageError, match=r"MatMul cannot take \(2, 3\).*\(4, 5\)"):
        Tensor(np.ones((2, 3))) @ np.ones((4, 5))
    with pytest.raises(UsageError, match=r"Add cannot take \(3,\).*\(4,\)"):
        Tensor(np.ones(3)) + np.ones(4)
    with pytest.raises(UsageError, match=r"Reshape cannot take \(3,\)"):
        apply(ops.Reshape((2, 2)), Tensor(np.ones(3)))
