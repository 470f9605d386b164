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

from kvjax.attention.partials import MASKED
from kvjax.compaction.batching import over_heads
from kvjax.compaction.fitting import biased, features
from kvjax.compaction.orthogonal import dot, inverse_of_lower, orthonormal_to

OMP_WEIGHTS = (1e-12, 2.718281828459045**7)
"""Between which weights of OMP are clamped."""
SNAPKV_WINDOW = 32
"""Tokens at the end of a context whose queries choose, and which are kept."""
SNAPKV_POOL = 7
"""Neighbours, a token among them, of which it takes the largest attention."""


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
    """Chosen tokens of one head, all but the last in a fit: `rows = lower @ basis`."""

    indices: Array
    """[t] int32, -1 where none was left."""
    taken: Array
    """[T] bool."""
    rows: Array
    """[m, N] columns of Φ that were chosen last."""
    basis: Array
    """[t, N] orthonormal rows; 0 for those yet to be chosen, and for columns that depend on those before."""
    lower: Array
    """[t, t] lower triangular; 1 on the diagonal where the basis is 0."""
    inverse: Array
    """[t, t], of `lower`."""
    projection: Array
    """[t], of the target on the basis."""
    residual: Array
    """[N]."""


def _pursue(scores: Array, bias: Array, counted: Array, budget: int, first: int, then: int) -> Array:
    """The choice of one head: `first` tokens, then `then` at a time."""
    valid = bias > MASKED / 2
    columns, target = features(jnp.where(valid, scores, MASKED), biased(scores, bias), counted)
    rounds = -(-(budget - first) // then)
    room = first + rounds * then
    zeros = jnp.zeros((room, len(target)))
    state = _Pursuit(jnp.full(room, -1, jnp.int32), ~valid, zeros[:0], zeros, jnp.eye(room), jnp.eye(room),
                     zeros[:, 0], target)
    state = _chosen(state, columns, 0, first)
    if rounds > 0:
        state = _chosen(_fitted(state, target, 0), columns, first, then)
        # What was chosen goes from round to round: a round that chose, then fitted, would read a column again for
        # every row of the basis (XLA for CPUs fuses reading with the products).
        step = lambda i, s: _chosen(_fitted(s, target, first + (i - 1) * then), columns, first + i * then, then)
        state = jax.lax.fori_loop(1, rounds, step, state)
    return state.indices[:budget]


def _chosen(state: _Pursuit, columns: Array, start: Array | int, number: int) -> _Pursuit:
    """With the `number` tokens of the largest correlation, from `start` on in order of choice."""
    found, picks = jax.lax.top_k(jnp.where(state.taken, -jnp.inf, dot(state.residual, columns)), number)
    there = found > -jnp.inf
    indices = jax.lax.dynamic_update_slice_in_dim(state.indices, jnp.where(there, picks, -1), start, 0)
    return state._replace(indices=indices, taken=state.taken.at[picks].set(True),
                          rows=jnp.where(there, columns[:, picks], 0).T)


def _fitted(state: _Pursuit, target: Array, start: Array | int) -> _Pursuit:
    """With weights of all tokens so far, those chosen last from `start` on, and the residual that they leave."""
    new, coefficients, within = orthonormal_to(state.basis, state.rows)
    within += jnp.diag(jnp.where(jnp.diagonal(within) == 0, 1, 0))  # columns that depend on others weigh nothing
    within_inverse = inverse_of_lower(within)
    put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
    put_within = lambda rows, x: jax.lax.dynamic_update_slice(rows, x, (start, start))
    lower = put_within(put(state.lower, coefficients), within)
    inverse = put_within(put(state.inverse, -dot(within_inverse, dot(coefficients, state.inverse))), within_inverse)
    basis, projection = put(state.basis, new), put(state.projection, dot(new, target))
    weights = jnp.clip(dot(projection, inverse), *OMP_WEIGHTS)
    weights = jnp.where(jnp.arange(len(weights)) < start + len(new), weights, 0)
    residual = target - dot(dot(weights, lower), basis)
    return state._replace(basis=basis, lower=lower, inverse=inverse, projection=projection, residual=residual)
