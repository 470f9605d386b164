"""Conversions by mean pooling: exact but for the pooled heads, and without any text."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from kvjax.attention import GroupedQuery, SkipV1
from kvjax.config import ModelConfig, require

Weights = dict[str, Any]


def mean_of_neighbours(weight: Array, heads: int) -> Array:
    """Pools the key-value heads, the axis before the last, to `heads`, each the mean of consecutive ones."""
    *front, count, width = weight.shape
    return jnp.asarray(weight).reshape(*front, heads, count // heads, width).mean(axis=-2)


def pool_key_value_heads(source: ModelConfig, target: GroupedQuery, layers: list[Weights]) -> list[Weights]:
    """MHA or GQA -> GQA or MQA (Ainslie et al., 2023): keys and values of consecutive heads become their mean."""
    require(source.attention.kv_heads % target.kv_heads == 0,
            f"{source.attention.kv_heads} key-value heads cannot be pooled to {target.kv_heads}: choose a divisor")
    if target.kv_heads == source.attention.kv_heads:
        return layers
    pooled = ("k_proj", "v_proj", "k_bias", "v_bias")
    return [layer | {name: mean_of_neighbours(layer[name], target.kv_heads) for name in pooled if name in layer}
            for layer in layers]


def pool_later_values(source: ModelConfig, target: SkipV1, layers: list[Weights]) -> list[Weights]:
    """SkipV1Former's uptraining: in layers 2..L every two consecutive value heads become their mean.

    All other weights, the whole first layer included, stay bit for bit as they are.
    """
    heads = source.attention.kv_heads
    require(target.share == 0.5, f"SkipV1.share is {target.share}: pooling pairs of value heads is for a share of 0.5")
    require(heads % 2 == 0, f"{heads} key-value heads do not pair up: SkipV1 needs an even number")
    first, *later = layers
    return [first, *(layer | {name: mean_of_neighbours(layer[name], heads // 2)
                              for name in ("v_proj", "v_bias") if name in layer} for layer in later)]


def pooled_config(source: ModelConfig, target: GroupedQuery) -> ModelConfig:
    """The source with the target's key-value heads."""
    attention = dataclasses.replace(source.attention, kv_heads=target.kv_heads)
    return dataclasses.replace(source, attention=attention)
