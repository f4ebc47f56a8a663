"""`minddp bench`: how long a collective takes, a training step, and a start.

    minddp bench all-reduce -n 2 --sizes 1KiB,1MiB,25MiB --json -
    minddp bench all-reduce -n 4 --compare gloo --plot ring.svg
    minddp bench collectives -n 4                  all of them at a few sizes
    minddp bench step -n 2 --model bigmlp --bucket-cap-mb 0.1,17
    minddp bench rendezvous --ranks 2,8,16

The command starts the ranks; rank 0 leaves rows in a file; the command shows them.

    bench.py --launch--> n ranks: worker --> bench_collectives | bench_step | ...
        ^                                            |
        '---- table, JSON, picture <---- rows -------'

The median of all rounds is reported beside the minimum: on a machine with other work
the minimum says what the code can do, the median what one gets. What is measured, and
how, is said in bench_clock.py (turns), bench_collectives.py (bandwidths),
bench_limits.py (the raw stream, the prediction), bench_gloo.py, bench_step.py and
bench_rendezvous.py.

Rule.  What cannot be done is refused before a rank is started: it may take minutes.

In PyTorch: param_bench, and nccl-tests' all_reduce_perf.

Left out: ranks on several machines, and those of MPI and NCCL: time your own script.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from minddp import netlab
from minddp.backends import check_lab_allows
from minddp.bench_clock import Row
from minddp.bench_collectives import COLLECTIVES, collective_rows
from minddp.bench_gloo import check_compare
from minddp.bench_limits import predict
from minddp.bench_plot import check_plot, plot
from minddp.bench_rendezvous import rendezvous_row
from minddp.bench_step import MODELS, WARM_UP_STEPS, step_rows, variants
from minddp.bench_table import (
    COLLECTIVE,
    PROFILE,
    RENDEZVOUS,
    STEP,
    UNITS,
    as_table,
    heading,
)
from minddp.buckets import BUCKET_CAP_MB
from minddp.environment import MOST_RANKS, THREAD_VARIABLES, chosen_transport
from minddp.errors import UsageError
from minddp.group import init_process_group
from minddp.launch import launch

OPS = {op.replace("_", "-"): [op] for op in COLLECTIVES}
OPS["collectives"] = list(COLLECTIVES)
SIZES = "1KiB,16KiB,256KiB,1MiB,4MiB,25MiB,100MiB"
FEW_SIZES = "1KiB,1MiB,25MiB"
RANKS = "2,8,16,32"
TRANSPORTS = ("tcp", "shm", "auto")  # of arrays on the host, started by `launch`


def main(argv: Sequence[str]) -> int:
    """The command line; starts the ranks of this module. Returns the exit code.

    Raises: UsageError before anything is started.
    """
    options = parse(argv)
    if options.benchmark == "step":  # NumPy reads them once, when a rank imports it
        os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(options.threads)))
    # Rank 0 leaves its rows in a file: what it prints would get the launcher's tag.
    with tempfile.TemporaryDirectory(prefix="minddp-bench-") as folder:
        for n in options.ranks:
            start = [folder, str(time.monotonic())]
            if exit_code := launch(["-m", "minddp.bench", *start, *argv], n):
                return exit_code
        rows = [json.loads(line) for line in rows_file(folder).read_text().splitlines()]
    show(rows, options)
    return 0


def worker(folder: str, started: float, argv: Sequence[str]) -> None:
    """One rank of the bench, with main's arguments; rank 0 adds rows to the file.

    started: when the command was, by time.monotonic.
    """
    imported = time.monotonic()
    options = parse(argv)
    options.store = str(Path(folder, "gloo"))
    with init_process_group(transport=options.transport) as pg:
        rows: Iterable[Row]
        if options.benchmark == "rendezvous":
            rows = [rendezvous_row(pg, started, imported, time.monotonic())]
        else:
            measure = step_rows if options.benchmark == "step" else collective_rows
            rows = list(measure(pg, options))
        if pg.rank == 0:
            with rows_file(folder).open("a") as file:
                file.write(as_json(rows))


def rows_file(folder: str) -> Path:
    return Path(folder, "rows.jsonl")


# ---- What comes out ----


def show(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """The rows as a table, as JSON and as a picture, as the options want them."""
    model = predict(rows) if options.benchmark == "all-reduce" else None
    if options.json == "-":
        print(as_json(rows), end="")
    else:
        for line in report(rows, options, model):
            print(line)
    if options.json not in (None, "-"):
        Path(options.json).write_text(as_json(rows))
    if options.plot:
        plot(rows, options.plot)


def as_json(rows: Iterable[Row]) -> str:
    """One object a line."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def report(
    rows: Sequence[Row], options: argparse.Namespace, model: object
) -> Iterable[str]:
    """The table, and what must be said about it."""
    title = heading(options.benchmark, rows)
    if options.benchmark == "step":
        yield title
        yield as_table(rows, STEP)
        for profile in [row["profile"] for row in rows if "profile" in row]:
            yield "\n" + as_table(profile, PROFILE)
        return
    if options.benchmark == "rendezvous":
        yield title
        yield as_table(rows, RENDEZVOUS)
        return
    yield f"{title}, float32"
    one_name = ("op",) if len({row["op"] for row in rows}) == 1 else ()
    yield as_table([without_size(row) for row in rows], COLLECTIVE, hidden=one_name)
    if model:
        yield f"predicted = {model}"
    if {row["bytes"] for row in rows} - {*options.sizes, 0}:
        yield "Sizes were rounded up to 4 bytes; all-to-all's to 4 for each rank."


def without_size(row: Row) -> Row:
    """The row of a barrier without size and bandwidth; all others as they are."""
    fields = ("bytes", "algbw_GBps", "busbw_GBps") if not row["bytes"] else ()
    return {field: value for field, value in row.items() if field not in fields}


# ---- The command line ----


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, with a transport; `ranks` and `sizes` or `variants` as lists.

    Raises: UsageError.
    """
    options = _parser().parse_args(argv)
    if options.benchmark == "rendezvous":
        options.ranks = parse_ranks(options.ranks)
    else:
        options.ranks = [options.nproc_per_node]
        if options.benchmark == "step":
            check_step(options)
        else:
            check_collectives(options)
    check_network(options)
    for name in ("json", "plot"):
        check_writable(f"--{name}", vars(options)[name])
    return options


def check_network(options: argparse.Namespace) -> None:
    """Settle the transport; what the ranks would find wrong in it is said here."""
    options.transport = chosen_transport(given=options.transport)
    if options.transport not in TRANSPORTS:
        raise UsageError(
            f"MINDDP_TRANSPORT={options.transport}: the ranks of `minddp bench` are "
            f"started on this machine for {', '.join(TRANSPORTS)}. Give one of them as "
            "--transport, or time a script of your own."
        )
    lab = netlab.from_environment()
    for n in options.ranks:
        if lab and n > 1:
            check_lab_allows(options.transport)
            lab.check(n)


def check_writable(option: str, file: str | None) -> None:
    """Raises: UsageError if a file of this name cannot be written; None and - can."""
    if file in (None, "-"):
        return
    path = Path(file)
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {file}: there is no folder {path.parent}")
    if path.is_dir():
        raise UsageError(f"{option} {file}: this is a folder; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {file}: it may not be written; name another file")


def check_step(options: argparse.Namespace) -> None:
    for name in ("batch", "threads", "steps"):
        if vars(options)[name] < 1:
            raise UsageError(f"--{name} {vars(options)[name]}: at least 1 is needed")
    options.variants = variants(
        options.nproc_per_node, options.ddp, options.bucket_cap_mb
    )


def check_collectives(options: argparse.Namespace) -> None:
    options.ops = list(OPS[options.benchmark])
    options.sizes = [parse_size(text) for text in options.sizes.split(",")]
    if options.nproc_per_node == 1 and "send" in options.ops:
        options.ops.remove("send")  # there is nobody to send to
        if not options.ops:
            raise UsageError("send needs a rank to send to: -n 2 or more")
    if options.plot:
        check_plot(options.plot)
    if options.compare:
        check_compare()


def parse_size(text: str) -> int:
    """The bytes in a text like "25MiB" or "1024". Raises: UsageError."""
    match = re.fullmatch(r"(\d+)\s*(B|KiB|MiB|GiB)?", text.strip())
    if not match or not int(match[1]):
        raise UsageError(f"{text!r} is no size; write 1024, 16KiB, 25MiB or 1GiB")
    return int(match[1]) * UNITS[match[2] or "B"]


def parse_ranks(text: str) -> list[int]:
    """The numbers in a text like "2,8". Raises: UsageError."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise UsageError(f"--ranks {text!r}: numbers of ranks from 1 on, as in {RANKS}")
    ranks = [int(number) for number in text.split(",")]
    if max(ranks) > MOST_RANKS:
        raise UsageError(f"--ranks {text}: a job has at most {MOST_RANKS:,}")
    return ranks


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minddp bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(plot=None, compare=None)
    kinds = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name in OPS:
        _add_collective(kinds, name)
    _add_step(kinds)
    _add_rendezvous(kinds)
    return parser


def _add_collective(kinds: Any, name: str) -> None:
    helps = {"collectives": "all of these at a few sizes", "barrier": "how long"}
    parser = kinds.add_parser(name, help=helps.get(name, "by size"))
    _add_ranks(parser)
    _add_common(parser)
    sizes = FEW_SIZES if name == "collectives" else SIZES
    if name == "barrier":  # nothing travels
        parser.set_defaults(sizes=sizes)
        return
    parser.add_argument("--sizes", default=sizes, help=f"default: {sizes}")
    text = "draw bus bandwidth over size: .png, .svg or .pdf"
    parser.add_argument("--plot", metavar="FILE", help=text)
    if name == "all-reduce":
        text = "time PyTorch's gloo too, in the same run"
        parser.add_argument("--compare", choices=["gloo"], help=text)


def _add_step(kinds: Any) -> None:
    step = kinds.add_parser("step", help="a training step, by size of buckets")
    _add_ranks(step)
    _add_common(step)
    step.add_argument("--model", choices=MODELS, default="mlp", help="default: mlp")
    for flag, default, text in (
        ("--batch", 64, "samples for each rank"),
        ("--threads", 1, "threads of each rank for matrix products"),
        ("--steps", 20, f"steps that count, after {WARM_UP_STEPS} that do not"),
    ):
        text += f"; default: {default}"
        step.add_argument(flag, type=int, default=default, metavar="N", help=text)
    text = "default: bucketed; one rank averages nothing"
    versions = ["bucketed", "naive"]
    step.add_argument("--ddp", choices=versions, default="bucketed", help=text)
    text = f"MiB, several as in 0.5,25; default: {BUCKET_CAP_MB:g}"
    step.add_argument("--bucket-cap-mb", metavar="MIB", help=text)
    text = "also print the time of each kind of op"
    step.add_argument("--profile", action="store_true", help=text)


def _add_rendezvous(kinds: Any) -> None:
    parser = kinds.add_parser("rendezvous", help="a start, by number of ranks")
    text = f"numbers of ranks, all on this machine; default: {RANKS}"
    flags = "--ranks", "--nproc-per-node", "-n"
    parser.add_argument(*flags, default=RANKS, metavar="N,N", help=text)
    _add_common(parser)


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    text = "ranks, all on this machine; default: 2"
    parser.add_argument(
        *("--nproc-per-node", "-n"), type=int, default=2, metavar="N", help=text
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    text = "what carries collectives; default: MINDDP_TRANSPORT, or tcp"
    parser.add_argument("--transport", choices=TRANSPORTS, help=text)
    parser.add_argument(
        "--json", metavar="FILE", help="one object a line; - prints them"
    )


if __name__ == "__main__":
    worker(sys.argv[1], float(sys.argv[2]), sys.argv[3:])
