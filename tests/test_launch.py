"""`minddp run`: what each rank is told, what is shown of it, and how a job ends."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest
from test_relay import screen

from minddp.__main__ import main as command_line
from minddp.errors import UsageError
from minddp.launch import Layout, common_environment, main, rank_environments
from minddp.progress import COLUMNS, progress
from minddp.relay import OUT

# ---- What each rank is told (pure) ----


def environments(layout: Layout, env=(), cores=8, rank_0=()):
    common = common_environment(dict(env), layout, cores)
    return rank_environments(common, layout, dict(rank_0))


def test_the_second_machine_has_the_second_half_of_the_ranks():
    told = environments(Layout(nproc=2, nnodes=2, node_rank=1))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [[env[name] for name in names] for env in told] == [
        ["2", "4", "0", "2"],
        ["3", "4", "1", "2"],
    ]


def test_the_cores_are_divided_among_the_ranks_but_never_below_one():
    assert environments(Layout(4), cores=8)[3]["OMP_NUM_THREADS"] == "2"
    assert environments(Layout(3), cores=8)[0]["MKL_NUM_THREADS"] == "2"
    assert environments(Layout(4), cores=2)[0]["OPENBLAS_NUM_THREADS"] == "1"


def test_a_number_of_threads_that_the_user_chose_is_kept():
    (told,) = environments(Layout(1), {"OMP_NUM_THREADS": "5"})
    assert (told["OMP_NUM_THREADS"], told["MKL_NUM_THREADS"]) == ("5", "8")


def test_only_rank_0_is_told_of_the_listening_socket():
    for layout, expected in (Layout(2), ["7", None]), (Layout(2, 2, 1), [None, None]):
        told = environments(layout, rank_0={"MINDDP_LISTEN_FD": "7"})
        assert [env.get("MINDDP_LISTEN_FD") for env in told] == expected


def test_what_an_outer_launcher_told_its_own_rank_is_not_passed_on():
    outer = {"MINDDP_LISTEN_FD": "9", "MINDDP_PROGRESS": "1", "RANK": "6", "HOME": "/"}
    told = environments(Layout(2), outer)
    assert "MINDDP_LISTEN_FD" not in told[1] and "MINDDP_PROGRESS" not in told[1]
    assert (told[1]["RANK"], told[1]["HOME"]) == ("1", "/")


# ---- Mistakes in the call ----


@pytest.mark.parametrize(
    ("argv", "in_text"),
    [
        (["-n", "2", "nosuch.py"], "nosuch.py"),
        (["-n", "0", __file__], "at least 1"),
        (["--nnodes", "0", __file__], "--nnodes 0"),
        (["--nnodes", "2", __file__], "--node-rank is missing"),
        (["--nnodes", "2", "--node-rank", "2", __file__], "2 is out of range"),
        (["--nnodes", "2", "--node-rank", "1", __file__], "token_hex(32)"),
        (["--nnodes", "2", "--standalone", __file__], "--standalone"),
        (["--master-port", "70000", __file__], "70000"),
        (["--master-addr", "", __file__], "--master-addr is empty"),
        (["--max-restarts", "-1", __file__], "--max-restarts"),
    ],
)
def test_a_mistake_in_the_call_is_explained_before_anything_starts(
    argv, in_text, monkeypatch
):
    monkeypatch.delenv("MINDDP_TOKEN", raising=False)
    monkeypatch.setattr("minddp.launch.supervise", None)
    with pytest.raises(UsageError) as caught:
        main(argv)
    assert in_text in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        ["--nproc-per-node", "3", "--max-restarts", "2"],
        ["--nproc_per_node=3", "--max_restarts=2", "--standalone"],
        ["-n", "3", "--max-restarts=2"],
        ["-n3", "--max_restarts", "2"],
    ],
)
def test_flags_are_understood_in_torchruns_spelling_too(flags, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "minddp.launch.launch", lambda *args, **how: calls.append((args, how)) or 0
    )
    assert main([*flags, __file__, "-n", "7", "--nproc_per_node=8", "--", "x"]) == 0
    ((program, nproc), how) = calls[0]
    assert (nproc, how["max_restarts"]) == (3, 2)
    assert program == [__file__, "-n", "7", "--nproc_per_node=8", "--", "x"]


@pytest.mark.parametrize(
    ("argv", "code", "in_text"),
    [
        ([], 0, "minddp run -n 2"),
        (["--version"], 0, "minddp "),
        (["walk"], 2, "no command 'walk'"),
        (["run", "nosuch.py"], 2, "nosuch.py"),
    ],
)
def test_the_command_line_answers_without_a_traceback(argv, code, in_text, capsys):
    assert command_line(argv) == code
    out, err = capsys.readouterr()
    assert in_text in (err if code else out)


def test_an_interrupt_is_no_traceback(monkeypatch):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("minddp.launch.main", interrupted)
    assert command_line(["run"]) == 130


# ---- Progress bars ----


def test_without_a_terminal_there_is_no_bar(monkeypatch):
    monkeypatch.delenv("MINDDP_PROGRESS", raising=False)
    items = [1, 2]
    assert progress(items) is items


def test_a_rank_whose_launcher_has_a_terminal_draws_a_bar_of_fixed_width(
    monkeypatch, capsys
):
    monkeypatch.setenv("MINDDP_PROGRESS", "1")
    assert progress([], show=False) == []
    assert list(progress([1, 2], desc="epoch 1")) == [1, 2]
    drafts = capsys.readouterr().err.split("\r")
    shown = [draft for draft in drafts if draft.strip()]
    assert shown and all(draft.startswith("epoch 1: ") for draft in shown)
    assert all(len(draft) <= COLUMNS for draft in drafts)
    assert not drafts[-1].strip(), "it is wiped off at the end"


def test_without_tqdm_there_is_no_bar_and_no_error(monkeypatch):
    monkeypatch.setenv("MINDDP_PROGRESS", "1")
    monkeypatch.setitem(sys.modules, "tqdm", None)
    items = [1, 2]
    assert progress(items) is items


# ---- Real processes ----

processes = pytest.mark.processes


class Launched:
    """A `minddp run` of ours, whose whole family can be found by a mark."""

    def __init__(self, tmp_path: Path, script: str, *flags: str, args=(), **env: str):
        path = tmp_path / "script.py"
        path.write_text("import os, signal, sys, time\n" + textwrap.dedent(script))
        self.mark = uuid.uuid4().hex
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minddp", "run", *flags, str(path), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "MINDDP_TEST_MARK": self.mark, **env},
        )

    def wait_for(self, count: int, line: str = "up") -> None:
        """Until so many ranks have printed the line."""
        for _ in range(count):
            assert line in self.process.stdout.readline().decode()

    def end(self, timeout: float) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out.decode(), err.decode()

    def family(self) -> list[int]:
        """The pids of the launcher and of everything that it has started."""
        found = []
        for pid in os.listdir("/proc"):
            with contextlib.suppress(OSError):  # not a process, or it has just ended
                if self.mark.encode() in Path("/proc", pid, "environ").read_bytes():
                    found.append(int(pid))
        return found

    def assert_nothing_left(self, within: float = 3.0) -> None:
        end = time.monotonic() + within
        while self.family() and time.monotonic() < end:
            time.sleep(0.02)
        assert self.family() == []


@pytest.fixture
def run(tmp_path):
    """Starts a launcher; afterwards nothing of it may be left."""
    launched = []

    def start(script: str, *flags: str, **how) -> Launched:
        launched.append(Launched(tmp_path, script, *flags, **how))
        return launched[-1]

    yield start
    for one in launched:
        left = one.family()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        one.process.wait(5)
        one.process.stdout.close()
        one.process.stderr.close()
        assert left == []


SLEEP = """
    print("up")
    time.sleep(60)
"""
STUBBORN = """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("up")
    time.sleep(60)
"""


@processes
def test_every_rank_runs_with_its_number_and_its_arguments(run):
    code, out, err = run(
        'print(os.environ["RANK"], os.environ["WORLD_SIZE"], sys.argv[1:])',
        *("-n", "3"),
        args=["--lr", "0.1"],
    ).end(10)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        f"[rank {r}] {r} 3 ['--lr', '0.1']" for r in range(3)
    ]


@processes
def test_a_module_runs_with_the_flag_m(run, tmp_path):
    launcher = [sys.executable, "-m", "minddp", "run", "-m", "this"]
    done = subprocess.run(launcher, capture_output=True, timeout=10)
    assert done.returncode == 0 and b"[rank 0] The Zen of Python" in done.stdout


@processes
@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_a_signal_to_the_launcher_ends_every_rank_without_tracebacks(run, signum, code):
    job = run(SLEEP, "-n", "2")
    job.wait_for(2)
    job.process.send_signal(signum)
    started = time.monotonic()
    returncode, _, err = job.end(3)
    assert (returncode, time.monotonic() - started < 1.5) == (code, True)
    assert err == f"minddp run: stopped by {signum.name}; every rank has ended.\n"
    assert job.family() == []


@processes
def test_ctrl_c_works_while_other_machines_are_missing(run):
    flags = ("--nnodes", "2", "--node-rank", "0", "-n", "2")
    job = run(SLEEP, *flags, MINDDP_TOKEN="a token for two machines")
    job.wait_for(2)
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(2) == 130


@processes
def test_if_the_launcher_is_killed_its_ranks_die_too(run):
    job = run(STUBBORN, "-n", "2")
    job.wait_for(2)
    assert len(job.family()) == 3
    job.process.kill()
    job.assert_nothing_left()


@processes
def test_a_rank_that_ignores_signals_is_killed_after_the_grace(run):
    job = run(STUBBORN, "-n", "2")
    job.wait_for(2)
    job.process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    assert job.end(4)[0] == 143
    assert 1.9 < time.monotonic() - started < 3.0
    assert job.family() == []


@processes
def test_an_error_on_the_way_out_is_shown_though_the_user_ended_the_job(run):
    script = """
        try:
            print("up")
            time.sleep(60)
        except KeyboardInterrupt:
            if os.environ["RANK"] == "1":
                raise OSError("disk full")
            raise
    """
    job = run(script, "-n", "2")
    job.wait_for(2)
    job.process.send_signal(signal.SIGINT)
    code, _, err = job.end(3)
    assert (code, "[rank 1] OSError: disk full" in err, "[rank 0]" in err) == (
        *(130, True, False),
    )


@processes
def test_a_second_ctrl_c_kills_at_once(run):
    job = run(STUBBORN, "-n", "2")
    job.wait_for(2)
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.2)  # two signals of one kind at the same moment would arrive as one
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(1) == 130


@processes
def test_what_a_rank_has_started_ends_with_it(run):
    helper = """
        import subprocess
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print("up")
    """
    job = run(helper, "-n", "2")
    assert job.end(5)[0] == 0
    job.assert_nothing_left(1.0)


@processes
def test_an_exception_on_one_rank_ends_those_who_wait_for_it(run):
    job = run('1 / 0 if os.environ["RANK"] == "1" else time.sleep(60)', "-n", "3")
    code, _, err = job.end(5)
    assert code == 1
    assert err.startswith(
        "minddp run: rank 1 failed first, exit code 1 (ZeroDivisionError: division by "
        "zero). Its traceback:\n[rank 1] Traceback"
    )
    assert "rank 0 was still running" in err and "rank 2 was still running" in err


@processes
def test_a_rank_that_ignores_sigterm_does_not_outlive_the_failure_of_another(run):
    script = """
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    """
    job = run(script, "-n", "2")
    code, _, err = job.end(6)
    assert code == 137
    assert "rank 1 failed first, killed by SIGKILL" in err


@processes
@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit('no data')", 1),
        ("os._exit(7)", 7),
        ("os.abort()", 134),
        ("raise MemoryError", 1),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(run, ending, code):
    job = run(f'if os.environ["RANK"] == "1": {ending}', "-n", "2")
    returncode, _, err = job.end(5)
    assert (returncode, "rank 1 failed first" in err) == (code, True)


@processes
def test_a_rank_that_leaves_early_is_named_when_the_others_fail(run):
    script = """
        from minddp.errors import PeerLost
        if os.environ["RANK"] == "1":
            os._exit(0)
        time.sleep(0.5)
        raise PeerLost("rank 0 lost rank 1", 1)
    """
    code, _, err = run(script, "-n", "2").end(5)
    assert code == 1
    assert "rank 0 failed first" in err
    assert "rank 1 had ended with exit code 0" in err


@processes
def test_the_cause_comes_first_even_if_it_ends_last(run):
    script = """
        from minddp.errors import PeerLost
        r = int(os.environ["RANK"])
        if r != 1:
            raise PeerLost(f"rank {r} lost rank 1", 1)
        time.sleep(0.5)
        raise ValueError("bad batch")
    """
    code, _, err = run(script, "-n", "3").end(6)
    assert code == 1
    heads = [line for line in err.splitlines() if line.startswith("minddp run:")]
    assert heads == [
        "minddp run: rank 1 failed first, exit code 1 (ValueError: bad batch). "
        "Its traceback:",
        "minddp run: rank 0 failed as a consequence, exit code 1 "
        "(PeerLost: rank 0 lost rank 1).",
        "minddp run: rank 2 failed as a consequence, exit code 1 "
        "(PeerLost: rank 2 lost rank 1).",
    ]
    assert err.splitlines()[0] == heads[0] and err.count("Traceback") == 1


@processes
def test_a_traceback_that_was_only_logged_is_not_lost(run):
    code, _, err = run(
        """
        import traceback
        try:
            1 / 0
        except ZeroDivisionError:
            traceback.print_exc()
        """
    ).end(5)
    assert code == 0
    assert err.splitlines()[0] == "[rank 0] Traceback (most recent call last):"
    assert err.splitlines()[-1] == "[rank 0] ZeroDivisionError: division by zero"


@processes
def test_a_slow_reader_loses_no_line(run):
    job = run(
        """
        if os.environ["RANK"] == "2":
            time.sleep(0.5)
            sys.stdout.write("last words")
            sys.exit()
        sys.stdout = open(1, "w", buffering=1 << 16)
        for i in range(100_000):
            print("line", i)
        """,
        *("-n", "3"),
    )
    time.sleep(1.0)  # pipes are full, ranks 0 and 1 wait for us, and rank 2 has ended
    code, out, _ = job.end(10)
    assert code == 0
    lines = out.split("\n")
    for tag in "[rank 0] ", "[rank 1] ":
        assert [line for line in lines if line.startswith(tag)] == [
            f"{tag}line {i}" for i in range(100_000)
        ]
    assert "[rank 2] last words" in lines and len(lines) == 200_002


@processes
def test_output_to_a_pipe_that_does_not_block_is_complete(tmp_path):
    # Whoever shares our pipe may have made it non-blocking: a write then fails if full.
    script = tmp_path / "script.py"
    script.write_text("print(('x' * 99 + '\\n') * 20_000)")
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    launcher = [sys.executable, "-m", "minddp", "run", str(script)]
    process = subprocess.Popen(launcher, stdout=write_end)
    os.close(write_end)
    time.sleep(0.5)
    with open(read_end, "rb") as reader:
        assert reader.read().count(b"x\n") == 20_000
    assert process.wait(5) == 0


@processes
def test_a_reader_that_takes_nothing_costs_no_memory_and_keeps_no_ctrl_c_waiting(run):
    job = run('while True: os.write(1, (b"x" * 999 + b"\\n") * 60)', "-n", "2")
    time.sleep(1.0)
    status = Path("/proc", str(job.process.pid), "status").read_text()
    assert int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) < 150_000
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(4) == 130


@processes
def test_a_reader_that_leaves_ends_the_job_quietly(run):
    job = run('while True: print("x")', "-n", "2")
    job.wait_for(1, "x")
    job.process.stdout.close()
    assert job.process.wait(4) == 128 + signal.SIGPIPE
    assert job.process.stderr.read() == b""


@processes
def test_a_reader_that_ctrl_c_ends_too_does_not_shorten_the_grace(run, tmp_path):
    script = """
        try:
            print("up")
            time.sleep(60)
        except KeyboardInterrupt:
            print("saving")
            time.sleep(0.5)
            open(sys.argv[1], "w").close()
    """
    job = run(script, args=[str(tmp_path / "checkpoint")])
    job.wait_for(1)
    job.process.send_signal(signal.SIGINT)
    job.process.stdout.close()
    assert job.process.wait(4) == 130
    assert (tmp_path / "checkpoint").exists()


@processes
def test_a_full_disk_is_an_error(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import time; print('up'); time.sleep(60)")
    launcher = [sys.executable, "-m", "minddp", "run", str(script)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(launcher, stdout=full, stderr=subprocess.PIPE, timeout=9)
    assert (done.returncode, done.stderr) == (
        *(1, b"minddp: cannot write the output: No space left on device\n"),
    )


MEET = """
    import socket
    if os.environ["RANK"] == "0":
        fd = int(os.environ["MINDDP_LISTEN_FD"])
        listener = socket.socket(fileno=fd)
        listener.setblocking(True)
        peer, _ = listener.accept()
        assert peer.recv(99).decode() == os.environ["MINDDP_JOB_ID"]
        print("met")
    else:
        assert "MINDDP_LISTEN_FD" not in os.environ
        addr = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with socket.create_connection(addr) as peer:
            peer.sendall(os.environ["MINDDP_JOB_ID"].encode())
"""


@processes
def test_two_jobs_at_once_do_not_meet_at_one_port(run):
    jobs = [run(MEET, "-n", "2") for _ in range(4)]
    assert [job.end(10) for job in jobs] == [(0, "[rank 0] met\n", "")] * 4


@processes
def test_a_port_that_is_in_use_is_named(run):
    from minddp.net import listen

    taken = listen("127.0.0.1", 0)
    code, _, err = run("", "--master-port", str(taken.port)).end(5)
    taken.close()
    assert (code, str(taken.port) in err, "in use" in err) == (2, True, True)


@processes
def test_if_rank_0_dies_the_others_are_refused(run):
    # Were the launcher's copy of the socket left open, they would wait for ever.
    script = """
        import socket
        if os.environ["RANK"] == "0":
            os._exit(5)
        time.sleep(0.5)
        addr = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            socket.create_connection(addr)
        except ConnectionRefusedError:
            print("refused")
    """
    code, out, _ = run(script, "-n", "2").end(5)
    assert (code, out) == (5, "[rank 1] refused\n")


@processes
def test_the_token_is_in_no_argument_and_in_no_output(run, tmp_path):
    script = """
        import pathlib
        pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(
            os.environ["MINDDP_TOKEN"])
        print("up")
        time.sleep(0.5)
        sys.exit(1)
    """
    job = run(script, "-n", "2", args=[str(tmp_path)])
    job.wait_for(2)
    lines = [Path("/proc", str(pid), "cmdline").read_text() for pid in job.family()]
    token = (tmp_path / "0").read_text()
    assert len(token) == 64 and (tmp_path / "1").read_text() == token
    assert len(lines) == 3
    assert token not in "".join(lines) + "".join(job.end(5)[1:])


@processes
def test_after_a_failure_all_ranks_start_again_with_another_secret(run, tmp_path):
    script = """
        import json, pathlib
        log = pathlib.Path(sys.argv[1])
        with log.open("a") as file:
            print(json.dumps([os.environ["MINDDP_TOKEN"]]), file=file)
        sys.exit(3 if len(log.read_text().splitlines()) < 3 else 0)
    """
    log = tmp_path / "log"
    code, _, err = run(script, "--max-restarts", "5", args=[str(log)]).end(10)
    tokens = [json.loads(line)[0] for line in log.read_text().splitlines()]
    assert (code, len(tokens), len(set(tokens))) == (0, 3, 3)
    assert err.count("restarting all ranks") == 2 and "3 more restarts" in err


@processes
@pytest.mark.parametrize(("flags", "starts"), [((), 1), (("--max-restarts", "2"), 3)])
def test_restarts_are_counted(run, flags, starts):
    code, out, _ = run('print("up"); sys.exit(4)', *flags).end(10)
    assert (code, out.count("up")) == (4, starts)


@processes
def test_a_mistake_in_the_call_of_the_script_is_not_repeated(run):
    code, out, _ = run('print("up"); sys.exit(2)', "--max-restarts", "3").end(5)
    assert (code, out.count("up")) == (2, 1)


@processes
def test_a_job_that_the_user_ends_is_not_started_again(run):
    job = run(SLEEP, "-n", "2", "--max-restarts", "3")
    job.wait_for(2)
    job.process.send_signal(signal.SIGINT)
    code, out, _ = job.end(4)
    assert (code, out) == (130, "")


@processes
def test_a_launch_leaves_no_descriptor_and_no_handler_behind(tmp_path):
    (tmp_path / "quiet.py").write_text("")
    (tmp_path / "caller.py").write_text(
        textwrap.dedent(
            """
            import os, signal
            from minddp.launch import launch

            def state():
                signals = signal.SIGINT, signal.SIGTERM, signal.SIGCHLD
                fds = len(os.listdir("/proc/self/fd"))
                return fds, [signal.getsignal(s) for s in signals]

            before = state()
            assert launch(["quiet.py"], 2) == 0
            assert state() == before, (before, state())
            """
        )
    )
    done = subprocess.run([sys.executable, "caller.py"], cwd=tmp_path, timeout=10)
    assert done.returncode == 0


@processes
def test_a_bar_of_rank_0_is_drawn_on_a_terminal_and_stays_whole(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, time
            for i in range(1, 6):
                if os.environ.get("MINDDP_PROGRESS"):
                    print("\\rbar", "#" * i, end="", file=sys.stderr, flush=True)
                print("line", i, flush=True)
                time.sleep(0.02)
            """
        )
    )
    terminal, ours = pty.openpty()
    launcher = [sys.executable, "-m", "minddp", "run", "-n", "2", str(script)]
    process = subprocess.Popen(launcher, stdout=ours, stderr=ours)
    os.close(ours)
    data = b""
    with contextlib.suppress(OSError):  # EIO: how a terminal says that all have left
        while chunk := os.read(terminal, 4096):
            data += chunk
    os.close(terminal)
    assert process.wait(5) == 0
    assert b"\r[rank 0] bar ###" in data.replace(b"\x1b[K", b"\r")
    assert sorted(filter(None, screen([(OUT, data)]))) == sorted(
        [f"[rank {r}] line {i}" for r in (0, 1) for i in range(1, 6)]
        + ["[rank 0] bar #####"]
    )


@pytest.mark.processes
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_job_runs_with_its_standard_streams_closed(closed, tmp_path):
    """Else the listening socket or a rank's pipe would become descriptor 0, 1 or 2."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, minddp\n"
        "with minddp.init_process_group() as pg:\n"
        "    pg.barrier()\n"
        "    open(f'{pg.rank}.done', 'w').close()\n"
        "    print('hello')\n"
    )
    command = f"{sys.executable} -m minddp run -n 2 {script} {closed}"
    result = subprocess.run(["bash", "-c", command], cwd=tmp_path, timeout=30)
    assert result.returncode == 0
    assert sorted(path.name for path in tmp_path.glob("*.done")) == ["0.done", "1.done"]
