"""Every example runs by the command in its docstring and prints what it promises."""

import ast
import importlib
import shlex
from pathlib import Path

import pytest
from commands import ROOT, run

EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
TORCH_STYLE = sorted((ROOT / "examples" / "torch_style").glob("*.py"))


def indented_blocks(docstring):
    """The blocks of lines that stand four spaces in, without these spaces."""
    blocks, block = [], []
    for line in [*docstring.splitlines(), ""]:
        if line.startswith("    "):
            block.append(line[4:])
        elif block:
            blocks.append(block)
            block = []
    return blocks


@pytest.mark.processes
@pytest.mark.parametrize("example", EXAMPLES + TORCH_STYLE, ids=lambda path: path.stem)
def test_an_example_prints_what_its_docstring_says(example, tmp_path):
    (command,), promised = indented_blocks(
        ast.get_docstring(ast.parse(example.read_text()))
    )
    assert example.name in command
    result = run(shlex.split(command.replace("/tmp/", f"{tmp_path}/")))
    assert result.returncode == 0, result.stderr
    printed = result.stdout.splitlines()
    assert sorted(promised) == sorted(printed[-len(promised) :])


@pytest.mark.processes
@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_demo_finds_all_as_it_should_be(n):
    result = run(["minddp", "run", "-n", str(n), "examples/demo.py"])
    assert result.returncode == 0, result.stderr
    assert "All as it should be." in result.stdout
    hashes = {
        line.split()[-1]
        for line in result.stdout.splitlines()
        if "parameters of rank" in line
    }
    assert len(hashes) == 1
    assert result.stderr == "", "no progress bar without a terminal"


@pytest.mark.processes
def test_the_demo_notices_a_replica_that_went_astray(tmp_path):
    """A demo that always says yes would prove nothing."""
    text = (ROOT / "examples" / "demo.py").read_text()
    start = "            optimizer.step()\n"
    assert start in text
    astray = tmp_path / "demo.py"
    drift = "            next(model.parameters()).data[0, 0] += 1e-7 * rank\n"
    astray.write_text(text.replace(start, start + drift))
    result = run(["minddp", "run", "-n", "2", str(astray)])
    assert result.returncode == 1
    assert "SOMETHING IS WRONG." in result.stdout


def test_examples_are_short_and_numbered_without_a_gap():
    assert [path.name[:2] for path in EXAMPLES] == [
        f"{i:02}" for i in range(1, len(EXAMPLES) + 1)
    ]
    for path in EXAMPLES:
        assert 30 <= len(Path(path).read_text().splitlines()) <= 80, path.name


def test_a_chart_has_every_measurement(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    charts = importlib.import_module("charts")
    results = {n: {"hook": {"none": 8.0 * n, "fp16": 4.0 * n}} for n in (2, 3)}
    charts.show(results)
    assert capsys.readouterr().out.splitlines() == [
        "hook                  2 ranks  3 ranks",
        f"  none                   16.0     24.0 {'#' * 40}",
        f"  fp16                    8.0     12.0 {'#' * 20}",
    ]
    pytest.importorskip("matplotlib")
    charts.draw(results, "emulated", tmp_path / "chart.svg")
    picture = (tmp_path / "chart.svg").read_text()
    for text in ("emulated", "hook", "none", "fp16", "2 ranks", "3 ranks"):
        assert f">{text}<" in picture


@pytest.mark.processes
def test_a_snapshot_is_found_and_only_what_is_missing_is_trained(tmp_path):
    def epochs(n):
        script, file = "examples/torch_style/snapshots.py", str(tmp_path / "snapshot")
        result = run(["minddp", "run", "-n", "2", script, str(n), "--snapshot", file])
        assert result.returncode == 0, result.stderr
        return [line.split(":")[0] for line in result.stdout.splitlines()]

    assert epochs(2)[:2] == ["[rank 0] epoch 0", "[rank 0] epoch 1"]
    assert epochs(3)[:2] == ["[rank 0] resuming after 2 epochs", "[rank 0] epoch 2"]
