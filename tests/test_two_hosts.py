"""Several hosts: network namespaces on one machine, joined by a switch.

     host 0          host 1          host 2         each a namespace of its own, with
    10.77.0.1       10.77.0.2       10.77.0.3       its own loopback and /etc/hosts
       eth0            eth0            eth0
        |               |               |
      port0           port1           port2         a bridge in one more namespace
        '---------------+---------------'

Nothing is added to the network of the machine itself. Needs root and iproute2.
"""

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from ranks import (
    TOKEN,
    Process,
    Ranks,
    attempt,
    environment,
    join,
    reduce_for_ever,
    tell,
)

pytestmark = pytest.mark.netns

TIMEOUT = 2.0  # of `ranks.join`
CUT = TIMEOUT + 3.0  # seconds from a cut to the last error
PORT = 29500  # free in a namespace that has just been made

_numbers = itertools.count()


class Hosts:
    """n hosts at 10.77.0.1 and up; leaving the block removes them."""

    def __init__(self, n):
        self.name = f"minddp-{os.getpid()}-{next(_numbers)}"
        self.switch = f"{self.name}-switch"
        self.hosts = [f"{self.name}-host{i}" for i in range(n)]

    def __enter__(self):
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in [*self.hosts, self.switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)
        with suppress(OSError):
            os.rmdir("/etc/netns")  # unless it is somebody else's too

    def _build(self):
        if sys.platform != "linux" or not shutil.which("ip"):
            pytest.skip("network namespaces need Linux and iproute2")
        made = subprocess.run(
            ["ip", "netns", "add", self.switch], capture_output=True, text=True
        )
        if made.returncode:
            pytest.skip(f"may not make network namespaces: {made.stderr.strip()}")
        ip(self.switch, "link add br0 type bridge", "link set br0 up")
        for i, host in enumerate(self.hosts):
            command("ip", "netns", "add", host)
            ip(
                self.switch,
                f"link add port{i} type veth peer name eth0 netns {host}",
                f"link set port{i} master br0 up",
            )
            ip(
                host,
                f"addr add {self.address(i)}/24 dev eth0",
                "link set eth0 up",
                "link set lo up",
            )

    @staticmethod
    def address(i):
        return f"10.77.0.{i + 1}"

    def inside(self, i):
        """What to write in front of a command to run it on host i."""
        return ["ip", "netns", "exec", self.hosts[i]]

    def pull_the_cable(self, i):
        """As if somebody had: no packet tells anybody. The moment of it."""
        at = time.monotonic()
        ip(self.switch, f"link set port{i} down")
        return at

    def ranks(self, body, **settings):
        """Rank i of a job on host i."""
        env = {"MASTER_ADDR": self.address(0)} | settings.pop("env", {})
        n = len(self.hosts)
        return Ranks(n, body, env=env, port=PORT, prefix=self.inside, **settings)


def command(*argv):
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"


def ip(namespace, *commands):
    for words in commands:
        command("ip", "-n", namespace, *words.split())


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
