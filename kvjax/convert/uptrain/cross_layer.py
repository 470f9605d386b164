"""MHA or GQA -> cross-layer attention, by regression of a whole group's keys and values on its first layer's input."""

from __future__ import annotations

import numpy as np

from kvjax.attention import CrossLayer
from kvjax.convert.uptrain.heads import (
    Weights,
    absorb_in_output,
    affine,
    apply,
    as_complex,
    as_weights,
    feature_rows,
    for_query_heads,
    has_bias,
    inputs,
    main_direction,
    mapped,
    shared_projection,
    states,
    without_keys_and_values,
)
from kvjax.convert.uptrain.regression import Calibration, Fit, least_squares, r_squared


def share_across_layers(target: CrossLayer, layers: list[Weights],
                        calibration: Calibration) -> tuple[list[Weights], list[Fit]]:
    """Groups of layers get one set of keys and values each.

    Values are the d directions that tell most about all of the group's values, and the map back to each layer's is
    absorbed in its output projection. Keys have less room: a map must commute with rotation. Of each rotary pair, as a
    complex number, the one direction over layers is shared that holds most energy, and each layer's factor is absorbed
    in its query projection. With qk_norm nothing passes through the norm: keys are those nearest to all of the group's.
    A group of one layer stays as it is.
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
    key, factors = _shared_keys(x, [fit for fit, _ in keys], absorb="qk_norm_k" not in first)
    value, maps = shared_projection(x, [fit for fit, _ in values], values[0][0].shape[-1])
    shared, spanned = apply(test_x, key), apply(test_x, value)
    fits, converted = [], []
    for i, (_, true_key), (_, true_value), factor, back in zip(group, keys, values, factors, maps, strict=True):
        fits += [Fit(i, "k", r_squared(true_key, _times(shared, factor))),
                 Fit(i, "v", r_squared(true_value, mapped(spanned, back)))]
        kept = without_keys_and_values(layers[i])
        query = affine(layers[i], "q")
        query = _times(query, for_query_heads(factor.conj(), query.shape[1]))
        converted.append(kept | as_weights(query, "q_proj", "q_bias" if has_bias(first) else None)
                         | {"o_proj": absorb_in_output(kept["o_proj"], back)})
    for later in converted[1:]:
        later.pop("qk_norm_k", None)
    biases = ("k_bias", "v_bias") if has_bias(first) else (None, None)
    converted[0] |= as_weights(key, "k_proj", biases[0]) | as_weights(value, "v_proj", biases[1])
    return converted, fits


def _shared_keys(x: np.ndarray, wanted: list[np.ndarray], absorb: bool) -> tuple[np.ndarray, np.ndarray]:
    """A projection of x [D, G, d] for several layers' keys [N, G, d], and their factors [layers, G, d/2] on it."""
    heads, width = wanted[0].shape[1:]
    factors = np.full((len(wanted), heads, width // 2), 1 / len(wanted), complex)
    if absorb:
        for pair in range(width // 2):
            z = np.stack([as_complex(y, pair) for y in wanted], axis=-1)
            factors[:, :, pair] = np.stack([main_direction(z[:, g]) for g in range(heads)], axis=1)
    total = sum(_times(y, factor.conj()) for y, factor in zip(wanted, factors, strict=True))
    key = least_squares(x, feature_rows(total)).reshape(-1, heads, width)
    return key, factors if absorb else np.ones_like(factors)


def _times(x: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Rotary pairs of x [..., heads, d], as complex numbers, times `factor` [heads, d/2]."""
    first, second = np.split(x, 2, axis=-1)
    z = (first + 1j * second) * factor
    return np.concatenate([z.real, z.imag], axis=-1)
