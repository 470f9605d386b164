"""Conversions by mean pooling: exact but for the pooled heads, and without any text."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from kvjax.attention import GroupedQuery, SkipV1
from kvjax.config import require

Weights = dict[str, Any]


def mean_of_neighbours(weight: Array, heads: int) -> Array:
    """Pools the key-value heads, the axis before the last, to `heads`, each the mean of consecutive ones."""
    *front, count, width = weight.shape
    return jnp.asarray(weight).reshape(*front, heads, count // heads, width).mean(axis=-2)


def check_pooling(source: GroupedQuery, target: GroupedQuery) -> None:
    """Raises ConfigError unless the source's key-value heads can be pooled to the target's, and all else is equal."""
    changed = [f.name for f in dataclasses.fields(target)
               if f.name != "kv_heads" and getattr(target, f.name) != getattr(source, f.name)]
    require(not changed, f"source and target differ in attention.{', attention.'.join(changed)}: {source}, {target}")
    require(source.kv_heads % target.kv_heads == 0,
            f"{source.kv_heads} key-value heads cannot be pooled to {target.kv_heads}: choose a divisor")


def check_skip_v1(target: SkipV1) -> None:
    """Raises ConfigError unless pooling pairs of value heads makes what the scheme asks for."""
    require(target.share == 0.5, f"SkipV1.share is {target.share}: pooling pairs of value heads is for a share of 0.5")


def pool_key_value_heads(target: GroupedQuery, layers: list[Weights]) -> list[Weights]:
    """MHA or GQA -> GQA or MQA (Ainslie et al., 2023): keys and values of consecutive heads become their mean."""
    if target.kv_heads == layers[0]["k_proj"].shape[-2]:
        return layers
    pooled = ("k_proj", "v_proj", "k_bias", "v_bias")
    return [layer | {name: mean_of_neighbours(layer[name], target.kv_heads) for name in pooled if name in layer}
            for layer in layers]


def pool_later_values(layers: list[Weights]) -> list[Weights]:
    """SkipV1Former's uptraining: in layers 2..L every two consecutive value heads become their mean.

    All other weights, the whole first layer included, stay bit for bit as they are.
    """
    first, *later = layers
    heads = first["v_proj"].shape[-2] // 2
    return [first, *(layer | {name: mean_of_neighbours(layer[name], heads)
                              for name in ("v_proj", "v_bias") if name in layer} for layer in later)]
