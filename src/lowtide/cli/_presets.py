"""Built-in transformers configurations, by name. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A transformers configuration, and its line in the help text."""

    summary: str
    config: dict[str, Any]


_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

PRESETS = {
    "gpt2-tiny": Preset(
        "2 layers, width 64, for a first try",
        {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512, **_IDS},
    ),
    "gpt2-small": Preset("GPT-2 as published, 12 layers, width 768", {"model_type": "gpt2"}),
    "llama-tiny": Preset(
        "2 layers, width 64",
        {
            "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 172,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, **_IDS,
        },
    ),
    "llama-small": Preset(
        "12 layers, width 768",
        {
            "model_type": "llama", "num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 2048,
            "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 32000, **_IDS,
        },
    ),
    "bert-tiny": Preset(
        "2 layers, width 128",
        {
            "model_type": "bert", "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 512,
            "num_attention_heads": 2, "vocab_size": 512,
        },
    ),
    "bert-small": Preset(
        "4 layers, width 512",
        {
            "model_type": "bert", "num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 2048,
            "num_attention_heads": 8,
        },
    ),
    "t5-tiny": Preset(
        "2 encoder and 2 decoder layers, width 64",
        {
            "model_type": "t5", "num_layers": 2, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4,
            "vocab_size": 512, "decoder_start_token_id": 0,
        },
    ),
    "t5-small": Preset(
        "T5-small as published, 6 encoder and 6 decoder layers, width 512",
        {"model_type": "t5", "decoder_start_token_id": 0},
    ),
    "vit-tiny": Preset(
        "2 layers, width 64, images 32 × 32",
        {
            "model_type": "vit", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
            "num_attention_heads": 4, "image_size": 32, "patch_size": 8, "num_labels": 10,
        },
    ),
    "vit-small": Preset(
        "12 layers, width 384, images 224 × 224",
        {
            "model_type": "vit", "num_hidden_layers": 12, "hidden_size": 384, "intermediate_size": 1536,
            "num_attention_heads": 6, "num_labels": 1000,
        },
    ),
    "resnet-tiny": Preset(
        "7 convolutions, images 64 × 64",
        {
            "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 32], "depths": [1, 2, 1],
            "layer_type": "basic", "image_size": 64, "num_labels": 10,
        },
    ),
    "resnet": Preset("ResNet-50, images 224 × 224", {"model_type": "resnet", "num_labels": 1000}),
}  # fmt: skip
