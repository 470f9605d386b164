"""How a Hopper GPU computes a program: what lies in shared memory, and which products give scores and sums.

A block of the past is [features, tokens], and tensor cores take 64 rows of their first operand at least. So tokens (of
scores) and features (of sums) are the rows, and the few queries of a decode step the columns: scores are K^T q
[tokens, columns], sums V p [features, columns]. Nothing is padded but the columns, to 8.

What bounds the programs on an H200 (4.8 TB/s, 990 TFLOP/s: 206 operations a byte), one new token, bfloat16, is what is
read, 2 bytes an element, as long as the operations stay below that:

- `HeadParts`: 4 N d operations a token and head for 4 d bytes, N columns: 8 a byte (4 query heads a key head), 60 of
  MLA with 32 heads, whose values are among its keys.
- `KroneckerFactors`: A's rows as they lie, (i1, r, j1), are the rows of products with B, of which 16 features a rank
  count at least. 8x2 of rank 2: 67 operations a byte. A and B are met element by element besides: by count about 2,100
  instructions of lanes a token, of the 3,900 that fit the time in which its 640 bytes come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.decode.heads import HeadParts, RebuiltHeads
from kvjax.kernels.decode.kronecker import KroneckerFactors
from kvjax.kernels.decode.program import Arrays, Program, Shape, div, rem

M = 64
"""Rows of a product of a warpgroup, or a multiple of them."""
REGISTERS = 128
"""Of each thread, for sums: half of what there are."""
THREADS = 128
ROOM = 16.0
"""Keeps terms of scores within float16: they are stored divided by about that."""


@dataclass(frozen=True)
class Read:
    """A part of entries that is brought to shared memory block by block."""

    sources: tuple[tuple[int, int], ...]
    """(entry, heads) of arrays that have consecutive heads; most are one array with all of them."""
    rows: int
    """Features of a head."""
    unit: int = M
    """The buffer has a multiple of so many rows."""
    swizzle: int = 128
    """See `tiled`."""
    by_head: bool = True
    """Whether heads have rows of their own; otherwise all have these."""

    def __post_init__(self):
        if self.rows % 8:
            raise ValueError(f"{self.rows} features of entry {self.sources[0][0]}: the GPU kernel copies them by 8, as "
                             "tensor cores take them")

    @property
    def buffer(self) -> int:
        return up(self.rows, self.unit)


def entries_of(reads: tuple[Read, ...]) -> int:
    return 1 + max(entry for read in reads for entry, _ in read.sources)


class Plan(Protocol):
    """A program for a warpgroup that handles one group of its rows, and all blocks of `block` tokens of a split."""

    dtype: Any
    """Of the cache."""
    entries: int
    heads: int
    """Of `Read.sources`."""
    groups: int
    """Warpgroups that share a sequence's split, a multiple of the heads."""
    columns: int
    """Rows of the program that a group handles, with padding."""
    reads: tuple[Read, ...]
    scratch: tuple[tuple[Shape, Any], ...]
    """Shared memory that products need."""
    weights_dtype: Any
    swizzle: int
    """Of operands, scratch and weights: see `tiled`."""
    sums: tuple[Shape, ...]
    """Float32 arrays in registers."""

    def operands(self, queries: Arrays, scale: float) -> tuple[tuple[Array, bool], ...]:
        """What lies in shared memory all the time, [B, groups, x, y], or [x, y] if False is beside it.

        `scale` is that of `scores`.
        """

    def token(self, columns: Array, group: Array) -> Array:
        """Which new token each of the columns of a group belongs to."""

    def scores(self, operands: list, blocks: list, scratch: list, scale: float) -> Array:
        """[tokens, columns] float32, times `scale`."""

    def weighted(self, weights: Any, shrunk: Any, shrink: Array, operands: list, blocks: list, scratch: list,
                 sums: Arrays) -> Arrays:
        """The sums times their columns' `shrink` [columns], and what weights [columns, tokens] add to them.

        `shrunk` holds `shrink` for each token, like weights: powers of two, which no type rounds.
        """

    def finish(self, sums: Arrays, shares: Array) -> tuple[Arrays, Any]:
        """The outputs of sums [splits, B, groups, *shape], each column to count by shares [splits, B, groups, columns].

        Also a function from [B, groups, columns] to the program's rows [B, rows, 1].
        """


def plan_for(program: Program, block: int, dtype, accumulated: Callable[..., Array]) -> Plan:
    """Raises ValueError, with the reason, for programs that cannot run on GPUs."""
    if isinstance(program, RebuiltHeads):
        raise ValueError("keys of KVPath-Residual are rebuilt and rotated, which the GPU kernel does not do")
    if isinstance(program, HeadParts):
        return HeadsPlan(program, block, dtype, accumulated)
    return FactorsPlan(program, block, dtype, accumulated)


def tiled(swizzle: int) -> tuple:
    """How tensor cores take 2-byte matrices: products sum over half as many elements as `swizzle`, or multiples.

    Both factors of a product have the same.
    """
    return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)


def up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def transposed(ref):
    return ref.transpose((1, 0))


def product(rows: int, columns: int, *pairs: tuple[Any, Any]) -> Array:
    """The sum of products of pairs of matrices in shared memory, [rows, columns] float32."""
    def run(total):
        for a, b in pairs:
            plgpu.wgmma(total, a, b)
        plgpu.wgmma_wait(0)
        return total[...]
    return pl.run_scoped(run, plgpu.ACC((rows, columns), jnp.float32))


def by_product(x: Array) -> Array:
    """`x` over threads as results of products are; the compiler needs to be told here and there."""
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA)


def in_place(total: Array, *pairs: tuple[Any, Any]) -> Array:
    """`total` and the products of pairs, in its registers."""
    def run(ref):
        for a, b in pairs:
            plgpu.wgmma(ref, a, b)
        plgpu.wgmma_wait(0)
    return pl.run_state(run)(plgpu.ACC.init(total))


def apart(total: Array, *pairs: tuple[Any, Any]) -> Array:
    """What `in_place` computes, for interpreters, which have no accumulators that start with something."""
    return total + product(*total.shape, *pairs)


def along(vector: Array, shape: Shape, axis: int) -> Array:
    return jax.lax.broadcast_in_dim(vector, shape, (axis,))


@dataclass(frozen=True)
class HeadsPlan:
    """Keys and values as they lie: a group is a key head, or some of its queries if registers have no room for all."""

    program: HeadParts
    block: int
    dtype: Any
    accumulated: Callable[..., Array]
    scratch = ()
    swizzle = 128

    @property
    def weights_dtype(self):
        return self.dtype

    @property
    def heads(self) -> int:
        return self.program.heads

    @property
    def entries(self) -> int:
        return entries_of(self.reads)

    @property
    def tiles(self) -> int:
        """Groups of a head."""
        features = sum(up(d, M) for _, _, d in self.program.values)
        most = max(8, min(M, REGISTERS * THREADS // features) // 8 * 8)
        return -(-self.program.queries // most)

    @property
    def groups(self) -> int:
        return self.heads * self.tiles

    @property
    def columns(self) -> int:
        return up(-(-self.program.queries // self.tiles), 8)

    @cached_property
    def reads(self) -> tuple[Read, ...]:
        return tuple(dict.fromkeys((*self._keys, *self._values)))

    @property
    def _keys(self) -> tuple[Read, ...]:
        return tuple(Read(((block, self.heads),), d) for block, d in self.program.keys)

    @property
    def _values(self) -> tuple[Read, ...]:
        values = self.program.values
        if all(heads == self.heads for _, heads, _ in values):
            return tuple(Read(((block, self.heads),), d) for block, _, d in values)
        return Read(tuple((block, heads) for block, heads, _ in values), values[0][2]),

    @property
    def sums(self) -> tuple[Shape, ...]:
        return tuple((read.buffer, self.columns) for read in self._values)

    def operands(self, queries: Arrays, scale: float) -> tuple[tuple[Array, bool], ...]:
        def padded(q: Array) -> Array:
            batch, _, n, d = q.shape
            q = jnp.pad(q, ((0, 0), (0, 0), (0, self.tiles * self.columns - n), (0, -d % M)))
            return q.reshape(batch, self.groups, self.columns, -1).astype(self.dtype)
        return tuple((padded(q), True) for q in queries)

    def token(self, columns: Array, group: Array) -> Array:
        return rem(columns + rem(group, self.tiles) * self.columns, self.program.new)

    def scores(self, operands: list, blocks: list, scratch: list, scale: float) -> Array:
        pairs = [(transposed(blocks[self.reads.index(read)]), transposed(q))
                 for read, q in zip(self._keys, operands, strict=True)]
        return product(self.block, self.columns, *pairs) * scale

    def weighted(self, weights: Any, shrunk: Any, shrink: Array, operands: list, blocks: list, scratch: list,
                 sums: Arrays) -> Arrays:
        return tuple(self.accumulated(total * along(shrink, total.shape, 1),
                                      (blocks[self.reads.index(read)], transposed(weights)))
                     for read, total in zip(self._values, sums, strict=True))

    def finish(self, sums: Arrays, shares: Array) -> tuple[Arrays, Any]:
        outputs = []
        for read, own in zip(self._values, sums, strict=True):
            rows, first = self._rows(jnp.einsum("sbgdn,sbgn->bgnd", own[:, :, :, :read.rows], shares)), 0
            for _, heads in read.sources:
                outputs.append(rows[:, first:first + heads * self.program.queries])
                first += heads * self.program.queries
        return tuple(outputs), lambda x: self._rows(x[..., None])

    def _rows(self, x: Array) -> Array:
        """[B, groups, columns, d] -> [B, rows, d]."""
        by_head = x.reshape(x.shape[0], self.heads, -1, x.shape[-1])[:, :, :self.program.queries]
        return by_head.reshape(x.shape[0], -1, x.shape[-1])


@dataclass(frozen=True)
class FactorsPlan:
    """Kronecker factors: scores are sums over A's rows (i1, r, j1) of A times what they meet, a product with B.

    For a new token and head i2 of the second factor, a *turn*: U = Q B [A's rows, tokens], where a row of Q holds the
    query's features j2 in the columns of B that are of its rank and of i2. Then A U, element by element, and its sum
    over the rows of each i1, which is a product with ones (`_meets`). Values mirror that: weights are spread to A's
    rows by the same ones, times A, times B^T.
    A group takes as many heads i1 as fill the 64 rows of a product, and some of the new tokens, all if registers have
    room for their sums. Groups of other i1 share no row of A; B comes to them from the level-2 cache, but once.
    """

    program: KroneckerFactors
    block: int
    dtype: Any
    accumulated: Callable[..., Array]
    weights_dtype = jnp.float16
    swizzle = 32

    def __post_init__(self):
        if self._registers > REGISTERS:
            raise ValueError(f"sums of one new token take {self._registers} registers of every thread, and the GPU "
                             f"kernel has {REGISTERS} for them: {self.program}")

    @property
    def _registers(self) -> int:
        """Of the sums of one new token."""
        return sum(self._tiles(ranks) * M * width // THREADS for *_, ranks in self.program.values
                   for i2 in range(self.program.h2) for _, width in self._columns_of_b(ranks, i2))

    @property
    def entries(self) -> int:
        return entries_of(self.reads)

    @property
    def _firsts(self) -> int:
        """Heads i1 of a group."""
        return max(1, min(self.program.h1, M // (max(self._all_ranks) * self.program.d1)))

    @property
    def heads(self) -> int:
        return -(-self.program.h1 // self._firsts)

    @property
    def _tokens(self) -> int:
        """New tokens of a group."""
        return min(self.program.new, REGISTERS // self._registers)

    @property
    def _turns(self) -> int:
        return self._tokens * self.program.h2

    @property
    def _token_groups(self) -> int:
        return -(-self.program.new // self._tokens)

    @property
    def groups(self) -> int:
        return self.heads * self._token_groups

    @property
    def columns(self) -> int:
        return up(self._firsts * self._turns, 16)

    @cached_property
    def reads(self) -> tuple[Read, ...]:
        reads = {}
        for a, b, ranks in (*self.program.keys, *self.program.values):
            reads[a] = Read(((a, self.heads),), self._firsts * ranks * self.program.d1)
            reads[b] = self._read_of_b(b, ranks)
        return tuple(reads.values())

    def _read_of_b(self, block: int, ranks: int) -> Read:
        rows = ranks * self.program.h2 * self.program.d2
        return Read(((block, self.heads),), rows, 8 if rows > 8 else M, self.swizzle, by_head=False)

    @property
    def scratch(self) -> tuple[tuple[Shape, Any], ...]:
        return ((M, self.block), jnp.float16), ((M, self.block), self.dtype)

    @property
    def sums(self) -> tuple[Shape, ...]:
        return tuple((M, width) for *_, ranks in self.program.values for _ in range(self._tiles(ranks))
                     for turn in range(self._turns) for _, width in self._columns_of_b(ranks, turn % self.program.h2))

    def _tiles(self, ranks: int) -> int:
        """Of A's rows, 64 each."""
        return -(-self._firsts * ranks * self.program.d1 // M)

    def _rows_of_b(self, ranks: int, i2: int) -> tuple[tuple[int, int], ...]:
        """(first, rows) of B, as one factor of a product takes them, that hold its head i2 of all ranks."""
        return spans(self._needed(ranks, i2), 16, self._read_of_b(0, ranks).buffer)

    def _columns_of_b(self, ranks: int, i2: int) -> tuple[tuple[int, int], ...]:
        """Likewise of B^T as another factor."""
        return spans(self._needed(ranks, i2), 8, self._read_of_b(0, ranks).buffer)

    def _needed(self, ranks: int, i2: int) -> tuple[int, ...]:
        d2 = self.program.d2
        return tuple((r * self.program.h2 + i2) * d2 + j2 for r in range(ranks) for j2 in range(d2))

    @property
    def _all_ranks(self) -> tuple[int, ...]:
        return tuple(sorted({ranks for *_, ranks in (*self.program.keys, *self.program.values)}))

    def operands(self, queries: Arrays, scale: float) -> tuple[tuple[Array, bool], ...]:
        """Q^T of every part of the keys, rows of B that are needed x rows of A, turn by turn; ones of all ranks."""
        queries = queries[0].astype(self.dtype) * jnp.asarray(self._power(scale), self.dtype)
        return (*((self._spread(queries, ranks), True) for *_, ranks in self.program.keys),
                *((self._meets(ranks), False) for ranks in self._all_ranks))

    def _power(self, scale: float) -> float:
        """The power of two by which queries are multiplied, which changes no digit: terms of scores become small."""
        return 2.0 ** round(np.log2(scale / sum(ranks for *_, ranks in self.program.keys) / ROOM))

    def _spread(self, queries: Array, ranks: int) -> Array:
        p, batch, tokens = self.program, queries.shape[0], self._token_groups * self._tokens
        q = queries.reshape(batch, p.h1, p.new, p.h2, p.d2, p.d1)
        missing = self.heads * self._firsts - p.h1, tokens - p.new
        q = jnp.pad(q, ((0, 0), *((0, n) for n in missing), *[(0, 0)] * 3)).transpose(0, 2, 3, 4, 1, 5)
        same = jnp.eye(ranks, dtype=self.dtype)[:, None, None, :, None]
        made = []
        for i2 in range(p.h2):
            wide = q[:, :, i2, None, :, :, None] * same  # [B, T, rank, j2, i1, rank, j1]
            wide = wide.reshape(batch, tokens, ranks * p.d2, -1)
            place = np.zeros((sum(rows for _, rows in self._rows_of_b(ranks, i2)), ranks * p.d2))
            covered = [first + row for first, rows in self._rows_of_b(ranks, i2) for row in range(rows)]
            for number, row in enumerate(self._needed(ranks, i2)):
                place[covered.index(row), number] = 1
            made.append(jnp.einsum("kn,btnm->btkm", jnp.asarray(place, self.dtype), wide))
        x = jnp.concatenate(made, axis=2)
        x = x.reshape(batch, self._token_groups, -1, self.heads, x.shape[-1] // self.heads)
        x = jnp.moveaxis(x, 3, 1).reshape(batch, self.groups, -1, x.shape[-1])
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -x.shape[-1] % M)))

    def _meets(self, ranks: int) -> Array:
        """[turns x columns, A's rows]: 1 where a column is that of a turn and of the row's head i1."""
        head = np.arange(self._tiles(ranks) * M) // (ranks * self.program.d1)
        turn, column = np.arange(self._turns)[:, None, None], np.arange(self.columns)[:, None]
        meets = (column == head * self._turns + turn) & (head < self._firsts)
        return jnp.asarray(meets.reshape(-1, len(head)), self.weights_dtype)

    def token(self, columns: Array, group: Array) -> Array:
        return rem(group, self._token_groups) * self._tokens + div(rem(columns, self._turns), self.program.h2)

    def scores(self, operands: list, blocks: list, scratch: list, scale: float) -> Array:
        keys, total = self.program.keys, jnp.zeros((self.block, self.columns), jnp.float32)
        for queries, (a, b, ranks) in zip(operands, keys, strict=False):
            a, b = self._blocks(blocks, a, b)
            for tile in range(self._tiles(ranks)):
                here, row = pl.ds(tile * M, M), 0
                for turn in range(self._turns):
                    pairs = []
                    for first, rows in self._rows_of_b(ranks, turn % self.program.h2):
                        pairs.append((transposed(queries.at[pl.ds(row, rows), here]), b.at[pl.ds(first, rows)]))
                        row += rows
                    met = product(M, self.block, *pairs)
                    factors = by_product(a[here]).astype(jnp.float32)
                    scratch[0][...] = (factors * met).astype(scratch[0].dtype)
                    plgpu.commit_smem()
                    ones = self._ones(operands, ranks, tile, turn)
                    total += product(self.block, self.columns, (transposed(scratch[0]), transposed(ones)))
        return total * (scale / sum(ranks for *_, ranks in keys) / self._power(scale))

    def weighted(self, weights: Any, shrunk: Any, shrink: Array, operands: list, blocks: list, scratch: list,
                 sums: Arrays) -> Arrays:
        old, made = iter(sums), []
        for a, b, ranks in self.program.values:
            a, b = self._blocks(blocks, a, b)
            for tile in range(self._tiles(ranks)):
                for turn in range(self._turns):
                    ones = transposed(self._ones(operands, ranks, tile, turn))
                    each = product(M, 16, (ones, shrunk.at[:, pl.ds(0, 16)])).max(axis=1)
                    spread = product(M, self.block, (ones, weights))
                    factors = by_product(a[pl.ds(tile * M, M)]).astype(jnp.float32)
                    scratch[1][...] = (factors * spread).astype(self.dtype)
                    plgpu.commit_smem()
                    for first, width in self._columns_of_b(ranks, turn % self.program.h2):
                        total = next(old) * along(each, (M, width), 0)
                        made.append(self.accumulated(total, (scratch[1], transposed(b.at[pl.ds(first, width)]))))
        return tuple(made)

    def _blocks(self, blocks: list, *numbers: int) -> list:
        entries = [read.sources[0][0] for read in self.reads]
        return [blocks[entries.index(number)] for number in numbers]

    def _ones(self, operands: list, ranks: int, tile: int, turn: int) -> Any:
        ref = operands[len(self.program.keys) + self._all_ranks.index(ranks)]
        return ref.at[pl.ds(turn * self.columns, self.columns), pl.ds(tile * M, M)]

    def finish(self, sums: Arrays, shares: Array) -> tuple[Arrays, Any]:
        p, old, total = self.program, iter(sums), 0.0
        shares = self._by_turn(shares)
        for *_, ranks in p.values:
            tiles = [[self._joined(old, ranks, turn) for turn in range(self._turns)]
                     for _ in range(self._tiles(ranks))]
            total += jnp.stack([jnp.einsum("sbgijk,sbgi->bgikj", self._met(x, ranks, turn % p.h2), shares[..., turn])
                                for turn, x in enumerate(zip(*tiles, strict=True))], axis=3)
        total = total / sum(ranks for *_, ranks in p.values)  # [B, groups, i1, turn, j2, j1]
        means = self._by_row(total.reshape(*total.shape[:4], -1))
        return (means.reshape(means.shape[0], -1, p.d1),), lambda x: self._by_row(self._by_turn(x)[..., None])

    def _joined(self, sums: Any, ranks: int, turn: int) -> Array:
        return jnp.concatenate([next(sums) for _ in self._columns_of_b(ranks, turn % self.program.h2)], axis=-1)

    def _met(self, tiles: tuple[Array, ...], ranks: int, i2: int) -> Array:
        """Sums [..., A's rows, columns of B] of one turn -> [..., i1, j1, j2]: of equal ranks, added."""
        p = self.program
        x = jnp.concatenate(tiles, axis=-2)[..., :self._firsts * ranks * p.d1, :]
        x = x.reshape(*x.shape[:-2], self._firsts, ranks, p.d1, -1)
        covered = [first + n for first, width in self._columns_of_b(ranks, i2) for n in range(width)]
        starts = [covered.index(row) for row in self._needed(ranks, i2)[::p.d2]]
        return sum(x[..., r, :, start:start + p.d2] for r, start in enumerate(starts))

    def _by_turn(self, x: Array) -> Array:
        """[..., columns] -> [..., i1, turn]."""
        return x[..., :self._firsts * self._turns].reshape(*x.shape[:-1], self._firsts, self._turns)

    def _by_row(self, x: Array) -> Array:
        """[B, groups, i1, turn, d] -> [B, rows, d]."""
        p = self.program
        x = x.reshape(x.shape[0], self.heads, self._token_groups, self._firsts, self._tokens, p.h2, -1).swapaxes(2, 3)
        x = x.reshape(x.shape[0], self.heads * self._firsts, -1, *x.shape[-2:])[:, :p.h1, :p.new]
        return x.reshape(x.shape[0], -1, x.shape[-1])


def spans(needed: tuple[int, ...], unit: int, size: int) -> tuple[tuple[int, int], ...]:
    """(first, rows) of what holds the rows needed, among `size`: `unit` or multiples of it, from multiples of 8.

    They may overlap where `size` ends.
    """
    found: list[tuple[int, int]] = []
    for row in needed:
        if found and row < sum(found[-1]):
            continue
        first = min(row // 8 * 8, size - unit)
        joins = found and first == sum(found[-1])
        found.append((found[-1][0], found.pop()[1] + unit) if joins else (first, unit))
    return tuple(found)
