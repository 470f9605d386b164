"""Retrieval of a number that was said once, somewhere in a long text (Mohtashami and Jaggi, arXiv:2305.16300)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax.config import require
from kvjax.data.tokenizers import Tokenizer
from kvjax.evaluation.continuations import score_continuations
from kvjax.model.decoder import Decoder

SAID, AFTER, ASKED = "\nThe pass key is", ". Remember it.\n", "\nWhat is the pass key? The pass key is"


class Retrieval(NamedTuple):
    """How one length and depth went."""

    length: int
    """Tokens of the whole text, the key that is asked for included."""
    depth: float | None
    """Where the key is said: 0 at the beginning, 1 right before the question; None: nowhere."""
    found: float
    """Share of the trials in which every token of the key is the most likely one."""
    nats: float
    """Mean negative log-likelihood of a token of the key."""
    trials: int


def trial(tokenizer: Tokenizer, filler: Sequence[int], length: int, depth: float | None,
          key: int) -> tuple[list[int], list[int]]:
    """Context and key in token ids, `length` in all: the key is said inside of the filler, and asked for at its end.

    Raises ConfigError if the sentences leave no room for filler, or there is too little of it.
    """
    said, after, asked, digits = map(tokenizer.encode, (SAID, AFTER, ASKED, f" {key}"))
    needle = [] if depth is None else [*said, *digits, *after]
    room = length - len(needle) - len(asked) - len(digits)
    require(0 < room <= len(filler), f"a text of {length} tokens has {room} beside the pass key and the question, and "
            f"there are {len(filler)} of filler: choose another length")
    at = 0 if depth is None else round(depth * room)
    return [*filler[:at], *needle, *filler[at:room], *asked], digits


def retrieve(model: Decoder, params: Any, tokenizer: Tokenizer, fillers: Sequence[np.ndarray], lengths: Sequence[int],
             depths: Sequence[float], *, seed: int = 0, batch_size: int = 8, cache_dtype=None,
             progress: Callable = iter) -> list[Retrieval]:
    """Hides a number of five digits in every filler, at every length and depth and, to compare with, nowhere.

    Args:
      model, params: a module of `kvjax.build_model`, whose context length is at least the longest of `lengths`.
      fillers: token ids of running text [n] each, one per trial; the number differs from trial to trial.
      batch_size, cache_dtype, progress: as `score_continuations` takes them.
    Raises ConfigError as `trial` and `score_continuations` do.
    """
    keys = np.random.default_rng(seed).integers(10_000, 100_000, len(fillers)).tolist()
    cases = [(length, depth) for length in lengths for depth in (*depths, None)]
    pairs = [trial(tokenizer, filler.tolist(), *case, key) for case in cases
             for filler, key in zip(fillers, keys, strict=True)]
    scores = score_continuations(model, params, pairs, batch_size=batch_size, cache_dtype=cache_dtype,
                                 progress=progress)
    nats = np.array([-score.logprob / len(key) for score, (_, key) in zip(scores, pairs, strict=True)])
    found = np.array([score.greedy for score in scores])
    of_case = lambda values: values.reshape(len(cases), -1).mean(1).tolist()
    return [Retrieval(*case, share, loss, len(fillers))
            for case, share, loss in zip(cases, of_case(found), of_case(nats), strict=True)]
