"""A picture of a benchmark: bus bandwidth over size.

    GB/s |            . . . . . .   the raw stream: as many bytes, and nothing else
         |         .    o--o---o    measured
         |       .  o-/ - - - - -   predicted, by alpha and B
         |   . o/
         +-----------------------
          1 KiB   1 MiB   100 MiB   array size, in powers of two

On the left every collective is slow, as latency is all of it; on the right it is as
fast as what carries it. Where the curve bends, bucket sizes are chosen.

Rule.  Whoever cannot draw says so before anything is measured (`check_plot`).

In PyTorch: nothing; nccl-tests prints a table.

Left out: windows. A file is written, so it works without a screen.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from minddp.bench_clock import Row
from minddp.bench_collectives import COLLECTIVES
from minddp.bench_table import heading, human
from minddp.errors import UsageError

SUFFIXES = (".png", ".svg", ".pdf")

# What a row may know, how its curve looks, and what the legend calls it.
CURVES = (
    (
        "stream_us",
        {"color": "#7f7f7f", "ls": ":", "lw": 2},
        "raw stream of as many bytes",
    ),
    ("predicted_us", {"color": "#d6852b", "ls": "--"}, "predicted by alpha and B"),
    ("plain_us", {"color": "#1f5fa8", "ls": "--"}, "minddp, copied in and out"),
    ("gloo_us", {"color": "#6a51a3", "marker": "s"}, "gloo (PyTorch)"),
    ("median_us", {"color": "#1f5fa8", "marker": "o", "lw": 2.2}, "minddp, measured"),
)


def check_plot(file: str) -> None:
    """Raises: UsageError if there is nothing to draw with, or no such kind of file."""
    if Path(file).suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {file}: the name must end in {', '.join(SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'minddp[plot]'")


def plot(rows: Sequence[Row], file: str) -> None:
    """Draw these rows, of one op or of several, into a file."""
    matplotlib = import_module("matplotlib")
    figures = import_module("matplotlib.figure")
    rows = [row for row in rows if row["bytes"]]  # a barrier has no bandwidth
    ops = list(dict.fromkeys(row["op"] for row in rows))
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 10}):
        figure = figures.Figure((8, 5), layout="constrained")
        axes = figure.add_subplot()
        if len(ops) == 1:
            for field, style, label in CURVES:
                draw(axes, [row for row in rows if field in row], field, label, style)
        else:
            for op in ops:
                of_op = [row for row in rows if row["op"] == op]
                draw(axes, of_op, "median_us", op, {"marker": "o"})
        dress(axes, rows, ops)
        figure.savefig(file, dpi=150)


def draw(
    axes: Any, rows: Sequence[Row], field: str, label: str, style: dict[str, Any]
) -> None:
    """One curve, if there are rows for it."""
    if rows:
        sizes = [row["bytes"] for row in rows]
        axes.plot(sizes, [busbw(row, field) for row in rows], label=label, **style)


def busbw(row: Row, field: str) -> float:
    """GB/s on a link, if the row's op had taken as long as this field says."""
    n = row["world_size"]
    factor = COLLECTIVES[row["op"]].factor(n) if n > 1 else 0.0
    return float(row["bytes"] / row[field] / 1e3 * factor)


def dress(axes: Any, rows: Sequence[Row], ops: Sequence[str]) -> None:
    """Title, axes and legend."""
    what = ops[0].replace("_", "-") if len(ops) == 1 else "collectives"
    axes.set_title(heading(what, rows), loc="left", weight="bold")
    axes.set_xlabel("array size, float32")
    axes.set_ylabel("bus bandwidth, GB/s (median)")
    axes.set_xscale("log", base=2)
    sizes = sorted({row["bytes"] for row in rows})
    axes.set_xticks(sizes, [human(size) for size in sizes], rotation=30, minor=False)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
