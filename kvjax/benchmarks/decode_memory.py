"""Compiled memory of a decode step on a TPU, without a TPU.

    python -m kvjax.benchmarks.decode_memory

Shows, for each variant, how many bytes the compiler keeps beside the cache while one token, or 16 tokens in one loop,
are decoded for every row. A decode step that copied its cache would show as 100 % or more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from kvjax.ahead_of_time import single_device_mesh, tpu_devices
from kvjax.attention import (
    Attention,
    CrossLayer,
    GroupedQuery,
    Kronecker,
    Latent,
    PathConcat,
    PathResidual,
    Sharing,
    SkipV1,
    Yoco,
)
from kvjax.cache import Cache, init_cache, stored_axes
from kvjax.config import ModelConfig
from kvjax.decoding import decode
from kvjax.model import abstract_parameters, build_model
from kvjax.model.placement import parameter_shardings
from kvjax.sharding import named

GQA = GroupedQuery(heads=32, kv_heads=8, head_dim=128)
MLA = Latent(heads=32, latent_dim=512, rope_dim=64, nope_dim=128, value_dim=128)
KPA = Kronecker(h1=4, h2=2, d1=8, d2=16)
VARIANTS: dict[str, tuple[Attention, Sharing | None]] = {
    "mha": (GroupedQuery(heads=32, kv_heads=32, head_dim=128), None),
    "gqa": (GQA, None),
    "mqa": (GroupedQuery(heads=32, kv_heads=1, head_dim=128), None),
    "mla": (MLA, None),
    "kpa": (KPA, None),
    "kpa dense query": (Kronecker(h1=4, h2=2, d1=8, d2=16, dense_query=True), None),
    "tpa": (Kronecker(h1=32, h2=1, d1=1, d2=128), None),
    "gqa concat m=4": (GQA, PathConcat(layers=4, delta=64)),
    "gqa residual m=2": (GQA, PathResidual(layers=2, delta=32)),
    "gqa residual m=4": (GQA, PathResidual(layers=4, delta=32)),
    "gqa skip v1": (GQA, SkipV1()),
    "gqa cla-2": (GQA, CrossLayer(2)),
    "gqa yoco": (GQA, Yoco(window=1024)),
    "mla concat m=4": (MLA, PathConcat(layers=4, delta=256)),
    "mla skip v1": (MLA, SkipV1()),
    "kpa skip v1": (KPA, SkipV1()),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of the decode step: those of DESIGN's layout table."""

    layers: int = 16
    batch: int = 8
    length: int = 4096
    topology: str = "v5e:2x2"
    kernel: str = "xla"
    """What attends to the cache: see `ModelConfig.kernel`."""
    dtype: str = "bfloat16"
    """Element type of the cache."""


def decode_tokens(model, count: int, params, tokens, cache: Cache):
    """Greedy decoding of `count` tokens for every row, in one loop."""
    def step(_, state):
        tokens, cache = state
        logits, cache = decode(model, params, tokens, cache, last_only=True)
        return logits.argmax(-1).astype(tokens.dtype)[:, None], cache
    return jax.lax.fori_loop(0, count, step, (tokens, cache)) if count > 1 else step(0, (tokens, cache))


def compiled_memory(attention: Attention, sharing: Sharing | None, shape: Shape, count: int) -> tuple[int, int]:
    """(bytes of the cache, bytes of temporaries) of the compiled decode step of `count` tokens."""
    mesh = single_device_mesh(tpu_devices(shape.topology)[0])
    cache, compiled = compiled_step(attention, sharing, shape, count, mesh)
    return cache.nbytes, compiled.memory_analysis().temp_size_in_bytes


def compiled_step(attention: Attention, sharing: Sharing | None, shape: Shape, count: int,
                  mesh: Mesh) -> tuple[Cache, jax.stages.Compiled]:
    """The shapes of the cache, and the compiled decode step of `count` tokens over a mesh."""
    config = ModelConfig(attention=attention, sharing=sharing, vocab_size=1024, layers=shape.layers, width=1024,
                         feed_forward_width=1024, kernel=shape.kernel)
    params = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=place),
                          abstract_parameters(config), parameter_shardings(config, mesh))
    cache = jax.eval_shape(partial(init_cache, config, shape.batch, shape.length, shape.dtype))
    by_row = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=named(mesh, "batch"))  # noqa: E731
    placed = jax.tree.map(by_row, cache).replace(components={
        c.name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=named(mesh, *stored_axes(c)))
        for c in cache.table for x in [cache.components[c.name]]})
    run = jax.jit(partial(decode_tokens, build_model(config), count), donate_argnums=2)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # its devices may not be here
        tokens = by_row(jax.ShapeDtypeStruct((shape.batch, 1), jnp.int32))
        return cache, run.lower(params, tokens, placed).compile()


def main(shape: Shape) -> None:
    """Compiles every variant and prints its table."""
    table = Table("variant", "cache MiB", "1 token: temp MiB", "of cache", "16 in a loop: temp MiB", "of cache")
    for name, variant in VARIANTS.items():
        cells = []
        for count in (1, 16):
            cache, temp = compiled_memory(*variant, shape, count)
            cells += [f"{temp / 2**20:.1f}", f"{temp / cache:.2%}"]
        table.add_row(name, f"{cache / 2**20:.0f}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Shape, description=__doc__))
