"""What a source layer's heads make of their inputs, and which rotary pairs a narrower rotation keeps."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax.attention.grouped_query import GroupedQuery
from kvjax.attention.rotary import Rope
from kvjax.config import require
from kvjax.convert.uptrain.regression import Calibration, reduced_rank

Weights = dict[str, Any]
Halves = tuple[np.ndarray, np.ndarray]
"""The same of the text that maps are fitted on, and of the text that they are judged on."""

KEY_VALUE = ("k_proj", "v_proj", "k_bias", "v_bias")


def refuse_biases_and_norms(source: GroupedQuery, through: str) -> None:
    """Raises ConfigError for heads whose biases or norms cannot pass through what a conversion puts in their place."""
    require(not (source.qkv_bias or source.output_bias or source.qk_norm),
            f"{source} has biases or qk_norm, which do not pass through {through}")


def without_keys_and_values(layer: Weights) -> Weights:
    """The weights of a layer but for those that make keys and values."""
    return {name: weight for name, weight in layer.items() if name not in KEY_VALUE}


def has_bias(layer: Weights) -> bool:
    """Whether its queries, keys and values have biases."""
    return "k_bias" in layer


def inputs(calibration: Calibration, number: int, bias: bool) -> Halves:
    """A layer's inputs [N, D]; with a bias, a constant feature comes last, whose weight it is."""
    halves = (calibration.fit[number], calibration.test[number])
    return tuple(np.concatenate([x, np.ones((len(x), 1), x.dtype)], axis=1) for x in halves) if bias else halves


def affine(layer: Weights, state: str) -> np.ndarray:
    """Projection of `state` (q, k or v), its bias the last row if it has one: [D or D + 1, heads, d]."""
    matrix = np.asarray(layer[f"{state}_proj"], np.float64)
    bias = layer.get(f"{state}_bias")
    return matrix if bias is None else np.concatenate([matrix, np.asarray(bias, np.float64)[None]])


def as_weights(matrix: np.ndarray, param: str, bias: str | None) -> Weights:
    """A projection made by `affine`, as the weights called `param` and, if there is one, `bias`."""
    return {param: matrix} if bias is None else {param: matrix[:-1], bias: matrix[-1]}


def apply(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """x [N, D] times [D, heads, d] -> [N, heads, d], in float64."""
    return np.tensordot(x.astype(np.float64), matrix, axes=1)


def states(layer: Weights, state: str, calibration: Calibration, number: int) -> Halves:
    """The source's unrotated queries, keys or values of layer `number`: [N, heads, d]."""
    matrix = affine(layer, state)
    return tuple(apply(x, matrix) for x in inputs(calibration, number, has_bias(layer)))


def absorb_in_output(o_proj: np.ndarray, maps: np.ndarray) -> np.ndarray:
    """Output projection [H, d, D] for values that `maps` [G, d', d] turn into the source's: [H, d', D]."""
    return np.einsum("hij,hjd->hid", for_query_heads(maps, len(o_proj)), np.asarray(o_proj, np.float64))


def for_query_heads(per_head: np.ndarray, heads: int) -> np.ndarray:
    """What belongs to key-value heads [G, ...], for the query heads that they serve [H, ...]."""
    return np.repeat(per_head, heads // len(per_head), axis=0)


def feature_rows(x: np.ndarray) -> np.ndarray:
    """[N, ...] -> [N, features]."""
    return x.reshape(len(x), -1)


def as_complex(x: np.ndarray, pair: int) -> np.ndarray:
    """A half-split rotary pair of heads [..., heads, d] as complex numbers [..., heads]: rotations are factors."""
    return x[..., pair] + 1j * x[..., pair + x.shape[-1] // 2]


def main_direction(z: np.ndarray) -> np.ndarray:
    """Unit vector u [n]: z [N, n] is nearest to u times one complex number for each of the N."""
    return np.linalg.eigh(z.T @ z.conj())[1][:, -1]


def matching_pairs(rope: Rope, width: int, narrow: int) -> tuple[np.ndarray, np.ndarray]:
    """The rotary pairs of heads of `width` features that a rotation of `narrow` features stands for.

    Returns: for each of the narrow pairs, the source pair of the nearest frequency, all different; and by how much the
        two frequencies differ. Where that is 0 the pair survives as it is.
    """
    if rope.base is None:
        return np.arange(narrow // 2), np.zeros(narrow // 2)
    source, target = rope.frequencies(width), rope.frequencies(narrow)
    chosen: list[int] = []
    for frequency in target:
        order = np.argsort(np.abs(np.log(source / frequency)), kind="stable")
        chosen.append(next(int(p) for p in order if p not in chosen))
    return np.array(chosen), np.where(np.isclose(source[chosen], target, rtol=1e-4), 0, source[chosen] - target)


def mean_rotation(frequencies: np.ndarray, apart: np.ndarray) -> np.ndarray:
    """Mean of cos(frequency · distance) over pairs of tokens, of which `apart[t]` are a distance t apart.

    The constant that stands best for a rotation which is left out: near 1 for slow pairs, near 0 for fast ones.
    """
    return np.cos(np.outer(frequencies, np.arange(len(apart)))) @ apart / apart.sum()


def loss_without_rotation(x: np.ndarray, imitated: np.ndarray, weight: np.ndarray) -> float:
    """Squared error of features x [N, G, n] of keys that lose their rotation and become `imitated`.

    `weight` is their mean rotation c. Over all distances the mean of |rot(k) - y|² is |c k - y|² + (1 - c²) |k|²: what
    a constant cannot follow counts as lost.
    """
    return float(((weight * x - imitated) ** 2 + (1 - weight**2) * x**2).sum())


def loss_by_other_frequencies(x: np.ndarray, difference: np.ndarray, apart: np.ndarray) -> float:
    """Squared error of rotary pairs x [N, G, n] (see `columns`) that are rotated by frequencies off by `difference`.

    At a distance t they are a turn of difference · t away: |rot(k) - rot'(k)|² = 2 (1 - cos(difference · t)) |k|².
    """
    return float((2 * (1 - np.tile(mean_rotation(difference, apart), 2)) * x**2).sum())


def r_squared_of_keys(keys: np.ndarray, lost: float) -> float:
    """R² of keys [N, G, d] of which the conversion loses so much, as a squared error."""
    return 1 - lost / float(((keys - keys.mean(axis=0)) ** 2).sum())


def columns(pairs: np.ndarray, width: int) -> np.ndarray:
    """Features of half-split rotary pairs in heads of `width`: first ones, then second ones."""
    return np.concatenate([pairs, pairs + width // 2])


def reduced_rank_per_head(x: np.ndarray, y: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Reduced-rank regressions of y [N, G, d] on x [N, D], head by head: [D, G, rank], [G, rank, d]."""
    downs, ups = zip(*(reduced_rank(x, y[:, g], rank) for g in range(y.shape[1])), strict=True)
    return np.stack(downs, axis=1), np.stack(ups)


def shared_projection(x: np.ndarray, wanted: list[np.ndarray], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """One projection of x [D, G, rank] for the states of several layers, and maps [layers, G, rank, d] back to each."""
    heads, width = wanted[0].shape[1:]
    down, up = reduced_rank_per_head(x, np.concatenate(wanted, axis=2), rank)
    return down, np.moveaxis(up.reshape(heads, rank, len(wanted), width), 2, 0)


def mapped(x: np.ndarray, maps: np.ndarray) -> np.ndarray:
    """[N, G, rank] times [G, rank, d]."""
    return np.einsum("ngr,grd->ngd", x, maps)
