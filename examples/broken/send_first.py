"""Every rank sends its whole array before it looks for what has come.

python examples/broken/send_first.py
"""

import numpy as np

from minddp.net import Deadline
from minddp.testing import run_ranks

CAPACITY = 64  # bytes that a link can hold, as a socket's buffers hold some


def send_all(links, x):
    """What `sendall` of a blocking socket does; the bytes that could not be sent."""
    rest = memoryview(x).cast("B")
    while rest:
        rest = rest[links.send_some([rest]) :]
        if not links.wait(sending=True, receiving=False, deadline=Deadline(1.0)):
            break
    return len(rest)


for size in (8, 100):
    left = run_ranks(3, lambda links: send_all(links, np.ones(size)), capacity=CAPACITY)  # noqa: B023
    for rank, nbytes in enumerate(left):
        print(f"{size * 8} bytes: rank {rank} waits with {nbytes} bytes still to send")
