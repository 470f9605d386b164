"""Decode attention on TPUs: any program over the past, each sequence as far as it goes, each block read once."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.kernels.decode.program import MASKED, Arrays, Entry, Past, Program, dequantised, positions_of, visible


def decode(program: Program, past: Past, queries: Arrays, constants: Arrays, entries: tuple[Entry, ...],
           lengths: Array, interpret: Any = False) -> tuple[Arrays, Array]:
    """Attention of new tokens to the past.

    Args:
        queries: [B, ...] each, as the program takes them of one sequence.
        constants: what the program takes for all sequences.
        entries: what it calls blocks, in its order.
        lengths: int32 [B], tokens held of each sequence, which are all before its new tokens.
        interpret: as `pallas_call` takes it.
    Returns:
        The program's outputs [B, *shape] float32, and the log-sum-exps of the rows' scores [B, rows, 1]. Rows that see
        nothing give 0 and `MASKED`.
    """
    slots = jnp.stack([jnp.asarray(entry.slot, jnp.int32) for entry in entries])
    stored = [x for entry in entries for x in (entry.stored, entry.scales) if x is not None]
    outputs = [jax.ShapeDtypeStruct((len(lengths), *shape), jnp.float32)
               for shape in (*program.outputs, (program.rows, 1))]
    *made, lse = pl.pallas_call(
        partial(_body, program, past, len(queries), len(constants), entries_of(entries)),
        grid_spec=grid_of(program, past, queries, constants, entries, len(lengths)), out_shape=outputs,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret)(slots, lengths, *queries, *constants, *stored)
    return tuple(made), lse


def entries_of(entries: tuple[Entry, ...]) -> tuple[tuple[bool, int], ...]:
    """The static part of entries: whether there are scales, and for how many features each."""
    return tuple((entry.scales is not None, entry.inner) for entry in entries)


def grid_of(program: Program, past: Past, queries: Arrays, constants: Arrays, entries: tuple[Entry, ...],
            batch: int) -> pltpu.PrefetchScalarGridSpec:
    """The grid (sequences, blocks), and what each of its steps reads and writes; scalars are slots and lengths."""
    def of_block(number: int, stored: Array) -> pl.BlockSpec:
        def index(b, i, slots, lengths):
            # Steps before and after what is seen stay at a block that is fetched anyway.
            return slots[number], b, 0, jnp.clip(i, past.first(lengths[b]), past.last(lengths[b]))
        return pl.BlockSpec((None, None, stored.shape[2], past.block), index)

    def of_sequence(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda b, i, *_: (b, *[0] * len(shape)))

    def whole(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda b, i, *_: (0,) * len(shape))

    blocks = [of_block(number, x) for number, entry in enumerate(entries)
              for x in (entry.stored, entry.scales) if x is not None]
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2, grid=(batch, past.size // past.block),
        in_specs=[*(of_sequence(q.shape[1:]) for q in queries), *(whole(c.shape) for c in constants), *blocks],
        out_specs=[of_sequence(shape) for shape in (*program.outputs, (program.rows, 1))],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in (*program.sums, *[(program.rows, 1)] * 2)])


def _body(program: Program, past: Past, queries: int, constants: int, entries: tuple[tuple[bool, int], ...],
          slots: Any, lengths: Any, *refs: Any) -> None:
    refs = iter(refs)
    take = lambda n: tuple(next(refs) for _ in range(n))  # noqa: E731
    queries, constants = take(queries), take(constants)
    stored = [(*take(1 + scaled), inner) for scaled, inner in entries]
    outputs, (lse,), sums, (top, total) = take(len(program.outputs)), take(1), take(len(program.sums)), take(2)
    step, length = pl.program_id(1), lengths[pl.program_id(0)]

    @pl.when(step == 0)
    def _():
        for ref in (*sums, total):
            ref[...] = jnp.zeros_like(ref)
        top[...] = jnp.full_like(top, MASKED)

    @pl.when((step >= past.first(length)) & (step * past.block < length))
    def _():
        given, dtype = [tuple(ref[...] for ref in group) for group in (queries, constants)], queries[0].dtype
        blocks = tuple(dequantised(ref[...], scales[0][...] if scales else None, inner, dtype)
                       for ref, *scales, inner in stored)
        iota = lambda axis, shape: jax.lax.broadcasted_iota(jnp.int32, shape, axis)  # noqa: E731
        slots_of = lambda rows: step * past.block + iota(1, (rows, past.block))  # noqa: E731
        scores = program.scores(*given, blocks, positions_of(past, slots_of(1), length)) * past.scale
        tokens = program.tokens(iota(0, (program.rows, 1)))
        seen = visible(past, slots_of(program.rows), tokens, length)
        scores = jnp.where(seen, scores, MASKED)
        highest = jnp.maximum(top[...], scores.max(axis=1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - highest), 0)
        shrink = jnp.exp(top[...] - highest)
        total[...] = total[...] * shrink + weights.sum(axis=1, keepdims=True)
        top[...] = highest
        for ref, factor, new in zip(sums, program.spread(shrink), program.weighted(weights, blocks), strict=True):
            ref[...] = ref[...] * factor + new

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        some = jnp.maximum(total[...], 1e-30)
        normed = tuple(ref[...] / factor for ref, factor in zip(sums, program.spread(some), strict=True))
        for ref, out in zip(outputs, program.finish(normed), strict=True):
            ref[...] = out
        lse[...] = jnp.where(total[...] > 0, top[...] + jnp.log(some), MASKED)
