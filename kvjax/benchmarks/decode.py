"""Times decode kernels on the device that is here: bytes of cache a second, beside a copy's, and beside JAX's own MHA.

    python -m kvjax.benchmarks.decode
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
import tyro

from kvjax.benchmarks.device import command, copy_run, kernel_here, medians, show
from kvjax.kernels.decode import api
from kvjax.kernels.decode.heads import HeadParts
from kvjax.kernels.decode.kronecker import KroneckerFactors
from kvjax.kernels.decode.program import Entry, Past, Program


@dataclass(frozen=True)
class Shape:
    """The decode step that is timed: one layer, one new token a sequence, caches full."""

    batch: int = 32
    length: int = 4096
    rounds: int = 11


@dataclass(frozen=True)
class Case:
    """A program, the queries that it takes of a sequence, and the features of each entry."""

    program: Program
    queries: tuple[tuple[int, ...], ...]
    features: tuple[int, ...]


def heads(queries: int, groups: int, width: int) -> Case:
    """Attention with whole heads."""
    program = HeadParts(1, queries // groups, groups, ((0, width),), ((1, groups, width),))
    return Case(program, ((groups, queries // groups, width),), (groups * width,) * 2)


def factors(h1: int, h2: int, d1: int, d2: int, rank: int = 2) -> Case:
    """Attention with Kronecker factors."""
    program = KroneckerFactors(1, h1, h2, d1, d2, ((0, 1, rank),), ((2, 3, rank),))
    return Case(program, ((program.rows * d2, d1),), (h1 * rank * d1, rank * h2 * d2) * 2)


LATENT = Case(HeadParts(1, 32, 1, ((0, 512), (1, 64)), ((0, 1, 512),)), ((1, 32, 512), (1, 32, 64)), (512, 64))
CASES = {"mha 16x64": heads(16, 16, 64), "gqa 32/8x128": heads(32, 8, 128), "mla of 32 heads": LATENT,
         "kpa 8x2": factors(8, 2, 8, 8), "kpa 4x4": factors(4, 4, 8, 8), "tpa 16x64": factors(16, 1, 1, 64)}
OWN = "jax's own mha 16x64"


def run_of(kernel: str, case: Case, shape: Shape) -> tuple[Callable, int]:
    """One call of the kernel, and the bytes of cache that it reads."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda *size: jax.random.normal(next(keys), (shape.batch, *size), jnp.bfloat16)  # noqa: E731
    queries = tuple(normal(*size) for size in case.queries)
    stored = tuple(normal(features, shape.length)[None] for features in case.features)
    lengths = jnp.full((shape.batch,), shape.length, jnp.int32)
    block = api.block_of(case.program, list(stored), shape.length)
    past = Past(shape.length, block, 0.125)
    run = jax.jit(lambda queries, stored: api.run(kernel, case.program, past, queries, (),
                                                  tuple(Entry(x, 0) for x in stored), lengths))
    return lambda: run(queries, stored), sum(2 * prod(x.shape) for x in stored)


def own_mha(shape: Shape, implementation: str | None) -> tuple[Callable, int]:
    """JAX's own attention of one token to 16 heads of 64 features, and the bytes that it reads."""
    q, k, v = (jax.random.normal(jax.random.key(i), (shape.batch, n, 16, 64), jnp.bfloat16)
               for i, n in enumerate((1, shape.length, shape.length)))
    run = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation=implementation))
    return lambda: run(q, k, v), 2 * (k.size + v.size)


def measure(kernel: str, shape: Shape) -> list[dict]:
    """The rows of the table: the copy first, then JAX's own, then each case."""
    timed = {"copy": copy_run(), OWN: own_mha(shape, "cudnn" if kernel == "gpu" else None)}
    timed |= {name: run_of(kernel, case, shape) for name, case in CASES.items()}
    times = medians({name: run for name, (run, _) in timed.items()}, shape.rounds)
    copied = timed["copy"][1] / times["copy"]
    return [{"what": name, "us": 1e6 * times[name], "GB/s": moved / times[name] / 1e9,
             "of the copy's": moved / times[name] / copied, "faster than jax's own mha": times[OWN] / times[name]}
            for name, (_, moved) in timed.items()]


def main(shape: Shape) -> None:
    """Raises ConfigError where no kernel is for the device."""
    show(f"decoding one token, bfloat16, {shape.batch} rows of {shape.length} tokens", measure(kernel_here(), shape))


if __name__ == "__main__":
    command(main, lambda: tyro.cli(Shape, description=__doc__))
