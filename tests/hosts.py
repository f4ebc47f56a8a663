"""Several hosts for tests: network namespaces on one machine, joined by a switch.

    with Hosts(3) as hosts, hosts.ranks(body) as ranks:    # rank i on host i
        results = ranks.results()

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
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from ranks import Ranks

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
