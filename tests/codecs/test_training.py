"""Training with codecs on saved tensors, through plain `saved_tensors_hooks`.

With exact codecs, every gradient is bit-equal. With lossy codecs, a small GPT learns equally well: over 300
steps, its loss averaged over 20 steps stays within 0.005 (bf16) or 0.05 (int8) of the loss without codecs,
which falls from above 2.5 to 0.1.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from lowtide.codecs import Encoded, decode, resolve

STEPS = 300
WINDOW = 20
MAX_LOSS_DIFFERENCE = {"bf16": 0.005, "int8": 0.05}
VOCABULARY, LENGTH, BATCH, WIDTH, HEADS = 16, 16, 16, 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        mixed = (nn.functional.dropout(scores.softmax(-1), 0.05) @ v).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(nn.functional.relu(self.up(self.between(x))))


class TinyGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(ids) + self.positions.weight))


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences that count up by a constant step, and the same sequences shifted by one."""
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    step = torch.randint(1, 4, (BATCH, 1), generator=generator)
    row = (start + step * torch.arange(LENGTH + 1)) % VOCABULARY
    return row[:, :-1], row[:, 1:]


class CodecHooks:
    """Hooks that compress each saved tensor with the first codec that applies."""

    def __init__(self, names: str | tuple[str, ...] | None) -> None:
        self.codecs = resolve(names)
        self.used: Counter[str] = Counter()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | Encoded:
        if tensor.is_leaf and tensor.requires_grad:  # a parameter
            return tensor
        for codec in self.codecs:
            encoded = codec.encode(tensor)
            if encoded is not None:
                self.used[codec.name] += 1
                return encoded
        return tensor

    def unpack(self, saved: torch.Tensor | Encoded) -> torch.Tensor:
        return decode(saved) if isinstance(saved, Encoded) else saved


def train(names: str | tuple[str, ...] | None, steps: int) -> tuple[torch.Tensor, list[torch.Tensor], Counter[str]]:
    """Return the losses, the last gradients, and how often each codec was used."""
    torch.manual_seed(0)
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(1)
    hooks = CodecHooks(names)
    losses = []
    for _ in range(steps):
        ids, targets = batch(generator)
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), [p.grad for p in model.parameters() if p.grad is not None], hooks.used


def test_training_with_exact_codecs_is_bit_equal() -> None:
    losses, gradients, _ = train(None, 5)
    same_losses, same_gradients, used = train("exact", 5)
    assert torch.equal(losses, same_losses)
    assert all(torch.equal(a, b) for a, b in zip(gradients, same_gradients, strict=True))
    assert set(used) >= {"mask", "narrow", "sparse", "bytes"}


@pytest.fixture(scope="module")
def exact_curve() -> torch.Tensor:
    return smooth(train(None, STEPS)[0])


def smooth(losses: torch.Tensor) -> torch.Tensor:
    return losses.unfold(0, WINDOW, 1).mean(1)


@pytest.mark.parametrize("name", MAX_LOSS_DIFFERENCE)
def test_small_gpt_learns_equally_well_with_lossy_codecs(name: str, exact_curve: torch.Tensor) -> None:
    losses, _, used = train(("mask", name), STEPS)
    assert used[name] > 10 * STEPS
    assert exact_curve[0] > 2.5
    assert exact_curve[-1] < 0.15
    assert (smooth(losses) - exact_curve).abs().max() < MAX_LOSS_DIFFERENCE[name]
