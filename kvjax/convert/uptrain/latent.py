"""MHA or GQA -> MLA: one latent from which the keys and values of all heads are told, by reduced-rank regression.

Rotation: for each pair of the shared rotated key, the source pair of that frequency; of all heads' keys in that pair,
as complex numbers, the one direction that holds most energy is kept (a complex factor commutes with the rotation, so
that each query head takes its share back exactly). What is left of keys is not rotated any more, weighed by the mean
rotation of each pair, and goes into the latent together with the values.
"""

from __future__ import annotations

import numpy as np

from kvjax.attention import GroupedQuery, Latent
from kvjax.attention.rotary import Rope
from kvjax.config import require
from kvjax.convert.uptrain.heads import (
    Weights,
    absorb_in_output,
    affine,
    as_complex,
    columns,
    feature_rows,
    for_query_heads,
    loss_by_other_frequencies,
    loss_without_rotation,
    main_direction,
    matching_pairs,
    mean_rotation,
    r_squared_of_keys,
    refuse_biases_and_norms,
    states,
)
from kvjax.convert.uptrain.regression import Calibration, Fit, least_squares, r_squared, reduced_rank


def check_latent(source: GroupedQuery, target: Latent) -> None:
    """Raises ConfigError if `to_latent` cannot work for these sizes."""
    refuse_biases_and_norms(source, "a latent")
    require(target.query_latent_dim is None, f"query_latent_dim is {target.query_latent_dim}: conversions make queries "
            "from the input; set it to None")
    require(target.heads == source.heads, f"the target has {target.heads} heads, the source {source.heads}")
    require(target.rope_dim <= source.head_dim,
            f"rope_dim {target.rope_dim} exceeds the source's head width {source.head_dim}: choose less")


def to_latent(target: Latent, layers: list[Weights], calibration: Calibration, rope: Rope,
              norm_eps: float) -> tuple[list[Weights], list[Fit], np.ndarray]:
    """Weights, fits, and the source's rotary pairs that survive (one direction of all heads each)."""
    pairs, difference = matching_pairs(rope, layers[0]["k_proj"].shape[-1], target.rope_dim)
    made = [_layer(target, layer, calibration, number, rope, pairs, difference, norm_eps)
            for number, layer in enumerate(layers)]
    return [weights for weights, _ in made], [fit for _, fits in made for fit in fits], pairs[difference == 0]


def _layer(target: Latent, layer: Weights, calibration: Calibration, number: int, rope: Rope, pairs: np.ndarray,
           difference: np.ndarray, norm_eps: float) -> tuple[Weights, list[Fit]]:
    keys, values = (states(layer, state, calibration, number) for state in ("k", "v"))
    heads, width = layer["q_proj"].shape[1:]
    shares = [main_direction(as_complex(keys[0], pair)) for pair in pairs]
    weight = np.tile(mean_rotation(rope.frequencies(width), calibration.apart), 2)
    told = [_told_by_rotation(half, pairs, shares) for half in keys]
    left = [half - part for half, part in zip(keys, told, strict=True)]
    bases = _bases(weight * left[0], target.nope_dim), _bases(values[0], target.value_dim)
    wanted = [_in_basis(x, basis) for x, basis in zip((weight * left[0], values[0]), bases, strict=True)]
    down, (k_up, v_up) = _latent_maps(target, calibration.fit[number], wanted, norm_eps)
    latent = _normed(calibration.test[number] @ down, norm_eps)
    made = [np.einsum("nc,cgf,gdf->ngd", latent, up, basis, optimize=True)
            for up, basis in zip((k_up, v_up), bases, strict=True)]
    lost = loss_without_rotation(left[1], made[0], weight)
    lost += loss_by_other_frequencies(told[1][..., columns(pairs, width)], difference, calibration.apart)
    fits = [Fit(number, "k", r_squared_of_keys(keys[1], lost)), Fit(number, "v", r_squared(values[1], made[1]))]
    expanded = lambda up: np.moveaxis(for_query_heads(np.moveaxis(up, 1, 0), heads), 0, 1)
    scale = (target.score_dim / width) ** 0.5 / rope.score_factor
    # Scores of what is not rotated any more are given the factor that rotations bring.
    key_basis = rope.rotation_factor**2 * bases[0]
    return {
        "q_proj": scale * _queries(affine(layer, "q"), key_basis, pairs, shares, target.interleaved),
        "kv_down": down, "kv_norm": np.ones(target.latent_dim), "k_up": expanded(k_up), "v_up": expanded(v_up),
        "k_rope": _rotated_key(affine(layer, "k"), pairs, shares, target.interleaved),
        "o_proj": absorb_in_output(layer["o_proj"], np.swapaxes(bases[1], 1, 2)),
    }, fits


def _in_basis(x: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """x [N, G, d] by the directions of `basis` [G, d, size]: [N, G, size]."""
    return np.einsum("ngd,gdf->ngf", x, basis)


def _told_by_rotation(keys: np.ndarray, pairs: np.ndarray, shares: list[np.ndarray]) -> np.ndarray:
    """The part of keys [N, G, d] that the shared rotated key stands for."""
    told = np.zeros_like(keys)
    for pair, share in zip(pairs, shares, strict=True):
        z = np.outer(as_complex(keys, pair) @ share.conj(), share)
        told[..., pair], told[..., pair + keys.shape[-1] // 2] = z.real, z.imag
    return told


def _bases(x: np.ndarray, size: int) -> np.ndarray:
    """[G, d, size]: for each head of x [N, G, d] its directions of most energy; beyond d, zeros."""
    vectors = np.linalg.eigh(np.einsum("ngd,nge->gde", x, x))[1][..., ::-1][..., :size]
    return np.pad(vectors, ((0, 0), (0, 0), (0, size - vectors.shape[-1])))


def _latent_maps(target: Latent, x: np.ndarray, wanted: list[np.ndarray],
                 norm_eps: float) -> tuple[np.ndarray, list[np.ndarray]]:
    """The latent's projection [D, dc], and maps [dc, G, features] from the normed latent to each of `wanted`.

    Keys and values weigh the same. Maps are fitted after the norm, whose factor differs from token to token.
    """
    balanced = [feature_rows(y) / max(np.linalg.norm(y), 1e-9) for y in wanted]
    down, _ = reduced_rank(x, np.concatenate(balanced, axis=1), target.latent_dim)
    down /= np.sqrt(((x @ down) ** 2).mean())
    latent = _normed(x @ down, norm_eps)
    return down, [least_squares(latent, feature_rows(y)).reshape(target.latent_dim, *y.shape[1:]) for y in wanted]


def _normed(latent: np.ndarray, eps: float) -> np.ndarray:
    return latent / np.sqrt((latent**2).mean(axis=-1, keepdims=True) + eps)


def _queries(q: np.ndarray, key_basis: np.ndarray, pairs: np.ndarray, shares: list[np.ndarray],
             interleaved: bool) -> np.ndarray:
    """[D, H, dn + dr]: features that meet the latent's keys, then those that meet the rotated one."""
    heads = q.shape[1]
    nope = np.einsum("dhi,hij->dhj", q, for_query_heads(key_basis, heads))
    turned = [as_complex(q, pair) * for_query_heads(share.conj(), heads)
              for pair, share in zip(pairs, shares, strict=True)]
    return np.concatenate([nope, _real(turned, interleaved)], axis=-1)


def _rotated_key(k: np.ndarray, pairs: np.ndarray, shares: list[np.ndarray], interleaved: bool) -> np.ndarray:
    """[D, dr]."""
    return _real([as_complex(k, pair) @ share.conj() for pair, share in zip(pairs, shares, strict=True)], interleaved)


def _real(numbers: list[np.ndarray], interleaved: bool) -> np.ndarray:
    """Complex pairs as features on a last axis: halves, or neighbours."""
    parts = np.stack([[z.real for z in numbers], [z.imag for z in numbers]])
    order = (1, 0) if interleaved else (0, 1)
    return np.moveaxis(parts.transpose(*order, *range(2, parts.ndim)).reshape(-1, *parts.shape[2:]), 0, -1)
