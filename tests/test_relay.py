"""What is shown of n ranks: whole lines, the first failure first, and a whole bar."""

import textwrap

import pytest

from minddp.relay import (
    ERR,
    HOLD_SECONDS,
    OUT,
    Ending,
    Lines,
    Stderr,
    exception_line,
    first_failure,
    fitted,
    repaint,
    report,
    tagged,
)

# ---- Lines ----

STREAM = b"one\n\ntwo\r\n 10%|#\r 20%|##\r 30%|###\nlast"
LINES = [b"one", b"", b"two", b" 30%|###", b"last"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_lines_do_not_depend_on_how_the_bytes_arrive(size):
    lines, got = Lines(), []
    for start in range(0, len(STREAM), size):
        got += lines.feed(STREAM[start : start + size])
    assert got + lines.finish() == LINES


def test_a_stream_that_ends_with_a_line_has_no_line_more():
    lines = Lines()
    assert (lines.feed(b"a\n"), lines.finish()) == ([b"a"], [])


def test_a_bar_is_a_draft_until_its_line_ends():
    lines, drafts = Lines(), []
    for data in b"loading", b"\r 10%", b"\r 20%", b"\r 3", b"0%", b"\r", b"\n":
        drafts.append((lines.feed(data), lines.draft))
    assert [draft for _, draft in drafts] == [
        *(b"", b" 10%", b" 20%", b" 3", b" 30%", b" 30%", b"")
    ]
    assert drafts[-1][0] == [b" 30%"]


def test_a_line_without_end_does_not_fill_the_memory():
    lines = Lines()
    got = [line for _ in range(40) for line in lines.feed(b"x" * (1 << 16))]
    assert [len(line) for line in got] == [17 << 16, 17 << 16]
    assert len(lines.finish()[0]) == 6 << 16  # and no byte was lost


def test_each_line_is_tagged_with_its_rank():
    assert tagged(12, [b"a", b""]) == b"[rank 12] a\n[rank 12] \n"


# ---- Tracebacks ----

DIVISION = b"""\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    1/0
ZeroDivisionError: division by zero""".split(b"\n")

LOST = b"""\
Traceback (most recent call last):
  File "net.py", line 9, in recv
ConnectionResetError: [Errno 104] Connection reset by peer

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 4, in <module>
minddp.errors.PeerLost: rank 0 lost rank 1 during all_reduce #17:
          connection closed after 8,192 of 65,536 bytes.
unindented words of the same message""".split(b"\n")


def test_a_traceback_is_kept_and_other_lines_are_shown_at_once():
    stderr = Stderr()
    assert stderr.feed([b"warning", *DIVISION], now=10.0) == [b"warning"]
    assert stderr.release() == DIVISION
    assert stderr.feed([b"more"], now=10.1) == [b"more"]


def test_a_traceback_that_was_only_logged_is_shown_after_two_seconds():
    stderr = Stderr()
    stderr.feed(DIVISION, now=10.0)
    stderr.feed([b"going on"], now=11.5)
    assert stderr.overdue(now=11.9) == []
    assert stderr.waits(now=11.5) == pytest.approx(0.5)
    assert stderr.overdue(now=10.0 + HOLD_SECONDS) == [*DIVISION, b"going on"]
    assert stderr.overdue(now=99.0) == [] and stderr.waits(now=99.0) is None


def test_the_exception_is_the_first_line_of_the_last_message():
    assert exception_line(DIVISION) == "ZeroDivisionError: division by zero"
    assert exception_line(LOST) == "PeerLost: rank 0 lost rank 1 during all_reduce #17:"
    assert exception_line([b"just words"]) == ""


# ---- Who failed first? ----


def ended(rank: int, returncode: int, lines=(), stopped=False) -> Ending:
    stderr = Stderr()
    stderr.feed(lines, now=0.0)
    return Ending(rank, returncode, stderr, stopped)


def test_a_consequence_that_ends_sooner_is_not_the_first_failure():
    endings = [ended(0, 1, LOST), ended(2, 1, LOST), ended(1, 1, DIVISION)]
    assert first_failure(endings).rank == 1


def test_of_two_causes_the_earlier_is_the_first_failure():
    endings = [ended(3, 0), ended(2, -9), ended(1, 1, DIVISION)]
    assert first_failure(endings).rank == 2


def test_if_all_failures_are_consequences_the_earliest_is_shown():
    assert first_failure([ended(2, 1, LOST), ended(0, 1, LOST)]).rank == 2


def test_whoever_was_stopped_has_not_failed():
    assert first_failure([ended(0, -15, stopped=True), ended(1, 0)]) is None


def test_the_exit_code_of_a_killed_rank_is_that_of_a_shell():
    assert [ended(0, code).exit_code for code in (0, 3, -9)] == [0, 3, 137]


def test_the_report_shows_the_cause_first_and_one_line_for_each_other_rank():
    endings = [
        *(ended(0, 1, LOST), ended(1, 1, DIVISION), ended(3, 4, [b"no data"])),
        *(ended(4, 0), ended(2, -15, stopped=True)),
    ]
    assert report(endings).decode() == textwrap.dedent(
        """\
        minddp run: rank 1 failed first, exit code 1 (ZeroDivisionError: division by zero). Its traceback:
        [rank 1] Traceback (most recent call last):
        [rank 1]   File "train.py", line 3, in <module>
        [rank 1]     1/0
        [rank 1] ZeroDivisionError: division by zero
        minddp run: rank 0 failed as a consequence, exit code 1 (PeerLost: rank 0 lost rank 1 during all_reduce #17).
        minddp run: rank 2 was still running and was stopped.
        minddp run: rank 3 failed as well, exit code 4.
        """  # noqa: E501
    )


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        (ended(1, -9), "killed by SIGKILL. It left no word on stderr."),
        (ended(1, -64), "killed by SIGRTMAX. It left no word on stderr."),
        (
            ended(1, 3, [b"no data", b""]),
            "exit code 3. Its last line on stderr: no data",
        ),
    ],
)
def test_a_failure_without_traceback_is_reported_with_what_there_is(ending, text):
    assert report([ending]).decode() == f"minddp run: rank 1 failed first, {text}\n"


def test_a_rank_that_left_early_is_named_if_the_others_lost_it():
    text = report([ended(1, 0), ended(0, 1, LOST)]).decode()
    assert text.endswith("minddp run: rank 1 had ended with exit code 0.\n")


def test_a_job_without_failure_is_not_reported():
    assert report([ended(0, 0), ended(1, 0)]) == b""


# ---- The bar at the foot of the terminal ----


def screen(pieces) -> list[str]:
    """The lines of a terminal that knows newline, return and "erase to the right"."""
    lines, column = [""], 0
    text = b"".join(data for _, data in pieces).decode()
    for char in text.replace("\x1b[K", "\x0b"):
        if char in "\r\n":
            column = 0
            lines += [""] if char == "\n" else []
        elif char == "\x0b":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column] + char + lines[-1][column + 1 :]
            column += 1
    return lines


def test_lines_are_printed_above_the_bar_and_leave_no_rest_of_it():
    pieces = [
        *repaint([], b"", b"50%|#####     |"),
        *repaint([(OUT, b"hi\n")], b"50%|#####     |", b"50%|#####     |"),
        *repaint([], b"50%|#####     |", b"60%|######|"),
        *repaint([(ERR, b"ho\n")], b"60%|######|", b"70%"),
    ]
    assert screen(pieces) == ["hi", "ho", "70%"]
    assert screen([*pieces, *repaint([(ERR, b"done\n")], b"70%", b"")]) == [
        *("hi", "ho", "done", "")
    ]


def test_a_bar_is_cut_so_that_it_does_not_wrap():
    assert fitted("[rank 0] ███".encode(), 12).decode() == "[rank 0] ██"
