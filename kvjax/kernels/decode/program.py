"""What a decode kernel does with one block of the past: scores, and sums of values.

A program is written on blocks as a cache stores them, [F, S] with the tokens in the lanes, in operations that a kernel
can run. It says nothing of batches, memory or devices: `reference` and `tpu` run any program over a cache,
`gpu` those that it has a plan for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

Arrays = tuple[Array, ...]
Shape = tuple[int, int]
MASKED = -1e30
"""Score of a token that is not seen, and log-sum-exp where none is."""


class Entry(NamedTuple):
    """One entry of a stored component: all of the component, and which of its slots is meant."""

    stored: Array
    """[slots, B, F, S]."""
    slot: Array | int
    scales: Array | None = None
    """[slots, B, groups, S], if the component is quantised."""
    inner: int = 1
    """Features that share a scale: F is [..., groups, inner]."""


@dataclass(frozen=True)
class Past:
    """What is the same for all entries of a call."""

    size: int
    """Tokens that each entry has room for."""
    block: int
    """Tokens read at once; divides the size."""
    scale: float
    window: int | None = None
    """How many tokens a query sees at most, itself included; None: all."""
    ring: bool = False
    """Whether position p lies in slot p mod size."""
    room: int | None = None
    """Tokens that a sequence may reach, of which a ring keeps the last; None: size."""

    def first(self, length: Array) -> Array:
        """The first block in which any new token sees anything."""
        if self.window is None or self.ring:
            return jnp.int32(0)
        return div(jnp.maximum(length - self.window + 1, 0), self.block)

    def last(self, length: Array) -> Array:
        """The last block that holds tokens; 0 if there are none."""
        return div(jnp.maximum(jnp.minimum(length, self.size) - 1, 0), self.block)


class Program(Protocol):
    """Attention of the queries of one sequence to one block of its past. Programs are hashable: they are static."""

    new: int
    """New tokens of the sequence."""
    rows: int
    """Rows of scores: one for each new token and head."""
    work: int
    """Rows of the largest float32 array that it makes of a block."""
    sums: tuple[Shape, ...]
    """Shapes of the sums that are kept over blocks."""
    outputs: tuple[Shape, ...]

    def divided(self, ways: int) -> Program:
        """The program of one of so many devices, each with an equal part of the heads."""

    def tokens(self, rows: Array) -> Array:
        """Which of the new tokens each of the rows [rows, 1] int32 belongs to."""

    def scores(self, queries: Arrays, constants: Arrays, blocks: Arrays, positions: Array) -> Array:
        """[rows, S] float32, not scaled, of a block of tokens at `positions`, int32 [1, S] (see `positions_of`)."""

    def weighted(self, weights: Array, blocks: Arrays) -> Arrays:
        """What weights [rows, S] float32 add to each of the sums, float32."""

    def spread(self, factors: Array) -> Arrays:
        """Factors [rows, 1] of the rows, for the rows of each of the sums."""

    def finish(self, sums: Arrays) -> Arrays:
        """The outputs, of normalised sums; linear."""


def dequantised(block: Array, scales: Array | None, inner: int, dtype) -> Array:
    """A block [F, S] as stored, in the compute type; `scales` [groups, S] if it is quantised (see `Entry`)."""
    if scales is None:
        return block.astype(dtype)
    grouped = block.astype(jnp.float32).reshape(-1, scales.shape[0], inner, block.shape[1])
    return (grouped * scales.astype(jnp.float32)[None, :, None]).reshape(block.shape).astype(dtype)


def positions_of(past: Past, slots: Array, length: Array) -> Array:
    """Positions of the tokens in these slots, int32; where a slot holds none, any number.

    In a ring they are the slots plus the same number of turns, or, behind the newest token, plus one turn less.
    """
    newest = length - 1
    return newest - rem(jnp.maximum(newest - slots, 0), past.size) if past.ring else slots


def visible(past: Past, slots: Array, tokens: Array, length: Array) -> Array:
    """Which stored tokens the queries see, [rows, S].

    Args:
        slots: int32 [rows, S], where tokens lie in the cache.
        tokens: int32 [rows, 1], which of the new tokens a row belongs to.
        length: tokens held.
    """
    held = slots < length
    if past.window is None:
        return held
    return held & (length + tokens - positions_of(past, slots, length) < past.window)


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Matrix product of 2-D arrays over the axes `contract`, summed in float32; float32 inputs count in full."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), precision=precision,
                               preferred_element_type=jnp.float32)


def div(a: Array, b: int) -> Array:
    """a // b of int32 numbers not below 0. (The operator asks for signs, and TPU kernels for the device's kind.)"""
    return jax.lax.div(a, jnp.int32(b))


def rem(a: Array, b: int) -> Array:
    """a % b, likewise."""
    return jax.lax.rem(a, jnp.int32(b))
