"""Least-squares fits of biases and values to attention (Attention Matching, steps 2 and 3).

Everything is float32. N queries, t kept tokens of T, width d, value width v; `scale` is the factor on scores, by
default d ** -0.5. Leading axes `...` (layers, sequences, KV heads) broadcast.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.attention.partials import MASKED
from kvjax.compaction.batching import over_heads
from kvjax.compaction.orthogonal import dot, orthonormal_basis

HIGHEST = jax.lax.Precision.HIGHEST
CUTOFF = 2e-6
"""Singular values below this share of the largest are rounding errors: about 16 times the spacing of float32."""


@jax.jit
def attention_scores(queries: Array, keys: Array, scale: float | None = None) -> Array:
    """Scaled float32 scores [..., N, T] of queries [..., N, d] and keys [..., T, d], without biases."""
    scale = keys.shape[-1] ** -0.5 if scale is None else scale
    queries, keys = jnp.asarray(queries, jnp.float32), jnp.asarray(keys, jnp.float32)
    return jnp.einsum("...nd,...td->...nt", queries, keys, precision=HIGHEST) * scale


def biased(scores: Array, bias: Array | None) -> Array:
    """Logits [..., N, T]: scores and each token's bias [..., T]; tokens whose bias is MASKED are `MASKED` exactly."""
    if bias is None:
        return scores
    bias = bias.astype(jnp.float32)[..., None, :]
    return jnp.where(bias > MASKED / 2, scores + bias, MASKED)


@jax.jit
def attention_outputs(queries: Array, keys: Array, values: Array, bias: Array | None = None,
                      scale: float | None = None) -> Array:
    """Outputs [..., N, v] of queries [..., N, d] over keys [..., T, d], values [..., T, v] and biases [..., T]."""
    return attended(biased(attention_scores(queries, keys, scale), bias), values)


def attended(logits: Array, values: Array) -> Array:
    """Outputs [..., N, v] of logits [..., N, T] over values [..., T, v]."""
    terms = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
    sums = jnp.einsum("...nt,...tv->...nv", terms, jnp.asarray(values, jnp.float32), precision=HIGHEST)
    return sums / terms.sum(axis=-1, keepdims=True)  # divided last: one pass over N times T less


def fit_bias(scores: Array, logits: Array, low: float, high: float, steps: int = 0, counted: Array | None = None,
             used: Array | None = None) -> Array:
    """Biases that give kept tokens the attention mass of all: `min ||Φ_S w - Φ1||²`, w in [low, high], β = log w.

    Unconstrained least squares, clamped; then projected-gradient steps of size 1 / ||Φ_S||₂².

    Args:
        scores: [..., N, t] scaled scores of kept tokens, without their biases: w takes the place of exp(bias).
        logits: [..., N, T] scaled scores of all tokens with their biases, `MASKED` for those that take no part.
        steps: projected-gradient steps.
        counted: [..., N] bool, queries that count; by default all.
        used: [..., t] bool, slots that hold a token; by default all. The others' bias is `MASKED`.
    Returns: [..., t] float32.
    """
    used = jnp.ones(scores.shape[-1], bool) if used is None else used
    counted = jnp.ones(scores.shape[-2], bool) if counted is None else counted
    return over_heads(_head_bias, (2, 2, 1, 1), scores, logits, counted, used, elements=logits.shape[-2]
                      * logits.shape[-1], low=float(low), high=float(high), steps=steps)


def fit_values(logits: Array, outputs: Array, counted: Array | None = None) -> Array:
    """Values X [..., t, v] of least norm that minimise `||softmax(logits) X - outputs||²`.

    Args:
        logits: [..., N, t] scaled scores of kept tokens with their biases, `MASKED` for slots that hold none; the
            values of those are 0.
        outputs: [..., N, v] attention over all tokens.
        counted: [..., N] bool, queries that count; by default all.
    """
    counted = jnp.ones(logits.shape[-2], bool) if counted is None else counted
    return over_heads(_head_values, (2, 2, 1), logits, outputs, counted, elements=logits.shape[-2] * logits.shape[-1])


def least_squares(matrix: Array, target: Array, steps: int = 0, low: float = -jnp.inf,
                  high: float = jnp.inf) -> Array:
    """Solution [t, k] of least norm of `min ||matrix [N, t] X - target [N, k]||²`, of one problem.

    With `low` and `high` the solution is clamped, then improved by `steps` projected-gradient steps of size
    1 / ||matrix||₂². Orthogonal transformations throughout: the condition number is never squared.
    """
    lower, basis = orthonormal_basis(matrix.T)
    factor, target = lower.T, dot(basis, target)
    left, sizes, right = jnp.linalg.svd(factor, full_matrices=False)
    kept = sizes > CUTOFF * sizes[0]
    inverse = jnp.where(kept, 1 / jnp.where(kept, sizes, 1), 0)
    solution = jnp.clip(dot(right.T, inverse[:, None] * dot(left.T, target)), low, high)
    for _ in range(steps):
        gradient = dot(factor.T, dot(factor, solution) - target)
        solution = jnp.clip(solution - gradient / jnp.maximum(sizes[0], jnp.finfo(jnp.float32).tiny) ** 2, low, high)
    return solution


def features(scores: Array, logits: Array, counted: Array) -> tuple[Array, Array]:
    """Φ [N, t] = exp(score - row's largest logit), and the mass Φ1 [N] of all logits; 0 for queries that don't count.

    The largest logit, biases included, is the unit of its row: every row's target is between 1 and T.
    """
    largest = logits.max(axis=-1, keepdims=True)
    mass = jnp.exp(logits - largest).sum(axis=-1)
    return jnp.where(counted[:, None], jnp.exp(scores - largest), 0), jnp.where(counted, mass, 0)


def _head_bias(scores, logits, counted, used, low, high, steps) -> Array:
    columns, mass = features(jnp.where(used, scores, MASKED), logits, counted)
    weights = least_squares(columns, mass[:, None], steps, low, high)[:, 0]
    return jnp.where(used, jnp.log(weights), MASKED)


def _head_values(logits, outputs, counted) -> Array:
    weights = jnp.where(counted[:, None], jax.nn.softmax(logits, axis=-1), 0)
    return least_squares(weights, jnp.where(counted[:, None], outputs.astype(jnp.float32), 0))
