"""Decoding is timed on a cache of the length that is said, and in turns."""

import jax
import numpy as np
import pytest
from invariants import random_params
from variants import model_config

from kvjax import build_model, decode, init_cache
from kvjax.attention import GroupedQuery
from kvjax.config import ConfigError
from kvjax.evaluation.decode_speed import STEPS, DecodeLoop, decode_seconds, in_turns


@pytest.fixture(scope="module")
def config():
    return model_config(GroupedQuery(heads=2, kv_heads=1, head_dim=8))


def test_what_is_timed_is_decoding_up_to_the_context(config, monkeypatch):
    model, params = build_model(config), random_params(config)
    loop, given = DecodeLoop(model, params, batch=2, room=128), []
    run = loop._decode
    monkeypatch.setattr(loop, "_decode", lambda *arguments: given.append(arguments) or run(*arguments))
    assert loop.seconds(40) > 0
    _, token, cache = given[0]
    assert cache.components["k"].is_deleted() and cache.capacity == 128
    start = init_cache(config, 2, 128)
    start = start.replace(lengths=start.lengths + 40 - STEPS)
    found, after = run(params, token, jax.tree.map(jax.numpy.copy, start))
    assert after.lengths.tolist() == [40, 40]
    step = jax.jit(lambda token, cache: decode(model, params, token[:, None], cache, last_only=True))
    for _ in range(STEPS):
        logits, start = step(token, start)
        token = logits.argmax(-1)
    assert found.tolist() == token.tolist()
    np.testing.assert_allclose(after.components["k"], start.components["k"], atol=1e-5)


def test_loops_take_turns_and_the_median_counts():
    order, slow = [], iter([9.0, 1.0, 2.0, 30.0])

    class Loop:
        def __init__(self, name, times):
            self.name, self.times = name, times

        def seconds(self, context):
            order.append((self.name, context))
            return next(self.times)
    found = in_turns({"a": Loop("a", slow), "b": Loop("b", iter([0.0, 5.0, 5.0, 6.0]))}, [64], rounds=3)
    assert found == {"a": {64: 2.0}, "b": {64: 5.0}} and [name for name, _ in order] == list("abababab")


def test_contexts_that_cannot_be_are_refused(config):
    for contexts, told in (([64, 64], "each once"), ([], "one or more"), ([STEPS], "above 16 tokens")):
        with pytest.raises(ConfigError, match=told):
            decode_seconds(build_model(config), None, 1, contexts)
