"""Trained models made into models with a smaller cache, to be trained a little further (uptraining)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.attention import CrossLayer, GroupedQuery, Kronecker, Latent, PathConcat, PathResidual, SkipV1
from kvjax.attention.sharing import make_plan
from kvjax.config import ModelConfig, differences, require
from kvjax.convert.uptrain.cross_layer import share_across_layers
from kvjax.convert.uptrain.kronecker import check_kronecker, to_kronecker
from kvjax.convert.uptrain.kv_path import check_concat, concat_paths, residual_paths
from kvjax.convert.uptrain.latent import check_latent, to_latent
from kvjax.convert.uptrain.pooling import check_pooling, check_skip_v1, pool_key_value_heads, pool_later_values
from kvjax.convert.uptrain.regression import Calibration, Fit
from kvjax.model.layers import stack_layers, unstack_layers
from kvjax.model.parameters import layer_spec

MAY_DIFFER = ("attention", "sharing", "window", "dropout", "dtype", "kernel", "remat", "output_init", "context_length")
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
    check_conversion(source, target)
    require(calibration is not None or not needs_text(target),
            "this conversion is fitted on activations: give a calibration")
    if calibration is not None:
        windows = [w for w in (calibration.window, target.window) if w is not None]
        calibration = replace(calibration, window=min(windows, default=None))
    outer, layers = unstack_layers(source, params)
    attention, fits, pairs = _attention(source, [layer["attention"] for layer in layers], target, calibration)
    float32 = lambda tree: jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float32), tree)
    converted = [layer | {"attention": float32(weights)} for layer, weights in zip(layers, attention, strict=True)]
    survive = None if pairs is None else tuple(int(p) for p in pairs)
    return Conversion(stack_layers(target, outer, converted), tuple(fits), survive)


def check_conversion(source: ModelConfig, target: ModelConfig) -> None:
    """Raises ConfigError, with the reason, if there is no conversion between these models; reads no weights."""
    _refuse_other_sizes(source, target)
    heads, attention, sharing = source.attention, target.attention, target.sharing
    require(type(heads) is GroupedQuery and source.sharing is None,
            f"conversions start from multi-head or grouped-query attention without sharing, not from {heads} with "
            f"{source.sharing}")
    make_plan(target)
    known = False
    if type(attention) is GroupedQuery:
        check_pooling(heads, attention)
        known = sharing is None or type(sharing) in (SkipV1, CrossLayer, PathResidual, PathConcat)
        if type(sharing) is SkipV1:
            check_skip_v1(sharing)
        if isinstance(sharing, PathConcat):
            check_concat(attention)
    elif sharing is None and isinstance(attention, Latent | Kronecker):
        known = True
        (check_latent if isinstance(attention, Latent) else check_kronecker)(heads, attention)
    require(known, f"there is no conversion from {heads} to {attention} with {sharing}: known are GroupedQuery with "
            "SkipV1, CrossLayer, PathResidual or PathConcat, Latent and Kronecker")


def _attention(source: ModelConfig, layers: list, target: ModelConfig,
               calibration: Calibration | None) -> tuple[list, list[Fit], np.ndarray | None]:
    """Attention weights of all layers, fits, and surviving rotary pairs (None: all), for models that were checked."""
    attention, rope = target.attention, layer_spec(source, 0, 0).rope
    if isinstance(attention, Latent):
        return to_latent(attention, layers, calibration, rope, source.norm_eps)
    if isinstance(attention, Kronecker):
        return to_kronecker(attention, layers, calibration, rope)
    layers = pool_key_value_heads(attention, layers)
    match target.sharing:
        case SkipV1():
            return pool_later_values(layers), [], None
        case CrossLayer() as scheme:
            return *share_across_layers(scheme, layers, calibration), None
        case PathResidual() as scheme:
            return *residual_paths(scheme, layers, calibration), None
        case PathConcat() as scheme:
            return concat_paths(scheme, layers, calibration, rope)
        case _:
            return layers, [], None


def _refuse_other_sizes(source: ModelConfig, target: ModelConfig) -> None:
    free = MAY_DIFFER if source.positions == "rotary" else MAY_DIFFER[:-1]
    changed = [f"\n  model.{name}: {old} in the source, {new} in the target"
               for name, (old, new) in differences(source, target).items() if name.split(".")[0] not in free]
    require(not changed, f"source and target differ in more than a conversion changes:{''.join(changed)}")
