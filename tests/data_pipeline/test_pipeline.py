import dataclasses
import itertools
import pickle

import chex
import grain
import numpy as np
import pytest

from kvjax.config import ConfigError, DataConfig
from kvjax.data import pipeline
from kvjax.data.pipeline import token_splits, training_iterator, validation_batches, validation_bytes
from kvjax.data.tokenizers import build_tokenizer

LENGTH = 32


def take(iterator, count):
    return list(itertools.islice(iterator, count))


def batches(config, tokenizer, count, batch_size=4, seed=0, **process):
    iterator = training_iterator(config, tokenizer, batch_size, LENGTH, seed, **process)
    found = take(iterator, count)
    iterator.close()
    return found


def rows_of(found):
    return [row.tobytes() for batch in found for row in batch["tokens"]]


def test_shapes_and_keys(config, tokenizer):
    packed = batches(config, tokenizer, 1)[0]
    assert set(packed) == {"tokens", "targets", "loss_mask", "segment_ids", "positions"}
    chex.assert_shape(list(packed.values()), (4, LENGTH))
    assert packed["loss_mask"].dtype == np.float32 and packed["tokens"].dtype == np.int32
    stream = batches(dataclasses.replace(config, pack=False), tokenizer, 1)[0]
    assert set(stream) == {"tokens", "targets"}
    np.testing.assert_array_equal(stream["tokens"][:, 1:], stream["targets"][:, :-1])


@pytest.mark.parametrize("pack", [True, False])
def test_resume_is_exact(config, tokenizer, pack):
    config = dataclasses.replace(config, pack=pack)
    straight = batches(config, tokenizer, 30)  # several epochs
    iterator = training_iterator(config, tokenizer, 4, LENGTH, 0)
    take(iterator, 13)
    state = iterator.get_state()
    for fresh in (training_iterator(config, tokenizer, 4, LENGTH, 0), iterator):
        take(fresh, 2)
        fresh.set_state(state)
        assert fresh.get_state() == state
        chex.assert_trees_all_equal(take(fresh, 17), straight[13:])
        fresh.close()


def test_workers_change_nothing_and_resume_each_other(config, tokenizer):
    straight = batches(config, tokenizer, 12)
    with_workers = training_iterator(dataclasses.replace(config, workers=2), tokenizer, 4, LENGTH, 0)
    chex.assert_trees_all_equal(take(with_workers, 5), straight[:5])
    alone = training_iterator(config, tokenizer, 4, LENGTH, 0)
    alone.set_state(with_workers.get_state())
    chex.assert_trees_all_equal(take(alone, 4), straight[5:9])
    with_workers.set_state(alone.get_state())
    chex.assert_trees_all_equal(take(with_workers, 3), straight[9:])
    for iterator in (with_workers, alone):
        iterator.close()
        with pytest.raises(ValueError, match="closed"):
            next(iterator)


def test_orbax_saves_and_restores_for_any_number_of_processes(config, tokenizer, tmp_path):
    from orbax.checkpoint import v1 as ocp

    iterator = training_iterator(config, tokenizer, 4, LENGTH, 0)
    take(iterator, 3)
    ocp.save_checkpointables(tmp_path / "saved", {"data": iterator})
    ahead = take(iterator, 3)
    iterator.close()
    file, = (tmp_path / "saved" / "data").glob("process_0-of-1.json")
    file.rename(file.with_name("process_0-of-2.json"))
    fresh = training_iterator(config, tokenizer, 4, LENGTH, 0)
    ocp.load_checkpointables(tmp_path / "saved", {"data": fresh})
    chex.assert_trees_all_equal(take(fresh, 3), ahead)
    fresh.close()


def test_epochs_hold_every_row_in_another_order(config, tokenizer):
    rows = len(pipeline.PackedRows(token_splits(config, tokenizer).train, LENGTH))
    found = rows_of(batches(config, tokenizer, 2 * rows, batch_size=1))
    first, second = found[:rows], found[rows:]
    assert sorted(first) == sorted(second) and first != second
    assert rows_of(batches(config, tokenizer, rows, batch_size=1, seed=1)) not in (first, second)


@pytest.mark.parametrize("count", [2, 3])
def test_processes_share_the_batch_of_one(config, tokenizer, count):
    alone = batches(config, tokenizer, 8, batch_size=6)
    parts = [batches(config, tokenizer, 8, 6 // count, process_index=p, process_count=count) for p in range(count)]
    for k, whole in enumerate(alone):
        joined = {name: np.concatenate([part[k][name] for part in parts]) for name in whole}
        chex.assert_trees_all_equal(joined, whole)


@pytest.mark.parametrize("pack", [True, False])
def test_validation_scores_every_token_once_and_never_a_training_text(config, tokenizer, pack):
    config = dataclasses.replace(config, pack=pack)
    array = token_splits(config, tokenizer).validation
    found = list(validation_batches(config, tokenizer, 5, LENGTH))
    chex.assert_trees_all_equal_shapes(*found)
    scored = np.concatenate([batch["targets"][batch["loss_mask"] > 0] for batch in found])
    np.testing.assert_array_equal(np.sort(scored), np.sort(array.tokens[1:]))
    assert scored.size == len(array.tokens) - 1
    assert tokenizer.token_bytes[scored].sum() == validation_bytes(config, tokenizer, 5, LENGTH) == array.text_bytes
    if not pack:
        np.testing.assert_array_equal(scored, array.tokens[1:])
    training = {tokenizer.decode(row) for batch in batches(config, tokenizer, 40) for row in batch["tokens"].tolist()}
    headers = {f"Dócument {i} 🦜" for i in range(40) if f"Dócument {i} 🦜" in tokenizer.decode(array.tokens.tolist())}
    assert headers and not any(header in text for header in headers for text in training)


def test_validation_limit_spreads_over_the_split_and_processes_share_it(config, tokenizer):
    whole = list(validation_batches(config, tokenizer, 4, LENGTH))
    some = list(validation_batches(config, tokenizer, 4, LENGTH, limit=2))
    assert len(some) == 2 < len(whole)
    assert set(rows_of(some)) < set(rows_of(whole)) and not set(rows_of(some)) <= set(rows_of(whole[:2]))
    scored = np.concatenate([batch["targets"][batch["loss_mask"] > 0] for batch in some])
    assert validation_bytes(config, tokenizer, 4, LENGTH, limit=2) == tokenizer.token_bytes[scored].sum()
    for limit in (None, 2):
        alone = list(validation_batches(config, tokenizer, 4, LENGTH, limit))
        parts = [list(validation_batches(config, tokenizer, 2, LENGTH, limit, p, 2)) for p in range(2)]
        chex.assert_trees_all_equal(
            [{name: np.concatenate([a[name], b[name]]) for name in a} for a, b in zip(*parts, strict=True)], alone)


def test_bytes_of_a_tokenizer_that_is_not_byte_level(config, tmp_path):
    import tokenizers as library

    model = library.Tokenizer(library.models.WordLevel({"[UNK]": 0, "the": 1, "</s>": 2}, unk_token="[UNK]"))
    model.pre_tokenizer = library.pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "tokenizer.json"))
    words = build_tokenizer(str(tmp_path / "tokenizer.json"), lambda: [])
    whole = validation_bytes(config, words, 2, LENGTH)
    assert whole == token_splits(config, words).validation.text_bytes
    assert 0 < validation_bytes(config, words, 2, LENGTH, limit=1) < whole
    assert validation_bytes(config, words, 2, LENGTH, limit=1000) == whole


def test_in_memory_tokens_are_made_once(config, tokenizer):
    assert token_splits(config, tokenizer).train is token_splits(config, tokenizer).train


def test_iterator_is_a_grain_iterator(config, tokenizer):
    assert isinstance(training_iterator(config, tokenizer, 1, LENGTH, 0), grain.DatasetIterator)
    assert len(pickle.dumps(token_splits(config, tokenizer).train)) > 1000  # in memory: workers get the tokens


def test_errors(config, tokenizer):
    with pytest.raises(ConfigError, match="too few for one sequence of 100000"):
        training_iterator(dataclasses.replace(config, pack=False), tokenizer, 1, 100_000, 0)
    with pytest.raises(ConfigError, match="process_index is 2 of 2"):
        training_iterator(config, tokenizer, 1, LENGTH, 0, process_index=2, process_count=2)
    with pytest.raises(ConfigError, match="no/folder/index.json does not exist"):
        training_iterator(DataConfig(source="tokens:no/folder"), tokenizer, 1, LENGTH, 0)
