"""What cannot be meant, and what fails on the way: one sentence, a remedy, an exit code, no traceback."""

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


def refused(result: Result, exit_code: int, *said: str) -> None:
    assert result.exit_code == exit_code
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    error = " ".join(result.stderr.partition("Error: ")[2].split())
    for words in said:
        assert words in error


@pytest.mark.parametrize("budget", ["8", "8gigs", "GiB", "0MB", "-1GiB"])
def test_a_budget_that_is_no_size(lowtide_command: Command, budget: str) -> None:
    result = lowtide_command("plan", "--preset", "gpt2-tiny", f"--budget={budget}")
    refused(
        result, 2, "Invalid value for '--budget'", f"'{budget}' is no", "positive" if budget == "0MB" else SIZE_HELP
    )


def test_a_budget_is_needed(lowtide_command: Command) -> None:
    refused(lowtide_command("plan", "--preset", "gpt2-tiny"), 2, "Missing option '--budget'")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "a model is given in one of three ways"),
        (["own_models:build", "--preset", "resnet"], "here are 2 of them"),
        (["own_models:build", "--seq", "8"], "--seq can only be used with --hf and --preset"),
        (["own_models:build", "--seq", "8", "--dtype", "float16"], "--seq and --dtype can only be used"),
        (["--preset", "gpt3"], "'gpt3' is not one of 'gpt2-tiny', 'gpt2-small'"),
        (["--preset", "gpt2-tiny", "--batch", "0"], "0 is not in the range x>=1"),
        (["--preset", "gpt2-tiny", "--deadline", "0"], "0.0 is not in the range x>0"),
        (["own_models"], "'own_models' names no function: write package.module:function"),
        (["own_models:"], "names no function"),
        (["own models:build"], "names no function"),
        (["own_models.py:build"], "names a file: name the module, 'own_models:build'"),
        (["own_nowhere:build"], "there is no module 'own_nowhere', neither in"),
        (["own_nowhere.sub:build"], "there is no module 'own_nowhere'"),
        (["own_models.sub:build"], "there is no module 'own_models.sub'"),
        (["own_models:bild"], "has no function 'bild'; it has build, fixed, gives_a_dict"),
        (["own_models:not_a_function"], "has no function 'not_a_function'"),
        (["own_models:build", "--loss", "own_models:los"], "has no function 'los'"),
        (["own_models:fixed", "--batch", "4"], "need a function with a parameter batch_size, which own_models:fixed"),
        (["own_models:fixed", "--max-batch"], "need a function with a parameter batch_size"),
        (["own_models:gives_a_dict"], "gave an object of type dict: it has to return (model, batch)"),
        (["own_models:gives_the_wrong_order"], "gave a tuple of Tensor, Sequential: it has to return (model, batch)"),
        (["own_models:gives_three"], "gave a tuple of Sequential, Tensor, int"),
        (["own_models:build"], "the output has no .loss, and is not a scalar"),
        (["own_models:build"], "here that is --loss package.module:function"),
        (["--hf", "nowhere.json"], "no configuration can be read from 'nowhere.json': No such file or directory"),
        (["--hf", "."], "no configuration can be read from '.': Is a directory"),
        (["--hf", "own_models.py"], "'own_models.py' is not JSON"),
        (["--preset", "gpt2-tiny", "--json", "nowhere/plan.json"], "there is no directory 'nowhere' to write"),
        (["--preset", "gpt2-tiny", "--png", "."], "'.' is a directory: name a file in it"),
        (["--preset", "gpt2-tiny", "--device", "warp"], "there is no device 'warp' here"),
        (["--preset", "gpt2-tiny", "--seq", "5000"], "samples of 5000 tokens are longer than the 1024 positions"),
    ],
)
def test_arguments_that_cannot_be_meant(
    lowtide_command: Command, own_models: Path, words: list[str], said: str
) -> None:
    refused(lowtide_command("plan", *words, "--budget", "1GiB", "--quiet"), 2, said)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ([], "has no 'model_type'"),
        ({"n_layer": 2}, "has no 'model_type': a configuration of transformers names one"),
        ({"model_type": 3}, "has no 'model_type'"),
        ({"model_type": "gpt9"}, "has no model type 'gpt9': look for a typing error"),
        ({"model_type": "sam"}, "how a model of type 'sam' is trained is not known here: write a function"),
        (
            {"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"]},
            "how Wav2Vec2ForCTC is fed is not known here",
        ),
        ({"model_type": "gpt2", "n_layer": "many"}, "this is no configuration of a 'gpt2' model"),
    ],
)
def test_configurations_that_cannot_be_meant(
    lowtide_command: Command, tmp_path: Path, config: object, said: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    refused(lowtide_command("plan", "--hf", str(path), "--budget", "1GiB", "--quiet"), 2, said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["own_broken:build"], "importing 'own_broken' raised SyntaxError"),
        (["own_needy:build"], "importing 'own_needy' raised ModuleNotFoundError: No module named 'a_package_that_is"),
        (["own_models:raises"], "calling own_models:raises raised ValueError: no data here (-v shows where)"),
        (["own_models:leaves"], "calling own_models:leaves raised SystemExit: usage: own_models.py DATA"),
        (["own_models:wrong_shape"], "the model's own step raised RuntimeError: mat1 and mat2 shapes cannot be"),
    ],
)
def test_code_of_the_user_that_fails(lowtide_command: Command, own_models: Path, words: list[str], said: str) -> None:
    refused(lowtide_command("plan", *words, "--budget", "1GiB", "--quiet"), 1, said)


def test_verbose_shows_where_it_failed(lowtide_command: Command, own_models: Path) -> None:
    result = lowtide_command("plan", "own_models:raises", "--budget", "1GiB", "-v")
    assert result.exit_code == 1
    assert "in raises" in result.stderr


def test_packages_that_are_missing(lowtide_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = lowtide_command("plan", "--preset", "gpt2-tiny", "--budget", "1GiB", "--quiet")
    refused(result, 1, """needs the package 'transformers': pip install "lowtide[demo]\"""")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    result = lowtide_command("plan", "--preset", "gpt2-tiny", "--budget", "1GiB", "--png", str(tmp_path / "a.png"))
    refused(result, 1, """a picture needs the package 'matplotlib': pip install "lowtide[plots]\"""")
    assert "building" not in result.stderr  # said before the work


def test_a_model_larger_than_the_machine(lowtide_command: Command, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": 65536, "intermediate_size": 2**18}))
    result = lowtide_command("plan", "--hf", str(path), "--budget", "1GiB", "--quiet")
    refused(result, 1, "LlamaForCausalLM takes", "this machine has", "--dtype bfloat16, or for fewer layers")


def test_a_file_that_cannot_be_written(lowtide_command: Command, own_models: Path) -> None:
    words = ("plan", "own_models:build", "--loss", "own_models:loss", "--budget", "1GiB", "-q")
    result = lowtide_command(*words, "--json", "/dev/full")
    assert result.exit_code == 1
    assert "'/dev/full' cannot be written: No space left on device" in result.stderr
