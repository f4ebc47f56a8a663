"""Tests of the exercises of docs/01-arrays-and-autograd.md."""

import numpy as np
import pytest

from minddp import Tensor
from minddp.autograd import apply


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
def test_cube(answer, shape):
    """Cube is an op class: forward x**3, backward 3 x**2 gy."""
    x = Tensor(np.arange(np.prod(shape)).reshape(shape) - 1.5, requires_grad=True)
    y = apply(answer(), x)
    assert np.array_equal(y.data, x.data**3)
    y.backward(np.full(shape, 2.0))
    assert np.allclose(x.grad.data, 6 * x.data**2)
    assert x.grad.data.dtype == x.data.dtype


def test_order(answer):
    """readiness_order gives the names of parameters in the order of their gradients."""
    a, b, c = (Tensor(np.ones(2), requires_grad=True) for _ in range(3))

    def loss():
        return ((a * 2 + b) * c).sum()

    assert answer({"a": a, "b": b, "c": c}, loss) == ["c", "b", "a"]
    # Of one op, the last input first.
    assert answer({"a": a, "b": b, "c": c}, lambda: (c + a * b).sum()) == list("cba")
