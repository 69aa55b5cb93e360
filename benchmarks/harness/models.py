"""The models that are measured: from transformers' configurations or our own, with random weights and seeded data.

Every model has its loss inside, so that `model(**batch)` gives it. No weights or data are downloaded. A catalogue is
a choice of sizes: `STANDARD` for results (0.5-1.5 s for a plain step on one thread, and most of its peak activations),
`TINY` to see that everything runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as typed_transformers
from torch import nn

from .unets import DiffusionUNet, Segmenter

transformers: Any = typed_transformers  # its configurations take more keywords than their types say
WORDS = 2048
IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False}
Batch = dict[str, torch.Tensor]
Made = tuple[nn.Module, Batch]


@dataclass(frozen=True)
class Case:
    """A model of one size, with its batch."""

    title: str
    make: Callable[[], Made]

    def build(self) -> Made:
        """The same weights and data each time."""
        torch.manual_seed(0)
        model, batch = self.make()
        return model.train(), batch


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def text(model: nn.Module, batch: int, length: int, words: int = WORDS) -> Made:
    ids = torch.randint(5, words, (batch, length), generator=seeded(1))
    return model, {"input_ids": ids, "labels": ids}


def image(model: nn.Module, batch: int, size: int) -> Made:
    pixels = torch.randn(batch, 3, size, size, generator=seeded(2))
    return model, {"pixel_values": pixels, "labels": torch.arange(batch) % 5}


def width(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": max(2, hidden // 64),
        "num_hidden_layers": layers,
    }


def gpt2(layers: int, hidden: int, batch: int, length: int, words: int = WORDS) -> Case:
    def make() -> Made:
        config = transformers.GPT2Config(
            n_layer=layers, n_embd=hidden, n_head=max(2, hidden // 64), vocab_size=words, n_positions=length, **IDS
        )
        return text(transformers.GPT2LMHeadModel(config), batch, length, words)

    return Case(f"GPT-2, {layers} × {hidden}, batch {batch} × {length}", make)


def llama(layers: int, hidden: int, batch: int, length: int) -> Case:
    def make() -> Made:
        shape = width(hidden, layers)
        config = transformers.LlamaConfig(**shape, num_key_value_heads=2, vocab_size=WORDS, **IDS)
        return text(transformers.LlamaForCausalLM(config), batch, length)

    return Case(f"Llama, {layers} × {hidden}, batch {batch} × {length}", make)


def bert(layers: int, hidden: int, batch: int, length: int) -> Case:
    def make() -> Made:
        config = transformers.BertConfig(**width(hidden, layers), vocab_size=WORDS)
        return text(transformers.BertForMaskedLM(config), batch, length)

    return Case(f"BERT, {layers} × {hidden}, batch {batch} × {length}", make)


def t5(layers: int, hidden: int, batch: int, length: int) -> Case:
    def make() -> Made:
        config = transformers.T5Config(
            d_model=hidden, d_kv=64, d_ff=4 * hidden, num_layers=layers, num_heads=hidden // 64, vocab_size=WORDS,
            decoder_start_token_id=0, pad_token_id=0, use_cache=False,
        )  # fmt: skip
        return text(transformers.T5ForConditionalGeneration(config), batch, length)

    return Case(f"T5, {layers} + {layers} × {hidden}, batch {batch} × {length}", make)


def vit(layers: int, hidden: int, batch: int, size: int = 64, patch: int = 8) -> Case:
    def make() -> Made:
        config = transformers.ViTConfig(**width(hidden, layers), image_size=size, patch_size=patch, num_labels=5)
        return image(transformers.ViTForImageClassification(config), batch, size)

    return Case(f"ViT, {layers} × {hidden}, batch {batch} × {size}² in {patch}² patches", make)


def resnet(name: str, stem: int, widths: list[int], depths: list[int], batch: int, size: int) -> Case:
    def make() -> Made:
        config = transformers.ResNetConfig(embedding_size=stem, hidden_sizes=widths, depths=depths, num_labels=5)
        return image(transformers.ResNetForImageClassification(config), batch, size)

    return Case(f"{name}, batch {batch} × {size}²", make)


def resnet50_halved(batch: int, size: int) -> Case:
    return resnet("ResNet-50 at half width", 32, [128, 256, 512, 1024], [3, 4, 6, 3], batch, size)


def unet(batch: int, size: int, widths: tuple[int, ...] = (16, 32, 64, 128)) -> Case:
    def make() -> Made:
        pixels = torch.randn(batch, 3, size, size, generator=seeded(3))
        labels = torch.randint(0, 4, (batch, size, size), generator=seeded(4))
        return Segmenter(widths), {"pixel_values": pixels, "labels": labels}

    return Case(f"U-Net, {widths[0]} to {widths[-1]} wide, batch {batch} × {size}²", make)


def diffusion(batch: int, size: int, widths: tuple[int, ...]) -> Case:
    def make() -> Made:
        noise = torch.randn(2, batch, 3, size, size, generator=seeded(5))
        moment = torch.rand(batch, generator=seeded(6)) * 1000
        return DiffusionUNet(widths), {"noisy": noise[0] + noise[1], "noise": noise[1], "moment": moment}

    return Case(f"Diffusion U-Net, {widths[0]} to {widths[-1]} wide, batch {batch} × {size}²", make)


def mixtral(layers: int, hidden: int, batch: int, length: int, experts: int = 4) -> Case:
    def make() -> Made:
        config = transformers.MixtralConfig(
            **width(hidden, layers) | {"intermediate_size": 2 * hidden},
            num_key_value_heads=2, num_local_experts=experts, num_experts_per_tok=2, vocab_size=WORDS, **IDS,
        )  # fmt: skip
        return text(transformers.MixtralForCausalLM(config), batch, length)

    return Case(f"Mixtral, {layers} × {hidden}, {experts} experts, batch {batch} × {length}", make)


def mamba(layers: int, hidden: int, batch: int, length: int) -> Case:
    def make() -> Made:
        config = transformers.MambaConfig(
            hidden_size=hidden, num_hidden_layers=layers, state_size=16, vocab_size=WORDS, **IDS
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
    """Embedding, LSTMs, and the loss of the next word."""

    def __init__(self, layers: int, hidden: int, words: int = WORDS) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, hidden), nn.Linear(hidden, words)
        self.layers = nn.ModuleList(RecurrentBlock(hidden) for _ in range(layers))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())


def lstm(layers: int, hidden: int, batch: int, length: int) -> Case:
    def make() -> Made:
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
DECIDED_ON = ("gpt2", "llama", "bert", "t5", "vit", "resnet50", "unet")
"""Models on which targets are decided, so on which more rounds are taken."""
LARGE: dict[str, Case] = {
    "gpt2": gpt2(12, 256, 12, 128),
    "llama": llama(12, 256, 12, 128),
    "bert": bert(12, 256, 12, 128),
    "t5": t5(6, 256, 10, 128),
    "vit": vit(12, 256, 32),
    "resnet50": resnet50_halved(32, 128),
    "unet": unet(40, 96),
}
"""Those at twice the batch, so that a plain step takes 1 to 3 s: what lowtide costs itself weighs half as much."""
TINY: dict[str, Case] = {
    "gpt2": gpt2(4, 64, 8, 32, 128),
    "resnet50": resnet("A ResNet of 6 blocks", 8, [32, 64], [3, 3], 4, 32),
    "lstm": lstm(4, 32, 8, 16),
}
CATALOGUES = {"standard": STANDARD, "large": LARGE, "tiny": TINY}
