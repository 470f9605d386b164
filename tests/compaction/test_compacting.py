"""A compacted cache is a cache: of every variant it decodes, grows, and is compacted again."""

from dataclasses import replace
from functools import lru_cache, partial

import invariants
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp
from variants import CASES, GQA, KPA, MLA, NEAR, SHARINGS, model_config

import kvjax
from kvjax.ahead_of_time import single_device_mesh, tpu_devices
from kvjax.attention import CrossLayer, PathConcat, PathResidual, SkipV1
from kvjax.attention.kronecker import kronecker_mean
from kvjax.attention.partials import MASKED
from kvjax.benchmarks import decode_memory
from kvjax.compaction import entries, matched_factors, references
from kvjax.compaction.attention_matching import attention_outputs
from kvjax.compaction.compacting import compact, init_compacted
from kvjax.compaction.in_order import compact_in_order
from kvjax.compaction.matched_heads import problem_of
from kvjax.compaction.slots import slots_by_head
from kvjax.config import ConfigError, MeshConfig
from kvjax.model.placement import parameter_shardings
from kvjax.model.prefix import attend_to_prefix
from kvjax.sharding import make_mesh

LENGTHS = (13, 9)
"""Tokens of each row that are compacted; the rest of 20 follow."""
PLAIN = {name: model_config(CASES[name].attention)
         for name in ("mha", "gqa_norm_and_biases", "mqa", "mla_query_latent")}
SHARED = {name: model_config(GQA, sharing=shared.sharing, layers=shared.layers) for name, shared in SHARINGS.items()}
LATENT = {name: model_config(MLA, sharing=SHARINGS[name].sharing, layers=SHARINGS[name].layers)
          for name in ("cla2", "skip_v1", "concat2", "yoco")}
FACTORS = {"kpa": model_config(KPA)} | {
    f"kpa_{name}": model_config(KPA, sharing=SHARINGS[name].sharing, layers=SHARINGS[name].layers)
    for name in ("cla2", "skip_v1")}
CONFIGS = PLAIN | SHARED | {f"mla_{name}": config for name, config in LATENT.items()} | FACTORS
DEFAULT = ("mla_query_latent", "cla2", "skip_v1", "yoco", "residual2", "kpa_skip_v1")


def also(*names):
    """Parameters of the full suite."""
    return [pytest.param(name, marks=pytest.mark.full) for name in names]


@lru_cache
def prefilled(config, dtype=None, lengths=LENGTHS):
    """(model, params, tokens, cache of the first tokens, references of the context)."""
    model, params = kvjax.build_model(config), invariants.random_params(config)
    tokens = invariants.tokens_of(config, shape=(len(lengths), 20))
    cache = kvjax.init_cache(config, len(lengths), 20, dtype)
    _, cache = invariants.step_of(config)(params, tokens[:, :max(lengths)], cache, np.asarray(lengths))
    found = references.of_context(model, params, tokens[:, :max(lengths)], jnp.asarray(lengths))
    return model, params, tokens, cache, found


def following(config, params, tokens, cache, lengths=LENGTHS, steps=(2, 2, 2)):
    """Logits [B, 6, V] of the next tokens of each row, and the cache after them."""
    step, done, logits = invariants.step_of(config), np.asarray(lengths), []
    for count in steps:
        chunk = np.stack([np.asarray(tokens)[row, at:at + count] for row, at in enumerate(done)])
        made, cache = step(params, chunk, cache, np.full(len(done), count))
        logits.append(np.asarray(made))
        done = done + count
    return np.concatenate(logits, axis=1), cache


@pytest.mark.parametrize("name", [*DEFAULT, *also(*(name for name in CONFIGS if name not in DEFAULT))])
def test_copying_all_tokens_changes_nothing(name):
    config = CONFIGS[name]
    model, params, tokens, cache, found = prefilled(config)
    compacted = compact(model, params, cache, max(LENGTHS), found, method="recent")
    assert (compacted.lengths == 0).all() and (compacted.positions == cache.positions).all()
    expected, _ = following(config, params, tokens, cache)
    logits, longer = following(config, params, tokens, compacted)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    np.testing.assert_array_equal(longer.positions, cache.positions + 6)


@pytest.mark.parametrize("name", ["mla_query_latent", "cla2", *also("gqa_norm_and_biases", "residual2")])
@pytest.mark.parametrize("fold", [False, True])
def test_fitting_as_many_tokens_as_there_are_changes_little(name, fold):
    """Fits of full rank; a fold is inexact where it is not asked for, and its values make up for that."""
    config = (CONFIGS | SHARED)[name]
    lengths = (4, 4)
    model, params, tokens, cache, _ = prefilled(config, lengths=lengths)
    found = references.of_context(model, params, tokens)
    compacted = compact(model, params, cache, 4, found, fold=fold)
    expected, _ = following(config, params, tokens, cache, lengths)
    logits, _ = following(config, params, tokens, compacted, lengths)
    np.testing.assert_allclose(logits, expected, atol=5e-3)
    assert ("bias" in compacted.prefix.cache.components) == (not fold)


def check_bias_of_factors(config, params, cache, compacted, found):
    """What is read of a prefix is attention with the biases that give kept tokens the mass of all."""
    (entry, *_), held = entries.entries_of(config), compacted.prefix.cache
    full, few = (matched_factors.problem_of(config, params, c, 0, entry, found.read_by(entry.readers))
                 for c in (cache, compacted))
    mass = [np.exp(np.asarray(p.scores + p.bias[:, None, None], np.float64)).sum(-1)[:, :, :9] for p in (full, few)]
    assert np.abs(np.log(mass[1] / mass[0])).mean() < 0.5 < np.log(13 / 6)
    variant, layer = config.attention, matched_factors.Factors(config, entry.places[0]).layer
    queries = jax.random.normal(jax.random.key(0), (2, 1, variant.heads, variant.head_dim))
    seen = attend_to_prefix("xla", variant, layer, ({},), queries, compacted.prefix, 0, jnp.full((2, 1), 20),
                            jnp.float32)
    keys, values = (kronecker_mean(*matched_factors._factors(layer, few.rows, *names))
                    for names in (("k_a", "k_b"), ("v_a", "v_b")))
    scores = jnp.einsum("bnhd,bshd->bhns", queries, keys) * variant.head_dim**-0.5 + few.bias[:, None, None]
    expected = jnp.einsum("bhns,bshd->bnhd", jax.nn.softmax(scores), values)
    np.testing.assert_allclose(seen.out, expected, atol=1e-5)
    assert np.abs(np.asarray(held.components["bias"])[..., :6]).max() > 0.1


@pytest.mark.parametrize("name", ["kpa", *also("kpa_skip_v1")])
def test_factors_are_fitted_for_all_heads_together(name):
    config = FACTORS[name]
    model, params, tokens, cache, found = prefilled(config)
    expected, _ = following(config, params, tokens, cache)
    error = {}
    for method in ("random", "am_highest"):
        compacted = compact(model, params, cache, 6, found, method=method)
        logits, _ = following(config, params, tokens, compacted)
        error[method] = np.square(logits - expected).mean()
    assert error["am_highest"] < 0.5 * error["random"]
    check_bias_of_factors(config, params, cache, compacted, found)
    assert compacted.prefix.cache.components["bias"].shape == (3, 2, 1, 128)
    broken = cache.replace(components=cache.components | {"k_a": cache.components["k_a"].at[0, 0, 0, 2].set(jnp.nan)})
    with pytest.raises(ValueError, match="k_a at .* is nan"):
        compact(model, params, broken, 6, found)
    again = compact(model, params, compacted, 6, found, method="recent")
    np.testing.assert_allclose(following(config, params, tokens, again)[0], logits, atol=1e-4)
    with pytest.raises(ConfigError, match="one more rank"):
        compact(model, params, cache, 6, found, fold=True)


def test_fewer_slots_hold_the_newest_tokens_and_fewer_bytes():
    config = replace(PLAIN["mha"], context_length=2048)
    model, params = kvjax.build_model(config), invariants.random_params(config)
    tokens = invariants.tokens_of(config, shape=(1, 600))
    _, cache = invariants.step_of(config)(params, tokens, kvjax.init_cache(config, 1, 700), np.asarray([600]))
    found = references.of_context(model, params, tokens).thinned(32)
    compacted = compact(model, params, cache, 100, found, method="recent", room=20)
    for number, entry in enumerate(entries.entries_of(config)):
        old, new = (problem_of(config, params, c, number, entry, found.read_by(entry.readers)).tokens
                    for c in (cache, compacted))
        real = np.asarray(new.bias[0, 0] == 0)
        assert real.sum() == 100
        for x, y in zip(new[:2], old[:2], strict=True):
            kept, newest = np.asarray(x)[:, :, real], np.asarray(y)[:, :, 500:600]
            np.testing.assert_allclose(np.sort(kept, axis=2), np.sort(newest, axis=2), atol=1e-5)
    assert compacted.nbytes == cache.nbytes * (128 + 128) // 1024, "100 slots and 20 new tokens, in tiles of 128"


def test_layers_that_read_the_same_entries_share_one():
    readers = lambda config: [entry.readers for entry in entries.entries_of(config)]
    assert readers(PLAIN["mha"]) == [(0,), (1,), (2,)]
    assert readers(SHARED["cla2"]) == [(0, 1), (2, 3)]
    assert readers(SHARED["yoco"]) == [(2, 3)], "the lower half keeps its windows"
    assert readers(SHARED["cla_v"]) == [(0,), (1,), (2,), (3,)], "values are shared, keys are not"
    assert readers(SHARED["skip_v1"]) == [(0,), (1,), (2,)]
    assert readers(SHARED["residual2"]) == [(0,), (1,), (2,), (3,)]


def test_queries_of_all_readers_are_pooled():
    config = SHARED["cla2"]
    _, params, _, cache, found = prefilled(config)
    problem = problem_of(config, params, cache, 0, entries.entries_of(config)[0], found.read_by((0, 1)))
    assert problem.queries.shape == (2, GQA.kv_heads, 2 * 13 * GQA.heads // GQA.kv_heads, GQA.head_dim)
    assert (problem.counted.sum(-1) == np.asarray(LENGTHS)[:, None] * 4).all()
    assert ((problem.tokens.bias == 0).sum(-1) == np.asarray(LENGTHS)[:, None]).all()


@pytest.mark.parametrize("name", ["residual2", "yoco", *also("gqa_norm_and_biases", "mla_query_latent", "kpa")])
def test_kept_tokens_and_compacting_again(name):
    """With all tokens copied, a part at a time, decoding goes on as if nothing had happened."""
    config = CONFIGS[name]
    model, params, tokens, cache, found = prefilled(config)
    expected, _ = following(config, params, tokens, cache)
    compacted = compact(model, params, cache, 9, found, method="recent", keep=4)
    assert (compacted.lengths == 4).all() and (compacted.positions == cache.positions).all()
    first, compacted = following(config, params, tokens, compacted, steps=(2,))
    compacted = compact(model, params, compacted, 14, found, method="recent", keep=1)
    assert compacted.prefix.cache.lengths.tolist() == [14, 10] and compacted.lengths.tolist() == [1, 1]
    second, _ = following(config, params, tokens, compacted, np.asarray(LENGTHS) + 2, steps=(2, 2))
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), expected, atol=1e-4)


def test_biases_survive_compacting_again():
    config = PLAIN["gqa_norm_and_biases"]
    model, params, tokens, cache, found = prefilled(config)
    once = compact(model, params, cache, 4, found)
    again = compact(model, params, once, 4, found, method="recent")
    expected, _ = following(config, params, tokens, once)
    assert np.abs(np.asarray(once.prefix.cache.components["bias"])).max() > 0.1
    np.testing.assert_allclose(following(config, params, tokens, again)[0], expected, atol=1e-4)


def test_the_newest_are_still_known_when_a_cache_is_compacted_again():
    config = PLAIN["mqa"]
    model, params, tokens, cache, found = prefilled(config, lengths=(12,))
    half = compact(model, params, prefilled(config, lengths=(8,))[3], 6, found, method="recent")
    _, grown = invariants.step_of(config)(params, tokens[:, 8:12], half, np.asarray([4]))
    again = compact(model, params, grown, 6, found, method="recent")
    entry = entries.entries_of(config)[0]
    kept, all_of_them = (problem_of(config, params, c, 0, entry, found.read_by(entry.readers)).tokens.keys
                         for c in (again, cache))
    np.testing.assert_allclose(kept[:, :, :6], all_of_them[:, :, 6:12], atol=1e-5)


@pytest.mark.parametrize("method, fold", [("am_highest", False), ("am_highest", True), ("recent", False)])
def test_what_a_type_cannot_hold_is_refused(method, fold):
    config = PLAIN["mha"]
    model, params, _, cache, found = prefilled(config)
    large = cache.replace(components=cache.components | {"v": cache.components["v"] * 1e5})
    half = large.replace(components={name: x.astype(jnp.float16) for name, x in large.components.items()})
    with pytest.raises(ValueError, match="overflows a cache of float16|not finite|at .* is (inf|nan|-inf)"):
        compact(model, params, half, 5, found, method=method, fold=fold)
    with pytest.raises(ConfigError, match="references are inputs of 1 layers"):
        compact(model, params, cache, 5, found.read_by((0,)))
    with pytest.raises(ConfigError, match="more was appended"):
        compact(model, params, cache.replace(overflowed=jnp.asarray([False, True])), 5, found)


@pytest.mark.parametrize("name", ["yoco", *also("mqa", "cla2", "denseformer", "kpa_skip_v1")])
def test_compacting_in_order(name):
    """Copying all tokens, the reference tokens pass the layers as if nothing had happened, and so do those after."""
    config = CONFIGS[name]
    model, params, tokens, cache, _ = prefilled(config)
    again = tokens[:, :max(LENGTHS)]
    compacted = compact_in_order(model, params, cache, max(LENGTHS), again, jnp.asarray(LENGTHS), method="recent")
    expected, _ = following(config, params, tokens, cache)
    np.testing.assert_allclose(following(config, params, tokens, compacted)[0], expected, atol=1e-4)


def test_in_order_the_first_layer_is_fitted_as_ever_and_later_ones_to_what_they_will_be_asked():
    config = PLAIN["mqa"]
    model, params, tokens, cache, _ = prefilled(config)
    again, counts = tokens[:, :max(LENGTHS)], jnp.asarray(LENGTHS)
    found = references.of_following(model, params, cache, again, counts)
    at_once = compact(model, params, cache, 3, found)
    in_order = compact_in_order(model, params, cache, 3, again, counts)
    first, second = (np.asarray(c.prefix.cache.components["v"])[..., :3] for c in (at_once, in_order))
    np.testing.assert_allclose(first[0], second[0], atol=1e-3)
    assert np.abs(first[1:] - second[1:]).max() > 1e-3
    asked = references.of_following(model, params, in_order, again, counts)
    for number, entry in enumerate(entries.entries_of(config)):
        found = asked.read_by(entry.readers)
        whole = problem_of(config, params, cache, number, entry, found)
        residuals = [of_normal_equations(config, whole, problem_of(config, params, compacted, number, entry, found))
                     for compacted in (in_order, at_once)]
        assert residuals[0] < 1e-3, "values are the best ones for the queries that come"
        assert number == 0 or residuals[1] > 1e-2


def of_normal_equations(config, whole, few):
    """Relative size of Pt (P V - O), P being attention to the few tokens, V their values, O outputs of all tokens."""
    scale = config.attention.scale
    scores = jnp.einsum("bgnd,bgtd->bgnt", few.queries, few.tokens.keys) * scale + few.tokens.bias[:, :, None]
    weights = jax.nn.softmax(scores) * whole.counted[..., None]
    outputs = attention_outputs(whole.queries, *whole.tokens, scale) * whole.counted[..., None]
    pulled = lambda x: jnp.linalg.norm(jnp.einsum("bgnt,bgnv->bgtv", weights, x))
    return float(pulled(weights @ few.tokens.values - outputs) / pulled(outputs))


def test_a_stream_of_any_length_keeps_at_most_so_many_slots():
    config = PLAIN["mqa"]
    model, params, tokens, cache, found = prefilled(config, lengths=(8,))
    for start in range(8, 20, 4):
        cache = compact(model, params, cache, 6, found, keep=2)
        assert cache.prefix.cache.lengths.tolist() == [6] and cache.positions.tolist() == [start]
        _, cache = invariants.step_of(config)(params, tokens[:, start:start + 4], cache, np.asarray([4]))
    assert np.isfinite(np.asarray(cache.prefix.cache.components["v"])).all()


def test_every_head_may_have_its_own_number_of_slots():
    config = PLAIN["gqa_norm_and_biases"]
    model, params, tokens, cache, found = prefilled(config)
    slots = np.asarray([[[1, 3], [2, 4]], [[5, 5], [1, 1]], [[2, 2], [3, 3]]])
    compacted = compact(model, params, cache, slots, found)
    assert compacted.prefix.cache.lengths.tolist() == [5, 4]
    for number, entry in enumerate(entries.entries_of(config)):
        held = problem_of(config, params, compacted, number, entry, found.read_by(entry.readers)).tokens
        np.testing.assert_array_equal((held.bias > MASKED / 2).sum(-1), slots[number])
    folded = compact(model, params, cache, slots, found, fold=True)
    bias = np.asarray(folded.prefix.cache.components["bias"])
    assert set(np.unique(bias[..., :5] > -1)) == {False, True}, "what is left of biases says which slots are used"
    assert np.isfinite(following(config, params, tokens, folded)[0]).all()


def test_slots_go_to_heads_that_lose_most_without_them():
    config = PLAIN["gqa_norm_and_biases"]
    model, params, _, cache, found = prefilled(config, lengths=(13, 13))
    slots = slots_by_head(model, params, cache, 4, found, shares=(0.25, 1, 2))
    assert slots.shape == (3, 2, 2) and (slots.sum(axis=(0, 2)) <= 4 * 6).all() and set(slots.flat) <= {1, 4, 8}
    assert (slots != 4).any()
    def loss(slots):
        compacted, total = compact(model, params, cache, slots, found), 0.0
        for number, entry in enumerate(entries.entries_of(config)):
            full, few = (problem_of(config, params, c, number, entry, found.read_by(entry.readers))
                         for c in (cache, compacted))
            wanted, got = (attention_outputs(full.queries, *problem.tokens, config.attention.scale)
                           for problem in (full, few))
            total += float((jnp.square(got - wanted).sum((2, 3)) / jnp.square(wanted).sum((2, 3))).sum())
        return total
    assert loss(slots) < loss(4)
    with pytest.raises(ConfigError, match="share their tokens"):
        slots_by_head(*(prefilled(FACTORS["kpa"])[i] for i in (0, 1, 3)), 4, prefilled(FACTORS["kpa"])[4])


ROUNDING = {"float16": 5e-4, "bfloat16": 5e-3, "int8": 3e-2, "float8_e4m3fn": 8e-2}
"""What a cache's type may change of logits: about twice what it does."""


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", *also("float16", "float8_e4m3fn")])
def test_compacted_caches_of_other_types(dtype):
    config = PLAIN["gqa_norm_and_biases"]
    model, params, tokens, cache, found = prefilled(config, dtype)
    exact = prefilled(config)[3]
    for fold in (False, True):
        expected, _ = following(config, params, tokens, compact(model, params, exact, 8, found, fold=fold))
        compacted = compact(model, params, cache, 8, found, fold=fold)
        assert compacted.prefix.cache.components["k"].dtype == cache.dtype
        logits, longer = following(config, params, tokens, compacted)
        assert np.linalg.norm(logits - expected) < ROUNDING[dtype] * np.linalg.norm(expected)
        assert longer.components["k"].dtype == cache.dtype


def test_named_kernels_read_biases_too():
    config = PLAIN["gqa_norm_and_biases"]
    model, params, tokens, cache, found = prefilled(config)
    compacted = compact(model, params, cache, 4, found)
    expected, _ = following(config, params, tokens, compacted)
    logits, _ = following(replace(config, kernel="reference"), params, tokens, compacted)
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_a_kernel_that_counts_positions_from_the_start_is_refused():
    config = replace(SHARED["residual2"], kernel="reference")
    _, params, tokens, _, found = prefilled(SHARED["residual2"])
    model, cache = kvjax.build_model(config), prefilled(SHARED["residual2"])[3]
    compacted = compact(model, params, cache, 4, found, method="recent")
    with pytest.raises(ValueError, match="starts at another position"):
        kvjax.decode(model, params, tokens[:, :1], compacted)


@pytest.mark.parametrize("room", [210, *also(20)])
def test_rings_go_on_where_they_were(room):
    """A window longer than the old cache and the new room: nothing that it sees is lost."""
    config = replace(SHARED["yoco"], sharing=replace(SHARED["yoco"].sharing, window=150), context_length=512)
    model, params = kvjax.build_model(config), invariants.random_params(config)
    tokens, step = invariants.tokens_of(config, shape=(1, 400)), invariants.step_of(config)
    caches = kvjax.init_cache(config, 1, 128), kvjax.init_cache(config, 1, 512)
    small, large = (step(params, tokens[:, :120], cache, np.asarray([120]))[1] for cache in caches)
    found = references.of_context(model, params, tokens[:, :120])
    small = compact(model, params, small, 120, found, method="recent", room=room)
    for start in range(120, 120 + small.capacity - 70, 70):
        chunk = tokens[:, start:start + 70]
        (logits, small), (expected, large) = (step(params, chunk, c, np.asarray([70])) for c in (small, large))
        np.testing.assert_allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("name, dtype", [("mqa", None), ("yoco", "int8")])
def test_compacted_caches_are_saved_and_restored(tmp_path, name, dtype):
    config = CONFIGS[name]
    model, params, tokens, cache, found = prefilled(config, dtype)
    compacted = compact(model, params, cache, 4, found)
    ocp.save(tmp_path / "cache", compacted)
    abstract = jax.eval_shape(partial(init_compacted, config, 2, 4, 20, dtype))
    restored = ocp.load(tmp_path / "cache", jax.tree.map(jnp.zeros_like, abstract))
    np.testing.assert_array_equal(following(config, params, tokens, restored)[0],
                                  following(config, params, tokens, compacted)[0])


def test_generation_continues_a_compacted_cache_and_leaves_it_as_it_is():
    config = PLAIN["mqa"]
    model, params, tokens, cache, found = prefilled(config)
    compacted = compact(model, params, cache, 13, found, method="recent", room=30)
    last = np.stack([np.asarray(tokens)[row, n:n + 1] for row, n in enumerate(LENGTHS)])
    prompts = [np.asarray(tokens)[row, :n + 1] for row, n in enumerate(LENGTHS)]
    expected = kvjax.generate(model, params, prompts, max_new_tokens=6, temperature=0.0)
    for _ in range(2):
        assert kvjax.generate(model, params, last, max_new_tokens=6, temperature=0.0, cache=compacted) == expected
    with pytest.raises(ConfigError, match="room for 401 tokens, and the cache has 128"):
        kvjax.generate(model, params, last, max_new_tokens=401, cache=compacted)


def test_compacting_on_a_mesh_gives_the_same():
    config = model_config(CASES["mha"].attention, vocab_size=64)
    lengths = (13, 9, 13, 9)
    model, params, tokens, cache, found = prefilled(config, lengths=lengths)
    expected, _ = following(config, params, tokens, compact(model, params, cache, 5, found), lengths)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    placed = jax.device_put(params, parameter_shardings(config, mesh))
    with jax.set_mesh(mesh):
        cache, found = jax.device_put((cache, found), NamedSharding(mesh, PartitionSpec()))
        compacted = compact(model, placed, cache, 5, found)
        step = jax.jit(lambda p, t, c: kvjax.decode(model, p, t, c))
        chunk = np.stack([np.asarray(tokens)[row, at:at + 3] for row, at in enumerate(lengths)])
        logits, _ = step(placed, chunk, compacted)
    np.testing.assert_allclose(logits, expected[:, :3], atol=1e-3)


@pytest.mark.parametrize("changes, message", [
    (dict(slots=0), "slots are 0"), (dict(slots=14), "slots are 14.*13 tokens"),
    (dict(slots=np.ones((1, 2), int)), "shape"), (dict(slots=2.5), "whole numbers"), (dict(keep=-1), "keep is -1"),
    (dict(keep=9), r"\[4, 0\] tokens beside the 9"), (dict(room=2, keep=3), "room is 2"), (dict(method="omp"), "omp"),
])
def test_bad_input_is_refused(changes, message):
    model, params, _, cache, found = prefilled(PLAIN["mqa"])
    before = jax.tree.map(np.asarray, cache)
    with pytest.raises(ValueError, match=message):
        compact(model, params, cache, references=found, **(dict(slots=4) | changes))
    jax.tree.map(np.testing.assert_array_equal, before, cache)


def test_models_of_windows_are_refused():
    with pytest.raises(ConfigError, match="window of 3 tokens"):
        entries.entries_of(model_config(GQA, window=NEAR))


def test_schemes_over_latents_have_entries():
    for sharing, layers, count in ((CrossLayer(2), 4, 2), (SkipV1(), 3, 3), (PathConcat(2, delta=2), 4, 4)):
        assert len(entries.entries_of(model_config(MLA, sharing=sharing, layers=layers))) == count
    assert len(entries.entries_of(model_config(GQA, sharing=PathResidual(4, delta=2), layers=4))) == 4


@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_compacted_caches_decode_by_the_tpu_kernel_biases_included(name, monkeypatch):
    """Compiled for a v5e: a kernel call for what follows and one for the prefix, and no copy of either."""
    def compacted(config, batch, length, dtype):
        return init_compacted(config, batch, length, 512, dtype)
    monkeypatch.setattr(decode_memory, "init_cache", compacted)
    mesh = single_device_mesh(tpu_devices("v5e:2x2")[0])
    shape = decode_memory.Shape(layers=4, kernel="tpu")
    cache, compiled = decode_memory.compiled_step(*decode_memory.VARIANTS[name], shape, 1, mesh)
    assert "bias" in cache.prefix.cache.components
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 2
    assert compiled.memory_analysis().temp_size_in_bytes < 0.01 * cache.nbytes
