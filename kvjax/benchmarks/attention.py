"""Times Kronecker attention of tokens to themselves, forward and backward, on the device that is here.

    python -m kvjax.benchmarks.attention

The kernel that rebuilds keys and values where they are read, beside keys and values that are written to memory first,
and read by cuDNN's attention on a GPU, in blocks of plain JAX on a TPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import tyro
from jax import Array

from kvjax.attention.kronecker import kronecker_mean
from kvjax.attention.masks import own_tokens
from kvjax.attention.partials import attend
from kvjax.benchmarks.device import command, kernel_here, medians, show
from kvjax.kernels.attention.api import attend_factors


@dataclass(frozen=True)
class Shape:
    """The attention that is timed."""

    splits: tuple[tuple[int, int], ...] = ((8, 2), (12, 2))
    """(h1, h2) of each; features are 8 x 8, ranks 2."""
    batch: int = 8
    lengths: tuple[int, ...] = (2048, 8192)
    rounds: int = 11


def materialised(queries: Array, keys: tuple[Array, Array], values: tuple[Array, Array], scale: float) -> Array:
    """Attention to keys and values that are built first."""
    mask = own_tokens(queries.shape[1], None, None, complete=True)
    return attend(queries, kronecker_mean(*keys), kronecker_mean(*values), mask, scale).out.astype(queries.dtype)


def by_kernel(kernel: str, queries: Array, keys: tuple[Array, Array], values: tuple[Array, Array],
              scale: float) -> Array:
    """Attention to factors, by a kernel."""
    return attend_factors(kernel, queries, keys, values, None, None, scale)[0]


def forward_and_backward(attend: Callable, inputs: tuple) -> Callable:
    """Runs `attend` and the gradients of all its inputs, compiled."""
    def run(inputs: tuple) -> tuple:
        out, pull_back = jax.vjp(attend, *inputs)
        return out, pull_back(out)
    compiled = jax.jit(run)
    return lambda: compiled(inputs)


def drawn(split: tuple[int, int], batch: int, length: int) -> tuple:
    """Queries, factors of keys and factors of values."""
    (h1, h2), keys = split, iter(jax.random.split(jax.random.key(0), 5))
    normal = lambda *shape: jax.random.normal(next(keys), (batch, length, *shape), jnp.bfloat16)  # noqa: E731
    return normal(h1 * h2, 64), *((normal(2, h1, 8), normal(2, h2, 8)) for _ in range(2))


def measure(kernel: str, split: tuple[int, int], length: int, shape: Shape) -> dict:
    """One row of the table."""
    inputs = drawn(split, shape.batch, length)
    runs = {"kernel": forward_and_backward(partial(by_kernel, kernel, scale=0.125), inputs),
            "materialised": forward_and_backward(partial(materialised, scale=0.125), inputs)}
    times = medians(runs, shape.rounds)
    own, other = times["kernel"], times["materialised"]
    return {"split": "x".join(map(str, split)), "length": length, "kernel ms": 1e3 * own,
            "materialised ms": 1e3 * other, "kernel / materialised": own / other}


def main(shape: Shape) -> None:
    """Raises ConfigError where no kernel is for the device."""
    kernel, title = kernel_here(), f"Kronecker attention, forward and backward, bfloat16, batch {shape.batch}"
    for split, length in product(shape.splits, shape.lengths):
        show(title, [measure(kernel, split, length, shape)])  # each as it comes: a later one may not fit the memory


if __name__ == "__main__":
    command(main, lambda: tyro.cli(Shape, description=__doc__))
