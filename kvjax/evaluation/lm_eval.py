"""A model as lm-eval (the Language Model Evaluation Harness) sees it. Needs `pip install lm-eval`, and no torch.

    from kvjax.evaluation import lm_eval as adapter, run
    import lm_eval
    lm_eval.simple_evaluate(adapter.LanguageModel(run.restore("runs/kpa_353m")), tasks=["arc_easy"])
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from kvjax.config import require
from kvjax.evaluation.continuations import score_continuations
from kvjax.evaluation.run import Restored, progress
from kvjax.evaluation.text import stream_after

MAX_NEW_TOKENS = 256
"""Of a request that names no number."""
DRAWS = ("temperature", "top_k", "top_p", "min_p")
Settings = dict[str, Any]


class LanguageModel(TemplateLM):
    """Answers lm-eval's requests: log-likelihoods of continuations and of whole texts, and generated text.

    Contexts that are too long lose their beginning. An empty context, and the start of a whole text, is the end-of-text
    token; no other special token is added to a text. Results do not depend on `batch_size` beyond rounding.
    """

    def __init__(self, restored: Restored, batch_size: int = 32, cache_dtype: str | None = None):
        """Args:
          restored: the model, on its mesh.
          batch_size: continuations that are scored, or texts that are generated, at once at most.
          cache_dtype: element type of caches; None: the compute type.
        """
        super().__init__()
        require(batch_size >= 1, f"batch size is {batch_size}: it must be 1 or more")
        self.restored, self.batch_size, self.cache_dtype = restored, batch_size, cache_dtype

    @property
    def max_length(self) -> int:
        """Tokens that are read at once at most."""
        return self.restored.config.model.context_length

    @property
    def eot_token_id(self) -> int:
        return self.restored.tokenizer.eos_id

    @property
    def tokenizer_name(self) -> str:
        return f"vocabulary of {self.restored.tokenizer.vocab_size}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """Token ids of a text; no special tokens are added, whatever is asked for."""
        return self.restored.tokenizer.encode(string)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, nats, and whether greedy decoding gives it. Raises ConfigError."""
        for context, continuation in (request.args for request in requests):
            require(continuation != "", f"there is a choice without text, after {context[-200:]!r}: give every choice "
                                        "some, or leave the question out")
        return super().loglikelihood(requests, disable_tqdm)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        before, after = super()._encode_pair(context, continuation)
        if not after:  # its characters are parts of the tokens of the context
            before, after = self.tok_encode(context), self.tok_encode(continuation)
        return before or [self.prefix_token_id], after  # a context of spaces alone went to the continuation

    def _loglikelihood_tokens(self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
                              disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        found = self._scored(pairs, "log-likelihoods")
        for (texts, *_), score in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, tuple(score))
        return [tuple(score) for score in found]

    def _scored(self, pairs: Sequence[tuple[list[int], list[int]]], title: str) -> list:
        with jax.set_mesh(self.restored.mesh):
            return score_continuations(self.restored.model, self.restored.params, pairs, batch_size=self.batch_size,
                                       cache_dtype=self.cache_dtype, progress=lambda items: progress(items, title))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text, nats: of every token given as many tokens before it as its window holds."""
        windows = [self._windows(*request.args) for request in requests]
        scores = iter(self._scored([pair for own in windows for pair in own], "whole texts"))
        totals = [sum((next(scores).logprob for _ in own), 0.0) for own in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """(context, continuation) pairs that score every token of a text once."""
        return [make_disjoint_window(window) for window in get_rolling_token_windows(
            self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Text after each context, up to the first stop, which is left out."""
        by_settings = defaultdict(list)
        for number, request in enumerate(requests):
            context, settings = request.args
            by_settings[json.dumps(settings, sort_keys=True)].append((number, context))
        batches = [(json.loads(settings), batch)
                   for settings, some in by_settings.items() for batch in self._batches(some)]
        texts = [""] * len(requests)
        for settings, batch in progress(batches, "generated texts"):
            numbers, contexts = zip(*batch, strict=True)
            for number, text in zip(numbers, self._generated(contexts, settings), strict=True):
                texts[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return texts

    def _batches(self, contexts: list[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
        """The longest first; contexts of one batch are of like lengths."""
        contexts = sorted(contexts, key=lambda item: (-len(item[1]), item[0]))
        for at in range(0, len(contexts), self.batch_size):
            yield contexts[at:at + self.batch_size]

    def _generated(self, contexts: Sequence[str], settings: Settings) -> list[str]:
        settings = normalize_gen_kwargs(settings, MAX_NEW_TOKENS)
        until, new = [stop for stop in settings["until"] if stop], settings["max_gen_toks"]
        require(0 < new < self.max_length, f"max_gen_toks is {new}: it must be 1 or more, and below the model's "
                                           f"context length of {self.max_length}")
        draws = {"temperature": 0.0} | {name: settings[name] for name in DRAWS if name in settings}
        room = self.max_length - new
        prompts = [self.tok_encode(context)[-room:] or [self.prefix_token_id] for context in contexts]
        texts = [""] * len(prompts)
        with jax.set_mesh(self.restored.mesh):
            for chunk in stream_after(self.restored.model, self.restored.params, self.restored.tokenizer, prompts,
                                      max_new_tokens=new, cache_dtype=self.cache_dtype, **draws):
                texts = [text + more for text, more in zip(texts, chunk, strict=True)]
                if all(before_stop(text, until) != text for text in texts):
                    break
        return [before_stop(text, until) for text in texts]


def before_stop(text: str, stops: Sequence[str]) -> str:
    """A text up to the first of the stops."""
    return text[:min((text.find(stop) for stop in stops if stop in text), default=len(text))]
