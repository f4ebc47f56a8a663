"""Tensors from nothing: shapes, usual dtypes, and what the random ones promise."""

import numpy as np
import pytest

import minddp
from minddp import creation
from minddp.autograd import Tensor
from minddp.device import generator
from minddp.errors import UsageError

BY_SIZE = [creation.zeros, creation.ones, creation.empty, creation.rand, creation.randn]


def same(x, values, dtype):
    """Whether x has exactly these values and this dtype."""
    expected = np.array(values, dtype)
    return x.dtype == dtype and x.shape == expected.shape and (x.data == expected).all()


# ---- Sizes ----


@pytest.mark.parametrize("make", BY_SIZE)
def test_a_size_is_written_as_numbers_or_as_a_tuple(make):
    assert make(2, 3).shape == make((2, 3)).shape == make([2, 3]).shape == (2, 3)
    assert make().shape == make(()).shape == ()
    assert make(0, 2).shape == (0, 2)
    assert make(4).dtype == "float32"


def test_a_length_may_be_a_numpy_number_or_a_tensor_but_not_a_fraction():
    assert creation.zeros(np.int64(2), Tensor(3)).shape == (2, 3)
    with pytest.raises(UsageError, match=r"zeros\(2\.0\)"):
        creation.zeros(2.0)


@pytest.mark.parametrize(
    "call",
    [
        *(lambda make=make: make(2, -1) for make in BY_SIZE),
        lambda: creation.full((-1,), 0.0),
        lambda: creation.eye(-1),
        lambda: creation.randperm(-1),
        lambda: creation.randint(5, (-1,)),
        lambda: creation.linspace(0, 1, -1),
        lambda: creation.zeros(1 << 40, 1 << 40),
        lambda: creation.zeros(2, dtype="float33"),
        lambda: creation.zeros(2, dtype="complex64"),
        lambda: creation.zeros(2, device="gpu"),
        lambda: creation.arange(0, 3, 0),
        lambda: creation.arange(10**30),
        lambda: creation.randint(5, 5, (1,)),
        lambda: creation.randint(0.5, 5, (1,)),
        lambda: creation.randint(5),
        lambda: creation.rand(2, dtype="int64"),
        lambda: creation.randn(2, dtype="int64"),
        lambda: creation.from_numpy([1.0]),
        lambda: creation.tensor([1, 2], requires_grad=True),
    ],
)
def test_a_bad_call_is_a_usage_error(call):
    with pytest.raises(UsageError):
        call()


# ---- Values and dtypes ----


def test_data_decide_on_the_dtype_as_in_pytorch():
    assert same(creation.tensor([1, 2]), [1, 2], "int64")
    assert same(creation.tensor([1.0, 2.0]), [1, 2], "float32")
    assert same(creation.tensor([True]), [True], "bool")
    assert same(creation.tensor(np.ones(2)), [1, 1], "float64")
    assert same(creation.tensor([1, 2], dtype="float16"), [1, 2], "float16")
    assert same(creation.tensor([]), [], "float32")


@pytest.mark.parametrize("wrap", [lambda x: x, Tensor])
def test_tensor_copies_and_from_numpy_shares(wrap):
    x = np.zeros(2, "float32")
    copy, shared = creation.tensor(wrap(x)), creation.from_numpy(x)
    x[:] = 1
    assert same(copy, [0, 0], "float32")
    assert shared.data is x


def test_one_value_everywhere():
    assert same(creation.zeros(2), [0, 0], "float32")
    assert same(creation.ones(2, dtype=creation.int64), [1, 1], "int64")
    assert same(creation.full((2, 1), 7), [[7], [7]], "int64")
    assert same(creation.full((2,), 0.5), [0.5, 0.5], "float32")
    assert same(creation.full((2,), True), [True, True], "bool")
    assert same(creation.full((2,), 7, dtype="float64"), [7, 7], "float64")


def test_like_takes_shape_and_dtype_unless_another_is_given():
    x = Tensor(np.array([[5, 6]], "int32"))
    assert same(creation.zeros_like(x), [[0, 0]], "int32")
    assert same(creation.ones_like(x, dtype=None), [[1, 1]], "int32")
    assert same(creation.ones_like(x, dtype="float64"), [[1, 1]], "float64")


def test_counted():
    assert same(creation.arange(3), [0, 1, 2], "int64")
    assert same(creation.arange(np.int32(3)), [0, 1, 2], "int64")
    assert same(creation.arange(5, 2, -1), [5, 4, 3], "int64")
    assert same(creation.arange(0, 1, 0.25), [0, 0.25, 0.5, 0.75], "float32")
    assert same(creation.arange(3, dtype="float32"), [0, 1, 2], "float32")
    assert same(creation.linspace(0, 1, 5), [0, 0.25, 0.5, 0.75, 1], "float32")
    assert same(creation.eye(2, 3), [[1, 0, 0], [0, 1, 0]], "float32")
    assert same(creation.eye(2), [[1, 0], [0, 1]], "float32")


def test_names_of_dtypes_are_numpys_own():
    for name in ("float16", "float32", "float64", "uint8", "int32", "int64"):
        assert getattr(creation, name) == np.dtype(name)
    assert creation.long == np.dtype("int64")


@pytest.mark.parametrize("make", [creation.tensor, creation.zeros_like, creation.ones])
def test_requires_grad_makes_a_leaf(make):
    x = make(2.0 if make is not creation.ones else 2, requires_grad=True, device="cpu")
    assert x.requires_grad and x.is_leaf
    (x * 3).sum().backward()
    assert x.grad.tolist() in (3.0, [3.0, 3.0])


# ---- Drawn ----


@pytest.mark.parametrize(
    "draw",
    [
        lambda: creation.rand(100),
        lambda: creation.randn(100),
        lambda: creation.randint(1000, (100,)),
        lambda: creation.randperm(100),
    ],
)
def test_a_seed_decides_on_every_number(draw):
    minddp.manual_seed(1)
    first = draw()
    after = generator().random()
    minddp.manual_seed(1)
    assert (first.data == draw().data).all()
    assert generator().random() == after
    assert (first.data != draw().data).any()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_rand_is_below_one_and_uniform(dtype):
    minddp.manual_seed(0)
    x = creation.rand(100, 1000, dtype=dtype).data
    assert x.dtype == dtype
    assert x.min() >= 0 and x.max() < 1
    counts = np.histogram(x, bins=10, range=(0, 1))[0]
    assert abs(counts - 10_000).max() < 500  # 5 standard deviations


def test_randn_has_mean_zero_and_variance_one():
    minddp.manual_seed(0)
    x = creation.randn(100, 1000).data.astype("float64")
    assert abs(x.mean()) < 0.02 and abs(x.var() - 1) < 0.03


@pytest.mark.parametrize(
    ("draw", "low", "high"),
    [
        (lambda: creation.randint(3, (1000,)), 0, 2),
        (lambda: creation.randint(3, size=(1000,)), 0, 2),
        (lambda: creation.randint(high=3, size=(1000,)), 0, 2),
        (lambda: creation.randint(-1, 3, (10, 100)), -1, 2),
        (lambda: creation.randint(low=-1, high=3, size=[1000]), -1, 2),
    ],
)
def test_randint_goes_from_low_to_below_high(draw, low, high):
    x = draw()
    assert x.dtype == "int64" and x.numel() == 1000
    assert sorted(set(x.reshape(-1).tolist())) == list(range(low, high + 1))


def test_randperm_has_every_number_once():
    x = creation.randperm(50)
    assert x.dtype == "int64"
    assert sorted(x.tolist()) == list(range(50)) != x.tolist()


def test_names_of_torch_are_methods_of_tensors():
    x = minddp.tensor([[1.0, 4.0], [9.0, 16.0]], requires_grad=True)
    minddp.sqrt(x).sum().backward()
    assert x.grad.tolist() == [[0.5, 0.25], [1 / 6, 0.125]] or minddp.allclose(
        x.grad, [[0.5, 0.25], [1 / 6, 0.125]]
    )
    assert minddp.max(x, dim=1).indices.tolist() == [1, 1]
    assert minddp.mm(np.eye(2), [[1.0, 2.0], [3.0, 4.0]]).tolist() == [[1, 2], [3, 4]]
    assert minddp.isfinite([1.0, np.inf, np.nan]).tolist() == [True, False, False]
    assert minddp.isnan([1.0, np.inf, np.nan]).tolist() == [False, False, True]
    drawn = minddp.randn_like(x)
    assert (drawn.shape, drawn.dtype) == (x.shape, x.dtype)
    assert minddp.ones(2, dtype=minddp.float).dtype == np.float32
    with pytest.raises(UsageError):
        minddp.randn_like(minddp.tensor([1]))
    for name in minddp.__all__:
        assert hasattr(minddp, name), name
