"""Generated tokens as text, as they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import flax.linen as nn

from kvjax.data.tokenizers import Tokenizer
from kvjax.generate import generate_stream


class TextStream:
    """Decodes a growing list of tokens; never shows a character before all of its bytes are there."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0

    def push(self, tokens: Sequence[int]) -> str:
        """Takes new tokens; returns the text that is certain by now and was not returned before."""
        self._tokens.extend(tokens)
        # The bytes of an unfinished character decode to U+FFFD at the end of the text.
        return self._new(self._tokenizer.decode(self._tokens).rstrip("\ufffd"))

    def finish(self) -> str:
        """The rest, unfinished characters included."""
        return self._new(self._tokenizer.decode(self._tokens))

    def _new(self, text: str) -> str:
        new = text[self._shown:]
        self._shown = max(self._shown, len(text))
        return new


def stream_text(model: nn.Module, params: Any, tokenizer: Tokenizer, prompts: Sequence[str],
                **settings: Any) -> Iterator[list[str]]:
    """Continues texts in one batch; yields the new text of every one as it comes.

    `settings` are those of `kvjax.generate.generate_stream`. An empty text stands for the start of a document.
    """
    tokens = [tokenizer.encode(prompt) or [tokenizer.eos_id] for prompt in prompts]
    return stream_after(model, params, tokenizer, tokens, **settings)


def stream_after(model: nn.Module, params: Any, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]],
                 **settings: Any) -> Iterator[list[str]]:
    """As `stream_text`, of prompts in token ids."""
    chunks = generate_stream(model, params, prompts, eos_id=tokenizer.eos_id, **settings)
    return _decoded(chunks, [TextStream(tokenizer) for _ in prompts])


def _decoded(chunks: Iterator[list[list[int]]], streams: list[TextStream]) -> Iterator[list[str]]:
    for chunk in chunks:
        yield [stream.push(new) for stream, new in zip(streams, chunk, strict=True)]
    yield [stream.finish() for stream in streams]
