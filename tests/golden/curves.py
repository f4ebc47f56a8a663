"""Whole models that PyTorch and minddp both train, in one process, written once.

    make_curves.py          PyTorch --.                  .--> curves.npz
                                      |-- train(case) ---|
    test_golden_curves.py   minddp  --'                  '--> equal to it?

    mlp    64 numbers -> 32 -> 16 -> 10 classes
    cnn    images 1 x 8 x 12 -> 4 channels, halved -> 8 channels, halved -> 10 classes
    gpt    8 tokens of 11 -> 2 blocks, width 16, 2 heads -> the token after each

Initial weights and batches come from `ops.numbers`, which is a formula: no random
numbers have to agree, and the file need not hold them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

STEPS, ROWS = 20, 6
TOKENS, CONTEXT, WIDTH, HEADS, BLOCKS = 11, 8, 16, 2, 2
IMAGE, CLASSES = (8, 12), 10


@dataclass(frozen=True)
class Library:
    """PyTorch or minddp.

    F: functions by name. tensor(array): an input. array(parameter): its values, an
    array that can be written. numbers: that of ops.py, which this file cannot import
    under one name for both.
    """

    F: Any
    nn: Any
    optim: Any
    float64: Any
    tensor: Callable[[Any], Any]
    array: Callable[[Any], Any]
    numbers: Callable[..., Any]


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
}
CASES = [
    f"{model}-{optimizer}"
    for model in ("mlp", "cnn", "gpt")
    for optimizer in OPTIMIZERS
]


def build(library: Library, name: str) -> Any:
    nn = library.nn
    if name == "mlp":
        return nn.Sequential(
            nn.Linear(64, 32),
            nn.ReLU(),
            nn.Linear(32, 16),
            nn.ReLU(),
            nn.Linear(16, CLASSES),
        )
    if name == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * IMAGE[0] // 4 * IMAGE[1] // 4, CLASSES),
        )
    return build_gpt(library)


def build_gpt(library: Library) -> Any:
    """Pre-norm blocks as in GPT-2; the head's weight is the table of tokens."""
    nn, F = library.nn, library.F

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            heads = ROWS, CONTEXT, HEADS, WIDTH // HEADS
            q, k, v = (
                part.reshape(*heads).transpose(1, 2)
                for part in self.qkv(x).split(WIDTH, dim=-1)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(y.transpose(1, 2).reshape(ROWS, CONTEXT, WIDTH))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
            self.norm2 = nn.LayerNorm(WIDTH)
            self.mlp = nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.GELU(approximate="tanh"),
                nn.Linear(4 * WIDTH, WIDTH),
            )

        def forward(self, x: Any) -> Any:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(TOKENS, WIDTH)
            self.positions = nn.Embedding(CONTEXT, WIDTH)
            self.blocks = nn.Sequential(*[Block() for _ in range(BLOCKS)])
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, TOKENS, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, ids: Any) -> Any:
            places = library.tensor(np.arange(CONTEXT))
            x = self.tokens(ids) + self.positions(places)
            return self.head(self.norm(self.blocks(x))).reshape(-1, TOKENS)

    return GPT()


def batch(numbers: Callable[..., Any], name: str, step: int) -> tuple[Any, Any]:
    """Inputs and labels of a step. There are five batches, taken in turn."""

    def integers(high: int, *shape: int) -> Any:
        return (numbers(*shape, seed=seed) * 2**18).astype(np.int64) % high

    seed = 100 + step % 5
    if name == "gpt":
        ids = integers(TOKENS, ROWS, CONTEXT + 1)
        return ids[:, :-1].copy(), ids[:, 1:].reshape(-1)
    shape = (64,) if name == "mlp" else (1, *IMAGE)
    return numbers(ROWS, *shape, seed=seed), integers(CLASSES, ROWS)


def train(library: Library, case: str) -> tuple[Any, Any]:
    """(the loss of every step, all final weights in one array)."""
    name, _, optimizer = case.partition("-")
    model = build(library, name).to(library.float64)
    parameters = dict(model.named_parameters())
    for i, (path, p) in enumerate(parameters.items()):
        values = library.array(p)
        values[...] = initial(path, library.numbers(*values.shape, seed=i))
    kind, settings = OPTIMIZERS[optimizer]
    stepper = getattr(library.optim, kind)(model.parameters(), **settings)
    loss_of = library.nn.CrossEntropyLoss()
    losses = np.zeros(STEPS)
    for step in range(STEPS):
        x, y = batch(library.numbers, name, step)
        stepper.zero_grad()
        loss = loss_of(model(library.tensor(x)), library.tensor(y))
        loss.backward()
        losses[step] = loss.item()
        stepper.step()
    final = [library.array(p).ravel() for p in parameters.values()]
    return losses, np.concatenate(final)


def initial(path: str, x: Any) -> Any:
    """x as weights: of size 1 / sqrt(inputs), or 0.1 in vectors; norms are near 1."""
    if x.ndim > 1:
        return 0.7 * x / np.prod(x.shape[1:]) ** 0.5
    return 0.1 * x + ("norm" in path and path.endswith("weight"))
