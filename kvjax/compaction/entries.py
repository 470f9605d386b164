"""What can be compacted of a model's cache: which layers read which keys and values, and these themselves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.attention.kronecker import Kronecker
from kvjax.attention.partials import MASKED
from kvjax.attention.sharing import make_attention, make_plan
from kvjax.attention.variant import HeadSizes, Weights
from kvjax.cache import Cache, Past
from kvjax.config import ModelConfig, require
from kvjax.model.decoder import computed
from kvjax.model.parameters import group_table, layer_spec

Place = tuple[int, int, int]


@dataclass(frozen=True)
class Entry:
    """Keys and values that one layer or several read."""

    readers: tuple[int, ...]
    """Numbers of these layers."""
    places: tuple[Place, ...]
    """Of each: its segment, its group there, and its index in the group."""


class Tokens(NamedTuple):
    """The tokens of an entry as plain attention sees them, float32."""

    keys: Array
    """[B, G, S, key_dim], rotated."""
    values: Array
    """[B, G, S, value_dim]."""
    bias: Array
    """[B, G, S]: what is added to scaled scores; `MASKED` where there is no token."""


def entries_of(config: ModelConfig) -> tuple[Entry, ...]:
    """The entries of a model that can be compacted, in the order of their first readers.

    Layers that read the same slots of the cache share an entry; layers with a window keep theirs as they are.
    Raises ConfigError, with the reason, if there are none.
    """
    plan, shared = make_plan(config), {}
    for number, place in enumerate(plan.places):
        if _windowed(config, place):
            continue
        sizes_of(config, place)
        slots = {name: slots for name, slots in plan.slots_read(*place).items() if plan.component(name).cached}
        shared.setdefault(tuple(sorted(slots.items())), []).append((number, place))
    require(bool(shared), f"every layer of the model sees a window of {config.window} tokens, and its cache holds no "
                          "more: there is nothing to compact")
    return tuple(Entry(*map(tuple, zip(*readers, strict=True))) for readers in shared.values())


def _windowed(config: ModelConfig, place: Place) -> bool:
    return make_plan(config).segments[place[0]].window is not None


def sizes_of(config: ModelConfig, place: Place) -> HeadSizes | None:
    """Sizes of the plain attention of a layer; None: its own components are kept (Kronecker factors).

    Raises ConfigError if the attention can be compacted in neither form.
    """
    variant = make_attention(config)
    sizes = variant.as_heads(layer_spec(config, place[0], place[2]))
    require(sizes is not None or isinstance(variant, Kronecker), f"{type(variant).__name__} does not say what plain "
            "attention it amounts to: give it as_heads, head_queries and head_states")
    return sizes


def entry_of_layers(config: ModelConfig, entries: tuple[Entry, ...]) -> tuple[int | None, ...]:
    """For each layer, the number of its entry, or None."""
    found = {reader: number for number, entry in enumerate(entries) for reader in entry.readers}
    return tuple(found.get(layer) for layer in range(config.layers))


def path_of(config: ModelConfig, params: dict[str, Any], place: Place) -> tuple[Weights, ...]:
    """Attention weights of a layer's group up to the layer, in float32."""
    number, group, index = place
    table, segment = group_table(config, number), params[f"segment_{number}"]
    def of_layer(name: str) -> Weights:
        weights = jax.tree.map(lambda x: x[group], segment[name]["attention"])
        return jax.tree.map(partial(computed, jnp.float32), weights, table[name]["attention"])
    return tuple(of_layer(f"layer_{j}") for j in range(index + 1))


def tokens_of(config: ModelConfig, path: tuple[Weights, ...], place: Place, cache: Cache, entry: Array | int = 0,
              keep: int = 0) -> Tokens:
    """The tokens that the layer at `place` reads of a cache, but for the last `keep`; before them those of its prefix.

    `entry` is the number of the layer's entry. It and the layer's group in `place` may be traced.
    """
    number, _, index = place
    layer, variant = layer_spec(config, number, index), make_attention(config)
    slots = make_plan(config).slots_read(*place)
    cached = {c.name: slots[c.name] for c in layer.reads if c.cached}
    view, valid = whole(cache.past(next(iter(cached))), cached, cache.lengths - keep)
    keys, values = variant.head_states(layer, path, view)
    sizes, bias = variant.as_heads(layer), jnp.where(valid, 0.0, MASKED)[:, None]
    bias = jnp.broadcast_to(bias, (len(bias), sizes.heads, bias.shape[-1]))
    tokens = Tokens(_heads_first(keys), _heads_first(values), bias)
    if cache.prefix is not None:
        old = _prefix_tokens(cache, entry, sizes)
        tokens = Tokens(*(jnp.concatenate(x, axis=2) for x in zip(old, tokens, strict=True)))
    there = (tokens.bias > MASKED / 2)[..., None]  # what slots without a token hold may be anything
    return Tokens(jnp.where(there, tokens.keys, 0), jnp.where(there, tokens.values, 0), tokens.bias)


def whole(past: Past, slots: dict[str, tuple], lengths: Array):
    """All blocks of a past as one view, float32, and which of its tokens [B, S] come before `lengths` [B]."""
    rows = len(past.cache.lengths)
    views = [past.view(block, slots, jnp.zeros((rows, 1), jnp.int32), None, jnp.float32)
             for block in range(past.blocks)]
    entries = {name: tuple(jnp.concatenate(parts, axis=1) for parts in zip(*(v.entries[name] for v in views),
                                                                           strict=True)) for name in slots}
    positions = jnp.concatenate([view.positions for view in views], axis=1)
    valid = jnp.arange(past.size) < lengths[:, None]
    return views[0].replace(entries=entries, positions=positions), valid


def _prefix_tokens(cache: Cache, entry: Array | int, sizes: HeadSizes) -> Tokens:
    held = cache.prefix.cache
    names = [c.name for c in held.table if c.state in ("k", "v")]
    view, valid = whole(held.past("k"), {name: (entry,) for name in names}, held.lengths)
    bias = view["bias"][..., 0] if "bias" in names else jnp.zeros(view["k"].shape[:3])
    bias = jnp.where(valid[..., None] & (bias > MASKED_IN_CACHE), bias * sizes.scale, MASKED)
    return Tokens(_heads_first(view["k"]), _heads_first(view["v"]), jnp.moveaxis(bias, 2, 1))


MASKED_IN_CACHE = -1e3
"""Stored biases below this stand for slots without a token: no type is too small for it, and fitted ones are above."""


def _heads_first(x: Array) -> Array:
    return jnp.swapaxes(x, 1, 2)


def head_queries(config: ModelConfig, path: tuple[Weights, ...], place: Place, inputs: Array,
                 positions: Array) -> Array:
    """Rotated queries of a layer to each head of keys, [B, G, N H / G, key_dim] float32, of its inputs [B, N, D]."""
    number, _, index = place
    layer, variant = layer_spec(config, number, index), make_attention(config)
    queries = variant.queries(layer, path[-1], inputs.astype(jnp.float32), positions)
    queries = variant.head_queries(layer, path, queries)
    batch, count, heads, width = queries.shape
    groups = variant.as_heads(layer).heads
    grouped = queries.reshape(batch, count, groups, heads // groups, width)
    return jnp.moveaxis(grouped, 2, 1).reshape(batch, groups, -1, width)
