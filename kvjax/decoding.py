"""One step of inference: new tokens in, logits and the longer cache out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache import Cache, contents
from kvjax.model.decoder import Decoder
from kvjax.sharding import target_platform


def decode(
    model: Decoder,
    params: dict,
    tokens: Array,
    cache: Cache,
    counts: Array | None = None,
    last_only: bool = False,
) -> tuple[Array, Cache]:
    """Feeds one or many new tokens per row, and appends them to the cache.

    Args:
        model, params: the model and its parameters.
        tokens: int [B, T], padded on the right.
        cache: what came before; not changed.
        counts: int [B], how many of the T tokens of each row are real (0: the row waits); default: all.
        last_only: whether only the logits of each row's last real token are wanted.
    Returns:
        Logits float32 [B, T, V], or [B, V] with `last_only`, and the extended cache.
    Raises:
        ValueError: shapes do not fit, ids are outside the vocabulary, counts outside 0 .. T, the cache is too small, or
            a table of learned positions is.
            Under `jit` values are not known: such ids give NaN, counts are clipped, and `cache.overflowed` tells.
    """
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or tokens.shape[0] != cache.lengths.shape[0]:
        raise ValueError(f"tokens have shape {tokens.shape}: [B, T] with the cache's B = {cache.lengths.shape[0]} "
                         "is wanted")
    check_cache(model, cache)
    counts = _checked_counts(tokens, counts)
    tokens = jnp.where(jnp.arange(tokens.shape[1]) < counts[:, None], tokens, 0)  # padding may be anything
    _check_known_ids(tokens, model.config.vocab_size)
    _check_positions(model, cache.positions + counts)
    last = jnp.maximum(counts - 1, 0) if last_only else None
    logits, rows = model.apply({"params": params}, tokens, cache, last, method="extend")
    return logits, written_after(logits, cache).append(rows, counts)


def written_after(logits: Array, cache: Cache) -> Cache:
    """The cache, whose lengths depend on the logits though these change nothing.

    Compilers for CPUs copy a cache that is written in place unless all that reads it is known to come before.
    """
    mesh = jax.sharding.get_abstract_mesh()
    spread = not mesh.empty and mesh.size > 1  # where lengths are would depend on where the logits are
    if target_platform() != "cpu" or not isinstance(logits, jax.core.Tracer) or spread:
        return cache
    none = jnp.ravel(logits)[0] > jnp.inf  # no number is
    return cache.replace(lengths=cache.lengths + none)


def check_cache(model: Decoder, cache: Cache) -> None:
    """Raises ValueError if the cache is another model's."""
    held = {name: (c.shape[0], c.shape[2], c.dtype.name) for name, c in cache.components.items()}
    wanted = contents(model.config, cache.dtype)
    sizes = {c.name: (slots, c.size, dtype.name) for c, slots, dtype in wanted}
    if cache.table != tuple(stored.component for stored in wanted) or held != sizes:
        raise ValueError(f"the cache is of another model: it holds (slots, features, type) {held}; make it with "
                         "init_cache(model.config, ...)")


def _checked_counts(tokens: Array, counts: Array | None) -> Array:
    batch, length = tokens.shape
    if not length:
        raise ValueError("tokens have length 0: give at least one column, with counts of 0 for rows that wait")
    counts = jnp.full((batch,), length, jnp.int32) if counts is None else jnp.asarray(counts, jnp.int32)
    if counts.shape != (batch,):
        raise ValueError(f"counts have shape {counts.shape}: one number for each of the {batch} rows is wanted")
    if not isinstance(counts, jax.core.Tracer) and ((counts < 0) | (counts > length)).any():
        raise ValueError(f"counts are {counts.tolist()}: each must be between 0 and the {length} tokens of a row")
    return jnp.clip(counts, 0, length)


def _check_positions(model: Decoder, lengths: Array) -> None:
    config = model.config
    if config.positions != "learned" or isinstance(lengths, jax.core.Tracer):
        return
    if (lengths > config.context_length).any():
        raise ValueError(f"rows would reach {int(lengths.max())} tokens: the table of learned positions has "
                         f"{config.context_length}")


def _check_known_ids(tokens: Array, vocab_size: int) -> None:
    if not isinstance(tokens, jax.core.Tracer) and ((tokens < 0) | (tokens >= vocab_size)).any():
        raise ValueError(f"tokens hold ids from {tokens.min()} to {tokens.max()}: the vocabulary has ids 0 to "
                         f"{vocab_size - 1}")
