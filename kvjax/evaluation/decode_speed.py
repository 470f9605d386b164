"""Seconds that a model takes to decode a token, at several lengths of context. Speed doesn't depend on the weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache import Cache, init_cache
from kvjax.config import ModelConfig, require
from kvjax.decoding import decode
from kvjax.model import Decoder

STEPS = 16
"""Tokens that are decoded at once: calling the program and waiting for it is shared by them."""


class DecodeLoop:
    """Decoding of one model behind contexts of several lengths."""

    def __init__(self, model: Decoder, params: Any, make_cache: Callable[[int], Cache]):
        """`make_cache`: a cache with room for `STEPS` tokens behind so many that it holds, its memory used by nothing
        else."""
        self._params, self._make_cache = params, make_cache
        self._decode = jax.jit(partial(_decode_tokens, model), donate_argnums=1)

    def seconds(self, context: int) -> float:
        """Seconds of one step, a token for every row, on the mean of the steps that end at `context` tokens."""
        cache = jax.block_until_ready(self._make_cache(context - STEPS))
        start = time.perf_counter()
        jax.block_until_ready(self._decode(self._params, cache))
        return (time.perf_counter() - start) / STEPS


def _decode_tokens(model: Decoder, params: Any, cache: Cache) -> tuple[Array, Cache]:
    """The most likely `STEPS` tokens after a token 0: the last of them, and the cache, in the memory of the given."""
    def step(carry: tuple[Array, Cache], _: None):
        token, cache = carry
        logits, cache = decode(model, params, token[:, None], cache, last_only=True)
        return (logits.argmax(-1).astype(jnp.int32), cache), None
    return jax.lax.scan(step, (jnp.zeros_like(cache.lengths), cache), length=STEPS)[0]


def pretended(config: ModelConfig, batch: int, room: int | None = None,
              dtype: str | None = None) -> Callable[[int], Cache]:
    """Makes caches that hold zeros for any number of tokens: what is in them takes no part in speed.

    room: tokens of all of them, blocks that hold nothing are skipped; None: each has just enough.
    """
    def make(length: int) -> Cache:
        cache = init_cache(config, batch, room or length + STEPS, dtype)
        return cache.replace(lengths=jnp.full_like(cache.lengths, length))
    return jax.jit(make, static_argnums=0)


def in_turns(loops: Mapping[str, DecodeLoop], contexts: Sequence[int], rounds: int) -> dict[str, dict[int, float]]:
    """Median seconds of a step of each, by context. They take turns: what else the machine does meets them alike."""
    for loop, context in product(loops.values(), contexts):
        loop.seconds(context)  # what a first run does beside decoding is not timed
    times = [{name: {n: loop.seconds(n) for n in contexts} for name, loop in loops.items()} for _ in range(rounds)]
    return {name: {n: statistics.median(found[name][n] for found in times) for n in contexts} for name in loops}


def check_contexts(config: ModelConfig, contexts: Sequence[int]) -> None:
    """Raises ConfigError unless the model can decode at these lengths of context."""
    require(bool(contexts) and min(contexts) > STEPS and len(set(contexts)) == len(contexts),
            f"contexts are {list(contexts)}: give one or more, each once and above {STEPS} tokens")
    require(config.positions != "learned" or max(contexts) <= config.context_length,
            f"contexts are {list(contexts)}: the table of learned positions ends at {config.context_length}, give none "
            "above")
