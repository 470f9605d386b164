"""The invariants, over every variant."""

import chex
import invariants
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from variants import CASES, model_config

import kvjax
from kvjax import attention
from kvjax import config as kvconfig

cases = pytest.mark.parametrize("name", CASES)


def config_of(name, **changes):
    return model_config(CASES[name].attention, **changes)


def test_every_registered_variant_has_a_reference_and_a_case():
    registered = kvconfig.registered(attention.Attention)
    names = {name for name, cls in registered.items() if cls.__module__.startswith("kvjax.")}
    assert names == set(references.ATTENTION) == {case.attention.variant_name for case in CASES.values()}


@cases
def test_decoding_equals_the_full_pass(name):
    invariants.check_decoding(config_of(name))


@pytest.mark.parametrize("name", ["gqa", "kpa"])
def test_decoding_with_a_sliding_window_equals_the_full_pass(name):
    invariants.check_decoding(config_of(name, window=3))


@cases
def test_bytes_equal_the_formula(name):
    invariants.check_bytes(config_of(name), CASES[name].elements)


@cases
def test_gradients_reach_every_weight(name):
    invariants.check_gradients(config_of(name))


@pytest.mark.parametrize(("name", "window"), [*((name, None) for name in CASES), ("gqa", 3), ("kpa", 3)])
def test_equals_the_naive_loops(name, window):
    config = config_of(name, window=window, tie_embeddings=name != "mha")
    model, params, tokens, full = invariants.full_pass(config)
    for row in range(2):
        expected = references.logits(config, params, tokens[row])
        np.testing.assert_allclose(full[row], expected, atol=invariants.TOLERANCE)


@cases
def test_packed_documents_do_not_see_each_other(name):
    config = config_of(name)
    model, params, tokens, _ = invariants.full_pass(config)
    segment_ids = jnp.asarray([[1] * 7 + [2] * 9 + [3] * 4])
    packed = jax.jit(model.apply)({"params": params}, tokens[:1], segment_ids=segment_ids)[0]
    for start, stop in ((0, 7), (7, 16), (16, 20)):
        alone = references.logits(config, params, tokens[0, start:stop])
        np.testing.assert_allclose(packed[start:stop], alone, atol=invariants.TOLERANCE)


@cases
def test_only_differences_of_positions_matter(name):
    config = config_of(name)
    model, params, tokens, full = invariants.full_pass(config)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    apply = jax.jit(model.apply)
    shifted = apply({"params": params}, tokens, positions + 37)
    stretched = apply({"params": params}, tokens, positions * 2)
    np.testing.assert_allclose(shifted, full, atol=invariants.TOLERANCE)
    assert np.abs(stretched - full).max() > 0.01, "positions are used"


@cases
def test_attention_alone_is_causal(name):
    config = config_of(name)
    layer = kvjax.build_attention(config)
    x = jax.random.normal(jax.random.key(0), (1, 9, config.width))
    params = jax.jit(layer.init)(jax.random.key(1), x)
    influence = jax.jit(jax.jacrev(lambda x: layer.apply(params, x)[0].sum(-1)))(x)[:, 0]
    influence = np.abs(influence).sum(-1)
    assert (influence[np.triu_indices(9, 1)] == 0).all(), "no output depends on a later token"
    assert (influence[np.tril_indices(9)] > 0).all(), "every output depends on itself and every earlier token"


@pytest.mark.parametrize("name", ["gqa", "kpa", "tpa"])
def test_low_precision_stays_near_float32(name):
    config = config_of(name)
    _, params, tokens, full = invariants.full_pass(config)
    half = kvjax.build_model(config_of(name, dtype="bfloat16")).apply({"params": params}, tokens)
    assert half.dtype == jnp.float32
    # bfloat16 keeps 8 bits: errors of about 2^-8 of the logits' size, a few times over three layers.
    assert np.abs(half - full).max() < 0.1 * np.abs(full).max()
    assert np.corrcoef(np.ravel(half), np.ravel(full))[0, 1] > 0.999


def test_low_precision_gradients_of_frequent_tokens_add_up():
    """In bfloat16 a sum of equal terms stops growing at 256: gradients of the embedding must be added in float32."""
    def embedding_gradient(dtype):
        config = config_of("gqa", dtype=dtype, tie_embeddings=False)
        model, params = kvjax.build_model(config), invariants.random_params(config)
        tokens = jnp.full((8, 512), 3)
        loss = lambda p: jax.nn.log_softmax(model.apply({"params": p}, tokens))[..., 5].sum()
        return jax.jit(jax.grad(loss))(params)["embedding"][3]
    exact = embedding_gradient("float32")
    assert np.linalg.norm(embedding_gradient("bfloat16") - exact) < 0.05 * np.linalg.norm(exact)


def test_norm_scales_are_not_rounded_to_the_compute_type():
    config = config_of("gqa", dtype="bfloat16")
    params = jax.tree.map(jnp.asarray, invariants.random_params(config))
    apply = jax.jit(kvjax.build_model(config).apply)
    before = apply({"params": params}, invariants.tokens_of(config))
    layer = params["segment_0"]["layer_0"]
    layer["feed_forward_norm"] = jnp.ones_like(layer["feed_forward_norm"])
    one = apply({"params": params}, invariants.tokens_of(config))
    layer["feed_forward_norm"] = layer["feed_forward_norm"] * 1.003  # bfloat16 rounds this to 1
    assert np.abs(apply({"params": params}, invariants.tokens_of(config)) - one).max() > 0
    assert np.abs(before - one).max() > 0


class TestTransformations(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_decode_under_jit_and_not(self):
        config = config_of("kpa")
        model, params, tokens, full = invariants.full_pass(config)
        step = self.variant(lambda p, t, c: kvjax.decode(model, p, t, c, last_only=True))
        cache = kvjax.init_cache(config, invariants.BATCH, 20)
        _, cache = step(params, tokens[:, :4], cache)
        logits, cache = step(params, tokens[:, 4:8], cache)
        chex.assert_trees_all_close(logits, full[:, 7], atol=invariants.TOLERANCE)


@pytest.mark.parametrize("name", ["gqa", "kpa"])
def test_decode_under_vmap_and_grad(name):
    config = config_of(name)
    model, params, tokens, full = invariants.full_pass(config)
    models = jax.tree.map(lambda *x: jnp.stack(x), params, invariants.random_params(config, seed=9))

    def last(params, tokens):
        cache = kvjax.init_cache(config, invariants.BATCH, 20)
        for start in (0, 6):
            logits, cache = kvjax.decode(model, params, tokens[:, start:start + 6], cache)
        return logits[:, -1]

    both = jax.jit(jax.vmap(last, in_axes=(0, None)))(models, tokens)
    np.testing.assert_allclose(both[0], full[:, 11], atol=invariants.TOLERANCE)
    assert np.abs(both[0] - both[1]).max() > 0.1
    # The gradient through the cache is the gradient of the full pass.
    through_cache = jax.jit(jax.grad(lambda p: (last(p, tokens) ** 2).sum()))(params)
    direct = jax.jit(jax.grad(lambda p: (model.apply({"params": p}, tokens[:, :12])[:, -1] ** 2).sum()))(params)
    chex.assert_trees_all_close(through_cache, direct, rtol=1e-3, atol=1e-3)
