"""Decoding is timed on a cache of the length that is said, and in turns; with trained models on caches of all kinds."""

import json
from itertools import product

import jax
import numpy as np
import pytest
from invariants import random_params
from tiny_models import restored_model
from variants import model_config

from kvjax import build_model, decode, init_cache
from kvjax.attention import GroupedQuery
from kvjax.benchmarks import decode_model
from kvjax.config import ConfigError
from kvjax.convert.folder import save_model
from kvjax.evaluation.decode_speed import STEPS, DecodeLoop, check_contexts, in_turns, pretended


@pytest.fixture(scope="module")
def config():
    return model_config(GroupedQuery(heads=2, kv_heads=1, head_dim=8))


@pytest.mark.parametrize("room", [128, None])
def test_what_is_timed_is_decoding_up_to_the_context(config, monkeypatch, room):
    model, params = build_model(config), random_params(config)
    loop, given = DecodeLoop(model, params, pretended(config, batch=2, room=room)), []
    run = loop._decode
    monkeypatch.setattr(loop, "_decode", lambda *arguments: given.append(arguments) or run(*arguments))
    assert loop.seconds(40) > 0
    _, cache = given[0]
    assert cache.components["k"].is_deleted() and cache.capacity == init_cache(config, 2, room or 40).capacity
    start = init_cache(config, 2, 128)
    start = start.replace(lengths=start.lengths + 40 - STEPS)
    found, after = run(params, jax.tree.map(jax.numpy.copy, start))
    assert after.lengths.tolist() == [40, 40]
    step = jax.jit(lambda token, cache: decode(model, params, token[:, None], cache, last_only=True))
    token = jax.numpy.zeros(2, int)
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
            check_contexts(config, contexts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, restored = tmp_path_factory.mktemp("models") / "tiny", restored_model(context_length=256)
    save_model(folder, restored.config.model, restored.params, restored.tokenizer)
    return folder


def test_a_trained_model_is_timed_with_caches_of_several_kinds(folder, tmp_path):
    decode_model.main(decode_model.Arguments(folder, ("float32", "int8", "compacted:4"), (1, 3), (300,), rounds=1,
                                             out=tmp_path / "decode.json"))
    rows = json.loads((tmp_path / "decode.json").read_text())["rows"]
    assert [(row["batch"], row["cache"]) for row in rows] == list(product((1, 3), ("float32", "int8", "compacted:4")))
    for row in rows:
        assert row["tokens/s"] == pytest.approx(1e3 * row["batch"] / row["ms a step"])
        whole = next(r for r in rows if (r["batch"], r["cache"]) == (row["batch"], "float32"))
        assert row["speed / float32"] == pytest.approx(whole["ms a step"] / row["ms a step"])
        assert row["MiB held"] / row["batch"] == pytest.approx(rows[[r["cache"] for r in rows].index(row["cache"])]
                                                               ["MiB held"])
    full, small, compacted = (row["MiB held"] for row in rows[:3])
    config = restored_model(context_length=256).config.model
    assert full == init_cache(config, 1, 300).nbytes / 2**20 and small < full / 3 and compacted < full


def test_a_compacted_cache_can_be_timed_again_and_again():
    restored = restored_model(context_length=256)
    make = decode_model.maker_of(restored.model, restored.params, "compacted:4", 1, (80,))
    loop = DecodeLoop(restored.model, restored.params, make)
    assert loop.seconds(80) > 0 and loop.seconds(80) > 0 and make(64).prefix.cache.lengths.tolist() == [16]
    assert make(64).positions.tolist() == [64]


@pytest.mark.parametrize(("changes", "told"), [
    ({"caches": ("int3",)}, "int3"), ({"caches": ("compacted:",)}, "whole number"), ({"batches": (0,)}, "1 or more"),
    ({"caches": ("compacted:70",), "contexts": (80,)}, "from 1 to the 64 tokens"), ({"contexts": (10,)}, "above 16"),
    ({"caches": ("int8", "int8")}, "each once"), ({"rounds": 0}, "rounds 0")])
def test_what_cannot_be_timed_is_refused(folder, changes, told):
    with pytest.raises(ConfigError, match=told):
        decode_model.main(decode_model.Arguments(folder, **changes))
