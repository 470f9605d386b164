"""Models in GGUF files, llama.cpp's format: read where the architecture is `llama`.

Tensors of every type that the `gguf` package knows are dequantised to float32. The format stores the query and key
features of this architecture for rotation of neighbouring pairs (2i, 2i + 1); here they are put back to (i, i + d/2).
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from kvjax.attention import GroupedQuery, LinearScaling, RopeScaling, YarnScaling
from kvjax.config import ConfigError, ModelConfig, require
from kvjax.convert.layouts import LAYER, Layout, Tensor, on_device
from kvjax.convert.settings import LARGEST_NUMBER, LARGEST_SIZE, MOST_LAYERS, is_number, is_size
from kvjax.data.tokenizers import SubwordTokenizer, check_vocabulary
from kvjax.model.parameters import shape_differences

ARCHITECTURE = "llama"
HEAD = "output.weight"
FREQUENCIES = "rope_freqs.weight"
SETTINGS = {
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
    "attention.value_length", "block_count", "context_length", "embedding_length", "feed_forward_length",
    "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.factor", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "rope.scaling.type", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "tensor_data_layout", "vocab_size"}
"""Settings of the architecture that are read or say nothing about the model; any other one could change it."""
ROTATED = {f"{LAYER}attention/{leaf}" for leaf in ("q_proj", "k_proj", "q_bias", "k_bias")}
CONTROL_TOKENS, USER_TOKEN = (2, 3), 4
"""Values of tokenizer.ggml.token_type: unknown and control; defined by the user."""
Values = dict[str, Any]


def _layer_tensors() -> tuple[Tensor, ...]:
    tensors = [Tensor("attn_norm.weight", ("attention_norm",)), Tensor("ffn_norm.weight", ("feed_forward_norm",))]
    for name, group, leaf, bias in (
            ("attn_q", "attention", "q_proj", "q_bias"), ("attn_k", "attention", "k_proj", "k_bias"),
            ("attn_v", "attention", "v_proj", "v_bias"), ("attn_output", "attention", "o_proj", "o_bias"),
            ("ffn_gate", "feed_forward", "gate", "gate_bias"), ("ffn_up", "feed_forward", "up", "up_bias"),
            ("ffn_down", "feed_forward", "down", "down_bias")):
        inputs = 2 if leaf == "o_proj" else 1
        tensors += [Tensor(f"{name}.weight", (f"{group}/{leaf}",), inputs, output_first=True),
                    Tensor(f"{name}.bias", (f"{group}/{bias}",))]
    return tuple(tensors)


LAYOUT = Layout(
    prefix="", layer="blk.{}.",
    outer=(Tensor("token_embd.weight", ("embedding",), 1), Tensor("output_norm.weight", ("final_norm",)),
           Tensor(HEAD, ("unembedding",), 1, output_first=True)),
    layers=_layer_tensors(), buffers="")


def from_gguf(path: Path | str) -> tuple[ModelConfig, dict[str, Any], SubwordTokenizer]:
    """The model in a GGUF file.

    Args:
        path: one file that holds everything.
    Returns:
        The configuration, which computes in float32; the parameters in float32, on JAX's default device; the
        tokenizer. Its end-of-text token is the one that separates documents (for SmolLM2 <|endoftext|>), whatever
        token the file says ends a turn of a chat.
    Raises:
        ConfigError: the file is no GGUF file or a part of one, its architecture, a setting, a tensor's type or the
            tokenizer is not known, or tensors are missing, unknown or misshapen: all of them are listed.
    """
    gguf, values, tensors = _open(Path(path))
    config = _read_config(values, set(tensors))
    tokenizer = _read_tokenizer(values, str(path))
    check_vocabulary(tokenizer, config.vocab_size)
    return config, _read_params(gguf, config, tensors), tokenizer


def config_of_gguf(path: Path | str) -> ModelConfig:
    """The configuration of `from_gguf`, without the weights. Raises what that raises for it."""
    _, values, tensors = _open(Path(path))
    return _read_config(values, set(tensors))


def tokenizer_of_gguf(path: Path | str) -> SubwordTokenizer:
    """The tokenizer of `from_gguf`. Raises what that raises for it."""
    _, values, _ = _open(Path(path))
    return _read_tokenizer(values, str(path))


def _open(path: Path) -> tuple[ModuleType, Values, dict[str, Any]]:
    """The package, the file's settings, and its tensors as they lie in it."""
    gguf = _package()
    require(path.is_file(), f"{path} is not a file: give the path of a .gguf file")
    try:
        reader = gguf.GGUFReader(path)
        values = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the package raises whatever its parsing meets
        raise ConfigError(f"{path} is not a GGUF file that can be read: {error!r}") from error
    return gguf, values, {tensor.name: tensor for tensor in reader.tensors}


def _package() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError("reading GGUF files needs a package: pip install gguf") from error
    return gguf


def _read_config(values: Values, tensors: set[str]) -> ModelConfig:
    architecture = values.get("general.architecture")
    require(architecture == ARCHITECTURE,
            f"general.architecture is {architecture!r}: only {ARCHITECTURE!r} can be read")
    require(values.get("split.count", 1) in (0, 1), f"split.count is {values.get('split.count')!r}: join the parts "
                                                    "first, with llama-gguf-split --merge")
    require(FREQUENCIES not in tensors, f"{FREQUENCIES} stretches the rotary frequencies one by one (as Llama 3.1 "
                                        "does): convert the model's Hugging Face folder instead")
    prefix = f"{ARCHITECTURE}."
    settings = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    strange = {prefix + name: value for name, value in settings.items() if name not in SETTINGS and value}
    require(not strange, f"the file says {strange}: kvjax does not know what this changes in a model")
    width, context = _size(settings, "embedding_length"), _size(settings, "context_length")
    return ModelConfig(
        attention=_attention(settings, width, tensors), width=width, context_length=context,
        vocab_size=_size(settings, "vocab_size", len(_list(values, "tokens", str))),
        layers=_size(settings, "block_count", most=MOST_LAYERS),
        feed_forward_width=_size(settings, "feed_forward_length"),
        rope_base=_number(settings, "rope.freq_base", 10_000.0), rope_scaling=_rope_scaling(settings),
        norm_eps=_number(settings, "attention.layer_norm_rms_epsilon"), tie_embeddings=HEAD not in tensors,
        feed_forward_bias="blk.0.ffn_up.bias" in tensors, dtype="float32")


def _attention(settings: Values, width: int, tensors: set[str]) -> GroupedQuery:
    heads = _size(settings, "attention.head_count")
    head_dim = _size(settings, "attention.key_length", width // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        require(_size(settings, name, head_dim) == head_dim, f"llama.{name} is {settings.get(name)}, and heads have "
                f"{head_dim} features: keys and values are alike in kvjax, and all their features are rotated")
    return GroupedQuery(heads, _size(settings, "attention.head_count_kv", heads), head_dim,
                        qkv_bias="blk.0.attn_q.bias" in tensors, output_bias="blk.0.attn_output.bias" in tensors)


def _rope_scaling(settings: Values) -> RopeScaling | None:
    kind = settings.get("rope.scaling.type", "linear")
    require(kind in ("none", "linear", "yarn"), f"llama.rope.scaling.type is {kind!r}: only none, linear and yarn can "
                                                "be read")
    if kind == "none":
        return None
    factor = _number(settings, "rope.scaling.factor", settings.get("rope.scale_linear") or 1.0)
    if factor == 1:
        return None
    if kind == "linear":
        return LinearScaling(factor)
    return YarnScaling(factor, _size(settings, "rope.scaling.original_context_length"),
                       _number(settings, "rope.scaling.yarn_beta_fast", 32.0),
                       _number(settings, "rope.scaling.yarn_beta_slow", 1.0))


def _size(settings: Values, name: str, default: int | None = None, most: int = LARGEST_SIZE) -> int:
    value = settings.get(name, default)
    require(value is not None, f"the file has no llama.{name}: its model cannot be known")
    require(is_size(value, most=most), f"llama.{name} is {value!r}: a whole number from 1 to {most:,} is wanted")
    return value


def _number(settings: Values, name: str, default: float | None = None) -> float:
    value = settings.get(name, default)
    require(is_number(value), f"llama.{name} is {value!r}: a number above 0, and at most {LARGEST_NUMBER:g}, is wanted")
    return float(str(np.float32(value)))  # the file holds float32: 1e-5 is not meant as 9.999999747e-06


def _read_params(gguf: ModuleType, config: ModelConfig, tensors: dict[str, Any]) -> dict[str, Any]:
    wanted = LAYOUT.shapes(config)
    found = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in tensors.items()}
    lines = shape_differences(found, wanted)
    require(not lines, "\n  ".join(["the tensors are not those of the model that the file describes:", *lines]))
    arrays = LAYOUT.params(config, lambda name: _dequantised(gguf, tensors[name]).reshape(wanted[name]))
    for path in ROTATED & arrays.keys():
        arrays[path] = halves(arrays[path])
    return on_device(arrays)


def _dequantised(gguf: ModuleType, tensor: Any) -> np.ndarray:
    try:
        return gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ConfigError(f"{tensor.name} is of type {tensor.tensor_type.name}, which the gguf package does not "
                          "dequantise: take a file of another quantisation") from error


def halves(interleaved: np.ndarray) -> np.ndarray:
    """Features [..., d] whose rotated pairs are neighbours (2i, 2i + 1), in the order where they are (i, i + d/2)."""
    return np.concatenate([interleaved[..., 0::2], interleaved[..., 1::2]], axis=-1)


def _read_tokenizer(values: Values, name: str) -> SubwordTokenizer:
    """Byte-level BPE of the file's vocabulary and merges; `name` says in errors whose it is."""
    kind, cut = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")
    require(kind == "gpt2", f"tokenizer.ggml.model is {kind!r}: only 'gpt2' (byte-level BPE) can be read")
    require(cut in [*PRE_TOKENIZERS], f"tokenizer.ggml.pre is {cut!r}: how text is cut before merging is known for "
                                   f"{', '.join(PRE_TOKENIZERS)}")
    for flag in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        require(not values.get(f"tokenizer.ggml.{flag}"), f"tokenizer.ggml.{flag} is true: kvjax's tokenizers add "
                                                          "nothing to a text")
    tokens, merges = _list(values, "tokens", str), _list(values, "merges", str)
    types = _list(values, "token_type", int)
    require(len(types) == len(tokens), f"{name} has {len(types)} values of tokenizer.ggml.token_type for "
                                       f"{len(tokens)} tokens: it is damaged")
    tokenizer = tokenizers.Tokenizer(_bpe(tokens, merges, name))
    tokenizer.pre_tokenizer, tokenizer.decoder = PRE_TOKENIZERS[cut](), decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind in CONTROL_TOKENS])
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False)
                          for token, kind in zip(tokens, types, strict=True) if kind == USER_TOKEN])
    return SubwordTokenizer(tokenizer, name)


def _bpe(tokens: list[str], merges: list[str], name: str) -> models.BPE:
    require(len(set(tokens)) == len(tokens), f"tokenizer.ggml.tokens of {name} holds a token twice")
    try:
        return models.BPE({token: i for i, token in enumerate(tokens)}, [tuple(m.split(" ")) for m in merges])
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"the vocabulary and the merges of {name} do not fit together: {error}") from error


def _list(values: Values, part: str, kind: type) -> list[Any]:
    """A list of the tokenizer's, whose elements must all be of one kind."""
    value = values.get(f"tokenizer.ggml.{part}")
    require(value is not None, f"the file lacks tokenizer.ggml.{part}: its tokenizer cannot be known")
    good = isinstance(value, list) and value and all(isinstance(element, kind) for element in value)
    require(bool(good), f"tokenizer.ggml.{part} is {str(value)[:80]}: a list of {kind.__name__} is wanted")
    return value


def _gpt2_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _gpt2_words_and_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_words()])


PRE_TOKENIZERS = {"gpt-2": _gpt2_words, "smollm": _gpt2_words_and_digits}
"""By tokenizer.ggml.pre. What llama.cpp calls `default` is not GPT-2's."""
