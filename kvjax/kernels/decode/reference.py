"""Decode attention in plain JAX: any program over the whole past of each sequence at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels.decode.program import MASKED, Arrays, Entry, Past, Program, dequantised, positions_of, visible


def decode(program: Program, past: Past, queries: Arrays, constants: Arrays, entries: tuple[Entry, ...],
           lengths: Array) -> tuple[Arrays, Array]:
    """What `tpu.decode` computes, with all blocks of the past at once; it has a gradient."""
    dtype = queries[0].dtype
    at = lambda x, slot: None if x is None else x[slot]
    held = tuple((at(e.stored, e.slot), at(e.scales, e.slot)) for e in entries)
    slots = jnp.arange(past.size, dtype=jnp.int32)[None]

    def of_sequence(queries: Arrays, held: tuple, length: Array) -> tuple[Arrays, Array]:
        def in_blocks(x: Array) -> Array:
            return jnp.moveaxis(x.reshape(x.shape[0], -1, past.block), 1, 0)
        blocks = tuple(in_blocks(dequantised(x, scales, e.inner, dtype))
                       for (x, scales), e in zip(held, entries, strict=True))
        positions = in_blocks(positions_of(past, slots, length))
        scores = jax.vmap(lambda *block: program.scores(queries, constants, *block))(blocks, positions)
        scores = past.scale * jnp.moveaxis(scores, 0, 1).reshape(program.rows, past.size)
        tokens = program.tokens(jnp.arange(program.rows, dtype=jnp.int32)[:, None])
        seen = visible(past, jnp.broadcast_to(slots, scores.shape), tokens, length)
        scores = jnp.where(seen, scores, MASKED)
        lse = jnp.where(seen.any(axis=1), jax.nn.logsumexp(scores, axis=1), MASKED)[:, None]
        weights = in_blocks(jnp.where(seen, jnp.exp(scores - lse), 0))
        sums = jax.vmap(program.weighted)(weights, blocks)
        return program.finish(tuple(x.sum(axis=0) for x in sums)), lse

    return jax.vmap(of_sequence)(queries, held, lengths)
