"""Communication hooks: what they send, and what comes back."""

import numpy as np
import pytest

from minddp import manual_seed, nn
from minddp.comm_hooks import allreduce_hook, fp16_compress_hook
from minddp.ddp import DistributedDataParallel
from minddp.testing import run_groups


def gradients(pg, hook=None, dtype="float32"):
    """(gradients, bytes of arrays that one backward sends) with this hook."""
    manual_seed(0)
    m = nn.Sequential(
        nn.Linear(8, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, 8, dtype=dtype)
    )
    ddp = DistributedDataParallel(m, pg, check_sync_every=0)
    if hook:
        ddp.register_comm_hook(pg, hook)
    x = np.random.default_rng(pg.rank).standard_normal((4, 8)).astype(dtype)
    ddp(x).sum().backward()  # the buckets are rebuilt after it
    m.zero_grad()
    before = pg.stats()
    ddp(x).sum().backward()
    after = pg.stats()
    headers = after["header_bytes"] - before["header_bytes"]
    sent = after["bytes_sent"] - before["bytes_sent"] - headers
    return np.concatenate([p.grad.data.ravel() for p in m.parameters()]), sent


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_default_hook_is_the_average(n):
    def body(pg):
        (with_hook, _), (without, _) = gradients(pg, allreduce_hook), gradients(pg)
        return with_hook.tobytes() == without.tobytes()

    assert run_groups(n, body) == [True] * n


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_float16_halves_the_bytes_and_keeps_three_digits(n, dtype):
    def body(pg):
        return gradients(pg, fp16_compress_hook, dtype), gradients(pg, None, dtype)

    results = run_groups(n, body)
    for (compressed, few), (exact, many) in results:
        if n > 1:
            assert few * np.dtype(dtype).itemsize == many * 2
        np.testing.assert_allclose(compressed, exact, rtol=2e-3, atol=2e-3)
        assert compressed.tobytes() == results[0][0][0].tobytes(), "the same on all"
        assert compressed.dtype == dtype


def test_the_sum_does_not_overflow_where_the_average_does_not():
    def body(pg):
        m = nn.Linear(1, 1, bias=False)
        ddp = DistributedDataParallel(m, pg)
        ddp.register_comm_hook(pg, fp16_compress_hook)
        ddp(np.full((1, 1), 40_000.0, np.float32)).sum().backward()
        return m.weight.grad.item()

    assert run_groups(4, body) == [40_000.0] * 4


def test_a_hook_of_the_users_sees_every_bucket_once_in_order():
    def body(pg):
        seen = []

        def hook(state, bucket):
            seen.append((state, bucket.index))
            return allreduce_hook(pg, bucket)

        m = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        ddp = DistributedDataParallel(m, pg, bucket_cap_mb=1e-6)
        ddp.register_comm_hook("mine", hook)
        ddp(np.ones((1, 4), np.float32)).sum().backward()
        return seen

    expected = [("mine", k) for k in range(4)]
    assert run_groups(2, body) == [expected] * 2
