"""Where a method, at some size, is another one; where it is written in two ways; and the sizes that papers print."""

from dataclasses import replace

import invariants
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import CASES, FULL_GQA, GQA, KPA, MLA, PLAIN, SHARINGS, YARN, model_config, pairs

import kvjax
from kvjax.attention import (
    CrossLayer,
    CrossLayerValues,
    DenseFormer,
    GroupedQuery,
    Kronecker,
    Latent,
    LinearScaling,
    Llama3Scaling,
    PathConcat,
    PathResidual,
    ResFormer,
    SkipV1,
    SkipV1Yoco,
    View,
    YarnScaling,
    Yoco,
    YocoValues,
    make_attention,
)
from kvjax.attention.masks import Mask
from kvjax.model.layers import stack_layers, unstack_layers
from kvjax.model.parameters import layer_spec, parameters

BASELINE = model_config(FULL_GQA, layers=4)
MLA_BASELINE = model_config(replace(MLA, query_latent_dim=10), layers=4)


# --- methods that are others at some size -----------------------------------------------------------------------------


def assert_same_model(config, baseline, change=lambda number, weights: weights, more=None):
    """The baseline's weights, renamed by `change`, and `more` outside the layers make the same model of `config`."""
    _, params, tokens, expected = invariants.full_pass(baseline)
    outer, layers = unstack_layers(baseline, params)
    layers = [layer | {"attention": change(i, layer["attention"])} for i, layer in enumerate(layers)]
    params = stack_layers(config, outer | (more or {}), layers)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda p: p.shape, parameters(config))
    logits = invariants.forward(config)(params, tokens, jnp.ones_like(tokens))
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def renamed(**names):
    """Weights under other names: {old: new}."""
    return lambda number, weights: {names.get(name, name): w for name, w in weights.items()}


def test_residual_paths_of_one_layer_are_the_baseline():
    config = replace(BASELINE, sharing=PathResidual(layers=1, delta=2))
    assert_same_model(config, BASELINE, renamed(k_proj="k_alpha", v_proj="v_alpha"))


@pytest.mark.parametrize("m", [1, 2, 4])
def test_concatenated_paths_without_alpha_are_the_baseline(m):
    config = replace(BASELINE, sharing=PathConcat(layers=m, delta=FULL_GQA.head_dim))
    names = {"k_proj": "k_delta", "v_proj": "v_delta"} | {
        name: f"{name}_delta" for name in ("k_bias", "v_bias", "qk_norm_q", "qk_norm_k")}
    assert_same_model(config, BASELINE, renamed(**names))


def test_concatenated_latents_without_alpha_are_the_baseline():
    config = replace(MLA_BASELINE, sharing=PathConcat(layers=2, delta=MLA.latent_dim))
    assert_same_model(config, MLA_BASELINE, renamed(kv_down="kv_down_delta", kv_norm="kv_norm_delta"))


@pytest.mark.parametrize("baseline", [BASELINE, MLA_BASELINE])
@pytest.mark.parametrize("sharing", [SkipV1(share=0.0), CrossLayer(layers=1)])
def test_sharing_nothing_is_the_baseline(sharing, baseline):
    assert_same_model(replace(baseline, sharing=sharing), baseline)


def test_resformer_that_mixes_nothing_is_the_baseline():
    def change(number, weights):
        return weights | {"v_mix": jnp.ones(())} if number else weights
    assert_same_model(replace(BASELINE, sharing=ResFormer()), BASELINE, change)


def test_denseformer_starts_as_the_baseline():
    config = replace(BASELINE, sharing=DenseFormer())
    start = {name: p.init(jax.random.key(0), p.shape) for name, p in parameters(config).items() if "depth" in name}
    assert [len(w) for w in start.values()] == [2, 3, 4, 5]
    assert_same_model(config, BASELINE, more=start)


def test_latent_attention_whose_latent_is_its_input_is_attention_without_positions():
    """dc = D, the latent its input, the rotated key zero: plain attention, with scores scaled by 1 / sqrt(dn + dr).

    The latent's norm changes nothing where its input is normed already, with scales of one.
    """
    width, dn, dr = 32, 8, 6
    config = model_config(Latent(heads=4, latent_dim=width, rope_dim=dr, nope_dim=dn, value_dim=dn), norm_eps=1e-12)
    plain = model_config(GroupedQuery(heads=4, kv_heads=4, head_dim=dn), positions="none", norm_eps=1e-12)
    outer, layers = unstack_layers(config, invariants.random_params(config))
    plain_layers = []
    for layer in layers:
        layer["attention_norm"] = jnp.ones(width)
        w = layer["attention"]
        w |= {"kv_down": jnp.eye(width), "kv_norm": jnp.ones(width), "k_rope": jnp.zeros((width, dr))}
        # Plain attention divides by sqrt(dn): its queries make up for it.
        queries = w["q_proj"][..., :dn] * (dn / (dn + dr)) ** 0.5
        plain_layers.append(layer | {"attention": {
            "q_proj": queries, "k_proj": w["k_up"], "v_proj": w["v_up"], "o_proj": w["o_proj"]}})
    tokens = invariants.tokens_of(config)
    logits = [invariants.forward(c)(stack_layers(c, outer, of_layers), tokens, jnp.ones_like(tokens))
              for c, of_layers in ((config, layers), (plain, plain_layers))]
    np.testing.assert_allclose(*logits, atol=1e-5)


# --- attention to rows, and to the components as they are cached ------------------------------------------------------

PARTS = {name: PLAIN[name] for name in ("mla", "mla_wide_latent", "kpa", "kpa_uneven")} | pairs(
    {"gqa": FULL_GQA, "mla": MLA, "kpa": KPA}, {name: SHARINGS[name] for name in ("skip_v1", "concat2")})


def rebuilt(variant, layer, path, queries, view):
    return variant.partial(layer, path, queries, view)


def cached(variant, layer, path, queries, view):
    part = variant.absorbed(layer, path, variant.absorb(layer, path, queries), view)
    return variant.release(layer, path, part)


def last_queries_attend(config, count, *ways, length=40):
    """Attention of the last `count` of some tokens to all of them, in each of the `ways`, compiled."""
    variant, layer = make_attention(config), layer_spec(config, 0, 0)
    order = jnp.broadcast_to(jnp.arange(length), (2, length))
    late = slice(length - count, length)
    def run(weights, x):
        rows = variant.rows(layer, weights, x, order, {})
        view = View({name: (row,) for name, row in rows.items()}, order, Mask(order[:, late], order))
        queries = variant.queries(layer, weights, x[:, late], order[:, late])
        return [way(variant, layer, (weights,), queries, view) for way in ways]
    weights = jax.tree.map(lambda w: w[0], invariants.random_params(config)["segment_0"]["layer_0"]["attention"])
    return jax.jit(run)(weights, jax.random.normal(jax.random.key(3), (2, length, config.width)))


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("name", PARTS)
def test_attention_to_cached_components_equals_that_to_rebuilt_ones(name, count):
    a, b = last_queries_attend(PARTS[name], count, rebuilt, cached)
    np.testing.assert_allclose(a.out, b.out, atol=1e-5)
    np.testing.assert_allclose(a.lse, b.lse, atol=1e-5)


@pytest.mark.parametrize("name", PARTS)
def test_one_query_rebuilds_no_keys_and_values(name, monkeypatch):
    monkeypatch.setattr(type(make_attention(PARTS[name])), "partial", None)
    jax.eval_shape(lambda: last_queries_attend(PARTS[name], 1, cached))


# --- sizes in print ---------------------------------------------------------------------------------------------------


def cache_bytes(attention, layers, dtype, sharing=None):
    """Bytes a token of an allocated cache."""
    config = model_config(attention, layers=layers, sharing=sharing)
    cache = jax.eval_shape(lambda: kvjax.init_cache(config, 1, 128, dtype))
    return cache.nbytes / cache.capacity


@pytest.mark.parametrize(("layers", "percent"), [(8, 21.9), (12, 22.9), (24, 23.96)])
def test_savings_that_skip_v1_prints(layers, percent):
    mha = CASES["mha"].attention
    saved = 1 - cache_bytes(mha, layers, "bfloat16", SkipV1()) / cache_bytes(mha, layers, "bfloat16")
    assert abs(saved - (layers - 1) / (4 * layers)) < 1e-12 and abs(100 * saved - percent) < 0.05


@pytest.mark.parametrize("layers", [2, 8, 24])
def test_savings_that_skip_v1_with_yoco_prints(layers):
    kept = cache_bytes(GQA, layers, "bfloat16", SkipV1Yoco()) / cache_bytes(GQA, layers, "bfloat16")
    assert abs(1 - kept - (1 / 2 - 1 / (4 * layers))) < 1e-12


@pytest.mark.parametrize(("attention", "dtype", "whole", "skipped"), [
    (GroupedQuery(heads=32, kv_heads=8, head_dim=64), "float32", 98_304, 74_752),
    # The paper prints 7,680: half of every latent. Its layer 1 keeps the whole.
    (Latent(heads=32, latent_dim=256, rope_dim=32, nope_dim=64, value_dim=64), "bfloat16", 13_824, 7_936),
])
def test_bytes_that_skip_v1_prints(attention, dtype, whole, skipped):
    assert cache_bytes(attention, 24, dtype) == whole
    assert cache_bytes(attention, 24, dtype, SkipV1()) == skipped


# --- what is refused --------------------------------------------------------------------------------------------------

MHA, MQA, UNEVEN = (CASES[name].attention for name in ("mha", "mqa", "kpa_uneven"))


@pytest.mark.parametrize(("attention", "sharing", "layers", "message"), [
    (MQA, SkipV1(), 3, r"a share of 0.5 of the 1 of v .* not a whole number"),
    (MHA, SkipV1(share=0.3), 3, r"a share of 0.3 of the 4 of v .* change the share, or the size"),
    (replace(MLA, latent_dim=7), SkipV1(), 3, r"a share of 0.5 of the 7 of latent"),
    (UNEVEN, SkipV1(), 3, r"a share of 0.5 of the 3 of v_a"),
    (MHA, SkipV1Yoco(), 3, "3 layers do not split into groups of 2"),
    (MLA, SkipV1Yoco(), 4, "SkipV1Yoco.*keeps k_rope, latent.*a latent holds both"),
    (MHA, Yoco(), 3, "3 layers do not split into groups of 2"),
    (MHA, YocoValues(), 5, "5 layers do not split into groups of 2"),
    (MLA, YocoValues(), 4, "YocoValues.*keeps k_rope, latent.*values alone cannot be shared"),
    (MHA, CrossLayer(2), 3, "3 layers do not split into groups of 2; choose a number that divides 3"),
    (MHA, CrossLayer(0), 3, "3 layers do not split into groups of 0"),
    (MLA, CrossLayerValues(), 4, "CrossLayerValues.*keeps k_rope, latent.*cannot be shared"),
    (MHA, PathConcat(layers=3, delta=2), 4, "4 layers do not split into groups of 3; choose a number that divides 4"),
    (MHA, PathConcat(layers=2, delta=3), 4, "delta 3 is odd: rotary embedding turns pairs"),
    (MHA, PathConcat(layers=2, delta=10), 4, r"delta 10 exceeds the 8 of k"),
    (MLA, PathConcat(layers=2, delta=9), 4, r"delta 9 exceeds the 8 of latent"),
    (KPA, PathConcat(layers=2, delta=3), 4, r"delta 3 exceeds the 2 of k_a"),
    (MHA, PathResidual(layers=3, delta=2), 4, "4 layers do not split into groups of 3"),
    (MHA, PathResidual(layers=2, delta=9), 4, "delta 9 exceeds head_dim 8"),
    (MLA, PathResidual(layers=2, delta=2), 4, "PathResidual.*Latent.*keeps none: use GroupedQuery"),
    (KPA, PathResidual(layers=2, delta=2), 4, "PathResidual.*Kronecker.*keeps none: use GroupedQuery"),
    (MLA, ResFormer(), 3, "ResFormer.*Latent.*use GroupedQuery"),
    (KPA, ResFormer(), 3, "ResFormer.*Kronecker.*use GroupedQuery"),
])
def test_sizes_and_pairs_that_do_not_fit_are_refused(attention, sharing, layers, message):
    with pytest.raises(kvjax.ConfigError, match=message):
        kvjax.build_model(model_config(attention, sharing=sharing, layers=layers))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: SkipV1(share=1.0), "share is 1.0: it must be at least 0 and below 1"),
    (lambda: SkipV1Yoco(share=-0.5), "share is -0.5"),
    (lambda: Yoco(window=0), "window is 0: it must be above 0"),
    (lambda: PathConcat(layers=2, delta=0), "delta is 0: it must be above 0"),
    (lambda: PathResidual(layers=2, delta=-1), "delta is -1: it must be above 0"),
    (lambda: model_config(GQA, window=0), "window is 0: it must be above 0, or None"),
    (lambda: model_config(GQA, positions="rotery"), "'rotery'.*did you mean 'rotary'"),
    (lambda: model_config(GQA, positions="learned", rope_scaling=YARN), "are learned: there is nothing to scale"),
    (lambda: model_config(GQA, norm="rmsnorm"), "'rmsnorm'.*did you mean 'rms'"),
    (lambda: model_config(GQA, feed_forward="relu"), "'relu': choose one of swiglu, gelu"),
    (lambda: LinearScaling(0.5), "LinearScaling.factor is 0.5: it must be 1 or more"),
    (lambda: YarnScaling(0.5, 64), "YarnScaling.factor is 0.5: it must be 1 or more"),
    (lambda: Llama3Scaling(2.0, 64, 4.0, 1.0), "low_frequency_factor 4.0 must be below high_frequency_factor 1.0"),
    (lambda: GroupedQuery(heads=4, kv_heads=3, head_dim=8), "heads 4 is not a multiple of kv_heads 3"),
    (lambda: GroupedQuery(heads=4, kv_heads=2, head_dim=7), "head_dim 7 is odd"),
    (lambda: replace(MLA, rope_dim=3), "rope_dim 3 is odd"),
    (lambda: replace(MLA, latent_dim=0), "latent_dim is 0: it must be above 0"),
    (lambda: replace(MLA, query_latent_dim=0), "query_latent_dim is 0: it must be above 0, or None"),
    (lambda: Kronecker(h1=2, h2=2, d2=3), "d2 is 3: it must be even"),
    (lambda: Kronecker(h1=2, h2=2, k_rank=0), "k_rank is 0: it must be above 0"),
])
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(kvjax.ConfigError, match=message):
        make()
