"""Decode attention in plain JAX: any program over the whole past of each sequence at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels.decode.program import MASKED, Arrays, Entry, Past, Program, dequantised, visible


def decode(program: Program, past: Past, queries: Arrays, constants: Arrays, entries: tuple[Entry, ...],
           lengths: Array) -> tuple[Arrays, Array]:
    """What `tpu.decode` computes, with the past as one block."""
    dtype = queries[0].dtype
    at = lambda x, slot: None if x is None else x[slot]
    held = tuple((at(e.stored, e.slot), at(e.scales, e.slot)) for e in entries)

    def of_sequence(queries: Arrays, held: tuple, length: Array) -> tuple[Arrays, Array]:
        blocks = tuple(dequantised(x, scales, e.inner, dtype) for (x, scales), e in zip(held, entries, strict=True))
        scores = program.scores(queries, constants, blocks, 0) * past.scale
        tokens = program.tokens(jnp.arange(program.rows, dtype=jnp.int32)[:, None])
        slots = jnp.broadcast_to(jnp.arange(past.size, dtype=jnp.int32), scores.shape)
        seen = visible(past, slots, tokens, length)
        scores = jnp.where(seen, scores, MASKED)
        lse = jnp.where(seen.any(axis=1), jax.nn.logsumexp(scores, axis=1), MASKED)[:, None]
        weights = jnp.where(seen, jnp.exp(scores - lse), 0)
        return program.finish(program.weighted(weights, blocks)), lse

    return jax.vmap(of_sequence)(queries, held, lengths)
