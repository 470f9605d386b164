"""MHA or GQA -> cross-layer attention, by regression of a whole group's keys and values on its first layer's input."""

from __future__ import annotations

import numpy as np

from kvjax.attention import CrossLayer
from kvjax.convert.uptrain.heads import (
    Weights,
    absorb_in_output,
    apply,
    flat,
    has_bias,
    inputs,
    mapped,
    named,
    shared_projection,
    states,
    without_keys_and_values,
)
from kvjax.convert.uptrain.regression import Calibration, Fit, least_squares, r_squared


def share_across_layers(target: CrossLayer, layers: list[Weights],
                        calibration: Calibration) -> tuple[list[Weights], list[Fit]]:
    """Groups of layers get one set of keys and values each.

    Keys are those nearest to all of the group's: rotation leaves no room for a map of each layer. Values are the d
    directions that tell most about all of the group's values, and the map back to each layer's is absorbed in its
    output projection. A group of one layer stays as it is.
    """
    if target.layers == 1:
        return layers, []
    converted, fits = [], []
    for first in range(0, len(layers), target.layers):
        made, found = _share(layers, range(first, first + target.layers), calibration)
        converted += made
        fits += found
    return converted, fits


def _share(layers: list[Weights], group: range, calibration: Calibration) -> tuple[list[Weights], list[Fit]]:
    first = layers[group[0]]
    x, test_x = inputs(calibration, group[0], has_bias(first))
    keys, values = ([states(layers[i], state, calibration, i) for i in group] for state in ("k", "v"))
    key = _nearest(x, [fit for fit, _ in keys])
    value, maps = shared_projection(x, [fit for fit, _ in values], values[0][0].shape[-1])
    shared, spanned = apply(test_x, key), apply(test_x, value)
    fits, converted = [], []
    for i, (_, true_key), (_, true_value), back in zip(group, keys, values, maps, strict=True):
        fits += [Fit(i, "k", r_squared(true_key, shared)),
                 Fit(i, "v", r_squared(true_value, mapped(spanned, back)))]
        kept = without_keys_and_values(layers[i])
        converted.append(kept | {"o_proj": absorb_in_output(kept["o_proj"], back)})
    for later in converted[1:]:
        later.pop("qk_norm_k", None)
    biases = ("k_bias", "v_bias") if has_bias(first) else (None, None)
    converted[0] |= named(key, "k_proj", biases[0]) | named(value, "v_proj", biases[1])
    return converted, fits


def _nearest(x: np.ndarray, wanted: list[np.ndarray]) -> np.ndarray:
    """[D, G, d]: the projection of x whose states are nearest to those of all layers, each [N, G, d]."""
    mean = sum(wanted) / len(wanted)
    return least_squares(x, flat(mean)).reshape(-1, *mean.shape[1:])
