"""Attention of tokens to themselves in plain JAX, with all scores at once: what the kernels must equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels.attention.plan import Plan, seen
from kvjax.kernels.attention.tiles import Arrays


def attention(plan: Plan, queries: Array, keys: Arrays, values: Arrays, segments: Array | None) -> tuple[Array, Array]:
    """What `tpu.forward` computes. Differentiable as it is."""
    dtype, length = queries.dtype, queries.shape[-1]
    at = jnp.arange(length, dtype=jnp.int32)

    def of_group(queries: Array, keys: Arrays, values: Arrays, segments: Array | None) -> tuple[Array, Array]:
        key, value = (jnp.stack(_per_head(plan, blocks, len(queries))).astype(dtype) for blocks in (keys, values))
        precision = dict(precision="highest", preferred_element_type=jnp.float32)
        scores = jnp.einsum("hds,hdt->hst", key, queries, **precision) * plan.scale
        visible = seen(plan, at[:, None], at[None], *((segments[:, None], segments[None]) if plan.packed else ()))
        scores = jnp.where(visible, scores, -jnp.inf)
        lse = jax.nn.logsumexp(scores, axis=1)
        weights = jnp.exp(scores - lse[:, None]).astype(dtype)
        return jnp.einsum("hst,hds->hdt", weights, value, **precision).astype(dtype), lse

    def of_row(queries: Array, keys: Arrays, values: Arrays, segments: Array | None) -> tuple[Array, Array]:
        spread = lambda x: jnp.repeat(x, len(queries) // len(x), axis=0)
        return jax.vmap(of_group, in_axes=(0, 0, 0, None))(
            queries, tuple(map(spread, keys)), tuple(map(spread, values)), segments)

    return jax.vmap(of_row)(queries, keys, values, segments)


def _per_head(plan: Plan, blocks: Arrays, heads: int) -> Arrays:
    tiles = plan.tiles([x.astype(jnp.float32) for x in blocks])
    return tuple(tiles[h % len(tiles)] for h in range(heads))
