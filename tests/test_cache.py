"""The cache: append, rings, overflow, layout."""

import chex
import invariants
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import CASES, model_config

import kvjax
from kvjax.attention.components import Component
from kvjax.attention.sharing import make_plan
from kvjax.cache import BLOCK, block_size, capacity, from_stored, to_stored

KPA = model_config(CASES["kpa"].attention)


def new_rows(config, batch, length, start):
    """Rows that tell their slot, batch row and token."""
    def rows(c):
        shape = (make_plan(config).slots(c.name), batch, length, *c.features)
        slot, row, token = (jnp.arange(n).reshape((-1,) + (1,) * (len(shape) - 1 - i)) for i, n in enumerate(shape[:3]))
        return jnp.broadcast_to(slot * 10_000.0 + row * 1000 + (start[:, None] + jnp.arange(length)).reshape(
            (1, batch, length) + (1,) * len(c.features)) + 0 * token, shape)
    return {c.name: rows(c) for c in make_plan(config).cached}


def stored_tokens(cache, name):
    """[slots, B, S] of what `new_rows` wrote."""
    return np.asarray(cache.components[name][:, :, 0]) % 1000


@pytest.mark.parametrize("chunks", [[3, 1, 1], [64, 64], [1] * 5])
def test_append_puts_tokens_behind_each_other(chunks):
    cache = kvjax.init_cache(KPA, 2, 128)
    for size in chunks:
        cache = cache.append(new_rows(KPA, 2, size, cache.lengths))
    total = sum(chunks)
    for name in cache.components:
        assert (stored_tokens(cache, name)[..., :total] == np.arange(total)).all()
        assert (cache.components[name][..., total:] == 0).all()
        slots = np.asarray(cache.components[name][:, 1, :, 0])
        assert (slots == np.arange(len(slots))[:, None] * 10_000 + 1000).all()
    np.testing.assert_array_equal(cache.lengths, [total, total])


def test_counts_say_what_is_kept():
    cache = kvjax.init_cache(KPA, 3, 10)
    for counts in ([2, 0, 5], [3, 4, 0]):
        cache = cache.append(new_rows(KPA, 3, 5, cache.lengths), jnp.asarray(counts))
    np.testing.assert_array_equal(cache.lengths, [5, 4, 5])
    held = stored_tokens(cache, "k_a")[0]
    for row, n in enumerate((5, 4, 5)):
        assert (held[row, :n] == np.arange(n)).all() and (held[row, n:] == 0).all()


def test_overflow_known_before_running_raises():
    cache = kvjax.init_cache(KPA, 2, 10)
    assert cache.capacity == 128
    with pytest.raises(ValueError, match="129 new tokens do not fit a cache of 128"):
        cache.append(new_rows(KPA, 2, 129, cache.lengths))
    cache = cache.append(new_rows(KPA, 2, 100, cache.lengths))
    with pytest.raises(ValueError, match="room for 128 tokens and would hold 129"):
        cache.append(new_rows(KPA, 2, 29, cache.lengths))
    with pytest.raises(ValueError, match="129"):
        model = kvjax.build_model(KPA)
        params = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"])
        jax.eval_shape(lambda p, c: kvjax.decode(model, p, jnp.zeros((2, 129), jnp.int32), c), params, cache)


def test_overflow_under_jit_is_dropped_and_reported():
    cache = kvjax.init_cache(KPA, 2, 128)
    append = jax.jit(lambda c, n: c.append(new_rows(KPA, 2, 60, c.lengths), n))
    for counts in ([60, 60], [60, 1], [8, 60], [60, 60]):
        before, cache = cache, append(cache, jnp.asarray(counts))
    np.testing.assert_array_equal(before.lengths, [128, 121])
    np.testing.assert_array_equal(before.overflowed, [False, False])
    np.testing.assert_array_equal(cache.lengths, [128, 128])
    np.testing.assert_array_equal(cache.overflowed, [True, True])
    assert (stored_tokens(cache, "v_b") == np.arange(128)).all(), "what fitted is there, what did not changed nothing"


@pytest.mark.parametrize("window", [100, 130])
def test_ring_keeps_the_last_tokens(window):
    config = model_config(CASES["gqa"].attention, window=window)
    cache = kvjax.init_cache(config, 2, 1000)
    size = cache.components["k"].shape[-1]
    assert size == capacity(window) < cache.capacity == 1024
    append = jax.jit(lambda c, rows, n: c.append(rows, n))
    for length, counts in ((90, [90, 11]), (90, [33, 90]), (1, [1, 1]), (300, [300, 290]), (7, [7, 0])):
        cache = append(cache, new_rows(config, 2, length, cache.lengths), jnp.asarray(counts))
        for row, n in enumerate(np.asarray(cache.lengths)):
            last = np.arange(max(0, n - size), n)
            assert (stored_tokens(cache, "k")[:, row, last % size] == last).all()


def test_appending_is_pure_and_donatable():
    cache = kvjax.init_cache(KPA, 2, 10)
    longer = cache.append(new_rows(KPA, 2, 3, cache.lengths))
    chex.assert_trees_all_equal_shapes_and_dtypes(cache, longer)
    assert all((c == 0).all() for c in cache.components.values()) and (cache.lengths == 0).all()
    jax.jit(lambda c: c.append(new_rows(KPA, 2, 3, c.lengths)), donate_argnums=0)(longer)


def test_stored_layout_has_heads_outermost_and_tokens_last():
    component = Component("a", (3, 4, 5), "a", "a", head_axis=1)
    rows = jax.random.normal(jax.random.key(0), (2, 6, 7, 3, 4, 5))
    stored = to_stored(component, rows)
    assert stored.shape == (2, 6, 60, 7)
    np.testing.assert_array_equal(stored[1, 2, 15:30, 3].reshape(3, 5), rows[1, 2, 3, :, 1])
    np.testing.assert_array_equal(from_stored(component, stored), rows)


@pytest.mark.parametrize(("length", "block", "whole"), [
    (1, 128, 128), (128, 128, 128), (129, 256, 256), (512, 512, 512), (513, 512, 1024), (5000, 512, 5120)])
def test_capacity_is_whole_blocks(length, block, whole):
    assert (block_size(length), capacity(length)) == (block, whole)


def test_decoding_over_several_blocks_equals_the_full_pass():
    model, length = kvjax.build_model(KPA), 2 * BLOCK + 10
    tokens = jax.random.randint(jax.random.key(0), (2, length), 0, KPA.vocab_size)
    params = jax.jit(model.init)(jax.random.key(1), tokens)["params"]
    full = jax.jit(model.apply)({"params": params}, tokens)
    step = jax.jit(lambda t, c: kvjax.decode(model, params, t, c))
    cache = kvjax.init_cache(KPA, 2, length)
    for start, stop in ((0, BLOCK + 5), (BLOCK + 5, 2 * BLOCK + 9), (2 * BLOCK + 9, length)):
        logits, cache = step(tokens[:, start:stop], cache)
        np.testing.assert_allclose(logits, full[:, start:stop], atol=1e-4)


@pytest.mark.parametrize("window", [None, 300])
def test_a_cache_in_one_piece_is_read_where_it_lies(window):
    """Of one layer of whole heads, on a CPU: over several blocks, rows of any length, without a copy of the cache."""
    config, length = model_config(CASES["gqa"].attention, layers=1, window=window), BLOCK + 20
    model, params, tokens = kvjax.build_model(config), invariants.random_params(config), invariants.tokens_of(
        config, shape=(3, length))
    full = jax.jit(model.apply)({"params": params}, tokens)
    cache, held = kvjax.init_cache(config, 3, length), np.array([length - 3, 0, 150])
    step = jax.jit(lambda p, t, c, n: kvjax.decode(model, p, t, c, n), donate_argnums=2)
    _, cache = step(params, tokens[:, :length - 3], cache, held)
    compiled = step.lower(params, tokens[:, :2], cache, np.full(3, 2)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < cache.nbytes
    new = np.stack([tokens[row, n:n + 2] for row, n in enumerate(held)])
    logits, _ = compiled(params, new, cache, np.full(3, 2))
    for row, n in enumerate(held):
        np.testing.assert_allclose(logits[row], full[row, n:n + 2], atol=1e-4)


@pytest.mark.parametrize(("arguments", "message"), [((0, 5), "batch=0"), ((1, 0), "max_length=0")])
def test_bad_sizes_are_refused(arguments, message):
    with pytest.raises(kvjax.ConfigError, match=message):
        kvjax.init_cache(KPA, *arguments)
    with pytest.raises(kvjax.ConfigError, match="floating"):
        kvjax.init_cache(KPA, 1, 1, jnp.int32)


@pytest.mark.parametrize(("tokens", "counts", "message"), [
    (np.zeros((3, 1), int), None, r"\(3, 1\).*B = 2"),
    (np.zeros((2, 5), int), [9, 1], r"counts are \[9, 1\].*between 0 and the 5"),
    (np.zeros((2, 5), int), [-2, 1], r"counts are \[-2, 1\]"),
    (np.zeros((2, 5), int), [1], r"counts have shape \(1,\)"),
    (np.full((2, 5), KPA.vocab_size), None, "ids from 61 to 61: the vocabulary has ids 0 to 60"),
    (np.full((2, 5), -1), None, "ids from -1 to -1"),
])
def test_tokens_and_counts_that_make_no_sense_are_refused(tokens, counts, message):
    with pytest.raises(ValueError, match=message):
        kvjax.decode(kvjax.build_model(KPA), {}, tokens, kvjax.init_cache(KPA, 2, 8), counts)


def test_padding_may_hold_any_id():
    model, params, tokens, full = invariants.full_pass(KPA)
    padded = tokens[:, :5].at[:, 3:].set(-1)
    logits, _ = kvjax.decode(model, params, padded, kvjax.init_cache(KPA, invariants.BATCH, 8), [3, 3, 3])
    np.testing.assert_allclose(logits[:, :3], full[:, :3], atol=1e-4)


@pytest.mark.parametrize("other", [dict(window=16), dict(layers=2)])
def test_a_cache_of_another_model_is_refused(other):
    cache = kvjax.init_cache(model_config(CASES["kpa"].attention, **other), 1, 8)
    with pytest.raises(ValueError, match="the cache is of another model"):
        kvjax.decode(kvjax.build_model(KPA), {}, np.zeros((1, 1), int), cache)


def test_decoding_over_many_turns_of_a_ring_equals_the_full_pass():
    config, length = model_config(CASES["gqa"].attention, window=40), 400
    model = kvjax.build_model(config)
    tokens = jax.random.randint(jax.random.key(0), (2, length), 0, config.vocab_size)
    params = jax.jit(model.init)(jax.random.key(1), tokens)["params"]
    full = jax.jit(model.apply)({"params": params}, tokens)
    step = jax.jit(lambda t, c, n: kvjax.decode(model, params, t, c, n))
    cache, done = kvjax.init_cache(config, 2, length), np.zeros(2, int)
    assert cache.components["k"].shape[-1] == 128
    for counts in [(150, 7), (3, 150), (150, 60), (97, 150), (0, 33)]:  # chunks longer than the ring among them
        chunk = np.zeros((2, 150), int)
        for row, n in enumerate(counts):
            chunk[row, :n] = tokens[row, done[row]:done[row] + n]
        logits, cache = step(chunk, cache, np.asarray(counts))
        for row, n in enumerate(counts):
            np.testing.assert_allclose(logits[row, :n], full[row, done[row]:done[row] + n], atol=1e-4)
        done += counts
    np.testing.assert_array_equal(done, [400, 400])


def test_windowed_caches_hold_whole_blocks_of_the_window():
    config = model_config(CASES["gqa"].attention, window=130)
    per_token = CASES["gqa"].elements * config.layers * 4
    for length, room, kept in ((100, 128, 128), (1000, 1024, 256)):
        cache = kvjax.init_cache(config, 2, length)
        assert (cache.capacity, cache.nbytes) == (room, 2 * per_token * kept)
        assert kvjax.cache_bytes_per_token(config, length=length) == per_token * kept / room
    config = model_config(CASES["gqa"].attention, window=40)
    cache = jax.jit(lambda c, n: c.append(new_rows(config, 2, 100, c.lengths), n))(
        kvjax.init_cache(config, 2, 512).replace(lengths=jnp.asarray([500, 3])), jnp.asarray([100, 100]))
    held = stored_tokens(cache, "k")[0, 0]
    assert (held[np.arange(500, 512) % 128] == np.arange(500, 512)).all()
    assert held.max() == 511, "what overflows is dropped"
    np.testing.assert_array_equal(cache.overflowed, [True, False])


def test_learned_positions_end_where_their_table_ends():
    """The cache has room for more: it is the table that must not be read past its end."""
    config = model_config(CASES["gqa"].attention, positions="learned", context_length=8)
    model, params = kvjax.build_model(config), invariants.random_params(config)
    tokens = invariants.tokens_of(config, shape=(2, 9))
    _, cache = kvjax.decode(model, params, tokens[:, :8], kvjax.init_cache(config, 2, 8))
    with pytest.raises(ValueError, match="would reach 9 tokens.*learned positions has 8"):
        kvjax.decode(model, params, tokens[:, 8:], cache)
    logits, _ = jax.jit(lambda cache: kvjax.decode(model, params, tokens[:, 8:], cache))(cache)
    assert np.isnan(logits).all(), "under jit, where lengths are not known"
    with pytest.raises(ValueError, match="length 9: the table of learned positions has 8"):
        model.apply({"params": params}, tokens)
    with pytest.raises(kvjax.ConfigError, match="reach 9 tokens: the table of learned positions has 8"):
        kvjax.generate(model, params, [[1, 2, 3], [4]], max_new_tokens=6)
