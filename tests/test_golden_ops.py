"""minddp against PyTorch, call by call: equal outputs and equal gradients.

PyTorch has written golden/ops.npz (golden/make_ops.py). Both make the calls of
golden/ops.py: functions, methods and modules, on small inputs of several shapes.
"""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from golden.ops import CASES, MODULES, Case, Library, module_results_of, results_of

import minddp
from minddp import functional, nn
from minddp.autograd import Tensor

GOLDEN = dict(np.load(Path(__file__).parent / "golden" / "ops.npz"))
KINDS: dict[str, set[str]] = {}
for key in GOLDEN:
    name, _, kind = key.rpartition(".")
    KINDS.setdefault(name, set()).add(kind)
TOLERANCES = {"float64": 1e-10, "float32": 1e-5}

# What is not as in PyTorch, and why. Take out what has been mended.
DIFFERENT = {
    "cross_entropy of ignored rows, weighted": "0 / 0 also in the gradient: not 0, NaN",
}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # log(0) and the like


class Functions:
    """minddp.functional, and behind it minddp."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __getattr__(self, name):
        return getattr(functional, name, None) or getattr(minddp, name)

    def tensor(self, x):
        return Tensor(np.array(x, self.dtype if x.dtype.kind == "f" else None))


def library(dtype):
    F = Functions(dtype)
    return Library(F=F, nn=nn, dtype=dtype, tensor=F.tensor, array=lambda t: t.data)


def assert_near(ours, theirs, tolerance, what):
    """Numbers near 0 may be off by a part of the largest, or of 1."""
    assert ours.shape == theirs.shape, f"the shape of {what}"
    largest = abs(theirs[np.isfinite(theirs)]).max(initial=0) or 1
    near_0 = tolerance * min(largest, 1)
    np.testing.assert_allclose(ours, theirs, tolerance, near_0, err_msg=what)


def assert_as_in_pytorch(name, results, dtype):
    assert set(results) == KINDS[name]
    for kind, ours in results.items():
        theirs = GOLDEN[f"{name}.{kind}"]
        if kind == "state":
            assert ours.tolist() == theirs.tolist()
            continue
        if kind != "buffers":
            assert ours.dtype == dtype, f"the dtype of {kind}"
        assert_near(ours, theirs, TOLERANCES[dtype], kind)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_a_call_gives_the_output_and_the_gradients_of_pytorch(name, dtype):
    results = results_of(library(dtype), CASES[name])
    different = pytest.raises(AssertionError) if name in DIFFERENT else nullcontext()
    with different:
        assert_as_in_pytorch(name, results, dtype)


def with_constant(case, k):
    """The case without its input k, for which a constant stands in."""

    def call(F, *inputs):
        return case.call(F, *inputs[:k], F.tensor(case.inputs[k]), *inputs[k:])

    return Case(call, *case.inputs[:k], *case.inputs[k + 1 :])


def floating(case):
    return [k for k, x in enumerate(case.inputs) if x.dtype.kind == "f"]


@pytest.mark.parametrize("name", [n for n in CASES if len(floating(CASES[n])) > 1])
def test_a_constant_in_place_of_an_input_leaves_the_other_gradients(name):
    """An op need not compute a gradient that nobody wants."""
    case, all_gradients = CASES[name], GOLDEN[f"{name}.gradients"]
    ends = np.cumsum([case.inputs[k].size for k in floating(case)])
    parts = np.split(all_gradients, ends[:-1])
    for i, k in enumerate(floating(case)):
        ours = results_of(library("float64"), with_constant(case, k))["gradients"]
        theirs = np.concatenate(parts[:i] + parts[i + 1 :])
        assert_near(ours, theirs, 1e-10, f"gradients with input {k} constant")


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_has_the_names_the_output_and_the_gradients_of_pytorch(name, dtype):
    results = module_results_of(library(dtype), MODULES[name])
    assert_as_in_pytorch(name, results, dtype)


def test_the_file_holds_the_calls():
    names = {name for name, kinds in KINDS.items() if "output" in kinds}
    assert names == {*CASES, *MODULES}, "run golden/make_ops.py again"
