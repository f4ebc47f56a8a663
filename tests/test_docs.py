"""What the documentation says is so: names resolve, commands print what it shows."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, run

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
CHAPTERS = [page for page in PAGES if page.name[0].isdigit()]
PARTS = [
    *("Question", "Picture", "Read", "Run", "Break it", "What the real ones do"),
    *("Left out", "Exercises"),
]

sys.path.insert(0, str(ROOT / "tools"))
import sizes  # noqa: E402

SOURCES = ROOT / "minddp", ROOT


def text_of(page):
    return page.read_text()


def references(page):
    """What a page names as `file.py:name`."""
    return re.findall(r"`([\w/]+\.py):([\w.]+)`", text_of(page))


def defined_in(path):
    """Functions, classes, methods and constants of a file, with dotted names."""
    names = set()

    def visit(body, prefix):
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign):
                names.update(t.id for t in node.targets if isinstance(t, ast.Name))

    visit(ast.parse(path.read_text()).body, "")
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_on_a_page_resolves(page):
    for file, name in references(page):
        path = next((p / file for p in SOURCES if (p / file).exists()), None)
        assert path, f"{page.name} names {file}"
        assert name in defined_in(path), f"{page.name} names {file}:{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_of_ours_resolves(page):
    for target in re.findall(r"\]\(([^)#]+)\)", text_of(page)):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.name)
def test_a_chapter_has_the_form_of_the_others(page):
    headings = re.findall(r"^## (.+)$", text_of(page), re.M)
    assert headings == PARTS
    words = len(re.sub(r"```.*?```", "", text_of(page), flags=re.S).split())
    assert words <= 1500, f"{words} words"


def commands():
    """(page, command, the lines it shows) for every `$` in a console block."""
    for page in PAGES:
        for block in re.findall(r"```console\n(.*?)```", text_of(page), re.S):
            for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
                command, _, shown = part.partition("\n")
                yield page.name, command, shown.splitlines()


def as_pattern(line):
    """A shown line, in which ... stands for anything."""
    return ".*".join(re.escape(piece) for piece in line.rstrip().split("..."))


def check(shown, printed):
    """All shown lines were printed, and nothing else unless a line says `...`.

    Lines of different ranks may come in any order.
    """
    left = [line.rstrip() for line in printed]
    for line in shown:
        if line.strip() == "...":
            continue
        found = [text for text in left if re.fullmatch(as_pattern(line), text)]
        assert found, f"not printed: {line}\nbut: {printed}"
        left.remove(found[0])
    assert "..." in shown or not left, f"not shown: {left}"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("page", "command", "shown"),
    [pytest.param(*c, id=f"{c[0]}: {c[1][:40]}") for c in commands()],
)
def test_a_command_prints_what_the_page_shows(page, command, shown):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    check(shown, result.stdout.splitlines())


def test_the_readmes_table_of_sizes_is_up_to_date():
    readme = text_of(ROOT / "README.md")
    assert sizes.table() in readme, "run: python tools/sizes.py --update"


def test_sizes_count_code_and_prose_apart():
    source = (
        '"""Doc.\n\nMore.\n"""\n\nx = 1  # why\n# alone\n\n\ndef f():\n    """D."""\n'
    )
    assert sizes.count(source) == (2, 5), "3 lines of module docstring, 1 + 1 others"


@pytest.mark.processes
@pytest.mark.parametrize("chapter", ["1", "2", "3", "4"])
def test_the_exercises_can_be_solved(chapter, tmp_path):
    """With our answers; without any they are skipped. The reader's stay out of it."""
    for name in ("conftest.py", f"test_chapter_{chapter}.py"):
        shutil.copy(ROOT / "exercises" / name, tmp_path)
    for answers, outcome in ((None, "skipped"), ("answers.py", "passed")):
        if answers:
            shutil.copy(ROOT / "tests" / "answers" / answers, tmp_path)
        result = run([sys.executable, "-m", "pytest", "-q", "."], cwd=tmp_path)
        assert result.returncode == 0, result.stdout
        assert re.search(rf"^\d+ {outcome} in", result.stdout, re.M), result.stdout


@pytest.mark.processes
def test_the_twenty_lines_of_the_readme_train(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", text_of(ROOT / "README.md"), re.S)
    (tmp_path / "train.py").write_text(program)
    result = run(["minddp", "run", "-n", "2", str(tmp_path / "train.py")])
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"\[rank 0\] loss 0\.0\d+", result.stdout.splitlines()[-1])
