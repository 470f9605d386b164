"""A tiny corpus that every test here can read."""

import pytest

from kvjax.config import DataConfig
from kvjax.data.tokenizers import ByteTokenizer


def document(i: int) -> str:
    """Text of document i: its length varies and not all of it is ASCII."""
    return f"Dócument {i} 🦜\n" + f"naïve line {i} of the tale\n" * (i * 7 % 11)


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return [document(i) for i in range(40)]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory, texts):
    """A folder with one file per document."""
    folder = tmp_path_factory.mktemp("corpus")
    for i, text in enumerate(texts):
        (folder / f"{i:02}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def config(corpus) -> DataConfig:
    return DataConfig(source=f"text:{corpus}", validation_fraction=0.2)


@pytest.fixture(scope="session")
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()
