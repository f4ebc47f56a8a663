"""Real processes over loopback: what the others see when a rank dies, stops or errs.

Common to all: every live rank raises within a bound, and names the rank at fault.
"""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import (
    TOKEN,
    Ranks,
    attempt,
    concurrently,
    free_port,
    join,
    reduce_for_ever,
    run,
    tell,
)

import minddp

pytestmark = pytest.mark.processes

TIMEOUT = 2.0  # of `ranks.join`
DEATH = 2.0  # seconds from a death to the last error: half a second and a busy machine
SILENCE = TIMEOUT + 2.0  # seconds from a stop to the last error


def seconds_until_raised(results, since):
    """From that moment to the last rank's error; printed for who wants to know."""
    seconds = [round(result.raised["at"] - since, 3) for result in results]
    print(f"raised after {seconds} s")
    return max(seconds)


def assert_all_name(results, culprit, kind="PeerLost"):
    for result in results:
        error = result.raised
        assert (error["kind"], error["culprit"]) == (kind, culprit), result
        assert f"rank {culprit}" in error["text"]


def loop():
    pg = join()
    attempt(lambda: reduce_for_ever(pg))


# ---- A rank dies ----


def killed(n, victim, transport="tcp"):
    others = [r for r in range(n) if r != victim]
    with Ranks(n, loop, env={"MINDDP_TRANSPORT": transport}) as ranks:
        for rank in range(n):
            ranks.wait_for(rank, "looping")
        at = ranks.signal(victim, signal.SIGKILL)
        results = ranks.results(ranks=others)
    assert_all_name(results, victim)
    assert seconds_until_raised(results, at) < DEATH
    assert [result.code for result in results] == [0] * len(others)


def test_all_others_name_the_rank_that_was_killed():
    concurrently(killed, [3, 3, 3], [0, 1, 2])


def test_all_others_name_the_rank_that_was_killed_in_shared_memory():
    concurrently(killed, [3, 4], [0, 1], ["shm", "shm"])


def test_ranks_that_are_no_neighbours_name_the_killed_rank_too():
    concurrently(killed, [4, 4], [0, 1])


def test_a_rank_that_is_interrupted_in_a_collective_is_named():
    def loop_without_a_catch():
        pg = join()
        if pg.rank == 1:
            reduce_for_ever(pg)
        attempt(lambda: reduce_for_ever(pg))

    with Ranks(3, loop_without_a_catch) as ranks:
        ranks.wait_for(1, "looping")
        at = ranks.signal(1, signal.SIGINT)
        zero, one, two = ranks.results()
    assert one.code != 0
    assert "KeyboardInterrupt" in one.err
    assert_all_name([zero, two], 1)
    assert "KeyboardInterrupt" in zero.raised["text"]
    assert seconds_until_raised([zero, two], at) < DEATH


def test_an_uncaught_exception_reaches_the_others_with_its_words():
    def raise_on_rank_1():
        pg = join()
        pg.barrier()
        if pg.rank == 1:
            tell("raising")
            raise ValueError("batch 7 has no labels")
        if pg.rank == 3:
            pg.barrier()  # nobody catches it: the process ends
        attempt(pg.barrier)

    zero, one, two, three = run(4, raise_on_rank_1)
    assert one.code == three.code == 1
    assert "ValueError: batch 7 has no labels" in one.err
    assert three.err.count("ValueError: batch 7 has no labels") == 1
    assert "minddp.errors.PeerLost: rank 3 gives up, as rank 1 reported" in three.err
    assert_all_name([zero, two], 1)
    assert seconds_until_raised([zero, two], one.facts["raising"]["at"]) < DEATH
    for result in (zero, two):
        assert "ValueError: batch 7 has no labels" in result.raised["text"]
        assert (result.code, result.err) == (0, "")


def fork_and_die_on_rank_1():
    import os
    import signal

    pg = join()
    pg.barrier()
    if pg.rank == 1 and os.fork() == 0:
        try:
            pg.barrier()
        except minddp.UsageError as error:
            tell("child", text=str(error))
        time.sleep(4)  # it outlives its parent, and must not stand in for it
        os._exit(0)
    if pg.rank == 1:
        time.sleep(1)
        tell("dying")
        os.kill(os.getpid(), signal.SIGKILL)
    attempt(pg.barrier)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_no_rank_and_keeps_no_link_of_its_parent_open():
    zero, one, two = run(3, fork_and_die_on_rank_1)
    assert "belongs to the parent process" in one.facts["child"]["text"]
    assert_all_name([zero, two], 1)
    assert seconds_until_raised([zero, two], one.facts["dying"]["at"]) < DEATH


def test_a_rank_that_leaves_early_with_code_0_is_a_failure_and_the_group_stays_dead():
    def leave_on_rank_1():
        import sys

        pg = join()
        pg.barrier()
        if pg.rank == 1:
            tell("leaving")
            sys.stdout.flush()
            os._exit(0) if os.environ["HOW"] == "_exit" else sys.exit(0)
        attempt(lambda: reduce_for_ever(pg))
        seconds, texts = [], set()
        for call in [pg.barrier, lambda: pg.all_reduce(np.ones(3))] * 5:
            started = time.monotonic()
            try:
                call()
            except minddp.PeerLost as error:
                texts.add(f"{error.culprit}: {error}")
            seconds.append(time.monotonic() - started)
        pg.close()
        tell("after", seconds=sorted(seconds), texts=sorted(texts))

    def case(how):
        zero, one, two = run(3, leave_on_rank_1, env={"HOW": how})
        assert one.code == 0
        assert_all_name([zero, two], 1)
        assert seconds_until_raised([zero, two], one.facts["leaving"]["at"]) < DEATH
        for result in (zero, two):
            after = result.facts["after"]
            assert after["texts"] == [f"1: {result.raised['text']}"]
            assert len(after["seconds"]) == 10
            assert after["seconds"][8] < 5e-3  # one may be interrupted by the kernel
            assert (result.code, result.err) == (0, "")

    concurrently(case, ["_exit", "sys.exit"])


# ---- A rank stops ----


def stopped(n, victim, transport):
    others = [r for r in range(n) if r != victim]
    with Ranks(n, loop, env={"MINDDP_TRANSPORT": transport}) as ranks:
        for rank in range(n):
            ranks.wait_for(rank, "looping")
        at = ranks.signal(victim, signal.SIGSTOP)
        results = ranks.results(ranks=others)
        ranks.signal(victim, signal.SIGCONT)
        (back,) = ranks.results(ranks=[victim])
    assert_all_name(results, victim, "PeerTimeout")
    assert seconds_until_raised(results, at) < SILENCE
    for result in results:
        assert "not responding" in result.raised["text"]
    assert back.raised["kind"].startswith("Peer")
    assert back.raised["culprit"] == victim, "it learns that it was itself"
    assert back.code == 0


def test_all_others_name_the_rank_that_is_stopped_and_it_raises_when_it_goes_on():
    transports = ["tcp", "tcp", "tcp", "tcp", "shm"]
    concurrently(stopped, [3, 3, 3, 4, 3], [0, 1, 2, 1, 0], transports)


def test_who_waits_for_a_stopped_rank_sleeps():
    def wait_for_rank_1():
        import signal

        pg = join()
        x = np.ones(1 << 22)  # so large that some wait to send, and others to receive
        pg.barrier()
        if pg.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        tell("waiting")
        attempt(lambda: pg.all_reduce(x))

    with Ranks(4, wait_for_rank_1) as ranks:
        results = ranks.results(ranks=[0, 2, 3])
    assert_all_name(results, 1, "PeerTimeout")
    for result in results:
        start, end = result.facts["waiting"], result.raised
        assert end["at"] - start["at"] > 0.9 * TIMEOUT
        assert end["cpu"] - start["cpu"] < 0.05 * (end["at"] - start["at"])


def test_a_rank_that_is_slow_but_moves_within_the_timeout_is_not_given_up():
    def slow_on_rank_1():
        pg = join(timeout=1.0)
        for _ in range(2):
            if pg.rank == 1:
                time.sleep(0.7 * pg.timeout)
            pg.all_reduce(np.ones(1000))
        pg.close()

    for result in run(3, slow_on_rank_1):
        assert (result.code, result.err) == (0, "")


# ---- A rank does something else ----


def test_a_mismatch_shows_both_calls_and_the_odd_rank_to_all():
    def mismatches():
        x = np.ones(6, np.float32)
        usual = lambda pg: pg.all_reduce(x)  # noqa: E731
        odd = [
            lambda pg: pg.broadcast(x),
            lambda pg: pg.all_reduce(np.ones(5, np.float32)),
            lambda pg: pg.all_reduce(np.ones(6, np.int32)),
            lambda pg: pg.all_reduce(x, "max"),
            lambda pg: pg.barrier(),
            lambda pg: pg.broadcast(x, root=1),
        ]
        for i, port in enumerate(os.environ["PORTS"].split()):
            pg = join(master_port=int(port))
            pg.barrier()
            call = odd[i] if pg.rank == i % 3 else usual
            if i == 5 and pg.rank != i % 3:
                call = odd[0]
            # A rank between the root and the odd one gets what the root sent: it learns
            # of the mismatch from its next call.
            attempt(lambda call=call, pg=pg: (call(pg), pg.barrier()))
            pg.close()

    usual = "all_reduce #2 of 6 float32 (sum)"
    expected = [
        (usual, "broadcast #2 of 6 float32 (root 0)"),
        (usual, "all_reduce #2 of 5 float32 (sum)"),
        (usual, "all_reduce #2 of 6 int32 (sum)"),
        (usual, "all_reduce #2 of 6 float32 (max)"),
        (usual, "barrier #2"),
        ("broadcast #2 of 6 float32 (root 0)", "broadcast #2 of 6 float32 (root 1)"),
    ]
    ports = [free_port() for _ in expected]
    env = {"PORTS": " ".join(map(str, ports))}
    for result in run(3, mismatches, env=env, port=ports[0]):
        errors = result.told("raised")
        assert len(errors) == len(expected), result
        for i, (error, calls) in enumerate(zip(errors, expected, strict=True)):
            assert (error["kind"], error["culprit"]) == ("PeerMismatch", i % 3), error
            assert all(call in error["text"] for call in calls), error
            assert f"rank {i % 3}" in error["text"].lower()


# ---- Something fails before the group is there ----


def test_a_rank_that_dies_during_the_rendezvous_is_named():
    def die_at_a_point():
        import signal

        from minddp.control import Control
        from minddp.rendezvous import Rendezvous

        def stop_here(*_):
            tell("here")
            time.sleep(0 if os.environ["SIGNAL"] == "9" else 60)
            os.kill(os.getpid(), signal.SIGKILL)

        if os.environ["RANK"] == "1":
            where = Control if os.environ["POINT"] == "wait_for_table" else Rendezvous
            setattr(where, os.environ["POINT"], stop_here)
        attempt(lambda: join(rendezvous_timeout=8.0))

    def case(point, signum, present):
        env = {"POINT": point, "SIGNAL": str(signum)}
        with Ranks(3, die_at_a_point, env=env, only=present) as ranks:
            at = ranks.wait_for(1, "here")["at"]
            if signum != signal.SIGKILL:
                at = ranks.signal(1, signum)
            results = ranks.results(ranks=[r for r in present if r != 1])
        assert_all_name(results, 1)
        assert seconds_until_raised(results, at) < DEATH

    joined, ring = "wait_for_table", "_build_ring"
    cases = [
        (joined, signal.SIGKILL, [0, 1]),  # rank 2 never comes
        (joined, signal.SIGINT, [0, 1]),  # leaves by an exception, not by a signal
        (ring, signal.SIGKILL, [0, 1, 2]),
        (ring, signal.SIGINT, [0, 1, 2]),
    ]
    concurrently(case, *zip(*cases, strict=True))


def test_a_rank_0_that_cannot_go_on_does_not_leave_the_others_waiting():
    """An interface that only rank 0 lacks: it finds out after the others have come."""

    def meet():
        attempt(lambda: join(rendezvous_timeout=8.0))

    with Ranks(2, meet, env_of={0: {"MINDDP_IFNAME": "nope"}}) as ranks:
        zero, one = ranks.results()
    assert zero.raised["kind"] == "UsageError"
    assert one.raised["culprit"] == 0
    assert one.raised["at"] - zero.raised["at"] < DEATH


# ---- Nothing fails ----


def test_a_script_that_never_closes_the_group_ends_in_silence():
    def forget_to_close():
        pg = join(timeout=60.0)
        pg.all_reduce(np.ones(10))
        tell("done")

    started = time.monotonic()
    for result in run(3, forget_to_close):
        assert (result.code, result.err) == (0, "")
        assert "done" in result.facts
    assert time.monotonic() - started < 10


def test_jobs_one_after_another_use_the_same_port():
    def meet():
        with join() as pg:
            x = np.array([10**pg.rank])
            pg.all_reduce(x)
            tell("sum", value=int(x[0]))

    port = free_port()
    for _ in range(3):
        results = run(3, meet, port=port)
        assert [r.facts["sum"]["value"] for r in results] == [111, 111, 111]


def test_a_script_may_form_a_second_group_after_the_first():
    def meet_twice():
        for word in ("first", "second"):
            attempt(lambda word=word: meet(word))

    def meet(word):
        with join(rendezvous_timeout=5.0) as pg:
            x = np.array([10**pg.rank])
            pg.all_reduce(x)
            tell(word, value=int(x[0]))

    body = program_of(meet, meet_twice)
    for result in run(2, body):
        assert "raised" not in result.facts, result
        assert [result.facts[w]["value"] for w in ("first", "second")] == [11, 11]


def program_of(*functions):
    """The source of several functions, of which the last one is called."""
    import inspect
    import textwrap

    parts = [textwrap.dedent(inspect.getsource(f)) for f in functions]
    return "\n".join([*parts, f"{functions[-1].__name__}()"])


def test_the_seed_of_hashes_may_differ_from_rank_to_rank():
    def reduce_several():
        import hashlib

        pg = join()
        x = {name: np.arange(5.0) + pg.rank for name in ("w", "b", "scale", "shift")}
        digest = hashlib.sha256()
        for name, array in x.items():
            pg.all_reduce(array, "avg")
            pg.broadcast(array, root=2)
            digest.update(name.encode() + array.tobytes())
        stats = pg.stats()
        stats.pop("control_bytes_sent")  # heartbeats, as many as the time allows
        seen = hash("w")
        tell("done", stats=stats, digest=digest.hexdigest(), seen=seen)
        pg.close()

    seeds = {rank: {"PYTHONHASHSEED": str(rank + 1)} for rank in range(3)}
    done = [result.facts["done"] for result in run(3, reduce_several, env_of=seeds)]
    assert len({fact["seen"] for fact in done}) == 3, "the seeds were not in force"
    assert len({fact["digest"] for fact in done}) == 1
    assert {fact["stats"]["collectives"] for fact in done} == {8}


def test_training_is_the_same_whatever_the_seeds_of_hashes():
    def train():
        import hashlib

        from minddp import functional as F
        from minddp import nn, optim
        from minddp.data import DataLoader, DistributedSampler, load_digits

        pg = join()
        layers = nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)
        model = minddp.DistributedDataParallel(nn.Sequential(*layers), pg)
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        dataset = load_digits("train")
        sampler = DistributedSampler(dataset, pg.world_size, pg.rank)
        for x, y in DataLoader(dataset, 16, sampler=sampler):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        digest = hashlib.sha256()
        for name, tensor in model.state_dict().items():
            digest.update(name.encode() + tensor.data.tobytes())
        tell("done", digest=digest.hexdigest(), seen=hash("w"))
        pg.close()

    seeds = {rank: {"PYTHONHASHSEED": str(rank + 1)} for rank in range(3)}
    done = [result.facts["done"] for result in run(3, train, env_of=seeds)]
    assert len({fact["seen"] for fact in done}) == 3, "the seeds were not in force"
    assert len({fact["digest"] for fact in done}) == 1


def test_the_token_is_in_no_output_and_in_no_command_line():
    def log_everything():
        import logging

        logging.basicConfig(level=logging.DEBUG)
        pg = join()
        print(pg, vars(pg), pg.stats())
        tell("looping")
        if pg.rank == 1:
            time.sleep(1)
            raise SystemExit(3)
        pg.barrier()

    # The text of outputs is checked by `ranks` for all jobs of all tests.
    with Ranks(2, log_everything) as ranks:
        for rank in range(2):
            ranks.wait_for(rank, "looping")
            assert TOKEN not in Path(f"/proc/{ranks.pid(rank)}/cmdline").read_text()
            assert TOKEN in Path(f"/proc/{ranks.pid(rank)}/environ").read_text()
        results = ranks.results()
    assert [result.code for result in results] == [1, 3]
    refused = {1: {"MINDDP_TOKEN": TOKEN + "2"}}  # holds the other as its beginning
    for result in run(2, "join(rendezvous_timeout=1.5)", env_of=refused):
        assert result.code == 1
        assert "minddp.errors." in result.err
