"""Models from transformers configurations: random weights, a seeded batch, no downloads.

The model class is the first supported one in the configuration's `architectures`. Without one, it is the first
task in `_TASKS` that the model type supports. Its output has a `.loss`.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._errors import ArgumentError, MissingPackageError
from .._units import format_bytes
from ._failures import Failure, user_code
from ._memory import available_bytes

DEFAULT_SEQ, DEFAULT_IMAGE = 128, 224

Batch = dict[str, torch.Tensor]
BatchMaker = Callable[[Any, int, int, torch.Generator], Batch]


def read_config(path: str) -> dict[str, Any]:
    """Return the configuration in a JSON file."""
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(
            f"{path!r} cannot be read: {error.strerror}; --hf needs the config.json of a transformers model"
        ) from error
    except ValueError as error:
        raise ArgumentError(f"{path!r} is not JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ArgumentError(
            f"{path!r} has no 'model_type': a transformers configuration needs one, such as 'gpt2' or 'llama'"
        )
    return config


class ConfiguredModel:
    """A model, built once, and batches of any size for it."""

    def __init__(
        self,
        config: dict[str, Any],
        *,
        seq: int | None,
        dtype: str | None,
        device: str | None,
        lengths: range | None = None,
    ) -> None:
        """`lengths`: batches of these sequence lengths will be made, instead of `seq`."""
        transformers = import_transformers()
        self.config = build_config(transformers, config)
        class_name, self._make_batch = choose_model_class(config)
        self.device = _device(device)
        self.seq = _sequence_length(self.config, seq)
        if lengths is not None:
            _check_lengths(self.config, lengths)
        model_class: type[nn.Module] = getattr(transformers, class_name)
        torch_dtype = getattr(torch, dtype or "float32")
        _check_memory(model_class, self.config, torch_dtype, self.device)
        with torch.random.fork_rng(devices=[]), user_code(f"building {class_name} from its configuration"):
            torch.manual_seed(0)
            self.model = model_class(self.config).to(device=self.device, dtype=torch_dtype).train()

    def batch(self, size: int, length: int | None = None) -> Batch:
        """Return a batch of this size and sequence length. Equal sizes give equal batches."""
        batch = self._make_batch(self.config, size, length or self.seq, torch.Generator().manual_seed(0))
        dtype = next(self.model.parameters()).dtype
        return {
            name: tensor.to(self.device, dtype if tensor.is_floating_point() else None)
            for name, tensor in batch.items()
        }


def import_transformers() -> Any:
    """Return the package transformers, set to offline. Raise `MissingPackageError` if it is not installed."""
    # No downloads. Has no effect if transformers is already imported.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingPackageError("transformers", "a model from a configuration", extra="demo") from error
    transformers.logging.set_verbosity_error()
    return transformers


def build_config(transformers: Any, config: dict[str, Any]) -> Any:
    """Return the configuration as an object of transformers. Raise `ArgumentError` if it is invalid."""
    options = {name: value for name, value in config.items() if name not in ("model_type", "transformers_version")}
    model_type = config["model_type"]
    if model_type not in importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES:
        raise ArgumentError(
            f"transformers {transformers.__version__} has no model type {model_type!r}: check the spelling, or "
            "install a version that has it"
        )
    try:
        return transformers.AutoConfig.for_model(model_type, **options)
    except Exception as error:  # the exception type depends on the version of transformers
        message = " ".join(str(error).split())
        raise ArgumentError(f"invalid configuration of a {model_type!r} model: {message}") from error


def choose_model_class(config: dict[str, Any]) -> tuple[str, BatchMaker]:
    """Return the name of the class to build, and the function that makes its batches."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    order = sorted(_TASKS, key=lambda task: task != "CAUSAL_LM") if config.get("is_decoder") else _TASKS
    tasks = [(getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES"), _TASKS[task]) for task in order]
    model_type = config["model_type"]
    for architecture in config.get("architectures") or ():
        for mapping, make_batch in tasks:
            if architecture in _classes(mapping.get(model_type)):
                return architecture, make_batch
        if not architecture.endswith("Model"):  # a class with a head for another task
            raise _unsupported(architecture)
    for mapping, make_batch in tasks:
        classes = _classes(mapping.get(model_type))
        if classes:
            return classes[0], make_batch
    raise _unsupported(f"model type {model_type!r}")


def _unsupported(name: str) -> ArgumentError:
    return ArgumentError(
        f"lowtide has no batches for {name}: write a function that returns (model, batch) and give it as "
        "package.module:function"
    )


def _classes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except Exception as error:  # the exception type depends on the device
        message = str(error).splitlines()[0]
        raise ArgumentError(
            f"the device {name!r} is not available ({message}): lowtide doctor lists the devices"
        ) from error
    return device


def _sequence_length(config: Any, seq: int | None) -> int:
    positions = getattr(config, "max_position_embeddings", None)
    if seq is not None and isinstance(positions, int) and seq > positions:
        raise ArgumentError(f"--seq {seq} is longer than the model's maximum of {positions} tokens")
    return seq if seq is not None else min(DEFAULT_SEQ, positions) if isinstance(positions, int) else DEFAULT_SEQ


def _check_lengths(config: Any, lengths: range) -> None:
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and lengths[-1] > positions:
        raise ArgumentError(
            f"--length {lengths[0]}..{lengths[-1]} goes beyond the model's maximum of {positions} tokens"
        )


def _check_memory(model_class: type[nn.Module], config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `Failure` if parameters and gradients exceed the available memory, before the system kills the process."""
    free = available_bytes()
    if free is None or device.type != "cpu":
        return
    try:
        with torch.device("meta"):
            empty = model_class(config)
    except Exception:  # some models cannot be built on the meta device
        return
    needed = 2 * dtype.itemsize * sum(parameter.numel() for parameter in empty.parameters())
    if needed > free:
        raise Failure(
            f"{model_class.__name__} needs {format_bytes(needed)} for parameters and gradients, and "
            f"{format_bytes(free)} of memory are available: use a larger machine, --dtype bfloat16, or fewer layers"
        )


def _ids(config: Any, batch: int, seq: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, config.get_text_config().vocab_size, (batch, seq), generator=generator)


def _labels(config: Any, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, config.num_labels, shape, generator=generator)


def _text(config: Any, batch: int, seq: int, generator: torch.Generator) -> Batch:
    ids = _ids(config, batch, seq, generator)
    return {"input_ids": ids, "labels": ids}


def _text_classes(config: Any, batch: int, seq: int, generator: torch.Generator) -> Batch:
    return {"input_ids": _ids(config, batch, seq, generator), "labels": _labels(config, (batch,), generator)}


def _token_classes(config: Any, batch: int, seq: int, generator: torch.Generator) -> Batch:
    return {"input_ids": _ids(config, batch, seq, generator), "labels": _labels(config, (batch, seq), generator)}


def _answer_spans(config: Any, batch: int, seq: int, generator: torch.Generator) -> Batch:
    positions = torch.randint(0, seq, (2, batch), generator=generator)
    return {
        "input_ids": _ids(config, batch, seq, generator),
        "start_positions": positions[0].clone(),
        "end_positions": positions[1].clone(),
    }


def _image(config: Any, batch: int, seq: int, generator: torch.Generator) -> Batch:
    size = getattr(config, "image_size", DEFAULT_IMAGE)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    channels = getattr(config, "num_channels", 3)
    return {
        "pixel_values": torch.randn(batch, channels, height, width, generator=generator),
        "labels": _labels(config, (batch,), generator),
    }


def _speech(config: Any, batch: int, seq: int, generator: torch.Generator) -> Batch:
    bins, positions = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    if bins is None or positions is None:
        raise _unsupported(f"model type {config.model_type!r}")
    seq = min(seq, getattr(config, "max_target_positions", seq))
    return {
        "input_features": torch.randn(batch, bins, 2 * positions, generator=generator),
        "labels": _ids(config, batch, seq, generator),
    }


_TASKS: dict[str, BatchMaker] = {
    "SPEECH_SEQ_2_SEQ": _speech,
    "SEQ_TO_SEQ_CAUSAL_LM": _text,
    "MASKED_LM": _text,
    "CAUSAL_LM": _text,
    "IMAGE_CLASSIFICATION": _image,
    "SEQUENCE_CLASSIFICATION": _text_classes,
    "TOKEN_CLASSIFICATION": _token_classes,
    "QUESTION_ANSWERING": _answer_spans,
}
"""Tasks in the tables of transformers, in order of preference, and the function that makes their batches."""
