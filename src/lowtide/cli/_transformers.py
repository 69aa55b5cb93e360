"""Models from configurations of the package transformers: random weights, a seeded batch, nothing from a network.

The head is the one that the configuration names, or else the first kind in `_HEADS` that the model type has, so
that the output has a `.loss`.
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
from ._failures import Failure, others_code
from ._memory import available_bytes

SEQ, IMAGE = 128, 224

Batch = dict[str, torch.Tensor]
Maker = Callable[[Any, int, int, torch.Generator], Batch]


def read_config(path: str) -> dict[str, Any]:
    """The configuration in a file."""
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(
            f"no configuration can be read from {path!r}: {error.strerror}; --hf takes the config.json of a model"
        ) from error
    except ValueError as error:
        raise ArgumentError(f"{path!r} is not JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ArgumentError(
            f"{path!r} has no 'model_type': a configuration of transformers names one, such as 'gpt2' or 'llama'"
        )
    return config


class ConfiguredModel:
    """A model and batches for it of any size. The model is made once."""

    def __init__(self, config: dict[str, Any], *, seq: int | None, dtype: str | None, device: str | None) -> None:
        transformers = _transformers()
        self.config = _config_object(transformers, config)
        head, self._make_batch = _head(config)
        self.head = head
        self.device = _device(device)
        self.seq = _length(self.config, seq)
        kind: type[nn.Module] = getattr(transformers, head)
        number_type = getattr(torch, dtype or "float32")
        _check_memory(kind, self.config, number_type, self.device)
        with torch.random.fork_rng(devices=[]), others_code(f"building {head} from its configuration"):
            torch.manual_seed(0)
            self.model = kind(self.config).to(device=self.device, dtype=number_type).train()

    def batch(self, size: int) -> Batch:
        """The batch of this size; the same whenever it is asked for."""
        made = self._make_batch(self.config, size, self.seq, torch.Generator().manual_seed(0))
        dtype = next(self.model.parameters()).dtype
        return {
            name: tensor.to(self.device, dtype if tensor.is_floating_point() else None) for name, tensor in made.items()
        }


def _transformers() -> Any:
    # A promise of --hf and --preset; without effect where transformers is imported already.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingPackageError("transformers", "a model from a configuration", extra="demo") from error
    transformers.logging.set_verbosity_error()
    return transformers


def _config_object(transformers: Any, config: dict[str, Any]) -> Any:
    rest = {name: value for name, value in config.items() if name not in ("model_type", "transformers_version")}
    kind = config["model_type"]
    if kind not in importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES:
        raise ArgumentError(
            f"transformers {transformers.__version__} has no model type {kind!r}: look for a typing error, or "
            "install a version that has it"
        )
    try:
        return transformers.AutoConfig.for_model(kind, **rest)
    except Exception as error:  # each version checks in its own way
        said = " ".join(str(error).split())
        raise ArgumentError(f"this is no configuration of a {kind!r} model: {said}") from error


def _head(config: dict[str, Any]) -> tuple[str, Maker]:
    """The class to build, by name, and what makes a batch for it."""
    names = importlib.import_module("transformers.models.auto.modeling_auto")
    order = sorted(_HEADS, key=lambda head: head != "CAUSAL_LM") if config.get("is_decoder") else _HEADS
    heads = [(getattr(names, f"MODEL_FOR_{head}_MAPPING_NAMES"), _HEADS[head]) for head in order]
    kind = config["model_type"]
    for wanted in config.get("architectures") or ():
        for mapping, maker in heads:
            if wanted in _classes(mapping.get(kind)):
                return wanted, maker
        if not wanted.endswith("Model"):  # one with a head, of which we do not know what it is fed
            raise ArgumentError(_unknown(f"{wanted} is fed"))
    for mapping, maker in heads:
        found = _classes(mapping.get(kind))
        if found:
            return found[0], maker
    raise ArgumentError(_unknown(f"a model of type {kind!r} is trained"))


def _unknown(what: str) -> str:
    return (
        f"how {what} is not known here: write a function that returns (model, batch) "
        "and give it as package.module:function"
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
    except Exception as error:  # torch has several for it, by device
        said = str(error).splitlines()[0]
        raise ArgumentError(f"there is no device {name!r} here ({said}): see lowtide doctor") from error
    return device


def _length(config: Any, seq: int | None) -> int:
    positions = getattr(config, "max_position_embeddings", None)
    if seq is not None and isinstance(positions, int) and seq > positions:
        raise ArgumentError(f"samples of {seq} tokens are longer than the {positions} positions that the model has")
    return seq if seq is not None else min(SEQ, positions) if isinstance(positions, int) else SEQ


def _check_memory(kind: type[nn.Module], config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Parameters and gradients have to be there at once: say that they cannot be, before the system kills us."""
    free = available_bytes()
    if free is None or device.type != "cpu":
        return
    try:
        with torch.device("meta"):
            empty = kind(config)
    except Exception:  # not every model can be made without memory
        return
    needed = 2 * dtype.itemsize * sum(parameter.numel() for parameter in empty.parameters())
    if needed > free:
        raise Failure(
            f"{kind.__name__} takes {format_bytes(needed)} for parameters and gradients, and this machine has "
            f"{format_bytes(free)} left: ask where there is more, with --dtype bfloat16, or for fewer layers"
        )


def _ids(config: Any, batch: int, seq: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, config.get_text_config().vocab_size, (batch, seq), generator=generator)


def _classes_of(config: Any, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, config.num_labels, shape, generator=generator)


def _text(config: Any, batch: int, seq: int, generator: torch.Generator) -> Batch:
    ids = _ids(config, batch, seq, generator)
    return {"input_ids": ids, "labels": ids}


def _text_classes(config: Any, batch: int, seq: int, generator: torch.Generator) -> Batch:
    return {"input_ids": _ids(config, batch, seq, generator), "labels": _classes_of(config, (batch,), generator)}


def _token_classes(config: Any, batch: int, seq: int, generator: torch.Generator) -> Batch:
    return {"input_ids": _ids(config, batch, seq, generator), "labels": _classes_of(config, (batch, seq), generator)}


def _answers(config: Any, batch: int, seq: int, generator: torch.Generator) -> Batch:
    where = torch.randint(0, seq, (2, batch), generator=generator)
    return {
        "input_ids": _ids(config, batch, seq, generator),
        "start_positions": where[0].clone(),
        "end_positions": where[1].clone(),
    }


def _image(config: Any, batch: int, seq: int, generator: torch.Generator) -> Batch:
    size = getattr(config, "image_size", IMAGE)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    channels = getattr(config, "num_channels", 3)
    return {
        "pixel_values": torch.randn(batch, channels, height, width, generator=generator),
        "labels": _classes_of(config, (batch,), generator),
    }


def _speech(config: Any, batch: int, seq: int, generator: torch.Generator) -> Batch:
    bins, positions = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    if bins is None or positions is None:
        raise ArgumentError(_unknown(f"a model of type {config.model_type!r} is trained"))
    seq = min(seq, getattr(config, "max_target_positions", seq))
    return {
        "input_features": torch.randn(batch, bins, 2 * positions, generator=generator),
        "labels": _ids(config, batch, seq, generator),
    }


_HEADS: dict[str, Maker] = {
    "SPEECH_SEQ_2_SEQ": _speech,
    "SEQ_TO_SEQ_CAUSAL_LM": _text,
    "MASKED_LM": _text,
    "CAUSAL_LM": _text,
    "IMAGE_CLASSIFICATION": _image,
    "SEQUENCE_CLASSIFICATION": _text_classes,
    "TOKEN_CLASSIFICATION": _token_classes,
    "QUESTION_ANSWERING": _answers,
}
"""Kinds of models in transformers' own tables, with what a batch for each is."""
