"""MHA or GQA -> KVPath-Residual and KVPath-Concat, by reduced-rank regressions along each path of layers."""

from __future__ import annotations

import numpy as np

from kvjax.attention import GroupedQuery, PathConcat, PathResidual
from kvjax.attention.rotary import Rope
from kvjax.config import require
from kvjax.convert.uptrain.heads import (
    Halves,
    Weights,
    absorb_in_output,
    affine,
    apply,
    as_weights,
    columns,
    for_query_heads,
    has_bias,
    inputs,
    loss_by_other_frequencies,
    loss_without_rotation,
    mapped,
    matching_pairs,
    mean_rotation,
    r_squared_of_keys,
    reduced_rank_per_head,
    shared_projection,
    states,
    without_keys_and_values,
)
from kvjax.convert.uptrain.regression import Calibration, Fit, r_squared

ROUNDS = 3
"""Alternations between the part of a path's values that is shared and the parts that are each layer's own."""


def residual_paths(target: PathResidual, layers: list[Weights],
                   calibration: Calibration) -> tuple[list[Weights], list[Fit]]:
    """The first layer of a path stays as it is; each later one corrects what is rebuilt before it.

    Its correction is the reduced-rank regression, of `delta` features per head, of what is missing on its own input.
    """
    converted, fits = [without_keys_and_values(layer) for layer in layers], []
    for state in ("k", "v"):
        rebuilt: Halves = ()
        for number, layer in enumerate(layers):
            truth = states(layer, state, calibration, number)
            bias = f"{state}_bias" if has_bias(layer) else None
            if number % target.layers == 0:
                rebuilt = truth
                converted[number] |= as_weights(affine(layer, state), f"{state}_alpha", bias)
                continue
            x = inputs(calibration, number, has_bias(layer))
            down, up = reduced_rank_per_head(x[0], truth[0] - rebuilt[0], target.delta)
            rebuilt = tuple(y + mapped(apply(half, down), up) for y, half in zip(rebuilt, x, strict=True))
            converted[number] |= as_weights(down, f"{state}_delta", bias and f"{bias}_delta")
            converted[number] |= {f"{state}_expand": np.swapaxes(up, 1, 2)}
            fits.append(Fit(number, state, r_squared(truth[1], rebuilt[1])))
    return converted, fits


def check_concat(source: GroupedQuery) -> None:
    """Raises ConfigError if `concat_paths` cannot work for such heads."""
    require(not source.qk_norm, "keys with a norm (qk_norm) cannot be split into alpha and delta without training: "
            "convert to PathResidual")


def concat_paths(target: PathConcat, layers: list[Weights], calibration: Calibration,
                 rope: Rope) -> tuple[list[Weights], list[Fit], np.ndarray]:
    """Own parts keep the rotary pairs whose frequencies survive; the shared part stands for all other pairs.

    Keys: delta takes over the pairs of its frequencies, or of the nearest. Alpha is not rotated: the regression of
    the other pairs of all layers, each pair weighed by its mean rotation, and the map back is absorbed in the query
    projection. Values: shared and own parts are regressed in turn, maps back are absorbed in the output projection.

    Returns: weights, fits, and the source's rotary pairs that survive in every layer.
    """
    converted, fits, width = [], [], layers[0]["k_proj"].shape[-1]
    pairs, difference = matching_pairs(rope, width, target.delta)
    for first in range(0, len(layers), target.layers):
        group = range(first, first + target.layers)
        keys, key_fits = _concat_keys(layers, group, calibration, rope, pairs, difference)
        values, value_fits = _concat_values(layers, group, calibration, target.delta)
        converted += [without_keys_and_values(layers[i]) | keys[i - first] | values[i - first] for i in group]
        fits += key_fits + value_fits
    return converted, fits, pairs[difference == 0]


def _concat_keys(layers: list[Weights], group: range, calibration: Calibration, rope: Rope,
                 pairs: np.ndarray, difference: np.ndarray) -> tuple[list[Weights], list[Fit]]:
    width = layers[0]["k_proj"].shape[-1]
    rest_pairs = np.setdiff1d(np.arange(width // 2), pairs)
    own, rest = columns(pairs, width), columns(rest_pairs, width)
    weight = np.tile(mean_rotation(rope.frequencies(width)[rest_pairs], calibration.apart), 2)
    strength = rope.rotation_factor**2  # of rotated scores, which alpha's have to be given
    bias = has_bias(layers[group[0]])
    x, test_x = inputs(calibration, group[0], bias)
    truth = [states(layers[i], "k", calibration, i) for i in group]
    alpha, ups = shared_projection(x, [fit[..., rest] * weight for fit, _ in truth], len(rest))
    made, fits = [], []
    for index, (i, up) in enumerate(zip(group, ups, strict=True)):
        matrix, query = affine(layers[i], "k"), affine(layers[i], "q")
        # Scores q · (alpha up) = (q up^T) · alpha.
        back = strength * for_query_heads(np.swapaxes(up, 1, 2), query.shape[1])
        turned = np.concatenate([np.einsum("dhi,hij->dhj", query[..., rest], back), query[..., own]], axis=-1)
        weights = as_weights(turned, "q_proj", "q_bias" if bias else None)
        weights |= as_weights(matrix[..., own], "k_delta", "k_bias_delta" if bias else None)
        if index == 0 and len(rest):
            weights |= as_weights(alpha, "k_alpha", "k_bias_alpha" if bias else None)
        made.append(weights)
        keys = truth[index][1]
        lost = loss_without_rotation(keys[..., rest], mapped(apply(test_x, alpha), up), weight)
        lost += loss_by_other_frequencies(keys[..., own], difference, calibration.apart)
        fits.append(Fit(i, "k", r_squared_of_keys(keys, lost)))
    return made, fits


def _concat_values(layers: list[Weights], group: range, calibration: Calibration,
                   delta: int) -> tuple[list[Weights], list[Fit]]:
    bias = has_bias(layers[group[0]])
    xs = [inputs(calibration, i, bias) for i in group]
    truth = [states(layers[i], "v", calibration, i) for i in group]
    shared_width = truth[0][0].shape[-1] - delta
    missing = [fit for fit, _ in truth]
    for _ in range(ROUNDS):
        alpha, ups = shared_projection(xs[0][0], missing, shared_width)
        seen = apply(xs[0][0], alpha)
        own = [reduced_rank_per_head(x, fit - mapped(seen, up), delta)
               for (x, _), (fit, _), up in zip(xs, truth, ups, strict=True)]
        missing = [fit - mapped(apply(x, down), up)
                   for (x, _), (fit, _), (down, up) in zip(xs, truth, own, strict=True)]
    made, fits = [], []
    for index, i in enumerate(group):
        down, up = own[index]
        predicted = mapped(apply(xs[0][1], alpha), ups[index]) + mapped(apply(xs[index][1], down), up)
        fits.append(Fit(i, "v", r_squared(truth[index][1], predicted)))
        maps = np.concatenate([ups[index], up], axis=1)
        weights = as_weights(down, "v_delta", "v_bias_delta" if bias else None)
        weights |= {"o_proj": absorb_in_output(layers[i]["o_proj"], maps)}
        if index == 0 and shared_width:
            weights |= as_weights(alpha, "v_alpha", "v_bias_alpha" if bias else None)
        made.append(weights)
    return made, fits
