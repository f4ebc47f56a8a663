"""`minddp bench`: what is timed, in which order, and what comes out of it."""

import json
import os
import re
import sys
from argparse import Namespace
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from commands import run

from minddp import (
    bench,
    bench_clock,
    bench_collectives,
    bench_gloo,
    bench_limits,
    bench_plot,
    bench_rendezvous,
    bench_step,
    shm,
)
from minddp import functional as F
from minddp.bench_clock import Trial, take_turns
from minddp.bench_collectives import COLLECTIVES, measure
from minddp.bench_step import MODELS, WARM_UP_STEPS, Variant
from minddp.bench_table import as_table, fixed, heading, human
from minddp.buckets import FIRST_BUCKET_BYTES, MIB, Size, plan
from minddp.device import manual_seed
from minddp.environment import THREAD_VARIABLES
from minddp.errors import MindDPError, PeerTimeout, ReplicaError, UsageError
from minddp.net import Deadline
from minddp.neural_ops import Linear
from minddp.testing import run_groups, run_ranks

PLAIN = [
    *("op", "world_size", "transport", "bytes"),
    *("median_us", "min_us", "algbw_GBps", "busbw_GBps"),
]


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
    assert {(row["op"], row["world_size"]) for row in rows} == {("all_reduce", 2)}
    assert all(0 < row["min_us"] <= row["median_us"] for row in rows)
    assert all(row["stream_us"] > 0 and row["predicted_us"] > 0 for row in rows)
    assert list(rows[0]) == [*PLAIN, "stream_us", "of_stream", "predicted_us"]


@pytest.mark.processes
def test_a_start_gives_a_row_for_each_number_of_ranks():
    one, three = rows_of("rendezvous", "--ranks", "1,3")
    assert (one["world_size"], three["world_size"]) == (1, 3)
    assert one["control_bytes"] == 0 < three["control_bytes"]
    assert three["control_bytes_a_rank"] == round(three["control_bytes"] / 2)
    for row in (one, three):
        parts = row["import_s"] + row["meet_s"]
        assert row["transport"] == "tcp"
        assert row["import_s"] > 0.01, "Python and NumPy have been started"
        assert row["total_s"] == pytest.approx(parts, abs=0.002)
        assert row["resident_mb"] is None or 10 < row["resident_mb"] <= row["peak_mb"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("argv", "title"),
    [
        ("step -n 2 --batch 2 --steps 1", "step, 2 ranks"),
        ("rendezvous --ranks 1,2", "rendezvous, 1 to 2 ranks"),
    ],
)
def test_an_emulated_network_is_told_in_the_rows_and_above_the_table(
    monkeypatch, tmp_path, argv, title
):
    monkeypatch.setenv("MINDDP_NETLAB", "delay=1us")
    file = tmp_path / "rows.jsonl"
    finished = run(["minddp", "bench", *argv.split(), "--json", str(file)])
    emulated = "tcp, emulated network (delay=1us)"
    assert finished.stdout.splitlines()[0] == f"{title}, {emulated}"
    for line in file.read_text().splitlines():
        row = json.loads(line)
        alone = row["world_size"] == 1
        assert row.get("netlab") == (None if alone else "delay=1us")


@pytest.mark.processes
def test_shared_memory_has_no_stream_and_people_see_all_sizes():
    options = ["-n", "2", "--transport", "shm", "--sizes", "1KiB,1000"]
    finished = run(["minddp", "bench", "all-reduce", *options])
    title, head, *lines = finished.stdout.splitlines()
    assert title == "all-reduce, 2 ranks, shm, float32"
    assert head.split("  ")[-1] == "plain us"
    assert [line.split()[:2] for line in lines] == [["1", "KiB"], ["1,000", "B"]]


@pytest.mark.processes
def test_a_step_gives_a_row_for_each_bucket_cap_in_the_order_asked():
    caps = ["--bucket-cap-mb", "25,0.5"]
    rows = rows_of("step", "-n", "2", "--batch", "4", "--steps", "3", *caps)
    assert [row["bucket_cap_mb"] for row in rows] == [25, 0.5]
    for row in rows:
        assert list(row)[:8] == [
            *("model", "batch", "world_size", "threads", "parameters"),
            *("median_ms", "min_ms", "max_ms"),
        ]
        assert 0 < row.pop("min_ms") <= row.pop("median_ms") <= row.pop("max_ms")
        assert 0 < row.pop("graph_mb") < row.pop("peak_mb")
        del row["bucket_cap_mb"]
        assert row == {
            "model": "mlp",
            "batch": 4,
            "world_size": 2,
            "threads": 1,
            "ddp": "bucketed",
            "transport": "tcp",
            "parameters": 535_818,
        }


@pytest.mark.processes
def test_one_rank_trains_without_ddp_and_people_get_a_table(tmp_path):
    file = tmp_path / "rows.jsonl"
    options = ["-n", "1", "--batch", "4", "--steps", "1", "--json", str(file)]
    finished = run(["minddp", "bench", "step", *options])
    title, head, line = finished.stdout.splitlines()
    assert title == "step, 1 rank, tcp"
    assert head.split()[:4] == ["model", "bucket", "MiB", "median"]
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
        ("all-scatter", "all-reduce"),
        ("broadcast --compare gloo", "--compare"),
        ("barrier --sizes 1KiB", "--sizes"),
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
        *(
            (f"all-reduce --sizes {size}", f"'{size[-2:]}' is no size")
            for size in ("1x", "1KiB,00", "-1")
        ),
        ("all-gather --sizes 1KiB,,", "'' is no size"),
        ("send -n 1", "send needs a rank to send to"),
        *(
            (f"rendezvous --ranks {ranks}", "--ranks .*numbers of ranks from 1 on")
            for ranks in ("0", "2,x", "2,,8", "1.5")
        ),
        ("all-reduce --plot a.gif", "a.gif: the name must end in .png"),
        *(
            (f"{start} no/such/a.svg", "there is no folder no/such")
            for start in ("all-reduce --plot", "step --json")
        ),
        ("barrier --json .", r"--json \.: this is a folder"),
    ],
)
def test_values_that_make_no_sense_are_refused_before_a_rank_starts(argv, said):
    with pytest.raises(UsageError, match=said):
        bench.main(argv.split())


@pytest.mark.usefixtures("never_launched")
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_what_may_not_be_written_is_refused_before_a_rank_starts(
    monkeypatch, tmp_path, option, there
):
    """As root everything may be written, so the kernel is not asked."""
    file = tmp_path / "a.svg"
    if there:
        file.touch()
    asked = []
    monkeypatch.setattr(os, "access", lambda *question: asked.append(question))
    with pytest.raises(UsageError, match=rf"{option} .*a\.svg: it may not be written"):
        bench.main(["all-reduce", option, str(file)])
    assert asked == [(file if there else tmp_path, os.W_OK)]


def test_a_file_that_may_be_written_is_not_touched_by_the_question(tmp_path):
    file = tmp_path / "a.json"
    assert bench.parse(["barrier", "--json", str(file)]).json == str(file)
    assert not file.exists()


@pytest.mark.usefixtures("never_launched")
@pytest.mark.parametrize(
    ("argv", "transport", "lab", "said"),
    [
        ("all-reduce", "mpi", "", "MINDDP_TRANSPORT=mpi: the ranks of `minddp bench`"),
        ("step", "nccl", "", "MINDDP_TRANSPORT=nccl: the ranks of `minddp bench`"),
        ("rendezvous", "pigeon", "", "MINDDP_TRANSPORT=pigeon is unknown"),
        ("all-reduce --transport shm", "", "delay=1ms", "transport 'shm' would not"),
        ("rendezvous --ranks 1,2", "shm", "delay=1ms", "transport 'shm' would not"),
        ("step", "", "delay=1", "delay=1 is no number with a unit"),
        ("step -n 2", "", "rank 2: delay=1ms", "there is no rank 2 among 2"),
        ("rendezvous --ranks 3,2", "", "rank 2: delay=1ms", "no rank 2 among 2"),
    ],
)
def test_a_network_that_ranks_would_refuse_is_refused_before_one_starts(
    monkeypatch, argv, transport, lab, said
):
    for name, value in (("TRANSPORT", transport), ("NETLAB", lab)):
        monkeypatch.delenv(f"MINDDP_{name}", raising=False)
        if value:
            monkeypatch.setenv(f"MINDDP_{name}", value)
    with pytest.raises(UsageError, match=said):
        bench.main(argv.split())


def test_the_option_wins_over_the_environment_and_a_lab_allows_tcp(monkeypatch):
    monkeypatch.setenv("MINDDP_TRANSPORT", "mpi")
    monkeypatch.setenv("MINDDP_NETLAB", "rank 1: delay=1ms")
    assert bench.parse(["step", "--transport", "auto"]).transport == "auto"
    monkeypatch.delenv("MINDDP_TRANSPORT")
    assert bench.parse(["step"]).transport == "tcp"
    assert bench.parse(["step", "-n", "1", "--transport", "shm"]).transport == "shm"


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
        bench_clock, "time", SimpleNamespace(perf_counter=lambda: clock[0])
    )
    pg = SimpleNamespace(rank=0, barrier=barrier)
    steps = [step(name) for name in durations]
    return happened, bench_step.time_steps(pg, steps, repetitions)


def test_the_steps_take_turns_each_between_barriers(monkeypatch):
    each = [1.0] * (WARM_UP_STEPS + 2)
    happened, _ = timed(monkeypatch, 2, a=each, b=each)
    turn = ["barrier", "a", "barrier", "barrier", "b", "barrier"]
    assert happened == turn * (WARM_UP_STEPS + 2)


def test_ranks_prepare_before_the_barrier_and_check_after_one():
    happened = []
    names = ("run", "prepare", "check")
    trial = Trial(*(lambda name=name: happened.append(name) for name in names))
    pg = SimpleNamespace(barrier=lambda: happened.append("barrier"))
    ((seconds,),) = take_turns(pg, [trial], range(1))
    assert happened == ["prepare", "barrier", "run", "barrier", "check"]
    assert seconds >= 0


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


@pytest.mark.parametrize(
    ("caps", "buckets"),
    [((0.1, 1, 16), [14.1, 16, 6.1]), ((16.1, 17, 25), [14.1, 22.1])],
)
def test_bigmlp_has_the_buckets_of_the_worked_example(caps, buckets):
    model = MODELS["bigmlp"].model()
    sizes = [Size(p.data.nbytes, "float32") for p in model.parameters()]
    for cap in caps:
        cap_bytes = int(cap * MIB)
        first = min(FIRST_BUCKET_BYTES, cap_bytes)
        made = plan(sizes, range(len(sizes))[::-1], first, cap_bytes)
        mib = [sum(sizes[i].nbytes for i in bucket) / MIB for bucket in made]
        assert mib == pytest.approx(buckets, abs=0.05)


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


@pytest.mark.parametrize(
    ("name", "tensors", "count"), [("cnn", 6, 20_490), ("gpt", 54, 818_241)]
)
def test_so_have_the_convolutions_and_the_transformer(name, tensors, count):
    model = MODELS[name].model()
    assert len([*model.parameters()]) == tensors
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
    rows = [{"name": "a", "count": 12345.6, "cap": None}, {"name": "bcd", "size": 0}]
    formats = {"name": str, "count": fixed(1), "cap": fixed(2), "other": str}
    columns = {field: (field.upper(), form) for field, form in formats.items()}
    table = as_table(rows, columns).splitlines()
    assert [line.split() for line in table] == [
        ["NAME", "COUNT", "CAP"],
        ["a", "12,345.6", "-"],
        ["bcd", "-", "-"],
    ]
    assert len({len(line) for line in table}) == 1
    assert table[1].startswith("   a  12,345.6  ")
    assert as_table(rows, columns, hidden=["name"]).split()[0] == "COUNT"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1000, "1,000 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (26214400, "25 MiB"),
        (1048584, "1,048,584 B"),
        (1 << 30, "1 GiB"),
        (1 << 40, "1,024 GiB"),
    ],
)
def test_sizes_are_shown_as_people_write_them(nbytes, text):
    assert human(nbytes) == text


def reported(rows, **options):
    options = Namespace(**({"benchmark": "all-to-all", "sizes": [8]} | options))
    return "\n".join(bench.report(rows, options, None))


def test_sizes_that_were_rounded_up_are_said_to_be():
    assert "rounded up" in reported([row_of("all_to_all", bytes=12)])
    assert "rounded up" not in reported([row_of("all_to_all", bytes=8)])
    assert "rounded up" not in reported([row_of("barrier", bytes=0)])


def test_an_emulated_network_is_named():
    assert "emulated network (rate=1gbit)" in reported([row_of(netlab="rate=1gbit")])
    assert "emulated" not in reported([row_of()])


def test_a_heading_has_the_network_of_the_largest_world():
    rows = [row_of(n=n, netlab="delay=1ms") for n in (8, 4)]
    alone = row_of(n=1)
    emulated = "tcp, emulated network (delay=1ms)"
    assert heading("x", [*rows, alone]) == f"x, 1 to 8 ranks, {emulated}"
    assert heading("x", rows[:1]) == f"x, 8 ranks, {emulated}"
    assert heading("x", [alone]) == "x, 1 rank, tcp"


def test_a_barrier_has_neither_size_nor_bandwidth_for_people():
    barrier = row_of("barrier", bytes=0)
    alone = reported([barrier], benchmark="barrier").splitlines()
    assert alone[0] == "barrier, 4 ranks, tcp, float32"
    assert [line.split() for line in alone[1:]] == [
        ["median", "us", "min", "us"],
        ["1,000,000.0", "500,000.0"],
    ]
    among = reported([row_of("reduce"), barrier], benchmark="collectives", sizes=[1024])
    assert among.splitlines()[-1].split() == [
        *("barrier", "-", "1,000,000.0", "500,000.0", "-", "-")
    ]


# ---- Collectives: what is measured, and what is right ----


def row_of(op="all_reduce", n=4, **fields):
    """A row as if it had been measured."""
    pg = SimpleNamespace(world_size=n, transport="tcp", netlab="")
    row = bench_collectives.result(pg, op, 10**9, [0.5, 1.0, 2.0])
    return row | {"bytes": 1024} | fields


@pytest.fixture
def once(monkeypatch):
    """No warm-up, and one repetition."""
    monkeypatch.setattr(bench_collectives, "WARM_UP", 0)
    monkeypatch.setattr(bench_collectives, "repetitions", lambda nbytes: 1)


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all_reduce", 1.5),
        *((op, 0.75) for op in ("reduce_scatter", "all_gather", "all_to_all")),
        *((op, 0.75) for op in ("gather", "scatter")),
        *((op, 1) for op in ("broadcast", "reduce", "send")),
    ],
)
def test_the_bandwidths_are_those_of_nccl_tests(op, factor):
    row = row_of(op, n=4)
    assert row == {
        "op": op,
        "world_size": 4,
        "transport": "tcp",
        "bytes": 1024,
        "median_us": 1e6,
        "min_us": 5e5,
        "algbw_GBps": 1.0,
        "busbw_GBps": factor,
    }
    assert list(row) == PLAIN
    assert row_of(op, n=1)["busbw_GBps"] == 0


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_collective_passes_its_check(n):
    ops = [op for op in COLLECTIVES if (op, n) != ("send", 1)]

    def body(pg):
        return [measure(pg, op, n * k)["bytes"] for op in ops for k in (1, 333)]

    assert run_groups(n, body) == [[4 * n, 4 * n * 333] * len(ops)] * n


def spoilt(monkeypatch, op, call):
    """Measure the op on 3 ranks, performed by `call`."""
    plain = COLLECTIVES[op]
    spoil = plain._replace(call=lambda pg, x: call(pg, x, plain.call))
    monkeypatch.setitem(COLLECTIVES, op, spoil)
    run_groups(3, lambda pg: measure(pg, op, 12))


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("op", sorted(COLLECTIVES.keys() - {"barrier"}))
def test_what_does_nothing_has_no_time(monkeypatch, op):
    with pytest.raises(MindDPError, match=f"{op} of 12 elements is wrong"):
        spoilt(monkeypatch, op, lambda pg, x, plain: None)


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "all_to_all", "broadcast"])
def test_nor_has_what_is_wrong_in_one_element_of_one_rank(monkeypatch, op):
    def last_is_off(pg, x, plain):
        plain(pg, x)
        x[-1] += pg.rank == 2

    with pytest.raises(MindDPError, match=r"rank 2: .* element 11 is"):
        spoilt(monkeypatch, op, last_is_off)


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "all_to_all"])
def test_nor_has_what_mixes_up_two_chunks(monkeypatch, op):
    def swapped(pg, x, plain):
        plain(pg, x)
        x[:8] = np.roll(x[:8], 4)

    with pytest.raises(MindDPError, match="is wrong"):
        spoilt(monkeypatch, op, swapped)


def test_arrays_are_rounded_up_to_whole_elements_and_equal_chunks():
    elements = bench_collectives.elements
    assert [elements("all_gather", 3, nbytes) for nbytes in (1, 4, 1001)] == [1, 1, 251]
    assert [elements("all_to_all", 3, nbytes) for nbytes in (1, 12, 13)] == [3, 3, 6]


def test_with_a_root_the_slowest_rank_counts_and_without_one_the_mean(monkeypatch):
    def take_turns(pg, trials, rounds):
        return [[9.0, 1.0 + pg.rank, 5.0 - pg.rank] for _ in trials]

    def body(pg):
        trials = {"": None, "stream": None}
        return [
            bench_collectives.time_of_each(pg, op, trials, 3)
            for op in ("all_reduce", "broadcast")
        ]

    monkeypatch.setattr(bench_collectives, "WARM_UP", 1)
    monkeypatch.setattr(bench_collectives, "take_turns", take_turns)
    for all_reduce, broadcast in run_groups(2, body):
        assert all_reduce == {"": [1.5, 4.5], "stream": [1.5, 4.5]}
        assert broadcast == {"": [2.0, 5.0], "stream": [2.0, 5.0]}


def measured_ops(benchmark, transport="tcp", n=2):
    options = Namespace(
        benchmark=benchmark, ops=["all_reduce"], sizes=[8, 4], compare=None
    )
    body = bench_collectives.collective_rows
    return run_groups(n, lambda pg: list(body(pg, options)), transport=transport)[0]


@pytest.mark.usefixtures("once")
def test_only_an_all_reduce_over_tcp_by_itself_has_a_stream():
    rows = measured_ops("all-reduce")
    assert [row["bytes"] for row in rows if row["stream_us"] > 0] == [8, 4]
    for rows in (
        measured_ops("collectives"),
        measured_ops("all-reduce", n=1),
    ):
        assert all(list(row) == PLAIN for row in rows)


@pytest.mark.usefixtures("once")
def test_in_shared_memory_an_array_that_must_be_copied_is_timed_besides(monkeypatch):
    monkeypatch.setattr("minddp.shm.SMALL_BYTES", 0)  # else nothing is shared
    reduced = []
    in_place = shm.all_reduce_in_place
    monkeypatch.setattr(
        "minddp.shm.all_reduce_in_place",
        lambda *arguments: (reduced.append(len(arguments[1])), in_place(*arguments)),
    )
    for row in measured_ops("all-reduce", "shm"):
        assert [*PLAIN, "plain_us", "plain_ratio"] == list(row)
        assert row["plain_us"] > 0
    assert set(reduced) == {1, 2}, "the group's arrays, and no others"


# ---- The limits: stream and model ----


@pytest.mark.parametrize("n", [2, 3])
def test_a_stream_moves_the_bytes_of_an_all_reduce_and_leaves_the_ring_in_step(n):
    def body(pg):
        x = np.full(100_001, pg.rank + 1, np.float32)
        pg.all_reduce(x)
        sent = pg.stats()["bytes_sent"]
        bench_limits.raw_stream(pg, x.size)()
        moved = pg.stats()["bytes_sent"] - sent
        pg.all_reduce(x)
        assert (x == (n * (n + 1) / 2) * n).all()
        return sent - moved

    headers = run_groups(n, body)
    assert max(headers) < 4096, "all but headers and the choice of a back end"


def test_a_stream_survives_short_reads_and_uneven_sides():
    def body(links):
        counts = [20, 0, 33]
        out = memoryview(bytes([links.rank]) * counts[links.rank])
        into = bytearray(counts[links.rank - 1])
        bench_limits.stream(links, out, memoryview(into), Deadline(5))
        return links.bytes_sent, links.bytes_received, set(into)

    assert run_ranks(3, body, capacity=5) == [
        (20, 33, {2}),
        (0, 20, {0}),
        (33, 0, set()),
    ]


def test_a_stream_that_stands_still_names_the_left_neighbour():
    def body(links):
        if links.rank == 0:
            into = memoryview(bytearray(8))
            bench_limits.stream(links, into[:0], into, Deadline(0.05))

    with pytest.raises(PeerTimeout, match=r"stood still for 0\.05 s") as late:
        run_ranks(3, body)
    assert late.value.culprit == 2


STEPS, BYTES = [6, 6, 6, 3], [1500, 39_321_600, 150, 98_304]


def test_the_fit_recovers_alpha_and_bandwidth():
    seconds = [s * 25e-6 + b / 1.25e9 for s, b in zip(STEPS, BYTES, strict=True)]
    model = bench_limits.fit(STEPS, BYTES, seconds)
    assert model.alpha == pytest.approx(25e-6, rel=1e-9)
    assert 1 / model.seconds_per_byte == pytest.approx(1.25e9, rel=1e-9)
    assert str(model) == "steps * 25.0 us + bytes / 1.25 GB/s"


def test_each_size_has_the_same_say_in_the_fit():
    """All are 10 % off, half of them up: neither end may decide alone."""
    steps, nbytes = [2] * 4, [100, 200, 10**8, 2 * 10**8]
    true = [s * 50e-6 + b / 1e9 for s, b in zip(steps, nbytes, strict=True)]
    off = [t * f for t, f in zip(true, (1.1, 0.9, 1.1, 0.9), strict=True)]
    model = bench_limits.fit(steps, nbytes, off)
    assert model.alpha == pytest.approx(50e-6, rel=0.03)
    assert 1 / model.seconds_per_byte == pytest.approx(1e9, rel=0.03)


def test_one_size_tells_nothing_and_no_number_is_negative():
    assert bench_limits.fit([2, 2], [100, 100], [1e-3, 1e-3]) is None
    faster = bench_limits.fit([2, 2], [100, 10**6], [1e-3, 0.9e-3])
    assert faster.seconds_per_byte == 0
    assert 0.45e-3 < faster.alpha < 0.5e-3
    free = bench_limits.fit([2, 2], [10**6, 10**7], [1e-3, 12e-3])
    assert free.alpha == 0
    assert 1e-9 < free.seconds_per_byte < 1.2e-9


def test_the_prediction_has_the_ring_s_own_steps_and_bytes():
    """Whatever algorithm ring.py takes for a size."""
    rows = []
    for nbytes in (1024, 100_000, 10**7):
        arrivals = bench_limits.steps_of_all_reduce(nbytes // 4, 0, 4)
        assert sum(arrivals) >= 1.5 * nbytes * 0.99
        us = len(arrivals) * 30.0 + sum(arrivals) / 2000
        rows.append(row_of(bytes=nbytes, median_us=us))
    model = bench_limits.predict(rows)
    assert model.alpha == pytest.approx(30e-6)
    assert all(row["predicted_us"] == round(row["median_us"], 1) for row in rows)


def test_the_worked_example_of_the_model_is_so():
    model = bench_limits.Model(25e-6, 1e-9)
    for nbytes, steps, us in ((1024, 3, 78), (25 * MIB, 6, 39_472), (100_000, 6, 300)):
        arrivals = bench_limits.steps_of_all_reduce(nbytes // 4, 0, 4)
        assert len(arrivals) == steps
        seconds = model.seconds(steps, sum(arrivals))
        assert seconds == pytest.approx(us / 1e6, rel=0.002)


@pytest.mark.parametrize("other", [{"transport": "shm"}, {"world_size": 1}])
def test_nothing_is_predicted_of_what_is_no_ring(other):
    rows = [row_of(bytes=nbytes) | other for nbytes in (1024, 2048)]
    assert bench_limits.predict(rows) is None
    assert "predicted_us" not in rows[0]


# ---- gloo ----


@pytest.mark.usefixtures("never_launched")
def test_without_pytorch_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(bench_gloo, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs PyTorch .*pip install torch"):
        bench.main(["all-reduce", "--compare", "gloo"])


@pytest.mark.usefixtures("never_launched")
def test_gloo_is_not_compared_on_a_network_that_it_does_not_have(monkeypatch):
    monkeypatch.setenv("MINDDP_NETLAB", "rate=1gbit")
    monkeypatch.setattr(bench_gloo, "find_spec", lambda name: "there")
    with pytest.raises(UsageError, match="Unset MINDDP_NETLAB"):
        bench.main(["all-reduce", "--compare", "gloo"])


@contextmanager
def stub_of_torch(monkeypatch, all_reduce):
    """Modules in PyTorch's place; gives the list of what was asked of them."""
    asked = []
    torch, dist = ModuleType("torch"), ModuleType("torch.distributed")
    torch.set_num_threads = lambda n: asked.append(f"{n} thread")
    torch.from_numpy = lambda x: x
    dist.FileStore = lambda path, n: f"{path} for {n}"
    dist.init_process_group = lambda kind, store, rank, world_size: asked.append(
        f"{kind}: {store}, {rank} of {world_size}"
    )
    dist.all_reduce = all_reduce
    dist.destroy_process_group = lambda: asked.append("destroyed")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", dist)
    yield asked


def compared(n=1):
    options = Namespace(
        benchmark="all-reduce",
        ops=["all_reduce"],
        sizes=[40],
        compare="gloo",
        store="file",
    )
    body = bench_collectives.collective_rows
    return run_groups(n, lambda pg: list(body(pg, options)))


@pytest.mark.usefixtures("once")
def test_gloo_is_timed_in_the_same_run_on_one_thread(monkeypatch):
    with stub_of_torch(monkeypatch, lambda x: None) as asked:
        (((row),),) = compared()
    assert row["gloo_us"] >= 0
    assert list(row) == [*PLAIN, "gloo_us", "gloo_ratio"]
    assert asked == ["1 thread", "gloo: file for 1, 0 of 1", "destroyed"]


@pytest.mark.usefixtures("once")
def test_a_wrong_result_of_gloo_has_no_time_either(monkeypatch):
    def wrong(x):
        x[3] += 1

    with stub_of_torch(monkeypatch, wrong), pytest.raises(MindDPError, match="wrong"):
        compared()


def test_a_ratio_above_one_says_that_the_other_takes_longer():
    assert bench_collectives.beside("gloo", 3e-4, 200.0) == {
        "gloo_us": 300.0,
        "gloo_ratio": 1.5,
    }
    assert bench_collectives.beside("stream", 1e-4, 200.0)["of_stream"] == 0.5


# ---- Pictures ----


@pytest.mark.usefixtures("never_launched")
def test_without_matplotlib_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(bench_plot, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'minddp\[plot\]'"):
        bench.main(["all-reduce", "--plot", "a.svg"])


def drawn(rows, tmp_path):
    file = tmp_path / "a.svg"
    bench_plot.plot(rows, str(file))
    return file.read_text()


def test_a_picture_says_what_it_shows(tmp_path):
    sizes = (1024, 1 << 20, 25 << 20)
    others = {"stream_us": 100.0, "predicted_us": 150.0, "gloo_us": 300.0}
    svg = drawn([row_of(bytes=size) | others for size in sizes], tmp_path)
    for text in (
        *(
            "all-reduce, 4 ranks, tcp<",
            "minddp, measured",
            "raw stream of as many bytes",
        ),
        *("predicted by alpha and B", "gloo (PyTorch)", "bus bandwidth, GB/s"),
        *("1 KiB", "1 MiB", "25 MiB", "array size"),
    ):
        assert text in svg
    assert "emulated" not in svg


def test_a_picture_has_no_curve_for_what_was_not_measured(tmp_path):
    svg = drawn([row_of(), row_of(bytes=2048, netlab="delay=1ms")][::-1], tmp_path)
    assert "emulated network (delay=1ms)" in svg
    assert "minddp, measured" in svg
    assert not re.search("gloo|raw stream|predicted", svg)


def test_several_collectives_have_a_curve_each_and_a_barrier_none(tmp_path):
    ops = ("all_gather", "reduce", "barrier")
    rows = [row_of(op, bytes=8 * (op != "barrier")) for op in ops]
    svg = drawn(rows, tmp_path)
    assert "collectives, 4 ranks" in svg
    assert [op in svg for op in ops] == [True, True, False]


def test_a_curve_is_the_bus_bandwidth():
    row = row_of(n=4, bytes=10**6, median_us=500.0)
    assert bench_plot.busbw(row | {"gloo_us": 250.0}, "gloo_us") == 6.0
    assert bench_plot.busbw(row | {"world_size": 1}, "median_us") == 0.0


# ---- A start ----


def test_a_start_is_cut_where_the_last_rank_has_imported(monkeypatch):
    """Seconds after the command: rank 1 imports last, rank 0 has its group last."""
    imported, met = [2.0, 5.0], [6.5, 6.0]

    def body(pg):
        r = pg.rank
        return bench_rendezvous.rendezvous_row(pg, 100, 100 + imported[r], 100 + met[r])

    for row in run_groups(2, body):
        times = [row[name] for name in ("import_s", "meet_s", "total_s")]
        assert times == [5.0, 1.5, 6.5]


def test_where_the_kernel_does_not_tell_what_is_resident_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_rendezvous, "STATUS", tmp_path / "status")
    (row,) = run_groups(1, lambda pg: bench_rendezvous.rendezvous_row(pg, 0, 1, 2))
    assert row["resident_mb"] is None
    assert 10 < row["peak_mb"] < 100_000
    (tmp_path / "status").write_text("VmHWM:\t    2000 kB\nVmRSS:\t    1000 kB\n")
    assert bench_rendezvous.resident_mb() == 1.024


def test_rank_0_tells_each_rank_of_all():
    def body(pg):
        return bench_rendezvous.rendezvous_row(pg, 0, 1, 2)["control_bytes_a_rank"]

    costs = [run_groups(n, body)[0] for n in (4, 8, 16)]
    assert all(a < b < 3 * a for a, b in pairwise(costs)), costs
