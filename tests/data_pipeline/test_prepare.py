import dataclasses
import json
import pickle
import subprocess
import sys

import chex
import numpy as np
import pytest

from kvjax.config import ConfigError, DataConfig
from kvjax.data import prepare as module
from kvjax.data.packing import PackedRows
from kvjax.data.pipeline import token_splits, training_iterator, validation_batches
from kvjax.data.prepare import prepare
from kvjax.data.sources import load_documents
from kvjax.data.token_arrays import open_splits
from kvjax.data.tokenizers import build_tokenizer, make_tokenizer


@pytest.fixture
def jsonl(tmp_path, texts):
    path = tmp_path / "tales.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    return path


def documents_of(array, tokenizer):
    return [tokenizer.decode(array.tokens[a:b].tolist()) for a, b in zip(array.starts, array.starts[1:], strict=False)]


def test_jsonl_gives_training_batches(config, jsonl, texts, tmp_path):
    out = tmp_path / "tokens"
    prepare(str(jsonl), out, tokenizer="bpe:300", validation_fraction=0.2)
    held = load_documents(config).validation[:]
    config = DataConfig(source=f"tokens:{out}")
    tokenizer = make_tokenizer(config)
    assert tokenizer.vocab_size == 300
    splits = token_splits(config, tokenizer)
    assert splits.train.tokens.dtype == np.uint16
    train, validation = (documents_of(array, tokenizer) for array in splits)
    assert sorted(train + validation) == sorted(texts)
    assert sorted(validation) == sorted(held), "the same text is held out as from text files"
    assert splits.validation.text_bytes == sum(len(text.encode()) for text in validation)
    iterator = training_iterator(config, tokenizer, 2, 16, seed=0)
    plain = [next(iterator) for _ in range(4)]
    iterator.close()
    chex.assert_shape(plain[0]["tokens"], (2, 16))
    iterator = training_iterator(dataclasses.replace(config, workers=2), tokenizer, 2, 16, seed=0)
    chex.assert_trees_all_equal([next(iterator) for _ in range(4)], plain)
    iterator.close()
    scored = sum(batch["loss_mask"].sum() for batch in validation_batches(config, tokenizer, 2, 16))
    assert scored == len(splits.validation.tokens) - 1


def test_parquet_equals_jsonl(jsonl, texts, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    for part, rows in enumerate((texts[:25], texts[25:])):
        table = pa.table({"id": list(range(len(rows))), "text": rows})
        pyarrow.parquet.write_table(table, tmp_path / f"{part}.parquet", row_group_size=8)
    prepare(f"{tmp_path}/*.parquet", tmp_path / "a", tokenizer="bytes", validation_fraction=0.2)
    prepare(str(jsonl), tmp_path / "b", tokenizer="bytes", validation_fraction=0.2)
    for left, right in zip(open_splits(tmp_path / "a"), open_splits(tmp_path / "b"), strict=True):
        np.testing.assert_array_equal(left.tokens, right.tokens)
        np.testing.assert_array_equal(left.starts, right.starts)
    with pytest.raises(ConfigError, match="no column 'body', only id, text"):
        prepare(f"{tmp_path}/*.parquet", tmp_path / "c", tokenizer="bytes", column="body")


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        prepare(str(tmp_path / "a.parquet"), tmp_path / "out", tokenizer="bytes")


def test_text_folder_equals_the_text_source(config, corpus, tokenizer, tmp_path):
    prepare(str(corpus), tmp_path / "tokens", tokenizer="bytes", validation_fraction=config.validation_fraction)
    splits = open_splits(tmp_path / "tokens")
    for made, direct, texts in zip(splits, token_splits(config, tokenizer), load_documents(config), strict=True):
        np.testing.assert_array_equal(made.tokens, direct.tokens)
        assert documents_of(made, tokenizer) == list(texts)


def test_nothing_is_overwritten_unasked(jsonl, tmp_path):
    out = tmp_path / "tokens"
    prepare(str(jsonl), out, tokenizer="bytes", validation_fraction=0.2)
    with pytest.raises(ConfigError, match="tokens exists: give --overwrite"):
        prepare(str(jsonl), out, tokenizer="bytes")
    prepare(str(jsonl), out, tokenizer="bpe:280", validation_fraction=0.2, overwrite=True)
    assert json.loads((out / "index.json").read_text())["vocab_size"] == 280
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="was not made by this command"):
        prepare(str(jsonl), mine, tokenizer="bytes", overwrite=True)
    assert (mine / "thesis.txt").read_text() == "precious"


def test_a_killed_run_leaves_no_output_and_can_be_repeated(jsonl, tmp_path, monkeypatch):
    out = tmp_path / "tokens"

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.SplitWriter, "close", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare(str(jsonl), out, tokenizer="bytes")
    assert not out.exists()
    monkeypatch.undo()
    prepare(str(jsonl), out, tokenizer="bytes", validation_fraction=0.2)
    assert open_splits(out) and not out.with_name("tokens.partial").exists()


def test_damaged_folders(jsonl, tmp_path, tokenizer):
    out = tmp_path / "tokens"
    prepare(str(jsonl), out, tokenizer="bpe:300", validation_fraction=0.2)
    config = DataConfig(source=f"tokens:{out}")
    for other in (tokenizer, build_tokenizer("bpe:300", lambda: ["quite another text " * 9])):
        with pytest.raises(ConfigError, match=f"vocabulary of 300 tokens, and the tokenizer's {other.vocab_size} are"):
            token_splits(config, other)
    chosen = make_tokenizer(config)
    tokens = np.memmap(out / "train.bin", np.uint16, "r+")
    tokens[3] = 300
    tokens.flush()
    rows = PackedRows(token_splits(config, chosen).train, 16)
    with pytest.raises(ConfigError, match="train.bin holds token 300 at position 3, outside its vocabulary of 300"):
        [rows[i] for i in range(len(rows))]
    (out / "train.bin").write_bytes((out / "train.bin").read_bytes()[:-2])
    with pytest.raises(ConfigError, match="train.bin has .* bytes, but index.json promises"):
        token_splits(config, chosen)


def test_mapped_tokens_are_not_copied_to_workers(jsonl, tmp_path):
    prepare(str(jsonl), tmp_path / "tokens", tokenizer="bytes", validation_fraction=0.2)
    array = open_splits(tmp_path / "tokens").train
    packed = pickle.dumps(array)
    assert len(packed) < 500 < len(array.tokens)
    again = pickle.loads(packed)
    assert isinstance(again.tokens, np.memmap)
    np.testing.assert_array_equal(again.tokens, array.tokens)


@pytest.mark.parametrize("line, message", [
    ("{", "line 1 is no JSON"), ('{"body": "a"}', "no JSON object with a field 'text'.*--column"),
    ('{"text": 3}', "holds 3, not text"), ("", "no document of .* fell into the"),
])
def test_wrong_jsonl(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(ConfigError, match=message):
        prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", tokenizer="bytes")
    assert not (tmp_path / "out").exists()


def test_inputs_of_other_kinds(tmp_path):
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(ConfigError, match="holds .csv files"):
        prepare(f"{tmp_path}/*", tmp_path / "out", tokenizer="bytes")
    (tmp_path / "b.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="mixes .csv, .jsonl"):
        prepare(f"{tmp_path}/*", tmp_path / "out", tokenizer="bytes")
    with pytest.raises(ConfigError, match="matches no file"):
        prepare(f"{tmp_path}/none*", tmp_path / "out", tokenizer="bytes")


def test_overwrite_deletes_only_what_this_command_made(jsonl, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "index.json").write_text('{"mine": 1}')
    with pytest.raises(ConfigError, match="was not made by this command"):
        prepare(str(jsonl), out, tokenizer="bytes", validation_fraction=0.2, overwrite=True)
    (out / "index.json").unlink()
    prepare(str(jsonl), out, tokenizer="bytes", validation_fraction=0.2)
    (out / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="thesis.txt"):
        prepare(str(jsonl), out, tokenizer="bytes", validation_fraction=0.2, overwrite=True)
    assert (out / "thesis.txt").read_text() == "precious"
    partial = tmp_path / "other.partial"
    partial.mkdir()
    (partial / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="thesis.txt"):
        prepare(str(jsonl), tmp_path / "other", tokenizer="bytes", validation_fraction=0.2)


def test_command_line(jsonl, tmp_path):
    command = [sys.executable, "-m", "kvjax.data.prepare", str(jsonl), str(tmp_path / "tokens")]
    options = ["--tokenizer", "bytes", "--validation-fraction", "0.2"]
    done = subprocess.run(command + options, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "train: " in done.stdout and "--data.source tokens:" in done.stdout
    again = subprocess.run(command + options, capture_output=True, text=True)
    assert again.returncode == 2 and again.stderr.startswith("error: ") and "--overwrite" in again.stderr
