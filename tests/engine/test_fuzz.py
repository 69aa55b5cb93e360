"""Random programs × random policies: bit-equal to plain PyTorch, or an error where plain PyTorch has one.

`LOWTIDE_FUZZ_EXAMPLES=20000 pytest tests/engine/test_fuzz.py` runs more examples.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import lowtide
from lowtide.stores import MemoryDouble

from .budgets import random_eviction
from .programs import Instruction, Machine, policies, programs, run_in_layers

EXAMPLES = int(os.environ.get("LOWTIDE_FUZZ_EXAMPLES", "400"))
modes = st.sampled_from(["after", "inside", "twice", "double"])


def run(program: list[Instruction], scope: Any, mode: str, length: int = 3) -> dict[str, Any]:
    """Return all observable results of a program."""
    torch.manual_seed(11)
    machine = Machine.fresh()
    with contextlib.ExitStack() as stack:
        stack.enter_context(scope)
        run_in_layers(program, machine, length)
        ends = [t for t in machine.live if t.requires_grad and t.is_floating_point()]
        loss = sum((t.double() * torch.arange(1, t.numel() + 1).reshape(t.shape).cos()).sum() for t in ends)
        if mode != "inside":
            stack.close()
        grads: list[torch.Tensor | None] = []
        if mode == "double":
            first = torch.autograd.grad(loss, machine.leaves, create_graph=True, allow_unused=True)
            grads += first
            second = sum(g.square().sum() for g in first if g is not None and g.requires_grad)
            if isinstance(second, torch.Tensor):
                grads += torch.autograd.grad(second, machine.leaves, allow_unused=True)
        else:
            if mode == "twice":
                grads += torch.autograd.grad(loss, machine.leaves, retain_graph=True, allow_unused=True)
            loss.backward()
            grads += [leaf.grad for leaf in machine.leaves]
    return {
        "loss": loss.detach(),
        "grads": [None if g is None else g.detach().clone() for g in grads],
        "live": [t.detach().clone() for t in machine.live],
        "buffers": [machine.buffer.detach().clone(), *(r.clone() for r in machine.running)],
        "generator": torch.get_rng_state(),
    }


def bits(t: torch.Tensor) -> torch.Tensor:
    dense = torch.empty(t.numel(), dtype=t.dtype)
    dense.copy_(t.reshape(-1))
    return dense.view(torch.uint8)


def assert_same(plain: Any, ours: Any, where: str) -> None:
    if isinstance(plain, list):
        assert len(plain) == len(ours), where
        for k, (p, o) in enumerate(zip(plain, ours, strict=True)):
            assert_same(p, o, f"{where}[{k}]")
    elif plain is None or ours is None:
        assert plain is ours, where
    else:
        assert plain.dtype == ours.dtype, where
        assert plain.shape == ours.shape, where
        # NaNs compare equal to themselves; 0.0 and -0.0 do not.
        assert torch.equal(bits(plain), bits(ours)), where


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="LOWTIDE_FUZZ_EXAMPLES" not in os.environ,
    print_blob=True,
)
@pytest.mark.filterwarnings("ignore::lowtide.LowtideWarning")  # of programs too short to have a layer
@given(programs, policies, modes, st.booleans())
def test_random_programs_are_exact(program: list[Instruction], policy: Any, mode: str, verify: bool) -> None:
    try:
        plain = run(program, contextlib.nullcontext(), mode)
    except (RuntimeError, IndexError, TypeError, ValueError, AttributeError) as error:
        # Where plain PyTorch raises, lowtide may raise or succeed. It must not crash or hang.
        with contextlib.suppress(RuntimeError, IndexError, TypeError, ValueError, AttributeError):
            run(program, lowtide.saving(policy, verify=verify), mode)
        del error
        return
    ours = run(program, lowtide.saving(policy, verify=verify), mode)
    for what in plain:
        assert_same(plain[what], ours[what], what)


@settings(
    max_examples=EXAMPLES // 2,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="LOWTIDE_FUZZ_EXAMPLES" not in os.environ,
    print_blob=True,
)
@pytest.mark.filterwarnings("ignore::lowtide.LowtideWarning")
@given(
    programs, modes, st.integers(0, 2**16), st.sampled_from([0.1, 0.5, 1.0]), st.sampled_from(["drop", "move", "all"])
)
def test_random_evictions_are_exact(program: list[Instruction], mode: str, seed: int, share: float, ways: str) -> None:
    """A budget that evicts at random before every op of forward and backward."""
    options: dict[str, Any] = {"stores": None, "codecs": None}
    if ways != "drop":
        options = {"stores": MemoryDouble(), "codecs": ("exact",) if ways == "all" else None}
    try:
        plain = run(program, contextlib.nullcontext(), mode)
    except (RuntimeError, IndexError, TypeError, ValueError, AttributeError) as error:
        with contextlib.suppress(RuntimeError, IndexError, TypeError, ValueError, AttributeError):
            run(program, random_eviction(seed, share, **options), mode)
        del error
        return
    ours = run(program, random_eviction(seed, share, **options), mode)
    for what in plain:
        assert_same(plain[what], ours[what], what)


def test_the_programs_reach_replay() -> None:
    """The fuzz tests are meaningless if no value is replayed."""
    replayed = []

    @settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(programs)
    def drive(program: list[Instruction]) -> None:
        with contextlib.suppress(RuntimeError, IndexError, TypeError, ValueError, AttributeError):
            run(program, lowtide.saving(lowtide.KeepNone()), "after")
            replayed.append(lowtide.report().replayed_ops)

    drive()
    gc.collect()
    assert sum(n > 0 for n in replayed) > len(replayed) // 2
    assert len(replayed) > 20


def test_the_programs_reach_evictions() -> None:
    counts: Counter[str] = Counter()

    @settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(programs)
    def drive(program: list[Instruction]) -> None:
        with contextlib.suppress(RuntimeError, IndexError, TypeError, ValueError, AttributeError):
            run(program, random_eviction(1, stores=MemoryDouble()), "after")
            report = lowtide.report().budget
            assert report is not None
            counts["programs"] += 1
            counts["dropped"] += report.values_dropped > 0
            counts["compressed"] += report.values_decompressed > 0
            counts["fetched"] += report.values_fetched > 0

    drive()
    assert counts["programs"] > 20
    # The kind of eviction depends on measured speeds.
    assert min(counts["dropped"], counts["fetched"]) > 5
    assert counts["compressed"] > 3


if __name__ == "__main__":
    pytest.main([__file__, "-q"])
