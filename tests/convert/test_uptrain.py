"""Conversions of trained models: exact where they can be, and as good as they say where they cannot."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from invariants import random_params
from variants import model_config

import kvjax
from kvjax import ConfigError
from kvjax.attention import (
    CrossLayer,
    GroupedQuery,
    Kronecker,
    Latent,
    PathConcat,
    PathResidual,
    Rope,
    SkipV1,
    YarnScaling,
)
from kvjax.convert.uptrain import convert, needs_text
from kvjax.convert.uptrain.calibration import calibrate
from kvjax.convert.uptrain.heads import (
    loss_by_other_frequencies,
    loss_without_rotation,
    matching_pairs,
    mean_rotation,
)
from kvjax.convert.uptrain.kronecker import alternate, product
from kvjax.convert.uptrain.regression import least_squares, r_squared, reduced_rank
from kvjax.model.activations import layer_inputs
from kvjax.model.layers import stack_layers, unstack_layers

GQA = GroupedQuery(heads=4, kv_heads=2, head_dim=8)
BIASED = GroupedQuery(heads=4, kv_heads=2, head_dim=8, qk_norm=True, qkv_bias=True, output_bias=True)


def model(attention, sharing=None, **changes):
    return model_config(attention, sharing=sharing, **({"layers": 2} | changes))


def tokens(seed, rows=16, length=32):
    return np.asarray(jax.random.randint(jax.random.key(seed), (rows, length), 0, 61))


def converted(source, target, params=None):
    params = random_params(source) if params is None else params
    calibration = calibrate(source, params, ({"tokens": tokens(seed)} for seed in range(1, 9)), 2048)
    return params, convert(source, params, target, calibration)


def logits(config, params):
    return kvjax.build_model(config).apply({"params": params}, jnp.asarray(tokens(99, rows=2)))


@pytest.mark.parametrize("sharing", [None, SkipV1(), PathConcat(2, 4), CrossLayer(2)])
def test_layers_are_taken_apart_and_put_together(sharing):
    config = model(GQA, sharing, layers=4)
    params = random_params(config)
    outer, layers = unstack_layers(config, params)
    assert len(layers) == 4
    chex.assert_trees_all_equal(stack_layers(config, outer, layers), params)


@pytest.mark.parametrize("attention", [GQA, BIASED])
def test_skip_v1_pools_pairs_of_later_value_heads_and_nothing_else(attention):
    attention = dataclasses.replace(attention, kv_heads=4)
    source, target = model(attention, layers=3), model(attention, SkipV1(), layers=3)
    assert not needs_text(target)
    params = random_params(source)
    _, before = unstack_layers(source, params)
    outer, after = unstack_layers(target, convert(source, params, target).params)
    chex.assert_trees_all_equal(outer, {name: params[name] for name in outer})
    chex.assert_trees_all_equal(after[0], before[0])
    for old, new in zip(before[1:], after[1:], strict=True):
        for name in {"v_proj", "v_bias"} & old["attention"].keys():
            heads = np.asarray(old["attention"].pop(name))
            pairs = np.stack([heads[..., :2, :].mean(axis=-2), heads[..., 2:, :].mean(axis=-2)], axis=-2)
            chex.assert_trees_all_close(new["attention"].pop(name), pairs, rtol=1e-6)
        chex.assert_trees_all_equal(new, old)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_pooled_heads_that_were_equal_change_nothing(kv_heads):
    source, target = (model(dataclasses.replace(BIASED, kv_heads=n)) for n in (4, kv_heads))
    params = random_params(source)
    weights = params["segment_0"]["layer_0"]["attention"]
    for name in ("k_proj", "v_proj", "k_bias", "v_bias"):
        first = weights[name][..., ::4 // kv_heads, :]
        weights[name] = jnp.repeat(first, 4 // kv_heads, axis=-2)
    result = convert(source, params, target)
    assert not result.fits
    chex.assert_trees_all_close(logits(target, result.params), logits(source, params), atol=1e-5)


EXACT = {
    "residual, paths of one layer": (BIASED, PathResidual(1, 8)),
    "concat, nothing shared": (dataclasses.replace(BIASED, qk_norm=False), PathConcat(2, 8)),
    "cla-1": (BIASED, CrossLayer(1)),
}


@pytest.mark.parametrize("name", EXACT)
def test_conversions_without_loss_of_features_are_exact(name):
    attention, sharing = EXACT[name]
    source, target = model(attention), model(attention, sharing)
    params = small_biases(random_params(source))
    _, result = converted(source, target, params)
    assert all(fit.r_squared > 0.9999 for fit in result.fits)
    chex.assert_trees_all_close(logits(target, result.params), logits(source, params), atol=0.02)


def small_biases(params):
    return jax.tree.map_with_path(lambda path, x: 0.1 * x if "_bias" in path[-1].key else x, params)


def test_parts_that_lose_their_rotation_keep_the_strength_of_yarn():
    """Of pairs that hardly turn nothing is lost but the factor that YaRN puts on rotated vectors."""
    still = dict(rope_base=1e20, rope_scaling=YarnScaling(1.0, 64, attention_factor=1.6))
    source, target = model(GQA, **still), model(GQA, PathConcat(1, 2), **still)
    params, result = converted(source, target)
    assert all(fit.r_squared > 0.999 for fit in result.fits)
    chex.assert_trees_all_close(logits(target, result.params), logits(source, params), atol=0.02)


def test_layers_with_the_same_input_and_keys_share_them_exactly():
    """Layers that add nothing all read the same stream; values differ by maps that output projections absorb."""
    source = model(GQA)
    params = random_params(source)
    layer = params["segment_0"]["layer_0"]
    layer["feed_forward"]["down"] *= 0
    layer["attention"]["o_proj"] *= 0
    layer["attention_norm"] = jnp.ones_like(layer["attention_norm"])
    attention = layer["attention"]
    attention["k_proj"] = jnp.stack([attention["k_proj"][0]] * 2)
    turned = jnp.einsum("dgi,gij->dgj", attention["v_proj"][0], jax.random.normal(jax.random.key(5), (2, 8, 8)))
    attention["v_proj"] = jnp.stack([attention["v_proj"][0], turned])
    for sharing in (CrossLayer(2), PathResidual(2, 2), PathConcat(2, 2)):
        _, result = converted(source, model(GQA, sharing), params)
        told = {(fit.layer, fit.state): fit.r_squared for fit in result.fits}
        if isinstance(sharing, CrossLayer):
            assert min(told.values()) > 0.999
        if isinstance(sharing, PathResidual):
            assert told[1, "k"] > 0.999, "there is nothing to correct"
            assert told[1, "v"] < 0.9, "two features cannot turn eight"
        if isinstance(sharing, PathConcat):
            assert told[1, "k"] < 0.999, "keys lose the rotation of three pairs in four"


def test_latent_keeps_keys_of_one_head_exactly_and_says_how_well_it_keeps_values():
    source = model(dataclasses.replace(GQA, kv_heads=1))
    latent = Latent(heads=4, latent_dim=32, rope_dim=8, nope_dim=4, value_dim=8)
    params, result = converted(source, model(latent))
    told = {(fit.layer, fit.state): fit.r_squared for fit in result.fits}
    assert told[0, "k"] > 0.9999 and told[1, "k"] > 0.9999 and result.surviving_pairs == (0, 1, 2, 3)
    assert 0.8 < told[0, "v"] < 1, "the latent's norm stands in the way"
    other = dataclasses.replace(latent, interleaved=True)
    _, again = converted(source, model(other), params)
    chex.assert_trees_all_close(logits(model(other), again.params), logits(model(latent), result.params), atol=1e-4)


def test_reported_r_squared_is_that_of_the_converted_weights():
    source, target = model(GQA), model(GQA, PathResidual(2, 3))
    params, result = converted(source, target)
    told = {(fit.layer, fit.state): fit.r_squared for fit in result.fits}
    x = np.asarray(layer_inputs(source, params, jnp.asarray(tokens(1))))[:, :8].reshape(2, -1, 32)
    wanted = np.einsum("nd,dgk->ngk", x[1], params["segment_0"]["layer_0"]["attention"]["v_proj"][1])
    first, second = (result.params["segment_0"][f"layer_{i}"]["attention"] for i in (0, 1))
    made = np.einsum("nd,dgk->ngk", x[0], first["v_alpha"][0])
    made += np.einsum("nd,dgr,gkr->ngk", x[1], second["v_delta"][0], second["v_expand"][0])
    # Judged on an eighth of the sequences, the first ones.
    error, spread = ((wanted - made) ** 2).sum(), ((wanted - wanted.mean(axis=0)) ** 2).sum()
    assert told[1, "v"] == pytest.approx(1 - error / spread, abs=1e-3)


@pytest.mark.parametrize("target", [Kronecker(h1=4, h2=1, d1=2, d2=4, dense_query=True),
                                    Kronecker(h1=2, h2=2, d1=1, d2=8, q_rank=2)])
def test_kronecker_gets_whole_parameters_and_true_figures(target):
    _, result = converted(model(GQA), model(target))
    shapes = jax.tree.map(lambda p: p.shape, kvjax.model.parameters(model(target)))
    assert jax.tree.map(jnp.shape, result.params) == shapes
    assert all(0 < fit.r_squared < 1 for fit in result.fits)
    assert result.surviving_pairs == ((0, 2) if target.d1 == 2 else (0, 1, 2, 3))


def test_alternating_least_squares_finds_factors_that_exist():
    random = np.random.default_rng(3)
    x = np.concatenate([random.normal(size=(400, 5)), np.ones((400, 1))], axis=1)
    truth = product(x, random.normal(size=(6, 2, 3, 2)), random.normal(size=(6, 2, 2, 4)))
    assert r_squared(truth, product(x, *alternate(x, truth, 2))) > 0.95


def test_reduced_rank_regression_is_the_best_map_of_its_rank():
    random = np.random.default_rng(0)
    x, y = random.normal(size=(500, 6)), random.normal(size=(500, 4))
    down, up = reduced_rank(x, y, 2)
    best = np.linalg.svd(x @ least_squares(x, y))  # Eckart-Young on the fitted values
    fitted = (best.U[:, :2] * best.S[:2]) @ best.Vh[:2]
    np.testing.assert_allclose(x @ down @ up, fitted, atol=1e-4)
    down, up = reduced_rank(x, y, 6)
    assert down.shape == (6, 6) and up.shape == (6, 4) and not down[:, 4:].any()
    np.testing.assert_allclose(x @ down @ up, x @ least_squares(x, y), atol=1e-4)


def turned(keys, angle):
    return keys @ np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])


def mean_over_distances(error, length):
    """Of error(distance), over all pairs of a query and a key before it."""
    return np.mean([error(query - key) for query in range(length) for key in range(query + 1)])


def test_lost_and_other_rotations_count_as_the_mean_over_distances():
    keys, length = np.random.default_rng(1).normal(size=(300, 1, 2)), 16
    weight = np.tile(mean_rotation(np.array([0.3]), length - np.arange(length)), 2)
    lost = mean_over_distances(lambda t: ((turned(keys, 0.3 * t) - 0.5 * keys) ** 2).sum(), length)
    assert loss_without_rotation(keys, 0.5 * keys, weight) == pytest.approx(lost)
    other = mean_over_distances(lambda t: ((turned(keys, 0.3 * t) - turned(keys, 0.25 * t)) ** 2).sum(), length)
    assert loss_by_other_frequencies(keys, np.array([0.05]), length - np.arange(length)) == pytest.approx(other)


def test_narrow_rotations_take_the_source_pairs_of_their_frequencies():
    pairs, difference = matching_pairs(Rope(), 64, 32)
    assert pairs.tolist() == list(range(0, 32, 2)) and not difference.any()
    pairs, difference = matching_pairs(Rope(), 64, 24)
    assert len(set(pairs)) == 12 and difference[0] == 0
    np.testing.assert_allclose(difference[1:], (10_000 ** (-pairs / 32) - 10_000 ** (-np.arange(12) / 12))[1:])
    assert matching_pairs(Rope(None), 8, 4)[0].tolist() == [0, 1]


@pytest.mark.parametrize(("source", "target", "words"), [
    (model(GQA), model(GQA, width=64), "model.width: 32 in the source, 64"),
    (model(GQA, CrossLayer(2)), model(GQA, SkipV1()), "start from multi-head or grouped-query"),
    (model(GQA), model(dataclasses.replace(GQA, kv_heads=4)), "2 key-value heads cannot be pooled to 4"),
    (model(GQA), model(dataclasses.replace(GQA, head_dim=4)), "attention.head_dim"),
    (model(dataclasses.replace(GQA, kv_heads=4)), model(dataclasses.replace(GQA, kv_heads=4), SkipV1(0.75)), "of 0.5"),
    (model(dataclasses.replace(GQA, kv_heads=1)), model(dataclasses.replace(GQA, kv_heads=1), SkipV1()), "the 1 of v"),
    (model(GQA), model(GQA, CrossLayer(2)), "give a calibration"),
])
def test_conversions_that_are_not_there_say_why(source, target, words):
    with pytest.raises(ConfigError, match=words):
        convert(source, random_params(source), target)


def test_calibrations_that_are_too_short_are_refused():
    with pytest.raises(ConfigError, match="32 tokens to fit maps of 32 features on, and 64 are wanted"):
        calibrate(model(GQA), random_params(model(GQA)), iter([{"tokens": tokens(1, rows=2)}]), 64)
    same = {"tokens": np.repeat(tokens(1, rows=1), 2, axis=0)}
    with pytest.raises(ConfigError, match="has not two different sequences"):
        calibrate(model(GQA), random_params(model(GQA)), iter([same] * 9), 64)


def test_text_that_comes_again_is_not_judged_on():
    config = model(GQA, window=4)
    few = [tokens(seed, rows=4) for seed in range(2)]
    found = calibrate(config, random_params(config), ({"tokens": few[i % 2]} for i in range(1000)), 10**6)
    assert found.fit.shape[1] + found.test.shape[1] == few[0].size * 2, "every sequence once"
    assert not {x.tobytes() for x in found.fit[1]} & {x.tobytes() for x in found.test[1]}
    assert found.apart.tolist() == [few[0].shape[1] - t for t in range(4)], "a window limits how far queries see"
