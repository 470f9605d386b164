"""Attention to a cache by a kernel: what a variant asks for, which implementation does it, and on which devices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels.decode import reference
from kvjax.kernels.decode.program import Arrays, Entry, Past, Program

MOST_NEW = 8
"""New tokens of a sequence that are still a decode step; longer chunks rebuild keys and values, block by block."""
LANES = 128


@dataclass(frozen=True)
class Tiles:
    """How much a kernel holds at once: twice the first, and a few times the second. The defaults fit any TPU."""

    block_bytes: int = 2**21
    """Of all entries together, for one step."""
    work_bytes: int = 2**22
    """Of what a program makes of them."""


DEFAULT = Tiles()
TILES: dict[str, Tiles] = {}
"""Kinds of TPUs (`jax.Device.device_kind`) on which kernels were timed, with the best sizes there.

`kvjax.benchmarks.tune` prints a row. `ModelConfig.kernel` auto takes a kernel on these, and nowhere else.
"""


_listeners: list[Callable[..., None]] = []


@contextmanager
def sized(kind: str, tiles: Tiles) -> Iterator[None]:
    """While it lasts, `tiles` are the row of `TILES` for a kind of TPU."""
    before = dict(TILES)
    TILES[kind] = tiles
    try:
        yield
    finally:
        TILES.clear()
        TILES.update(before)


@contextmanager
def listening(heard: Callable[..., None]) -> Iterator[None]:
    """While it lasts, `heard` is told program, past, queries, constants and entries of every call that is traced."""
    _listeners.append(heard)
    try:
        yield
    finally:
        _listeners.remove(heard)


@dataclass(frozen=True)
class Attending:
    """How absorbed queries attend to cached components through a program."""

    program: Program
    queries: Arrays
    """What the program takes of each sequence, [B, ...]."""
    reads: tuple[tuple[str, int], ...]
    """(component, number of its entry) of every block that the program takes, in its order."""
    result: Callable[[Arrays, Array], tuple[Array, Array]]
    """(outputs, log-sum-exps [B, rows, 1]) -> means [B, T, H, width], log-sum-exps [B, T, H]."""
    scale: float
    """Factor on the scores."""
    split: int = 1
    """The axis of the queries along which devices take equal parts of the heads."""
    constants: Callable[[Past], tuple[tuple[Array, bool], ...]] = lambda past: ()
    """What the program takes for all sequences, each with whether its first axis is one of heads."""
    by_slot: bool = False
    """Whether positions of tokens are taken to be their places in the cache."""
    undivided: str | None = None
    """Why heads cannot be split over devices, if they cannot."""


def implementation_of(kernel: str, device: jax.Device) -> str:
    """The implementation that `ModelConfig.kernel` means on a device: auto is tpu where that was timed, else xla."""
    if kernel != "auto":
        return kernel
    if device.platform == "tpu" and device.device_kind not in TILES:
        decline(kernel, f"{device.device_kind!r} has no measured row: run kvjax.benchmarks.tune, or name kernel tpu")
    return "tpu" if device.platform == "tpu" and device.device_kind in TILES else "xla"


def uses_program(implementation: str, new: int) -> bool:
    """Whether a call with so many new tokens a sequence attends by a program, and not block by block."""
    return implementation != "xla" and new <= MOST_NEW


def decline(kernel: str, why: str) -> None:
    """Says once why auto attends in plain JAX. Raises ValueError, with the reason, for a kernel that was named."""
    if kernel != "auto":
        raise ValueError(f"kernel {kernel!r} cannot attend to this cache: {why}; choose auto or xla")
    _log(f"kernel auto attends in plain JAX: {why}")


@lru_cache
def _log(line: str) -> None:
    logging.getLogger(__name__).warning(line)


def block_of(program: Program, stored: list[Array], size: int, tiles: Tiles = DEFAULT) -> int:
    """Tokens that a kernel reads at once: whole lanes that divide the size, as many as its memory has room for."""
    per_token = sum(x.shape[2] * x.dtype.itemsize for x in stored)
    most = min(tiles.block_bytes // per_token, tiles.work_bytes // (4 * program.work))
    return max((n for n in range(LANES, size + 1, LANES) if size % n == 0 and n <= most), default=LANES)


def run(implementation: str, program: Program, past: Past, queries: Arrays, constants: Arrays,
        entries: tuple[Entry, ...], lengths: Array, interpret: Any = False) -> tuple[Arrays, Array]:
    """A program over the past: the outputs [B, *shape] float32, and log-sum-exps [B, rows, 1]."""
    for heard in _listeners:
        heard(program, past, queries, constants, entries)
    if implementation == "reference":
        return reference.decode(program, past, queries, constants, entries, lengths)
    # Pallas: where it is asked for.
    if implementation == "gpu":
        from kvjax.kernels.decode import gpu as kernels
    else:
        from kvjax.kernels.decode import tpu as kernels
    kernel = partial(kernels.decode, interpret=interpret)
    return with_gradient(kernel, program, past, queries, constants, entries, lengths)


def with_gradient(kernel: Callable, program: Program, past: Past, queries: Arrays, constants: Arrays,
                  entries: tuple[Entry, ...], lengths: Array) -> tuple[Arrays, Array]:
    """What `kernel` gives, which takes what `reference.decode` takes; its gradient is the reference's."""
    def by(decode: Callable, queries: Arrays, constants: Arrays, held: tuple, lengths: Array) -> tuple[Arrays, Array]:
        whole = tuple(Entry(*arrays, entry.inner) for arrays, entry in zip(held, entries, strict=True))
        return decode(program, past, queries, constants, whole, lengths)

    @jax.custom_vjp
    def attend(*arrays):
        return by(kernel, *arrays)

    def backward(arrays, cotangents):
        return jax.vjp(partial(by, reference.decode), *arrays)[1](cotangents)

    attend.defvjp(lambda *arrays: (by(kernel, *arrays), arrays), backward)
    held = tuple((entry.stored, jnp.asarray(entry.slot, jnp.int32), entry.scales) for entry in entries)
    return attend(tuple(queries), tuple(constants), held, lengths)
