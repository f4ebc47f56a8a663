"""Gradients that are not finite: what all ranks do about them."""

import logging
import warnings

import numpy as np
import pytest

from minddp import nn, optim
from minddp.comm_hooks import fp16_compress_hook
from minddp.ddp import DistributedDataParallel
from minddp.errors import NonFiniteError, UsageError
from minddp.testing import run_groups


def two_layers(pg, **settings):
    m = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    return m, DistributedDataParallel(m, pg, bucket_cap_mb=1e-6, **settings)


def backward_with(m, ddp, pg, rank, layer, value):
    """One backward, in which that rank's gradient of that layer has this value."""
    m.zero_grad()
    x = np.ones((1, 2), np.float32)
    if pg.rank != rank:
        ddp(x).sum().backward()
        return
    x[0, 1 if layer == 0 else 0] = value
    ddp(x).sum().backward()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_raise_names_rank_and_parameter_on_all_ranks_alike(rank, value):
    def body(pg):
        m, ddp = two_layers(pg, nan="raise")
        backward_with(m, ddp, pg, None, 0, 1.0)  # fine
        with pytest.raises(NonFiniteError) as caught, np.errstate(all="ignore"):
            backward_with(m, ddp, pg, rank, 0, value)
        backward_with(m, ddp, pg, None, 0, 1.0)  # and fine again
        return str(caught.value)

    texts = run_groups(3, body)
    assert len(set(texts)) == 1
    assert "weight' is not finite" in texts[0]
    assert f"on rank {rank}." in texts[0]


def test_skip_takes_no_step_on_any_rank_and_warns(caplog):
    def body(pg):
        m, ddp = two_layers(pg, nan="skip")
        optimizer = optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        history = []
        for step in range(4):
            value = np.nan if step == 2 else 1.0
            backward_with(m, ddp, pg, 1, 0, value)
            optimizer.step()
            history.append(m[0].weight.data.tobytes())
        return ddp.skipped_steps, history

    with caplog.at_level(logging.WARNING, "minddp"):
        (skipped, history), other = run_groups(2, body)
    assert (skipped, history) == other
    assert skipped == 1
    assert history[0] != history[1] == history[2] != history[3]
    assert "all ranks skip a step: the gradient of" in caplog.text
    assert caplog.text.count("on rank 1") == 1


def test_ignore_lets_it_through_to_all_ranks():
    def body(pg):
        m, ddp = two_layers(pg)
        backward_with(m, ddp, pg, 1, 0, np.nan)
        return bool(np.isnan(m[0].weight.grad.data).any())

    assert run_groups(2, body) == [True, True]


def test_an_overflow_in_a_compressing_hook_is_found_in_the_average():
    def body(pg):
        m = nn.Linear(1, 1, bias=False)
        ddp = DistributedDataParallel(m, pg, nan="raise")
        ddp.register_comm_hook(pg, fp16_compress_hook)
        with pytest.raises(
            NonFiniteError, match="'weight' is not finite once it is av"
        ):
            ddp(np.full((1, 1), 1e6, np.float32)).sum().backward()

    with warnings.catch_warnings(action="ignore"):
        run_groups(2, body)


def test_an_unknown_policy_is_refused():
    def body(pg):
        with pytest.raises(UsageError, match="ignore, raise, skip"):
            two_layers(pg, nan="explode")

    run_groups(1, body)
