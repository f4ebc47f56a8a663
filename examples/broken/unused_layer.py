"""A layer that forward does not use: its bucket never fills.

minddp run -n 2 examples/broken/unused_layer.py
"""

import numpy as np

import minddp
from minddp import nn


class Model(nn.Module):
    def __init__(self):
        self.used = nn.Linear(2, 2)
        self.spare = nn.Linear(2, 2, bias=False)

    def forward(self, x):
        return self.used(x)


with minddp.init_process_group() as pg:
    model = minddp.DistributedDataParallel(Model(), pg)
    model(np.ones((1, 2), np.float32)).sum().backward()
