"""Finite differences: the oracle for every derivative.

    d y / d x_i  =  (f(x + h e_i) - f(x - h e_i)) / 2h   + O(h^2)

With float64 and h = 1e-6 the truncation error is near 1e-12 and the rounding error near
1e-10, so a tolerance of 1e-6 separates a right formula from a wrong one by far.
"""

from collections.abc import Callable

import numpy as np

from minddp.autograd import Tensor


def numeric_gradient(f: Callable[[], float], x: np.ndarray, h: float = 1e-6):
    """The gradient of f() with respect to x, an array that f reads."""
    g = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        middle = x[i]
        x[i] = middle + h
        above = f()
        x[i] = middle - h
        below = f()
        x[i] = middle
        g[i] = (above - below) / (2 * h)
    return g


def gradcheck(f: Callable[..., Tensor], *arrays, tolerance: float = 1e-6) -> None:
    """Assert that backward of f agrees with finite differences for every input.

    The output is weighted with unequal numbers before it is summed: with equal ones, a
    backward that swaps elements would pass.
    """
    arrays = [np.array(x, dtype=np.float64) for x in arrays]
    y = f(*[Tensor(x) for x in arrays])
    weights = np.cos(np.arange(y.numel())).reshape(y.shape)
    inputs = [Tensor(x, requires_grad=True) for x in arrays]
    f(*inputs).backward(weights)
    for i, (tensor, x) in enumerate(zip(inputs, arrays, strict=True)):
        expected = numeric_gradient(
            lambda: float((f(*[Tensor(a) for a in arrays]).data * weights).sum()), x
        )
        assert tensor.grad is not None, f"input {i} got no gradient"
        assert tensor.grad.shape == x.shape
        np.testing.assert_allclose(
            tensor.grad.data,
            expected,
            rtol=tolerance,
            atol=tolerance,
            err_msg=f"gradient of input {i}",
        )
