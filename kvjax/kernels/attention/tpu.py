"""Attention of tokens to themselves on TPUs. Tiles of keys and values are made in fast memory, and never leave it.

All is kept with tokens in the lanes: scores [keys, queries], so that what belongs to a query is a row, and heads
narrower than 128 waste nothing. The backward pass is two kernels that make the tiles again: one for the gradients of
queries, one for those of what keys and values are made of, which are pulled back before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.kernels.attention.plan import Plan, seen
from kvjax.kernels.attention.tiles import Arrays
from kvjax.kernels.decode.program import MASKED, div, dot, rem

Operand = Array | jax.ShapeDtypeStruct
"""[B, groups or a divisor of it, ..., T]."""


def forward(plan: Plan, queries: Array, keys: Arrays, values: Arrays, segments: Array | None,
            interpret: Any = False) -> tuple[Array, Array]:
    """Attention of T tokens to themselves.

    Args:
        queries: [B, groups, n, d, T], n the query heads that a tile serves.
        keys, values: what tiles are made of, [B, groups or a divisor of it, F, T] each.
        segments: int32 [B, T], the document of each token, if the plan is packed.
        interpret: as `pallas_call` takes it.
    Returns:
        Means [B, groups, n, value features, T] in the queries' type, log-sum-exps [B, groups, n, T] float32.
    """
    shape, block = queries.shape[:3], plan.block
    _, width = _tiles_of(plan, values)
    outputs = [jax.ShapeDtypeStruct((*shape, width, queries.shape[-1]), queries.dtype),
               jax.ShapeDtypeStruct((*shape, queries.shape[-1]), jnp.float32)]
    scratch = [((shape[2], rows, block), jnp.float32) for rows in (width, 1, 1)]
    return tuple(_over_queries(plan, _forward_body, [queries], [keys, values], segments, outputs, scratch, interpret))


def backward(plan: Plan, queries: Array, keys: Arrays, values: Arrays, segments: Array | None, lse: Array,
             d_out: Array, delta: Array, interpret: Any = False) -> tuple[Array, Arrays, Arrays]:
    """Gradients of the queries, in their type, and of what tiles are made of, in float32.

    Args:
        lse: of `forward`.
        d_out: the gradient of its means.
        delta: [B, groups, n, T] float32, sums over features of means times their gradients, less the gradient of lse.
    """
    given, tiles = [queries, d_out, lse, delta], [_tiles_of(plan, x) for x in (keys, values)]
    scratch = [((*queries.shape[2:4], plan.block), jnp.float32)]
    d_queries, = _over_queries(plan, _query_body, given, [keys, values], segments, [queries], scratch, interpret)
    scratch = [((*shape, plan.block), dtype) for dtype in (queries.dtype, jnp.float32) for shape in tiles]
    outputs = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (*keys, *values)]
    shares = tuple(queries.shape[1] // x.shape[1] for x in outputs)
    made = _over_keys(plan, partial(_key_body, shares), given, [keys, values], segments, outputs, scratch, interpret)
    return d_queries, tuple(made[:len(keys)]), tuple(made[len(keys):])


def _over_queries(plan: Plan, body, given: list[Operand], tiled: list[Arrays], segments: Array | None, outputs, scratch,
                  interpret) -> list[Array]:
    """A kernel that goes over all keys for each block of queries."""
    batch, groups, *_, length = given[0].shape
    blocks = length // plan.block
    of_queries = lambda b, g, i, j: (b, g, i)  # noqa: E731
    of_keys = lambda b, g, i, j: (b, g, jnp.clip(j, *plan.keys_of(i)))  # noqa: E731
    return _call(plan, body, (batch, groups, blocks, blocks), 3, given, tiled, segments, outputs, scratch,
                 (of_queries, of_keys, of_queries), interpret)


def _over_keys(plan: Plan, body, given: list[Operand], tiled: list[Arrays], segments: Array | None, outputs, scratch,
               interpret) -> list[Array]:
    """A kernel that goes over all groups and queries for each block of keys."""
    batch, groups, *_, length = given[0].shape
    blocks = length // plan.block
    of_queries = lambda b, j, g, i: (b, g, jnp.clip(i, *plan.queries_of(j, blocks)))  # noqa: E731
    of_keys = lambda b, j, g, i: (b, g, j)  # noqa: E731
    return _call(plan, body, (batch, blocks, groups, blocks), 2, given, tiled, segments, outputs, scratch,
                 (of_queries, of_keys, of_keys), interpret)


def _call(plan: Plan, body, grid: tuple[int, ...], parallel: int, given: list[Operand], tiled: list[Arrays],
          segments: Array | None, outputs, scratch, places, interpret) -> list[Array]:
    groups = given[0].shape[1]
    def spec(x: Operand, place) -> pl.BlockSpec:
        def index(*step):
            row, group, at = place(*step)
            return row, div(group, groups // x.shape[1]), *[0] * (x.ndim - 3), at
        return pl.BlockSpec((None, None, *x.shape[2:-1], plan.block), index)

    documents = [segments[:, None, None]] if plan.packed else []
    of_queries, of_keys, of_outputs = places
    operands = [(x, of_queries) for x in (*given, *documents)]
    operands += [(x, of_keys) for x in (*documents, *(x for group in tiled for x in group))]
    sizes = tuple(map(len, (given, documents, documents, *tiled, outputs, scratch)))
    return pl.pallas_call(
        partial(body, plan, sizes), grid=grid,
        in_specs=[spec(x, place) for x, place in operands], out_specs=[spec(x, of_outputs) for x in outputs],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
        scratch_shapes=[pltpu.VMEM(*x) for x in scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * parallel + ("arbitrary",) * (4 - parallel)),
        interpret=interpret)(*(x for x, _ in operands))


def _tiles_of(plan: Plan, blocks: Arrays) -> tuple[int, int]:
    """How many tiles are made of blocks like these, and the features of each."""
    made = jax.eval_shape(plan.tiles, [jax.ShapeDtypeStruct(x.shape[-2:], jnp.float32) for x in blocks])
    return len(made), made[0].shape[0]


def _grouped(refs: tuple, sizes: tuple[int, ...]) -> list[list]:
    """The references of a kernel, as many together as `sizes` says."""
    refs = iter(refs)
    return [[next(refs) for _ in range(n)] for n in sizes]


def _made(plan: Plan, refs: list, dtype) -> list[Array]:
    return [tile.astype(dtype) for tile in plan.tiles([ref[...].astype(jnp.float32) for ref in refs])]


def _by_head(plan: Plan, queries: Any, keys: list, values: list) -> Iterator[tuple[int, Array, Array]]:
    """Each head of the queries with its tiles, which may be of all heads."""
    tiles = [_made(plan, refs, queries.dtype) for refs in (keys, values)]
    for h in range(queries.shape[0]):
        yield h, *(made[h % len(made)] for made in tiles)


def _seen(plan: Plan, keys: Array, queries: Array, key_documents: list, query_documents: list) -> Array:
    """[keys, queries] of two blocks."""
    places = lambda block, shape, axis: block * plan.block + jax.lax.broadcasted_iota(jnp.int32, shape, axis)  # noqa: E731
    # A row becomes a column: transposes want whole tiles.
    columns = [jnp.swapaxes(jnp.broadcast_to(ref[...], (8, plan.block)), 0, 1)[:, :1] for ref in key_documents]
    return seen(plan, places(keys, (plan.block, 1), 0), places(queries, (1, plan.block), 1),
                *columns, *(ref[...] for ref in query_documents))


def _forward_body(plan: Plan, sizes: tuple[int, ...], *refs: Any) -> None:
    (queries,), mine, theirs, keys, values, (out, lse), (sums, top, total) = _grouped(refs, sizes)
    block, step, dtype = pl.program_id(2), pl.program_id(3), queries.dtype
    first, last = plan.keys_of(block)

    @pl.when(step == first)
    def _():
        sums[...], total[...] = jnp.zeros_like(sums), jnp.zeros_like(total)
        top[...] = jnp.full_like(top, MASKED)

    @pl.when((step >= first) & (step <= last))
    def _():
        visible = _seen(plan, step, block, theirs, mine)
        for h, key, value in _by_head(plan, queries, keys, values):
            scores = jnp.where(visible, dot(key, queries[h], (0, 0)) * plan.scale, MASKED)
            highest = jnp.maximum(top[h], scores.max(axis=0, keepdims=True))
            weights = jnp.where(visible, jnp.exp(scores - highest), 0)
            shrink = jnp.exp(top[h] - highest)
            total[h] = total[h] * shrink + weights.sum(axis=0, keepdims=True)
            sums[h] = sums[h] * shrink + dot(value, weights.astype(dtype), (1, 0))
            top[h] = highest

    @pl.when(step == last)
    def _():
        out[...] = (sums[...] / total[...]).astype(dtype)
        lse[...] = (top[...] + jnp.log(total[...]))[:, 0]


def _slopes(plan: Plan, h: int, key: Array, value: Array, given: list, visible: Array) -> tuple[Array, Array]:
    """Weights of head h, and the gradient of its scores before they were scaled, [keys, queries]."""
    queries, d_out, lse, delta = given
    scores = dot(key, queries[h], (0, 0)) * plan.scale
    weights = jnp.where(visible, jnp.exp(scores - lse[h:h + 1]), 0)
    slopes = weights * (dot(value, d_out[h], (0, 0)) - delta[h:h + 1]) * plan.scale
    return weights.astype(queries.dtype), slopes.astype(queries.dtype)


def _query_body(plan: Plan, sizes: tuple[int, ...], *refs: Any) -> None:
    given, mine, theirs, keys, values, (d_queries,), (sums,) = _grouped(refs, sizes)
    block, step, dtype = pl.program_id(2), pl.program_id(3), d_queries.dtype
    first, last = plan.keys_of(block)

    @pl.when(step == first)
    def _():
        sums[...] = jnp.zeros_like(sums)

    @pl.when((step >= first) & (step <= last))
    def _():
        visible = _seen(plan, step, block, theirs, mine)
        for h, key, value in _by_head(plan, given[0], keys, values):
            _, slopes = _slopes(plan, h, key, value, given, visible)
            sums[h] += dot(key, slopes, (1, 0))

    @pl.when(step == last)
    def _():
        d_queries[...] = sums[...].astype(dtype)


def _key_body(shares: tuple[int, ...], plan: Plan, sizes: tuple[int, ...], *refs: Any) -> None:
    given, mine, theirs, keys, values, outputs, scratch = _grouped(refs, sizes)
    made, sums = scratch[:2], scratch[2:]
    block, group, step = pl.program_id(1), pl.program_id(2), pl.program_id(3)
    first, last = plan.queries_of(block, pl.num_programs(1))

    @pl.when(step == first)
    def _():
        for ref, blocks in zip(made, (keys, values), strict=True):
            for h, tile in enumerate(_made(plan, blocks, ref.dtype)):
                ref[h] = tile
        for ref in sums:
            ref[...] = jnp.zeros_like(ref)

    @pl.when((step >= first) & (step <= last))
    def _():
        visible = _seen(plan, block, step, theirs, mine)
        for h in range(given[0].shape[0]):
            tile = h % made[0].shape[0]
            weights, slopes = _slopes(plan, h, made[0][tile], made[1][tile], given, visible)
            sums[0][tile] += dot(given[0][h], slopes, (1, 1))
            sums[1][tile] += dot(given[1][h], weights, (1, 1))

    @pl.when(step == last)
    def _():
        found = [x for blocks, ref in zip((keys, values), sums, strict=True) for x in _pulled_back(plan, blocks, ref)]
        for ref, share, x in zip(outputs, shares, found, strict=True):
            # What several groups have in common collects their gradients, one group after another.
            ref[...] = jnp.where(rem(group, share) == 0, x, ref[...] + x)


def _pulled_back(plan: Plan, blocks: list, tiles: Any) -> list[Array]:
    """Gradients of what tiles are made of, given those of the tiles [n, features, keys]."""
    _, pull = jax.vjp(plan.tiles, [ref[...].astype(jnp.float32) for ref in blocks])
    return pull(tuple(tiles[h] for h in range(tiles.shape[0])))[0]
