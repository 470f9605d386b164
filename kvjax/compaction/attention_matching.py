"""Attention Matching: T keys and values of a KV head replaced by t of its keys, a bias for each, and fitted values.

Three steps: tokens are chosen (`key_choice`), biases give them the attention mass of all tokens, values the outputs of
all (`fitting`). Baselines choose tokens and copy their values.

Functions of arrays alone, float32, batched over leading axes `...` (layers, sequences, KV heads): N reference queries
(after RoPE; heads that share a KV head pooled), T tokens, t slots, width d, value width v.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.attention.partials import MASKED
from kvjax.compaction import key_choice
from kvjax.compaction.batching import over_heads
from kvjax.compaction.checks import check, check_finite
from kvjax.compaction.fitting import attended, attention_outputs, attention_scores, biased, fit_bias, fit_values

__all__ = ["FITTED", "METHODS", "Compacted", "Fit", "Method", "attention_outputs", "choose", "compact", "find_method",
           "fit_bias", "fit_bias_of", "fit_values"]


class Compacted(NamedTuple):
    """What is left of a head's tokens, in order of choice."""

    indices: Array
    """[..., t] int32, -1 for slots that hold no token."""
    keys: Array
    """[..., t, d], as they were; 0 where there is no token."""
    bias: Array
    """[..., t] float32, `MASKED` where there is no token."""
    values: Array
    """[..., t, v] float32 if fitted, else as they were; 0 where there is no token."""


@dataclass(frozen=True)
class Fit:
    """How biases are fitted: bounds of their exponentials, and projected-gradient steps after clamping."""

    low: float
    high: float
    steps: int = 0


@dataclass(frozen=True)
class Method:
    """A way to compact a head."""

    choice: Callable[..., Array]
    """Of `kvjax.compaction.key_choice`."""
    fit: Fit | None = None
    """None: tokens keep their biases and values."""
    pursuit: bool = False
    """The choice takes scores and biases, not logits."""
    random: bool = False
    """The choice takes a random key, and no queries."""


OF_HIGHEST, OF_OMP = Fit(float(np.exp(-3)), float(np.exp(3)), steps=2), Fit(*key_choice.OMP_WEIGHTS)
METHODS = {
    "am_highest": Method(key_choice.highest_attention, OF_HIGHEST),
    "am_omp": Method(key_choice.omp, OF_OMP, pursuit=True),
    "am_omp_fast": Method(key_choice.omp_fast, OF_OMP, pursuit=True),
    "recent": Method(key_choice.recent),
    "snapkv": Method(key_choice.snapkv),
    "kvzip": Method(key_choice.kvzip),
    "random": Method(key_choice.random, random=True),
}
"""Methods by name: three of Attention Matching, and baselines."""
FITTED = tuple(name for name, method in METHODS.items() if method.fit)
"""Methods that fit biases and values."""


def find_method(name: str) -> Method:
    """The method of this name. Raises ValueError, with the nearest name, if there is none."""
    if name not in METHODS:
        near = difflib.get_close_matches(str(name), METHODS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown method {name!r}: choose one of {', '.join(METHODS)}{hint}")
    return METHODS[name]


def compact(method: str, queries: Array, keys: Array, values: Array, budget: int, *, scale: float | None = None,
            bias: Array | None = None, counted: Array | None = None, counts: Array | None = None,
            key: Array | None = None) -> Compacted:
    """Chooses `budget` tokens of every head, and fits biases and values if the method does.

    Args:
        method: one of `METHODS`.
        queries: [..., N, d] reference queries; for "snapkv" those of the context's last tokens (`SNAPKV_WINDOW`).
        keys, values: [..., T, d] and [..., T, v], any floating type.
        budget: slots t of every head.
        scale: factor on scores, by default d ** -0.5.
        bias: [..., T] biases that tokens have from a compaction before, 0 for ordinary tokens, `MASKED` for slots
            that hold none; by default all 0. They are part of the mass and the outputs that are matched, and fitted
            biases take their place.
        counted: [..., N] bool, queries that count; by default all.
        counts: int [...], slots that each head uses, at most `budget`; by default all. Heads with fewer tokens than
            slots use as many as they have tokens.
        key: random key of method "random".

    Raises ValueError if the method is unknown, an array is not finite, the budget is not between 1 and T, counts are
    not between 1 and the budget, or no query of a head counts. Under `jax.jit`, values are not looked at.
    """
    found = find_method(method)
    queries, keys, values = (jnp.asarray(x) for x in (queries, keys, values))
    bias = jnp.zeros(keys.shape[-2], jnp.float32) if bias is None else jnp.asarray(bias, jnp.float32)
    counted = jnp.ones(queries.shape[-2], bool) if counted is None else jnp.asarray(counted)
    counts = jnp.asarray(budget if counts is None else counts)
    _check_slots(budget, keys.shape[-2], counts)
    scale = jnp.asarray(keys.shape[-1] ** -0.5 if scale is None else scale, jnp.float32)
    _check_arrays(queries, keys, values, bias, counted)
    _check_range(queries, keys, scale, bias, counted)
    lead = jnp.broadcast_shapes(queries.shape[:-2], keys.shape[:-2], bias.shape[:-1], counts.shape)
    keys_of_heads = _random_keys(key, lead) if found.random else None
    made = over_heads(_compact_head, (2, 2, 2, 0, 1, 1, 0, 0), queries, keys, values, scale, bias, counted, counts,
                      keys_of_heads, elements=queries.shape[-2] * keys.shape[-2], method=method, budget=budget)
    check_finite("a value", made.values, "values leave the range of float32; scale them")
    return made


def _compact_head(queries, keys, values, scale, bias, counted, counts, key, *, method, budget) -> Compacted:
    """`compact` of one head: queries [N, d], keys [T, d], values [T, v], bias [T], counted [N]."""
    valid = (bias > MASKED / 2)[:, None]  # what padding holds may be anything
    queries, keys = jnp.where(counted[:, None], queries, 0), jnp.where(valid, keys, 0)
    values = jnp.where(valid, values, 0)
    scores, fit = attention_scores(queries, keys, scale), METHODS[method].fit
    indices = _choose(method, scores, budget, bias, counted, counts, key)
    used = indices >= 0
    new = fit_bias_of(method, scores, indices, bias, counted) if fit else jnp.where(used, bias[indices], MASKED)
    kept = jnp.where(used[:, None], keys[indices], 0)
    if fit is None:
        return Compacted(indices, kept, new, jnp.where(used[:, None], values[indices], 0))
    outputs = attended(biased(scores, bias), values)
    fitted = fit_values(biased(_columns(scores, indices), new), outputs, counted)
    return Compacted(indices, kept, new, jnp.where(used[:, None], fitted, 0))


def choose(method: str, scores: Array, budget: int, *, bias: Array | None = None, counted: Array | None = None,
           counts: Array | None = None, key: Array | None = None) -> Array:
    """Indices [..., t] of the tokens that a method keeps, -1 for slots that are not used.

    Args:
        scores: [..., N, T] scaled scores, without biases.
        others: as in `compact`.
    """
    if find_method(method).random:
        _check_random(key)
    _check_slots(budget, scores.shape[-1], jnp.asarray(budget if counts is None else counts))
    return _choose(method, scores, budget, bias, counted, counts, key)


def _choose(method, scores, budget, bias, counted, counts, key) -> Array:
    found = METHODS[method]
    if found.random:
        indices = found.choice(biased(scores, bias), budget, key)
    elif found.pursuit:
        indices = found.choice(scores, budget, bias, counted)
    else:
        indices = found.choice(biased(scores, bias), budget, counted)
    return indices if counts is None else jnp.where(jnp.arange(budget) < counts[..., None], indices, -1)


def fit_bias_of(method: str, scores: Array, indices: Array, bias: Array | None = None,
                counted: Array | None = None) -> Array:
    """Biases [..., t] of chosen tokens (`choose`), as a method of `FITTED` fits them; `MASKED` for slots of none."""
    fit = find_method(method).fit
    return fit_bias(_columns(scores, indices), biased(scores, bias), fit.low, fit.high, fit.steps, counted,
                    indices >= 0)


def _columns(scores: Array, indices: Array) -> Array:
    """Scores [..., N, t] of the tokens at indices [..., t]."""
    return jnp.take_along_axis(scores, jnp.maximum(indices, 0)[..., None, :], axis=-1)


def _random_keys(key: Array | None, lead: tuple[int, ...]) -> Array:
    """A random key of its own for each head."""
    _check_random(key)
    key = key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
    return jax.random.split(key, lead)


def _check_random(key: Array | None) -> None:
    if key is None:
        raise ValueError("method 'random' draws tokens: give it a random key")


def _check_slots(budget: int, tokens: int, counts: Array) -> None:
    if not 1 <= budget <= tokens:
        raise ValueError(f"the budget is {budget}: it must be between 1 and the {tokens} tokens there are")
    check((counts >= 1) & (counts <= budget), f"counts at {{place}} are {{counts}}: heads use between 1 slot and the "
          f"budget of {budget}", counts=counts)


def _check_arrays(queries, keys, values, bias, counted) -> None:
    """Every array is finite where it counts."""
    held = (bias > MASKED / 2)[..., None]
    check_finite("queries", queries, "queries must be finite", counted[..., None])
    check_finite("keys", keys, "keys must be finite", held)
    check_finite("values", values, "values must be finite", held)
    check_finite("the bias", bias, f"biases must be finite; {MASKED:g} marks slots without a token")
    check(counted.any(axis=-1), "no query of head {place} counts: give it at least one")


def _check_range(queries, keys, scale, bias, counted) -> None:
    check_finite("the largest score, of head", _score_bound(queries, keys, scale, bias, counted),
                 "queries and keys leave the range of float32; scale them")


@jax.jit
def _score_bound(queries, keys, scale, bias, counted) -> Array:
    """No score [...] is larger."""
    largest = lambda x, where: jnp.where(where[..., None], jnp.abs(x.astype(jnp.float32)), 0).max(axis=(-2, -1))
    return largest(queries, counted) * largest(keys, bias > MASKED / 2) * jnp.abs(scale) * keys.shape[-1]
