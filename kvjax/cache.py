"""The key-value cache: a pure pytree that holds the components of the plan and nothing else.

Stored tokens-minor, [slots, B, F, S]: tokens fill the lanes of a TPU tile whatever the size of a head, and a block of
tokens is read in place. F is the flattened features, head axis first, so that splitting it over devices splits heads.
The past is read through a handle (component, slot, block) and new rows of all layers are written once, after the last.
A quantised cache holds the scales of its components as components of their own: they are written, split and counted
like all others, and meet their values only where rows go in and where a block is read.
Of tokens that were compacted away (`kvjax.compaction`) a prefix is left; those that follow keep their positions.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from kvjax.attention.components import Component
from kvjax.attention.masks import Mask
from kvjax.attention.sharing import make_plan
from kvjax.attention.variant import View
from kvjax.config import ModelConfig, require
from kvjax.quantisation import SCALE_TYPE, dequantise, is_quantised, quantise, scale_component, storage_type
from kvjax.sharding import constrain, per_device, pin_layout

BLOCK = 512
"""Tokens of the cache read at once; capacities are whole blocks."""
LANES = 128
"""Tokens per tile: a cache shorter than a block is rounded up to this."""


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is not below n."""
    return -(-n // multiple) * multiple


def block_size(length: int) -> int:
    """Tokens of one block of a component that holds `length` tokens."""
    return min(BLOCK, round_up(length, LANES))


def capacity(length: int) -> int:
    """Tokens that a cache made for `length` tokens has room for: whole blocks."""
    return round_up(length, block_size(length))


def tokens_kept(component: Component, room: int) -> int:
    """Tokens of a component in a cache with room for `room`: of a windowed one, the window in whole blocks."""
    return room if component.window is None else min(room, capacity(component.window))


class Stored(NamedTuple):
    """One component as a cache of some type holds it."""

    component: Component
    slots: int
    dtype: np.dtype


def contents(config: ModelConfig, dtype=None) -> tuple[Stored, ...]:
    """What a cache of type `dtype` (None: the compute type) holds: cached components, quantised ones with their scales.

    Raises ConfigError if a cache cannot be of that type.
    """
    plan, dtype = make_plan(config), storage_type(config.dtype if dtype is None else dtype)
    held = []
    for c in plan.cached:
        held.append(Stored(c, plan.slots(c.name), dtype))
        if is_quantised(dtype):
            held.append(Stored(scale_component(c), plan.slots(c.name), SCALE_TYPE))
    names = [stored.component.name for stored in held]
    require(len(set(names)) == len(names), f"a {dtype} cache would hold components {names}: names must be unique, and "
                                           "NAME_scale is taken by the scales of NAME")
    return tuple(held)


@struct.dataclass
class Cache:
    """Cached components of a batch of sequences. Rows may have different lengths."""

    components: dict[str, Array]
    """Name -> [slots, B, F, S]."""
    lengths: Array
    """[B] int32: tokens held for each row."""
    overflowed: Array
    """[B] bool: more tokens were appended than there is room for; they were dropped, and what follows is wrong."""
    offsets: Array
    """[B] int32: position of the first token held for each row; those before it were compacted."""
    table: tuple[Component, ...] = struct.field(pytree_node=False)
    capacity: int = struct.field(pytree_node=False)
    prefix: Prefix | None = None
    """What is left of tokens that were compacted."""

    @property
    def positions(self) -> Array:
        """[B] int32: position of the next token of each row."""
        return self.offsets + self.lengths

    @property
    def nbytes(self) -> int:
        """Bytes of all components as allocated, those of the prefix included."""
        own = sum(c.size * c.dtype.itemsize for c in self.components.values())
        return own if self.prefix is None else own + self.prefix.cache.nbytes

    @property
    def dtype(self) -> np.dtype:
        """Element type that `init_cache` was given; scales have their own."""
        return self.components[self.table[0].name].dtype

    def repeated(self, times: int) -> Cache:
        """Each sequence so many times in a row, [B * times]: continuations of one beginning, read side by side."""
        sequences = {name: getattr(self, name).repeat(times) for name in ("lengths", "overflowed", "offsets")}
        return self.replace(
            components={name: x.repeat(times, axis=1) for name, x in self.components.items()}, **sequences,
            prefix=self.prefix and self.prefix.replace(cache=self.prefix.cache.repeated(times)))

    def append(self, rows: dict[str, Array], counts: Array | None = None) -> Cache:
        """Writes new rows of every slot.

        Args:
            rows: {name: [slots, B, T, *features]} of the model's cached components, as they were computed.
            counts: [B], how many of the T tokens are real, the first ones; None: all.
        Raises:
            ValueError: when it is known before running that they do not fit.
        """
        batch, length = self.lengths.shape[0], next(iter(rows.values())).shape[2]
        counts = jnp.full((batch,), length, jnp.int32) if counts is None else jnp.asarray(counts, jnp.int32)
        self._refuse_overflow(length, counts)
        rows = self._quantised(rows) if is_quantised(self.dtype) else rows
        stored = {c.name: to_stored(c, rows[c.name]).astype(self.components[c.name].dtype) for c in self.table}
        axes = {c.name: stored_axes(c) for c in self.table}
        fitting = jnp.minimum(counts, self.capacity - self.lengths)
        arguments = self.components, stored, self.lengths, self.positions, fitting
        write = per_device(self._write, (axes, axes, ("batch",), ("batch",), ("batch",)), axes, arguments)
        total = self.lengths + counts
        return self.replace(
            components=write(*arguments),
            lengths=jnp.minimum(total, self.capacity), overflowed=self.overflowed | (total > self.capacity))

    def _quantised(self, rows: dict[str, Array]) -> dict[str, Array]:
        quantised = dict(rows)
        for c in self.table:
            if scale_component(c) in self.table:
                quantised[c.name], quantised[scale_component(c).name] = quantise(rows[c.name], c, self.dtype)
        return quantised

    def _refuse_overflow(self, length: int, counts: Array) -> None:
        if length > self.capacity:
            raise ValueError(f"{length} new tokens do not fit a cache of {self.capacity}: "
                             f"init_cache with max_length of at least {length}")
        if isinstance(self.lengths, jax.core.Tracer) or isinstance(counts, jax.core.Tracer):
            return
        longest = int((self.lengths + counts).max())
        if longest > self.capacity:
            raise ValueError(f"the cache has room for {self.capacity} tokens and would hold {longest}: "
                             f"init_cache with max_length of at least {longest}")

    def _write(self, components, rows, lengths, positions, counts):
        # Read-modify-write of one row's window at a time: it stays in place, where a scatter copies the cache.
        def write_row(row, components):
            return {c.name: _write_window(components[c.name], rows[c.name], row,
                                          (lengths if c.window is None else positions)[row], counts[row],
                                          ring=c.window is not None) for c in self.table}
        return jax.lax.fori_loop(0, lengths.shape[0], write_row, components)

    def past(self, name: str) -> Past:
        """The handle to everything stored so far, blocked and numbered as component `name` is."""
        component = next(c for c in self.table if c.name == name)
        return Past(self, component.window is not None, self.components[name].shape[-1])


@struct.dataclass
class Past:
    """Handle to the stored tokens of components that share a window; blocks are read when asked for."""

    cache: Cache
    ring: bool = struct.field(pytree_node=False)
    size: int = struct.field(pytree_node=False)
    whole: bool = struct.field(pytree_node=False, default=False)
    """Everything is one block."""

    @property
    def block(self) -> int:
        """Tokens per block: as many whole tiles as divide the size."""
        return self.size if self.whole else max(n for n in range(LANES, BLOCK + 1, LANES) if self.size % n == 0)

    @property
    def blocks(self) -> int:
        """Blocks of the whole capacity."""
        return self.size // self.block

    @property
    def lengths(self) -> Array:
        """[B] int32: tokens that were written for each row; a ring keeps the last of them."""
        return self.cache.positions if self.ring else self.cache.lengths

    def holds(self, block: Array | int) -> Array:
        """Scalar bool: some row has tokens in this block."""
        return jnp.max(self.lengths) > block * self.block

    def view(self, block: Array | int, slots: dict[str, tuple], query_positions: Array, window: int | None,
             dtype) -> View:
        """One block as the queries at `query_positions` [B, T] see it; `slots` says which entries to read."""
        table = {c.name: c for c in self.cache.table}
        entries = {name: tuple(self._read(table[name], slot, block, dtype) for slot in ids)
                   for name, ids in slots.items()}
        positions, valid = self._positions(block)
        return View(entries, positions, Mask(query_positions, positions, valid=valid, window=window))

    def _read(self, component: Component, slot: Array | int, block: Array | int, dtype) -> Array:
        rows = self._slice(component, slot, block)
        if not is_quantised(rows.dtype):
            return rows.astype(dtype)
        return dequantise(rows, self._slice(scale_component(component), slot, block), component, dtype)

    def _slice(self, component: Component, slot: Array | int, block: Array | int) -> Array:
        stored = self.cache.components[component.name]
        sizes = (1, *stored.shape[1:3], self.block)
        read = jax.lax.dynamic_slice(stored, (slot, 0, 0, block * self.block), sizes)
        if component.size > 1:  # a single feature does not fill tiles: row-major order would be a padded copy
            read = pin_layout(read, *stored_axes(component))
        return from_stored(component, read[0])

    def _positions(self, block: Array | int) -> tuple[Array, Array]:
        slot = block * self.block + jnp.arange(self.block)
        lengths = self.lengths[:, None]
        if not self.ring:
            return self.cache.offsets[:, None] + slot, slot < lengths
        newest = lengths - 1  # a ring of S slots keeps position p in slot p mod S
        positions = newest - (newest - slot) % self.size
        return positions, positions >= 0


@struct.dataclass
class Prefix:
    """What is left of compacted tokens: few keys and values of heads, fitted so that attention to them is nearly that
    to all of the tokens. `kvjax.compaction` makes it; `kvjax.model.prefix` attends to it.
    """

    cache: Cache
    """Its slots are entries, and its tokens the kept ones: components `k`, `v` and, unless all biases are 0, `bias`."""
    entries: tuple[int | None, ...] = struct.field(pytree_node=False)
    """The entry that each layer reads; None: it reads none, because its window keeps what it sees."""


def stored_axes(component: Component) -> tuple[str | None, ...]:
    """Logical axes of a stored component [slots, B, F, S]; a single head is not split."""
    heads = 1 if component.head_axis is None else component.features[component.head_axis]
    return (None, "batch", "kv_heads" if heads > 1 else None, None)


def to_stored(component: Component, rows: Array) -> Array:
    """[slots, B, T, *features] -> [slots, B, F, T]."""
    if component.head_axis:
        rows = jnp.moveaxis(rows, 3 + component.head_axis, 3)
    return jnp.swapaxes(rows.reshape(*rows.shape[:3], component.size), 2, 3)


def from_stored(component: Component, stored: Array) -> Array:
    """[..., B, F, T] -> [..., B, T, *features]."""
    features, at = list(component.features), stored.ndim - 2
    if component.head_axis:
        features.insert(0, features.pop(component.head_axis))
    rows = jnp.moveaxis(stored.reshape(*stored.shape[:-2], *features, stored.shape[-1]), -1, at)
    return jnp.moveaxis(rows, at + 1, at + 1 + component.head_axis) if component.head_axis else rows


def _write_window(stored: Array, rows: Array, row: Array, start: Array, count: Array, ring: bool) -> Array:
    """Writes the first `count` tokens of one batch row behind its `start` stored ones."""
    size, new = stored.shape[3], jax.lax.dynamic_slice_in_dim(rows, row, 1, axis=1)
    if not ring:
        return _place(stored, new, row, start, count)
    if new.shape[3] > size:  # only the last of them survive
        skipped = jnp.clip(count - size, 0, new.shape[3] - size)
        new = jax.lax.dynamic_slice_in_dim(new, skipped, size, axis=3)
        start, count = start + skipped, count - skipped
    at = start % size
    stored = _place(stored, new, row, at, count)
    return stored if new.shape[3] == 1 else _place(stored, new, row, at - size, count)  # what wraps round


def _place(stored: Array, new: Array, row: Array, at: Array, count: Array) -> Array:
    """Sets tokens at .. at + count of one batch row, as far as they lie inside; the rest of the window is kept."""
    length = new.shape[3]
    start = jnp.clip(at, 0, stored.shape[3] - length)
    shift = at - start
    token = jnp.arange(length) - shift
    where = (0, row, 0, start)
    old = jax.lax.dynamic_slice(stored, where, new.shape)
    moved = new if length == 1 else jnp.roll(new, shift, axis=3)
    return jax.lax.dynamic_update_slice(stored, jnp.where((token >= 0) & (token < count), moved, old), where)


def init_cache(config: ModelConfig, batch: int, max_length: int, dtype=None) -> Cache:
    """An empty cache.

    Args:
        config: the model's architecture.
        batch: sequences.
        max_length: tokens each may reach, prompt and generated ones together; rounded up to whole blocks.
        dtype: element type: float32, bfloat16 or float16; int8 or float8_e4m3fn, which are kept with bfloat16 scales
            (`kvjax.quantisation`); None: the model's compute type.
    Raises:
        ConfigError: batch or max_length below 1, or another dtype.
    """
    require(batch > 0 and max_length > 0, f"init_cache(batch={batch}, max_length={max_length}): both must be above 0")
    held, room = contents(config, dtype), capacity(max_length)
    def allocate(c: Component, slots: int, dtype: np.dtype) -> Array:
        return constrain(jnp.zeros((slots, batch, c.size, tokens_kept(c, room)), dtype), *stored_axes(c))
    none = lambda dtype: jnp.zeros((batch,), dtype)  # arrays of their own: what is donated must not be one twice
    return Cache({stored.component.name: allocate(*stored) for stored in held}, none(jnp.int32), none(bool),
                 none(jnp.int32), tuple(stored.component for stored in held), room)


def cache_bytes_per_token(config: ModelConfig, dtype=None, length: int | None = None) -> float:
    """Bytes cached per token of context over the whole model, from the plan; of a quantised cache with its scales.

    A cache made for `length` tokens holds this times its capacity, exactly. `dtype` defaults to the compute type,
    `length` to the context length; it matters only where windows limit what is kept.
    """
    length = config.context_length if length is None else length
    require(length > 0, f"cache_bytes_per_token(length={length}): it must be above 0")
    room = capacity(length)
    held = contents(config, dtype)
    return sum(slots * c.size * tokens_kept(c, room) * dtype.itemsize for c, slots, dtype in held) / room
