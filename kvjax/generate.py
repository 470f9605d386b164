"""Text generation: prompts of any length in one batch, decoded from a cache that is updated in place.

Compiled functions are kept between calls. The lengths they depend on are bucketed: the cache's capacity, and the
length of a prefill chunk (one of `CHUNKS`), so that a new prompt length or number of tokens compiles nothing unless
it opens a new bucket. Sampling settings, the seed and `eos_id` are traced values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from kvjax.cache import BLOCK, Cache, init_cache
from kvjax.config import require
from kvjax.decoding import check_cache, decode
from kvjax.quantisation import storage_type
from kvjax.sampling import check_settings, sample
from kvjax.sharding import constrain

STRIDE = 32
"""Most tokens that one compiled call draws before its results are read."""
CHUNKS = (32, 128, 512)
"""Lengths of prefill chunks: a prompt is fed in the longest, its rest in the shortest that holds it."""


@struct.dataclass
class Settings:
    """How tokens are drawn; every field is traced."""

    key: Array
    """PRNG key of the seed; step n of row i draws with it folded by n, then by i."""
    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    eos_id: Array
    """Token after which a row is done; -1: none."""


@struct.dataclass
class State:
    """What generation carries from one token to the next."""

    cache: Cache
    token: Array
    """[B] int32, the latest token of each row: the only one that the cache does not hold yet."""
    done: Array
    """[B] bool, rows that drew their `eos_id`: they draw and cache nothing more."""
    step: Array
    """int32 scalar, tokens drawn so far by a row that is not done."""


def generate(model: nn.Module, params: Any, prompts: Sequence[Sequence[int]], *, max_new_tokens: int,
             temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0,
             eos_id: int | None = None, cache_dtype=None, cache: Cache | None = None) -> list[list[int]]:
    """Continues every prompt.

    Args:
      model, params: a module of `kvjax.build_model` and its parameters. Under `jax.set_mesh` the batch is split over
        the mesh.
      prompts: lists of token ids, of any lengths, or an array [B, T].
      max_new_tokens: tokens to draw for each prompt.
      temperature, top_k, top_p, min_p: as in `kvjax.sampling.sample`; temperature 0 takes the most likely token.
      seed: a row's draws depend on the seed, the row's index and its own prompt, not on the rest of the batch.
      eos_id: a row stops after drawing this token; None: all rows draw `max_new_tokens`.
      cache_dtype: element type of the cache, as `kvjax.init_cache` takes it; None: the compute type.
      cache: what comes before the prompts, with room for them and for what is drawn; not changed. None: nothing.

    Returns: the new tokens of each prompt, `eos_id` included.
    Raises ConfigError on an empty prompt, token ids outside the vocabulary, settings that make no sense, or a cache
    without room.
    """
    rows: list[list[int]] = [[] for _ in prompts]
    for new in generate_stream(model, params, prompts, max_new_tokens=max_new_tokens, temperature=temperature,
                               top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, eos_id=eos_id, cache_dtype=cache_dtype,
                               stride=STRIDE, cache=cache):
        for row, tokens in zip(rows, new, strict=True):
            row.extend(tokens)
    return rows


def generate_stream(model: nn.Module, params: Any, prompts: Sequence[Sequence[int]], *, max_new_tokens: int,
                    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0,
                    eos_id: int | None = None, cache_dtype=None, stride: int = 4,
                    cache: Cache | None = None) -> Iterator[list[list[int]]]:
    """As `generate`, but yields the next `stride` (at most 32) tokens of every row as soon as they are drawn.

    Rows that are done yield empty lists. Errors are raised by the call itself, not by the first item.
    """
    require(max_new_tokens >= 1, f"max_new_tokens is {max_new_tokens}: it must be 1 or more")
    require(1 <= stride <= STRIDE, f"stride is {stride}: it must be between 1 and {STRIDE}")
    check_settings(temperature, top_k, top_p, min_p)
    require(cache is None or cache_dtype is None, f"cache_dtype is {cache_dtype}, and a cache is given, which is of "
                                                  "a type: give one of them")
    cache_dtype = storage_type(model.config.dtype if cache_dtype is None else cache_dtype)
    rows = _checked_prompts(prompts, model.config.vocab_size)
    longest = max(map(len, rows)) + max_new_tokens
    reached = longest if cache is None else _checked_cache(model, cache, rows, max_new_tokens)
    require(model.config.positions != "learned" or reached <= model.config.context_length,
            f"prompt and max_new_tokens reach {reached} tokens: the table of learned positions has "
            f"{model.config.context_length}")
    settings = Settings(jax.random.key(seed), np.float32(temperature), np.int32(top_k), np.float32(top_p),
                        np.float32(min_p), np.int32(-1 if eos_id is None else eos_id))
    return _stream(model, params, rows, settings, max_new_tokens, cache_dtype, stride, cache)


def _stream(model, params, rows: list[np.ndarray], settings: Settings, left: int, cache_dtype, stride: int,
            cache: Cache | None):
    state = _start(model, params, rows, left, cache_dtype, cache)
    while left > 0 and not state.done.all():
        drawn, state = _advance(model, params, state, settings, np.int32(min(stride, left)))
        left -= stride
        yield [tokens[tokens >= 0].tolist() for tokens in np.asarray(drawn)]


def _start(model, params, rows: list[np.ndarray], max_new_tokens: int, cache_dtype=None,
           cache: Cache | None = None) -> State:
    """Prefills the cache, or a copy of the one that is given, with every token of the prompts but the last."""
    counts = np.array([len(row) - 1 for row in rows], np.int32)
    longest = int(counts.max())
    last = np.array([row[-1] for row in rows], np.int32)
    if cache is None:
        state = _empty(model.config, _capacity(longest + max_new_tokens), cache_dtype, last)
    else:
        state = State(jax.tree.map(jnp.copy, cache), jnp.asarray(last), jnp.zeros(last.shape, bool), jnp.int32(0))
    start = 0
    while start < longest:
        length = next((c for c in CHUNKS if c >= longest - start), CHUNKS[-1])
        chunk = np.zeros((len(rows), length), np.int32)
        for i, row in enumerate(rows):
            part = row[start : min(start + length, len(row) - 1)]
            chunk[i, : len(part)] = part
        state = _prefill(model, params, chunk, np.clip(counts - start, 0, length), state)
        start += length
    return state


def _capacity(tokens: int) -> int:
    """`tokens` rounded up to a bucket: whole blocks, and at most four buckets to each doubling."""
    step = max(BLOCK, 1 << max(tokens.bit_length() - 3, 0))
    return -(-tokens // step) * step


@partial(jax.jit, static_argnums=(0, 1, 2))
def _empty(config, capacity: int, cache_dtype, last: Array) -> State:
    """The state before prefill; `last` [B] are the prompts' last tokens. Jitted, so that a mesh gets it in parts."""
    cache = init_cache(config, last.shape[0], capacity, cache_dtype)
    return State(cache, constrain(last, "batch"), constrain(jnp.zeros(last.shape, bool), "batch"), jnp.int32(0))


@partial(jax.jit, static_argnums=0, donate_argnames="state")
def _prefill(model, params, tokens: Array, counts: Array, state: State) -> State:
    """Appends a right-padded chunk [B, T], of which `counts` [B] tokens are real; logits are never computed."""
    return state.replace(cache=decode(model, params, tokens, state.cache, counts, last_only=True)[1])


@partial(jax.jit, static_argnums=0, donate_argnames="state")
def _advance(model, params, state: State, settings: Settings, steps: Array) -> tuple[Array, State]:
    """Draws up to `steps` tokens for every row that is not done.

    Returns: tokens [B, STRIDE], -1 where none was drawn, and the state after them.
    """

    def more(carry):
        i, _, state = carry
        return (i < steps) & ~state.done.all()

    def draw(carry):
        i, drawn, state = carry
        logits, cache = decode(model, params, state.token[:, None], state.cache, (~state.done).astype(jnp.int32))
        token = sample(jax.random.fold_in(settings.key, state.step), logits[:, 0],
                       settings.temperature, settings.top_k, settings.top_p, settings.min_p)
        drawn = drawn.at[:, i].set(jnp.where(state.done, -1, token))
        return i + 1, drawn, State(cache, token, state.done | (token == settings.eos_id), state.step + 1)

    drawn = jnp.full((state.token.shape[0], STRIDE), -1, jnp.int32)
    _, drawn, state = jax.lax.while_loop(more, draw, (0, drawn, state))
    state = state.replace(token=constrain(state.token, "batch"), done=constrain(state.done, "batch"))
    return constrain(drawn, None, None), state


def _checked_cache(model: nn.Module, cache: Cache, rows: list[np.ndarray], max_new_tokens: int) -> int:
    """Tokens that any sequence will reach. Raises ConfigError if prompts and drawn tokens do not fit the cache."""
    check_cache(model, cache)
    require(not bool(cache.overflowed.any()), "more was appended to the cache than it has room for, and was dropped: "
                                              "make it with more room")
    require(len(rows) == len(cache.lengths), f"there are {len(rows)} prompts, and the cache holds {len(cache.lengths)} "
                                             "sequences")
    needed = max(int(n) + len(row) for n, row in zip(cache.lengths, rows, strict=True)) + max_new_tokens - 1
    require(needed <= cache.capacity, f"prompts and max_new_tokens need room for {needed} tokens, and the cache has "
                                      f"{cache.capacity}: make it with more")
    return max(int(n) + len(row) for n, row in zip(cache.positions, rows, strict=True)) + max_new_tokens


def _checked_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> list[np.ndarray]:
    require(len(prompts) > 0, "there are no prompts: give at least one list of token ids")
    rows = []
    for i, prompt in enumerate(prompts):
        row = np.asarray(prompt)
        require(row.ndim == 1, f"prompt {i} is {prompt!r}: give a list of lists of token ids, or an array [B, T]")
        require(row.size > 0, f"prompt {i} is empty: give at least one token, for instance a newline")
        require(np.issubdtype(row.dtype, np.integer), f"prompt {i} holds {row.dtype} values: token ids are integers")
        outside = row[(row < 0) | (row >= vocab_size)].tolist()
        require(not outside, f"prompt {i} holds token ids {outside[:3]}: the vocabulary has ids 0 to {vocab_size - 1}")
        rows.append(row.astype(np.int32))
    return rows
