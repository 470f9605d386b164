"""Byte n-gram models against counts made by hand."""

import math

import numpy as np
import pytest

from kvjax.config import ConfigError
from kvjax.evaluation.ngram import byte_model_nats

U = 1 / 256


def test_order_zero_by_hand():
    # "abab": a and b twice in 4; smoothed by one observation of the uniform model.
    a, c = (2 + U) / 5, U / 5
    assert byte_model_nats(b"abab", b"ac", 0) == pytest.approx(-(math.log(a) + math.log(c)) / 2, rel=1e-12)


def test_order_one_by_hand():
    # "abab" holds ab, ba, ab: after a came b twice, after b came a once.
    p0_a, p0_b = (2 + U) / 5, (2 + U) / 5
    b_after_a = (2 + p0_b) / 3
    a_after_b = (1 + p0_a) / 2
    b_after_b = (0 + p0_b) / 2
    expected = -(math.log(b_after_a) + math.log(b_after_b) + math.log(a_after_b)) / 3
    assert byte_model_nats(b"abab", b"abba", 1) == pytest.approx(expected, rel=1e-12)


def test_an_unseen_context_falls_back_to_the_shorter_one():
    p0_a = (2 + U) / 5
    a_after_b = (1 + p0_a) / 2
    assert byte_model_nats(b"abab", b"zba", 2) == pytest.approx(-math.log(a_after_b), rel=1e-12)


def test_probabilities_of_all_next_bytes_add_up_to_one():
    text = bytes(np.random.default_rng(0).integers(0, 5, 300, np.uint8))
    for context in (text[:3], b"\x01\xff\x02"):
        total = sum(math.exp(-byte_model_nats(text, context + bytes([b]), 3)) for b in range(256))
        assert total == pytest.approx(1, rel=1e-9)


def test_the_highest_order_uses_all_64_bits():
    text = bytes([255, 254, 253, 252, 251, 250, 249, 248]) * 4
    assert byte_model_nats(text, text[:8], 7) < 0.3


def test_more_context_predicts_a_periodic_text_better():
    text = b"abcabd" * 200
    losses = [byte_model_nats(text, text, order) for order in range(4)]
    assert losses == sorted(losses, reverse=True) and losses[3] < 0.01 < 0.2 < losses[2]


@pytest.mark.parametrize("arguments, words", [
    ((b"abc", b"abc", 8), "order is 8"), ((b"abc", b"abc", -1), "order is -1"),
    ((b"", b"abc", 0), "train has 0 bytes"), ((b"abc", b"ab", 2), "validation has 2 bytes"),
])
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(ConfigError, match=words):
        byte_model_nats(*arguments)
