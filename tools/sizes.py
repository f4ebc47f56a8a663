"""Code and prose lines of every module, counted by tokens.

    python tools/sizes.py               print the table
    python tools/sizes.py --update      write it into README.md, between its two marks

A line counts as code if a token of code is on it; docstrings and comments are prose, so
explaining a thing costs nothing.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
START, END = "<!-- sizes -->", "<!-- end of sizes -->"

# The order in which to read.
PARTS = {
    "What teaches DDP": [
        *("frame", "handshake", "net", "lobby", "verdict", "control", "rendezvous"),
        *(
            "combine",
            "ring",
            "work",
            "payload",
            "group",
            "replicas",
            "buckets",
            "comm_hooks",
            "join",
        ),
        *("reducer", "ddp"),
    ],
    "More of DDP": [
        *(
            "rooted",
            "shm",
            "hierarchy",
            "backends",
            "backends/tcp",
            "backends/memory",
            "backends/nccl",
            "backends/mpi",
            "mailbox",
            "netlab",
            "distributed",
            "bfloat16",
            "powersgd",
            "local_sgd",
        ),
        *("nonfinite", "ddp_logger", "sync_batch_norm", "amp"),
    ],
    "The engine": [
        *("device", "tensor_ops", "neural_ops", "spatial_ops", "autograd"),
        *("functional", "creation", "torch_names", "module", "init", "nn", "optim"),
        *("lr_scheduler", "data", "checkpoint"),
    ],
    "Around them": [
        *("errors", "environment", "launch", "supervise", "relay", "progress"),
        *("multiprocessing", "testing", "bench", "bench_clock", "bench_collectives"),
        *("bench_limits", "bench_gloo", "bench_step", "bench_rendezvous"),
        *("bench_table", "bench_plot", "__init__", "__main__"),
    ],
}
NOISE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT),
    *(tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER),
}


def count(source: str) -> tuple[int, int]:
    """(code, prose) lines of a module; blank lines are neither."""
    doc = docstring_lines(source)
    code, comments = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        lines = set(range(token.start[0], token.end[0] + 1))
        if token.type == tokenize.COMMENT:
            comments |= lines
        elif token.type not in NOISE and not lines <= doc:
            code |= lines
    text = source.splitlines()
    prose = {line for line in doc if text[line - 1].strip()} | (comments - code)
    return len(code), len(prose)


def docstring_lines(source: str) -> set[int]:
    lines: set[int] = set()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines |= set(range(text.lineno, text.end_lineno + 1))
    return lines


def first_line(source: str) -> str:
    doc = ast.get_docstring(ast.parse(source)) or ""
    return doc.split("\n")[0].rstrip(".").replace("|", r"\|")


def table() -> str:
    """The table as Markdown."""
    rows = ["| module | code | prose | what it is |", "|---|---:|---:|---|"]
    for part, names in PARTS.items():
        counted = {}
        for name in names:
            path = ROOT / "minddp" / name
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            source = path.read_text()
            label = str(path.relative_to(ROOT / "minddp"))
            counted[label] = (*count(source), first_line(source))
        code, prose = (sum(row[i] for row in counted.values()) for i in (0, 1))
        rows.append(f"| **{part}** | **{code:,}** | **{prose:,}** | |")
        for name, (code, prose, what) in counted.items():
            rows.append(f"| `{name}` | {code} | {prose} | {what} |")
    return "\n".join(rows)


def update(readme: Path) -> None:
    before, _, rest = readme.read_text().partition(START)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{START}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--update"]:
        update(ROOT / "README.md")
    else:
        print(table())
