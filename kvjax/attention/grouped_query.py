"""Multi-head, grouped-query and multi-query attention.

Vaswani et al. 2017 (kv_heads = heads), Ainslie et al. 2023 (in between), Shazeer 2019 (kv_heads = 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import Array

from kvjax.attention.components import Component
from kvjax.attention.partials import (
    Partial,
    attend,
    attend_parts,
    feature_parts_values,
    head_parts_values,
    joined,
    parts_scores,
    separated,
)
from kvjax.attention.variant import Attention, HeadSizes, Layer, Param, View, Weights, bias_param, project, rms_norm
from kvjax.config import register, require
from kvjax.kernels.decode.api import Attending
from kvjax.kernels.decode.heads import HeadParts, by_key_head, put_together

APART = ("value heads come in parts, each split over devices by itself, so that a device holds values of other heads "
         "than its keys, and bringing them together would move the cache in every step")


@register("grouped_query")
@dataclass(frozen=True)
class GroupedQuery(Attention):
    """H query heads that share G key-value heads; caches rotated keys and values, 2 G d elements a token.

    Keys may come in parts of their features and values in parts of their features or heads, as a sharing scheme says.
    """

    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = False
    """RMS norm of every query and key head before rotation (Dehghani et al., 2023)."""
    qkv_bias: bool = False
    """Queries, keys and values have biases `q_bias [H, d]`, `k_bias`, `v_bias [G, d]`."""
    output_bias: bool = False
    """The output projection has a bias `o_bias [D]`."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("heads", "kv_heads", "head_dim"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}: it must be above 0")
        require(self.heads % self.kv_heads == 0,
                f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}: each key-value head serves "
                f"equally many query heads")
        require(self.head_dim % 2 == 0, f"head_dim {self.head_dim} is odd: rotary embedding turns pairs of features")

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return self.head_dim**-0.5

    def components(self) -> tuple[Component, ...]:
        features, norm = (self.kv_heads, self.head_dim), "qk_norm_k" if self.qk_norm else None
        k_bias, v_bias = ("k_bias", "v_bias") if self.qkv_bias else (None, None)
        return (
            Component("k", features, state="k", param="k_proj", rotate=True, norm=norm, bias=k_bias),
            Component("v", features, state="v", param="v_proj", bias=v_bias),
        )

    def query_shapes(self, layer: Layer) -> dict[str, Param]:
        shapes = {"q_proj": self.projection(layer.width, (self.heads, self.head_dim), ("heads", None))}
        if self.qkv_bias:
            shapes["q_bias"] = bias_param((self.heads, self.head_dim), ("heads", None))
        if self.output_bias:
            shapes["o_bias"] = bias_param((layer.width,), (None,))
        norms = {query_norm(c): Param((c.features[-1],), (None,), jax.nn.initializers.ones)
                 for c in layer.state("k") if self.qk_norm}
        return shapes | norms

    def queries(self, layer: Layer, weights: Weights, x: Array, positions: Array) -> tuple[Array, ...]:
        """One array [B, T, H, features] for each part of the keys, normed and rotated as that part is."""
        keys = layer.state("k")
        parts = separated(self.projected_queries(weights, x), [c.features[-1] for c in keys], axis=-1)
        normed = [rms_norm(part, weights[query_norm(key)], layer.norm_eps) if self.qk_norm else part
                  for part, key in zip(parts, keys, strict=True)]
        return tuple(layer.rotate(part, positions) if key.rotate else part
                     for part, key in zip(normed, keys, strict=True))

    def projected_queries(self, weights: Weights, x: Array) -> Array:
        """[B, T, H, d] before norm and rotation."""
        queries = project(x, weights["q_proj"])
        return queries + weights["q_bias"] if self.qkv_bias else queries

    def partial(self, layer: Layer, path: tuple[Weights, ...], queries: tuple[Array, ...], view: View) -> Partial:
        """Puts parts together: what follows is plain attention."""
        values = layer.state("v")
        parts = view.parts(values) if _axis(values) == -1 else (joined(view.parts(values), 2),)
        return attend_parts(queries, view.parts(layer.state("k")), parts, view.mask, self.scale)

    def absorbed(self, layer: Layer, path: tuple[Weights, ...], queries: tuple[Array, ...], view: View) -> Partial:
        """Attention to parts as they lie in the cache: key parts add scores, value parts concatenate outputs."""
        keys, values = layer.state("k"), layer.state("v")
        if len(keys) == len(values) == 1:
            return self.partial(layer, path, queries, view)
        combine = head_parts_values if _axis(values) == 2 else feature_parts_values
        return attend(queries, view.parts(keys), view.parts(values), view.mask, self.scale,
                      scores=parts_scores, combine=combine)

    def reads_in_place(self, layer: Layer) -> bool:
        return len(layer.state("k")) == len(layer.state("v")) == 1

    def attending(self, layer: Layer, path: tuple[Weights, ...], queries: tuple[Array, ...],
                  entries: dict[str, int]) -> Attending:
        keys, values = layer.state("k"), layer.state("v")
        new, axis = queries[0].shape[1], _axis(values)
        apart = APART if len(values) > 1 and axis == 2 else None
        program = HeadParts(
            new, self.heads // self.kv_heads, self.kv_heads, tuple((i, c.features[-1]) for i, c in enumerate(keys)),
            tuple((i, *c.features) for i, c in enumerate(values, len(keys))))
        return Attending(program, tuple(by_key_head(q, self.kv_heads) for q in queries),
                         tuple((c.name, 0) for c in (*keys, *values)), put_together(new, axis), self.scale,
                         split=1 if self.kv_heads > 1 else 2, undivided=apart)

    def as_heads(self, layer: Layer) -> HeadSizes:
        return HeadSizes(self.kv_heads, self.head_dim, self.head_dim, self.scale)

    def head_queries(self, layer: Layer, path: tuple[Weights, ...], queries: tuple[Array, ...]) -> Array:
        return joined(queries, -1)

    def head_states(self, layer: Layer, path: tuple[Weights, ...], view: View) -> tuple[Array, Array]:
        values = layer.state("v")
        return joined(view.parts(layer.state("k")), -1), joined(view.parts(values), _axis(values))

    def output(self, weights: Weights, out: Array) -> Array:
        y = super().output(weights, out)
        return y + weights["o_bias"].astype(y.dtype) if self.output_bias else y


def query_norm(key: Component) -> str:
    """The norm of the query features that meet a part of the keys: qk_norm_k_alpha -> qk_norm_q_alpha."""
    return "qk_norm_q" + key.norm.removeprefix("qk_norm_k")


def _axis(parts: tuple[Component, ...]) -> int:
    """Where arrays [B, S, heads, features] of these components are put together."""
    return -1 if parts[0].axis == -1 else 2 + parts[0].axis
