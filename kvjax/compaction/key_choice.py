"""Which tokens are kept of a cache's: Attention Matching's choices (its step 1), and baselines.

Every function returns int32 indices [..., t] of tokens in the order of choice: most wanted first, so that the first c
are the choice of a head with c slots; -1 where no token is left. Of equally wanted tokens the first wins.

`logits` [..., N, T] are scaled scores of N queries (of all heads that share the keys) and T tokens with their biases,
and `MASKED` for slots that hold no token (`kvjax.compaction.fitting.biased`); `counted` [..., N] bool are the queries
that count, by default all. Leading axes `...` broadcast.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular

from kvjax.attention.partials import MASKED
from kvjax.compaction.batching import over_heads
from kvjax.compaction.fitting import HIGHEST, biased, features

OMP_WEIGHTS = (1e-12, 2.718281828459045**7)
"""Between which weights of OMP are clamped."""
SNAPKV_WINDOW = 32
"""Tokens at the end of a context whose queries choose, and which are kept."""
SNAPKV_POOL = 7
"""Neighbours, a token among them, of which it takes the largest attention."""
DEPENDENT = 1e-5
"""A column of which less is left, once chosen ones are taken out of it, depends on them."""


def highest_attention(logits: Array, budget: int, counted: Array | None = None) -> Array:
    """Tokens of the largest RMS attention, `sqrt(mean_q softmax²)`."""
    attention, counted = _attention(logits, counted)
    return _largest(jnp.sum(attention**2, axis=-2), logits, budget)


def kvzip(logits: Array, budget: int, counted: Array | None = None) -> Array:
    """Tokens of the largest attention by any query (after KVzip, whose queries are those of a repeated context)."""
    return _largest(_attention(logits, counted)[0].max(axis=-2), logits, budget)


def snapkv(logits: Array, budget: int, counted: Array | None = None, window: int = SNAPKV_WINDOW,
           pool: int = SNAPKV_POOL) -> Array:
    """The last `window` tokens, newest first, then those of the largest pooled attention (after SnapKV).

    The queries must be those of the context's last `window` tokens: it is their mean attention to earlier tokens that
    chooses, each token taking the largest of the `pool` around it.
    """
    age = _age(logits)
    mean = jnp.where(age < window, 0, _attention(logits, counted)[0].sum(axis=-2))
    around = ((pool - 1) // 2, pool // 2)
    pooled = jax.lax.reduce_window(mean, -jnp.inf, jax.lax.max, (1,) * (mean.ndim - 1) + (pool,), (1,) * mean.ndim,
                                   ((0, 0),) * (mean.ndim - 1) + (around,))
    number = logits.shape[-2]
    return _largest(jnp.where(age < window, 2.0 * number + window - age, pooled), logits, budget)


def recent(logits: Array, budget: int, counted: Array | None = None) -> Array:
    """The last tokens, newest first."""
    return _largest(-_age(logits).astype(jnp.float32), logits, budget)


def random(logits: Array, budget: int, key: Array) -> Array:
    """Any tokens: each head draws its own."""
    return _largest(jax.random.uniform(key, (*logits.shape[:-2], logits.shape[-1])), logits, budget)


def omp(scores: Array, budget: int, bias: Array | None = None, counted: Array | None = None, per_round: int = 1,
        refit_every: int = 1) -> Array:
    """Orthogonal matching pursuit on `Φ = exp(score - row's largest logit)` towards the mass `Φ exp(bias)` of all.

    Each round takes the `per_round` tokens of the largest correlation `Φᵀr` with the residual r. After the first
    round, and after every `refit_every`-th from there on, weights of all chosen tokens are fitted anew, clamped to
    `OMP_WEIGHTS`, and the residual is what they leave. Otherwise it stays, so rounds between two fits take the next
    largest.

    The fit is an orthogonal basis of the chosen columns, which grows with them (twice orthogonalised): the condition
    number is never squared, and float32 chooses what float64 does.

    Args:
        scores: [..., N, T] scaled scores without biases.
        bias: [..., T] biases that tokens have, part of the target's mass but not of their columns; `MASKED` for slots
            that hold none. By default all 0.
    """
    bias = jnp.zeros(scores.shape[-1], jnp.float32) if bias is None else bias
    counted = jnp.ones(scores.shape[-2], bool) if counted is None else counted
    first = min(per_round, budget)
    return over_heads(_pursue, (2, 1, 1), scores, bias, counted, elements=scores.shape[-2] * scores.shape[-1],
                      budget=budget, first=first, then=max(1, min(per_round * refit_every, budget - first)))


omp_fast = partial(omp, per_round=4, refit_every=2)
"""OMP that takes four tokens a round, and fits weights after rounds 1, 3, 5, …"""


def _attention(logits: Array, counted: Array | None) -> tuple[Array, Array]:
    """Attention [..., N, T], 0 by queries that do not count; and those that do, [..., N]."""
    counted = jnp.ones(logits.shape[-2], bool) if counted is None else counted
    return jnp.where(counted[..., None], jax.nn.softmax(logits, axis=-1), 0), counted


def _valid(logits: Array) -> Array:
    """Slots [..., T] that hold a token."""
    return (logits > MASKED / 2).any(axis=-2)


def _age(logits: Array) -> Array:
    """How many tokens follow each, [..., T]."""
    valid = _valid(logits)
    return jnp.cumsum(valid[..., ::-1], axis=-1)[..., ::-1] - valid


def _largest(wanted: Array, logits: Array, budget: int) -> Array:
    """Indices [..., budget] of the tokens that are wanted most."""
    found, indices = jax.lax.top_k(jnp.where(_valid(logits), wanted, -jnp.inf), budget)
    return jnp.where(found > -jnp.inf, indices, -1)


class _Pursuit(NamedTuple):
    """Chosen tokens of one head: `columns = lower @ basis`."""

    indices: Array
    """[t] int32, -1 where none was left."""
    taken: Array
    """[T] bool."""
    basis: Array
    """[t, N] orthonormal rows; 0 for those yet to be chosen, and for columns that depend on those before."""
    lower: Array
    """[t, t] lower triangular; 1 on the diagonal where the basis is 0."""
    projection: Array
    """[t], of the target on the basis."""
    residual: Array
    """[N]."""


def _pursue(scores: Array, bias: Array, counted: Array, budget: int, first: int, then: int) -> Array:
    """The choice of one head: `first` tokens, then `then` at a time."""
    valid = bias > MASKED / 2
    columns, target = features(jnp.where(valid, scores, MASKED), biased(scores, bias), counted)
    rows = columns.T
    room = first + -(-(budget - first) // then) * then
    zeros = jnp.zeros((room, len(target)))
    state = _Pursuit(jnp.full(room, -1, jnp.int32), ~valid, zeros, jnp.eye(room), zeros[:, 0], target)
    state = _take(state, rows, target, 0, first)
    rounds = (room - first) // then
    state = jax.lax.fori_loop(0, rounds, lambda i, s: _take(s, rows, target, first + i * then, then), state)
    return state.indices[:budget]


def _take(state: _Pursuit, rows: Array, target: Array, start: Array | int, number: int) -> _Pursuit:
    """Chooses `number` tokens, and fits the weights of all."""
    correlation = jnp.where(state.taken, -jnp.inf, _dot(rows, state.residual))
    found, picks = jax.lax.top_k(correlation, number)
    there = found > -jnp.inf
    new, coefficients, within = _orthonormal_to(state.basis, jnp.where(there[:, None], rows[picks], 0))
    put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
    lower = jax.lax.dynamic_update_slice(put(state.lower, coefficients), within, (start, start))
    basis, projection = put(state.basis, new), put(state.projection, _dot(new, target))
    weights = jnp.clip(solve_triangular(lower, projection, trans=1, lower=True), *OMP_WEIGHTS)
    weights = jnp.where(jnp.arange(len(weights)) < start + number, weights, 0)
    residual = target - _dot(_dot(weights, lower), basis)
    indices = put(state.indices, jnp.where(there, picks, -1))
    return _Pursuit(indices, state.taken.at[picks].set(True), basis, lower, projection, residual)


def _orthonormal_to(basis: Array, rows: Array) -> tuple[Array, Array, Array]:
    """`rows [m, N] = coefficients [m, t] @ basis [t, N] + within [m, m] @ new [m, N]`, `new` orthonormal to `basis`.

    Rows that depend on the basis, or on rows before them, have 0 in `new` and 1 on the diagonal of `within`.
    """
    least = DEPENDENT * jnp.linalg.norm(rows, axis=1)
    coefficients = _dot(rows, basis.T)
    new, within = _orthonormal(rows - _dot(coefficients, basis), least)
    again = _dot(new, basis.T)  # the first time leaves rounding errors of the size of `rows`
    new, within_again = _orthonormal(new - _dot(again, basis), jnp.full(len(rows), 0.5))
    coefficients, within = coefficients + _dot(within, again), _dot(within, within_again)
    diagonal = jnp.diagonal(within)
    return new, coefficients, within + jnp.diag(jnp.where(diagonal == 0, 1, 0))


def _orthonormal(rows: Array, least: Array) -> tuple[Array, Array]:
    """`rows [m, N] = lower [m, m] @ new [m, N]`; rows of which no more than `least` [m] is left are 0 in `new`."""
    new, lower = jnp.zeros_like(rows), jnp.zeros((len(rows), len(rows)))
    for i in range(len(rows)):
        shares = _dot(new, rows[i])
        rest = rows[i] - _dot(shares, new)
        size = jnp.linalg.norm(rest)
        size = jnp.where(size > least[i], size, 0)
        new = new.at[i].set(jnp.where(size > 0, rest / jnp.where(size > 0, size, 1), 0))
        lower = lower.at[i].set(shares.at[i].set(size))
    return new, lower


_dot = partial(jnp.matmul, precision=HIGHEST)
