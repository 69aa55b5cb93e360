"""The measured models: configurations of transformers and models of our own, with random weights and seeded data.

`model(**batch)` returns the loss. Nothing is downloaded. A catalogue is a choice of sizes: `STANDARD` for results (a
plain step takes 0.5 to 1.5 s on one thread, and activations are most of its peak), `LARGE` for steps of 1 to 3 s, and
`TINY` for a check that all code runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as typed_transformers
from torch import nn

from .unets import DiffusionUNet, Segmenter

transformers: Any = typed_transformers  # configurations accept more keywords than their types list
VOCAB_SIZE = 2048
IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False}
Batch = dict[str, torch.Tensor]
ModelAndBatch = tuple[nn.Module, Batch]


@dataclass(frozen=True)
class Case:
    """A model of one size, with its batch."""

    title: str
    make: Callable[[], ModelAndBatch]

    def build(self) -> ModelAndBatch:
        """Return the model and its batch, with the same weights and data each time."""
        torch.manual_seed(0)
        model, batch = self.make()
        return model.train(), batch


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def text(model: nn.Module, batch: int, length: int, vocab_size: int = VOCAB_SIZE) -> ModelAndBatch:
    ids = torch.randint(5, vocab_size, (batch, length), generator=seeded(1))
    return model, {"input_ids": ids, "labels": ids}


def image(model: nn.Module, batch: int, size: int) -> ModelAndBatch:
    pixels = torch.randn(batch, 3, size, size, generator=seeded(2))
    return model, {"pixel_values": pixels, "labels": torch.arange(batch) % 5}


def width(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": max(2, hidden // 64),
        "num_hidden_layers": layers,
    }


def gpt2(layers: int, hidden: int, batch: int, length: int, vocab_size: int = VOCAB_SIZE) -> Case:
    def make() -> ModelAndBatch:
        config = transformers.GPT2Config(
            n_layer=layers, n_embd=hidden, n_head=max(2, hidden // 64), vocab_size=vocab_size, n_positions=length, **IDS
        )
        return text(transformers.GPT2LMHeadModel(config), batch, length, vocab_size)

    return Case(f"GPT-2, {layers} × {hidden}, batch {batch} × {length}", make)


def llama(layers: int, hidden: int, batch: int, length: int) -> Case:
    def make() -> ModelAndBatch:
        shape = width(hidden, layers)
        config = transformers.LlamaConfig(**shape, num_key_value_heads=2, vocab_size=VOCAB_SIZE, **IDS)
        return text(transformers.LlamaForCausalLM(config), batch, length)

    return Case(f"Llama, {layers} × {hidden}, batch {batch} × {length}", make)


def bert(layers: int, hidden: int, batch: int, length: int) -> Case:
    def make() -> ModelAndBatch:
        config = transformers.BertConfig(**width(hidden, layers), vocab_size=VOCAB_SIZE)
        return text(transformers.BertForMaskedLM(config), batch, length)

    return Case(f"BERT, {layers} × {hidden}, batch {batch} × {length}", make)


def t5(layers: int, hidden: int, batch: int, length: int) -> Case:
    def make() -> ModelAndBatch:
        config = transformers.T5Config(
            d_model=hidden, d_kv=64, d_ff=4 * hidden, num_layers=layers, num_heads=hidden // 64, vocab_size=VOCAB_SIZE,
            decoder_start_token_id=0, pad_token_id=0, use_cache=False,
        )  # fmt: skip
        return text(transformers.T5ForConditionalGeneration(config), batch, length)

    return Case(f"T5, {layers} + {layers} × {hidden}, batch {batch} × {length}", make)


def vit(layers: int, hidden: int, batch: int, size: int = 64, patch: int = 8) -> Case:
    def make() -> ModelAndBatch:
        config = transformers.ViTConfig(**width(hidden, layers), image_size=size, patch_size=patch, num_labels=5)
        return image(transformers.ViTForImageClassification(config), batch, size)

    return Case(f"ViT, {layers} × {hidden}, batch {batch} × {size}² in {patch}² patches", make)


def resnet(name: str, stem: int, widths: list[int], depths: list[int], batch: int, size: int) -> Case:
    def make() -> ModelAndBatch:
        config = transformers.ResNetConfig(embedding_size=stem, hidden_sizes=widths, depths=depths, num_labels=5)
        return image(transformers.ResNetForImageClassification(config), batch, size)

    return Case(f"{name}, batch {batch} × {size}²", make)


def resnet50_halved(batch: int, size: int) -> Case:
    return resnet("ResNet-50 at half width", 32, [128, 256, 512, 1024], [3, 4, 6, 3], batch, size)


def unet(batch: int, size: int, widths: tuple[int, ...] = (16, 32, 64, 128)) -> Case:
    def make() -> ModelAndBatch:
        pixels = torch.randn(batch, 3, size, size, generator=seeded(3))
        labels = torch.randint(0, 4, (batch, size, size), generator=seeded(4))
        return Segmenter(widths), {"pixel_values": pixels, "labels": labels}

    return Case(f"U-Net, {widths[0]} to {widths[-1]} wide, batch {batch} × {size}²", make)


def diffusion(batch: int, size: int, widths: tuple[int, ...]) -> Case:
    def make() -> ModelAndBatch:
        noise = torch.randn(2, batch, 3, size, size, generator=seeded(5))
        timestep = torch.rand(batch, generator=seeded(6)) * 1000
        return DiffusionUNet(widths), {"noisy": noise[0] + noise[1], "noise": noise[1], "timestep": timestep}

    return Case(f"Diffusion U-Net, {widths[0]} to {widths[-1]} wide, batch {batch} × {size}²", make)


def mixtral(layers: int, hidden: int, batch: int, length: int, experts: int = 4) -> Case:
    def make() -> ModelAndBatch:
        config = transformers.MixtralConfig(
            **width(hidden, layers) | {"intermediate_size": 2 * hidden},
            num_key_value_heads=2, num_local_experts=experts, num_experts_per_tok=2, vocab_size=VOCAB_SIZE, **IDS,
        )  # fmt: skip
        return text(transformers.MixtralForCausalLM(config), batch, length)

    return Case(f"Mixtral, {layers} × {hidden}, {experts} experts, batch {batch} × {length}", make)


def mamba(layers: int, hidden: int, batch: int, length: int) -> Case:
    def make() -> ModelAndBatch:
        config = transformers.MambaConfig(
            hidden_size=hidden, num_hidden_layers=layers, state_size=16, vocab_size=VOCAB_SIZE, **IDS
        )
        return text(transformers.MambaForCausalLM(config), batch, length)

    return Case(f"Mamba, {layers} × {hidden}, batch {batch} × {length}", make)


class RecurrentBlock(nn.Module):
    """An LSTM over the whole sequence, with a residual connection and dropout."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.lstm, self.drop = nn.LayerNorm(hidden), nn.LSTM(hidden, hidden, batch_first=True), nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.drop(self.lstm(self.norm(x))[0])
        return x + mixed


class RecurrentLanguageModel(nn.Module):
    """Embedding, LSTM blocks and the loss of the next token."""

    def __init__(self, layers: int, hidden: int, vocab_size: int = VOCAB_SIZE) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab_size, hidden), nn.Linear(hidden, vocab_size)
        self.layers = nn.ModuleList(RecurrentBlock(hidden) for _ in range(layers))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())


def lstm(layers: int, hidden: int, batch: int, length: int) -> Case:
    def make() -> ModelAndBatch:
        return text(RecurrentLanguageModel(layers, hidden), batch, length)

    return Case(f"LSTM, {layers} × {hidden}, batch {batch} × {length}", make)


STANDARD: dict[str, Case] = {
    "gpt2": gpt2(12, 256, 6, 128),
    "llama": llama(12, 256, 6, 128),
    "bert": bert(12, 256, 6, 128),
    "t5": t5(6, 256, 5, 128),
    "vit": vit(12, 256, 16),
    "resnet50": resnet50_halved(16, 128),
    "unet": unet(20, 96),
    "diffusion": diffusion(7, 64, (32, 64, 128)),
    "mixtral": mixtral(8, 256, 5, 128),
    "mamba": mamba(4, 256, 2, 64),
    "lstm": lstm(6, 256, 10, 128),
    "deep": gpt2(48, 128, 2, 128),
    "gpt2-compiled": gpt2(4, 256, 8, 128),
    "resnet-compiled": resnet("ResNet-14 at half width", 32, [128, 256, 512, 1024], [1, 1, 1, 1], 24, 128),
}
MAIN_MODELS = ("gpt2", "llama", "bert", "t5", "vit", "resnet50", "unet")
"""Models that are timed in more rounds than the others."""
LARGE: dict[str, Case] = {
    "gpt2": gpt2(12, 256, 12, 128),
    "llama": llama(12, 256, 12, 128),
    "bert": bert(12, 256, 12, 128),
    "t5": t5(6, 256, 10, 128),
    "vit": vit(12, 256, 32),
    "resnet50": resnet50_halved(32, 128),
    "unet": unet(40, 96),
}
"""`MAIN_MODELS` with twice the batch: a plain step takes 1 to 3 s, so fixed costs per op weigh half as much."""
TINY: dict[str, Case] = {
    "gpt2": gpt2(4, 64, 8, 32, 128),
    "resnet50": resnet("A ResNet of 6 blocks", 8, [32, 64], [3, 3], 4, 32),
    "lstm": lstm(4, 32, 8, 16),
}
CATALOGUES = {"standard": STANDARD, "large": LARGE, "tiny": TINY}
