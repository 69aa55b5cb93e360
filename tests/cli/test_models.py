"""Models from transformers configurations: model class, batch, dtype and size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowtide.cli._presets import PRESETS
from lowtide.cli._transformers import ConfiguredModel, build_config, choose_model_class, import_transformers

TINY = [name for name in PRESETS if name.endswith("-tiny")]
BERT = PRESETS["bert-tiny"].config
GPT2 = PRESETS["gpt2-tiny"].config
WHISPER = {
    "model_type": "whisper", "encoder_layers": 1, "decoder_layers": 1, "d_model": 32, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 96,
    "num_mel_bins": 16, "max_source_positions": 30, "max_target_positions": 32, "decoder_start_token_id": 1,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def configured(config: dict[str, Any], **options: Any) -> ConfiguredModel:
    return ConfiguredModel(config, **{"seq": None, "dtype": None, "device": "cpu", **options})


def loss_of(configured_model: ConfiguredModel, batch: int = 2) -> torch.Tensor:
    loss = configured_model.model(**configured_model.batch(batch)).loss
    assert isinstance(loss, torch.Tensor)
    assert loss.requires_grad
    assert bool(loss.isfinite())
    return loss


@pytest.mark.parametrize("name", TINY)
def test_tiny_presets_have_a_loss_and_a_seed(name: str) -> None:
    state = torch.get_rng_state()
    one, other = configured(PRESETS[name].config), configured(PRESETS[name].config)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    batches = one.batch(3), other.batch(3)
    assert all(torch.equal(batches[0][key], batches[1][key]) for key in batches[0])
    assert {len(tensor) for tensor in batches[0].values()} == {3}
    loss_of(one)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2-small", 124_439_808),  # sizes from papers and model cards
        ("t5-small", 60_506_624),
        ("resnet", 25_557_032),
        ("vit-small", 22_050_664),
    ],
)
def test_published_presets_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    transformers = import_transformers()
    config = PRESETS[name].config
    with torch.device("meta"):
        model = getattr(transformers, choose_model_class(config)[0])(build_config(transformers, config))
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("config", "class_name"),
    [
        (BERT, "BertForMaskedLM"),
        ({**BERT, "is_decoder": True}, "BertLMHeadModel"),
        ({**BERT, "architectures": ["BertModel"]}, "BertForMaskedLM"),
        ({**BERT, "architectures": ["BertForSequenceClassification"]}, "BertForSequenceClassification"),
        ({**BERT, "architectures": ["BertForTokenClassification"]}, "BertForTokenClassification"),
        ({**BERT, "architectures": ["BertForQuestionAnswering"]}, "BertForQuestionAnswering"),
        ({**GPT2, "architectures": ["GPT2ForSequenceClassification"]}, "GPT2ForSequenceClassification"),
        (WHISPER, "WhisperForConditionalGeneration"),
        (PRESETS["t5-tiny"].config, "T5ForConditionalGeneration"),
        (PRESETS["resnet-tiny"].config, "ResNetForImageClassification"),
    ],
)
def test_model_class_and_gradients(config: dict[str, Any], class_name: str) -> None:
    built = configured(config, seq=16)
    assert type(built.model).__name__ == class_name
    loss_of(built).backward()
    assert all(p.grad is not None for p in built.model.parameters() if p.requires_grad)


def test_sequence_lengths_dtypes_and_image_sizes() -> None:
    assert configured(GPT2).batch(2)["input_ids"].shape == (2, 128)
    assert configured(GPT2, seq=40).batch(2)["input_ids"].shape == (2, 40)
    assert configured({**GPT2, "n_positions": 64}).batch(2)["input_ids"].shape == (2, 64)
    vit = configured(PRESETS["vit-tiny"].config, dtype="bfloat16")
    batch = vit.batch(2)
    assert batch["pixel_values"].shape == (2, 3, 32, 32)
    assert batch["pixel_values"].dtype is torch.bfloat16
    assert batch["labels"].dtype is torch.int64
    assert {p.dtype for p in vit.model.parameters()} == {torch.bfloat16}
    loss_of(vit)
