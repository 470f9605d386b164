"""MHA or GQA -> KPA or TPA, by alternating least squares; it may be poor.

With both factors linear in the input, a product is even in it, while keys and values of the source are linear. What
helps is that inputs of real models have directions that are nearly constant: one factor can hold on to these. The first
factors are such constants.
"""

from __future__ import annotations

import numpy as np

from kvjax.attention import GroupedQuery, Kronecker
from kvjax.attention.rotary import Rope
from kvjax.config import require
from kvjax.convert.uptrain.heads import (
    Weights,
    affine,
    columns,
    for_query_heads,
    mean_rotation,
    refuse_biases_and_norms,
    states,
)
from kvjax.convert.uptrain.regression import Calibration, Fit, least_squares, r_squared

ROUNDS = 8
"""Alternations between the factors."""
RIDGE = 1e-4


def check_kronecker(source: GroupedQuery, target: Kronecker) -> None:
    """Raises ConfigError if `to_kronecker` cannot work for these sizes."""
    refuse_biases_and_norms(source, "Kronecker factors")
    heads, width = source.heads, source.head_dim
    require((target.heads, target.head_dim) == (heads, width), f"the target has {target.heads} heads of "
            f"{target.head_dim}, the source {heads} of {width}: choose h1 h2 = {heads} and d1 d2 = {width}")


def to_kronecker(target: Kronecker, layers: list[Weights], calibration: Calibration,
                 rope: Rope) -> tuple[list[Weights], list[Fit], np.ndarray]:
    """Weights, fits, and the source's rotary pairs that survive.

    Rows of B have d2 / 2 frequencies, each for d1 of the source's pairs: the fastest of these keeps its own.
    """
    width = target.head_dim
    own, order = rope.frequencies(width), _features(target, width)
    turned = np.repeat(rope.frequencies(target.d2), target.d1)
    drift = mean_rotation(own - turned, calibration.apart)
    made = [_layer(target, layer, calibration, number, order, drift) for number, layer in enumerate(layers)]
    exact = np.flatnonzero(np.isclose(own, turned, rtol=1e-4))
    return [weights for weights, _ in made], [fit for _, fits in made for fit in fits], exact


def _features(target: Kronecker, width: int) -> np.ndarray:
    """Which source feature lies at (j1, j2): pair p of the source is pair p // d1 of row p % d1. [d1, d2]."""
    pairs = np.arange(width // 2).reshape(target.d2 // 2, target.d1).T
    return np.stack([columns(row, width) for row in pairs])


def _layer(target: Kronecker, layer: Weights, calibration: Calibration, number: int, order: np.ndarray,
           drift: np.ndarray) -> tuple[Weights, list[Fit]]:
    x, test_x = calibration.fit[number], calibration.test[number]
    weights, fits = {"o_proj": np.asarray(layer["o_proj"], np.float64)}, []
    plain = np.arange(target.head_dim).reshape(target.d1, target.d2)
    for state, rank, places in (("k", target.k_rank, order), ("v", target.v_rank, plain)):
        truth = [_cells(target, for_heads(y, target.heads), places) for y in states(layer, state, calibration, number)]
        a, b = alternate(x, truth[0], rank)
        weights |= {f"{state}_a": a, f"{state}_b": b}
        fits.append(Fit(number, state, r_squared(truth[1], product(test_x, a, b))))
    # A pair whose rotation drifts from the source's by some angle a token is weighed by that drift's mean.
    query = affine(layer, "q") * np.tile(drift, 2)
    if target.dense_query:
        return weights | {"q_proj": query[..., order.ravel()]}, fits
    queries = _cells(target, np.tensordot(x.astype(np.float64), query, axes=1), order)
    a, b = alternate(x, queries, target.q_rank)
    return weights | {"q_a": a, "q_b": b}, fits


def for_heads(x: np.ndarray, heads: int) -> np.ndarray:
    """[N, G, d] -> [N, H, d]."""
    return np.swapaxes(for_query_heads(np.swapaxes(x, 0, 1), heads), 0, 1)


def _cells(target: Kronecker, x: np.ndarray, places: np.ndarray) -> np.ndarray:
    """[N, H, d] -> [N, h1, h2, d1, d2], feature (j1, j2) from `places`."""
    return x.reshape(len(x), target.h1, target.h2, -1)[..., places]


def product(x: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Mean over ranks of (x a) (x) (x b): [N, h1, h2, d1, d2]."""
    left, right = (np.tensordot(x.astype(np.float64), factor, axes=1) for factor in (a, b))
    return np.einsum("nrhi,nrkj->nhkij", left, right, optimize=True) / a.shape[1]


def alternate(x: np.ndarray, target: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Factor projections a [D, rank, h1, d1], b [D, rank, h2, d2] for target [N, h1, h2, d1, d2].

    Each half step solves one least-squares problem, so that the error never grows.
    """
    x = x.astype(np.float64)
    constant = least_squares(x, np.ones((len(x), 1)))[:, 0]
    shape = rank, target.shape[1], target.shape[3]
    a = np.multiply.outer(constant, np.random.default_rng(0).normal(size=shape))
    for _ in range(ROUNDS):
        b = _other_factor(x, np.tensordot(x, a, axes=1), target)
        a = _other_factor(x, np.tensordot(x, b, axes=1), target.transpose(0, 2, 1, 4, 3))
    return a, b


def _other_factor(x: np.ndarray, known: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Best b [D, R, h2, d2] for target [N, h1, h2, d1, d2] given the other factor's values [N, R, h1, d1]."""
    rank, width = known.shape[1], x.shape[1]
    overlap = np.einsum("nrhi,nshi->nrs", known, known) / rank**2
    gram = np.empty((rank, width, rank, width))
    for r in range(rank):
        for s in range(r + 1):
            gram[r, :, s] = x.T @ (x * overlap[:, r, s, None])
            gram[s, :, r] = gram[r, :, s]
    gram = gram.reshape(rank * width, rank * width)
    gram += RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram))
    wanted = np.einsum("nrhi,nhkij->nrkj", known, target, optimize=True) / rank
    right = np.tensordot(x, wanted, axes=(0, 0))
    solved = np.linalg.solve(gram, np.moveaxis(right, 0, 1).reshape(rank * width, -1))
    return np.moveaxis(solved.reshape(rank, width, *target.shape[2::2]), 0, 1)
