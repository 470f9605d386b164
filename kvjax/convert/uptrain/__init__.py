"""Trained models made into models with a smaller cache, to be trained a little further (uptraining)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.attention import CrossLayer, GroupedQuery, Kronecker, Latent, PathConcat, PathResidual, SkipV1
from kvjax.config import ConfigError, ModelConfig, differences, require
from kvjax.convert.uptrain.cross_layer import share_across_layers
from kvjax.convert.uptrain.kronecker import to_kronecker
from kvjax.convert.uptrain.kv_path import concat_paths, residual_paths
from kvjax.convert.uptrain.latent import to_latent
from kvjax.convert.uptrain.pooling import pool_key_value_heads, pool_later_values
from kvjax.convert.uptrain.regression import Calibration, Fit
from kvjax.model.layers import stack_layers, unstack_layers
from kvjax.model.parameters import layer_spec

FREE = ("attention", "sharing", "window", "dropout", "dtype", "remat", "output_init", "context_length")
"""Settings of the model in which source and target may differ."""


@dataclass(frozen=True)
class Conversion:
    """A converted model, and what is known of its loss before any training."""

    params: dict[str, Any]
    fits: tuple[Fit, ...]
    """R² of every layer's keys and values that were regressed; empty for conversions by pooling."""
    surviving_pairs: tuple[int, ...] | None
    """The source's rotary pairs that are still rotated as they were; None: all of them."""


def needs_text(target: ModelConfig) -> bool:
    """Whether a conversion to `target` is fitted on activations."""
    by_pooling = target.sharing is None or isinstance(target.sharing, SkipV1)
    return not (type(target.attention) is GroupedQuery and by_pooling)


def convert(source: ModelConfig, params: dict[str, Any], target: ModelConfig,
            calibration: Calibration | None = None) -> Conversion:
    """Turns a multi-head or grouped-query model into one of another attention or sharing scheme.

    MHA/GQA -> GQA/MQA and -> SkipV1 by mean pooling; -> CLA, KVPath-Residual, KVPath-Concat, MLA and KPA/TPA by
    regression on the source's activations. Fewer key-value heads and a sharing scheme may be asked for at once.

    Args:
        source, params: the trained model.
        target: the model to make: the source's but for attention, sharing, window and settings of training.
        calibration: inputs of the source's attention layers, for conversions by regression.
    Raises:
        ConfigError: this pair of models has no conversion, or they differ in more than a conversion changes.
    """
    _refuse_other_sizes(source, target)
    require(type(source.attention) is GroupedQuery and source.sharing is None,
            f"conversions start from multi-head or grouped-query attention without sharing, not from "
            f"{source.attention} with {source.sharing}")
    require(calibration is not None or not needs_text(target),
            "this conversion is fitted on activations: give a calibration")
    outer, layers = unstack_layers(source, params)
    attention, fits, pairs = _attention(source, [layer["attention"] for layer in layers], target, calibration)
    float32 = lambda tree: jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float32), tree)
    converted = [layer | {"attention": float32(weights)} for layer, weights in zip(layers, attention, strict=True)]
    survive = None if pairs is None else tuple(int(p) for p in pairs)
    return Conversion(stack_layers(target, outer, converted), tuple(fits), survive)


def _attention(source: ModelConfig, layers: list, target: ModelConfig,
               calibration: Calibration | None) -> tuple[list, list[Fit], np.ndarray | None]:
    attention, sharing, rope = target.attention, target.sharing, layer_spec(source, 0, 0).rope
    if type(attention) is GroupedQuery:
        changed = [f.name for f in dataclasses.fields(attention) if f.name != "kv_heads"
                   and getattr(attention, f.name) != getattr(source.attention, f.name)]
        require(not changed, f"source and target differ in attention.{', attention.'.join(changed)}: "
                f"{source.attention}, {attention}")
        layers = pool_key_value_heads(source, attention, layers)
        pooled = dataclasses.replace(source, attention=attention)
        match sharing:
            case None:
                return layers, [], None
            case SkipV1() if type(sharing) is SkipV1:
                return pool_later_values(pooled, sharing, layers), [], None
            case CrossLayer():
                return *share_across_layers(sharing, layers, calibration), None
            case PathResidual():
                return *residual_paths(sharing, layers, calibration), None
            case PathConcat():
                return concat_paths(sharing, layers, calibration, rope)
    if sharing is None and isinstance(attention, Latent):
        return to_latent(attention, layers, calibration, rope, source.norm_eps)
    if sharing is None and isinstance(attention, Kronecker):
        return to_kronecker(attention, layers, calibration, rope)
    raise ConfigError(f"there is no conversion from {source.attention} to {attention} with {sharing}: known are "
                      "GroupedQuery with SkipV1, CrossLayer, PathResidual or PathConcat, Latent and Kronecker")


def _refuse_other_sizes(source: ModelConfig, target: ModelConfig) -> None:
    free = FREE if source.positions == "rotary" else FREE[:-1]
    changed = [f"\n  model.{name}: {old} in the source, {new} in the target"
               for name, (old, new) in differences(source, target).items() if name.split(".")[0] not in free]
    require(not changed, f"source and target differ in more than a conversion changes:{''.join(changed)}")
