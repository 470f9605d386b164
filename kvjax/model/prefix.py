"""Attention to the prefix of a compacted cache: plain attention with few heads, whatever the variant.

A key's bias is one more feature of it, which meets a query feature that is 1: scores are sums over parts of the keys, so
nothing else has to know of biases, and a kernel reads them like any other part. Biases are stored unscaled, as what they
add to q k before the factor on scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from kvjax.attention.components import Component
from kvjax.attention.grouped_query import GroupedQuery
from kvjax.attention.partials import MASKED, Partial
from kvjax.attention.variant import Attention, HeadSizes, Layer, Weights
from kvjax.cache import Prefix
from kvjax.model.past import attend_to_past


@dataclass(frozen=True)
class PrefixHeads(GroupedQuery):
    """The plain attention of a prefix: GroupedQuery with sizes and a scale of any kind. No layer is made of it."""

    value_dim: int = 0
    factor: float = 1.0

    def __post_init__(self):
        pass  # sizes are those of a model that was checked

    @property
    def scale(self) -> float:
        return self.factor


def prefix_table(sizes: HeadSizes, biased: bool) -> tuple[Component, ...]:
    """Components of a prefix."""
    bias = (Component("bias", (sizes.heads, 1), "k", "bias"),) if biased else ()
    return (Component("k", (sizes.heads, sizes.key_dim), "k", "k"), *bias,
            Component("v", (sizes.heads, sizes.value_dim), "v", "v"))


def stored_bias(bias: Array, scale: float, dtype) -> Array:
    """Biases of scores as a prefix stores them, in a floating type; `MASKED` ones stay as low as the type goes."""
    return jnp.maximum(bias / scale, max(MASKED, float(jnp.finfo(dtype).min))).astype(dtype)


def attend_to_prefix(kernel: str, variant: Attention, layer: Layer, path: tuple[Weights, ...], queries: Any,
                     prefix: Prefix, entry: Array, positions: Array, dtype) -> Partial:
    """Attention of a layer's queries to entry `entry` of a prefix; arguments as `attend_to_past` takes them."""
    sizes, queries = variant.as_heads(layer), variant.head_queries(layer, path, queries)
    heads = PrefixHeads(queries.shape[2], sizes.heads, sizes.key_dim, value_dim=sizes.value_dim, factor=sizes.scale)
    table = tuple(c for c in prefix.cache.table if c.state in ("k", "v"))
    parts = (queries, *(jnp.ones((*queries.shape[:3], 1), queries.dtype) for c in table if c.name == "bias"))
    found = attend_to_past(kernel, heads, Layer(0, (), table), path, parts, prefix.cache.past("k"),
                           {c.name: (entry,) for c in table}, positions, None, dtype)
    return variant.from_heads(layer, path, found)
