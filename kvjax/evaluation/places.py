"""Places in held-out text: runs of tokens inside of single documents."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvjax.config import DataConfig, require
from kvjax.data.packing import cut_pieces
from kvjax.data.pipeline import token_splits
from kvjax.data.tokenizers import Tokenizer


class Place(NamedTuple):
    """A run of tokens of one document."""

    text: str
    start: int
    """Of its first token, among those of the held-out part of the text."""
    tokens: np.ndarray
    """int32 [length + 1]: the last one is only predicted."""


def places_of(data: DataConfig, tokenizer: Tokenizer, count: int, length: int) -> list[Place]:
    """Places of `length` tokens and one more inside of documents, spread evenly over the held-out part of a text.

    Raises ConfigError if there are fewer.
    """
    array = token_splits(data, tokenizer).validation
    starts, sizes = cut_pieces(np.asarray(array.starts), length)
    starts = starts[sizes == length]
    require(len(starts) >= count, f"the held-out part of {data.source} has {len(starts)} places of {length + 1} tokens "
            f"inside of a document, and {count} are wanted: give longer documents or more of them, or ask for fewer or "
            "shorter places")
    chosen = starts[np.arange(count) * len(starts) // count]
    return [Place(data.source, int(start), array.read(start, start + length + 1)) for start in chosen]
