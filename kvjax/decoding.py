"""One step of inference: new tokens in, logits and the longer cache out."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from kvjax.cache import Cache
from kvjax.model.decoder import Decoder


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
        ValueError: shapes do not fit, or the cache is known to be too small. Under `jit`, `cache.overflowed` tells.
    """
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or tokens.shape[0] != cache.lengths.shape[0]:
        raise ValueError(f"tokens have shape {tokens.shape}: [B, T] with the cache's B = {cache.lengths.shape[0]} "
                         "is wanted")
    last = None
    if last_only:
        real = jnp.full(tokens.shape[:1], tokens.shape[1]) if counts is None else jnp.asarray(counts)
        last = jnp.maximum(real - 1, 0)
    logits, rows = model.apply({"params": params}, tokens, cache, last, method="extend")
    return logits, cache.append(rows, counts)
