"""How the tensors of a Hugging Face checkpoint hold the leaves of kvjax's parameter tree.

Everything here is transposing, reshaping, splitting and joining: bits are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.config import ModelConfig
from kvjax.model.parameters import Shapes, shapes_of, unflat

LAYER = "segment_0/layer_0/"
"""Where the stacked leaves of models without a sharing scheme lie."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint, and the leaves that it holds, joined along their output features."""

    name: str
    leaves: tuple[str, ...]
    inputs: int = 0
    """Leading axes of a leaf that are its input; 0: a vector."""
    output_first: bool = False
    """Stored [out, in], as torch's Linear does; else [in, out], as leaves are."""
    by_head: bool = False
    """Leaves [..., H, features] are joined head by head; else one whole leaf follows another."""

    def shape(self, leaves: list[Shape]) -> Shape:
        """Its shape, if it holds leaves of these shapes."""
        rows, columns = prod(leaves[0][:self.inputs]), sum(prod(leaf[self.inputs:]) for leaf in leaves)
        if not self.inputs:
            return (columns,)
        return (columns, rows) if self.output_first else (rows, columns)

    def split(self, tensor: np.ndarray, leaves: list[Shape]) -> list[np.ndarray]:
        """The leaves, of these shapes, that the tensor holds."""
        matrix = tensor.T if self.output_first else tensor.reshape(-1, tensor.shape[-1])
        if self.by_head:
            matrix = matrix.reshape(*leaves[0][:-1], -1)
            widths = [leaf[-1] for leaf in leaves]
        else:
            widths = [prod(leaf[self.inputs:]) for leaf in leaves]
        parts = np.split(matrix, np.cumsum(widths)[:-1], axis=-1)
        return [part.reshape(leaf) for part, leaf in zip(parts, leaves, strict=True)]

    def join(self, leaves: list[np.ndarray]) -> np.ndarray:
        """Inverse of `split`, contiguous."""
        if self.by_head:
            leaves = [np.concatenate(leaves, axis=-1)]
        rows = prod(leaves[0].shape[:self.inputs])
        matrix = np.concatenate([leaf.reshape(rows, -1) for leaf in leaves], axis=-1)
        matrix = matrix if self.inputs else matrix[0]
        return np.ascontiguousarray(matrix.T if self.output_first else matrix)


@dataclass(frozen=True)
class Layout:
    """The tensors of one family of architectures."""

    prefix: str
    """Of all names but lm_head's; files of the bare model leave it out."""
    layer: str
    """Of the names of a layer's tensors; {} stands for its number."""
    outer: tuple[Tensor, ...]
    layers: tuple[Tensor, ...]
    buffers: str
    """Regular expression of names that are no weights."""

    def full_name(self, name: str) -> str:
        """The name with its prefix."""
        return name if name == HEAD or name.startswith(self.prefix) else self.prefix + name

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, Tensor, int | None]]:
        """Full name, description and number of layer (None: outside the layers) of each tensor of a model."""
        leaves = shapes_of(config)
        for tensor in self.outer:
            if tensor.leaves[0] in leaves:
                yield self.full_name(tensor.name), tensor, None
        for layer in range(config.layers):
            for tensor in self.layers:
                if LAYER + tensor.leaves[0] in leaves:
                    yield self.full_name(self.layer.format(layer) + tensor.name), tensor, layer

    def shapes(self, config: ModelConfig) -> Shapes:
        """Shapes of all tensors of a model, by full name."""
        leaves = shapes_of(config)
        return {name: tensor.shape(leaf_shapes(tensor, layer, leaves))
                for name, tensor, layer in self.tensors(config)}

    def params(self, config: ModelConfig, read: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
        """A model's leaves by path, float32, of the tensors that `read` gives for their full names."""
        leaves = shapes_of(config)
        arrays = {path: np.empty(shape, np.float32) for path, shape in leaves.items()}
        for name, tensor, layer in self.tensors(config):
            parts = tensor.split(read(name), leaf_shapes(tensor, layer, leaves))
            for path, part in zip(leaf_paths(tensor, layer), parts, strict=True):
                arrays[path][... if layer is None else layer] = part
        return arrays


def on_device(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Leaves by path as a tree of JAX arrays. Empties `arrays` on its way: a second copy of all may not fit."""
    return unflat({path: jnp.asarray(arrays.pop(path)) for path in list(arrays)})


def leaf_paths(tensor: Tensor, layer: int | None) -> list[str]:
    """Paths of the leaves that a tensor holds."""
    return [leaf if layer is None else LAYER + leaf for leaf in tensor.leaves]


def leaf_shapes(tensor: Tensor, layer: int | None, leaves: Shapes) -> list[Shape]:
    """Shapes of the leaves that a tensor holds, those of one layer without the stacked axis."""
    return [leaves[path] if layer is None else leaves[path][1:] for path in leaf_paths(tensor, layer)]


def _linear(name: str, *leaves: str, inputs: int = 1, by_head: bool = False) -> Tensor:
    return Tensor(name, leaves, inputs, output_first=True, by_head=by_head)


def _vector(name: str, *leaves: str) -> Tensor:
    return Tensor(name, leaves)


def _table(name: str, leaf: str) -> Tensor:
    return Tensor(name, (leaf,), 1)


HEAD = "lm_head.weight"
_LLAMA_ATTENTION = (
    _linear("self_attn.q_proj.weight", "attention/q_proj"),
    _linear("self_attn.k_proj.weight", "attention/k_proj"),
    _linear("self_attn.v_proj.weight", "attention/v_proj"),
    _linear("self_attn.o_proj.weight", "attention/o_proj", inputs=2),
    _vector("self_attn.q_proj.bias", "attention/q_bias"),
    _vector("self_attn.k_proj.bias", "attention/k_bias"),
    _vector("self_attn.v_proj.bias", "attention/v_bias"),
    _vector("self_attn.o_proj.bias", "attention/o_bias"),
    _vector("self_attn.q_norm.weight", "attention/qk_norm_q"),
    _vector("self_attn.k_norm.weight", "attention/qk_norm_k"),
)
_LATENT_ATTENTION = (
    _linear("self_attn.q_a_proj.weight", "attention/q_down"),
    _vector("self_attn.q_a_layernorm.weight", "attention/q_norm"),
    _linear("self_attn.q_b_proj.weight", "attention/q_up"),
    _linear("self_attn.kv_a_proj_with_mqa.weight", "attention/kv_down", "attention/k_rope"),
    _vector("self_attn.kv_a_layernorm.weight", "attention/kv_norm"),
    _linear("self_attn.kv_b_proj.weight", "attention/k_up", "attention/v_up", by_head=True),
)
LLAMA = Layout(
    prefix="model.",
    layer="layers.{}.",
    outer=(
        _table("embed_tokens.weight", "embedding"),
        _vector("norm.weight", "final_norm"),
        _linear(HEAD, "unembedding"),
    ),
    layers=(
        _vector("input_layernorm.weight", "attention_norm"),
        *_LLAMA_ATTENTION,
        *_LATENT_ATTENTION,
        _vector("post_attention_layernorm.weight", "feed_forward_norm"),
        *(_linear(f"mlp.{name}_proj.weight", f"feed_forward/{name}") for name in ("gate", "up", "down")),
        *(_vector(f"mlp.{name}_proj.bias", f"feed_forward/{name}_bias") for name in ("gate", "up", "down")),
    ),
    buffers=r".*rotary_emb\.inv_freq",
)
"""Llama, Mistral, Qwen2 and Qwen3, and DeepSeek's latent attention."""

GPT2 = Layout(
    prefix="transformer.",
    layer="h.{}.",
    outer=(
        _table("wte.weight", "embedding"),
        _table("wpe.weight", "position_embedding"),
        _vector("ln_f.weight", "final_norm"),
        _vector("ln_f.bias", "final_norm_bias"),
        _linear(HEAD, "unembedding"),
    ),
    layers=(
        _vector("ln_1.weight", "attention_norm"),
        _vector("ln_1.bias", "attention_norm_bias"),
        Tensor("attn.c_attn.weight", ("attention/q_proj", "attention/k_proj", "attention/v_proj"), 1),
        _vector("attn.c_attn.bias", "attention/q_bias", "attention/k_bias", "attention/v_bias"),
        Tensor("attn.c_proj.weight", ("attention/o_proj",), 2),
        _vector("attn.c_proj.bias", "attention/o_bias"),
        _vector("ln_2.weight", "feed_forward_norm"),
        _vector("ln_2.bias", "feed_forward_norm_bias"),
        Tensor("mlp.c_fc.weight", ("feed_forward/up",), 1),
        _vector("mlp.c_fc.bias", "feed_forward/up_bias"),
        Tensor("mlp.c_proj.weight", ("feed_forward/down",), 1),
        _vector("mlp.c_proj.bias", "feed_forward/down_bias"),
    ),
    buffers=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
)
"""GPT-2, whose matrices are stored input first."""
