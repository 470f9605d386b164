"""Attention of new tokens to what a cache holds: by a kernel, or one block after another in plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.attention.components import Component
from kvjax.attention.partials import Partial, merge, nothing_seen
from kvjax.attention.variant import Attention, Layer, Weights
from kvjax.cache import Past, stored_axes
from kvjax.kernels.decode import api
from kvjax.kernels.decode import program as kernels
from kvjax.kernels.decode.program import Entry
from kvjax.quantisation import is_quantised, scale_component
from kvjax.sharding import default_device, parts, per_device, target_platform

AT_ONCE = 4096
"""Tokens of a cache that are read as one block at most."""


def attend_to_past(kernel: str, variant: Attention, layer: Layer, path: tuple[Weights, ...], queries: Any,
                   past: Past, slots: dict[str, tuple], positions: Array, window: int | None, dtype) -> Partial:
    """Attention of a layer's queries to everything stored before them.

    Args:
        kernel: see `ModelConfig.kernel`.
        path: weights of the group's layers up to this one.
        slots: for each component that the layer reads, the slots of its entries.
        positions: [B, T] of the queries.
        window: keys that a query sees at most.
        dtype: the compute type.
    """
    queries = variant.absorb(layer, path, queries)
    implementation, found = api.implementation_of(kernel, default_device()), None
    if api.uses_program(implementation, positions.shape[1]):
        entries = {name: len(numbers) for name, numbers in slots.items()}
        attending = variant.attending(layer, path, queries, entries)
        found = _by_kernel(kernel, implementation, attending, past, slots, window)
    if found is None:
        past = past.replace(whole=_lies_in_one_piece(variant, layer, past, slots, positions.shape[1], dtype))
        found = _block_by_block(variant, layer, path, queries, past, slots, positions, window, dtype)
    return variant.release(layer, path, found)


def _lies_in_one_piece(variant: Attention, layer: Layer, past: Past, slots: dict[str, tuple], new: int, dtype) -> bool:
    """Whether few new tokens attend to all of a past as one block.

    CPUs multiply heads where they lie if these are all that there is of a component, and blocks or slots as copies. Of
    larger caches the empty part would cost too much.
    """
    stored = [past.cache.components[name] for name in slots]
    return (target_platform() == "cpu" and new <= api.MOST_NEW and past.size <= AT_ONCE
            and variant.reads_in_place(layer) and all(x.shape[0] == 1 and x.dtype == dtype for x in stored))


def _block_by_block(variant: Attention, layer: Layer, path: tuple[Weights, ...], queries: Any, past: Past,
                    slots: dict[str, tuple], positions: Array, window: int | None, dtype) -> Partial:
    def attend_block(block):
        return variant.absorbed(layer, path, queries, past.view(block, slots, positions, window, dtype))

    def step(block, found):
        # A conditional, not a shorter loop: loops of unknown length have no gradient.
        return jax.lax.cond(past.holds(block), lambda b, f: merge(f, attend_block(b)), lambda _, f: f, block, found)
    return jax.lax.fori_loop(0, past.blocks, step, nothing_seen(jax.eval_shape(attend_block, 0)))


def _by_kernel(kernel: str, implementation: str, attending: api.Attending | None, past: Past,
               slots: dict[str, tuple], window: int | None) -> Partial | None:
    """A kernel on each device's own sequences and heads. None: auto declined. Raises ValueError: a named one cannot."""
    if attending is None:
        return api.decline(kernel, f"no decode program reads {', '.join(slots)} of this attention")
    if past.cache.prefix is not None and attending.by_slot:
        return api.decline(kernel, "it rotates keys by their place in the cache, and a compacted cache starts at "
                                   "another position")
    components, held = _entries(attending, past, slots)
    kind = _kind(implementation, attending, [x for x, *_ in held], past, window)
    constants = attending.constants(kind)
    arguments = attending.queries, [x for x, _ in constants], held, past.lengths
    axes, of_rows = _axes(attending, constants, components, held)
    ways = parts(of_rows[1], axes, arguments)
    if ways > 1 and attending.undivided:
        return api.decline(kernel, f"heads cannot be split over {ways} devices: {attending.undivided}; set mesh.tensor "
                                   "to 1")
    program = attending.program.divided(ways)

    def run(queries: tuple, constants: list, held: tuple, lengths: Array):
        entries = tuple(Entry(x, slot, scales[0] if scales else None, _scaled_together(c))
                        for c, (x, slot, *scales) in zip(components, held, strict=True))
        return api.run(implementation, program, kind, queries, tuple(constants), entries, lengths)

    outputs = tuple(of_rows for _ in program.outputs), of_rows
    return Partial(*attending.result(*per_device(run, axes, outputs, arguments)(*arguments)))


def _entries(attending: api.Attending, past: Past, slots: dict[str, tuple]) -> tuple[tuple, tuple]:
    """Components that the program reads; of each (stored, slot), or with scales (stored, slot, scales)."""
    table, stored = {c.name: c for c in past.cache.table}, past.cache.components
    components = tuple(table[name] for name, _ in attending.reads)
    scales = lambda c: (stored[scale_component(c).name],) if is_quantised(stored[c.name].dtype) else ()
    return components, tuple((stored[c.name], jnp.asarray(slots[name][number]), *scales(c))
                             for c, (name, number) in zip(components, attending.reads, strict=True))


def _kind(implementation: str, attending: api.Attending, stored: list[Array], past: Past,
          window: int | None) -> kernels.Past:
    """The past as a kernel sees it: the reference reads it as one block."""
    tiles = api.TILES.get(default_device().device_kind, api.DEFAULT)
    block = past.size if implementation == "reference" else api.block_of(attending.program, stored, past.size, tiles)
    return kernels.Past(past.size, block, attending.scale, window, past.ring, past.cache.capacity)


def _axes(attending: api.Attending, constants: tuple, components: tuple[Component, ...], held: tuple) -> tuple:
    """Logical axes of what a kernel takes (queries, constants, entries, lengths), and of each of its results."""
    by_key_head = attending.split == 1
    of_queries = ("batch", "kv_heads") if by_key_head else ("batch", None, "heads")
    of_rows = ("batch", "kv_heads" if by_key_head else "heads", None)
    axes = (tuple((*of_queries, *[None] * (q.ndim - len(of_queries))) for q in attending.queries),
            [("kv_heads" if by_head and by_key_head else None, *[None] * (x.ndim - 1)) for x, by_head in constants],
            tuple((stored_axes(c), (), *(stored_axes(scale_component(c)),) * (len(rest) - 1))
                  for c, (_, *rest) in zip(components, held, strict=True)), ("batch",))
    return axes, of_rows


def _scaled_together(component: Component) -> int:
    """Consecutive stored features that share a scale."""
    groups = component.features[0] if len(component.features) > 1 else 1
    heads = component.features[component.head_axis] if component.head_axis else 1
    return component.size // (groups * heads)
