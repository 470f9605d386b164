"""Kronecker flash attention on Hopper GPUs: tiles of keys and values are rebuilt in SMEM, never written to HBM.

What bounds it is the tensor cores. Of d features, per key and head (c: a factor's columns, 16 where R w is at most 16):
- forward, for each block of n queries: 4 n d FLOPs of attention, and 4 c d (R of keys + R of values) of rebuilding,
  which is 25 % more at n = 256 and rank 2, and 50 % where a block has 128; 4 c bytes are read for each group of ranks
  of keys and of values, which for 8 x 8 features and rank 2 is 128 instead of 256;
- queries' gradients: 6 n d, and the same rebuilding, 33 % more at n = 128;
- factors' gradients: 8 d for each query, while a tile is rebuilt, and its gradient taken to the factors, once per head.
So it takes more time than attention with keys and values in memory, the more the longer T is; what it saves is these,
4 H d bytes per token and layer, and as much of gradients. Gradients of A leave complete; those of B in a sum over
`Tiles.splits` parts, as nothing orders blocks of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

MASKED = -1e30
LOG2E = math.log2(math.e)
COMPUTE = 2
"""Warpgroups that attend; one more rebuilds or fetches tiles for them."""
WIDE = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))
NARROW = (plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(32))
"""Factors and selections: products over 16 columns need the 32-byte swizzle."""
PART = 64, 32
"""What of a tile is rebuilt at once, as three such, in float32, have to fit the registers."""
SMEM = 227 * 1024
"""Bytes that a block of the grid may take on Hopper."""
PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
Place = tuple[Array, Array]
"""A row of the batch, and a head."""
Sums = tuple[tuple[Array, Array, Array], ...]
"""Of each strip: what is weighted [64, width], the highest score and the weights' sum [64]."""


@dataclass(frozen=True)
class Sizes:
    """What is static of the attention: keys of head i1 h2 + i2 and feature j1 d2 + j2 are 1/R sum_r A_r B_r."""

    h1: int
    h2: int
    d1: int
    d2: int
    k_rank: int
    v_rank: int
    scale: float
    window: int | None = None
    """A query sees keys with query - key < window."""

    @property
    def width(self) -> int:
        """d, padded as tiles need it."""
        return padded(self.d1 * self.d2, 64)

    @property
    def factor(self) -> float:
        """Of the product of a query and R times a key: gives the score in powers of two."""
        return self.scale / self.k_rank * LOG2E

    def keys(self, upright: bool) -> Rebuilt:
        return Rebuilt(self, self.k_rank, upright)

    def values(self, upright: bool) -> Rebuilt:
        return Rebuilt(self, self.v_rank, upright)


@dataclass(frozen=True)
class Tiles:
    """Sizes of tiles."""

    strips: int = 2
    """Of 64 queries, which each of the two warpgroups that attend holds in the forward pass."""
    keys: int = 64
    stages: int = 2
    """Tiles of keys and of values that are rebuilt ahead."""
    queries: int = 32
    """That a block of the grid that owns keys fetches at once."""
    fetched: int = 3
    """Tiles of them that are fetched ahead."""
    key_groups: int = 2
    """Warpgroups of a block of the grid that owns keys, of 64 each."""
    splits: int = 4
    """Among how many blocks of the grid the h1 rows of heads are split in the pass that gives the factors' gradients,
    at most: each gives a part of those of B."""

    @property
    def rows(self) -> int:
        return 64 * self.strips

    @property
    def registers(self) -> tuple[int, int]:
        """Of each thread that attends, and of each that rebuilds; twice the former and the latter are 504."""
        return (192, 120) if self.strips > 1 else (176, 152)

    @property
    def block(self) -> int:
        """Queries of a block of the grid."""
        return COMPUTE * self.rows

    @property
    def owned(self) -> int:
        """Keys of a block of the grid that owns keys."""
        return 64 * self.key_groups

    def slot(self, step: Array) -> Array:
        """Of a rebuilt tile."""
        return lax.rem(step, jnp.int32(self.stages))

    def fetched_slot(self, step: Array) -> Array:
        return lax.rem(step, jnp.int32(self.fetched))


@dataclass(frozen=True)
class Columns:
    """How the R w numbers of a row of a factor lie in columns: as many ranks beside each other as 16 columns hold."""

    rank: int
    size: int
    """w, of one rank."""

    @property
    def together(self) -> int:
        return min(self.rank, max(1, 16 // self.size))

    @property
    def count(self) -> int:
        return padded(self.together * self.size, 16)

    @property
    def groups(self) -> int:
        return -(-self.rank // self.together)

    def packed(self, factor: Array) -> Array:
        """[B, T, R, h, w] -> [B, h, groups, T, columns], zeros where there is no rank."""
        batch, time, rank, heads, size = factor.shape
        factor = jnp.pad(factor, ((0, 0), (0, 0), (0, self.groups * self.together - rank), (0, 0), (0, 0)))
        factor = factor.reshape(batch, time, self.groups, self.together, heads, size)
        factor = factor.transpose(0, 4, 2, 1, 3, 5).reshape(batch, heads, self.groups, time, self.together * size)
        return widened(factor, self.count)

    def unpacked(self, columns: Array) -> Array:
        """The opposite."""
        batch, heads, groups, time, _ = columns.shape
        factor = columns[..., :self.together * self.size]
        factor = factor.reshape(batch, heads, groups, time, self.together, self.size).transpose(0, 3, 2, 4, 1, 5)
        return factor.reshape(batch, time, groups * self.together, heads, self.size)[:, :, :self.rank]

    def selection(self, wanted: np.ndarray, width: int) -> np.ndarray:
        """[together, columns, width] of 0 and 1: a packed row times the p-th is rank p's numbers, as features want."""
        made = np.zeros((self.together, self.count, width), np.float32)
        for place in range(self.together):
            made[place, place * self.size + wanted, np.arange(len(wanted))] = 1
        return made

    def of(self, rank: Array) -> tuple[Array, Array]:
        """The group a rank is in, and its place there."""
        return quotient(rank, self.together), lax.rem(rank, jnp.int32(self.together))


@dataclass(frozen=True)
class Rebuilt:
    """Keys or values, R times them, of which tiles are rebuilt: sum_r (A E1_r) (B E2_r).

    E1 and E2, the selections, repeat each number of A and of B where features take it; so all products are wgmmas,
    which are exact, and the sum is taken of registers that lie alike.
    """

    sizes: Sizes
    rank: int
    upright: bool
    """Whether tiles are [width, tokens]; otherwise [tokens, width]."""

    @property
    def columns(self) -> tuple[Columns, Columns]:
        """Of A and of B."""
        return Columns(self.rank, self.sizes.d1), Columns(self.rank, self.sizes.d2)

    @property
    def copies(self) -> int:
        return sum(c.groups for c in self.columns)

    def given(self, a: Array, b: Array) -> list[Array]:
        """A and B [B, h, groups, T, columns], and their selections [places, columns, width]; upright: transposed."""
        feature = np.arange(self.sizes.d1 * self.sizes.d2)
        wanted = feature // self.sizes.d2, feature % self.sizes.d2
        made = [*(c.packed(x) for c, x in zip(self.columns, (a, b), strict=True)),
                *(jnp.asarray(c.selection(x, self.sizes.width), a.dtype)
                  for c, x in zip(self.columns, wanted, strict=True))]
        return [x.swapaxes(-1, -2) for x in made] if self.upright else made

    def scratch(self, ahead: int, tokens: int, dtype: Any) -> dict[str, Any]:
        """SMEM for tiles, factors and selections, and the barrier factors arrive at."""
        turned = lambda *shape: (*shape[:-2], *(shape[:-3:-1] if self.upright else shape[-2:]))
        wide, narrow = (partial(plgpu.SMEM, dtype=dtype, transforms=x) for x in (WIDE, NARROW))
        return {"tiles": wide(turned(ahead, tokens, self.sizes.width)),
                "factors": [narrow(turned(ahead, c.groups, tokens, c.count)) for c in self.columns],
                "choose": [narrow(turned(c.together, c.count, self.sizes.width)) for c in self.columns],
                "here": plgpu.Barrier(num_arrivals=self.copies, num_barriers=ahead)}

    def fetch(self, given: Sequence[Any], scratch: dict[str, Any], place: Place, tokens: Any, slot: Array) -> None:
        """Starts the copies of factors: of a group each, as all of them have a dimension too many for the TMA."""
        batch, head = place
        rows = quotient(head, self.sizes.h2), lax.rem(head, jnp.int32(self.sizes.h2))
        for source, there, row in zip(given, scratch["factors"], rows, strict=False):
            for group in range(there.shape[1]):
                at = (batch, row, group, slice(None), tokens) if self.upright else (batch, row, group, tokens)
                plgpu.copy_gmem_to_smem(source.at[at], there.at[slot, group], scratch["here"].at[slot])

    def rebuild(self, scratch: dict[str, Any], slot: Array) -> None:
        """Makes a tile, when its factors are there."""
        plgpu.barrier_wait(scratch["here"].at[slot])
        tile, factors = scratch["tiles"].at[slot], [x.at[slot] for x in scratch["factors"]]
        across = tile.shape[1] // PART[1]

        def part(n: Array, _: None) -> None:
            rows = pl.ds(quotient(n, across) * PART[0], PART[0])
            columns = pl.ds(lax.rem(n, jnp.int32(across)) * PART[1], PART[1])
            def more(rank: Array, total: Array) -> Array:
                a, b = product(PART, *(self.pair(factors, scratch["choose"], i, rank, rows, columns) for i in (0, 1)))
                return total + a * b
            total = lax.fori_loop(0, self.rank, more, jnp.zeros(PART, jnp.float32))
            tile[rows, columns] = total.astype(tile.dtype)
        lax.fori_loop(0, tile.shape[0] // PART[0] * across, part, None)

    def pair(self, factors: Sequence[Any], choose: Sequence[Any], i: int, rank: Array, rows: Any, columns: Any
             ) -> tuple[Any, Any]:
        """Two tiles in SMEM whose product is A (i = 0) or B (i = 1) of a rank, repeated for features."""
        group, place = self.columns[i].of(rank)
        if self.upright:
            return choose[i].at[place, rows], factors[i].at[group, :, columns]
        return factors[i].at[group, rows], choose[i].at[place, :, columns]


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def along_time(x: Array, total: int) -> Array:
    """[B, T, ...] -> [B, total, ...], padded with zeros."""
    return jnp.pad(x, ((0, 0), (0, total - x.shape[1])) + ((0, 0),) * (x.ndim - 2))


def widened(x: Array, width: int) -> Array:
    """[..., d] -> [..., width], padded with zeros."""
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, width - x.shape[-1]),))


def forward(sizes: Sizes, queries: Array, k_a: Array, k_b: Array, v_a: Array, v_b: Array, segments: Array | None,
            tiles: Tiles | None = None, interpret: Any = None) -> tuple[Array, Array]:
    """Causal attention of tokens to themselves.

    Args:
        queries: [B, T, H, d] bfloat16.
        k_a, k_b: [B, T, R, h1, d1] and [B, T, R, h2, d2]; v_a, v_b: likewise, of their own rank.
        segments: int32 [B, T], tokens see only those of the same; None: all are of one.
        interpret: as `plgpu.kernel` takes it.
    Returns:
        [B, T, H, d], and the log-sum-exps of the rows' scores [B, T, H] float32. Rows that see nothing give 0 and
        `MASKED`.
    Raises ValueError for what it can not take.
    """
    check(sizes, queries)
    tiles = fitting(sizes) if tiles is None else tiles
    batch, time, heads, features = queries.shape
    total = padded(time, math.lcm(tiles.block, tiles.keys))
    queries, k_a, k_b, v_a, v_b = (along_time(x, total) for x in (queries, k_a, k_b, v_a, v_b))
    queries, marks = widened(queries, sizes.width), [] if segments is None else [along_time(segments, total)]
    keys, values = sizes.keys(upright=True), sizes.values(upright=False)
    wide = partial(plgpu.SMEM, dtype=queries.dtype, transforms=WIDE)
    rows = COMPUTE, tiles.rows
    out, lse = over_queries(
        partial(_forward, sizes, tiles, keys, values), tiles, keys, values, marks,
        given=[queries, keys.given(k_a, k_b), values.given(v_a, v_b), marks],
        gives=[jax.ShapeDtypeStruct(queries.shape, queries.dtype),
               jax.ShapeDtypeStruct((batch, heads, total), jnp.float32)],
        scratch={"q_s": wide((*rows, sizes.width)), "p_s": wide((*rows, tiles.keys)),
                 "lse_s": plgpu.SMEM(rows, jnp.float32),
                 "here": plgpu.Barrier(num_arrivals=1 + len(marks), num_barriers=COMPUTE)},
        interpret=interpret)
    return out[:, :time, :, :features], lse[:, :, :time].swapaxes(1, 2)


def check(sizes: Sizes, queries: Array) -> None:
    """Raises ValueError where heads are too wide, or numbers not of a type that tensor cores multiply."""
    if queries.shape[2:] != (sizes.h1 * sizes.h2, sizes.d1 * sizes.d2):
        raise ValueError(f"queries of {queries.shape[2]} heads and {queries.shape[3]} features are not of {sizes}")
    if sizes.width > 128:
        raise ValueError(f"{sizes.d1 * sizes.d2} features of a head: the GPU kernel takes at most 128")
    if queries.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"{queries.dtype}: the GPU kernel takes bfloat16 or float16, as tensor cores do")


def fitting(sizes: Sizes) -> Tiles:
    """Tiles that fit the registers and SMEM. Raises ValueError where the accumulated gradients of B do not."""
    for key_groups in (2, 1):
        keys, values = sizes.keys(upright=False), sizes.values(upright=False)
        few = sizes.width == 64 and keys.copies == values.copies == 2
        tiles = Tiles(strips=1 + few, key_groups=key_groups)  # with more to fetch, who rebuilds needs more registers
        scratch = _factor_scratch(sizes, tiles, keys, values, jnp.bfloat16, 1)
        kept = [x for x in jax.tree.leaves(scratch) if not isinstance(x, plgpu.Barrier)]
        if sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in kept) <= SMEM - 4096:
            return tiles
    raise ValueError(f"h2 = {sizes.h2} rows of B of {sizes.d2} features, of ranks {sizes.k_rank} and {sizes.v_rank}, "
                     "are more than the gradients' kernel keeps in SMEM")


def over_queries(body: Callable[..., None], tiles: Tiles, keys: Rebuilt, values: Rebuilt, marks: list[Array], *,
                 given: list[Any], gives: list[Any], scratch: dict[str, Any], interpret: Any) -> list[Array]:
    """Runs a kernel whose blocks are of queries, and see rebuilt keys and values.

    Args:
        body: takes the references of `given`, those of `gives`, and by name the scratch.
        given: queries [B, T, H, width] and other arrays, nested.
    """
    queries, marked = given[0], len(marks)
    flat, tree = jax.tree.flatten(given)
    parts = {name: what.scratch(tiles.stages, tiles.keys, queries.dtype)
             for name, what in (("keys_s", keys), ("values_s", values))}
    barriers = partial(plgpu.Barrier, num_barriers=tiles.stages)
    return plgpu.kernel(
        lambda *refs, **kept: body(jax.tree.unflatten(tree, refs[:len(flat)]), refs[len(flat):], **kept),
        out_type=gives, interpret=interpret, compiler_params=PARAMS, num_threads=COMPUTE + 1, thread_name="group",
        grid=(queries.shape[1] // tiles.block, queries.shape[2], queries.shape[0]), grid_names=("block", "head", "row"),
        scratch_types=scratch | parts | {
            "marks_s": [plgpu.SMEM((COMPUTE, tiles.rows), jnp.int32), plgpu.SMEM((tiles.stages, tiles.keys), jnp.int32)
                        ] * marked,
            "chosen": plgpu.Barrier(num_arrivals=4), "free": [barriers(num_arrivals=COMPUTE)] * 2,
            "ready": [barriers(num_arrivals=1 + marked), barriers(num_arrivals=1)]})(*flat)


@dataclass(frozen=True)
class Block:
    """Where a block of the grid, and a warpgroup in it, is."""

    place: Place
    start: Array
    """The first query of the block."""
    group: Array
    row: Array
    """The first query of the warpgroup."""
    first: Array
    last: Array
    """Tiles of keys that queries of the block see: from the first, before the last."""


def block_here(sizes: Sizes, tiles: Tiles, time: int) -> Block:
    """The longest start first."""
    start = (time // tiles.block - 1 - lax.axis_index("block")) * tiles.block
    group = lax.axis_index("group")
    first = jnp.int32(0) if sizes.window is None else quotient(jnp.maximum(start - (sizes.window - 1), 0), tiles.keys)
    return Block((lax.axis_index("row"), lax.axis_index("head")), start, group, start + group * tiles.rows, first,
                 tiles_until(start + tiles.block, tiles.keys))


def quotient(x: Array, by: int) -> Array:
    return lax.div(x, jnp.int32(by))


def tiles_until(token: Array, size: int) -> Array:
    """How many tiles hold the tokens before one."""
    return quotient(token + (size - 1), size)


def spans(sizes: Sizes, tiles: Tiles, block: Block, marked: bool) -> list[tuple[Array, Array, bool]]:
    """The tiles of keys that a warpgroup's queries see: (start, end, whether some are masked) of each stretch."""
    last, whole_to = tiles_until(block.row + tiles.rows, tiles.keys), quotient(block.row + 1, tiles.keys)
    if marked or sizes.window is not None:  # a third loop, for what a window sees whole, would spill
        return [(block.first, last, True)]
    return [(block.first, whole_to, False), (whole_to, last, True)]


def masked(sizes: Sizes, scores: Array, query: Array, key: Array, query_marks: Array | None, key_marks: Array | None,
           axis: int = 0) -> Array:
    """Scores of a tile that starts at a query, along `axis`, and at a key; `MASKED` where it does not see it."""
    places = lambda start, axis: along(
        lax.broadcasted_iota(jnp.int32, (scores.shape[axis],), 0) + start, scores.shape, axis)
    keys = places(0, 1 - axis)
    seen = keys <= places(query - key, axis)
    if sizes.window is not None:
        seen = seen & (keys > places(query - key - sizes.window, axis))
    if query_marks is not None:
        seen = seen & (along(query_marks, scores.shape, axis) == along(key_marks, scores.shape, 1 - axis))
    return jnp.where(seen, scores, MASKED)


def along(x: Array, shape: tuple[int, int], axis: int) -> Array:
    """[n] -> shape, the same across the other axis."""
    return lax.broadcast_in_dim(x, shape, (axis,))


def product(shape: tuple[int, int], *pairs: tuple[Any, Any]) -> Any:
    """The matrix product of two tiles in SMEM, float32; or a list of those of several pairs, all of a shape."""
    def multiply(*sums: Any) -> Any:
        for total, (left, right) in zip(sums, pairs, strict=True):
            plgpu.wgmma(total, left, right)
        plgpu.wgmma_wait(0)
        return [total[...] for total in sums]
    made = pl.run_scoped(multiply, *[plgpu.ACC(shape, jnp.float32)] * len(pairs))
    return made if len(pairs) > 1 else made[0]


def turned(tile: Any) -> Any:
    return tile.transpose((1, 0))


def _forward(sizes: Sizes, tiles: Tiles, keys: Rebuilt, values: Rebuilt, given: Any, gives: Any, **scratch: Any
             ) -> None:
    q, key_factors, value_factors, marks = given
    block = block_here(sizes, tiles, q.shape[1])

    @pl.when(block.group < COMPUTE)
    def _():
        plgpu.set_max_registers(tiles.registers[0], action="increase")
        _attend(sizes, tiles, block, q, marks, *gives, **scratch)

    @pl.when(block.group == COMPUTE)
    def _():
        plgpu.set_max_registers(tiles.registers[1], action="decrease")
        _rebuild_all(tiles, block, ((keys, key_factors), (values, value_factors)), marks, **scratch)


def _attend(sizes: Sizes, tiles: Tiles, block: Block, q: Any, marks: Any, out: Any, lse: Any, *, q_s: Any, p_s: Any,
            lse_s: Any, keys_s: Any, values_s: Any, marks_s: Any, here: Any, ready: Any, free: Any, **_: Any) -> None:
    """Attends with a warpgroup's queries to all that they see."""
    (batch, head), shape, strips = block.place, (64, sizes.width), pieces(tiles.rows)
    queries, q_s, p_s, lse_s = pl.ds(block.row, tiles.rows), *(x.at[block.group] for x in (q_s, p_s, lse_s))
    plgpu.copy_gmem_to_smem(q.at[batch, queries, head], q_s, here.at[block.group])
    fetch_marks(block, tiles, marks, marks_s, here)
    plgpu.barrier_wait(here.at[block.group])

    def step(some_masked: bool, tile: Array, carry: Sums) -> Sums:
        slot, shrinks, made = tiles.slot(tile - block.first), [], []
        plgpu.barrier_wait(ready[0].at[slot])
        for strip, (_, top, total) in zip(strips, carry, strict=True):
            scores = product((64, tiles.keys), (q_s.at[strip], keys_s["tiles"].at[slot])) * sizes.factor
            if some_masked:
                scores = masked(sizes, scores, block.row + strip.start, tile * tiles.keys,
                                *marks_of(marks_s, block, strip, slot))
            highest = jnp.maximum(top, scores.max(axis=1))
            weights = jnp.exp2(scores - along(highest, scores.shape, 0))
            p_s[strip] = weights.astype(p_s.dtype)
            shrinks.append(jnp.exp2(top - highest))
            made.append((highest, total * shrinks[-1] + weights.sum(axis=1)))
        plgpu.commit_smem()
        plgpu.barrier_arrive(free[0].at[slot])
        plgpu.barrier_wait(ready[1].at[slot])
        sums = [acc * along(shrink, shape, 0) + product(shape, (p_s.at[strip], values_s["tiles"].at[slot]))
                for strip, shrink, (acc, *_) in zip(strips, shrinks, carry, strict=True)]
        plgpu.barrier_arrive(free[1].at[slot])
        return tuple((acc, *rest) for acc, rest in zip(sums, made, strict=True))

    carry = tuple((jnp.zeros(shape, jnp.float32), jnp.full((64,), MASKED, jnp.float32), jnp.zeros((64,), jnp.float32))
                  for _ in strips)
    carry = over_keys(sizes, tiles, block, bool(marks), step, carry, ready, free)
    for strip, (acc, top, total) in zip(strips, carry, strict=True):
        some = top > MASKED / 2  # a row that is masked everywhere has sums of what it must not see
        q_s[strip] = (acc * along(jnp.where(some, 1 / (total * sizes.v_rank), 0.), shape, 0)).astype(q_s.dtype)
        lse_s[strip] = jnp.where(some, (top + jnp.log2(total)) / LOG2E, MASKED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_s, out.at[batch, queries, head])
    plgpu.copy_smem_to_gmem(lse_s, lse.at[batch, head, queries])
    plgpu.wait_smem_to_gmem(0)


def pieces(size: int) -> list[Any]:
    """Of 64 each."""
    return [pl.ds(start, 64) for start in range(0, size, 64)]


def fetch_marks(block: Block, tiles: Tiles, marks: Any, marks_s: Any, here: Any) -> None:
    """Starts the copies of the segments of a warpgroup's queries."""
    for source in marks:
        plgpu.copy_gmem_to_smem(source.at[block.place[0], pl.ds(block.row, tiles.rows)], marks_s[0].at[block.group],
                                here.at[block.group])


def marks_of(marks_s: Any, block: Block, strip: Any, slot: Array) -> tuple[Any, Any]:
    """The segments of a strip of queries and of a tile of keys."""
    return (marks_s[0][block.group, strip], marks_s[1][slot]) if marks_s else (None, None)


def over_keys(sizes: Sizes, tiles: Tiles, block: Block, marked: bool, step: Callable[..., Any], carry: Any, ready: Any,
              free: Any) -> Any:
    """Takes a warpgroup's steps, and lets the tiles go that only other queries of its block see."""
    for start, end, some_masked in spans(sizes, tiles, block, marked):
        carry = lax.fori_loop(start, end, partial(step, some_masked), carry)

    def skip(tile: Array, _: None) -> None:
        slot = tiles.slot(tile - block.first)
        for there, done in zip(ready, free, strict=True):
            plgpu.barrier_wait(there.at[slot])
            plgpu.barrier_arrive(done.at[slot])
    lax.fori_loop(tiles_until(block.row + tiles.rows, tiles.keys), block.last, skip, None)
    return carry


def _rebuild_all(tiles: Tiles, block: Block, parts: Sequence[tuple[Rebuilt, Any]], marks: Any, *, keys_s: Any,
                 values_s: Any, marks_s: Any, chosen: Any, ready: Any, free: Any, **_: Any) -> None:
    """Rebuilds the tiles of keys and values that the other warpgroups read, in order."""
    scratch, first, last = (keys_s, values_s), block.first, block.last
    for (_, given), kept in zip(parts, scratch, strict=True):
        for source, there in zip(given[2:], kept["choose"], strict=True):
            plgpu.copy_gmem_to_smem(source, there, chosen)

    def fetch(tile: Array, _: None = None) -> None:
        for (part, given), kept in zip(parts, scratch, strict=True):
            part.fetch(given, kept, block.place, pl.ds(tile * tiles.keys, tiles.keys), tiles.slot(tile - first))

    lax.fori_loop(first, jnp.minimum(first + tiles.stages, last), fetch, None)
    plgpu.barrier_wait(chosen)

    def step(tile: Array, _: None) -> None:
        slot = tiles.slot(tile - first)
        for n, (part, _) in enumerate(parts):
            @pl.when(tile - first >= tiles.stages)
            def _(n=n):
                plgpu.barrier_wait(free[n].at[slot])
            for source in marks if n == 0 else ():
                plgpu.copy_gmem_to_smem(source.at[block.place[0], pl.ds(tile * tiles.keys, tiles.keys)],
                                        marks_s[1].at[slot], ready[0].at[slot])
            part.rebuild(scratch[n], slot)
            plgpu.commit_smem()
            plgpu.barrier_arrive(ready[n].at[slot])
        pl.when(tile + tiles.stages < last)(partial(fetch, tile + tiles.stages))
    lax.fori_loop(first, last, step, None)

    def leave(tile: Array, _: None) -> None:
        for part in free:
            plgpu.barrier_wait(part.at[tiles.slot(tile - first)])
    lax.fori_loop(jnp.maximum(last - tiles.stages, first), last, leave, None)  # no barrier is left unobserved


def backward(sizes: Sizes, queries: Array, k_a: Array, k_b: Array, v_a: Array, v_b: Array, segments: Array | None,
             out: Array, lse: Array, d_out: Array, d_lse: Array | None = None, tiles: Tiles | None = None,
             interpret: Any = None) -> tuple[Array, Array, Array, Array, Array]:
    """The gradients of `queries`, `k_a`, `k_b`, `v_a` and `v_b`, of what `forward` takes and gives and of theirs."""
    tiles = replace(fitting(sizes) if tiles is None else tiles, strips=1)  # two would spill
    time, features = queries.shape[1], queries.shape[3]
    later = partial(along_time, total=padded(time, math.lcm(tiles.block, tiles.keys, tiles.owned)))
    delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(axis=-1)
    if d_lse is not None:
        delta = delta - d_lse
    rows = later(jnp.stack([lse * LOG2E, delta], axis=-1)).transpose(0, 2, 3, 1)
    queries, d_out = (widened(later(x), sizes.width) for x in (queries, d_out))
    factors, marks = [later(x) for x in (k_a, k_b, v_a, v_b)], [] if segments is None else [later(segments)]
    d_queries = _query_gradients(sizes, tiles, queries, factors, marks, rows, d_out, interpret)
    gradients = _factor_gradients(sizes, tiles, queries, factors, marks, rows, d_out, interpret)
    return d_queries[:, :time, :, :features], *(x[:, :time] for x in gradients)


def _query_gradients(sizes: Sizes, tiles: Tiles, queries: Array, factors: list[Array], marks: list[Array], rows: Array,
                     d_out: Array, interpret: Any) -> Array:
    """[B, T, H, width]. Of rows of scores [B, H, 2, T]: log-sum-exps in powers of two, and <output, its gradient>."""
    keys, values = sizes.keys(upright=True), sizes.values(upright=True)
    wide, own = partial(plgpu.SMEM, dtype=queries.dtype, transforms=WIDE), (COMPUTE, tiles.rows)
    made, = over_queries(
        partial(_of_queries, sizes, tiles, keys, values), tiles, keys, values, marks,
        given=[queries, keys.given(*factors[:2]), values.given(*factors[2:]), marks, d_out, rows],
        gives=[jax.ShapeDtypeStruct(queries.shape, queries.dtype)],
        scratch={"q_s": wide((*own, sizes.width)), "do_s": wide((*own, sizes.width)), "ds_s": wide((*own, tiles.keys)),
                 "rows_s": plgpu.SMEM((COMPUTE, 2, tiles.rows), jnp.float32),
                 "here": plgpu.Barrier(num_arrivals=3 + len(marks), num_barriers=COMPUTE)},
        interpret=interpret)
    return made


def _of_queries(sizes: Sizes, tiles: Tiles, keys: Rebuilt, values: Rebuilt, given: Any, gives: Any, **scratch: Any
                ) -> None:
    q, key_factors, value_factors, marks, *rest = given
    block = block_here(sizes, tiles, q.shape[1])

    @pl.when(block.group < COMPUTE)
    def _():
        plgpu.set_max_registers(tiles.registers[0], action="increase")
        _gather(sizes, tiles, block, q, marks, *rest, *gives, **scratch)

    @pl.when(block.group == COMPUTE)
    def _():
        plgpu.set_max_registers(tiles.registers[1], action="decrease")
        _rebuild_all(tiles, block, ((keys, key_factors), (values, value_factors)), marks, **scratch)


def _gather(sizes: Sizes, tiles: Tiles, block: Block, q: Any, marks: Any, d_out: Any, rows: Any,
            d_queries: Any, *, q_s: Any, do_s: Any, ds_s: Any, rows_s: Any, keys_s: Any, values_s: Any, marks_s: Any,
             here: Any, ready: Any, free: Any, **_: Any) -> None:
    """The gradients of a warpgroup's queries, of all keys that they see."""
    (batch, head), shape, strips = block.place, (64, 64), pieces(tiles.rows)
    owned = [(strip, part) for strip in strips for part in pieces(sizes.width)]
    queries, mine = pl.ds(block.row, tiles.rows), here.at[block.group]
    q_s, do_s, ds_s, rows_s = (x.at[block.group] for x in (q_s, do_s, ds_s, rows_s))
    for source, there in ((q, q_s), (d_out, do_s)):
        plgpu.copy_gmem_to_smem(source.at[batch, queries, head], there, mine)
    plgpu.copy_gmem_to_smem(rows.at[batch, head, :, queries], rows_s, mine)
    fetch_marks(block, tiles, marks, marks_s, here)
    plgpu.barrier_wait(mine)

    def step(some_masked: bool, tile: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        slot, square = tiles.slot(tile - block.first), (64, tiles.keys)
        for part in ready:
            plgpu.barrier_wait(part.at[slot])
        k, v = keys_s["tiles"].at[slot], values_s["tiles"].at[slot]
        for strip in strips:
            scores = product(square, (q_s.at[strip], k)) * sizes.factor
            if some_masked:
                scores = masked(sizes, scores, block.row + strip.start, tile * tiles.keys,
                                *marks_of(marks_s, block, strip, slot))
            weights = jnp.exp2(scores - along(rows_s[0, strip], square, 0))
            d_weights = product(square, (do_s.at[strip], v))
            ds = weights * (d_weights * (1 / sizes.v_rank) - along(rows_s[1, strip], square, 0))
            ds_s[strip] = ds.astype(ds_s.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(free[1].at[slot])
        carry = tuple(acc + product(shape, (ds_s.at[strip], turned(k.at[part])))
                      for (strip, part), acc in zip(owned, carry, strict=True))
        plgpu.barrier_arrive(free[0].at[slot])
        return carry

    carry = tuple(jnp.zeros(shape, jnp.float32) for _ in owned)
    carry = over_keys(sizes, tiles, block, bool(marks), step, carry, ready, free)
    for at, acc in zip(owned, carry, strict=True):
        q_s[at] = (acc * (sizes.scale / sizes.k_rank)).astype(q_s.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_s, d_queries.at[batch, queries, head])
    plgpu.wait_smem_to_gmem(0)


def _factor_gradients(sizes: Sizes, tiles: Tiles, queries: Array, factors: list[Array], marks: list[Array], rows: Array,
                      d_out: Array, interpret: Any) -> list[Array]:
    """Of A and B of the keys, and of the values: a block of the grid takes some rows of heads of a tile of keys."""
    keys, values = sizes.keys(upright=False), sizes.values(upright=False)
    batch, total = queries.shape[:2]
    splits = max(n for n in range(1, tiles.splits + 1) if sizes.h1 % n == 0)
    leads = (batch, sizes.h1), (splits, batch, sizes.h2)
    gives = [jax.ShapeDtypeStruct((*lead, c.groups, total, c.count), jnp.float32)
             for part in (keys, values) for c, lead in zip(part.columns, leads, strict=True)]
    given = [queries, keys.given(*factors[:2]), values.given(*factors[2:]), marks, d_out, rows]
    flat, tree = jax.tree.flatten(given)
    made = plgpu.kernel(
        lambda *refs, **kept: _of_factors(sizes, tiles, keys, values, sizes.h1 // splits * sizes.h2,
                                          jax.tree.unflatten(tree, refs[:len(flat)]), refs[len(flat):], **kept),
        out_type=gives, interpret=interpret, compiler_params=PARAMS, num_threads=tiles.key_groups + 1,
        thread_name="group", grid=(total // tiles.owned, splits, batch), grid_names=("block", "split", "row"),
        scratch_types=_factor_scratch(sizes, tiles, keys, values, queries.dtype, len(marks)))(*flat)
    return [columns.unpacked(x if n % 2 == 0 else x.sum(axis=0)).astype(factor.dtype)
            for n, (x, columns, factor) in enumerate(zip(made, (*keys.columns, *values.columns), factors, strict=True))]


def _factor_scratch(sizes: Sizes, tiles: Tiles, keys: Rebuilt, values: Rebuilt, dtype: Any, marked: int
                    ) -> dict[str, Any]:
    groups, ahead, queries = tiles.key_groups, tiles.fetched, tiles.queries
    wide, plain = partial(plgpu.SMEM, dtype=dtype, transforms=WIDE), partial(plgpu.SMEM, dtype=jnp.float32)
    sums = lambda part: [plain((groups, *lead, c.groups, 64, c.count))
                         for c, lead in zip(part.columns, ((), (sizes.h2,)), strict=True)]
    return {
        "keys_s": keys.scratch(groups, 64, dtype), "values_s": values.scratch(groups, 64, dtype),
        "q_s": wide((ahead, queries, sizes.width)), "do_s": wide((ahead, queries, sizes.width)),
        "rows_s": plain((ahead, 2, queries)), "p_s": wide((groups, 64, queries)),
        "ds_s": wide((groups, 64, queries)), "d_keys": sums(keys), "d_values": sums(values),
        "spread_s": plgpu.SMEM((groups, 64, sizes.width), dtype, transforms=NARROW),
        "marks_s": [plgpu.SMEM((ahead, queries), jnp.int32), plgpu.SMEM((groups, 64), jnp.int32)] * marked,
        "marks_here": plgpu.Barrier(num_barriers=groups), "group_s": plgpu.SMEM((groups,), jnp.int32),
        "chosen": plgpu.Barrier(num_arrivals=4),
        "here": plgpu.Barrier(num_arrivals=3 + marked, num_barriers=ahead),
        "free": plgpu.Barrier(num_arrivals=groups, num_barriers=ahead)}


@dataclass(frozen=True)
class Owned:
    """Where a block of the grid that owns keys is."""

    row: Array
    """Of the batch."""
    start: Array
    """The first key."""
    split: Array
    heads: int
    """That it takes, one after another."""
    first: Array
    last: Array
    """Tiles of queries that see its keys: from the first, before the last."""

    def place(self, n: Array) -> Place:
        """Of its n-th head."""
        return self.row, self.split * self.heads + n

    @property
    def count(self) -> Array:
        """Of these tiles."""
        return self.last - self.first


def _of_factors(sizes: Sizes, tiles: Tiles, keys: Rebuilt, values: Rebuilt, heads: int, given: Any, gives: Any,
                **scratch: Any) -> None:
    q, key_factors, value_factors, marks, *rest = given
    group, start, count = lax.axis_index("group"), lax.axis_index("block") * tiles.owned, q.shape[1] // tiles.queries
    last = jnp.int32(count)
    if sizes.window is not None:
        last = jnp.minimum(last, tiles_until(start + (tiles.owned + sizes.window - 1), tiles.queries))
    own = Owned(lax.axis_index("row"), start, lax.axis_index("split"), heads, quotient(start, tiles.queries), last)

    @pl.when(group < tiles.key_groups)
    def _():
        plgpu.set_max_registers(232, action="increase")
        parts = ((keys, key_factors), (values, value_factors))
        _scatter_all(sizes, tiles, own, group, parts, marks, gives, **scratch)

    @pl.when(group == tiles.key_groups)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        _fetch_queries(tiles, own, (q, *rest), marks, **scratch)


def _fetch_queries(tiles: Tiles, own: Owned, sources: Sequence[Any], marks: Any, *, q_s: Any, do_s: Any, rows_s: Any,
                   marks_s: Any, here: Any, free: Any, **_: Any) -> None:
    """Fetches tiles of queries, of their outputs' gradients and of their rows' numbers, of one head after another."""
    def fetch(step: Array, _: None) -> None:
        (batch, head), slot = own.place(lax.div(step, own.count)), tiles.fetched_slot(step)
        queries = pl.ds((own.first + lax.rem(step, own.count)) * tiles.queries, tiles.queries)
        @pl.when(step >= tiles.fetched)
        def _():
            plgpu.barrier_wait(free.at[slot])
        for source, there in zip(sources, (q_s, do_s), strict=False):
            plgpu.copy_gmem_to_smem(source.at[batch, queries, head], there.at[slot], here.at[slot])
        plgpu.copy_gmem_to_smem(sources[2].at[batch, head, :, queries], rows_s.at[slot], here.at[slot])
        for source in marks:
            plgpu.copy_gmem_to_smem(source.at[batch, queries], marks_s[0].at[slot], here.at[slot])

    steps = own.heads * own.count
    lax.fori_loop(0, steps, fetch, None)
    lax.fori_loop(jnp.maximum(steps - tiles.fetched, 0), steps,
                  lambda step, _: plgpu.barrier_wait(free.at[tiles.fetched_slot(step)]), None)


def _scatter_all(sizes: Sizes, tiles: Tiles, own: Owned, group: Array, parts: Sequence[tuple[Rebuilt, Any]], marks: Any,
                 gives: Sequence[Any], **scratch: Any) -> None:
    """The gradients of the factors of a warpgroup's keys, of all queries that see them."""
    kept, all_sums = (scratch["keys_s"], scratch["values_s"]), (*scratch["d_keys"], *scratch["d_values"])
    keys_of = lambda group: pl.ds(own.start + group * 64, 64)

    @pl.when(group == 0)
    def _():
        for (_, given), there in zip(parts, kept, strict=True):
            for source, to in zip(given[2:], there["choose"], strict=True):
                plgpu.copy_gmem_to_smem(source, to, scratch["chosen"])
    for source in marks:
        plgpu.copy_gmem_to_smem(source.at[own.row, keys_of(group)], scratch["marks_s"][1].at[group],
                                scratch["marks_here"].at[group])
        plgpu.barrier_wait(scratch["marks_here"].at[group])
    plgpu.barrier_wait(scratch["chosen"])

    scratch["group_s"][group] = group
    plgpu.commit_smem()
    mine = lambda: scratch["group_s"][group]  # read anew, or registers would hold all addresses through all loops

    def head(n: Array, _: None) -> None:
        i1, i2 = quotient(n, sizes.h2), lax.rem(n, jnp.int32(sizes.h2))
        for (part, given), there in zip(parts, kept, strict=True):
            here = mine()
            part.fetch(given, there, own.place(n), keys_of(here), here)
            part.rebuild(there, here)
        plgpu.commit_smem()
        _scatter(sizes, tiles, own, mine(), n, bool(marks), **scratch)
        for m, ((part, _), there) in enumerate(zip(parts, kept, strict=True)):
            here = mine()
            sums = [x.at[here] for x in all_sums[2 * m:2 * m + 2]]
            to_factors(part, there["tiles"].at[here], [x.at[here] for x in there["factors"]], there["choose"],
                       (sums[0], sums[1].at[i2]), (i2 == 0, i1 == 0), scratch["spread_s"].at[here])

        @pl.when(i2 == sizes.h2 - 1)
        def _():
            plgpu.commit_smem()
            row, here = quotient(own.split * own.heads, sizes.h2) + i1, mine()
            for total, gradient in zip(all_sums[::2], gives[::2], strict=True):
                for k in range(total.shape[1]):
                    plgpu.copy_smem_to_gmem(total.at[here, k], gradient.at[own.row, row, k, keys_of(here)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    lax.fori_loop(0, own.heads, head, None)
    plgpu.commit_smem()
    here = mine()
    for total, gradient in zip(all_sums[1::2], gives[1::2], strict=True):
        for i2, k in np.ndindex(total.shape[1:3]):
            plgpu.copy_smem_to_gmem(total.at[here, i2, k], gradient.at[own.split, own.row, i2, k, keys_of(here)])
    plgpu.wait_smem_to_gmem(0)


def _scatter(sizes: Sizes, tiles: Tiles, own: Owned, group: Array, n: Array, marked: bool, *, keys_s: Any,
             values_s: Any, q_s: Any, do_s: Any, rows_s: Any, p_s: Any, ds_s: Any, marks_s: Any, here: Any, free: Any,
             **_: Any) -> None:
    """Puts in place of tiles of R times its n-th head's keys, and of R times its values, their gradients."""
    square, shape, parts = (64, tiles.queries), (64, 64), pieces(sizes.width)
    k, v, p_s, ds_s = (x.at[group] for x in (keys_s["tiles"], values_s["tiles"], p_s, ds_s))

    def step(some_masked: bool, tile: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        slot = tiles.fetched_slot(n * own.count + tile - own.first)
        plgpu.barrier_wait(here.at[slot])
        q, do = q_s.at[slot], do_s.at[slot]
        scores = product(square, (k, turned(q))) * sizes.factor
        if some_masked:
            both = (marks_s[0][slot], marks_s[1][group]) if marked else (None, None)
            scores = masked(sizes, scores, tile * tiles.queries, own.start + group * 64, *both, axis=1)
        weights = jnp.exp2(scores - along(rows_s[slot, 0], square, 1))
        p_s[...] = weights.astype(p_s.dtype)
        d_weights = product(square, (v, turned(do)))
        ds = weights * (d_weights * (1 / sizes.v_rank) - along(rows_s[slot, 1], square, 1))
        ds_s[...] = ds.astype(ds_s.dtype)
        plgpu.commit_smem()
        carry = tuple((d_keys + product(shape, (ds_s, q.at[:, part])), d_values + product(shape, (p_s, do.at[:, part])))
                      for part, (d_keys, d_values) in zip(parts, carry, strict=True))
        plgpu.barrier_arrive(free.at[slot])
        return carry

    carry = ((jnp.zeros(shape, jnp.float32),) * 2,) * len(parts)
    for start, end, some_masked in query_spans(sizes, tiles, own, marked):
        carry = lax.fori_loop(start, end, partial(step, some_masked), carry)
    for part, (d_keys, d_values) in zip(parts, carry, strict=True):
        k[:, part] = (d_keys * (sizes.scale / sizes.k_rank)).astype(k.dtype)
        v[:, part] = (d_values * (1 / sizes.v_rank)).astype(v.dtype)
    plgpu.commit_smem()


def query_spans(sizes: Sizes, tiles: Tiles, own: Owned, marked: bool) -> list[tuple[Array, Array, bool]]:
    """The tiles of queries that see a block's keys: (start, end, whether some are masked) of each stretch."""
    if marked or sizes.window is not None:
        return [(own.first, own.last, True)]
    whole_from = jnp.minimum(own.first + tiles.owned // tiles.queries, own.last)
    return [(own.first, whole_from, True), (whole_from, own.last, False)]


def to_factors(part: Rebuilt, gradient: Any, factors: Sequence[Any], choose: Sequence[Any], sums: Sequence[Any],
               fresh: Sequence[Array], spread_s: Any) -> None:
    """Adds the gradients of A and B to sums [groups, 64, columns]: (G (B E2_r)) E1_r^T, and the other way round.

    Where `fresh`, they take the place of what is there.
    """
    for i, columns in enumerate(part.columns):
        def of_rank(rank: Array, _: None, i=i, columns=columns) -> None:
            def spread(n: Array, _: None) -> None:
                here = pl.ds(0, PART[0]), pl.ds(n * PART[1], PART[1])
                other = product(PART, part.pair(factors, choose, 1 - i, rank, *here))
                spread_s[here] = (gradient[here].astype(jnp.float32) * other).astype(spread_s.dtype)
            lax.fori_loop(0, gradient.shape[1] // PART[1], spread, None)
            plgpu.commit_smem()
            group, place = columns.of(rank)
            more = product((64, columns.count), (spread_s, turned(choose[i].at[place])))
            put(sums[i].at[group], more, fresh[i] & (place == 0))
        lax.fori_loop(0, part.rank, of_rank, None)


def put(total: Any, more: Array, fresh: Array | bool) -> None:
    """Adds to what is in SMEM, or puts it there."""
    @pl.when(fresh)
    def _():
        total[...] = more

    @pl.when(jnp.logical_not(fresh))
    def _():
        total[...] = total[...] + more
