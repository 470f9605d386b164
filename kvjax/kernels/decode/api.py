"""Attention to a cache by a kernel: what a variant asks for, which implementation does it, and on which devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import Array

from kvjax.kernels.decode import reference
from kvjax.kernels.decode.program import Arrays, Entry, Past, Program

MOST_NEW = 8
"""New tokens of a sequence that are still a decode step; longer chunks rebuild keys and values, block by block."""
BLOCK_BYTES, WORK_BYTES = 2**21, 2**22
"""Of all entries together, and of what a program makes of them, for one step of a kernel: twice the first and a few
times the second fit a TPU's fast memory."""
LANES = 128


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
    divisible: bool = True
    """Whether the program can be divided."""
    refusal: str | None = None
    """Why no kernel can do this, if none can."""


def uses_program(implementation: str, new: int) -> bool:
    """Whether a call with so many new tokens a sequence attends by a program, and not block by block."""
    return implementation not in ("auto", "xla") and new <= MOST_NEW


def checked(implementation: str, attending: Attending | None) -> Attending:
    """What a variant asks for. Raises ValueError, with the reason, if the implementation that is named cannot do it."""
    why = "this attention has no decode program" if attending is None else attending.refusal
    if why:
        raise ValueError(f"kernel {implementation!r} cannot attend to this cache: {why}; choose auto or xla")
    return attending


def block_of(program: Program, stored: list[Array], size: int) -> int:
    """Tokens that a kernel reads at once: whole lanes that divide the size, as many as its memory has room for."""
    per_token = sum(x.shape[2] * x.dtype.itemsize for x in stored)
    most = min(BLOCK_BYTES // per_token, WORK_BYTES // (4 * program.work))
    return max((n for n in range(LANES, size + 1, LANES) if size % n == 0 and n <= most), default=LANES)


def run(implementation: str, program: Program, past: Past, queries: Arrays, constants: Arrays,
        entries: tuple[Entry, ...], lengths: Array, interpret: Any = False) -> tuple[Arrays, Array]:
    """A program over the past: the outputs [B, *shape] float32, and log-sum-exps [B, rows, 1]."""
    if implementation == "reference":
        return reference.decode(program, past, queries, constants, entries, lengths)
    from kvjax.kernels.decode import tpu  # Pallas: where it is asked for
    return tpu.decode(program, past, queries, constants, entries, lengths, interpret)
