"""
Pyroclast's GPT, restated in PyTorch: the model, the order of the data, the optimizers and the step.

This file is the yardstick the Rust engine is measured with, so it is written to be read in one
sitting and leaves out everything that does not change the numbers. The module attributes are named
so that `state_dict()` has exactly the engine's weight names:

    tok.weight pos.weight blocks.N.{ln1,qkv,proj,ln2,fc,out}.{weight,bias} ln.{weight,bias} head.weight
"""

import math
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F

VOCAB = 256  # one token per byte, no tokenizer

PRESETS = {
    "gpt-nano": dict(layers=4, heads=4, width=128, context=64),
    "gpt-mini": dict(layers=6, heads=6, width=384, context=256),
    "gpt2": dict(layers=12, heads=12, width=768, context=1024),
}

# -----------------------------------------------------------------------------
# the model


class Block(nn.Module):
    """A pre-norm transformer block: attention, then an MLP, each added to the residual stream."""

    def __init__(self, width, heads, sdpa):
        super().__init__()
        self.heads, self.sdpa = heads, sdpa
        self.ln1 = nn.LayerNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width)  # rows are [q; k; v], each made of `heads` contiguous slices
        self.proj = nn.Linear(width, width)
        self.ln2 = nn.LayerNorm(width, eps=1e-5)
        self.fc = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def attn(self, x):
        B, T, C = x.shape
        # (B, T, C) -> (B, heads, T, head_dim)
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(C, dim=2))
        if self.sdpa:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            att = q @ k.transpose(-2, -1) / math.sqrt(C // self.heads)
            future = torch.ones(T, T, dtype=torch.bool).triu(1)
            y = att.masked_fill(future, -math.inf).softmax(dim=-1) @ v
        return y.transpose(1, 2).reshape(B, T, C)

    def forward(self, x):
        x = x + self.proj(self.attn(self.ln1(x)))
        x = x + self.out(F.gelu(self.fc(self.ln2(x))))  # the exact GELU, with erf
        return x


class GPT(nn.Module):
    """Bytes in, next-byte logits out. `sdpa` picks torch's fused attention over the one spelled out."""

    def __init__(self, layers, heads, width, context, sdpa=False):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, width)
        self.pos = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, sdpa) for _ in range(layers))
        self.ln = nn.LayerNorm(width, eps=1e-5)
        self.head = nn.Linear(width, VOCAB, bias=False)  # not tied to `tok`
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, x, y):
        """The mean cross entropy of predicting bytes `y` (B, T) from bytes `x` (B, T)."""
        h = self.tok(x) + self.pos(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.ln(h))
        return F.cross_entropy(logits.view(-1, VOCAB), y.reshape(-1))


# -----------------------------------------------------------------------------
# the data: which bytes every step sees


def load_text(path, val_split):
    """The bytes of a file as (train, val); the last floor(len * val_split) bytes are val."""
    data = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
    n = len(data) - math.floor(len(data) * val_split)
    return data[:n], data[n:]


def num_windows(data, context):
    """How many disjoint windows fit; the last one still needs one more byte for its target."""
    return (len(data) - 1) // context


def windows(data, context, js):
    """Inputs and targets of the windows `js`: `context` bytes from j * context, and one byte later."""
    x = torch.stack([data[j * context : (j + 1) * context] for j in js])
    y = torch.stack([data[j * context + 1 : (j + 1) * context + 1] for j in js])
    return x.long(), y.long()


# -----------------------------------------------------------------------------
# the training


def make_optimizer(model, name, lr, fused=False):
    """SGD with momentum and no decay, or AdamW that decays the 2-D parameters only."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=0.01), dict(params=vectors, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8, fused=fused or None)


def train_step(model, optimizer, data, context, consumed, batch, accumulate=1, clip=0.0, rank=0, world=1):
    """
    One optimizer step of rank `rank` of `world`. The run's k-th sample is window k (mod their number);
    `consumed` samples are behind us, and this step takes the next accumulate * world * batch.

    Returns this rank's loss (the mean over its micro-batches) and the gradient's global L2 norm before
    clipping. clip=0 measures the norm and leaves the gradient alone; clip=None skips even the norm.
    """
    loss_sum, n = 0.0, num_windows(data, context)
    optimizer.zero_grad(set_to_none=True)
    for m in range(accumulate):
        k = consumed + (m * world + rank) * batch
        loss = model(*windows(data, context, [(k + b) % n for b in range(batch)]))
        (loss / accumulate).backward()
        loss_sum += loss.item()
    norm = None
    if clip is not None:  # scales by min(1, clip / (norm + 1e-6))
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf).item()
    optimizer.step()
    return loss_sum / accumulate, norm


@torch.no_grad()
def evaluate(model, data, context, batch):
    """The mean loss over all windows of `data`, a smaller last batch weighted by its size."""
    loss_sum, n = 0.0, num_windows(data, context)
    for start in range(0, n, batch):
        js = range(start, min(start + batch, n))
        loss_sum += model(*windows(data, context, js)).item() * len(js)
    return loss_sum / n
