"""bfloat16: rounding, and sums of it over the ring."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minddp.bfloat16 import BFLOAT16, from_bfloat16, to_bfloat16
from minddp.errors import UsageError
from minddp.testing import run_groups

FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def round_trip(x):
    return from_bfloat16(to_bfloat16(np.float32([x])))[0]


def neighbours(x):
    """The bfloat16 numbers around a float32: its upper half, and one more."""
    low = np.float32([x]).view(np.uint32) & 0xFFFF0000
    return low.view(np.float32)[0], (low + 0x10000).view(np.float32)[0]


@given(FLOAT32)
def test_rounding_goes_to_the_nearest_and_ties_to_even(x):
    with np.errstate(over="ignore"):
        low, high = (float(y) for y in neighbours(x))
    got = float(round_trip(x))
    assert got in (low, high)
    if np.isfinite(high):
        below, above = abs(x - low), abs(high - x)
        assert got == (low if below < above else high) or below == above
    even = np.float32([got]).view(np.uint32)[0] >> 16 & 1 == 0
    assert even or abs(x - low) != abs(high - x)


@pytest.mark.parametrize(
    ("x", "rounded"),
    [
        (1 + 1 / 256, 1.0),
        (1 + 3 / 256, 1 + 1 / 64),
        (1 + 1 / 256 + 1e-6, 1 + 1 / 128),
        (-0.0, -0.0),
        (np.inf, np.inf),
        (-np.inf, -np.inf),
        (3.4e38, np.inf),
        (1e-40, 2.0**-133),
    ],
)
def test_these_round_to(x, rounded):
    assert round_trip(x).tobytes() == np.float32(rounded).tobytes()


def test_no_nan_becomes_a_number():
    for bits in (0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF):
        x = np.array([bits], np.uint32).view(np.float32)
        assert np.isnan(from_bfloat16(to_bfloat16(x)))[0]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_ring_adds_in_float32_and_rounds_to_the_same_bits_on_all_ranks(n):
    def body(pg):
        x = np.random.default_rng(pg.rank).standard_normal(1000)
        half = to_bfloat16(x)
        pg.all_reduce(half)
        return half.tobytes(), from_bfloat16(half), from_bfloat16(to_bfloat16(x))

    results = run_groups(n, body)
    assert len({bits for bits, _, _ in results}) == 1
    exact = np.sum([np.float64(x) for _, _, x in results], axis=0)
    largest = np.max([abs(x) for _, _, x in results], axis=0) * n
    assert (abs(results[0][1] - exact) <= largest * 2.0**-8 * n).all()
    if n == 2:
        rounded_once = from_bfloat16(to_bfloat16(exact))
        assert results[0][1].tobytes() == rounded_once.tobytes()


@pytest.mark.parametrize("op", ["avg", "min", "max", "prod"])
def test_only_the_sum_is_there(op):
    def body(pg):
        with pytest.raises(UsageError, match=f"bfloat16 by '{op}'"):
            pg.all_reduce(np.zeros(3, BFLOAT16), op)

    run_groups(1, body)


def test_strided_arrays_and_broadcasts_work_as_for_any_dtype():
    def body(pg):
        x = to_bfloat16(np.arange(6.0) * (pg.rank + 1))
        pg.all_reduce(x[::2])
        y = to_bfloat16(np.full(4, pg.rank + 1.0))
        pg.broadcast(y, 1)
        return from_bfloat16(x).tolist(), from_bfloat16(y).tolist()

    (x0, y0), (x1, y1) = run_groups(2, body)
    assert x0 == [0, 1, 6, 3, 12, 5]
    assert x1 == [0, 2, 6, 6, 12, 10]
    assert y0 == y1 == [2.0] * 4
