"""Measure the cost of the engine: per recorded op, per replayed op, and for a whole GPT-2 step.

    python -m benchmarks.overhead [--rounds N] [--gpt2-rounds N] [--default-allocator]

One thread. All variants run in each round and minima are compared, because the machine may be shared. The per-op part
uses 8 × 8 matrices, so that kernels take little time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lowtide
from benchmarks.harness.machine import keep_freed_memory

OPS = 1000
PRODUCT = torch.ops.aten.mul.Tensor


class PassThrough(TorchDispatchMode):
    """A dispatch mode that does nothing: the smallest cost of any mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


# Bound once, here and for SAC, so that enum lookups are not part of the measured time.
KEEP, RECOMPUTE = lowtide.Decision.KEEP, lowtide.Decision.RECOMPUTE
MUST_SAVE, PREFER_RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


def keep_products(op: lowtide.OpInfo) -> lowtide.Decision:
    return KEEP if op.func is PRODUCT else RECOMPUTE


def sac_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return MUST_SAVE if op is PRODUCT else PREFER_RECOMPUTE


Scope = Callable[[], AbstractContextManager[Any]]


def identity_hooks() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


def in_scope(scope: Scope) -> Callable[[Callable[[], Any]], Any]:
    def call(f: Callable[[], Any]) -> Any:
        with scope():
            return f()

    return call


SAVE_PRODUCTS = lowtide.SaveOps("mul")
EVERY_OTHER = lowtide.Segments((i, i) for i in range(0, OPS, 2))
SELECTIVE = functools.partial(create_selective_checkpoint_contexts, sac_products)
VARIANTS: dict[str, tuple[Callable[[Callable[[], Any]], Any], int]] = {
    # name: (function that runs forward, number of ops replayed in backward)
    "plain": (lambda f: f(), 0),
    "dispatch mode that does nothing": (in_scope(PassThrough), 0),
    "identity saved-tensor hooks": (in_scope(identity_hooks), 0),
    "lowtide KeepAll": (in_scope(lambda: lowtide.saving(lowtide.KeepAll())), 0),
    "lowtide KeepNone": (in_scope(lambda: lowtide.saving(lowtide.KeepNone())), OPS),
    "lowtide, keep products": (in_scope(lambda: lowtide.saving(keep_products)), OPS // 2),
    "lowtide SaveOps(mul)": (in_scope(lambda: lowtide.saving(SAVE_PRODUCTS)), OPS // 2),
    "lowtide Segments, half of the ops": (in_scope(lambda: lowtide.saving(EVERY_OTHER)), OPS // 2),
    "lowtide Selective": (in_scope(lambda: lowtide.saving(lowtide.Selective())), 0),
    "SAC, keep products": (lambda f: checkpoint(f, use_reentrant=False, context_fn=SELECTIVE), OPS // 2),
    "torch checkpoint": (lambda f: checkpoint(f, use_reentrant=False), OPS),
}


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def per_op(rounds: int) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    w = torch.randn(8, 8, requires_grad=True)

    def chain() -> torch.Tensor:
        y = x
        for _ in range(OPS // 2):
            y = torch.sin(y) * w
        return y.sum()

    warnings.filterwarnings("ignore", "SaveOps.* found no layers", lowtide.LowtideWarning)  # this chain has no layers
    gc.collect()
    gc.freeze()  # garbage collection before each measurement skips the imported objects
    forward = {name: float("inf") for name in VARIANTS}
    backward = dict(forward)
    for _ in range(rounds):
        for name, (call, _) in VARIANTS.items():
            with no_garbage_collection():
                start = time.perf_counter()
                loss = call(chain)
                middle = time.perf_counter()
                loss.backward()
                end = time.perf_counter()
                del loss  # otherwise the next variant would free this graph
            forward[name] = min(forward[name], middle - start)
            backward[name] = min(backward[name], end - middle)
    print(f"\n{OPS} small ops, µs per op, minima of {rounds} rounds")
    print(f"{'':35}{'forward':>9}{'over plain':>12}{'backward':>10}{'over plain':>12}{'per replayed op':>17}")
    for name, (_, replayed) in VARIANTS.items():
        f, b = forward[name] / OPS * 1e6, backward[name] / OPS * 1e6
        f0, b0 = forward["plain"] / OPS * 1e6, backward["plain"] / OPS * 1e6
        per = f"{(b - b0) * OPS / replayed:17.1f}" if replayed else f"{'':17}"
        print(f"{name:35}{f:9.1f}{f - f0:12.1f}{b:10.1f}{b - b0:12.1f}{per}")


def gpt2(rounds: int) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=12, n_embd=768, n_head=12)).train()
    ids = torch.randint(0, 50257, (2, 256))
    scopes: dict[str, Scope] = {
        "plain": contextlib.nullcontext,
        "identity saved-tensor hooks": identity_hooks,
        "lowtide KeepAll": lambda: lowtide.saving(lowtide.KeepAll()),
        "lowtide EveryN(1)": lambda: lowtide.saving(lowtide.EveryN(1)),
        "torch checkpoint, every block": contextlib.nullcontext,
    }
    best = {name: float("inf") for name in scopes}
    for k in range(rounds):
        for name, scope in list(scopes.items())[:: 1 if k % 2 else -1]:
            if name.startswith("torch"):
                model.gradient_checkpointing_enable({"use_reentrant": False})
            model.zero_grad(set_to_none=True)
            gc.collect()
            start = time.perf_counter()
            with scope():
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            best[name] = min(best[name], time.perf_counter() - start)
            model.gradient_checkpointing_disable()
    print(f"\nGPT-2, 12 layers, 768 wide, batch 2 × 256: time of a step, minima of {rounds} rounds")
    for name, seconds in best.items():
        print(f"{name:30}{seconds:9.3f} s{'':4}× {seconds / best['plain']:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of the per-op part (default 15)")
    parser.add_argument("--gpt2-rounds", type=int, default=7, help="rounds of the GPT-2 part (default 7; 0 skips it)")
    parser.add_argument(
        "--default-allocator", action="store_true", help="use glibc's allocator with its default settings"
    )
    options = parser.parse_args()
    if not options.default_allocator:
        keep_freed_memory("benchmarks.overhead")
    torch.set_num_threads(1)
    print(f"lowtide {lowtide.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
          f"{platform.machine()} CPU, 1 thread, "
          f"allocator {'with default settings' if options.default_allocator else 'keeping freed memory'}")  # fmt: skip
    per_op(options.rounds)
    if options.gpt2_rounds:
        gpt2(options.gpt2_rounds)


if __name__ == "__main__":
    main()
