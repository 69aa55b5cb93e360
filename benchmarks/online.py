"""Measure step times under an online budget: six models, budgets of decreasing size, recomputation only.

    python -m benchmarks.online [--models NAME ...] [--shares 0.9 ...] [--rounds N] [--variants] [--save]

One thread. A budget is parameters, buffers and batch, and a share of the rest of plain's peak. Each round runs a plain
step and all budgets (with `--variants` for all heuristics). Minima are compared, because the machine may be shared.
Peaks come from a separate step, with a meter that is independent of the engine. `--save` writes plot and numbers to
benchmarks/results.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import lowtide
from benchmarks.harness.baseline_variants import H_DTR
from benchmarks.harness.machine import RESULTS, keep_freed_memory, use_one_thread
from benchmarks.harness.steps import base_tensors
from benchmarks.harness.unets import UNet
from benchmarks.overhead import PassThrough
from lowtide.engine.memory.eviction import Heuristic
from lowtide.engine.memory.ledger import Ledger
from lowtide.engine.runtime import current_runtime
from lowtide.profiling.peak_meter import PeakMeter

SHARES = (0.9, 0.7, 0.5, 0.4, 0.3)
WIDTH: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
VOCAB_SIZE = 512

Step = Callable[[], torch.Tensor]


def text(build: Callable[[], nn.Module], batch: int = 8, length: int = 128) -> tuple[nn.Module, Step, list[Any]]:
    model = build().train()
    ids = torch.randint(5, VOCAB_SIZE, (batch, length), generator=torch.Generator().manual_seed(1))
    return model, lambda: model(input_ids=ids, labels=ids).loss, [ids]


def image(build: Callable[[], nn.Module], size: int, batch: int) -> tuple[nn.Module, Step, list[Any]]:
    model = build().train()
    pixels = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(2))
    labels = torch.arange(batch) % 5
    return model, lambda: model(pixel_values=pixels, labels=labels).loss, [pixels, labels]


def unet() -> tuple[nn.Module, Step, list[Any]]:
    model = UNet().train()
    x = torch.randn(12, 3, 96, 96, generator=torch.Generator().manual_seed(3))
    return model, lambda: model(x).square().mean(), [x]


MODELS: dict[str, Callable[[], tuple[nn.Module, Step, list[Any]]]] = {
    "GPT-2": lambda: text(
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=6, n_embd=256, n_head=4, vocab_size=VOCAB_SIZE, **IDS)
        )
    ),
    "Llama": lambda: text(
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**WIDTH, num_hidden_layers=6, num_key_value_heads=4, vocab_size=VOCAB_SIZE, **IDS)
        )
    ),
    "BERT": lambda: text(
        lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(**WIDTH, num_hidden_layers=6, vocab_size=VOCAB_SIZE)
        )
    ),
    "ViT": lambda: image(
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(**WIDTH, num_hidden_layers=6, image_size=64, patch_size=8, num_labels=5)
        ),
        64,
        16,
    ),
    "ResNet": lambda: image(
        lambda: transformers.ResNetForImageClassification(
            transformers.ResNetConfig(embedding_size=32, hidden_sizes=[64, 128, 256], depths=[3, 4, 3], num_labels=5)
        ),
        128,
        32,
    ),
    "U-Net": unet,
}

VARIANTS: dict[str, Heuristic] = {
    "h-DTR": H_DTR,
    "h-DTR, all values compared": Heuristic(wait="since use", unsaved_share=1.0, sample=10**9),
    "least recently used": Heuristic(wait="since use", cost=False, unsaved_share=1.0),
    "without neighbours": Heuristic(neighbours=False),
    "without the wait": Heuristic(wait="none"),
    "unsaved values at full cost": Heuristic(unsaved_share=1.0),
    "unsaved values at no cost": Heuristic(unsaved_share=0.0),
    "all values compared": Heuristic(sample=10**9),
}


def fixed_bytes(model: nn.Module, batch: list[Any]) -> int:
    """Return the bytes of parameters, buffers and batch."""
    ledger = Ledger()
    ledger.count_all([*model.parameters(), *model.buffers(), *batch])
    return ledger.live_bytes


def run(model: nn.Module, step: Step, limit_bytes: int | None, heuristic: Heuristic) -> float:
    """Return the time of a step that starts from the same state each time."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    current_runtime().memory().pool.heuristic = heuristic
    gc.collect()
    start = time.perf_counter()
    scope = lowtide.budget(f"{limit_bytes} B", stores=None, codecs=None) if limit_bytes else contextlib.nullcontext()
    with scope:
        loss = step()
    loss.backward()
    return time.perf_counter() - start


def peak_of(model: nn.Module, step: Step, batch: list[Any], limit_bytes: int | None, heuristic: Heuristic) -> int:
    model.zero_grad(set_to_none=True)
    gc.collect()
    with PeakMeter(base_tensors(model, batch)) as meter:
        run(model, step, limit_bytes, heuristic)
    return meter.peak_bytes


def measure(name: str, shares: list[float], variants: dict[str, Heuristic], rounds: int) -> dict[str, Any]:
    """Measure all budgets and heuristics for one model."""
    torch.manual_seed(0)
    model, step, batch = MODELS[name]()
    default = variants["lowtide"]
    run(model, step, None, default)
    fixed = fixed_bytes(model, batch)
    plain_peak = peak_of(model, step, batch, None, default)
    limits = {share: fixed + int(share * (plain_peak - fixed)) for share in shares}
    rows: list[dict[str, Any]] = []
    for variant, heuristic in variants.items():
        for share, limit in limits.items():
            row = {"variant": variant, "share": share, "budget_bytes": limit}
            try:
                row["peak_bytes"] = peak_of(model, step, batch, limit, heuristic)
                row["replayed_ops"] = lowtide.report().replayed_ops
            except lowtide.BudgetError as error:
                row["error"] = str(error).split(":")[0]
            rows.append(row)
    plain, ample = [], []
    for _ in range(rounds):
        plain.append(run(model, step, None, default))
        ample.append(run(model, step, 2 * plain_peak, default))
        for row in rows:
            if "error" not in row:
                seconds = run(model, step, row["budget_bytes"], variants[row["variant"]])
                row["seconds"] = min(seconds, row.get("seconds", seconds))
    for row in rows:
        if "error" not in row:
            row["times"] = row["seconds"] / min(plain)
    current_runtime().memory().pool.heuristic = default
    ops = lowtide.report().ops
    return {
        "model": name,
        "plain_seconds": min(plain),
        "plain_peak_bytes": plain_peak,
        "fixed_bytes": fixed,
        "ops": ops,
        "ample_times": min(ample) / min(plain),
        "rows": rows,
    }


def print_result(result: dict[str, Any]) -> None:
    mib = 2.0**20
    print(
        f"\n{result['model']}: plain {result['plain_seconds']:.3f} s, peak {result['plain_peak_bytes'] / mib:.1f} MiB, "
        f"of which {result['fixed_bytes'] / mib:.1f} MiB are parameters, buffers and batch; {result['ops']} ops; "
        f"ample budget × {result['ample_times']:.3f}"
    )
    print(f"{'':32}{'share':>7}{'budget, MiB':>13}{'peak, MiB':>11}{'replayed ops':>14}{'time':>9}")
    for row in result["rows"]:
        start = f"{row['variant']:32}{row['share']:7.0%}{row['budget_bytes'] / mib:13.1f}"
        if "error" in row:
            print(f"{start}  too small")
        else:
            print(f"{start}{row['peak_bytes'] / mib:11.1f}{row['replayed_ops']:14}   × {row['times']:.3f}")


def per_op(rounds: int = 15, ops: int = 1000) -> dict[str, float]:
    """Print and return the time per small op in µs, if nothing is evicted."""
    x = torch.randn(8, 8, requires_grad=True)
    w = torch.randn(8, 8, requires_grad=True)
    scopes: dict[str, Any] = {
        "plain": contextlib.nullcontext,
        "dispatch mode that does nothing": PassThrough,
        "lowtide KeepNone": lambda: lowtide.saving(lowtide.KeepNone()),
        "lowtide budget": lambda: lowtide.budget("64 GiB", stores=None, codecs=None),
    }
    forward = dict.fromkeys(scopes, float("inf"))
    backward = dict(forward)
    for _ in range(rounds):
        for name, scope in scopes.items():
            gc.collect()
            gc.disable()
            opened = scope()
            with opened:
                start = time.perf_counter()
                y = x
                for _ in range(ops // 2):
                    y = torch.sin(y) * w
                middle = time.perf_counter()
            y.sum().backward() if name == "lowtide KeepNone" else None
            begin = time.perf_counter()
            if name != "lowtide KeepNone":
                y.sum().backward()
            end = time.perf_counter()
            gc.enable()
            forward[name] = min(forward[name], (middle - start) / ops * 1e6)
            backward[name] = min(backward[name], (end - begin) / ops * 1e6)
    print(f"\n{ops} ops on 8 × 8 matrices, µs per op, minima of {rounds} rounds")
    for name in scopes:
        more = f"backward {backward[name]:6.1f}" if name != "lowtide KeepNone" else ""
        print(f"{name:28} forward {forward[name]:6.1f}   {more}")
    return {f"{name}, forward": us for name, us in forward.items()} | {
        f"{name}, backward": us for name, us in backward.items() if name != "lowtide KeepNone"
    }


def draw(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["variant"] for result in results for row in result["rows"]))
    shown = [name for name in ("lowtide", "h-DTR", "least recently used") if name in names]
    styles = {
        "lowtide": ("#0b6e99", 2.4, "o"),
        "h-DTR": ("#d9730d", 1.4, "s"),
        "least recently used": ("#999999", 1.2, "^"),
    }
    figure, axes = pyplot.subplots(2, 3, figsize=(11, 6.4), sharex=True, sharey=True, layout="constrained")
    for axis, result in zip(axes.flat, results, strict=False):
        for name in shown:
            colour, width, marker = styles[name]
            rows = [row for row in result["rows"] if row["variant"] == name and "times" in row]
            axis.plot(
                [100 * row["share"] for row in rows], [row["times"] for row in rows],
                color=colour, linewidth=width, marker=marker, markersize=4, label=name,
                zorder=3 if name == "lowtide" else 2,
            )  # fmt: skip
        axis.axhline(1, color="black", linewidth=0.7)
        axis.set_title(f"{result['model']}, plain step {result['plain_seconds']:.2f} s", fontsize=10)
        axis.grid(alpha=0.25)
        axis.set_ylim(0.95, 2.05)
        axis.set_xlim(95, 25)
        axis.spines[["top", "right"]].set_visible(False)
    axes.flat[0].legend(frameon=False, fontsize=9, loc="upper left")
    for axis in axes[1]:
        axis.set_xlabel("budget, % of plain's activation bytes")
    for axis in axes[:, 0]:
        axis.set_ylabel("step time, plain = 1")
    held = sum(row.get("peak_bytes", 0) <= row["budget_bytes"] for result in results for row in result["rows"])
    count = sum(len(result["rows"]) for result in results)
    figure.suptitle(
        f"Step time under an online budget, recomputation only ({held} of {count} peaks within the budget)",
        fontsize=12,
    )
    figure.savefig(path, dpi=110)


def machine() -> str:
    return (f"lowtide {lowtide.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
            f"{platform.machine()} CPU, {os.cpu_count()} cores, 1 thread, allocator keeping freed memory")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS), help="models to measure")
    parser.add_argument(
        "--shares", nargs="*", type=float, default=list(SHARES), help="budgets, as shares of activations"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of timed steps (default 5)")
    parser.add_argument("--variants", nargs="*", help="heuristics to compare; all if no name is given")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/online.{json,png}")
    options = parser.parse_args()
    keep_freed_memory("benchmarks.online")
    use_one_thread()
    variants = {"lowtide": Heuristic()}
    if options.variants is not None:
        variants |= {name: VARIANTS[name] for name in options.variants or VARIANTS}
    print(machine())
    per_op_us = per_op()
    results = []
    for name in options.models:
        results.append(measure(name, options.shares, variants, options.rounds))
        print_result(results[-1])
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        saved = {"machine": machine(), "rounds": options.rounds, "per_op_us": per_op_us, "models": results}
        (RESULTS / "online.json").write_text(json.dumps(saved, indent=1) + "\n")
        draw(results, RESULTS / "online.png")


if __name__ == "__main__":
    main()
