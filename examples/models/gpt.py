"""A GPT learns to write Python, character by character, from the standard library.

    python examples/models/gpt.py
    minddp run -n 2 examples/models/gpt.py --checkpoint /tmp/gpt.minddp

--data FILE takes another text. With --checkpoint the state is saved at the end, and a
second call with more --steps goes on from there. Under a launcher each rank draws
batches of its own; rank 0 alone evaluates, samples and saves.

0.82 million parameters: 4 blocks of width 128, 4 heads, a context of 64 characters. The
weights of the embedding and of the output are tied, as in GPT-2.
"""

import argparse
import math
import os

import numpy as np
import text

import minddp
from minddp import functional as F
from minddp import nn, optim
from minddp.ddp import DistributedDataParallel as DDP
from minddp.progress import progress

WIDTH, HEADS, BLOCKS, CONTEXT = 128, 4, 4, 64


class Block(nn.Module):
    """Attention, then a two-layer network, each added to what came in."""

    def __init__(self):
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (
            part.view(b, t, HEADS, d // HEADS).transpose(1, 2)
            for part in self.qkv(self.ln1(x)).split(d, -1)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    """(batch, time) characters -> (batch, time, characters) logits of the next one."""

    def __init__(self, vocabulary):
        self.token = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        self.head.weight = self.token.weight  # tied: one parameter, two uses

    def forward(self, characters):
        t = characters.shape[1]
        x = self.token(characters) + self.position(np.arange(t))
        return self.head(self.ln(self.blocks(x)))


def loss_of(model, inputs, targets):
    logits = model(inputs)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def rate(step, steps, peak=2e-3, warm_up=20):
    """The learning rate: linear up, then half a cosine down to a tenth."""
    if step < warm_up:
        return peak * (step + 1) / warm_up
    down = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * down)))


def evaluate(model, data, batches=8):
    """The mean loss over the same pieces of text each time."""
    random = np.random.default_rng(0)
    with minddp.no_grad():
        losses = [
            loss_of(model, *text.batch(data, 16, CONTEXT, random)).item()
            for _ in range(batches)
        ]
    return sum(losses) / batches


def sample(model, start, length, temperature=0.8):
    """`start`, continued by the model; one character at a time is drawn."""
    random, numbers = np.random.default_rng(0), list(text.encode(start))
    with minddp.no_grad():
        for _ in range(length):
            context = np.array([numbers[-CONTEXT:]])
            logits = model(context).numpy()[0, -1] / temperature
            p = np.exp(logits - logits.max())
            numbers.append(int(random.choice(len(p), p=p / p.sum())))
    return text.decode(numbers)


def main(build=GPT):
    """Train build(vocabulary), as the command line says."""
    parser = argparse.ArgumentParser(description="train a character-level GPT")
    parser.add_argument("--data", help="a text file; default: the standard library")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8, help="per rank")
    parser.add_argument("--checkpoint", help="where to save, and to resume from")
    args = parser.parse_args()

    data = text.load(args.data)
    train, held_out = np.split(data, [int(0.9 * len(data))])
    pg = minddp.init_process_group()
    minddp.manual_seed(0)
    model, first = build(len(text.CHARACTERS)), 0
    optimizer = optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95))
    if args.checkpoint and os.path.exists(args.checkpoint):
        state = minddp.load(args.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    ddp = DDP(model, pg)

    if pg.rank == 0:
        print(f"steps {first} to {args.steps}, loss {evaluate(model, held_out):.2f}")
    for step in progress(range(first, args.steps), desc="steps", show=pg.rank == 0):
        random = np.random.default_rng([step, pg.rank])  # the same after a resume
        optimizer.param_groups[0]["lr"] = rate(step, args.steps)
        optimizer.zero_grad()
        loss_of(ddp, *text.batch(train, args.batch, CONTEXT, random)).backward()
        nn.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    if pg.rank == 0:
        print(f"validation loss {evaluate(model, held_out):.2f}")
        print(sample(model, "def ", 200))
        if args.checkpoint:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            minddp.save(state | {"step": args.steps}, args.checkpoint)
    pg.close()


if __name__ == "__main__":
    main()
