"""The example models learn, on one process and on two; their text is on this disk."""

import re

import pytest
from commands import ROOT, run

MODELS = ROOT / "examples" / "models"
ONE = ("python",)
TWO = ("minddp", "run", "-n", "2")

pytestmark = pytest.mark.processes


def printed(launcher, name, *options):
    """What this model prints at the end of its training."""
    result = run([*launcher, str(MODELS / f"{name}.py"), *map(str, options)])
    assert result.returncode == 0, result.stderr
    return result.stdout


def number_after(text, words):
    (number,) = re.findall(rf"{words}\s+(-?[\d.]+)", text)
    return float(number)


def test_the_cnn_reads_98_of_100_digits():
    assert number_after(printed(TWO, "cnn"), "test accuracy") >= 0.98


def test_the_cnn_learns_in_one_process():
    text = printed(ONE, "cnn", "--epochs", 4)
    assert number_after(text, "test accuracy") > 0.85


def test_the_student_of_a_large_network_is_better_than_one_alone():
    text = printed(TWO, "distill")
    names = "teacher", "student alone", "student  "
    teacher, alone, student = (
        number_after(text, rf"{name}\s+[\d,]+ parameters, accuracy") for name in names
    )
    assert alone < student <= teacher


def test_a_distillation_runs_in_one_process():
    assert "student" in printed(ONE, "distill", "--epochs", 1)


@pytest.mark.parametrize("launcher", [ONE, TWO])
def test_the_u_net_finds_cells(launcher):
    text = printed(launcher, "unet", "--steps", 60)
    assert number_after(text, "with what is there:") > 0.5
    pictures = [line for line in text.splitlines() if " | " in line]
    assert len(pictures) == 16


@pytest.mark.parametrize("launcher", [ONE, TWO])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_language_model_learns_and_writes(name, launcher):
    text = printed(launcher, name, "--steps", 25)
    before = number_after(text, "steps 0 to 25, loss")
    after = number_after(text, "validation loss")
    assert before > 4.4, "no idea: about log 96"
    assert after < 3.8
    assert "def " in text


def test_a_language_model_resumes_from_its_checkpoint_and_takes_other_text(tmp_path):
    file, checkpoint = tmp_path / "text.txt", tmp_path / "checkpoint"
    file.write_text("abc " * 2000)
    options = "--data", file, "--checkpoint", checkpoint
    first = printed(TWO, "gpt", *options, "--steps", 15)
    reached = number_after(first, "validation loss")
    second = printed(ONE, "gpt", *options, "--steps", 20)
    assert number_after(second, "steps 15 to 20, loss") == reached
    assert number_after(second, "validation loss") <= reached < 3.0
