"""Keys and values of heads, each head fitted by itself: heads as a layer has them, or one head in latent space."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.attention.components import Component
from kvjax.attention.partials import MASKED
from kvjax.attention.variant import HeadSizes
from kvjax.cache import Cache
from kvjax.compaction import fold_bias
from kvjax.compaction.attention_matching import FITTED, Compacted
from kvjax.compaction.attention_matching import compact as match
from kvjax.compaction.entries import Entry, Tokens, head_queries, path_of, tokens_of
from kvjax.compaction.fitting import attention_outputs, attention_scores, biased, fit_values
from kvjax.compaction.references import References
from kvjax.config import ModelConfig
from kvjax.model.prefix import bias_type, prefix_table, stored_bias
from kvjax.quantisation import dequantise, is_quantised, quantise

if TYPE_CHECKING:
    from kvjax.compaction.compacting import Fitting


class Problem(NamedTuple):
    """What is to be matched for one entry."""

    tokens: Tokens
    queries: Array
    """[B, G, N, key_dim] float32: of all layers that read the entry, those of all heads to each head of keys."""
    counted: Array
    """[B, G, N] bool."""


@dataclass(frozen=True)
class Heads:
    """A prefix of keys, biases and values of heads."""

    sizes: HeadSizes

    @property
    def heads(self) -> int:
        """Heads that have a choice of tokens of their own."""
        return self.sizes.heads

    def table(self) -> tuple[Component, ...]:
        """Components of the prefix."""
        return prefix_table(self.sizes)

    def fit(self, fitting: Fitting, number: int, references: References) -> dict[str, Array]:
        """What is left of entry `number`: {component: [B, t, *features]}."""
        return self.rows(fitting, *self.matched(fitting, number, references))

    def matched(self, fitting: Fitting, number: int, references: References) -> tuple[Problem, Compacted]:
        """The problem of entry `number`, and its solution before biases are folded or anything is rounded."""
        options = fitting.options
        problem = problem_of(fitting.config, fitting.params, fitting.cache, number, fitting.entries[number], references,
                             options.keep)
        (keys, values, bias), queries, counted = problem
        made = match(options.method, queries, keys, values, fitting.most, scale=self.sizes.scale, bias=bias,
                     counted=counted, counts=jnp.asarray(fitting.counts[number]), key=fitting.key(number))
        return problem, _in_order_of_time(made)

    def rows(self, fitting: Fitting, problem: Problem, made: Compacted) -> dict[str, Array]:
        """What a prefix holds of a solution: folded if the options say so, and with values for what is read."""
        options, dtype, scale = fitting.options, fitting.cache.dtype, self.sizes.scale
        if options.fold and bool(((made.bias != 0) & (made.indices >= 0)).any()):
            made = _folded(made, problem.queries, problem.counted, scale)
        if options.method in FITTED and (options.fold or dtype != jnp.float32):
            made = self._refitted(made, problem, dtype)
        rows = {"k": made.keys, "bias": stored_bias(made.bias, scale, bias_type(dtype))[..., None], "v": made.values}
        return {name: jnp.swapaxes(x, 1, 2) for name, x in rows.items()}

    def _refitted(self, made: Compacted, problem: Problem, dtype) -> Compacted:
        """Values for the keys and biases as they will be read."""
        (keys, values, bias), queries, counted = problem
        scale = self.sizes.scale
        keys_read = _as_stored(made.keys, self.table()[0], dtype)
        bias_read = stored_bias(made.bias, scale, bias_type(dtype)).astype(jnp.float32) * scale
        logits = biased(attention_scores(queries, keys_read, scale), jnp.where(made.indices < 0, MASKED, bias_read))
        outputs = attention_outputs(queries, keys, values, bias, scale)
        return made._replace(keys=keys_read, values=fit_values(logits, outputs, counted))


def problem_of(config: ModelConfig, params: Any, cache: Cache, number: int, entry: Entry, references: References,
               keep: int = 0) -> Problem:
    """The tokens of entry `number` of a cache, and the queries to them that its readers make of their inputs."""
    kinds = tuple((segment, index) for segment, _, index in entry.places)
    groups = jnp.asarray([group for _, group, _ in entry.places])
    return _problem(config, kinds, keep, params, cache, number, groups, references.inputs, references.positions,
                    references.counted)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _problem(config: ModelConfig, kinds: tuple[tuple[int, int], ...], keep: int, params: Any, cache: Cache,
             number: Array, groups: Array, inputs: Array, positions: Array, counted: Array) -> Problem:
    with jax.default_matmul_precision("highest"):
        places = [(segment, group, index) for (segment, index), group in zip(kinds, groups, strict=True)]
        paths = [path_of(config, params, place) for place in places]
        tokens = tokens_of(config, paths[0], places[0], cache, number, keep)
        queries = [head_queries(config, path, place, x, positions)
                   for path, place, x in zip(paths, places, inputs, strict=True)]
    queries = jnp.concatenate(queries, axis=2)
    repeated = jnp.repeat(counted, queries.shape[2] // len(places) // counted.shape[1], axis=1)
    counted = jnp.concatenate([repeated] * len(places), axis=1)[:, None]
    return Problem(tokens, queries, jnp.broadcast_to(counted, queries.shape[:3]))


def _folded(made: Compacted, queries: Array, counted: Array, scale: float) -> Compacted:
    """Keys with their biases in them; what is left of biases says which slots are used."""
    direction = fold_bias.fit_direction(queries, counted)
    keys = fold_bias.fold_keys(made.keys, made.bias, direction, scale)
    return made._replace(keys=keys, bias=jnp.where(made.indices < 0, MASKED, 0.0))


def _in_order_of_time(made: Compacted) -> Compacted:
    """Slots as their tokens came, unused ones last: what is compacted again must know which are the newest."""
    order = time_order(made.indices)
    rows = lambda x: jnp.take_along_axis(x, order[..., None], axis=-2)
    flat = lambda x: jnp.take_along_axis(x, order, axis=-1)
    return Compacted(flat(made.indices), rows(made.keys), flat(made.bias), rows(made.values))


def time_order(indices: Array) -> Array:
    """What sorts indices of tokens [..., t], -1 last."""
    return jnp.argsort(jnp.where(indices < 0, jnp.iinfo(jnp.int32).max, indices), axis=-1, stable=True)


def _as_stored(x: Array, component: Component, dtype) -> Array:
    """Keys [B, G, t, d] as they are read again from a cache of some type. Raises ValueError on overflow."""
    check_storable(component.name, x, dtype)
    if is_quantised(dtype):
        rows = jnp.swapaxes(x, 1, 2)
        return jnp.swapaxes(dequantise(*quantise(rows, component, dtype), component, jnp.float32), 1, 2)
    return x.astype(dtype).astype(jnp.float32)


def check_storable(name: str, x: Array, dtype) -> None:
    """Raises ValueError unless a cache of some type can hold what was fitted."""
    held = x if is_quantised(dtype) else x.astype(dtype)
    if not bool(jnp.isfinite(held.astype(jnp.float32)).all()):
        raise ValueError(f"{name}, of up to {float(jnp.abs(x).max()):.4g}, overflows a cache of {dtype}, or is not "
                         "finite: use a cache of bfloat16 or float32")
