"""Ranks on several hosts (hosts.py): who meets, who is let in, and cables pulled.

Needs root and iproute2.
"""

import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hosts import Hosts, ip
from ranks import (
    TOKEN,
    Process,
    attempt,
    environment,
    join,
    reduce_for_ever,
    tell,
)

pytestmark = pytest.mark.netns

TIMEOUT = 2.0  # of `ranks.join`
CUT = TIMEOUT + 3.0  # seconds from a cut to the last error


def meet():
    with join(timeout=5.0) as pg:
        x = np.array([10**pg.rank])
        pg.all_reduce(x)
        tell("sum", value=int(x[0]), hosts=[host for host, _ in pg._control.table])


def loop():
    pg = join()
    attempt(lambda: reduce_for_ever(pg, 1 << 17))  # 1 MiB


def assert_they_met(results):
    n = len(results)
    for result in results:
        assert result.code == 0, result
        assert result.facts["sum"]["value"] == int("1" * n)
        assert result.facts["sum"]["hosts"] == [Hosts.address(i) for i in range(n)]


def test_ranks_on_three_hosts_meet_whatever_their_names_and_other_networks_say():
    with Hosts(3) as hosts:
        for i, host in enumerate(hosts.hosts):
            # As Debian writes it: the name of the machine is an address of loopback.
            Path("/etc/netns", host).mkdir(parents=True)
            Path("/etc/netns", host, "hosts").write_text(
                f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n"
            )
            # As Docker leaves it: one more network, with the same address everywhere.
            ip(
                host,
                "link add docker0 type bridge",
                "addr add 172.17.0.1/16 dev docker0",
                "link set docker0 up",
            )
            check = "import socket; print(socket.gethostbyname(socket.gethostname()))"
            said = subprocess.run(
                [*hosts.inside(i), sys.executable, "-c", check], capture_output=True
            )
            assert said.stdout == b"127.0.1.1\n"
        with hosts.ranks(meet) as ranks:
            assert_they_met(ranks.results())
        by_name = {i: {"MINDDP_IFNAME": "eth0"} for i in range(3)}
        with hosts.ranks(meet, env_of=by_name) as ranks:
            assert_they_met(ranks.results())
        with hosts.ranks(try_to_join, env_of={2: {"MINDDP_IFNAME": "eth7"}}) as ranks:
            refused = ranks.results(ranks=[2])[0].raised
        assert refused["kind"] == "UsageError"
        assert "eth7" in refused["text"]
        assert "docker0" in refused["text"]


def try_to_join():
    attempt(join)


def test_without_a_token_no_rank_of_another_host_is_let_in():
    with Hosts(2) as hosts, hosts.ranks(try_to_join, env={"MINDDP_TOKEN": ""}) as ranks:
        for result in ranks.results(timeout=8):
            assert result.raised["kind"] == "UsageError"
            assert "export MINDDP_TOKEN=" in result.raised["text"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_pulled_cable_is_reported_on_both_ends(victim):
    with Hosts(3) as hosts, hosts.ranks(loop) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "looping")
        at = hosts.pull_the_cable(victim)
        results = ranks.results()
    seconds = [round(result.raised["at"] - at, 2) for result in results]
    print(f"raised after {seconds} s")
    assert max(seconds) < CUT
    for result in results:
        assert result.raised["kind"] in ("PeerTimeout", "PeerLost")
        assert result.code == 0
        if result.rank != victim:
            assert result.raised["culprit"] == victim


def test_a_path_that_is_lost_in_one_direction_is_reported_on_both_ends():
    with Hosts(2) as hosts, hosts.ranks(loop) as ranks:
        for rank in range(2):
            ranks.wait_for(rank, "looping")
        at = time.monotonic()
        # Host 1 still hears host 0, but nothing that it says arrives.
        ip(hosts.hosts[1], f"route add blackhole {hosts.address(0)}/32")
        results = ranks.results()
    seconds = [round(result.raised["at"] - at, 2) for result in results]
    print(f"raised after {seconds} s")
    assert max(seconds) < CUT
    for result in results:
        assert result.raised["kind"] in ("PeerTimeout", "PeerLost")
        assert result.raised["culprit"] == 1 - result.rank
        assert result.code == 0


def test_a_cable_that_is_pulled_while_nobody_sends_is_found_by_the_next_call():
    def call_after_the_cut():
        pg = join()
        pg.barrier()
        tell("looping")
        time.sleep(1.0)
        tell("calling")
        attempt(lambda: pg.all_reduce(np.ones(10)))

    with Hosts(2) as hosts, hosts.ranks(call_after_the_cut) as ranks:
        for rank in range(2):
            ranks.wait_for(rank, "looping")
        hosts.pull_the_cable(1)
        results = ranks.results()
    for result in results:
        error, called = result.raised, result.facts["calling"]
        assert error["culprit"] == 1 - result.rank
        assert error["at"] - called["at"] < CUT


def test_a_slow_network_is_not_a_dead_one():
    def reduce_for_longer_than_the_timeout():
        pg = join()
        x = np.full(50_000, 10.0**pg.rank)  # 400 kB: 3.2 s at 1 Mbit/s
        pg.barrier()
        started = time.monotonic()
        attempt(lambda: pg.all_reduce(x))
        tell("done", seconds=time.monotonic() - started, same=bool((x == 11).all()))
        pg.close()

    with Hosts(2) as hosts:
        for host in hosts.hosts:
            tbf = f"tc -n {host} qdisc add dev eth0 root tbf"
            shape = f"{tbf} rate 1mbit burst 16kb latency 200ms"
            made = subprocess.run(shape.split(), capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"cannot slow a link down: {made.stderr.strip()}")
        with hosts.ranks(reduce_for_longer_than_the_timeout) as ranks:
            results = ranks.results()
    for result in results:
        assert "returned" in result.facts, result
        assert result.facts["done"]["same"]
        assert result.facts["done"]["seconds"] > TIMEOUT, "the network was not slow"


def test_minddp_run_on_two_hosts_as_the_readme_says(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import numpy as np, minddp\n"
        "with minddp.init_process_group() as pg:\n"
        "    x = np.array([10.0**pg.rank])\n"
        "    pg.all_reduce(x)\n"
        "    print(f'rank {pg.rank} of {pg.world_size}: {x[0]:.0f}')\n"
    )
    env = environment({"MINDDP_TOKEN": TOKEN})
    launchers = []
    with Hosts(2) as hosts:
        try:
            for i in range(2):
                flags = f"--nnodes 2 --node-rank {i} --master-addr {hosts.address(0)}"
                argv = f"{sys.executable} -m minddp run {flags} -n 2 {script}".split()
                launchers.append(Process([*hosts.inside(i), *argv], env))
            deadline = time.monotonic() + 20
            results = [p.result(i, deadline) for i, p in enumerate(launchers)]
        finally:
            for launcher in launchers:
                if launcher.process.poll() is None:
                    launcher.process.send_signal(signal.SIGTERM)  # ends its ranks
                    with suppress(subprocess.TimeoutExpired):
                        launcher.process.wait(8)
                launcher.close()
    for i, result in enumerate(results):
        assert result.code == 0, result
        for rank in (2 * i, 2 * i + 1):
            assert f"rank {rank} of 4: 1111" in result.out
