"""Log-likelihoods of continuations of texts: what a question's choices are compared by.

What continuations share is read once: a cache of it is repeated, and each is read behind its own copy. Shapes depend on
lengths alone, rounded up to few sizes, so that a task compiles few programs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.cache import init_cache
from kvjax.config import require
from kvjax.decoding import decode
from kvjax.evaluation.perplexity import one_behind
from kvjax.model.decoder import Decoder
from kvjax.sharding import constrain
from kvjax.training.loss import cross_entropy

T = TypeVar("T")
SCORED_AT_ONCE = 2048
"""Tokens of continuations of one batch at most: their logits, of the whole vocabulary, are held at once."""
SHORTEST_SHARED, SHORTEST_OWN = 32, 8
"""Sizes that shorter ones, other than 0, are rounded up to."""


class Score(NamedTuple):
    """Of one continuation."""

    logprob: float
    """Sum over its tokens, nats."""
    greedy: bool
    """Whether each of its tokens is the most likely one."""


class Line(NamedTuple):
    """A continuation, ready to be scored."""

    index: int
    shared: tuple[int, ...]
    """What comes before `own`; lines with the same are read behind copies of one cache."""
    own: tuple[int, ...]
    """The last token before the continuation, and the continuation."""


class Batch(NamedTuple):
    """Questions whose lines fit one shape, at most `rows` of them."""

    questions: list[list[Line]]
    rows: int
    each: int
    """Lines of a question at most."""
    shared_length: int
    own_length: int
    """Tokens read of each line: the last of `own` is only predicted."""


def score_continuations(model: Decoder, params: Any, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *,
                        batch_size: int = 32, cache_dtype=None,
                        progress: Callable[[list[Batch]], Iterable[Batch]] = iter) -> list[Score]:
    """Scores every continuation given the tokens before it.

    Args:
      model, params: a module of `kvjax.build_model` and its parameters. Under `jax.set_mesh` batches are split over it.
      pairs: (context, continuation) in token ids, one or more each. Of those that are longer than the model's context
        length the beginning is left out.
      batch_size: continuations that are scored at once, at most. It changes results by rounding errors only.
      cache_dtype: element type of the cache of what continuations share; None: the compute type.
      progress: wraps the list of batches, to show a bar for instance.

    Returns: the scores, in the order of `pairs`.
    Raises ConfigError for an empty context or continuation, one longer than the context length, or a batch size of 0.
    """
    require(batch_size >= 1, f"batch size is {batch_size}: it must be 1 or more")
    limit = model.config.context_length
    batches = batches_of([line_of(index, *pair, limit) for index, pair in enumerate(pairs)], batch_size)
    scores: list[Score | None] = [None] * len(pairs)
    for batch, (nats, greedy) in one_behind((batch, _run(model, params, batch, cache_dtype))
                                            for batch in progress(batches)):
        nats, greedy = np.asarray(nats), np.asarray(greedy)
        for number, lines in enumerate(batch.questions):
            for line, place in zip(lines, range(number * batch.each, (number + 1) * batch.each), strict=False):
                scores[line.index] = Score(-float(nats[place]), bool(greedy[place]))
    return scores


def line_of(index: int, context: Sequence[int], continuation: Sequence[int], limit: int) -> Line:
    """Leaves out the beginning of a context, so that at most `limit` tokens are read. Raises ConfigError."""
    require(len(context) > 0 < len(continuation), f"request {index} has {len(context)} tokens of context and "
            f"{len(continuation)} of continuation: each needs at least 1 (an end-of-text token stands for no context)")
    require(len(continuation) <= limit, f"request {index} has a continuation of {len(continuation)} tokens: the "
            f"model's context length is {limit}")
    kept = [*context, *continuation][-limit - 1:]
    own = len(continuation) + 1
    return Line(index, tuple(kept[:-own]), tuple(kept[-own:]))


def batches_of(lines: Iterable[Line], batch_size: int) -> list[Batch]:
    """Lines by what they share and by their lengths, the longest first: memory runs out at once or not at all."""
    questions, by_shape = defaultdict(list), defaultdict(list)
    for line in lines:
        questions[line.shared].append(line)
    for shared, together in questions.items():
        for some in _parts(together, batch_size if shared else 1):
            each = min(1 << (len(some) - 1).bit_length(), batch_size)
            longest = max(len(line.own) for line in some) - 1
            by_shape[rounded(len(shared), SHORTEST_SHARED), rounded(longest, SHORTEST_OWN), each].append(some)
    found = []
    for (shared_length, own_length, each), some in sorted(by_shape.items(), reverse=True):
        count = max(1, min(batch_size, SCORED_AT_ONCE // own_length) // each)
        found += [Batch(part, count * each, each, shared_length, own_length) for part in _parts(some, count)]
    return found


def _parts(items: list[T], size: int) -> list[list[T]]:
    """Consecutive parts of a list, of `size` but for the last."""
    return [items[at:at + size] for at in range(0, len(items), size)]


def rounded(length: int, shortest: int) -> int:
    """Up to a power of two, above 128 also to one and a half times one; 0 stays."""
    if not length:
        return 0
    power = max(shortest, 1 << (length - 1).bit_length())
    return power * 3 // 4 if power > 128 and length <= power * 3 // 4 else power


def _run(model: Decoder, params: Any, batch: Batch, cache_dtype) -> tuple[Array, Array]:
    """Negative log-likelihoods [rows] and whether all tokens are greedy [rows], of places that hold a line."""
    count = _questions_on_mesh(batch.rows // batch.each)
    shared, shared_counts = np.zeros((count, batch.shared_length), np.int32), np.zeros(count, np.int32)
    own = np.zeros((count * batch.each, batch.own_length + 1), np.int32)
    counts = np.zeros(count * batch.each, np.int32)
    for number, lines in enumerate(batch.questions):
        shared_counts[number] = len(lines[0].shared)
        shared[number, :shared_counts[number]] = lines[0].shared
        for row, line in enumerate(lines, start=number * batch.each):
            counts[row] = len(line.own) - 1
            own[row, :len(line.own)] = line.own
    return _scored(model, cache_dtype, batch.each, params, shared, shared_counts, own, counts)


def _questions_on_mesh(count: int) -> int:
    """As many questions, or the next more that split over the mesh that is set."""
    mesh = jax.sharding.get_abstract_mesh()
    ways = 1 if mesh.empty else mesh.shape["data"] * mesh.shape["fsdp"]
    return -(-count // ways) * ways


@partial(jax.jit, static_argnums=(0, 1, 2))
def _scored(model: Decoder, cache_dtype, each: int, params: Any, shared: Array, shared_counts: Array, own: Array,
            counts: Array) -> tuple[Array, Array]:
    shared, own = constrain(shared, "batch", None), constrain(own, "batch", None)
    cache = init_cache(model.config, len(shared), shared.shape[1] + own.shape[1], cache_dtype)
    if shared.shape[1]:
        _, cache = decode(model, params, shared, cache, shared_counts, last_only=True)
    logits, _ = decode(model, params, own[:, :-1], cache.repeated(each), counts)
    counted = jnp.arange(own.shape[1] - 1) < counts[:, None]
    nats = jnp.where(counted, cross_entropy(logits, own[:, 1:])[0], 0).sum(-1)
    greedy = ((logits.argmax(-1) == own[:, 1:]) | ~counted).all(-1)
    return constrain(nats, None), constrain(greedy, None)
