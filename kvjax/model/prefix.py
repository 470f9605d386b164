"""Attention to the prefix of a compacted cache: plain attention with few heads, whatever the variant.

(Kronecker factors have no such form: of them a prefix keeps the components themselves, with a bias for all heads.)

A key's bias is one more feature of it, which meets a query feature that is 1: scores are sums over parts of the keys,
so nothing else has to know of biases, and a kernel reads them like any other part. Biases are stored unscaled, as what
they add to q k before the factor on scores.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.attention.components import Component
from kvjax.attention.grouped_query import GroupedQuery
from kvjax.attention.partials import Partial
from kvjax.attention.variant import Attention, HeadSizes, Layer, Weights
from kvjax.cache import Prefix
from kvjax.model.past import attend_to_past
from kvjax.quantisation import SCALE_TYPE, is_quantised

LOWEST = -6e4
"""Stored bias of slots that hold no token: float16 goes as low, and no score makes up for it."""


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


def prefix_table(sizes: HeadSizes) -> tuple[Component, ...]:
    """Components of a prefix of heads."""
    return (Component("k", (sizes.heads, sizes.key_dim), "k", "k"), Component("bias", (sizes.heads, 1), "k", "bias"),
            Component("v", (sizes.heads, sizes.value_dim), "v", "v"))


def bias_type(dtype) -> np.dtype:
    """The type of biases in a cache of some type: a quantised one's is that of its scales."""
    return SCALE_TYPE if is_quantised(dtype) else jnp.dtype(dtype)


def stored_bias(bias: Array, scale: float, dtype) -> Array:
    """Biases of scores as a prefix stores them, in a floating type; `MASKED` ones are as low as every type goes."""
    return jnp.maximum(bias / scale, LOWEST).astype(dtype)


def attend_to_prefix(kernel: str, variant: Attention, layer: Layer, path: tuple[Weights, ...], queries: Any,
                     prefix: Prefix, entry: Array, positions: Array, dtype) -> Partial:
    """Attention of a layer's queries to entry `entry` of a prefix; arguments as `attend_to_past` takes them."""
    sizes, held = variant.as_heads(layer), prefix.cache
    if sizes is None:
        own = tuple(c for c in held.table if c.name == "bias" or c in layer.reads)
        return attend_to_past(kernel, variant, dataclasses.replace(layer, reads=own), path, queries,
                              held.past(own[0].name), {c.name: (entry,) for c in own}, positions, None, dtype)
    queries = variant.head_queries(layer, path, queries)
    heads = PrefixHeads(queries.shape[2], sizes.heads, sizes.key_dim, value_dim=sizes.value_dim, factor=sizes.scale)
    table = tuple(c for c in held.table if c.state in ("k", "v"))
    parts = (queries, *(jnp.ones((*queries.shape[:3], 1), queries.dtype) for c in table if c.name == "bias"))
    found = attend_to_past(kernel, heads, Layer(0, (), table), path, parts, held.past("k"),
                           {c.name: (entry,) for c in table}, positions, None, dtype)
    return variant.from_heads(layer, path, found)
