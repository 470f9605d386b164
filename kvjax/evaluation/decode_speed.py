"""Seconds that a model takes to decode a token, at several lengths of context. Speed doesn't depend on the weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
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
    """Decoding of one model, compiled for a batch and for contexts of up to `room` tokens.

    The cache has room for the longest context whatever the context is, as generation's has for what is to come; blocks
    that hold nothing yet are skipped.
    """

    def __init__(self, model: Decoder, params: Any, batch: int, room: int, cache_dtype: str | None = None):
        self._params, self._make_cache = params, partial(init_cache, model.config, batch, room, cache_dtype)
        self._first = jnp.zeros((batch,), jnp.int32)
        shapes = jax.eval_shape(lambda: (params, self._first, self._make_cache()))
        self._decode = jax.jit(partial(_decode_tokens, model), donate_argnums=2).lower(*shapes).compile()

    def seconds(self, context: int) -> float:
        """Seconds of one step, a token for every row, on the mean of the steps that end at `context` tokens."""
        cache = self._make_cache()
        lengths = jnp.full_like(cache.lengths, context - STEPS)
        cache = jax.block_until_ready(cache.replace(lengths=lengths))
        start = time.perf_counter()
        jax.block_until_ready(self._decode(self._params, self._first, cache))
        return (time.perf_counter() - start) / STEPS


def _decode_tokens(model: Decoder, params: Any, token: Array, cache: Cache) -> tuple[Array, Cache]:
    """The most likely `STEPS` tokens after `token` [B]: the last of them, and the cache, in the memory of the given."""
    def step(carry: tuple[Array, Cache], _: None):
        token, cache = carry
        logits, cache = decode(model, params, token[:, None], cache, last_only=True)
        return (logits.argmax(-1).astype(jnp.int32), cache), None
    return jax.lax.scan(step, (token, cache), length=STEPS)[0]


def decode_seconds(model: Decoder, params: Any, batch: int, contexts: Sequence[int], rounds: int = 5,
                   cache_dtype: str | None = None) -> dict[int, float]:
    """Median seconds over `rounds` of one decode step of `batch` rows, by tokens of context.

    Raises ConfigError on contexts that the model can't reach, and on what `init_cache` refuses.
    """
    check_contexts(model.config, contexts)
    loop = DecodeLoop(model, params, batch, max(contexts), cache_dtype)
    return in_turns({"model": loop}, contexts, rounds)["model"]


def in_turns(loops: Mapping[str, DecodeLoop], contexts: Sequence[int], rounds: int) -> dict[str, dict[int, float]]:
    """Median seconds of a step of each, by context. They take turns: what else the machine does meets them alike."""
    for loop in loops.values():
        loop.seconds(min(contexts))  # what a first run does beside decoding is not timed
    times = [{name: {n: loop.seconds(n) for n in contexts} for name, loop in loops.items()} for _ in range(rounds)]
    return {name: {n: statistics.median(found[name][n] for found in times) for n in contexts} for name in loops}


def check_contexts(config: ModelConfig, contexts: Sequence[int]) -> None:
    """Raises ConfigError unless the model can decode at these lengths of context."""
    require(bool(contexts) and min(contexts) > STEPS and len(set(contexts)) == len(contexts),
            f"contexts are {list(contexts)}: give one or more, each once and above {STEPS} tokens")
    require(config.positions != "learned" or max(contexts) <= config.context_length,
            f"contexts are {list(contexts)}: the table of learned positions ends at {config.context_length}, give none "
            "above")
