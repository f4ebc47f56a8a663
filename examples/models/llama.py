"""A model in the manner of Llama: RMSNorm, rotary positions, SwiGLU, no biases.

    python examples/models/llama.py
    minddp run -n 2 examples/models/llama.py --steps 500

Trained as gpt.py is, with the same options; only the model differs. Positions are not
added to the input: queries and keys are turned by an angle that grows with the
position, so that their product depends on the distance alone.
        [Touvron et al. 2023, arXiv 2302.13971; rotary: Su et al. 2021, 2104.09864]
"""

import gpt
import numpy as np

from minddp import functional as F
from minddp import nn

WIDTH, HEADS, BLOCKS, HIDDEN = 128, 4, 4, 352


class Block(nn.Module):
    def __init__(self):
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (self.heads(part(h)) for part in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(F.rotary(q), F.rotary(k), v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(x.shape))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))  # SwiGLU

    def heads(self, x):
        b, t, d = x.shape
        return x.view(b, t, HEADS, d // HEADS).transpose(1, 2)


class Llama(nn.Module):
    """(batch, time) characters -> (batch, time, characters) logits of the next one."""

    def __init__(self, vocabulary):
        self.token = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, characters):
        x = self.token(np.asarray(characters))
        return self.head(self.norm(self.blocks(x)))


if __name__ == "__main__":
    gpt.main(Llama)
