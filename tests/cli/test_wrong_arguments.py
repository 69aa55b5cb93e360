"""Invalid arguments and failures: one sentence that says what to do, an exit code, no traceback."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Command = Callable[..., Result]
SIZE_HELP = "write a number and a unit, one of B, kB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB"


def assert_error(result: Result, exit_code: int, *messages: str) -> None:
    assert result.exit_code == exit_code
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    error = " ".join(result.stderr.partition("Error: ")[2].split())
    for message in messages:
        assert message in error


@pytest.mark.parametrize("budget", ["8", "8gigs", "GiB", "0MB", "-1GiB"])
def test_budget_must_be_a_size(lowtide_command: Command, budget: str) -> None:
    result = lowtide_command("plan", "--preset", "gpt2-tiny", f"--budget={budget}")
    message = (
        "'0MB' is 0 bytes: a size must be positive" if budget == "0MB" else f"'{budget}' is not a size: {SIZE_HELP}"
    )
    assert_error(result, 2, "Invalid value for '--budget'", message)


def test_budget_is_required(lowtide_command: Command) -> None:
    assert_error(lowtide_command("plan", "--preset", "gpt2-tiny"), 2, "Missing option '--budget'")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give one model: package.module:function, --hf FILE.json or --preset NAME; none given."),
        (["own_models:build", "--preset", "resnet"], "or --preset NAME; 2 given."),
        (["own_models:build", "--seq", "8"], "--seq can only be used with --hf and --preset"),
        (["own_models:build", "--seq", "8", "--dtype", "float16"], "--seq and --dtype can only be used"),
        (["--preset", "gpt3"], "'gpt3' is not one of 'gpt2-tiny', 'gpt2-small'"),
        (["--preset", "gpt2-tiny", "--batch", "0"], "0 is not in the range x>=1"),
        (["--preset", "gpt2-tiny", "--deadline", "0"], "0.0 is not in the range x>0"),
        (["own_models"], "'own_models' names no function: write package.module:function"),
        (["own_models:"], "names no function"),
        (["own models:build"], "names no function"),
        (["own_models.py:build"], "names a file: name the module, 'own_models:build'"),
        (["own_nowhere:build"], "there is no module 'own_nowhere' in"),
        (["own_nowhere.sub:build"], "there is no module 'own_nowhere'"),
        (["own_models.sub:build"], "there is no module 'own_models.sub'"),
        (["own_models:bild"], "has no function 'bild'; its functions: build, exits, fixed, loss, raises, returns_dict"),
        (["own_models:not_a_function"], "has no function 'not_a_function'"),
        (["own_models:build", "--loss", "own_models:los"], "has no function 'los'"),
        (
            ["own_models:fixed", "--batch", "4"],
            "need a function with a parameter batch_size, but own_models:fixed has none",
        ),
        (["own_models:fixed", "--max-batch"], "need a function with a parameter batch_size"),
        (["own_models:build", "--length", "abc"], "'abc' is not a range: write the smallest and the largest length"),
        (["own_models:build", "--length", "8..16..32"], "is not a range"),
        (["own_models:build", "--length", "64"], "is not a range"),
        (["own_models:build", "--length", "64.."], "is not a range"),
        (["own_models:build", "--length", "4096..128"], "is empty: write the smallest length first, 128..4096"),
        (["own_models:build", "--length", "0..128"], "the smallest length must be at least 2"),
        (["own_models:build", "--length", "16..64"], "--length needs a function with a parameter length"),
        (["--preset", "gpt2-tiny", "--length", "16..64", "--seq", "8"], "--length and --seq exclude each other"),
        (["--preset", "gpt2-tiny", "--length", "16..64", "--max-batch"], "--max-batch and --length exclude each other"),
        (["--preset", "gpt2-tiny", "--length", "16..2000"], "16..2000 goes beyond the model's maximum of 1024 tokens"),
        (["--preset", "vit-tiny", "--length", "16..64"], "sizes 16 and 32 have the same shapes"),
        (["own_models:returns_dict"], "returned an object of type dict: it must return (model, batch)"),
        (["own_models:returns_wrong_order"], "returned a tuple of Tensor, Sequential: it must return (model, batch)"),
        (["own_models:returns_three"], "returned a tuple of Sequential, Tensor, int"),
        (["own_models:build"], "the output has no .loss and is not a scalar"),
        (["own_models:build"], "on the command line: --loss package.module:function"),
        (["--hf", "nowhere.json"], "'nowhere.json' cannot be read: No such file or directory"),
        (["--hf", "."], "'.' cannot be read: Is a directory"),
        (["--hf", "own_models.py"], "'own_models.py' is not JSON"),
        (["--preset", "gpt2-tiny", "--json", "nowhere/plan.json"], "there is no directory 'nowhere' for 'plan.json'"),
        (["--preset", "gpt2-tiny", "--png", "."], "'.' is a directory: name a file in it"),
        (["--preset", "gpt2-tiny", "--device", "warp"], "the device 'warp' is not available"),
        (["--preset", "gpt2-tiny", "--seq", "5000"], "--seq 5000 is longer than the model's maximum of 1024 tokens"),
    ],
)
def test_invalid_arguments(lowtide_command: Command, own_models: Path, args: list[str], message: str) -> None:
    assert_error(lowtide_command("plan", *args, "--budget", "1GiB", "--quiet"), 2, message)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "has no 'model_type'"),
        ({"n_layer": 2}, "has no 'model_type': a transformers configuration needs one"),
        ({"model_type": 3}, "has no 'model_type'"),
        ({"model_type": "gpt9"}, "has no model type 'gpt9': check the spelling"),
        ({"model_type": "sam"}, "lowtide has no batches for model type 'sam': write a function"),
        (
            {"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"]},
            "lowtide has no batches for Wav2Vec2ForCTC",
        ),
        ({"model_type": "gpt2", "n_layer": "many"}, "invalid configuration of a 'gpt2' model"),
    ],
)
def test_invalid_configurations(lowtide_command: Command, tmp_path: Path, config: object, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert_error(lowtide_command("plan", "--hf", str(path), "--budget", "1GiB", "--quiet"), 2, message)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["syntax_error:build"], "importing 'syntax_error' raised SyntaxError"),
        (
            ["missing_import:build"],
            "importing 'missing_import' raised ModuleNotFoundError: No module named 'no_such_package'",
        ),
        (["own_models:raises"], "calling own_models:raises raised ValueError: no data here (-v shows the traceback)"),
        (["own_models:exits"], "calling own_models:exits raised SystemExit: usage: own_models.py DATA"),
        (["own_models:wrong_shape"], "the model's training step raised RuntimeError: mat1 and mat2 shapes cannot be"),
    ],
)
def test_exceptions_in_user_code(lowtide_command: Command, own_models: Path, args: list[str], message: str) -> None:
    assert_error(lowtide_command("plan", *args, "--budget", "1GiB", "--quiet"), 1, message)


def test_verbose_shows_the_traceback(lowtide_command: Command, own_models: Path) -> None:
    result = lowtide_command("plan", "own_models:raises", "--budget", "1GiB", "-v")
    assert result.exit_code == 1
    assert "in raises" in result.stderr


def test_missing_packages(lowtide_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = lowtide_command("plan", "--preset", "gpt2-tiny", "--budget", "1GiB", "--quiet")
    assert_error(result, 1, """needs the package 'transformers': pip install "lowtide[demo]\"""")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    result = lowtide_command("plan", "--preset", "gpt2-tiny", "--budget", "1GiB", "--png", str(tmp_path / "a.png"))
    assert_error(result, 1, """a plot needs the package 'matplotlib': pip install "lowtide[plots]\"""")
    assert "building" not in result.stderr  # reported before the work starts


def test_model_exceeds_the_memory_of_the_machine(lowtide_command: Command, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": 65536, "intermediate_size": 2**18}))
    result = lowtide_command("plan", "--hf", str(path), "--budget", "1GiB", "--quiet")
    assert_error(result, 1, "LlamaForCausalLM needs", "of memory are available", "--dtype bfloat16, or fewer layers")


def test_output_file_cannot_be_written(lowtide_command: Command, own_models: Path) -> None:
    args = ("plan", "own_models:build", "--loss", "own_models:loss", "--budget", "1GiB", "-q")
    result = lowtide_command(*args, "--json", "/dev/full")
    assert result.exit_code == 1
    assert "'/dev/full' cannot be written: No space left on device" in result.stderr
