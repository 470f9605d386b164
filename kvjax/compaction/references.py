"""Reference queries: what attention to a cache is matched on."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from kvjax.cache import Cache
from kvjax.config import require
from kvjax.generate import generate
from kvjax.model.activations import layer_inputs
from kvjax.model.decoder import Decoder


@struct.dataclass
class References:
    """Inputs of every layer's attention at some tokens, which queries are made of."""

    inputs: Array
    """[layers, B, N, D]."""
    positions: Array
    """[B, N]."""
    counted: Array
    """[B, N] bool: the first ones of each row; the others are padding."""

    def thinned(self, most: int) -> References:
        """At most so many tokens of a row, spread evenly over it."""
        if self.positions.shape[1] <= most:
            return self
        number, place = self.counted.sum(axis=1)[:, None], jnp.arange(most)
        spread = jnp.round(place * (number - 1) / max(most - 1, 1)).astype(int)
        return self._taken(jnp.where(number > most, spread, place), place < number)

    def newest(self, most: int) -> References:
        """The last tokens of each row, at most so many."""
        most = min(most, self.positions.shape[1])
        number, place = self.counted.sum(axis=1)[:, None], jnp.arange(most)
        return self._taken(jnp.maximum(number - most, 0) + place, place < number)

    def _taken(self, index: Array, counted: Array) -> References:
        """The tokens at index [B, n] of each row."""
        return References(jnp.take_along_axis(self.inputs, index[None, ..., None], axis=2),
                          jnp.take_along_axis(self.positions, index, axis=1), counted)

    def read_by(self, layers: tuple[int, ...]) -> References:
        """Inputs of some of the layers."""
        return References(self.inputs[jnp.asarray(layers)], self.positions, self.counted)


def of_context(model: Decoder, params: Any, tokens: Array, counts: Array | None = None) -> References:
    """Of the context itself, read from its start.

    Args:
        tokens: int [B, T], padded on the right.
        counts: int [B], how many are real; None: all.
    """
    counted = counted_tokens(tokens, counts)
    tokens = jnp.where(counted, jnp.asarray(tokens), 0)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return checked(References(layer_inputs(model.config, params, tokens), positions, counted), "the context")


def of_following(model: Decoder, params: Any, cache: Cache, tokens: Array, counts: Array | None = None) -> References:
    """Of tokens that follow what a cache holds: the context once more, or a continuation that the model drew.

    The cache is not changed. Arguments as in `of_context`. Raises ConfigError where tokens have no position.
    """
    counted = counted_tokens(tokens, counts)
    tokens = jnp.where(counted, jnp.asarray(tokens), 0)
    positions = cache.positions[:, None] + jnp.arange(tokens.shape[1])
    inputs = _following_inputs(model, params, tokens, cache)
    return checked(References(inputs, positions, counted), f"the {tokens.shape[1]} tokens that follow the cache")


def of_continuations(model: Decoder, params: Any, cache: Cache, last: Array, tokens: int, seed: int = 0) -> References:
    """Of `tokens` tokens that the model itself draws, temperature 1, behind what a cache holds.

    `last` int [B] is the first token that follows the cache: it is fed, and what comes next is drawn. The cache must
    have room for them.
    """
    prompts = np.asarray(last)[:, None]
    drawn = np.asarray(generate(model, params, prompts, max_new_tokens=tokens, seed=seed, cache=cache))
    return of_following(model, params, cache, np.concatenate([prompts, drawn[:, :-1]], axis=1))


@partial(jax.jit, static_argnums=0)
def _following_inputs(model: Decoder, params: Any, tokens: Array, cache: Cache) -> Array:
    return model.apply({"params": params}, tokens, cache, method="following_inputs")


def counted_tokens(tokens: Array, counts: Array | None) -> Array:
    """[B, T] bool: the first `counts` [B] of each row of tokens [B, T], or all. Raises ConfigError for other shapes."""
    shape = np.shape(tokens)
    require(len(shape) == 2 and shape[1] > 0, f"reference tokens have shape {shape}: [B, T] is wanted")
    counts = jnp.full((shape[0],), shape[1]) if counts is None else jnp.asarray(counts)
    return jnp.arange(shape[1]) < counts[:, None]


def checked(references: References, what: str) -> References:
    """The references, if their inputs are finite. Raises ConfigError if not, which names `what` they are of."""
    bad = ~jnp.isfinite(references.inputs).all(axis=(0, 3)) & references.counted
    require(not bool(bad.any()), f"activations at {what} are not finite: ids outside the vocabulary, or positions past "
                                 "the model's table of them")
    return references
