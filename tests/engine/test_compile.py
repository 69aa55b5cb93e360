"""`torch.compile` inside a scope: regions stay compiled, and their memory is opaque unless they are wrapped.

One process per test, because compiled code of dynamo remains for the process.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import contextlib, sys, torch, lowtide
from torch import nn
from torch._dynamo.utils import counters
import torch._inductor.config as inductor

torch.set_num_threads(1)
inductor.wrap_inductor_compiled_regions = {wrap}

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(32, 32), nn.Linear(32, 32), nn.BatchNorm1d(32)
        self.drop = nn.Dropout({dropout})
    def forward(self, x):
        return x + self.drop(self.b(torch.nn.functional.gelu(self.a(self.norm(x)))))

torch.manual_seed(0)
blocks = [Block() for _ in range(3)]
model = nn.Sequential(*blocks, nn.Linear(32, 4))
if {batch_norm} is False:
    for block in blocks:
        block.norm = nn.LayerNorm(32)
for block in blocks:
    block.compile()
x = torch.randn(16, 32)
state = {{k: v.clone() for k, v in model.state_dict().items()}}

def step(scope):
    model.load_state_dict(state)
    model.zero_grad()
    torch.manual_seed(1)
    with scope:
        loss = model(x).sin().square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]

plain = step(contextlib.nullcontext())
graphs = counters["stats"]["unique_graphs"]
for policy in (lowtide.KeepAll(), lowtide.KeepNone(), lowtide.Selective(), lowtide.Segments([(0, 3)])):
    ours = step(lowtide.saving(policy))
    assert all(torch.equal(a, b) for a, b in zip(plain, ours)), policy
    report = lowtide.report()
    if isinstance(policy, lowtide.KeepNone):
        print("replayed", report.replayed_ops, "recomputed", report.values_recomputed)
        print("pinned", sorted({{p.op for p in report.pinned}}))
assert counters["stats"]["unique_graphs"] == graphs, "compiled again"
assert not counters["graph_break"], counters["graph_break"]
"""


def run(**options: object) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT.format(**options)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.parametrize("batch_norm", [True, False])
def test_without_the_wrap_compiled_memory_is_opaque(batch_norm: bool) -> None:
    out = run(wrap=False, dropout=0.2, batch_norm=batch_norm)
    assert "pinned []" in out


def test_wrapped_regions_are_replayed() -> None:
    out = run(wrap=True, dropout=0.0, batch_norm=False)
    assert "pinned []" in out
    assert "replayed 0" not in out


@pytest.mark.parametrize(("dropout", "batch_norm"), [(0.2, False), (0.0, True)])
def test_wrapped_regions_that_draw_or_write_are_kept(dropout: float, batch_norm: bool) -> None:
    out = run(wrap=True, dropout=dropout, batch_norm=batch_norm)
    assert "pinned ['inductor_compiled_code']" in out
