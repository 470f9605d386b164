import dataclasses

import numpy as np
import pytest

from kvjax.config import ConfigError
from kvjax.data.packing import PackedRows, StreamRows, assign_rows
from kvjax.data.token_arrays import tokenize


@pytest.fixture(scope="module")
def array(texts, tokenizer):
    return tokenize("tiny", texts, tokenizer)


def pieces_of(rows):
    """(inputs, targets) of every segment of every row, checking the layout of each row on the way."""
    for i in range(len(rows)):
        row = rows[i]
        used = int((row["segment_ids"] > 0).sum())
        assert (row["segment_ids"][used:] == 0).all(), "padding stands last"
        np.testing.assert_array_equal(row["loss_mask"], (row["segment_ids"] > 0).astype(np.float32))
        segments = row["segment_ids"][:used]
        assert segments[0] == 1 and set(np.diff(segments)) <= {0, 1}
        for segment in range(1, segments[-1] + 1):
            mask = row["segment_ids"] == segment
            np.testing.assert_array_equal(row["positions"][mask], np.arange(mask.sum()))
            yield row["tokens"][mask], row["targets"][mask]


@pytest.mark.parametrize("length", [1, 16, 50, 1000])
def test_documents_come_back_from_packed_rows(array, texts, tokenizer, length):
    eos, documents, open_document = tokenizer.eos_id, [], []
    size = len(array.tokens)
    places = dataclasses.replace(array, tokens=np.arange(size), vocab_size=size)  # every token is its own position
    for inputs, outputs in sorted(pieces_of(PackedRows(places, length)), key=lambda piece: piece[0][0]):
        np.testing.assert_array_equal(inputs + 1, outputs)
        tokens, targets = array.tokens[inputs], array.tokens[outputs]
        assert (tokens[0] == eos) == (not open_document), "a piece goes on where the one before ended"
        assert eos not in targets[:-1], "no target crosses a document"
        open_document += targets.tolist()
        if targets[-1] == eos:
            documents.append(tokenizer.decode(open_document))
            open_document = []
    assert documents == texts and not open_document


def test_short_documents_stay_whole_and_rows_fill_well(array):
    rows = PackedRows(array, 300)
    targets = np.diff(array.starts)
    assert targets.max() <= 300
    assert len(list(pieces_of(rows))) == len(targets)
    assert targets.sum() / (len(rows) * 300) > 0.9


def test_every_target_is_scored_once(array):
    for length in (7, 64):
        packed = PackedRows(array, length)
        stream = StreamRows(array, length, remainder=True)
        for rows in (packed, stream):
            assert sum(rows[i]["loss_mask"].sum() for i in range(len(rows))) == len(array.tokens) - 1


def test_assign_rows_never_overfills():
    rng = np.random.default_rng(0)
    for length in (5, 40):
        for count in (1, 2, 50):
            sizes = rng.integers(1, length + 1, count)
            rows = assign_rows(sizes, length)
            load = np.bincount(rows, weights=sizes)
            assert load.max() <= length and load.min() > 0
            _, first = np.unique(rows, return_index=True)
            assert (np.diff(first) > 0).all(), "rows are numbered by their earliest piece"
    np.testing.assert_array_equal(assign_rows(np.array([3, 3, 4, 6, 7]), 10), [0, 1, 2, 2, 0])
    np.testing.assert_array_equal(np.bincount(assign_rows(np.array([7] + [3] * 10), 10)), [2, 3, 3, 3])


def test_stream_is_the_whole_array(array):
    rows = StreamRows(array, 64, remainder=True)
    tokens = np.concatenate([rows[i]["tokens"] for i in range(len(rows))])
    targets = np.concatenate([rows[i]["targets"] for i in range(len(rows))])
    size = len(array.tokens) - 1
    np.testing.assert_array_equal(tokens[:size], array.tokens[:-1])
    np.testing.assert_array_equal(targets[:size], array.tokens[1:])
    whole = StreamRows(array, 64)
    assert len(whole) == len(rows) - 1 and set(whole[0]) == {"tokens", "targets"}


def test_empty_documents_and_bad_length(array, tokenizer):
    assert len(tokenize("gaps", ["", "a", ""], tokenizer).starts) == 2
    with pytest.raises(ConfigError, match="length is 0"):
        PackedRows(array, 0)
