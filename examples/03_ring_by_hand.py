"""The ring by hand: four ranks (threads here) add an array, chunk by chunk.

    python examples/03_ring_by_hand.py

Rank r puts in 10**r everywhere, so each digit of a chunk shows whose part it has. First
comes a table of all ranks' arrays after every step; the last lines printed are

    everything round: 96 bytes sent by each rank, 3 steps
    ring:             48 bytes sent by each rank, 6 steps
"""

import numpy as np

from minddp.frame import Header, Kind
from minddp.net import Deadline
from minddp.ring import chunk, exchange
from minddp.testing import run_ranks

N = 4
LENGTH = 4  # elements; one for each chunk, to keep the table small


def swap(links, out, into):
    """Send `out` to the right while `into` is filled from the left."""
    exchange(links, out, into, Header(Kind.DATA, op="all_reduce"), Deadline(10))


def everything_round(links, x):
    """What one thinks of first: whole arrays walk round, everyone adds what passes."""
    passing, total = x.copy(), x.copy()
    for _ in range(links.world_size - 1):
        incoming = np.empty_like(x)
        swap(links, passing, incoming)
        total += incoming
        passing = incoming
    return total, []


def ring(links, x):
    """The same sum in n-th parts: reduce-scatter, then all-gather."""
    r, n = links.rank, links.world_size
    states = [x.copy()]
    for s in range(n - 1):
        sent, mine = chunk(len(x), n, r - 1 - s), chunk(len(x), n, r - 2 - s)
        incoming = np.empty_like(x[mine])
        swap(links, x[sent], incoming)
        x[mine] += incoming
        states.append(x.copy())
    for s in range(n - 1):
        sent, mine = chunk(len(x), n, r - s), chunk(len(x), n, r - 1 - s)
        swap(links, x[sent], x[mine])
        states.append(x.copy())
    return x, states


def run(algorithm):
    """The sum, the states and the bytes sent, of every rank."""

    def body(links):
        total, states = algorithm(links, np.full(LENGTH, 10.0**links.rank))
        return total, states, links.bytes_sent

    return run_ranks(N, body)


ranks = run(ring)
print("               " + "".join(f"| rank {r}".ljust(26) for r in range(N)) + "|")
for step in range(2 * N - 1):
    rows = [" ".join(f"{v:5.0f}" for v in states[step]) for _, states, _ in ranks]
    label = f"after step {step} " if step else "at the start "
    print(label.rjust(14), "| " + " | ".join(rows) + " |")

for name, algorithm in (("everything round", everything_round), ("ring", ring)):
    results = run(algorithm)
    assert all((total == 1111).all() for total, _, _ in results)
    steps = N - 1 if algorithm is everything_round else 2 * (N - 1)
    print(f"{name + ':':17} {results[0][2]} bytes sent by each rank, {steps} steps")
