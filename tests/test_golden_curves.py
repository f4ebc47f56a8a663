"""minddp against PyTorch over 20 steps: the same losses, the same final weights.

PyTorch has written golden/curves.npz (golden/make_curves.py). Both run the code of
golden/curves.py: three models under two optimizers, one process, float64.
"""

from pathlib import Path

import numpy as np
import pytest
from golden.curves import CASES, Library, train
from golden.ops import numbers

from minddp import functional, nn, optim
from minddp.autograd import Tensor

GOLDEN = dict(np.load(Path(__file__).parent / "golden" / "curves.npz"))
MINDDP = Library(
    F=functional,
    nn=nn,
    optim=optim,
    float64="float64",
    tensor=Tensor,
    array=lambda p: p.data,
    numbers=numbers,
)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_are_those_of_pytorch(case):
    losses, weights = train(MINDDP, case)
    np.testing.assert_allclose(losses, GOLDEN[f"{case}.losses"], rtol=0, atol=1e-9)
    np.testing.assert_allclose(weights, GOLDEN[f"{case}.weights"], rtol=0, atol=1e-9)


def test_the_file_holds_the_cases_and_all_of_them_learn():
    names = {key.removesuffix(".losses") for key in GOLDEN if key.endswith(".losses")}
    assert names == set(CASES), "run golden/make_curves.py again"
    for case in CASES:
        losses = GOLDEN[f"{case}.losses"]
        assert losses[-5:].mean() < losses[:5].mean() - 0.1, case
