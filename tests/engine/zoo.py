"""Small models of many architectures, from `transformers` configs: random weights, no downloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as T
from torch import nn

Made = tuple[nn.Module, dict[str, Any]]
ZOO: dict[str, Callable[[], Made]] = {}
VOCABULARY = 96


def model(build: Callable[[], Made]) -> Callable[[], Made]:
    ZOO[build.__name__] = build
    return build


def tokens(batch: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def text(m: nn.Module, **extra: Any) -> Made:
    ids = tokens()
    return m, {"input_ids": ids, "labels": ids, **extra}


IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@model
def gpt2() -> Made:  # a decoder with dropout everywhere and tied weights
    return text(
        T.GPT2LMHeadModel(T.GPT2Config(n_layer=3, n_embd=32, n_head=4, vocab_size=VOCABULARY, n_positions=32, **IDS))
    )


@model
def gpt2_with_cache() -> Made:
    m = T.GPT2LMHeadModel(T.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=VOCABULARY, n_positions=32, **IDS))
    return text(m, use_cache=True)


@model
def llama() -> Made:
    return text(
        T.LlamaForCausalLM(
            T.LlamaConfig(
                num_hidden_layers=3,
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=VOCABULARY,
                **IDS,
            )
        )
    )


@model
def gemma() -> Made:  # tied embeddings, scaled
    return text(
        T.GemmaForCausalLM(
            T.GemmaConfig(
                num_hidden_layers=2,
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=4,
                num_key_value_heads=1,
                head_dim=8,
                vocab_size=VOCABULARY,
                **IDS,
            )
        )
    )


@model
def opt() -> Made:
    return text(
        T.OPTForCausalLM(
            T.OPTConfig(
                num_hidden_layers=2,
                hidden_size=32,
                ffn_dim=64,
                num_attention_heads=4,
                vocab_size=VOCABULARY,
                word_embed_proj_dim=32,
                max_position_embeddings=64,
                **IDS,
            )
        )
    )


@model
def bloom() -> Made:
    return text(
        T.BloomForCausalLM(
            T.BloomConfig(
                n_layer=2,
                hidden_size=32,
                n_head=4,
                vocab_size=VOCABULARY,
                hidden_dropout=0.1,
                attention_dropout=0.1,
                **IDS,
            )
        )
    )


@model
def gpt_neox() -> Made:
    return text(
        T.GPTNeoXForCausalLM(
            T.GPTNeoXConfig(
                num_hidden_layers=2,
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=4,
                vocab_size=VOCABULARY,
                **IDS,
            )
        )
    )


@model
def mixtral() -> Made:  # mixture of experts
    return text(
        T.MixtralForCausalLM(
            T.MixtralConfig(
                num_hidden_layers=2,
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_local_experts=4,
                vocab_size=VOCABULARY,
                output_router_logits=True,
                **IDS,
            )
        )
    )


@model
def mamba() -> Made:  # state space
    return text(
        T.MambaForCausalLM(
            T.MambaConfig(num_hidden_layers=2, hidden_size=32, state_size=8, vocab_size=VOCABULARY, **IDS)
        )
    )


@model
def bert() -> Made:
    return text(
        T.BertForMaskedLM(
            T.BertConfig(
                num_hidden_layers=3,
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=4,
                vocab_size=VOCABULARY,
                pad_token_id=0,
            )
        )
    )


@model
def albert() -> Made:  # one layer, called several times
    return text(
        T.AlbertForMaskedLM(
            T.AlbertConfig(
                num_hidden_layers=3,
                hidden_size=32,
                embedding_size=16,
                intermediate_size=64,
                num_attention_heads=4,
                vocab_size=VOCABULARY,
                hidden_dropout_prob=0.1,
                **IDS,
            )
        )
    )


@model
def deberta() -> Made:
    return text(
        T.DebertaV2ForMaskedLM(
            T.DebertaV2Config(
                num_hidden_layers=2,
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=4,
                vocab_size=VOCABULARY,
                relative_attention=True,
                pos_att_type=["c2p", "p2c"],
                max_position_embeddings=64,
                pad_token_id=0,
            )
        )
    )


@model
def t5() -> Made:  # encoder and decoder
    return text(
        T.T5ForConditionalGeneration(
            T.T5Config(
                num_layers=2,
                d_model=32,
                d_ff=64,
                d_kv=8,
                num_heads=4,
                vocab_size=VOCABULARY,
                decoder_start_token_id=0,
                pad_token_id=0,
                eos_token_id=2,
            )
        )
    )


@model
def bart() -> Made:
    return text(
        T.BartForConditionalGeneration(
            T.BartConfig(
                encoder_layers=2,
                decoder_layers=2,
                d_model=32,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                vocab_size=VOCABULARY,
                max_position_embeddings=64,
                decoder_start_token_id=1,
                forced_eos_token_id=2,
                **IDS,
            )
        )
    )


def pixels(size: int = 32) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(2))


@model
def vit() -> Made:
    m = T.ViTForImageClassification(
        T.ViTConfig(
            num_hidden_layers=2,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=4,
            image_size=32,
            patch_size=8,
            hidden_dropout_prob=0.1,
            num_labels=5,
        )
    )
    return m, {"pixel_values": pixels(), "labels": torch.tensor([1, 3])}


@model
def resnet() -> Made:  # convolutions, batch norm, in-place activations
    m = T.ResNetForImageClassification(
        T.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 32], depths=[1, 2, 1], num_labels=5)
    )
    return m, {"pixel_values": pixels(64), "labels": torch.tensor([1, 3])}


@model
def convnext() -> Made:
    m = T.ConvNextForImageClassification(
        T.ConvNextConfig(hidden_sizes=[8, 16, 32, 32], depths=[1, 1, 2, 1], drop_path_rate=0.2, num_labels=5)
    )
    return m, {"pixel_values": pixels(64), "labels": torch.tensor([1, 3])}


@model
def swin() -> Made:
    m = T.SwinForImageClassification(
        T.SwinConfig(
            image_size=32,
            patch_size=2,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            drop_path_rate=0.2,
            num_labels=5,
        )
    )
    return m, {"pixel_values": pixels(), "labels": torch.tensor([1, 3])}


@model
def wav2vec2() -> Made:  # speech
    m = T.Wav2Vec2Model(
        T.Wav2Vec2Config(
            num_hidden_layers=2,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=4,
            conv_dim=[16, 16],
            conv_kernel=[10, 3],
            conv_stride=[5, 2],
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            layerdrop=0.0,
            mask_time_prob=0.0,
        )
    )
    return m, {"input_values": torch.randn(2, 1600, generator=torch.Generator().manual_seed(4))}


@model
def whisper() -> Made:
    m = T.WhisperForConditionalGeneration(
        T.WhisperConfig(
            encoder_layers=2,
            decoder_layers=2,
            d_model=32,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            vocab_size=VOCABULARY,
            num_mel_bins=16,
            max_source_positions=30,
            max_target_positions=32,
            decoder_start_token_id=1,
            suppress_tokens=[],
            begin_suppress_tokens=[],
            **IDS,
        )
    )
    features = torch.randn(2, 16, 60, generator=torch.Generator().manual_seed(5))
    return m, {"input_features": features, "labels": tokens(length=12)}


def build(name: str) -> Made:
    T.logging.set_verbosity_error()
    torch.manual_seed(0)
    made, batch = ZOO[name]()
    return made.train(), batch
