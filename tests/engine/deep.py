"""Six architectures, deep enough and with batches large enough that activations fill the memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as T
from torch import nn

from .zoo import IDS, VOCABULARY, Made, tokens

LAYERS = 6
WIDTH = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": LAYERS}


def _text(model: nn.Module) -> Made:
    ids = tokens(16, 48)
    return model, {"input_ids": ids, "labels": ids}


def _image(model: nn.Module, size: int) -> Made:
    pixels = torch.randn(16, 3, size, size, generator=torch.Generator().manual_seed(2))
    return model, {"pixel_values": pixels, "labels": torch.arange(16) % 5}


DEEP: dict[str, Callable[[], Made]] = {
    "gpt2": lambda: _text(
        T.GPT2LMHeadModel(
            T.GPT2Config(n_layer=LAYERS, n_embd=64, n_head=4, vocab_size=VOCABULARY, n_positions=48, **IDS)
        )
    ),
    "llama": lambda: _text(
        T.LlamaForCausalLM(T.LlamaConfig(**WIDTH, num_key_value_heads=2, vocab_size=VOCABULARY, **IDS))
    ),
    "bert": lambda: _text(T.BertForMaskedLM(T.BertConfig(**WIDTH, vocab_size=VOCABULARY))),
    "t5": lambda: _text(
        T.T5ForConditionalGeneration(
            T.T5Config(
                d_model=64,
                d_kv=16,
                d_ff=128,
                num_layers=LAYERS,
                num_heads=4,
                vocab_size=VOCABULARY,
                decoder_start_token_id=0,
                pad_token_id=0,
            )
        )
    ),
    "vit": lambda: _image(
        T.ViTForImageClassification(T.ViTConfig(**WIDTH, image_size=32, patch_size=4, num_labels=5)), 32
    ),
    "resnet": lambda: _image(
        T.ResNetForImageClassification(
            T.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32, 64], depths=[4, 4, 2], num_labels=5)
        ),
        48,
    ),
}


def build(name: str) -> Made:
    T.logging.set_verbosity_error()
    torch.manual_seed(0)
    model, batch = DEEP[name]()
    return model.train(), batch
