"""Times compaction of all heads of a small model at once, beside loops over heads and rounds.

    python -m kvjax.benchmarks.compaction --out compaction.json

Made-up heads of SmolLM2-135M's sizes. The loops choose tokens as a plain reference does: head by head, each round a
least-squares solve from scratch. They are timed on a few heads, and their time is scaled to all. On a CPU that other
work shares, LAPACK's threads wait for one another: set OPENBLAS_NUM_THREADS=1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import Array

from kvjax.benchmarks.device import command, medians, show
from kvjax.compaction.attention_matching import choose, compact
from kvjax.compaction.fitting import attention_scores
from kvjax.compaction.key_choice import OMP_WEIGHTS
from kvjax.config import require

SCHEDULES = {"am_omp": (1, 1), "am_omp_fast": (4, 2)}
"""Tokens a round, and rounds from one fit to the next."""


@dataclass(frozen=True)
class Shape:
    """What is compacted, and how often it is timed."""

    heads: int = 90
    queries: int = 3072
    """Reference queries of a head of keys: those of three query heads at 1 024 positions."""
    tokens: int = 1024
    width: int = 64
    slots: int = 102
    loop_heads: int = 2
    """Heads that the loops are timed on."""
    rounds: int = 3
    out: Path | None = None
    """A file for the figures, JSON."""


def made_up_heads(shape: Shape) -> tuple[Array, Array, Array]:
    """Queries [heads, N, d] around a mean of each head, keys and values [heads, T, d]."""
    keys = jax.random.split(jax.random.key(0), 4)
    normal = lambda key, length: jax.random.normal(key, (shape.heads, length, shape.width))
    queries = 1.5 * normal(keys[0], shape.queries) + normal(keys[1], 1)
    return queries, 1.5 * normal(keys[2], shape.tokens), normal(keys[3], shape.tokens)


def pursue(xp, scores: np.ndarray | Array, slots: int, per_round: int, refit_every: int) -> list[int]:
    """Tokens of one head by orthogonal matching pursuit, round by round, in `numpy` or `jax.numpy` (`xp`)."""
    columns = xp.exp(scores - scores.max(axis=1, keepdims=True))
    target = columns.sum(axis=1)
    chosen, residual, rounds = [], target, 0
    while len(chosen) < slots:
        correlation = np.array(columns.T @ residual)
        correlation[chosen] = -np.inf
        chosen += np.argsort(-correlation, kind="stable")[:min(per_round, slots - len(chosen))].tolist()
        if rounds % refit_every == 0:
            kept = columns[:, np.array(chosen)]
            residual = target - kept @ xp.clip(xp.linalg.lstsq(kept, target, rcond=None)[0], *OMP_WEIGHTS)
        rounds += 1
    return chosen


def runs_of(method: str, shape: Shape, heads: tuple[Array, Array, Array]) -> dict[str, tuple[Callable, int]]:
    """What chooses tokens for heads, from their queries and keys, and for how many heads each run does."""
    few = [[np.asarray(x[i]) for x in heads[:2]] for i in range(min(shape.loop_heads, shape.heads))]
    ours = jax.jit(lambda q, k: choose(method, attention_scores(q, k), shape.slots))
    in_numpy = lambda q, k: pursue(np, q @ k.T / np.float32(shape.width**0.5), shape.slots, *SCHEDULES[method])
    in_jax = lambda q, k: pursue(jnp, attention_scores(q, k), shape.slots, *SCHEDULES[method])
    over_few = lambda function: (lambda: [function(*head) for head in few], len(few))
    return {"batched": (lambda: ours(*heads[:2]), shape.heads), "compiled, head by head": over_few(ours),
            "NumPy, head by head": over_few(in_numpy), "JAX by operation, head by head": over_few(in_jax)}


def measure(shape: Shape) -> list[dict]:
    """The rows of the table: choices by every way, then whole compactions."""
    heads, rows = made_up_heads(shape), []
    for method in SCHEDULES:
        runs = runs_of(method, shape, heads)
        times = medians({name: run for name, (run, _) in runs.items()}, shape.rounds, at_once=1)
        seconds = {name: times[name] / done * shape.heads for name, (_, done) in runs.items()}
        rows += [{"method": method, "what": f"choice, {name}", "heads timed": runs[name][1], "seconds for all": s,
                  "of batched": s / seconds["batched"]} for name, s in seconds.items()]
    whole = {method: lambda m=method: compact(m, *heads, shape.slots) for method in ("am_highest", *SCHEDULES)}
    times = medians(whole, shape.rounds, at_once=1)
    return rows + [{"method": method, "what": "all of a compaction, batched", "heads timed": shape.heads,
                    "seconds for all": s, "of batched": 1.0} for method, s in times.items()]


def main(shape: Shape) -> None:
    """Raises ConfigError if a size makes no sense."""
    require(1 <= shape.slots <= shape.tokens, f"slots are {shape.slots}: they must be between 1 and the {shape.tokens} "
                                              "tokens")
    require(min(shape.heads, shape.loop_heads, shape.rounds, shape.queries) >= 1,
            "heads, loop-heads, rounds and queries must be at least 1")
    rows = measure(shape)
    threads = os.environ.get("OPENBLAS_NUM_THREADS", "as many as processors")
    title = (f"{shape.heads} heads, {shape.queries} queries, {shape.tokens} tokens to {shape.slots}, "
             f"{os.cpu_count()} processors, LAPACK threads: {threads}")
    show(title, rows)
    if shape.out is not None:
        shape.out.write_text(json.dumps({"title": title, "device": jax.devices()[0].device_kind, "rows": rows},
                                        indent=1) + "\n")


if __name__ == "__main__":
    command(main, lambda: tyro.cli(Shape, description=__doc__))
