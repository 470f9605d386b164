"""Hugging Face architectures: which ModelConfig a config.json is, and which config.json a ModelConfig."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvjax.attention import Attention, GroupedQuery, Latent
from kvjax.config import ConfigError, ModelConfig, differences, require
from kvjax.convert.layouts import GPT2, LLAMA, Layout
from kvjax.convert.rope import BASE, read_rope, write_rope
from kvjax.convert.settings import MOST_LAYERS, Settings

LATENT_NORM_EPS = 1e-6
"""What DeepSeek's norms of latents add, whatever `rms_norm_eps` says."""


@dataclass(frozen=True)
class Architecture:
    """One model type."""

    name: str
    """The class in transformers."""
    attention: type[Attention]
    layout: Layout
    read: Callable[[Settings], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]] | None
    """None: another architecture writes the same models."""


def read_config(settings: Settings) -> tuple[Architecture, ModelConfig]:
    """The architecture of a config.json, and the model that it describes.

    Raises ConfigError for another architecture, and for values that mean a model that kvjax does not have.
    """
    kind = settings.get("model_type")
    # A list, here and in other readers: a file may hold what a dictionary cannot look up.
    require(kind in [*ARCHITECTURES], f"model_type is {kind!r}: only {', '.join(ARCHITECTURES)} can be read")
    _refuse_unusual(settings)
    architecture = ARCHITECTURES[kind]
    return architecture, architecture.read(settings)


def write_config(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """The first model type that expresses a model, and its config.json: reading that gives the model back.

    Raises ConfigError if there is none, with the reason for each.
    """
    require(config.sharing is None, f"sharing is {config.sharing}: no Hugging Face architecture shares components "
                                    "between layers")
    wanted, reasons = _computed(config), []
    for kind, architecture in ARCHITECTURES.items():
        if type(config.attention) is architecture.attention and architecture.write:
            values = {"model_type": kind, "architectures": [architecture.name]}
            try:
                values |= architecture.write(config)
                found = _computed(architecture.read(Settings(values)))
            except ConfigError as error:
                reasons.append(f"{kind}: {error}")
                continue
            lost = differences(wanted, found)
            if not lost:
                return kind, values
            reasons.append(f"{kind}: " + ", ".join(f"{name} is {here!r}, there {there!r}"
                                                   for name, (here, there) in lost.items()))
    require(bool(reasons), f"attention is {config.attention}: no Hugging Face architecture that kvjax writes has it")
    raise ConfigError("\n  ".join(["no Hugging Face architecture expresses this model:", *reasons]))


def _computed(config: ModelConfig) -> ModelConfig:
    """The model without settings of training, which a config.json does not hold."""
    base = config.rope_base if config.positions == "rotary" else BASE
    return dataclasses.replace(config, dtype="float32", dropout=0.0, output_init=0.0, remat="none", rope_base=base)


def _refuse_unusual(settings: Settings) -> None:
    settings.only("quantization_config", None, why="quantised weights are not read")
    settings.only("is_encoder_decoder", False, None)
    settings.only("add_cross_attention", False, None)
    settings.only("pruned_heads", {}, None)


def _dtype(settings: Settings) -> str:
    return settings.get("dtype", settings.get("torch_dtype", "float32"))


def _layers(settings: Settings, name: str = "num_hidden_layers") -> int:
    return settings.size(name, most=MOST_LAYERS)


def _read_rotary(settings: Settings, attention: Attention, **options: Any) -> ModelConfig:
    """What Llama and those after it have in common: rotation, RMSNorm, SwiGLU."""
    settings.only("hidden_act", "silu", "swish")
    base, scaling = read_rope(settings)
    return ModelConfig(
        attention=attention, vocab_size=settings.size("vocab_size"), layers=_layers(settings),
        width=settings.size("hidden_size"), feed_forward_width=settings.size("intermediate_size"),
        context_length=settings.size("max_position_embeddings"), rope_base=base, rope_scaling=scaling,
        norm_eps=settings.number("rms_norm_eps", 1e-6), tie_embeddings=settings.flag("tie_word_embeddings", False),
        dtype=_dtype(settings), **options)


def _write_rotary(config: ModelConfig) -> dict[str, Any]:
    return {"hidden_size": config.width, "intermediate_size": config.feed_forward_width,
            "num_hidden_layers": config.layers, "num_attention_heads": config.attention.heads,
            "vocab_size": config.vocab_size, "max_position_embeddings": config.context_length,
            "hidden_act": "silu", "rms_norm_eps": config.norm_eps, "tie_word_embeddings": config.tie_embeddings,
            "attention_dropout": 0.0, **write_rope(config.rope_base, config.rope_scaling)}


def _grouped(settings: Settings, head_dim: int | None = None, **options: bool) -> GroupedQuery:
    heads = settings.size("num_attention_heads")
    head_dim = head_dim or settings.size("hidden_size") // heads
    return GroupedQuery(heads, settings.size("num_key_value_heads", heads), settings.size("head_dim", head_dim),
                        **options)


def _write_grouped(config: ModelConfig) -> dict[str, Any]:
    return _write_rotary(config) | {"num_key_value_heads": config.attention.kv_heads,
                                    "head_dim": config.attention.head_dim}


def _read_llama(settings: Settings) -> ModelConfig:
    heads, width = settings.size("num_attention_heads"), settings.size("hidden_size")
    require(width % heads == 0, f"hidden_size {width} is not a multiple of num_attention_heads {heads}: "
                                "transformers refuses that of Llama")
    bias = settings.flag("attention_bias", False)
    return _read_rotary(settings, _grouped(settings, qkv_bias=bias, output_bias=bias),
                        feed_forward_bias=settings.flag("mlp_bias", False))


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    return _write_grouped(config) | {"attention_bias": config.attention.qkv_bias, "mlp_bias": config.feed_forward_bias}


def _read_mistral(settings: Settings) -> ModelConfig:
    window = settings.size_or_none("sliding_window", 4096)
    kind = "full_attention" if window is None else "sliding_attention"
    require(_layer_kinds(settings, [kind] * _layers(settings)) == {kind}, f"layer_types is "
            f"{settings.get('layer_types')} and sliding_window is {window}: Mistral's layers are all alike")
    return _read_rotary(settings, _grouped(settings), window=window)


def _write_mistral(config: ModelConfig) -> dict[str, Any]:
    return _write_grouped(config) | {"sliding_window": config.window}


def _layer_kinds(settings: Settings, default: list[str]) -> set[str]:
    kinds, layers = settings.get("layer_types", default), _layers(settings)
    good = isinstance(kinds, list) and len(kinds) == layers and all(isinstance(kind, str) for kind in kinds)
    require(good, f"layer_types is {kinds!r}: it must be a list of {layers} names, one for each layer")
    return set(kinds)


def _qwen_window(settings: Settings) -> int | None:
    """The window of all layers. Raises ConfigError if only some have one."""
    window = settings.size_or_none("sliding_window", 4096) if settings.flag("use_sliding_window", False) else None
    layers, first = _layers(settings), settings.size("max_window_layers", 28, least=0)
    kinds = _layer_kinds(settings, ["sliding_attention" if window and i >= first else "full_attention"
                                    for i in range(layers)])
    require(kinds in ({"sliding_attention"}, {"full_attention"}),
            f"use_sliding_window is {settings.get('use_sliding_window')}, max_window_layers is {first} and layer_types "
            f"is {settings.get('layer_types')}: kvjax's {layers} layers all have the window, or none")
    return window if kinds == {"sliding_attention"} else None


def _write_qwen(config: ModelConfig) -> dict[str, Any]:
    window = {} if config.window is None else {
        "sliding_window": config.window, "max_window_layers": 0, "layer_types": ["sliding_attention"] * config.layers}
    return _write_grouped(config) | {"use_sliding_window": config.window is not None} | window


def _read_qwen2(settings: Settings) -> ModelConfig:
    return _read_rotary(settings, _grouped(settings, qkv_bias=True), window=_qwen_window(settings))


def _read_qwen3(settings: Settings) -> ModelConfig:
    bias = settings.flag("attention_bias", False)
    attention = _grouped(settings, 128, qk_norm=True, qkv_bias=bias, output_bias=bias)
    return _read_rotary(settings, attention, window=_qwen_window(settings))


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return _write_qwen(config) | {"attention_bias": config.attention.qkv_bias}


def _read_gpt2(settings: Settings) -> ModelConfig:
    settings.only("activation_function", "gelu_new", "gelu_pytorch_tanh")
    settings.only("scale_attn_weights", True)
    settings.only("scale_attn_by_inverse_layer_idx", False)
    heads, width = settings.size("n_head"), settings.size("n_embd")
    require(width % heads == 0, f"n_embd {width} is not a multiple of n_head {heads}")
    return ModelConfig(
        attention=GroupedQuery(heads, heads, width // heads, qkv_bias=True, output_bias=True),
        vocab_size=settings.size("vocab_size"), layers=_layers(settings, "n_layer"), width=width,
        feed_forward_width=settings.size("n_inner", 4 * width), context_length=settings.size("n_positions"),
        positions="learned", norm="layer", norm_eps=settings.number("layer_norm_epsilon", 1e-5), feed_forward="gelu",
        feed_forward_bias=True, tie_embeddings=settings.flag("tie_word_embeddings", True), dtype=_dtype(settings))


def _write_gpt2(config: ModelConfig) -> dict[str, Any]:
    return {"n_embd": config.width, "n_inner": config.feed_forward_width, "n_layer": config.layers,
            "n_head": config.attention.heads, "n_positions": config.context_length, "vocab_size": config.vocab_size,
            "activation_function": "gelu_new", "layer_norm_epsilon": config.norm_eps,
            "tie_word_embeddings": config.tie_embeddings, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def _read_latent(settings: Settings, interleaved: bool, dense_layers: int) -> ModelConfig:
    """DeepSeek's; `dense_layers` is what first_k_dense_replace is where it is absent."""
    heads, layers = settings.size("num_attention_heads"), _layers(settings)
    settings.only("num_key_value_heads", heads, None, why="every head of latent attention has its own keys")
    settings.only("attention_bias", False, None, why="latent attention has no biases here")
    settings.only("mlp_bias", False, None)
    settings.only("rms_norm_eps", LATENT_NORM_EPS, why=f"the norms of DeepSeek's latents have {LATENT_NORM_EPS} "
                  "whatever it says, and kvjax's norms have one for all")
    experts = settings.values.get("n_routed_experts", "not given")
    dense = settings.size("first_k_dense_replace", dense_layers, least=0)
    require(experts is None or dense >= layers, f"n_routed_experts is {experts} and first_k_dense_replace is {dense} "
            f"of {layers} layers: kvjax has no mixtures of experts, all layers must be dense")
    attention = Latent(heads, settings.size("kv_lora_rank"), settings.size("qk_rope_head_dim"),
                       settings.size("qk_nope_head_dim"), settings.size("v_head_dim"),
                       settings.size_or_none("q_lora_rank"), interleaved)
    return _read_rotary(settings, attention)


def _read_deepseek_v2(settings: Settings) -> ModelConfig:
    settings.only("rope_interleave", True, None)
    return _read_latent(settings, interleaved=True, dense_layers=0)


def _read_deepseek_v3(settings: Settings) -> ModelConfig:
    return _read_latent(settings, interleaved=settings.flag("rope_interleave", True), dense_layers=3)


def _write_deepseek_v3(config: ModelConfig) -> dict[str, Any]:
    attention = config.attention
    return _write_rotary(config) | {
        "num_key_value_heads": attention.heads, "kv_lora_rank": attention.latent_dim,
        "q_lora_rank": attention.query_latent_dim, "qk_rope_head_dim": attention.rope_dim,
        "qk_nope_head_dim": attention.nope_dim, "v_head_dim": attention.value_dim,
        "rope_interleave": attention.interleaved, "attention_bias": False, "first_k_dense_replace": config.layers,
        "num_nextn_predict_layers": 0}


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", GroupedQuery, LLAMA, _read_llama, _write_llama),
    "mistral": Architecture("MistralForCausalLM", GroupedQuery, LLAMA, _read_mistral, _write_mistral),
    "qwen2": Architecture("Qwen2ForCausalLM", GroupedQuery, LLAMA, _read_qwen2, _write_qwen),
    "qwen3": Architecture("Qwen3ForCausalLM", GroupedQuery, LLAMA, _read_qwen3, _write_qwen3),
    "gpt2": Architecture("GPT2LMHeadModel", GroupedQuery, GPT2, _read_gpt2, _write_gpt2),
    "deepseek_v2": Architecture("DeepseekV2ForCausalLM", Latent, LLAMA, _read_deepseek_v2, None),
    "deepseek_v3": Architecture("DeepseekV3ForCausalLM", Latent, LLAMA, _read_deepseek_v3, _write_deepseek_v3),
}
"""By model type, in the order in which a model to be written tries them."""
