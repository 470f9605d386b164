"""Batches for training and validation.

Training order: the rows of a split are shuffled anew each epoch, epochs follow each other without a seam, and
global batch k is the next batch_size × process_count rows of that order. Process p holds its p-th contiguous
block, so the blocks in process order are exactly the batch that one process alone would see.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np
from absl import flags

from kvjax.config import DataConfig, require
from kvjax.data.packing import PackedRows, StreamRows
from kvjax.data.sources import Splits, load_documents
from kvjax.data.token_arrays import TokenArray, open_splits, tokenize
from kvjax.data.tokenizers import Tokenizer, load_tokenizer

Batch = dict[str, np.ndarray]
_EPOCHS = 2**31  # no end in practice; Grain's own endless repeat overflows when batches hold one row


class TrainingIterator(grain.DatasetIterator):
    """Endless batches of one process. Its state is the number of batches taken, whatever the number of workers.

    Orbax saves and restores it; the state of a run is good for any number of processes that leaves the global
    batch size as it was. Close it to stop its workers.
    """

    def __init__(self, batches: grain.MapDataset, workers: int):
        super().__init__()
        self._batches, self._workers = batches, workers
        self._taken = 0
        self._ahead: grain.DatasetIterator | None = None

    def __next__(self) -> Batch:
        if self._closed:
            raise ValueError("this training iterator is closed: make a new one")
        if self._ahead is None:
            self._ahead = self._read_ahead()
        batch = next(self._ahead)
        self._taken += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        return {"batches": self._taken}

    def set_state(self, state: dict[str, Any]) -> None:
        self._stop()
        self._taken = int(state["batches"])

    async def load(self, directory) -> Awaitable[None]:
        """Restores from an Orbax folder. All processes are at the same batch, so any process's file serves."""

        async def read() -> None:
            self.set_state(json.loads(sorted(directory.glob("process_*.json"))[0].read_text()))

        return read()

    def close(self) -> None:
        self._stop()
        super().close()

    def _read_ahead(self) -> grain.DatasetIterator:
        # Whole batches go to the workers: batching after them would give each worker rows of its own order.
        one_ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
        dataset = self._batches[self._taken:].to_iter_dataset(one_ahead)
        if self._workers:
            if not flags.FLAGS.is_parsed():  # Grain's workers read absl flags, which only absl programs have parsed
                flags.FLAGS(["kvjax"])
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(self._workers, per_worker_buffer_size=2),
                                          worker_init_fn=_follow_the_parent)
        return iter(dataset)

    def _stop(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


def _follow_the_parent(*_) -> None:
    """Ctrl-C reaches workers too, but the training process decides when they end; they also end if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()


def training_iterator(config: DataConfig, tokenizer: Tokenizer, batch_size: int, length: int, seed: int,
                      process_index: int = 0, process_count: int = 1) -> TrainingIterator:
    """Endless training batches of this process: `batch_size` rows of `length` tokens each.

    Packed: tokens, targets, segment_ids, positions [B,T] int32 and loss_mask [B,T] float32. As a running stream
    (`config.pack` false): tokens and targets only. Order and content depend on the seed and on
    batch_size × process_count, never on `config.workers`. Raises ConfigError if there is no whole row.
    """
    require(0 <= process_index < process_count, f"process_index is {process_index} of {process_count} processes")
    require(config.validation_fraction < 1, "data.validation_fraction is 1: nothing is left to train on; lower it")
    array = token_splits(config, tokenizer).train
    rows = _rows(array, length, config.pack, remainder=False)
    require(len(rows) > 0, f"{array.name} has {len(array.tokens)} tokens, too few for one sequence of {length}: "
                           "give more text or shorten model.context_length")
    batches = grain.MapDataset.source(rows).seed(seed).shuffle().repeat(_EPOCHS).batch(batch_size)
    return TrainingIterator(batches[process_index::process_count], config.workers)


def validation_batches(config: DataConfig, tokenizer: Tokenizer, batch_size: int, length: int, limit: int | None = None,
                       process_index: int = 0, process_count: int = 1) -> Iterator[Batch]:
    """Batches of the held-out split in order, every target of it once; the keys of training, always with loss_mask.

    The last batch is filled up with rows of loss_mask 0. `limit`: so many batches at most, of rows spread evenly
    over the split. Processes share a batch as in training, and all get the same number of batches.
    """
    array = token_splits(config, tokenizer).validation
    rows = _rows(array, length, config.pack, remainder=True)
    require(len(rows) > 0, f"{array.name} has no tokens to evaluate on: give more text, or raise "
                           "data.validation_fraction")
    wide = batch_size * process_count
    chosen = _validation_rows(len(rows), limit and limit * wide)
    blank = {name: np.zeros_like(value) for name, value in rows[0].items()}
    for start in range(process_index * batch_size, -(-len(chosen) // wide) * wide, wide):
        mine = [rows[i] for i in chosen[start:start + batch_size]]
        mine += [blank] * (batch_size - len(mine))
        yield {name: np.stack([row[name] for row in mine]) for name in blank}


def validation_bytes(config: DataConfig, tokenizer: Tokenizer, batch_size: int, length: int,
                     limit: int | None = None) -> float:
    """UTF-8 bytes of the text that the targets of `validation_batches` stand for: nats / bytes = nats per byte.

    `batch_size` is that of all processes together. Exact for the whole split, and with `limit` too if the
    tokenizer is byte-level; else the share of the split's tokens times its bytes.
    """
    array = token_splits(config, tokenizer).validation
    if limit is None:
        return float(array.text_bytes)
    scored = [batch["targets"][batch["loss_mask"] > 0]
              for batch in validation_batches(config, tokenizer, batch_size, length, limit)]
    targets = np.concatenate(scored)
    if tokenizer.token_bytes is not None:
        return float(tokenizer.token_bytes[targets].sum())
    return array.text_bytes * len(targets) / (len(array.tokens) - 1)


def token_splits(config: DataConfig, tokenizer: Tokenizer) -> Splits[TokenArray]:
    """Both splits of a source as tokens: mapped from files for `tokens:FOLDER`, else tokenized once and remembered.

    Raises ConfigError if the source is missing or empty, or was tokenized with another vocabulary.
    """
    kind, _, folder = config.source.partition(":")
    if kind != "tokens":
        return _tokenize(config.source, config.validation_fraction, tokenizer)
    splits = open_splits(Path(folder).expanduser())
    _check_same_vocabulary(Path(folder).expanduser() / "tokenizer", tokenizer)
    return splits


@functools.lru_cache(maxsize=4)
def _check_same_vocabulary(saved: Path, tokenizer: Tokenizer) -> None:
    prepared, given = load_tokenizer(saved).vocabulary(), tokenizer.vocabulary()
    differing = len(prepared.items() ^ given.items())
    require(not differing, f"{saved.parent} was made with a vocabulary of {len(prepared)} tokens, and the tokenizer's "
            f"{len(given)} are others ({differing} differ): use the one saved in {saved}, or prepare the text again")


@functools.lru_cache(maxsize=4)
def _tokenize(source: str, fraction: float, tokenizer: Tokenizer) -> Splits[TokenArray]:
    documents = load_documents(DataConfig(source=source, validation_fraction=fraction))
    return Splits(tokenize(f"{source} (train)", documents.train, tokenizer),
                  tokenize(f"{source} (validation)", documents.validation, tokenizer))


def _rows(array: TokenArray, length: int, pack: bool, remainder: bool) -> PackedRows | StreamRows:
    return PackedRows(array, length) if pack else StreamRows(array, length, remainder)


def _validation_rows(count: int, most: int | None) -> np.ndarray:
    if most is None or most >= count:
        return np.arange(count)
    return np.arange(most) * count // most
