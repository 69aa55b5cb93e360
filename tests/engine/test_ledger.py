"""The ledger counts memory, not tensors without memory."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.engine.memory.ledger import Ledger


def test_fake_and_meta_tensors_take_no_bytes() -> None:
    ledger = Ledger()
    ledger.count_everything()
    before = ledger.live_bytes
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.nn.Parameter(torch.empty(1 << 16)))
        made = torch.empty(1 << 20)
    meta = torch.empty(1 << 20, device="meta")
    ledger.count_everything()
    assert ledger.live_bytes - before < 1 << 16
    real = torch.empty(1 << 18)
    ledger.count_everything()
    assert ledger.live_bytes - before >= real.nbytes
    assert fake.shape[0] < made.shape[0] == meta.shape[0]  # keeps all of them alive
