"""Decode attention on Hopper GPUs: any program over the past, in Pallas Mosaic GPU.

A warpgroup takes one split of one sequence, for one group of the program's rows. It copies blocks of the past as they
lie in the cache to a ring of buffers in shared memory, several ahead, and keeps running sums; splits are put together
by their log-sum-exps in plain JAX. Blocks beyond a sequence's end, or before its window, are not fetched.

There is one warpgroup to a kernel block, since the compiler gives reductions over several warps one scratch buffer for
all warpgroups; two blocks share a multiprocessor where its memory has room, and so one computes while another waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.decode.gpu_programs import Plan, along, apart, in_place, plan_for, tiled, transposed, up
from kvjax.kernels.decode.program import MASKED, Arrays, Entry, Past, Program, Shape, div, rem, visible

LOG2E = math.log2(math.e)
SHARED, RESERVED = 227 * 1024, 3 * 1024
"""Bytes of shared memory of a multiprocessor, and those of a warpgroup beside what is counted here."""
GRID = ("split", "sequence", "group")


@dataclass(frozen=True)
class Tiles:
    """How the work is divided."""

    block: int = 64
    """Tokens of a block: a multiple of 64."""
    stages: int | None = None
    """Blocks in shared memory at once; None: 2 to 4 if they fit, for two warpgroups to a multiprocessor if they can."""
    splits: int | None = None
    """Parts of each sequence; None: what fills the multiprocessors with the least work for each."""
    multiprocessors: int = 132

    def stages_of(self, block_bytes: int, other_bytes: int) -> int:
        """Raises ValueError if shared memory has no room for one block."""
        if self.stages is not None:
            return self.stages
        fits = [(share - RESERVED - other_bytes) // block_bytes for share in (SHARED // 2, SHARED)]
        if fits[1] < 1:
            raise ValueError(f"blocks of {self.block} tokens take {block_bytes} bytes, beside {other_bytes} of queries "
                             f"and weights: more than the {SHARED} of a multiprocessor")
        return min(4, next((n for n in fits if n >= 2), 1))

    def splits_of(self, size: int, warpgroups: int, at_once: int, token_bytes: int, result_bytes: int) -> int:
        """Splits with the least time, counted in bytes: of all rounds over the multiprocessors, and of results."""
        def time(splits: int) -> float:
            rounds = -(-warpgroups * splits // (self.multiprocessors * at_once))
            return rounds * (size * token_bytes / splits + 2 * result_bytes)
        return self.splits or min(range(1, max(2, size // (4 * self.block) + 1)), key=time)


DEFAULT = Tiles()


def decode(program: Program, past: Past, queries: Arrays, constants: Arrays, entries: tuple[Entry, ...],
           lengths: Array, interpret: Any = None, tiles: Tiles = DEFAULT) -> tuple[Arrays, Array]:
    """Attention of new tokens to the past: `tpu.decode` for GPUs.

    Args:
        queries: [B, ...] each, as the program takes them of one sequence.
        constants: none; programs that have them are refused.
        entries: what it calls blocks, in its order: [slots, B, F, S] in bfloat16 or float16.
        lengths: int32 [B], tokens held of each sequence, which are all before its new tokens.
        interpret: parameters of Pallas's interpreter for GPUs; None: run on a GPU.
    Returns:
        The program's outputs [B, *shape] float32, and the log-sum-exps of the rows' scores [B, rows, 1]. Rows that see
        nothing give 0 and `MASKED`.
    Raises:
        ValueError: the program, the element types or the sizes cannot run here; the message says why.
    """
    dtype, batch = _dtype_of(entries), len(lengths)
    if past.size % tiles.block:
        raise ValueError(f"a cache of {past.size} tokens is no whole number of blocks of {tiles.block}")
    plan = plan_for(program, tiles.block, dtype, apart if interpret else in_place)
    operands, own = zip(*plan.operands(queries, past.scale * LOG2E), strict=True)
    shared = _Shared.of(plan, tiles, [(x.shape[-2:], x.dtype) for x in operands])
    splits = tiles.splits_of(past.size, batch * plan.groups, shared.at_once, shared.token_bytes, _result_bytes(plan))
    rows = lambda *shape: jax.ShapeDtypeStruct((splits, batch, plan.groups, *shape), jnp.float32)
    slots = jnp.stack([jnp.asarray(entry.slot, jnp.int32) for entry in entries])
    *sums, top, total = plgpu.kernel(
        partial(_body, plan, replace(past, block=tiles.block), shared.stages, splits, own),
        out_type=[*(rows(*shape) for shape in plan.sums), *[rows(plan.columns)] * 2],
        grid=(splits, batch, plan.groups), grid_names=GRID, scratch_types=shared.types,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True),
        **({"interpret": interpret} if interpret else {}),
    )(slots, lengths.astype(jnp.int32), *operands, *(entry.stored for entry in entries))
    return _merged(plan, tuple(sums), top, total)


def _dtype_of(entries: tuple[Entry, ...]) -> Any:
    types = {jnp.dtype(entry.stored.dtype) for entry in entries}
    if len(types) > 1 or not types <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}:
        names = ", ".join(sorted(x.name for x in types))
        raise ValueError(f"a cache of {names}: the GPU kernel reads bfloat16 or float16 alone, since tensor cores "
                         "take no other type with tokens in the minor axis")
    return types.pop()


def _result_bytes(plan: Plan) -> int:
    """Of one split and group."""
    return 4 * (sum(math.prod(shape) for shape in plan.sums) + 2 * plan.columns)


def _merged(plan: Plan, sums: Arrays, top: Array, total: Array) -> tuple[Arrays, Array]:
    """Outputs and log-sum-exps of all splits; `top` is a base-2 logarithm."""
    highest = top.max(axis=0)
    weights = jnp.exp2(top - highest)
    whole = (weights * total).sum(axis=0)
    some = jnp.maximum(whole, 1e-30)
    outputs, by_row = plan.finish(sums, weights / some)
    return outputs, by_row(jnp.where(whole > 0, highest / LOG2E + jnp.log(some), MASKED))


class _Shared(NamedTuple):
    """What is in the shared memory of a warpgroup."""

    types: list
    stages: int
    at_once: int
    """Warpgroups that share a multiprocessor."""
    token_bytes: int
    """Bytes of a token, of one group."""

    @classmethod
    def of(cls, plan: Plan, tiles: Tiles, operands: list[tuple[Shape, Any]]) -> _Shared:
        weights = ((plan.columns, tiles.block), plan.weights_dtype)
        fixed = [*operands, weights, weights, *plan.scratch]
        fixed_bytes = sum(2 * shape[0] * up(shape[1], plan.swizzle // 2) for shape, _ in fixed)
        token_bytes = sum(2 * read.buffer for read in plan.reads)
        stages = tiles.stages_of(token_bytes * tiles.block, fixed_bytes)
        buffers = [((stages, read.buffer, tiles.block), plan.dtype) for read in plan.reads]
        swizzles = [*[plan.swizzle] * len(fixed), *(read.swizzle for read in plan.reads)]
        types = [plgpu.SMEM(shape, kind, transforms=tiled(swizzle))
                 for (shape, kind), swizzle in zip((*fixed, *buffers), swizzles, strict=True)]
        barriers = [plgpu.Barrier(num_barriers=n) for n in (len(operands), *[stages] * len(plan.reads))]
        whole = RESERVED + fixed_bytes + stages * token_bytes * tiles.block
        return cls([*types, *barriers], stages, min(4, SHARED // whole), token_bytes)


class _Range(NamedTuple):
    """Blocks of a split."""

    first: Array
    count: Array

    @classmethod
    def of(cls, past: Past, length: Array, splits: int) -> _Range:
        first = past.first(length)
        count = jnp.where(length > 0, past.last(length) + 1 - first, 0)
        each = div(count + splits - 1, splits)
        before = jax.lax.axis_index("split") * each
        return cls(first + before, jnp.clip(count - before, 0, each))


def _body(plan: Plan, past: Past, stages: int, splits: int, own: tuple[bool, ...], *refs: Any) -> None:
    refs = iter(refs)
    take = lambda n: [next(refs) for _ in range(n)]
    (slots, lengths), given, stored = take(2), take(len(own)), take(plan.entries)
    sums_out, ends_out, operands = take(len(plan.sums)), take(2), take(len(own))
    (weights, shrunk), scratch, buffers = take(2), take(len(plan.scratch)), take(len(plan.reads))
    (operands_here,), blocks_here = take(1), take(len(plan.reads))
    sequence, group = (jax.lax.axis_index(name) for name in GRID[1:])
    length, slots = lengths[sequence], [slots[entry] for entry in range(plan.entries)]  # once: memory is far
    blocks = _Range.of(past, length, splits)

    def fetch(step: Array) -> None:
        stage, tokens = rem(step, stages), pl.ds((blocks.first + step) * past.block, past.block)
        for read, buffer, here in zip(plan.reads, buffers, blocks_here, strict=True):
            _copy(read, div(group, plan.groups // plan.heads),
                  lambda entry, rows: stored[entry].at[slots[entry], sequence, rows, tokens],  # noqa: B023
                  buffer.at[stage, pl.ds(0, read.rows)], here.at[stage])

    for number, (x, each, ref) in enumerate(zip(given, own, operands, strict=True)):
        plgpu.copy_gmem_to_smem(x.at[sequence, group] if each else x, ref, operands_here.at[number])
    _clear(plan, buffers, stages)
    for step in range(stages):
        pl.when(step < blocks.count)(partial(fetch, jnp.int32(step)))
    for number in range(len(own)):
        plgpu.barrier_wait(operands_here.at[number])

    def attend(step: Array, carry: tuple) -> tuple:
        stage = rem(step, stages)
        for here in blocks_here:
            plgpu.barrier_wait(here.at[stage])
        held = [buffer.at[stage] for buffer in buffers]
        scores = plan.scores(operands, held, scratch, past.scale * LOG2E)
        seen = _seen(plan, past, (blocks.first + step) * past.block, group, length)
        carry, shrink = _softmax(plan, scores, seen, carry, weights, shrunk)
        sums = plan.weighted(weights, shrunk, shrink, operands, held, scratch, carry[2])
        pl.when(step + stages < blocks.count)(lambda: fetch(step + stages))
        return *carry[:2], sums

    top, total, sums = jax.lax.fori_loop(0, blocks.count, attend, _start(plan, past.block))
    at = tuple(jax.lax.axis_index(name) for name in GRID)
    for ref, value in zip((*sums_out, *ends_out), (*sums, top, total.sum(axis=0)), strict=True):
        ref[at] = value


def _copy(read: Any, head: Array, source: Callable[[int, Any], Any], buffer: Any, here: Any) -> None:
    """Starts the copy of a head's part of a block, from whichever of the arrays that have consecutive heads."""
    def copy(entry: int, before: int) -> None:
        first = (head - before) * read.rows if read.by_head else 0
        plgpu.copy_gmem_to_smem(source(entry, pl.ds(first, read.rows)), buffer, here)
    if len(read.sources) == 1:
        return copy(read.sources[0][0], 0)
    before = 0
    for entry, heads in read.sources:
        pl.when((head >= before) & (head < before + heads))(partial(copy, entry, before))
        before += heads


def _clear(plan: Plan, buffers: list, stages: int) -> None:
    """Zeros where no copy writes and products read."""
    for read, buffer in zip(plan.reads, buffers, strict=True):
        for stage in range(stages if read.rows < read.buffer else 0):
            buffer[stage] = plgpu.layout_cast(jnp.zeros(buffer.shape[1:], buffer.dtype), plgpu.Layout.WGMMA)
    plgpu.commit_smem()


def _start(plan: Plan, block: int) -> tuple:
    """Base-2 logarithm of what weights are divided by [columns], sums of weights [block, columns], and the sums."""
    zeros = lambda shape: jnp.zeros(shape, jnp.float32)
    top = jnp.full((plan.columns,), MASKED, jnp.float32)
    return top, zeros((block, plan.columns)), tuple(zeros(shape) for shape in plan.sums)


def _seen(plan: Plan, past: Past, start: Array, group: Array, length: Array) -> Array:
    """[block, columns]: which tokens from slot `start` are seen."""
    iota = lambda axis: plgpu.broadcasted_iota(jnp.int32, (past.block, plan.columns), axis, layout=plgpu.Layout.WGMMA)
    return visible(past, start + iota(0), plan.token(iota(1), group), length)


def _softmax(plan: Plan, scores: Array, seen: Array, carry: tuple, weights: Any, shrunk: Any) -> tuple[tuple, Array]:
    """What is carried with a block's weights, which go to shared memory, and by what the sums before are to shrink.

    Scores are base-2 logarithms, and what is taken off them whole numbers: sums shrink by powers of two, which are the
    same in any type. Each thread adds up its own weights.
    """
    top, total, sums = carry
    scores = jnp.where(seen, scores, MASKED)
    highest = jnp.maximum(top, jnp.round(scores.max(axis=0)))
    found = jnp.where(seen, jnp.exp2(scores - along(highest, scores.shape, 1)), 0.0)
    shrink = jnp.exp2(top - highest)
    total = total * along(shrink, scores.shape, 1) + found
    _put(weights, found)
    if plan.scratch:
        # Nothing is added: the sum tells the compiler how the array lies over threads.
        _put(shrunk, along(shrink, scores.shape, 1) + 0 * found)
    plgpu.commit_smem()
    return (highest, total, sums), shrink


def _put(ref: Any, values: Array) -> None:
    """Stores [tokens, columns] as [columns, tokens]."""
    transposed(ref)[...] = plgpu.layout_cast(values.astype(ref.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
