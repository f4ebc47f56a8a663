"""Tables of benchmarks: what people see of the rows that `--json` writes.

    all-reduce, 2 ranks, tcp, float32
       size   median us   busbw GB/s            {"bytes": 1024, "median_us": 55.0, ...}
      1 KiB        55.0        0.019     <---
     25 MiB    22,310.9        1.175

A column has the name of a field, a heading with its unit, and a format. What some rows
lack is a "-"; what all of them lack, as the time of a raw stream where there is none,
has no column.

Rule.  The heading of a table, and of a picture, says what carried the bytes, and so
       whether the network was emulated (netlab.py).

In PyTorch: torch.utils.benchmark.Compare.

Left out: colours; units that change from row to row, except of sizes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minddp.bench_clock import Row

Column = tuple[str, Callable[[Any], str]]  # heading, format

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def human(nbytes: int) -> str:
    """1 KiB, 1.5 MiB, 1,000 B: the largest unit in which two decimals are exact."""
    for unit, size in reversed(UNITS.items()):
        if nbytes >= size and nbytes * 100 % size == 0:
            return f"{nbytes / size:,.10g} {unit}"
    return f"{nbytes:,} B"


def fixed(decimals: int) -> Callable[[float], str]:
    """12,345.7, with so many decimals."""
    return lambda value: f"{value:,.{decimals}f}"


COLLECTIVE: dict[str, Column] = {
    "op": ("op", str),
    "bytes": ("size", human),
    "median_us": ("median us", fixed(1)),
    "min_us": ("min us", fixed(1)),
    "algbw_GBps": ("algbw GB/s", fixed(3)),
    "busbw_GBps": ("busbw GB/s", fixed(3)),
    "predicted_us": ("predicted us", fixed(1)),
    "plain_us": ("plain us", fixed(1)),
    "stream_us": ("stream us", fixed(1)),
    "of_stream": ("of stream", fixed(2)),
    "gloo_us": ("gloo us", fixed(1)),
    "gloo_ratio": ("gloo/ours", fixed(2)),
}
STEP: dict[str, Column] = {
    "model": ("model", str),
    "bucket_cap_mb": ("bucket MiB", "{:g}".format),
    "median_ms": ("median ms", fixed(3)),
    "min_ms": ("min ms", fixed(3)),
    "graph_mb": ("graph MB", fixed(1)),
    "peak_mb": ("peak MB", fixed(1)),
}
PROFILE: dict[str, Column] = {
    "op": ("op", str),
    "forward_ms": ("forward ms", fixed(3)),
    "backward_ms": ("backward ms", fixed(3)),
}
RENDEZVOUS: dict[str, Column] = {
    "world_size": ("ranks", str),
    "import_s": ("import s", fixed(2)),
    "meet_s": ("meet s", fixed(3)),
    "total_s": ("total s", fixed(2)),
    "resident_mb": ("resident MB", fixed(1)),
    "peak_mb": ("peak MB", fixed(1)),
    "control_bytes": ("rank 0 sends B", fixed(0)),
    "control_bytes_a_rank": ("B a rank", fixed(0)),
}


def as_table(
    rows: Sequence[Row], columns: Mapping[str, Column], hidden: Sequence[str] = ()
) -> str:
    """The rows under headings, aligned to the right, without the hidden fields."""
    shown = {
        field: column
        for field, column in columns.items()
        if field not in hidden and any(field in row for row in rows)
    }
    lines = [[heading for heading, _ in shown.values()]]
    for row in rows:
        cells = [(row.get(field), form) for field, (_, form) in shown.items()]
        lines.append(["-" if value is None else form(value) for value, form in cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        for line in lines
    )


def heading(what: str, rows: Sequence[Row]) -> str:
    """What these rows are of: "step, 2 ranks, tcp, emulated network (delay=2ms)".

    Of several worlds the largest says what carries bytes; a world of one has nothing.
    """
    row = max(rows, key=lambda row: row["world_size"])
    fewest, most = min(row["world_size"] for row in rows), row["world_size"]
    ranks = f"{most} ranks" if most > 1 else "1 rank"
    ranks = f"{fewest} to {ranks}" if fewest < most else ranks
    network = f", emulated network ({row['netlab']})" if "netlab" in row else ""
    return f"{what}, {ranks}, {row['transport']}{network}"
