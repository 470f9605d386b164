"""Bytes that decode kernels move, against the bytes that they must: counted, not timed.

    python -m kvjax.benchmarks.decode_traffic

For every kernel call of a decode step, the index maps of its operands are evaluated over its grid; a block is fetched
(or written) when its index is another than in the step before. The floor is what the layers read of the cache, once,
as far as sequences go.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import Array
from rich.console import Console
from rich.table import Table

from kvjax.attention.sharing import make_plan
from kvjax.benchmarks.decode_memory import VARIANTS
from kvjax.cache import init_cache
from kvjax.config import ModelConfig
from kvjax.decoding import decode
from kvjax.kernels.decode import api, tpu
from kvjax.model import abstract_parameters, build_model


@dataclass(frozen=True)
class Shape:
    """The decode step that is counted."""

    layers: int = 4
    batch: int = 32
    length: int = 4096
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Traffic:
    """Bytes of one decode step, of all layers."""

    moved: float
    floor: float


def count(config: ModelConfig, batch: int, length: int, dtype: str) -> Traffic:
    """Traffic of a decode step on a full cache."""
    calls: list[tuple] = []

    def heard(program, past, queries, constants, entries):
        stored = [x for e in entries for x in (e.stored, e.scales) if x is not None]
        calls.append((tpu.grid_of(program, past, queries, constants, entries, batch),
                      [x.dtype for x in (*queries, *constants, *stored)],
                      sum(batch * x.shape[2] * min(length, past.size) * x.dtype.itemsize for x in stored)))

    cache = jax.eval_shape(lambda: init_cache(config, batch, length, dtype))
    tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    with api.listening(heard):
        jax.eval_shape(lambda p, t, c: decode(build_model(config), p, t, c), abstract_parameters(config), tokens, cache)
    moved = [sum(_bytes(block, dtype, spec.grid, length) for block, dtype in zip(
        (*spec.in_specs, *spec.out_specs), (*dtypes, *[np.float32] * len(spec.out_specs)), strict=True))
        for spec, dtypes, _ in calls]
    times = _times(config, len(calls))
    return Traffic(float(np.dot(times, moved)), float(np.dot(times, [floor for *_, floor in calls])))


def _times(config: ModelConfig, calls: int) -> list[float]:
    """How often each traced call runs: layers of a scan are traced once for all groups, or a few times over."""
    segments = [segment for segment in make_plan(config).segments if not segment.source]
    traces = calls // sum(len(segment.layers) for segment in segments)
    return [segment.repeats / traces for segment in segments for _ in range(traces * len(segment.layers))]


def _bytes(spec, dtype, grid: tuple[int, ...], length: int) -> int:
    """Bytes of the blocks of one operand that are fetched or written over a grid, its last axis innermost."""
    steps = np.stack(np.meshgrid(*(np.arange(n, dtype=np.int32) for n in grid), indexing="ij"), axis=-1)
    slots, lengths = jnp.zeros((64,), jnp.int32), jnp.full((grid[0],), length, jnp.int32)
    def index(step: Array) -> Array:
        return jnp.stack([jnp.asarray(i, jnp.int32) for i in spec.index_map(*step, slots, lengths)])
    visited = np.asarray(jax.vmap(index)(jnp.asarray(steps.reshape(-1, len(grid)))))
    fetched = 1 + int((visited[1:] != visited[:-1]).any(axis=1).sum())
    return fetched * prod(n for n in spec.block_shape if n is not None) * np.dtype(dtype).itemsize


def main(shape: Shape) -> None:
    """Counts every variant and prints the table."""
    table = Table("variant", "floor MiB", "moved MiB", "of the floor", "less than mha")
    counted = {}
    for name, (attention, sharing) in VARIANTS.items():
        config = ModelConfig(attention=attention, sharing=sharing, vocab_size=1024, layers=shape.layers, width=1024,
                             feed_forward_width=1024, kernel="tpu")
        counted[name] = found = count(config, shape.batch, shape.length, shape.dtype)
        table.add_row(name, f"{found.floor / 2**20:,.1f}", f"{found.moved / 2**20:,.1f}",
                      f"{found.moved / found.floor:.3f}", f"{counted['mha'].moved / found.moved:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Shape, description=__doc__))
