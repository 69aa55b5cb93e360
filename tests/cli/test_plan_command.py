"""`lowtide plan` on small models: result, output files and exit codes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result

import lowtide
from lowtide import Plan

Command = Callable[..., Result]
OWN = ("plan", "own_models:build", "--loss", "own_models:loss", "--deadline", "3")


def plain_peak_bytes(command: Command, *args: str) -> int:
    """Return the peak of a plain step, including all other tensors of this process."""
    result = command(*args, "--budget", "64GiB", "--json", "-", "--quiet")
    assert result.exit_code == 0, result.stderr
    return Plan.from_json(result.stdout).plain_peak_bytes


def test_preset_fits_with_recomputation(lowtide_command: Command, tmp_path: Path) -> None:
    args = ("plan", "--preset", "gpt2-tiny", "--batch", "4", "--seq", "64", "--deadline", "3")
    peak = plain_peak_bytes(lowtide_command, *args)
    budget = peak - 2 * 2**20
    files = {suffix: tmp_path / f"plan.{suffix}" for suffix in ("json", "html", "png")}
    outputs = [arg for suffix, path in files.items() for arg in (f"--{suffix}", str(path))]
    result = lowtide_command(*args, "--budget", f"{budget}B", *outputs)
    assert result.exit_code == 0
    assert result.stdout.startswith("fits: gpt2-tiny, batch 4, peaks at ")
    assert "more time" in result.stdout
    assert "transformer.h.*.attn" in result.stdout
    assert "profiling one step" in result.stderr
    plan = Plan.load(files["json"])
    assert plan.recomputed
    assert plan.predicted_peak_bytes <= budget < plan.plain_peak_bytes
    page = files["html"].read_text(encoding="utf-8")
    assert page.startswith("<!")
    assert "<svg" in page
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_written_plan_can_be_used_by_fit(lowtide_command: Command, own_models: Path) -> None:
    peak = plain_peak_bytes(lowtide_command, *OWN, "--batch", "256")
    result = lowtide_command(*OWN, "--batch", "256", "--budget", f"{peak - 2**17}B", "--json", "plan.json", "-q")
    assert result.exit_code == 0
    plan = Plan.load("plan.json")
    assert plan.recomputed
    from own_models import build, loss  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model, batch = build(256)
    loss(model(batch)).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    lowtide.fit(model, plan=plan, budget=2**60)  # large, because the gradients copied above count as live bytes
    loss(model(batch)).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))
    assert lowtide.report(model).plan.fingerprint == plan.fingerprint


def test_exit_code_if_the_budget_is_too_small(lowtide_command: Command, own_models: Path) -> None:
    result = lowtide_command(*OWN, "--budget", "100KiB", "--html", "plan.html", "-q")
    assert result.exit_code == 3
    assert result.stderr == ""
    text = " ".join(result.stdout.split())
    assert text.startswith("does not fit: a budget of 100.00 KiB cannot be met: the smallest that works is ")
    assert "What helps: parameters, gradients, batch and temporaries alone exceed the budget" in text
    assert not Path("plan.html").exists()


def test_reported_smallest_budget_works(lowtide_command: Command, own_models: Path) -> None:
    refused = lowtide_command(*OWN, "--budget", "100KiB", "--json", "-", "-q")
    assert refused.exit_code == 3
    document = json.loads(refused.stdout)
    assert document["fits"] is False
    assert document["budget_bytes"] == 100 * 1024
    smallest = document["smallest_bytes"]
    assert lowtide_command(*OWN, "--budget", f"{smallest + 4096}B", "-q").exit_code == 0
    assert lowtide_command(*OWN, "--budget", f"{smallest // 2}B", "-q").exit_code == 3


def test_optimizer_state_is_counted(lowtide_command: Command, own_models: Path) -> None:
    parameters = 8 * (64 * 64 + 64) * 4
    peaks = {name: plain_peak_bytes(lowtide_command, *OWN, "--optimizer", name) for name in ("sgd", "momentum", "adam")}
    assert peaks["momentum"] - peaks["sgd"] == pytest.approx(parameters, abs=4096)
    assert peaks["adam"] - peaks["sgd"] == pytest.approx(2 * parameters, abs=4096)
    refused = lowtide_command(*OWN, "--optimizer", "adam", "--budget", f"{parameters}B", "-q")
    assert refused.exit_code == 3  # the state alone exceeds the budget
    assert "the smallest that works is" in " ".join(refused.stdout.split())


def test_json_on_stdout_is_the_only_output(lowtide_command: Command, own_models: Path) -> None:
    result = lowtide_command(*OWN, "--budget", "1GiB", "--json", "-")
    assert result.exit_code == 0
    assert Plan.from_json(result.stdout).budget_bytes == 2**30
    assert "profiling one step" in result.stderr


def test_quiet_and_verbose(lowtide_command: Command, own_models: Path) -> None:
    quiet = lowtide_command(*OWN, "--budget", "1GiB", "--quiet")
    assert quiet.stderr == ""
    verbose = lowtide_command(*OWN, "--budget", "1GiB", "--quiet", "-v")
    assert "ops, " in verbose.stderr
    assert "trained parameters" in verbose.stderr
    assert logging.getLogger("lowtide").level == logging.NOTSET
    assert not logging.getLogger("lowtide").handlers


def test_largest_batch_fits_and_the_next_does_not(lowtide_command: Command, own_models: Path) -> None:
    args = (*OWN, "--budget", f"{plain_peak_bytes(lowtide_command, *OWN, '--batch', '96')}B", "-q")
    result = lowtide_command(*args, "--max-batch", "--batch", "64", "--json", "largest.json")
    assert result.exit_code == 0
    document = json.loads(Path("largest.json").read_text())
    batch = document["batch"]
    assert batch >= 96  # batch 96 fits without recomputation
    tried = {attempt["batch"]: attempt["fits"] for attempt in document["tried"]}
    assert tried[batch]
    assert tried[batch + 1] is False
    assert all(fits == (size <= batch) for size, fits in tried.items())
    assert Plan.from_json(json.dumps(document["plan"])).predicted_peak_bytes <= document["budget_bytes"]
    assert f"batch {batch}, peaks at" in result.stdout
    assert "no larger batch fits" in result.stdout


def test_one_sample_does_not_fit(lowtide_command: Command, own_models: Path) -> None:
    result = lowtide_command(*OWN, "--budget", "100KiB", "--max-batch", "--batch", "2", "--json", "-", "-q")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["smallest_bytes"] > 100 * 1024


SEQUENCES = ("plan", "own_models:sequences", "--loss", "own_models:loss", "--deadline", "2")


def test_longest_sequences(lowtide_command: Command, own_models: Path) -> None:
    budget = plain_peak_bytes(lowtide_command, *SEQUENCES, "--batch", "8") + 2**20
    args = (*SEQUENCES, "--budget", f"{budget}B", "--batch", "8", "--length", "16..4096")
    result = lowtide_command(*args, "--json", "longest.json", "--html", "longest.html")
    assert result.exit_code == 0
    document = json.loads(Path("longest.json").read_text())
    length = document["size"]
    assert 16 < length < 4096
    assert document["profiled"] == [16, 32]
    assert Plan.from_json(json.dumps(document["plan"])).predicted_peak_bytes <= budget
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert lines[0] == "own_models:sequences, batch 8"
    assert lines[2].split("  ") == ["length", "plain peak", "predicted peak", "step time", "overhead"]
    rows = [line.split()[0] for line in lines[3:] if line[:1].isdigit()]
    assert rows == [str(prediction["size"]) for prediction in document["predictions"]]
    assert any(line.startswith(f"{length + 1} ") and line.endswith("does not fit") for line in lines)
    assert any(line.startswith("longest length that fits into") and line.endswith(f": {length}") for line in lines)
    assert "length 32: profiling one step" in result.stderr
    assert Path("longest.html").read_text(encoding="utf-8").startswith("<!")
    longer = (*SEQUENCES, "--budget", f"{budget}B", "--batch", "8", "--length", f"{length + length // 5}..5000", "-q")
    refused = lowtide_command(*longer, "--json", "-")
    assert refused.exit_code == 3
    assert json.loads(refused.stdout)["smallest_bytes"] > budget
    assert lowtide_command(*longer).stdout.startswith(f"length {length + length // 5} does not fit: a budget of ")


def test_optimizer_state_shortens_sequences(lowtide_command: Command, own_models: Path) -> None:
    budget = plain_peak_bytes(lowtide_command, *SEQUENCES) + 2**20
    found = {}
    for optimizer in ("none", "adam"):
        args = (*SEQUENCES, "--budget", f"{budget}B", "--length", "16..4096", "--optimizer", optimizer, "--json", "-")
        found[optimizer] = json.loads(lowtide_command(*args, "-q").stdout)["size"]
    assert found["adam"] < found["none"]


@pytest.mark.parametrize("largest", [0, 1, 2, 5, 7, 8, 9, 31, 32])
@pytest.mark.parametrize("start", [1, 3, 8, 40])
def test_search_finds_the_largest_number(largest: int, start: int) -> None:
    from lowtide.cli._search import search_largest

    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= largest

    assert search_largest(fits, start, limit=32) == largest
    assert len(tried) == len(set(tried))
    assert max(tried) <= 32
    assert min(tried) >= 1


def test_lossy_codec_is_used_only_if_requested(lowtide_command: Command) -> None:
    args = ("plan", "--preset", "gpt2-tiny", "--batch", "4", "--seq", "64", "--deadline", "3")
    budget = plain_peak_bytes(lowtide_command, *args) - 2 * 2**20
    codecs = {}
    for options in ((), ("--codec", "bf16"), ("--codec", "none")):
        result = lowtide_command(*args, "--budget", f"{budget}B", "--json", "-", "--quiet", *options)
        assert result.exit_code == 0, result.stderr
        codecs[options[1:]] = {codec_cost.codec for codec_cost in Plan.from_json(result.stdout).codec_costs}
    assert "bf16" not in codecs[()]
    assert "bf16" in codecs[("bf16",)]
    assert codecs[("none",)] == set()


def test_codec_option_lists_all_codecs() -> None:
    from lowtide import codecs
    from lowtide.cli import _options

    assert set(_options.CODECS) == {"exact", "none", *codecs.CODECS}
