"""A small GPT trained as one trains a large one, in the manner of nanoGPT.

    minddp run -n 2 examples/torch_style/nano.py --max_iters 20 --out_dir /tmp/nano

Tied weights, weight decay for matrices only, warm-up and cosine, micro-batches that
send with the last one only, clipping, mixed precision with a loss scale, evaluation and
checkpoints on rank 0 alone. A second call with --init_from resume goes on. It prints:

    [rank 0] 13,696 decayed and 480 other parameters, 8 sequences a step
    [rank 0] iteration 0: loss 3.34
    [rank 0] iteration 10: loss 2.05
    [rank 0] iteration 20: loss 1.45, saved
"""

import argparse
import inspect
import math
import os

import numpy as np

import minddp as torch
import minddp.distributed as dist
from minddp import nn
from minddp.amp import GradScaler, autocast
from minddp.ddp import DistributedDataParallel as DDP
from minddp.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--out_dir", default="out")
parser.add_argument("--init_from", default="scratch", choices=["scratch", "resume"])
parser.add_argument("--max_iters", type=int, default=20)
parser.add_argument("--dtype", default="float16", choices=["float32", "float16"])
config = parser.parse_args()
n_embd, n_head, n_layer, block_size = 32, 4, 1, 16
batch_size, gradient_accumulation_steps = 2, 4
learning_rate, min_lr, warmup_iters, lr_decay_iters = 1e-2, 1e-3, 4, 20
text = "the quick brown fox jumps over the lazy dog. " * 40

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group(backend="nccl")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
else:
    rank, world_size = 0, 1
master_process = rank == 0
assert gradient_accumulation_steps % world_size == 0
gradient_accumulation_steps //= world_size
torch.manual_seed(1337)
letters = sorted(set(text))
data = torch.tensor([letters.index(c) for c in text])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(n_embd, 4 * n_embd),
                "gelu": nn.GELU(),
                "c_proj": nn.Linear(4 * n_embd, n_embd),
            }
        )

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(n_embd, dim=2)
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        h = self.mlp["gelu"](self.mlp["c_fc"](self.ln_2(x)))
        return x + self.mlp["c_proj"](h)


class GPT(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx, targets):
        pos = torch.arange(0, idx.size(1), dtype=torch.long)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    def configure_optimizers(self):
        params = {n: p for n, p in self.named_parameters() if p.requires_grad}
        decay = [p for p in params.values() if p.dim() >= 2]
        nodecay = [p for p in params.values() if p.dim() < 2]
        sizes = [sum(p.numel() for p in ps) for ps in (decay, nodecay)]
        groups = [
            {"params": decay, "weight_decay": 0.1},
            {"params": nodecay, "weight_decay": 0.0},
        ]
        fused = "fused" in inspect.signature(torch.optim.AdamW).parameters
        extra = {"fused": True} if fused else {}
        optimizer = torch.optim.AdamW(groups, learning_rate, (0.9, 0.95), **extra)
        return optimizer, sizes


def get_batch(seed):
    draw = np.random.default_rng(seed)
    ix = draw.integers(0, len(data) - block_size, batch_size)
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x.pin_memory().to("cpu", non_blocking=True), y.to("cpu")


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = min(1.0, (it - warmup_iters) / (lr_decay_iters - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    losses = torch.zeros(8)
    for k in range(8):
        losses[k] = model(*get_batch([999, k])).item()
    model.train()
    return losses.mean()


raw_model, iter_num = GPT(len(letters)), 0
optimizer, sizes = raw_model.configure_optimizers()
scaler = GradScaler(enabled=(config.dtype == "float16"))
path = os.path.join(config.out_dir, "ckpt.pt")
if config.init_from == "resume":
    checkpoint = torch.load(path, map_location="cpu")
    raw_model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scaler.load_state_dict(checkpoint["scaler"])
    iter_num = checkpoint["iter_num"]
model = DDP(raw_model, device_ids=[rank]) if ddp else raw_model
if master_process:
    os.makedirs(config.out_dir, exist_ok=True)
    sequences = gradient_accumulation_steps * world_size * batch_size
    parameters = f"{sizes[0]:,} decayed and {sizes[1]:,} other parameters"
    print(f"{parameters}, {sequences} sequences a step")

while True:
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    if iter_num % 10 == 0 and master_process:
        line = f"iteration {iter_num}: loss {estimate_loss(raw_model):.2f}"
        if iter_num == config.max_iters:
            checkpoint = {
                "model": raw_model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
                "iter_num": iter_num,
            }
            torch.save(checkpoint, path)
            line += ", saved"
        print(line)
    if iter_num >= config.max_iters:
        break
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            last = micro_step == gradient_accumulation_steps - 1
            model.require_backward_grad_sync = last
        number = micro_step * world_size + rank
        with autocast("cpu", dtype=torch.float16, enabled=config.dtype == "float16"):
            loss = model(*get_batch([iter_num, number])) / gradient_accumulation_steps
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1

if ddp:
    dist.destroy_process_group()
