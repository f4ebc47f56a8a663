"""Rank 1 of 3 is in another collective than the others.

minddp run -n 3 examples/broken/other_call.py
"""

import numpy as np

import minddp

with minddp.init_process_group() as pg:
    x = np.ones(1024, np.float32)
    pg.all_reduce(x)
    if pg.rank == 1:
        pg.broadcast(x)
    else:
        pg.all_reduce(x)
