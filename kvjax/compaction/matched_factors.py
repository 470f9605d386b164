"""Kronecker factors (KPA, TPA) compacted in their own components: tokens are chosen for all heads together.

A token's factors serve all heads, so there is one choice of tokens and one bias a token, fitted to the attention of all
heads at once. Keys keep their factors. Of the values, 1/R sum_u A_u (x) B_u, the factor B is fitted anew: with A kept,
outputs are linear in it,

    min over B of the sum over i1, j1, n of
        | sum_{s, u} p_{i1 i2}(n, s) / R A_u(s)[i1, j1] B_u(s)[i2, :] - o_{i1 i2}(n)[j1, :] |^2

for every i2. Folding is refused: k + beta u has one rank more than the model caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.attention.components import Component
from kvjax.attention.kronecker import Kronecker, kronecker_mean
from kvjax.attention.partials import MASKED, joined, separated
from kvjax.attention.sharing import make_attention, make_plan
from kvjax.attention.variant import Layer
from kvjax.cache import Cache
from kvjax.compaction.attention_matching import FITTED, choose, fit_bias_of
from kvjax.compaction.checks import check, check_finite
from kvjax.compaction.entries import MASKED_IN_CACHE, Entry, Place, path_of, whole
from kvjax.compaction.fitting import biased, least_squares
from kvjax.compaction.matched_heads import time_order
from kvjax.compaction.references import References
from kvjax.config import ModelConfig, require
from kvjax.model.parameters import layer_spec
from kvjax.model.prefix import bias_type, stored_bias

if TYPE_CHECKING:
    from kvjax.compaction.compacting import Fitting

BIAS = Component("bias", (1,), "bias", "bias", head_axis=None)


class Problem(NamedTuple):
    """What is to be matched for one entry."""

    rows: dict[str, Array]
    """Components of all tokens, {name: [B, S, *features]} float32."""
    scores: Array
    """[B, H, N, S], scaled, of all readers' queries, without biases."""
    bias: Array
    """[B, S]: that of an older prefix; `MASKED` where there is no token."""
    counted: Array
    """[B, N] bool."""


@dataclass(frozen=True)
class Factors:
    """A prefix of a model's own factors, with a bias for all heads."""

    config: ModelConfig
    place: Place

    @property
    def heads(self) -> int:
        """All heads share a choice of tokens."""
        return 1

    @property
    def layer(self) -> Layer:
        """The layer whose components it keeps."""
        return layer_spec(self.config, self.place[0], self.place[2])

    def table(self) -> tuple[Component, ...]:
        """Components of the prefix."""
        return (*(c for c in self.layer.reads if c.cached), BIAS)

    def fit(self, fitting: Fitting, number: int, references: References) -> dict[str, Array]:
        """What is left of entry `number`: {component: [B, t, *features]}."""
        options, kind = fitting.options, bias_type(fitting.cache.dtype)
        require(not options.fold, "fold: a bias in the keys takes one more rank than Kronecker factors have; leave the "
                                  "biases beside them (fold=False)")
        problem = problem_of(fitting.config, fitting.params, fitting.cache, number, fitting.entries[number], references,
                             options.keep)
        indices, bias = _chosen(options.method, problem, fitting.most, jnp.asarray(fitting.counts[number]),
                                fitting.key(number))
        order = time_order(indices)
        indices, bias = (jnp.take_along_axis(x, order, axis=-1) for x in (indices, bias))
        scale = self.config.attention.head_dim**-0.5
        bias = stored_bias(jnp.where(indices < 0, MASKED, bias), scale, kind)
        rows = {name: _taken(x, indices) for name, x in problem.rows.items()}
        if options.method in FITTED:
            rows |= _refitted(self.layer, self.config.attention, problem, rows, indices,
                              bias.astype(jnp.float32) * scale)
        return rows | {"bias": bias[..., None]}


def _chosen(method: str, problem: Problem, most: int, counts: Array, key: Array) -> tuple[Array, Array]:
    """Indices of tokens, -1 for slots of none, and their biases, both [B, t]."""
    batch, heads, count, tokens = problem.scores.shape
    pooled = problem.scores.reshape(batch, 1, heads * count, tokens)
    _check(problem)
    counted, bias = jnp.tile(problem.counted, (1, heads))[:, None], problem.bias[:, None]
    indices = choose(method, pooled, most, bias=bias, counted=counted, counts=counts, key=key)
    if method in FITTED:
        return indices[:, 0], fit_bias_of(method, pooled, indices, bias, counted)[:, 0]
    return indices[:, 0], _taken(problem.bias, indices[:, 0])


def _check(problem: Problem) -> None:
    """Raises ValueError for what cannot be fitted."""
    check(problem.counted.any(axis=-1), "no query of row {place} counts: give it at least one")
    for name, rows in problem.rows.items():
        check_finite(name, rows, "factors must be finite")
    check_finite("the score, of row, head, query and token", problem.scores, "queries and keys must be finite",
                 problem.counted[:, None, :, None])


def problem_of(config: ModelConfig, params: Any, cache: Cache, number: int, entry: Entry, references: References,
               keep: int = 0) -> Problem:
    """The tokens of entry `number` of a cache, and the scores of the queries that its readers make of their inputs."""
    kinds = tuple((segment, index) for segment, _, index in entry.places)
    groups = jnp.asarray([group for _, group, _ in entry.places])
    return _problem(config, kinds, keep, params, cache, number, groups, references.inputs, references.positions,
                    references.counted)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _problem(config: ModelConfig, kinds: tuple[tuple[int, int], ...], keep: int, params: Any, cache: Cache,
             number: Array, groups: Array, inputs: Array, positions: Array, counted: Array) -> Problem:
    places = [(segment, group, index) for (segment, index), group in zip(kinds, groups, strict=True)]
    variant, layer = make_attention(config), layer_spec(config, places[0][0], places[0][2])
    with jax.default_matmul_precision("highest"):
        rows, bias = _tokens(config, layer, places[0], cache, number, keep)
        queries = jnp.concatenate([
            variant.queries(layer, path_of(config, params, place)[-1], x.astype(jnp.float32), positions)
            for place, x in zip(places, inputs, strict=True)], axis=1)
        keys = kronecker_mean(*_factors(layer, rows, "k_a", "k_b"))
        scores = jnp.einsum("bnhd,bshd->bhns", queries, keys) * variant.head_dim**-0.5
    return Problem(rows, scores, bias, jnp.tile(counted, (1, len(places))))


def _tokens(config: ModelConfig, layer: Layer, place: Place, cache: Cache, number: Array,
            keep: int) -> tuple[dict[str, Array], Array]:
    """Components and biases of all tokens, those of the prefix first."""
    slots = make_plan(config).slots_read(*place)
    cached = {c.name: slots[c.name] for c in layer.reads if c.cached}
    view, valid = whole(cache.past(next(iter(cached))), cached, cache.lengths - keep)
    rows, bias = {name: view[name] for name in cached}, jnp.where(valid, 0.0, MASKED)
    if cache.prefix is None:
        return _held(rows, bias)
    held = cache.prefix.cache
    old, valid = whole(held.past(next(iter(cached))), dict.fromkeys(held.components.keys() & {*cached, "bias"},
                                                                    (number,)), held.lengths)
    before = old["bias"][..., 0] if "bias" in old.entries else jnp.zeros(valid.shape)
    scale = config.attention.head_dim**-0.5
    before = jnp.where(valid & (before > MASKED_IN_CACHE), before * scale, MASKED)
    join = lambda *x: jnp.concatenate(x, axis=1)
    return _held({name: join(old[name], row) for name, row in rows.items()}, join(before, bias))


def _held(rows: dict[str, Array], bias: Array) -> tuple[dict[str, Array], Array]:
    """What slots without a token hold may be anything: 0."""
    there = bias > MASKED / 2
    return {name: jnp.where(there.reshape(*there.shape, *[1] * (x.ndim - 2)), x, 0) for name, x in rows.items()}, bias


def _factors(layer: Layer, rows: dict[str, Array], *states: str) -> list[Array]:
    """Both factors, [B, S, R, h, w], whose ranks may come in parts."""
    return [joined(tuple(rows[c.name] for c in layer.state(state)), 2) for state in states]


@partial(jax.jit, static_argnums=(0, 1))
def _refitted(layer: Layer, variant: Kronecker, problem: Problem, rows: dict[str, Array], indices: Array,
              bias: Array) -> dict[str, Array]:
    """The factors B of the values of kept tokens, fitted to the outputs of all tokens: {name: [B, t, R, h2, d2]}."""
    with jax.default_matmul_precision("highest"):
        values = kronecker_mean(*_factors(layer, problem.rows, "v_a", "v_b"))
        outputs = jnp.einsum("bhns,bshd->bnhd", jax.nn.softmax(biased(problem.scores, problem.bias[:, None])), values)
        kept = jnp.take_along_axis(problem.scores, jnp.maximum(indices, 0)[:, None, None], axis=3)
        weights = jax.nn.softmax(biased(kept, jnp.where(indices < 0, MASKED, bias)[:, None]))
        weights = jnp.where(problem.counted[:, None, :, None], weights, 0)
        outputs = jnp.where(problem.counted[..., None, None], outputs, 0)
        (a,) = _factors(layer, rows, "v_a")
        b = jax.lax.map(lambda row: _fit_b(variant, *row), (weights, a, outputs))  # not in a batch: see `over_heads`
    parts = layer.state("v_b")
    return dict(zip((c.name for c in parts), separated(b, [c.features[0] for c in parts], 2), strict=True))


def _fit_b(variant: Kronecker, weights: Array, a: Array, outputs: Array) -> Array:
    """B [t, R, h2, d2] of weights [H, N, t], A [t, R, h1, d1] and outputs [N, H, d] of one sequence."""
    slots, ranks = a.shape[:2]
    h1, h2, d1, d2 = variant.h1, variant.h2, variant.d1, variant.d2
    weights = weights.reshape(h1, h2, -1, slots)
    outputs = outputs.reshape(-1, h1, h2, d1, d2)
    matrix = jnp.einsum("iknt,trij->kijntr", weights, a).reshape(h2, -1, slots * ranks) / ranks
    target = jnp.einsum("nikjw->kijnw", outputs).reshape(h2, -1, d2)
    fitted = jax.lax.map(lambda pair: least_squares(*pair), (matrix, target))
    return jnp.moveaxis(fitted.reshape(h2, slots, ranks, d2), 0, 2)


def _taken(rows: Array, indices: Array) -> Array:
    """Rows [B, S, *features] at indices [B, t]; zeros where they are below 0."""
    where = indices.reshape(*indices.shape, *[1] * (rows.ndim - 2))
    return jnp.where(where < 0, 0, jnp.take_along_axis(rows, jnp.maximum(where, 0), axis=1))
