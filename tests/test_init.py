"""Initial weights: by their moments, their bounds, and one seed."""

import math

import numpy as np
import pytest

import minddp
from minddp import nn
from minddp.autograd import Tensor
from minddp.errors import UsageError

init = nn.init
SHAPE = (300, 200)  # fan_out, fan_in


@pytest.fixture(autouse=True)
def _seeded():
    minddp.manual_seed(0)


def weight(shape=SHAPE, dtype="float32"):
    return nn.Parameter(np.full(shape, np.nan, dtype))


def moments(tensor):
    """Mean; standard deviation; largest absolute value."""
    x = tensor.data.astype("float64")
    return x.mean(), x.std(), abs(x).max()


@pytest.mark.parametrize(
    ("fill", "value"), [(init.zeros_, 0), (init.ones_, 1)], ids=["zeros", "ones"]
)
def test_one_number_everywhere(fill, value):
    assert (fill(weight()).data == value).all()
    assert (init.constant_(weight(), 0.5).data == 0.5).all()


# Standard deviation, and the bound in units of it (None: normal numbers have none).
# gain of relu sqrt(2); of leaky_relu with slope 1: 1; fans 200 and 300.
UNIFORM = math.sqrt(3)
DRAWN = {
    "normal": (lambda w: init.normal_(w, 0, 0.02), 0.02, None),
    "uniform": (lambda w: init.uniform_(w, -0.5, 0.5), 0.5 / UNIFORM, UNIFORM),
    "xavier uniform": (init.xavier_uniform_, math.sqrt(2 / 500), UNIFORM),
    "xavier normal": (
        lambda w: init.xavier_normal_(w, gain=2),
        2 * math.sqrt(2 / 500),
        None,
    ),
    "kaiming uniform": (init.kaiming_uniform_, math.sqrt(2 / 200), UNIFORM),
    "as nn.Linear": (
        lambda w: init.kaiming_uniform_(w, a=math.sqrt(5)),
        1 / math.sqrt(3 * 200),
        UNIFORM,
    ),
    "kaiming normal, backward": (
        lambda w: init.kaiming_normal_(w, mode="fan_out", nonlinearity="relu"),
        math.sqrt(2 / 300),
        None,
    ),
    "kaiming normal, linear": (
        lambda w: init.kaiming_normal_(w, nonlinearity="linear"),
        math.sqrt(1 / 200),
        None,
    ),
    # of numbers in (-1, 1): sqrt(1 - 2 pdf(1) / (cdf(1) - cdf(-1))) = 0.5396
    "cut normal": (lambda w: init.trunc_normal_(w, std=2, b=2), 2 * 0.5396, 1 / 0.5396),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", DRAWN)
def test_numbers_have_the_moments_and_bounds_of_their_distribution(name, dtype):
    fill, std, bound = DRAWN[name]
    w = weight(dtype=dtype)
    array = w.data
    assert fill(w) is w
    assert w.data is array, "written in place"
    mean, found, largest = moments(w)
    assert abs(mean) < 4 * std / math.sqrt(array.size)
    assert found == pytest.approx(std, rel=0.015)
    if bound is None:
        assert 3.5 < largest / std < 6
    else:
        assert 0.99 * bound < largest / std <= bound * (1 + 1e-3)


def test_the_mean_and_the_two_limits_are_independent():
    assert init.normal_(weight(), 3.0, 0.1).data.mean() == pytest.approx(3, abs=0.01)
    cut = init.trunc_normal_(weight(), mean=1.0, std=1.0, a=0.5, b=4.0).data
    assert 0.5 <= cut.min() < 0.51
    assert 3.5 < cut.max() <= 4
    assert (cut > 1).mean() == pytest.approx(0.7214, abs=0.01)  # 0.49865 / 0.69011
    lifted = init.uniform_(weight(), 1.0, 3.0).data
    assert 1 <= lifted.min() < 1.01
    assert 2.99 < lifted.max() <= 3


def test_a_window_counts_for_both_fans():
    w = weight((64, 32, 3, 5))
    init.kaiming_normal_(w, nonlinearity="relu")
    assert moments(w)[1] == pytest.approx(math.sqrt(2 / (32 * 15)), rel=0.02)
    init.kaiming_normal_(w, mode="fan_out", nonlinearity="relu")
    assert moments(w)[1] == pytest.approx(math.sqrt(2 / (64 * 15)), rel=0.02)
    init.xavier_normal_(w)
    assert moments(w)[1] == pytest.approx(math.sqrt(2 / (96 * 15)), rel=0.02)


@pytest.mark.parametrize("shape", [(5, 5), (4, 9), (9, 4), (6, 2, 2)])
def test_rows_or_columns_are_orthonormal(shape):
    w = init.orthogonal_(weight(shape, "float64"), gain=3).data / 3
    w = w.reshape(shape[0], -1)
    rows, columns = w.shape
    gram = w @ w.T if rows <= columns else w.T @ w
    np.testing.assert_allclose(gram, np.eye(len(gram)), atol=1e-12)


def test_an_orthogonal_matrix_has_no_preferred_sign():
    """LAPACK's own signs would make the first element of all of them negative."""
    firsts = [init.orthogonal_(weight((3, 3))).data[0, 0] for _ in range(200)]
    assert abs(np.mean(np.sign(firsts))) < 0.3


def test_gains():
    gains = {
        "linear": 1,
        "conv2d": 1,
        "sigmoid": 1,
        "tanh": 5 / 3,
        "relu": math.sqrt(2),
        "selu": 0.75,
    }
    assert {name: init.calculate_gain(name) for name in gains} == gains
    assert init.calculate_gain("leaky_relu") == pytest.approx(math.sqrt(2 / 1.0001))
    assert init.calculate_gain("leaky_relu", 2) == pytest.approx(math.sqrt(0.4))
    assert init.calculate_gain("leaky_relu", 0) == math.sqrt(2)


def test_one_seed_gives_one_set_of_weights():
    first = init.xavier_normal_(weight()).data
    minddp.manual_seed(0)
    assert (init.xavier_normal_(weight()).data == first).all()
    assert (init.xavier_normal_(weight()).data != first).any()


def test_filling_is_not_recorded_and_seen_by_a_backward_that_needed_the_old():
    w = weight((2, 2))
    assert init.ones_(w).is_leaf
    assert w.requires_grad
    y = (w * w).sum()
    init.zeros_(w)
    with pytest.raises(UsageError, match="modified in place"):
        y.backward()


def test_a_model_is_initialized_as_scripts_do_it():
    def start(module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    model = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 3))
    model.apply(start)
    assert (model[0].bias.data == 0).all()
    assert moments(model[0].weight)[1] == pytest.approx(0.02, rel=0.03)


def test_a_tensor_without_axes_can_be_filled():
    for fill in (init.normal_, init.uniform_, init.trunc_normal_, init.ones_):
        assert np.isfinite(fill(Tensor(np.float32(np.nan))).item())


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda w, v: init.xavier_uniform_(v), r"\(out, in, ...\).*\(3,\)"),
        (lambda w, v: init.kaiming_normal_(v), "kaiming_normal_"),
        (lambda w, v: init.kaiming_normal_(weight((0, 3))), r"\(0, 3\)"),
        (lambda w, v: init.kaiming_normal_(w, mode="in"), "fan_in"),
        (lambda w, v: init.kaiming_normal_(w, nonlinearity="gelu"), "none of linear"),
        (lambda w, v: init.orthogonal_(v), "a matrix"),
        (lambda w, v: init.trunc_normal_(w, 5, 1, -2, 2), "1 %"),
        (lambda w, v: init.trunc_normal_(w, 0, 0), "1 %"),
        (lambda w, v: init.normal_(w, 0, -1), "std"),
        (lambda w, v: init.uniform_(w, 1, 0), "between 1 and 0"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(call, match):
    w, v = weight((2, 3)), weight((3,))
    with pytest.raises(UsageError, match=match):
        call(w, v)
    assert np.isnan(w.data).all()
    assert np.isnan(v.data).all()
