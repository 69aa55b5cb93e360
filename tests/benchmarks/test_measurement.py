"""The harness on small models: peaks, bits, rounds, budgets, baselines and the command line."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.__main__ import main
from benchmarks.harness import variants
from benchmarks.harness.base import Plain, Variant
from benchmarks.harness.blocks import block_lists, blocks, each_block_checkpointed, segments_checkpointed
from benchmarks.harness.compiled import CompileDeadlineError, deadline
from benchmarks.harness.lowtide_variants import NOT_FOLLOWED
from benchmarks.harness.machine import ALLOCATOR
from benchmarks.harness.measurement import Timing, measure_model, run_models
from benchmarks.harness.models import CATALOGUES, MAIN_MODELS, Case, gpt2, t5
from benchmarks.harness.peers import CHECKPOINT
from benchmarks.harness.records import ModelResult
from benchmarks.harness.steps import Bench, Forward, step
from click.testing import CliRunner
from torch import nn

import lowtide
from lowtide.engine.memory import eviction
from tests.runtimes import pool

ROOT = Path(__file__).parents[2]


def quiet(line: str) -> None:
    pass


class Chain(nn.Module):
    """Four layers of known size: each saves an output of 64 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


CHAIN = Case("Chain", lambda: (Chain(), {"x": torch.randn(1024, 16)}))


class Doubled(Variant):
    """A wrong variant: its loss is doubled, and it holds 4 MiB during the step."""

    family = "torch checkpoint"

    def applied(self, bench: Bench) -> contextlib.AbstractContextManager[Forward]:
        def forward() -> torch.Tensor:
            self.held = torch.zeros(1 << 20)
            return bench.loss() * 2

        return contextlib.nullcontext(forward)


class Failing(Plain):
    """A variant that fails in its first round."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.applications = 0

    def applied(self, bench: Bench) -> contextlib.AbstractContextManager[Forward]:
        self.applications += 1
        if self.applications > 1:
            raise RuntimeError("as planned")
        return super().applied(bench)


@pytest.fixture(scope="module")
def chain() -> ModelResult:
    torch.set_num_threads(1)
    plain = [variants.named(name) for name in ("plain", "plain-again")]
    selected = [*plain, Doubled("doubled"), Failing("failing"), variants.named("rule:every1")]
    return measure_model(Bench("chain", CHAIN), selected, 2, quiet)


def test_peaks_are_live_tensor_bytes(chain: ModelResult) -> None:
    # 64 KiB for each saved output of tanh, and at most a few times 64 KiB for temporaries.
    plain, doubled = chain.variants["plain"].peak_bytes, chain.variants["doubled"].peak_bytes
    assert plain is not None
    assert doubled is not None
    assert 4 * 65536 < plain - chain.base_bytes <= 10 * 65536
    assert plain <= doubled - (4 << 20) <= plain + 1024


def test_a_wrong_variant_is_reported_as_inexact(chain: ModelResult) -> None:
    assert chain.variants["plain"].exact
    assert chain.variants["rule:every1"].exact
    assert chain.variants["doubled"].exact is False
    assert chain.variants["doubled"].buffers_equal  # it runs the model once


def test_an_error_of_a_variant_is_recorded_and_the_others_continue(chain: ModelResult) -> None:
    assert chain.variants["failing"].error == "RuntimeError: as planned"
    assert not chain.variants["failing"].measured
    assert [len(chain.variants[name].cpu_s) for name in ("doubled", "failing", "rule:every1")] == [2, 0, 2]


def test_every_timed_step_is_between_two_plain_steps(chain: ModelResult) -> None:
    plain, control = chain.plain.cpu_s, chain.variants["plain-again"]
    doubled, every = chain.variants["doubled"], chain.variants["rule:every1"]
    assert len(plain) == 4 + 3  # the variant that fails in round 1 does not run in round 2
    assert control.beside_cpu_s == [plain[0:2], plain[5:7]]  # round 2 runs in reverse order
    assert doubled.beside_cpu_s == [plain[1:3], plain[4:6]]  # paired with the failing variant, then with the next
    assert every.beside_cpu_s == [plain[2:4], plain[4:6]]
    assert [len(one.beside_wall_s) for one in (control, doubled, every)] == [2, 2, 2]


def test_main_variants_get_more_rounds_until_the_time_limit() -> None:
    names = ("plain", "plain-again", "rule:every1")

    def rounds(**options: Any) -> list[int]:
        result = measure_model(Bench("chain", CHAIN), [variants.named(name) for name in names], 8, quiet, **options)
        return [len(result.variants[name].cpu_s) for name in names[1:]]

    assert rounds(few=2) == [8, 2]
    assert rounds(few=5) == [8, 5]
    assert rounds(few=3, until=time.monotonic()) == [3, 3]


def test_every_step_starts_from_the_same_state() -> None:
    bench = Bench("chain", CHAIN)
    first = bench.metered(bench.loss)[1]
    step(bench.loss)
    assert bench.metered(bench.loss)[1] == first


def test_budgets_have_predicted_and_measured_peaks() -> None:
    torch.set_num_threads(1)
    bench = Bench("gpt2", gpt2(2, 64, 4, 32, 64))
    selected = [variants.named(name) for name in ("plain", "online@70", "planned@70", "planned@unknown")]
    results = measure_model(bench, selected, 1, quiet).variants
    asked = (results["plain"].peak_bytes or 0) * 70 // 100
    for name in ("online@70", "planned@70"):
        one = results[name]
        assert one.error is None
        assert one.exact
        assert one.asked_bytes == asked
        assert 0 < (one.peak_bytes or 0) <= asked
        assert 0 < (one.own_peak_bytes or 0) <= asked
    assert 0 < (results["planned@70"].predicted_bytes or 0) <= asked
    assert results["planned@unknown"].error == (
        "NotApplicableError: no variant 'unknown' has been measured in this run: its peak is unknown"
    )
    with pytest.raises(lowtide.LowtideError, match="not fitted"):  # the model is not left fitted
        lowtide.report(bench.model)


def test_baseline_schedules_are_followed_within_their_budget() -> None:
    torch.set_num_threads(1)
    bench = Bench("gpt2", gpt2(6, 64, 4, 32, 64))
    selected = [
        variants.named(name) for name in ("plain", "checkpoint", "schedule:rotor@checkpoint", "schedule:DTR@60")
    ]
    results = measure_model(bench, selected, 2, quiet).variants
    for name in ("schedule:rotor@checkpoint", "schedule:DTR@60"):
        one = results[name]
        assert one.error is None
        assert one.exact
        assert 0 < (one.peak_bytes or 0) <= (one.asked_bytes or 0)
        assert NOT_FOLLOWED not in one.note
        assert len(one.cpu_s) == 2
    assert results["schedule:rotor@checkpoint"].asked_bytes == results["checkpoint"].peak_bytes
    assert pool().heuristic == eviction.Heuristic()
    with pytest.raises(lowtide.LowtideError, match="not fitted"):
        lowtide.report(bench.model)


def test_rotor_does_not_apply_without_blocks() -> None:
    results = measure_model(
        Bench("chain", CHAIN), [variants.named(n) for n in ("plain", "schedule:rotor@60")], 1, quiet
    )
    assert "NotApplicableError: rotor finds no blocks" in (results.variants["schedule:rotor@60"].error or "")


@pytest.mark.parametrize("case", [gpt2(4, 64, 8, 64, 64), t5(3, 64, 4, 32)], ids=lambda case: case.title[:2])
def test_remat_is_exact_with_less_memory_and_restores_the_model(case: Case) -> None:
    pytest.importorskip("torch_remat", reason="torch_remat is optional")
    bench = Bench("one", case)
    plain = bench.metered(bench.loss)
    remat = variants.named("remat")
    remat.prepare(bench)
    with remat.applied(bench) as forward:
        kept = bench.metered(forward)
    hooks = [len(module._forward_hooks) for module in bench.model.modules()]
    with each_block_checkpointed(bench.model, CHECKPOINT):
        checkpointed = bench.metered(bench.loss)
    assert [len(module._forward_hooks) for module in bench.model.modules()] == hooks
    assert kept[1] == plain[1]
    assert checkpointed[0] < kept[0] < plain[0]
    assert not any("forward" in vars(module) for module in bench.model.modules())


@pytest.mark.parametrize("case", [gpt2(5, 64, 2, 16, 64), t5(4, 64, 2, 16)], ids=lambda case: case.title[:2])
def test_segments_are_exact_and_restore_the_model(case: Case) -> None:
    bench = Bench("one", case)
    plain = bench.metered(bench.loss)
    names = list(bench.model.state_dict())
    with segments_checkpointed(bench.model, CHECKPOINT):
        assert all(len(getattr(owner, name)) < 5 for owner, name in block_lists(bench.model))
        segmented = bench.metered(bench.loss)
    assert segmented[1] == plain[1]
    assert segmented[0] < plain[0]
    assert list(bench.model.state_dict()) == names


def test_every_model_has_blocks() -> None:
    for name, case in CATALOGUES["tiny"].items():
        model, _ = case.build()
        assert len(blocks(model)) >= 4, name


def test_variants_are_found_by_name() -> None:
    names = [name for model in CATALOGUES["standard"] for name in variants.standard(model)]
    for name in (*names, *variants.QUICK, "schedule:every block"):
        assert variants.named(name).name == name
    for name in (
        "nonsense",
        "compile@2",
        "planned@",
        "rule:nothing",
        "schedule:none",
        "schedule:rotor@",
        "schedule:DTR",
    ):
        with pytest.raises(variants.UnknownVariantError, match="no such variant"):
            variants.named(name)


def test_a_killed_run_keeps_finished_models(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, dict[str, torch.Tensor]]:
        raise KeyboardInterrupt

    file, by_model = tmp_path / "results.json", {"chain": ["plain"], "killed": ["plain"]}
    with pytest.raises(KeyboardInterrupt):
        run_models({"chain": CHAIN, "killed": Case("Killed", make)}, by_model, Timing(1, 1), file, quiet, {})
    assert list(json.loads(file.read_text())["models"]) == ["chain"]


def test_the_command_writes_results_page_and_plots(tmp_path: Path) -> None:
    call = [sys.executable, "-m", "benchmarks", "run", "--quick", "--models", "lstm", "--variants", "checkpoint,sac",
            "--rounds", "1", "--out", str(tmp_path)]  # fmt: skip
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "RESULTS.md", "lstm.png"}
    document = json.loads((tmp_path / "results.json").read_text())
    assert list(document["models"]["lstm"]["variants"]) == ["plain", "checkpoint", "sac"]
    assert set(document["machine"]) >= {"processor", "versions", "date", "allocator", "load"}
    assert "round 1 of 1" in done.stderr
    page = (tmp_path / "RESULTS.md").read_text()
    assert "| lstm | checkpoint |" in page


def test_the_command_rejects_unknown_models_and_conflicting_options(tmp_path: Path) -> None:
    call = ["run", "--quick", "--models", "gpt5", "--out", str(tmp_path)]
    done = CliRunner().invoke(main, call, env=ALLOCATOR)  # with these variables the program does not restart itself
    assert done.exit_code == 2
    assert "no such model: gpt5; the models are gpt2, resnet50, lstm" in done.output
    done = CliRunner().invoke(main, ["run", "--quick", "--large", "--out", str(tmp_path)], env=ALLOCATOR)
    assert done.exit_code == 2
    assert "--quick and --large exclude each other" in done.output


def test_large_models_are_the_main_models_with_larger_batches() -> None:
    assert tuple(CATALOGUES["large"]) == MAIN_MODELS
    (_, batch), (_, larger) = CATALOGUES["standard"]["vit"].build(), CATALOGUES["large"]["vit"].build()
    assert {k: v.shape[1:] for k, v in larger.items()} == {k: v.shape[1:] for k, v in batch.items()}
    assert all(len(larger[key]) == 2 * len(batch[key]) for key in batch)


def swallow_one_timeout() -> None:
    with contextlib.suppress(CompileDeadlineError):
        time.sleep(10)
    time.sleep(10)


def test_a_deadline_ends_the_block_even_if_its_error_is_swallowed() -> None:
    with pytest.raises(CompileDeadlineError, match=r"not compiled within 0\.05 s"), deadline(0.05):
        time.sleep(10)
    with pytest.raises(CompileDeadlineError), deadline(0.05), contextlib.suppress(CompileDeadlineError):
        time.sleep(10)
    started = time.monotonic()
    with pytest.raises(CompileDeadlineError), deadline(0.05):
        swallow_one_timeout()
    assert time.monotonic() - started < 5
    with deadline(10):
        pass
    time.sleep(0.1)  # no alarm rings after the block
