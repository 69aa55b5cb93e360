"""What a plan costs in time: seven models at the peaks of the usual schemes, at half the activations, and with plenty.

    python -m benchmarks.planned [--models gpt2,llama,...] [--rounds N] [--quick] [--out DIR]

One thread. For each model, plain PyTorch, `torch.utils.checkpoint` on every block, the same keeping matrix products
and attention (SAC), and lowtide's plans are run in turn, round by round, and minima of the process's CPU time are
compared (wall time is beside it), because the machine may be shared. A plan is made once; each round fits the model
with it, takes the two steps that lowtide itself measures, and times those that follow. Peaks are those of a step of
their own, by a meter that is not part of the engine's bookkeeping; gradients are compared by their hashes, bit by bit.
Writes planned.json, planned.md and planned.png.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import hashlib
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lowtide
from benchmarks.online import RESULTS, UNet
from benchmarks.overhead import ALLOCATOR
from lowtide.profiling.meter import PeakMeter

MIB = 2**20
ATEN = torch.ops.aten
KEPT_BY_SAC = {
    ATEN.mm.default,
    ATEN.addmm.default,
    ATEN.bmm.default,
    ATEN.baddbmm.default,
    ATEN.convolution.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
    ATEN._scaled_dot_product_attention_math.default,
}
AT_CHECKPOINT, AT_SAC, AT_HALF, AMPLE = "at checkpoint's peak", "at SAC's peak", "half the activations", "ample"
PLANNED = (AT_CHECKPOINT, AT_SAC, AT_HALF, AMPLE)
TIMED_STEPS = 2  # of each variant in each round

# -- the models ---------------------------------------------------------------------------------------

WORDS = 2048
IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False}
Made = tuple[nn.Module, dict[str, torch.Tensor]]


def text(model: nn.Module, batch: int, length: int, words: int = WORDS) -> Made:
    ids = torch.randint(5, words, (batch, length), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": ids, "labels": ids}


def image(model: nn.Module, size: int, batch: int) -> Made:
    pixels = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(2))
    return model, {"pixel_values": pixels, "labels": torch.arange(batch) % 5}


def width(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": hidden // 64,
        "num_hidden_layers": layers,
    }


class Segmenter(UNet):
    """A U-Net with its loss: four classes for each pixel."""

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(super().forward(pixel_values), labels)


def unet() -> Made:
    pixels = torch.randn(14, 3, 96, 96, generator=torch.Generator().manual_seed(3))
    labels = torch.randint(0, 4, (14, 96, 96), generator=torch.Generator().manual_seed(4))
    return Segmenter(), {"pixel_values": pixels, "labels": labels}


MODELS: dict[str, tuple[str, Callable[[], Made]]] = {
    "gpt2": (
        "GPT-2, 6 × 256, batch 8 × 128",
        lambda: text(
            transformers.GPT2LMHeadModel(
                transformers.GPT2Config(n_layer=6, n_embd=256, n_head=4, vocab_size=WORDS, n_positions=128, **IDS)
            ),
            8,
            128,
        ),
    ),
    "llama": (
        "Llama, 6 × 256, batch 8 × 128",
        lambda: text(
            transformers.LlamaForCausalLM(
                transformers.LlamaConfig(**width(256, 6), num_key_value_heads=2, vocab_size=WORDS, **IDS)
            ),
            8,
            128,
        ),
    ),
    "bert": (
        "BERT, 6 × 256, batch 8 × 128",
        lambda: text(transformers.BertForMaskedLM(transformers.BertConfig(**width(256, 6), vocab_size=WORDS)), 8, 128),
    ),
    "t5": (
        "T5, 3 + 3 × 256, batch 8 × 128",
        lambda: text(
            transformers.T5ForConditionalGeneration(
                transformers.T5Config(
                    d_model=256,
                    d_kv=64,
                    d_ff=1024,
                    num_layers=3,
                    num_heads=4,
                    vocab_size=WORDS,
                    decoder_start_token_id=0,
                    pad_token_id=0,
                    use_cache=False,
                )
            ),
            8,
            128,
        ),
    ),
    "vit": (
        "ViT, 6 × 256, batch 16 × 64² in 8² patches",
        lambda: image(
            transformers.ViTForImageClassification(
                transformers.ViTConfig(**width(256, 6), image_size=64, patch_size=8, num_labels=5)
            ),
            64,
            16,
        ),
    ),
    "resnet50": (
        "ResNet-50 at half width, batch 12 × 128²",
        lambda: image(
            transformers.ResNetForImageClassification(
                transformers.ResNetConfig(
                    embedding_size=32, hidden_sizes=[128, 256, 512, 1024], depths=[3, 4, 6, 3], num_labels=5
                )
            ),
            128,
            12,
        ),
    ),
    "unet": ("U-Net, 16 to 128 wide, batch 14 × 96²", unet),
}
TINY = (
    "GPT-2, 4 × 64, batch 8 × 32",
    lambda: text(
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=4, n_embd=64, n_head=2, vocab_size=128, n_positions=32, **IDS)
        ),
        8,
        32,
        128,
    ),
)


# -- the schemes --------------------------------------------------------------------------------------


def sac(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT_BY_SAC else CheckpointPolicy.PREFER_RECOMPUTE


SCHEMES: dict[str, dict[str, Any]] = {
    "checkpoint": {"use_reentrant": False},
    "SAC": {"use_reentrant": False, "context_fn": functools.partial(create_selective_checkpoint_contexts, sac)},
}


def blocks(model: nn.Module) -> list[nn.Module]:
    """What gets a checkpoint each, where transformers has no switch for it."""
    if isinstance(model, UNet):
        return [model.first, *model.down, *model.join]
    return [m for m in model.modules() if type(m).__name__ == "ResNetBottleNeckLayer"]


@contextlib.contextmanager
def scheme(model: nn.Module, name: str) -> Iterator[None]:
    """The model under a scheme of torch's."""
    if name == "plain":
        yield
    elif getattr(model, "supports_gradient_checkpointing", False):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=SCHEMES[name])
        try:
            yield
        finally:
            model.gradient_checkpointing_disable()
    else:
        wrapped = blocks(model)
        assert wrapped
        for block in wrapped:
            block.forward = functools.partial(checkpoint, block.forward, **SCHEMES[name])
        try:
            yield
        finally:
            for block in wrapped:
                del block.forward


# -- measuring ----------------------------------------------------------------------------------------


@dataclass
class Row:
    """One variant of one model."""

    peak_bytes: int = 0
    peak_by_lowtide_bytes: int | None = None
    asked_bytes: int | None = None
    predicted_bytes: int | None = None
    predicted_ratio: float | None = None
    bound_ratio: float | None = None
    profiled_step_s: float | None = None  # what the plan takes for plain
    planning_s: float | None = None
    solve_s: float | None = None
    solver: str | None = None
    replayed_ops: int | None = None
    exact: bool | None = None
    followed: bool | None = None
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    failure: str | None = None


def base_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers(), *tree_leaves(batch)]


def storage_bytes(tensors: Any) -> int:
    return sum({s.data_ptr(): s.nbytes() for t in tensors if (s := t.untyped_storage()).nbytes()}.values())


def process_bytes() -> int:
    """All tensors that are alive now, as a budget counts them."""
    gc.collect()
    return storage_bytes([x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)])


def clear(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)
    gc.collect()


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    torch.manual_seed(7)  # the same dropout each time
    loss_of(model(**batch)).backward()


def loss_of(out: Any) -> torch.Tensor:
    """The output itself, with its logits, is not held through backward: a plan does not count that."""
    return out if isinstance(out, torch.Tensor) else out.loss


def gradients_hash(model: nn.Module) -> str:
    digest = hashlib.blake2b()
    for p in model.parameters():
        digest.update(p.grad.contiguous().numpy().tobytes() if p.grad is not None else b"none")
    return digest.hexdigest()


def metered(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    clear(model)
    with PeakMeter(base_of(model, batch)) as meter:
        step(model, batch)
    return meter.peak_bytes


def timed(model: nn.Module, batch: dict[str, torch.Tensor], row: Row) -> None:
    clear(model)
    for _ in range(TIMED_STEPS):
        model.zero_grad(set_to_none=True)
        wall, cpu = time.perf_counter(), time.process_time()
        step(model, batch)
        row.cpu_s.append(time.process_time() - cpu)
        row.wall_s.append(time.perf_counter() - wall)


class Measured:
    """One model and all its variants."""

    def __init__(self, name: str, title: str, build: Callable[[], Made]) -> None:
        torch.manual_seed(0)
        self.name, self.title = name, title
        self.model, self.batch = build()
        self.model.train()
        self.base_bytes = storage_bytes(base_of(self.model, self.batch))
        self.rows = {name: Row() for name in ("plain", *SCHEMES, *PLANNED)}
        self.plans: dict[str, lowtide.Plan] = {}
        self.reference = ""

    def run(self, rounds: int) -> None:
        self._peaks()
        for name in PLANNED:
            self._plan(name)
        for k in range(rounds):
            for name in list(self.rows)[:: -1 if k % 2 else 1]:
                if name in self.plans:
                    self._timed_plan(name)
                elif name not in PLANNED:
                    with scheme(self.model, name):
                        timed(self.model, self.batch, self.rows[name])
        clear(self.model)

    def _peaks(self) -> None:
        for name in ("plain", *SCHEMES):
            with scheme(self.model, name):
                self.rows[name].peak_bytes = metered(self.model, self.batch)
            hashed = gradients_hash(self.model)
            self.reference = self.reference or hashed
            self.rows[name].exact = hashed == self.reference
        clear(self.model)

    def _budget(self, name: str) -> int:
        plain = self.rows["plain"].peak_bytes
        here = {
            AT_CHECKPOINT: self.rows["checkpoint"].peak_bytes,
            AT_SAC: self.rows["SAC"].peak_bytes,
            AT_HALF: self.base_bytes + (plain - self.base_bytes) // 2,
            AMPLE: 2 * plain,
        }[name]
        return here + max(0, process_bytes() - self.base_bytes)  # what others hold is counted too

    def _plan(self, name: str) -> None:
        row = self.rows[name]
        clear(self.model)
        row.asked_bytes = self._budget(name)
        started = time.perf_counter()
        try:
            plan = lowtide.plan(self.model, self.batch, row.asked_bytes)
            row.planning_s = time.perf_counter() - started
            row.solve_s, row.solver, row.replayed_ops = plan.solve_s, plan.solver, plan.replayed_ops
            row.predicted_bytes = plan.predicted_peak_bytes
            row.predicted_ratio = plan.predicted_step_s / plan.plain_step_s
            row.bound_ratio = plan.bound_step_s / plan.plain_step_s
            row.profiled_step_s = plan.plain_step_s
            lowtide.fit(self.model, plan=plan, budget=row.asked_bytes)
            row.peak_bytes = metered(self.model, self.batch)
            row.exact = gradients_hash(self.model) == self.reference
            row.peak_by_lowtide_bytes = lowtide.report(self.model).measured_peak_bytes
            self.plans[name] = plan
        except Exception as error:
            row.failure = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        finally:
            lowtide.unfit(self.model)

    def _timed_plan(self, name: str) -> None:
        row = self.rows[name]
        lowtide.fit(self.model, plan=self.plans[name], budget=row.asked_bytes)
        try:
            for _ in range(2):  # these are measured by lowtide, which takes time
                self.model.zero_grad(set_to_none=True)
                step(self.model, self.batch)
            timed(self.model, self.batch, row)
            report = lowtide.report(self.model)
            followed = report.online_steps == 0 and report.plan is self.plans[name]
            row.followed = followed and row.followed is not False
            row.exact = bool(row.exact) and gradients_hash(self.model) == self.reference
        finally:
            lowtide.unfit(self.model)

    # -- what came out --------------------------------------------------------------------------------

    def ratio(self, name: str, clock: str = "cpu_s") -> float:
        """Of minima, to plain."""
        times = getattr(self.rows[name], clock)
        return min(times) / min(getattr(self.rows["plain"], clock)) if times else float("nan")

    def rescaled(self, name: str, ratio: float | None) -> float:
        """What the plan says of its profiled step, said of the plain step that was measured."""
        seconds = ((ratio or 1) - 1) * (self.rows[name].profiled_step_s or 0)
        return 1 + seconds / min(self.rows["plain"].cpu_s, default=float("nan"))

    def verdicts(self) -> list[tuple[str, bool, str]]:
        over = {name: 100 * (self.ratio(name) - 1) for name in self.rows}
        checkpointed, selective = over["checkpoint"], over["SAC"]
        a, b, c, d = (over[name] for name in PLANNED)
        return [
            (
                "at checkpoint's peak at most 0.5 × its overhead",
                a <= 0.5 * checkpointed,
                f"{a:+.1f} % against {checkpointed:+.1f} %",
            ),
            (
                "at SAC's peak at most 0.3 × its overhead, or 1 %",
                b <= max(0.3 * selective, 1),
                f"{b:+.1f} % against {selective:+.1f} %",
            ),
            ("at half the activations at most 5 %", c <= 5, f"{c:+.1f} %"),
            ("with plenty at most 1 %", d <= 1, f"{d:+.1f} %"),
        ]

    def faults(self) -> list[str]:
        """What must not be, whatever the times are."""
        found = []
        for name in PLANNED:
            row = self.rows[name]
            if row.failure:
                found.append(f"{name}: {row.failure}")
                continue
            if not row.exact:
                found.append(f"{name}: gradients differ from plain's")
            found += [
                f"{name}: peak {peak:,} over the budget {row.asked_bytes:,} bytes"
                for peak in (row.peak_bytes, row.peak_by_lowtide_bytes or 0)
                if peak > (row.asked_bytes or 0)
            ]
            if row.followed is False:
                found.append(f"{name}: the plan was not followed")
        return found

    def record(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "base_bytes": self.base_bytes,
            "plain_cpu_s": min(self.rows["plain"].cpu_s, default=None),
            "variants": {
                name: {**asdict(row), "cpu_ratio": self.ratio(name), "wall_ratio": self.ratio(name, "wall_s")}
                for name, row in self.rows.items()
            },
            "verdicts": [{"claim": c, "holds": h, "numbers": n} for c, h, n in self.verdicts()],
            "faults": self.faults(),
        }

    def markdown(self) -> str:
        plain = self.rows["plain"]
        lines = [
            f"### {self.title}",
            "",
            f"Plain: {min(plain.cpu_s, default=0):.2f} s a step, peak {plain.peak_bytes / MIB:.0f} MiB, of which "
            f"{self.base_bytes / MIB:.0f} are parameters, buffers and batch.",
            "",
            "| | peak, % of plain | time, × plain | wall, × plain | predicted | the plan says | bound | "
            "asked / predicted / measured, MiB | planned in, s (solver) | exact |",
            "|---|--:|--:|--:|--:|--:|--:|--:|--:|---|",
        ]
        for name, row in self.rows.items():
            label = f"lowtide, {name}" if name in PLANNED else name
            if row.failure:
                lines.append(f"| {label} | | | | | | | {(row.asked_bytes or 0) / MIB:.1f} | | failed |")
                continue
            peaks, planned, predicted, said, bound = f"{row.peak_bytes / MIB:.1f}", "", "", "", ""
            if row.asked_bytes is not None and row.predicted_bytes is not None:
                peaks = f"{row.asked_bytes / MIB:.1f} / {row.predicted_bytes / MIB:.1f} / {peaks}"
                planned = f"{row.planning_s:.1f} ({row.solve_s:.1f})"
                predicted = f"{self.rescaled(name, row.predicted_ratio):.3f}"
                said, bound = f"{row.predicted_ratio:.3f}", f"{self.rescaled(name, row.bound_ratio):.3f}"
            lines.append(
                f"| {label} | {100 * row.peak_bytes / plain.peak_bytes:.0f} | {self.ratio(name):.3f} | "
                f"{self.ratio(name, 'wall_s'):.3f} | {predicted} | {said} | {bound} | {peaks} | {planned} | "
                f"{'yes' if row.exact else 'no'} |"
            )
        lines.append("")
        for claim, holds, numbers in self.verdicts():
            lines.append(f"- {'holds' if holds else 'does not hold'}: {claim} ({numbers})")
        lines += [f"- FAULT: {fault}" for fault in self.faults()]
        return "\n".join([*lines, ""])


# -- showing ------------------------------------------------------------------------------------------


def picture(measured: list[Measured], path: Path, subtitle: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(4, len(measured) + 1)
    height = -(-(len(measured) + 1) // columns)
    figure, axes = plt.subplots(height, columns, figsize=(4.2 * columns, 3.9 * height), squeeze=False)
    panels = list(axes.flat)
    for one, ax in zip(measured, panels, strict=False):
        plain = one.rows["plain"].peak_bytes
        there = [n for n in PLANNED if one.rows[n].cpu_s and one.rows[n].predicted_ratio is not None]
        ours = sorted((100 * one.rows[n].peak_bytes / plain, 100 * (one.ratio(n) - 1)) for n in there)
        said = [
            (100 * (r.predicted_bytes or 0) / plain, 100 * (one.rescaled(n, r.predicted_ratio) - 1))
            for n, r in ((n, one.rows[n]) for n in there)
        ]
        ax.axhline(0, color="0.75", lw=1, zorder=0)
        ax.plot(*zip(*ours, strict=True), "o-", color="C0", lw=2, ms=7, label="lowtide, measured") if ours else None
        ax.plot(*zip(*said, strict=True), "o", mfc="none", color="C0", ms=12, label="its prediction") if said else None
        for name, mark, color in (("checkpoint", "s", "C3"), ("SAC", "D", "C1"), ("plain", "*", "0.3")):
            at = 100 * one.rows[name].peak_bytes / plain
            ax.plot([at], [100 * (one.ratio(name) - 1)], mark, color=color, ms=9, label=name)
        ax.set_title(one.title, fontsize=10)
        ax.set_xlabel("peak, % of plain's")
        ax.set_ylabel("time over plain, %")
        ax.margins(0.12)
        ax.grid(alpha=0.25)
    for ax in panels[len(measured) :]:
        ax.axis("off")
    if measured:
        handles, labels = panels[0].get_legend_handles_labels()
        panels[len(measured)].legend(handles, labels, loc="center", frameon=False, fontsize=12)
    figure.suptitle(f"Time against memory in one training step\n{subtitle}", fontsize=12)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def summary(measured: list[Measured]) -> str:
    claims = ("≤ 0.5 × checkpoint's", "≤ 0.3 × SAC's, or 1 %", "≤ 5 % at half", "≤ 1 % with plenty")
    lines = ["| overhead | " + " | ".join(claims) + " |", "|---|" + "---|" * len(claims)]
    for one in measured:
        cells = [f"{'holds' if holds else '**does not**'}: {numbers}" for _, holds, numbers in one.verdicts()]
        lines.append(f"| {one.title.split(',')[0]} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def write(measured: list[Measured], out: Path, setting: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    document = {"setting": setting, "models": {one.name: one.record() for one in measured}}
    (out / "planned.json").write_text(json.dumps(document, indent=1) + "\n")
    note = (
        "Predicted and bound are the plan's seconds beyond a plain step, over the plain step measured here; what the "
        "plan itself says relates them to the step that it profiled. Half the activations: parameters, buffers and "
        "batch, and half of what a plain step takes beyond these."
    )
    parts = ["# What a plan costs", "", setting, "", note, "", summary(measured), *(one.markdown() for one in measured)]
    (out / "planned.md").write_text("\n".join(parts).rstrip() + "\n")
    picture(measured, out / "planned.png", setting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {','.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=3, help=f"of {TIMED_STEPS} timed steps each (default 3)")
    parser.add_argument("--quick", action="store_true", help="one tiny model, one round: does it run?")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results go (default benchmarks/results)")
    options = parser.parse_args()
    names = options.models.split(",")
    if unknown := set(names) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    if not ALLOCATOR.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.planned", *sys.argv[1:]], os.environ | ALLOCATOR)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rounds = 1 if options.quick else options.rounds
    setting = (
        f"lowtide {lowtide.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}, {platform.machine()} CPU, 1 thread, allocator keeping freed memory; "
        f"minima of CPU time, {rounds} rounds × {TIMED_STEPS} steps"
    )
    print(setting, flush=True)
    measured = []
    for name, (title, build) in {"tiny": TINY}.items() if options.quick else ((n, MODELS[n]) for n in names):
        started = time.perf_counter()
        one = Measured(name, title, build)
        one.run(rounds)
        one.model.cpu()
        measured.append(one)
        print(f"\n{one.markdown()}\n({time.perf_counter() - started:.0f} s)", flush=True)
        del one.model, one.batch, one.plans
        gc.collect()
        write(measured, options.out, setting)
    print(f"\n{summary(measured)}")
    if any(one.faults() for one in measured):
        sys.exit("there are faults")


if __name__ == "__main__":
    main()
