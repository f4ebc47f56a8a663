"""The average is computed into a copy of the gradient, and thrown away.

minddp run -n 2 examples/broken/lost_result.py
"""

import numpy as np

import minddp
from minddp import nn, optim

with minddp.init_process_group() as pg:
    minddp.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(np.full((1, 2), pg.rank + 1.0, np.float32)).sum().backward()
        for p in model.parameters():
            pg.all_reduce(p.grad.data.copy(), op="avg")  # should be p.grad.data
        optimizer.step()
    print(f"weights of rank {pg.rank}: {model.weight.data.round(3).tolist()}")
