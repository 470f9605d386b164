"""Tokenized text as one flat array: eos, document, eos, document, …, eos; in memory or mapped from a file.

With an end-of-text token on both sides of every document, each of its tokens and its end can be predicted
from what stands before, so a whole split is scored exactly once and its loss per byte is exact.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvjax.config import ConfigError, require
from kvjax.data.sources import Documents, Splits
from kvjax.data.tokenizers import Tokenizer

T = TypeVar("T")
INDEX = "index.json"


@dataclass(frozen=True, eq=False)
class TokenArray:
    """All documents of one split."""

    name: str
    """What errors call it."""
    tokens: np.ndarray
    """[N] unsigned integers; mapped, not read, when it comes from a file."""
    starts: np.ndarray
    """[documents + 1]: where the end-of-text before each document stands, and lastly where the array ends with one."""
    text_bytes: int
    """UTF-8 bytes of all documents, which N - 1 predictions stand for."""
    vocab_size: int
    origin: tuple[Path, str] | None = None
    """Folder and split, if it was opened from files."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) as int32. Raises ConfigError for one outside the vocabulary."""
        tokens = self.tokens[start:stop]
        if (wrong := np.flatnonzero(tokens >= self.vocab_size)).size:
            raise ConfigError(f"{self.name} holds token {tokens[wrong[0]]} at position {start + wrong[0]}, outside its "
                              f"vocabulary of {self.vocab_size}: the file is damaged; make it again with "
                              "python -m kvjax.data.prepare")
        return tokens.astype(np.int32)

    def __reduce__(self):
        # Data workers open the file themselves: pickling a mapped array would copy all of it.
        if self.origin:
            return open_split, self.origin
        return TokenArray, (self.name, self.tokens, self.starts, self.text_bytes, self.vocab_size)


def tokenize(name: str, documents: Documents, tokenizer: Tokenizer) -> TokenArray:
    """Tokenizes documents into memory; empty ones are left out."""
    eos = np.array([tokenizer.eos_id], np.min_scalar_type(tokenizer.vocab_size - 1))
    parts, starts, text_bytes = [eos], [0], 0
    for texts in batched(documents, 256):
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            if len(ids):
                parts += ids.astype(eos.dtype), eos
                starts.append(starts[-1] + len(ids) + 1)
                text_bytes += len(text.encode())
    return TokenArray(name, np.concatenate(parts), np.array(starts), text_bytes, tokenizer.vocab_size)


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of `size` items in turn, the last one shorter."""
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def open_splits(folder: Path) -> Splits[TokenArray]:
    """Maps both splits of a folder that kvjax.data.prepare made. Raises ConfigError if it is missing or incomplete."""
    return Splits(open_split(folder, "train"), open_split(folder, "validation"))


def open_split(folder: Path, split: str) -> TokenArray:
    """Maps one split (train or validation) of a prepared folder; see `open_splits`."""
    index = read_index(folder)
    path, entry = Path(folder) / f"{split}.bin", index["splits"][split]
    dtype = np.dtype(index["dtype"])
    size = path.stat().st_size if path.is_file() else 0
    require(size == entry["tokens"] * dtype.itemsize,
            f"{path} has {size} bytes, but {INDEX} promises {entry['tokens']} tokens of {dtype}: copy the folder again "
            "or make it again with python -m kvjax.data.prepare")
    starts = np.load(Path(folder) / f"{split}.starts.npy", mmap_mode="r")
    return TokenArray(str(path), np.memmap(path, dtype, "r"), starts, entry["text_bytes"], index["vocab_size"],
                      (Path(folder), split))


def read_index(folder: Path) -> dict:
    """The index of a prepared folder. Raises ConfigError if there is none."""
    path = Path(folder) / INDEX
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path} does not exist: make the folder with python -m kvjax.data.prepare") from None
