"""Times decode kernels on the TPU that is here, and prints its row for the table of block sizes.

    python -m kvjax.benchmarks.tune

Times a decode step of a few variants in plain JAX, and by the kernel with each of a few block sizes. The row belongs
into `TILES` of kvjax/kernels/decode/api.py if the kernel is the faster one: `kernel auto` takes it from then on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import Array

from kvjax.benchmarks.decode_memory import VARIANTS, decode_tokens
from kvjax.benchmarks.device import command
from kvjax.cache import Cache, init_cache
from kvjax.config import ModelConfig, require
from kvjax.kernels.decode import api
from kvjax.kernels.decode.api import Tiles
from kvjax.model import abstract_parameters, build_model

TUNED = ("gqa", "mla", "kpa", "gqa residual m=4")
CANDIDATES = tuple(Tiles(2**blocks, 2**work) for blocks, work in product((20, 21, 22), (21, 22, 23)))
Times = dict[str, float]
"""Seconds of each variant."""


@dataclass(frozen=True)
class Shape:
    """The decode steps that are timed."""

    layers: int = 4
    batch: int = 32
    length: int = 4096
    steps: int = 20


def seconds(name: str, kernel: str, shape: Shape) -> float:
    """Of a decode step on a full cache: the fastest of three runs of `steps` steps in one program."""
    attention, sharing = VARIANTS[name]
    config = ModelConfig(attention=attention, sharing=sharing, vocab_size=1024, layers=shape.layers, width=1024,
                         feed_forward_width=1024, kernel=kernel)
    params = jax.tree.map(lambda x: jnp.full(x.shape, 0.01, jnp.bfloat16), abstract_parameters(config))
    tokens, cache = jnp.ones((shape.batch, 1), jnp.int32), _full(init_cache(config, shape.batch, shape.length), shape)
    run = jax.jit(partial(decode_tokens, build_model(config), shape.steps))
    jax.block_until_ready(run(params, tokens, cache))
    return min(_timed(lambda: run(params, tokens, cache)) for _ in range(3)) / shape.steps


def _full(cache: Cache, shape: Shape) -> Cache:
    return cache.replace(lengths=jnp.full((shape.batch,), shape.length - shape.steps, jnp.int32))


def _timed(run: Callable[[], tuple[Array, Cache]]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def times_of(tiles: Tiles, kind: str, shape: Shape) -> Times:
    """Of the kernel with these block sizes; infinite where they do not fit its memory."""
    def one(name: str) -> float:
        try:
            return seconds(name, "tpu", shape)
        except jax.errors.JaxRuntimeError as error:
            print(f"{tiles} {name}: {str(error).splitlines()[0]}")
            return float("inf")
    with api.sized(kind, tiles):
        return {name: one(name) for name in TUNED}


def best(timed: dict[Tiles, Times]) -> Tiles:
    """The sizes with the least geometric mean of times."""
    return min(timed, key=lambda tiles: np.log(list(timed[tiles].values())).sum())


def row(kind: str, tiles: Tiles, kernel: Times, plain: Times) -> str:
    """What the table gets, with the figures that it rests on."""
    gains = {name: plain[name] / kernel[name] for name in kernel}
    slower = [name for name, gain in gains.items() if gain < 1]
    advice = f"leave {kind!r} out: the kernel is slower for {', '.join(slower)}" if slower else \
        f"in TILES of kvjax/kernels/decode/api.py:  {kind!r}: {tiles},"
    figures = {"device_kind": kind, "tiles": asdict(tiles), "seconds": kernel, "times_faster_than_plain_jax": gains}
    return f"{json.dumps(figures)}\n{advice}"


def main(shape: Shape) -> None:
    """Raises ConfigError where no TPU is."""
    device = jax.devices()[0]
    require(device.platform == "tpu", f"tune: the device here is a {device.device_kind} ({device.platform}): block "
                                      "sizes are those of TPU kernels, run it on a TPU")
    plain = {name: seconds(name, "xla", shape) for name in TUNED}
    timed = {tiles: times_of(tiles, device.device_kind, shape) for tiles in CANDIDATES}
    for tiles, times in timed.items():
        print(tiles, {name: f"{1e3 * t:.3f} ms" for name, t in times.items()})
    tiles = best(timed)
    print(row(device.device_kind, tiles, timed[tiles], plain))


if __name__ == "__main__":
    command(main, lambda: tyro.cli(Shape, description=__doc__))
