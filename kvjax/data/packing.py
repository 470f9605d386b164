"""Rows of a fixed length from a token array, with random access by row number.

Rows are laid out once for a token array and a length, and only their order is shuffled from epoch to epoch:
nothing has to be remembered to resume, and any process or worker can make any row.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

import numpy as np

from kvjax.config import require
from kvjax.data.token_arrays import TokenArray

Row = dict[str, np.ndarray]


class PackedRows:
    """Whole documents packed into rows; a document longer than a row is cut into pieces.

    Row i is a dict of arrays [length]: tokens, targets, segment_ids (1 for the first piece of the row, 2, …; 0 is
    padding), positions (from 0 in every piece) and loss_mask (1 on every target, 0 on padding). The input of a
    document starts with end-of-text and its last target is end-of-text, so no target crosses a document.
    """

    def __init__(self, array: TokenArray, length: int):
        require(length > 0, f"length is {length}: rows need at least one token")
        self.array, self.length = array, length
        starts, sizes = cut_pieces(np.asarray(array.starts), length)
        rows = assign_rows(sizes, length)
        order = np.argsort(rows, kind="stable")
        self._starts, self._sizes = starts[order], sizes[order].astype(np.int32)
        self._bounds = np.concatenate([[0], np.cumsum(np.bincount(rows))])

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> Row:
        row = {name: np.zeros(self.length, np.int32) for name in ("tokens", "targets", "segment_ids", "positions")}
        at = 0
        for segment, piece in enumerate(range(*self._bounds[index:index + 2]), start=1):
            start, size = int(self._starts[piece]), int(self._sizes[piece])
            window, here = self.array.read(start, start + size + 1), slice(at, at + size)
            row["tokens"][here], row["targets"][here] = window[:-1], window[1:]
            row["segment_ids"][here], row["positions"][here] = segment, np.arange(size)
            at += size
        return row | {"loss_mask": (row["segment_ids"] > 0).astype(np.float32)}


class StreamRows:
    """The whole array as one running stream, cut every `length` tokens; end-of-text stands between documents.

    Row i is a dict of arrays [length]: tokens, and targets one token further. What is left after the last whole
    row is dropped, or with `remainder` is one more row, padded; then every row has a loss_mask (0 on padding).
    """

    def __init__(self, array: TokenArray, length: int, remainder: bool = False):
        require(length > 0, f"length is {length}: rows need at least one token")
        self.array, self.length, self.remainder = array, length, remainder

    def __len__(self) -> int:
        targets = len(self.array.tokens) - 1
        return -(-targets // self.length) if self.remainder else targets // self.length

    def __getitem__(self, index: int) -> Row:
        start = int(index) * self.length
        window = self.array.read(start, start + self.length + 1)
        size = len(window) - 1
        padding = (0, self.length - size)
        row = {"tokens": np.pad(window[:-1], padding), "targets": np.pad(window[1:], padding)}
        if self.remainder:
            row["loss_mask"] = (np.arange(self.length) < size).astype(np.float32)
        return row


def cut_pieces(starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts documents (see `TokenArray.starts`) into pieces of at most `length` targets: (start, targets) of each."""
    targets = np.diff(starts)
    counts = -(-targets // length)
    document = np.repeat(np.arange(len(targets)), counts)
    piece = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = starts[document] + piece * length
    return begin, np.minimum(length, starts[document + 1] - begin)


def assign_rows(sizes: np.ndarray, length: int) -> np.ndarray:
    """The row of every piece, so that the pieces of a row hold at most `length` tokens and few rows are needed.

    Best fit, longest first: a piece goes to the fullest row with room for it. Pieces of one size are placed
    together, so the work grows with the number of different sizes, not of pieces. Rows are numbered by their
    earliest piece.
    """
    rows, used = np.empty(len(sizes), np.int64), 0
    rooms: dict[int, list[np.ndarray]] = {}
    levels: list[int] = []  # the keys of `rooms`, sorted

    def put(level: int, which: np.ndarray) -> None:
        if level and len(which):
            if level not in rooms:
                bisect.insort(levels, level)
            rooms.setdefault(level, []).append(which)

    for size, pieces in _by_size(sizes):
        while len(pieces):
            at = bisect.bisect_left(levels, size)
            level = levels[at] if at < len(levels) else length
            each = level // size
            need = -(-len(pieces) // each)
            if at < len(levels):
                free = np.concatenate(rooms.pop(levels.pop(at)))
            else:
                free, used = np.arange(used, used + need), used + need
            taken, rest = free[:need], free[need:]
            placed = np.repeat(taken, each)[:len(pieces)]
            rows[pieces[:len(placed)]] = placed
            in_last = len(placed) - each * (len(taken) - 1)
            put(level, rest)
            put(level - each * size, taken[:-1])
            put(level - in_last * size, taken[-1:])
            pieces = pieces[len(placed):]
    _, first = np.unique(rows, return_index=True)
    return np.argsort(np.argsort(first))[rows]


def _by_size(sizes: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(size, indices of the pieces of that size), largest first."""
    order = np.argsort(-sizes, kind="stable")
    for group in np.split(order, np.flatnonzero(np.diff(sizes[order])) + 1):
        if len(group):
            yield int(sizes[group[0]]), group
