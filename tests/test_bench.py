"""`minddp bench`: what is timed, in which order, and what comes out of it."""

import json
import os
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
from commands import run

from minddp import bench, bench_step
from minddp import functional as F
from minddp.bench_step import MODELS, WARM_UP_STEPS, Variant
from minddp.device import manual_seed
from minddp.environment import THREAD_VARIABLES
from minddp.errors import ReplicaError, UsageError
from minddp.neural_ops import Linear
from minddp.testing import run_groups


def rows_of(*argv):
    """What the command prints with --json -."""
    finished = run(["minddp", "bench", *argv, "--json", "-"])
    assert finished.returncode == 0, finished.stderr
    return [json.loads(line) for line in finished.stdout.splitlines()]


@pytest.fixture
def never_launched(monkeypatch):
    def launch(program, n):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(bench, "launch", launch)


# ---- The command, with real ranks ----


@pytest.mark.processes
def test_all_reduce_gives_a_row_for_each_size():
    rows = rows_of("all-reduce", "-n", "2", "--sizes", "4,1KiB")
    assert [row["bytes"] for row in rows] == [4, 1024]
    assert {row["world_size"] for row in rows} == {2}
    assert all(0 < row["min_us"] <= row["median_us"] for row in rows)


@pytest.mark.processes
def test_a_step_gives_a_row_for_each_bucket_cap_in_the_order_asked():
    caps = ["--bucket-cap-mb", "25,0.5"]
    rows = rows_of("step", "-n", "2", "--batch", "4", "--steps", "3", *caps)
    assert [row["bucket_cap_mb"] for row in rows] == [25, 0.5]
    for row in rows:
        assert 0 < row.pop("min_ms") <= row.pop("median_ms") <= row.pop("max_ms")
        assert 0 < row.pop("graph_mb") < row.pop("peak_mb")
        del row["bucket_cap_mb"]
        assert row == {
            "model": "mlp",
            "batch": 4,
            "world_size": 2,
            "threads": 1,
            "ddp": "bucketed",
            "parameters": 535_818,
        }


@pytest.mark.processes
def test_one_rank_trains_without_ddp_and_people_get_a_table(tmp_path):
    file = tmp_path / "rows.jsonl"
    options = ["-n", "1", "--batch", "4", "--steps", "1", "--json", str(file)]
    finished = run(["minddp", "bench", "step", *options])
    head, line = finished.stdout.splitlines()
    assert head.split()[:3] == ["model", "bucket_cap_mb", "median_ms"]
    assert line.split()[:2] == ["mlp", "-"]
    row = json.loads(file.read_text())
    assert row["ddp"] is row["bucket_cap_mb"] is None


# ---- What is refused ----


@pytest.mark.usefixtures("never_launched")
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("step --model lenet", "'mlp', 'bigmlp'"),
        ("step --sizes 1KiB", "--sizes"),
        ("all-reduce --model mlp", "--model"),
        ("all-scatter", "'all-reduce', 'step'"),
        ("", "BENCHMARK"),
    ],
)
def test_options_of_another_benchmark_and_unknown_models_are_refused(
    argv, said, capsys
):
    with pytest.raises(SystemExit) as stop:
        bench.main(argv.split())
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("never_launched")
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("step --ddp naive --bucket-cap-mb 1", "--ddp naive has no buckets"),
        ("step -n 1 --bucket-cap-mb 1", "one rank has no buckets"),
        ("step --bucket-cap-mb 1,x", "'x': MiB above 0"),
        *(
            (f"step --bucket-cap-mb {cap}", "MiB above 0")
            for cap in ("0", "nan", "inf")
        ),
        *((f"step --{name} 0", name) for name in ("batch", "threads", "steps")),
        ("all-reduce --sizes 1x", "'1x' is no size"),
    ],
)
def test_values_that_make_no_sense_are_refused_before_a_rank_starts(argv, said):
    with pytest.raises(UsageError, match=said):
        bench.main(argv.split())


# ---- What the ranks are told ----


def test_the_threads_are_in_the_environment_before_the_ranks_start(monkeypatch):
    told = {}

    def launch(program, n):
        told.update(os.environ)
        return 7

    monkeypatch.setattr(bench, "launch", launch)
    for name in THREAD_VARIABLES:
        monkeypatch.setenv(name, "5")
    assert bench.main(["all-reduce"]) == 7
    assert {told[name] for name in THREAD_VARIABLES} == {"5"}
    assert bench.main(["step", "--threads", "3"]) == 7
    assert {told[name] for name in THREAD_VARIABLES} == {"3"}


# ---- What is timed ----


def timed(monkeypatch, repetitions, **durations):
    """What happened, and the times; durations: name -> seconds of its calls in turn."""
    clock, happened = [0.0], []

    def step(name):
        calls = iter(durations[name])

        def call():
            happened.append(name)
            clock[0] += next(calls)

        return call

    def barrier():
        happened.append("barrier")
        clock[0] += 1000.0

    monkeypatch.setattr(
        bench_step, "time", SimpleNamespace(perf_counter=lambda: clock[0])
    )
    pg = SimpleNamespace(rank=0, barrier=barrier)
    steps = [step(name) for name in durations]
    return happened, bench_step.time_steps(pg, steps, repetitions)


def test_the_steps_take_turns_each_after_a_barrier(monkeypatch):
    each = [1.0] * (WARM_UP_STEPS + 2)
    happened, _ = timed(monkeypatch, 2, a=each, b=each)
    assert happened == ["barrier", "a", "barrier", "b"] * (WARM_UP_STEPS + 2)


def test_neither_the_warm_up_nor_the_barrier_is_in_the_times(monkeypatch):
    warm_up = [64.0] * WARM_UP_STEPS
    a, b = [*warm_up, 3.0, 1.0, 2.0], [*warm_up, 8.0, 16.0, 4.0]
    _, seconds = timed(monkeypatch, 3, a=a, b=b)
    assert seconds == [[1.0, 2.0, 3.0], [4.0, 8.0, 16.0]]


def measured(n, variants, **settings):
    """The rows of each rank."""
    settings = {"model": "mlp", "steps": 1, "profile": False} | settings
    options = Namespace(batch=2, threads=1, variants=variants, **settings)
    return run_groups(n, lambda pg: list(bench_step.step_rows(pg, options)))


def test_a_row_has_the_median_and_the_extremes_in_milliseconds(monkeypatch):
    times = [[0.001, 0.002, 0.009], [0.004, 0.005, 0.006]]
    monkeypatch.setattr(bench_step, "time_steps", lambda *_: times)
    variants = [Variant(None), Variant(None)]
    (rows,) = measured(1, variants)
    names = ("min_ms", "median_ms", "max_ms")
    assert [[row[name] for name in names] for row in rows] == [[1, 2, 9], [4, 5, 6]]


def test_ranks_that_do_not_average_get_no_time():
    with pytest.raises(ReplicaError):
        measured(2, [Variant(None)])


def test_every_version_of_ddp_keeps_the_replicas_equal():
    variants = [Variant("naive"), Variant("bucketed", 25), Variant("bucketed", 0.1)]
    (rows, _) = measured(2, variants)
    assert [(row["ddp"], row["bucket_cap_mb"]) for row in rows] == variants


def test_the_cap_is_that_of_the_buckets():
    def buckets(pg):
        caps = [Variant("bucketed", cap) for cap in (0.001, 25)]
        models = [cap.wrap(bench_step.mlp(4, 16, 16, 4), pg) for cap in caps]
        return [len(model.buckets) for model in models]

    assert run_groups(2, buckets) == [[2, 1]] * 2


def test_a_step_trains_with_a_fresh_gradient_each_time():
    manual_seed(0)
    model = bench_step.mlp(784, 3, 10)
    x, y = bench_step.images(8)
    step = bench_step.training_step(model, bench_step.sgd(model), x, y)
    weight = next(model.parameters())
    velocity = 0
    for _ in range(3):
        before = weight.detach().numpy().copy()
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        velocity = 0.9 * velocity + weight.grad.numpy()
        step()
        np.testing.assert_allclose(
            weight.detach().numpy(), before - 0.01 * velocity, rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize(("name", "count"), [("mlp", 535_818), ("bigmlp", 9_493_770)])
def test_the_models_have_the_sizes_that_their_figures_are_compared_by(name, count):
    model = MODELS[name].model()
    assert sum(p.data.size for p in model.parameters()) == count
    x, y = MODELS[name].batch(3)
    logits = model(x)
    assert logits.shape == (3, 10)
    assert (logits.data < 0).any(), "there is no ReLU after the last layer"
    assert (x.dtype, y.dtype.kind, y.shape) == (np.float32, "i", (3,))


@pytest.mark.parametrize(("name", "count"), [("cnn", 20_490), ("gpt", 818_241)])
def test_so_have_the_convolutions_and_the_transformer(name, count):
    model = MODELS[name].model()
    assert sum(p.data.size for p in model.parameters()) == count
    x, y = MODELS[name].batch(3)
    assert len(model(x)) == len(y)
    assert MODELS[name].optimizer(model).param_groups


def test_a_profile_has_every_op_and_adds_up_to_the_step():
    (rows,) = measured(1, [Variant(None)], profile=True)
    profile = {row["op"]: row for row in rows[0]["profile"]}
    assert set(profile) > {"Linear", "ReLU", "CrossEntropy", "(all else)"}
    assert all(profile[op]["backward_ms"] > 0 for op in ("Linear", "ReLU"))
    assert profile["(all else)"]["backward_ms"] > 0
    plain = vars(Linear)["forward"]
    assert not hasattr(plain, "__wrapped__"), "the timers are gone"


def test_memory_is_told_as_what_the_graph_holds():
    (rows,) = measured(1, [Variant(None)])
    parameters, images = 4 * 535_818, 4 * 2 * 784
    assert parameters + images < rows[0]["graph_mb"] * 1e6 < 1.2 * parameters
    assert rows[0]["peak_mb"] > rows[0]["graph_mb"]


# ---- What comes out ----


def test_a_table_shows_thousands_and_what_there_is_not():
    rows = [{"name": "a", "count": 12345, "cap": None}]
    head, line = bench.as_table(rows, ["name", "count", "cap"]).splitlines()
    assert head.split() == ["name", "count", "cap"]
    assert line.split() == ["a", "12,345", "-"]
    assert len(head) == len(line)
