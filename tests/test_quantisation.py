"""Quantised caches: the rounding itself, what is stored, decoding from it, and the loss that it costs."""

import re
from dataclasses import dataclass, replace
from functools import lru_cache

import chex
import invariants
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import CASES, COMBINATIONS, PLAIN, model_config

import kvjax
from kvjax import quantisation
from kvjax.attention import GroupedQuery
from kvjax.attention.components import Component
from kvjax.attention.sharing import make_plan
from kvjax.cache import from_stored, to_stored, tokens_kept
from kvjax.config import Config, ConfigError, DataConfig, MeshConfig, TrainConfig
from kvjax.data.tokenizers import ByteTokenizer
from kvjax.evaluation import run
from kvjax.evaluation.cache_loss import _step, cache_loss, validation_cache_loss
from kvjax.evaluation.perplexity import evaluate
from kvjax.model.placement import parameter_shardings
from kvjax.quantisation import dequantise, quantise, scale_component
from kvjax.sharding import make_mesh, named

TYPES = ("int8", "float8_e4m3fn")
HEADS = Component("k", (4, 8), "k", "k_proj")
FACTOR = Component("a", (3, 2, 5), "a", "a", head_axis=1)
LATENT = Component("c", (16,), "c", "c", head_axis=None, window=9)


def config_of(name, **changes):
    return model_config(CASES[name].attention, **({"vocab_size": 64} | changes))


GQA, KPA = config_of("gqa"), config_of("kpa")
BYTES = config_of("gqa", vocab_size=256, context_length=150, positions="learned")  # which end within a chunk


def rows_of(component, seed=0, lead=(2, 3, 7)):
    """Rows whose tokens differ in size by up to 24 powers of ten."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((*lead, *component.features)) * 10.0 ** rng.integers(-12, 12, (*lead, 1))[
        (...,) + (None,) * (len(component.features) - 1)]
    return jnp.asarray(rows, jnp.float32)


def spread(scales, component):
    """Scales [..., groups] as float64 that broadcast against rows."""
    scales = np.asarray(scales, np.float64)
    return scales.reshape(*scales.shape, *[1] * (len(component.features) - 1))


@pytest.mark.parametrize("component", [HEADS, FACTOR, LATENT], ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_read_back_is_within_half_a_step(component, dtype):
    rows = rows_of(component)
    values, scales = jax.jit(lambda x: quantise(x, component, dtype))(rows)
    groups = {"k": 4, "a": 3, "c": 1}[component.name]
    assert (values.shape, values.dtype) == (rows.shape, jnp.dtype(dtype))
    assert (scales.shape, scales.dtype) == ((*rows.shape[:3], groups), jnp.bfloat16)
    largest = np.abs(np.asarray(rows, np.float64)).reshape(*rows.shape[:3], groups, -1).max(-1)
    np.testing.assert_allclose(np.asarray(scales, np.float64), largest / quantisation.LARGEST[dtype], rtol=2**-8)
    back = dequantise(values, scales, component, jnp.float32)
    assert (back.shape, back.dtype) == (rows.shape, jnp.float32)
    x, step = np.asarray(rows, np.float64), spread(scales, component)
    most = step / 2 if dtype == "int8" else np.maximum(np.abs(x) / 16, step / 1024)
    assert (np.abs(x - np.asarray(back, np.float64)) <= most * (1 + 1e-5)).all(), "the stored scale is the one used"
    if dtype == "int8":
        assert (np.abs(np.asarray(values, int)).reshape(*rows.shape[:3], groups, -1).max(-1) >= 126).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_zeros_stay_zeros_and_the_smallest_numbers_break_nothing(dtype):
    rows = jnp.zeros((4, *HEADS.features)).at[1, 2, 3].set(-2.0).at[2].set(1e-40)
    back = dequantise(*quantise(rows, HEADS, dtype), HEADS, jnp.float32)
    assert (back[0] == 0).all() and (back[3] == 0).all() and back[1, 2, 3] == pytest.approx(-2, rel=2**-8)
    assert (back[1].at[2, 3].set(0) == 0).all() and (jnp.abs(back[2]) < 1e-37).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_read_back_as_nan(dtype, bad):
    rows = rows_of(FACTOR).at[1, 2, 3, 0, 1, 4].set(bad)
    values, scales = quantise(rows, FACTOR, dtype)
    back = dequantise(values, scales, FACTOR, jnp.bfloat16)
    expected = np.zeros(rows.shape, bool)
    expected[1, 2, 3, 0] = True
    np.testing.assert_array_equal(np.isnan(back), expected)
    np.testing.assert_array_equal(np.isnan(scales), expected[..., 0, 0])


def test_scales_are_kept_and_split_as_their_component():
    kept = [(s.name, s.features, s.head_axis, s.window) for s in map(scale_component, (HEADS, FACTOR, LATENT))]
    assert kept == [("k_scale", (4,), 0, None), ("a_scale", (3,), None, None), ("c_scale", (1,), None, 9)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", PLAIN | COMBINATIONS)
def test_bytes_are_those_of_the_formula(name, dtype):
    config = (PLAIN | COMBINATIONS)[name]
    for length in (20, 1000):
        cache, plan = jax.eval_shape(lambda n=length: kvjax.init_cache(config, 3, n, dtype)), make_plan(config)
        elements = [(plan.slots(c.name) * tokens_kept(c, cache.capacity),
                     c.size + 2 * (c.features[0] if len(c.features) > 1 else 1)) for c in plan.cached]
        assert cache.nbytes == 3 * sum(entries * size for entries, size in elements)
        assert cache.nbytes == 3 * cache.capacity * kvjax.cache_bytes_per_token(config, dtype, length)
        assert [c.name for c in cache.table] == [n for c in plan.cached for n in (c.name, f"{c.name}_scale")]


def test_bytes_worked_out_by_hand():
    # Two components of two heads of 8; k and v factors of ranks 2, of 4 x 2 and 2 x 4.
    assert kvjax.cache_bytes_per_token(GQA, "int8") == 3 * 2 * 2 * (8 + 2)
    assert kvjax.cache_bytes_per_token(KPA, "float8_e4m3fn") == 3 * 4 * 2 * (8 + 2)


@lru_cache
def stepper(config):
    """Random parameters, and the compiled step of decoding with them: (params, tokens, cache, counts)."""
    model = kvjax.build_model(config)
    return invariants.random_params(config), jax.jit(lambda p, t, c, n: kvjax.decode(model, p, t, c, n))


def decoded_in_chunks(config, tokens, cache, chunks):
    """Logits of ragged, right-padded chunks (NaN where there are none), the cache, and how far each row got."""
    params, step = stepper(config)
    done, size = np.zeros(len(tokens), int), np.max(chunks)
    decoded = np.full((*tokens.shape, config.vocab_size), np.nan, np.float32)
    for counts in chunks:
        chunk = np.zeros((len(tokens), size), int)
        for row, n in enumerate(counts):
            chunk[row, :n] = tokens[row, done[row]:done[row] + n]
        logits, cache = step(params, chunk, cache, np.asarray(counts))
        for row, n in enumerate(counts):
            decoded[row, done[row]:done[row] + n] = logits[row, :n]
        done += counts
    return decoded, cache, done


def read_back(config, cache):
    """A float32 cache that holds what the quantised one reads back."""
    table = {c.name: c for c in cache.table}
    rows = {c.name: from_stored(c, cache.components[c.name]) for c in cache.table}
    components = {c.name: dequantise(rows[c.name], rows[f"{c.name}_scale"], table[c.name], jnp.float32)
                  for c in make_plan(config).cached}
    plain = kvjax.init_cache(config, len(cache.lengths), cache.capacity, "float32")
    return plain.replace(components={name: to_stored(table[name], x) for name, x in components.items()},
                         lengths=cache.lengths)


def relative_error(dtype):
    """Rounding error of normal rows, relative to them."""
    rows = jax.random.normal(jax.random.key(0), (1000, *HEADS.features))
    return float((dequantise(*quantise(rows, HEADS, dtype), HEADS, jnp.float32) - rows).std())


RAGGED = [(4, 5, 0), (1, 5, 5), (5, 0, 1), (1, 1, 1), (0, 1, 5), (3, 1, 0)]
TURNS = [(150, 7, 90), (3, 150, 150), (150, 60, 0), (47, 150, 150)]


@pytest.mark.parametrize(("name", "dtype", "window", "chunks"), [
    ("kpa", "int8", None, RAGGED), ("mla", "float8_e4m3fn", 40, TURNS)])
def test_ragged_decoding_is_close_to_the_full_pass(name, dtype, window, chunks):
    config = config_of(name, window=window)
    tokens = invariants.tokens_of(config, shape=(3, int(np.sum(chunks, axis=0).max())))
    full = jax.jit(kvjax.build_model(config).apply)({"params": stepper(config)[0]}, tokens)
    decoded, cache, done = decoded_in_chunks(config, tokens, kvjax.init_cache(config, 3, 400, dtype), chunks)
    assert not cache.overflowed.any()
    # One rounding of keys and values in each of three layers: the errors add up at most.
    error = np.concatenate([decoded[row, :n] - full[row, :n] for row, n in enumerate(done)])
    assert relative_error(dtype) / 10 < error.std() / full.std() < config.layers * relative_error(dtype)


def test_decoding_reads_what_is_stored():
    tokens = invariants.tokens_of(KPA, shape=(3, 14))
    _, cache, _ = decoded_in_chunks(KPA, tokens, kvjax.init_cache(KPA, 3, 400, "int8"), RAGGED)
    params, step = stepper(KPA)
    new, counts = tokens[:, :5], np.asarray([5, 5, 5])
    logits, exact = (step(params, new, held, counts)[0] for held in (cache, read_back(KPA, cache)))
    np.testing.assert_allclose(logits, exact, atol=1e-4)


def test_a_ring_keeps_the_scales_of_its_tokens():
    config = config_of("gqa", window=100)
    cache = kvjax.init_cache(config, 2, 1000, "int8")
    size, sent = 128, {}
    append = jax.jit(lambda c, rows: c.append(rows), donate_argnums=0)
    for number in range(4):
        sent[number] = {c.name: rows_of(c, number, (make_plan(config).slots(c.name), 2, 90))
                        for c in make_plan(config).cached}
        cache = append(cache, sent[number])
    for c in make_plan(config).cached:
        rows = jnp.concatenate([sent[number][c.name] for number in sent], axis=2)
        last = np.arange(4 * 90 - size, 4 * 90)
        for name, expected in zip((c.name, f"{c.name}_scale"), quantise(rows, c, "int8"), strict=True):
            held = next(s for s in cache.table if s.name == name)
            np.testing.assert_array_equal(from_stored(held, cache.components[name])[:, :, last % size],
                                          expected[:, :, last])


MESH = MeshConfig(data=2, fsdp=2, tensor=2)


def filled(config, dtype):
    """A cache of four rows of six random tokens."""
    rows = {c.name: jax.random.normal(jax.random.key(i), (make_plan(config).slots(c.name), 4, 6, *c.features))
            for i, c in enumerate(make_plan(config).cached)}
    return jax.jit(lambda rows: kvjax.init_cache(config, 4, 12, dtype).append(rows))(rows)


@pytest.mark.parametrize(("name", "dtype", "scales", "axes"), [
    ("gqa", "int8", "k_scale", (None, ("data", "fsdp"), "tensor")),
    ("kpa", "float8_e4m3fn", "k_a_scale", (None, ("data", "fsdp")))])
def test_eight_devices_store_what_one_stores(name, dtype, scales, axes):
    alone = filled(config_of(name), dtype)
    with jax.set_mesh(make_mesh(MESH)):
        cache = filled(config_of(name), dtype)
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, cache.components), jax.tree.map(np.asarray, alone.components))
    assert tuple(cache.components[scales].sharding.spec)[:len(axes)] == axes


def test_eight_devices_decode_what_one_decodes_and_move_no_cache():
    (params, step), mesh = stepper(GQA), make_mesh(MESH)
    tokens, counts = invariants.tokens_of(GQA, shape=(4, 1)), np.ones(4, int)
    alone, _ = step(params, tokens, filled(GQA, "int8"), counts)
    placed = jax.device_put((params, tokens), (parameter_shardings(GQA, mesh), named(mesh, "batch")))
    with jax.set_mesh(mesh):
        inputs = *placed, filled(GQA, "int8"), counts
        compiled = step.lower(*inputs).compile()
        split, _ = compiled(*inputs)
    np.testing.assert_allclose(split, alone, atol=1e-4)
    moved = re.findall(r"= (.*) (?:all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)(?:-start)?\(",
                       compiled.as_text())
    assert moved and not [shapes for shapes in moved if ",128]" in shapes], "no stored token leaves its device"


@pytest.mark.parametrize("dtype", ["int32", "int4", "uint8", "float64", "float8_e5m2", "nonsense", jnp.bool_])
def test_other_types_are_named_with_the_choices(dtype):
    name = dtype if isinstance(dtype, str) else "bool"
    with pytest.raises(ConfigError, match=f"type {name}: choose a floating type .*bfloat16.*int8, float8_e4m3fn"):
        kvjax.init_cache(GQA, 1, 1, dtype)
    with pytest.raises(ConfigError, match=name):
        kvjax.cache_bytes_per_token(GQA, dtype)


def test_a_type_that_is_not_to_be_had_is_refused(monkeypatch):
    def refuse(*_):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED")
    with monkeypatch.context() as patch:
        patch.setattr(quantisation.jnp, "ones", refuse)
        with pytest.raises(ConfigError, match="float8_e4m3fn: this JAX, or the cpu devices here"):
            kvjax.init_cache(GQA, 1, 1, "float8_e4m3fn")
    monkeypatch.delattr(quantisation.jnp, "float8_e4m3fn")
    with pytest.raises(ConfigError, match="do not have the type; choose int8"):
        kvjax.init_cache(GQA, 1, 1, "float8_e4m3fn")


@kvjax.register("scaled_twice")
@dataclass(frozen=True)
class ScaledTwice(GroupedQuery):
    """Keeps a component under the name of another one's scales."""

    def components(self):
        return *super().components(), Component("k_scale", (2,), "k_scale", "k_scale")


def test_a_component_named_as_the_scales_of_another_is_refused():
    config = model_config(ScaledTwice(heads=4, kv_heads=2, head_dim=8))
    assert "k_scale" in kvjax.init_cache(config, 1, 1).components
    with pytest.raises(ConfigError, match="k_scale.*names must be unique"):
        kvjax.init_cache(config, 1, 1, "int8")


def with_type(cache, name, dtype):
    return cache.replace(components=cache.components | {name: cache.components[name].astype(dtype)})


@pytest.mark.parametrize("cache", [
    with_type(kvjax.init_cache(GQA, 1, 8), "k", "int8"), with_type(kvjax.init_cache(GQA, 1, 8, "int8"), "v", "float32"),
    with_type(kvjax.init_cache(GQA, 1, 8, "int8"), "k_scale", "float32"),
    with_type(kvjax.init_cache(GQA, 1, 8), "v", "int32"), kvjax.init_cache(KPA, 1, 8, "int8")])
def test_a_cache_that_init_cache_did_not_make_is_refused(cache):
    with pytest.raises(ValueError, match="the cache is of another model.*init_cache"):
        kvjax.decode(kvjax.build_model(GQA), {}, np.zeros((1, 1), int), cache)


def test_generation_from_a_quantised_cache():
    (params, step), prompts = stepper(GQA), [[3], [5], [27], [60]]
    drawn = kvjax.generate(kvjax.build_model(GQA), params, prompts, max_new_tokens=6, temperature=0, cache_dtype="int8")
    cache, texts = kvjax.init_cache(GQA, 4, 12, "int8"), np.asarray(prompts)
    for _ in range(6):
        logits, cache = step(params, texts[:, -1:], cache, np.ones(4, int))
        texts = np.concatenate([texts, logits.argmax(-1)], axis=1)
    assert texts[:, 1:].tolist() == drawn
    with pytest.raises(ConfigError, match="type int16"):
        kvjax.generate(kvjax.build_model(GQA), params, prompts, max_new_tokens=6, cache_dtype="int16")


@pytest.fixture(scope="module")
def batches():
    """Two batches of running text, longer than two chunks; targets that do not count, of each batch another share."""
    rng = np.random.default_rng(0)
    draw = lambda: rng.integers(0, BYTES.vocab_size, (4, 150), np.int32)
    return [{"tokens": draw(), "targets": draw(), "loss_mask": (rng.random((4, 150)) < share).astype(np.float32)}
            for share in (0.9, 0.1)]


MODEL = kvjax.build_model(BYTES)


def test_the_loss_that_a_type_costs(batches):
    params = stepper(BYTES)[0]
    full, before = evaluate(MODEL, params, batches), _step._cache_size()
    plain = cache_loss(MODEL, params, batches, "float32")
    assert plain.loss == pytest.approx(full["loss"], abs=1e-5) and plain.tokens == full["tokens"]
    assert plain.difference == 0
    lost = cache_loss(MODEL, params, batches, "int8")
    assert lost.unquantised_loss == plain.loss and lost.dtype == "int8"
    assert 1e-6 < abs(lost.difference) < 0.01
    assert _step._cache_size() == before + 2, "one step for each type serves all chunks"


@pytest.mark.parametrize("length", [3, 65, 72])
def test_a_short_last_chunk_is_read_as_the_others_are(length):
    """All chunks are of one length, so that a kernel for few new tokens, which takes no such cache, is never asked."""
    tokens = np.random.default_rng(1).integers(0, BYTES.vocab_size, (2, length), np.int32)
    params, batch = stepper(BYTES)[0], {"tokens": tokens, "targets": tokens}
    by_gpu = kvjax.build_model(replace(BYTES, kernel="gpu"))
    assert cache_loss(by_gpu, params, [batch], "int8") == cache_loss(MODEL, params, [batch], "int8")
    with pytest.raises(ValueError, match="a cache of int8: the GPU kernel reads bfloat16 or float16 alone"):
        cache_loss(by_gpu, params, [batch], "int8", chunk=8)


def test_the_loss_on_a_mesh(batches):
    mesh = make_mesh(MESH)
    params, before = jax.device_put(stepper(BYTES)[0], parameter_shardings(BYTES, mesh)), _step._cache_size()
    assert cache_loss(MODEL, params, batches, "float32", mesh=mesh).loss == pytest.approx(
        evaluate(MODEL, stepper(BYTES)[0], batches)["loss"], abs=1e-5)
    assert _step._cache_size() == before + 1


def test_rows_that_are_packed_and_rows_that_do_not_count_are_refused(batches):
    params = stepper(BYTES)[0]
    packed = batches[0] | {"segment_ids": np.ones((4, 150), np.int32)}
    with pytest.raises(ConfigError, match="pack=False"):
        cache_loss(MODEL, params, [packed], "int8")
    for nothing in ([], [batches[0] | {"loss_mask": np.zeros((4, 150), np.float32)}]):
        with pytest.raises(ConfigError, match="no tokens to evaluate"):
            cache_loss(MODEL, params, nothing, "int8")


def test_the_held_out_split_of_a_run_is_read_as_running_text(tmp_path):
    for i in range(8):
        (tmp_path / f"{i}.txt").write_text("to be or not to be " * (10 * i + 2))
    config = Config(model=BYTES, train=TrainConfig(steps=3000, batch_size=4), data=DataConfig(
        source=f"text:{tmp_path}", validation_fraction=0.5, pack=True))
    restored = run.Restored(config, MODEL, stepper(BYTES)[0], ByteTokenizer(), 0,
                            make_mesh(MeshConfig(), jax.devices()[:1]))
    lost = validation_cache_loss(restored, "float32")
    full = run.validation_loss(replace(restored, config=replace(config, data=replace(config.data, pack=False))))
    assert lost.tokens == full["tokens"] and lost.loss == pytest.approx(full["loss"], abs=1e-5)
    assert validation_cache_loss(restored, "float32", limit=1).tokens < lost.tokens
