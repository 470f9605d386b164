"""Multi-head, grouped-query and multi-query attention.

Vaswani et al. 2017 (kv_heads = heads), Ainslie et al. 2023 (in between), Shazeer 2019 (kv_heads = 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import Array

from kvjax.attention.components import Component
from kvjax.attention.partials import Partial, attend
from kvjax.attention.rotary import rotate
from kvjax.attention.variant import Attention, Layer, Param, View, Weights, project, rms_norm
from kvjax.config import register, require


@register("grouped_query")
@dataclass(frozen=True)
class GroupedQuery(Attention):
    """H query heads that share G key-value heads; caches rotated keys and values, 2 G d elements a token."""

    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = False
    """RMS norm of every query and key head before rotation (Dehghani et al., 2023)."""

    def __post_init__(self):
        for name in ("heads", "kv_heads", "head_dim"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}: it must be above 0")
        require(self.heads % self.kv_heads == 0,
                f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}: each key-value head serves "
                f"equally many query heads")
        require(self.head_dim % 2 == 0, f"head_dim {self.head_dim} is odd: rotary embedding turns pairs of features")

    def components(self) -> tuple[Component, ...]:
        features, norm = (self.kv_heads, self.head_dim), "qk_norm_k" if self.qk_norm else None
        return (
            Component("k", features, state="k", param="k_proj", rotate=True, norm=norm),
            Component("v", features, state="v", param="v_proj"),
        )

    def query_shapes(self, layer: Layer) -> dict[str, Param]:
        shapes = {"q_proj": self.projection(layer.width, (self.heads, self.head_dim), ("heads", None))}
        if self.qk_norm:
            shapes["qk_norm_q"] = Param((self.head_dim,), (None,), jax.nn.initializers.ones)
        return shapes

    def queries(self, layer: Layer, weights: Weights, x: Array, positions: Array) -> Array:
        queries = project(x, weights["q_proj"])
        if self.qk_norm:
            queries = rms_norm(queries, weights["qk_norm_q"], layer.norm_eps)
        return rotate(queries, positions, layer.rope_base)

    def partial(self, layer: Layer, path: tuple[Weights, ...], queries: Array, view: View) -> Partial:
        return attend(queries, view["k"], view["v"], view.mask, self.head_dim**-0.5)
