"""Streamed text: no character is shown before all of its bytes are there."""

import pytest

from kvjax.config import ConfigError
from kvjax.data.tokenizers import ByteTokenizer
from kvjax.evaluation.text import TextStream, stream_text

TOKENIZER = ByteTokenizer()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_characters_of_several_bytes_come_whole(size):
    text = "naïve 🦜 → ☃ end é"
    tokens, stream = TOKENIZER.encode(text), TextStream(TOKENIZER)
    parts = [stream.push(tokens[i : i + size]) for i in range(0, len(tokens), size)]
    assert not any("\ufffd" in part for part in parts)
    assert "".join(parts) == text and stream.finish() == ""


def test_invalid_bytes_appear_once_it_is_certain_that_they_are():
    stream = TextStream(TOKENIZER)
    assert [stream.push([0xF0]), stream.push([0x9F]), stream.push([ord("a")])] == ["", "", "\ufffda"]
    assert [stream.push([0xC3]), stream.finish()] == ["", "\ufffd"]


def test_end_of_text_is_not_shown():
    stream = TextStream(TOKENIZER)
    assert stream.push([ord("a"), TOKENIZER.eos_id]) + stream.finish() == "a"


def test_bad_settings_raise_at_the_call():
    class Model:
        class config:  # noqa: N801
            vocab_size = 256

    with pytest.raises(ConfigError, match="top_p is 2"):
        stream_text(Model, {}, TOKENIZER, ["a"], max_new_tokens=1, top_p=2)
