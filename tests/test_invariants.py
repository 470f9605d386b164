"""The invariants, over every attention variant, sharing scheme and option; pairs are in test_sharing_combinations."""

import chex
import invariants
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from variants import BY_SHARING, GQA, MORE_BY_SHARING, NEAR, OPTIONS, PLAIN, model_config, sizes

import kvjax
from kvjax import attention
from kvjax import config as kvconfig
from kvjax.attention import Yoco

MODELS = PLAIN | BY_SHARING | MORE_BY_SHARING | OPTIONS
REPRESENTATIVE = ("gqa", "mla_query_latent", "kpa", *BY_SHARING)
"""One model of every attention variant and of every sharing scheme."""


def over(default):
    """Runs a test over all models, by default over some of them; with `-m full` over the others.

    All tests take the same models in the same order: those of one model run together, and share what is compiled.
    """
    return pytest.mark.parametrize("name", [
        pytest.param(name, marks=() if name in default else pytest.mark.full) for name in MODELS], scope="module")


@pytest.mark.parametrize(("base", "table"), [
    (attention.Attention, references.ATTENTION), (attention.Sharing, references.SHARING),
    (attention.RopeScaling, references.SCALING)])
def test_everything_registered_has_a_reference_and_a_case(base, table):
    registered = {name for name, cls in kvconfig.registered(base).items() if cls.__module__.startswith("kvjax.")}
    assert registered == set(table) - {None}
    tried = {value.variant_name for c in MODELS.values() for value in (c.attention, c.sharing, c.rope_scaling) if value}
    assert registered <= tried


@over([*PLAIN, *BY_SHARING, *MORE_BY_SHARING, "gpt2", "no_positions", "yarn_mla", "yarn_residual", "yoco_learned"])
def test_decoding_equals_the_full_pass(name):
    """Many and single tokens at a time, of which many may be attended to in another way; else two at a time."""
    both = (*REPRESENTATIVE, "mla_wide_latent", "gpt2")
    invariants.check_decoding(MODELS[name], invariants.CHUNKS if name in both else invariants.SMALL_CHUNKS)


@over(REPRESENTATIVE)
def test_last_logits_equal_the_full_pass(name):
    invariants.check_last_logits(MODELS[name])


@over(MODELS)
def test_bytes_equal_the_formula(name):
    invariants.check_sizes(MODELS[name], sizes(MODELS[name]))


@over(MODELS)
def test_equals_the_naive_loops(name):
    _, params, tokens, full = invariants.full_pass(MODELS[name])
    for row in range(2):
        expected = references.logits(MODELS[name], params, tokens[row])
        np.testing.assert_allclose(full[row], expected, atol=invariants.TOLERANCE)


@over(MODELS)
def test_packed_documents_do_not_see_each_other(name):
    invariants.check_packing(MODELS[name])


@over(REPRESENTATIVE)
def test_gradients_reach_every_weight(name):
    invariants.check_gradients(MODELS[name])


@over(REPRESENTATIVE)
def test_no_output_depends_on_later_tokens(name):
    invariants.check_causality(MODELS[name])


@over(REPRESENTATIVE)
def test_only_differences_of_positions_matter(name):
    invariants.check_positions(MODELS[name])


@over((*REPRESENTATIVE, "gpt2"))
def test_low_precision_stays_near_float32(name):
    invariants.check_low_precision(MODELS[name])


@over(REPRESENTATIVE)
def test_two_models_under_vmap_equal_each_alone(name):
    invariants.check_vmap(MODELS[name])


@pytest.mark.parametrize("config", [model_config(GQA, window=NEAR), model_config(GQA, sharing=Yoco(NEAR), layers=2)])
def test_decoding_when_the_ring_of_a_window_wraps_round(config):
    """A ring keeps 128 tokens: a chunk that is longer, then steps that overwrite what it holds."""
    model, params, tokens = kvjax.build_model(config), invariants.random_params(config), invariants.tokens_of(
        config, shape=(2, 150))
    full = jax.jit(model.apply)({"params": params}, tokens)
    step, cache = invariants.step_of(config), kvjax.init_cache(config, 2, 150)
    for start, stop in ((0, 140), (140, 145), (145, 150)):
        logits, cache = step(params, tokens[:, start:stop], cache, jnp.full(2, stop - start))
        np.testing.assert_allclose(logits, full[:, start:stop], atol=invariants.TOLERANCE)


def test_explicit_positions_are_those_of_the_naive_loops():
    _, params, tokens, _ = invariants.full_pass(PLAIN["gqa"])
    positions = jnp.asarray([0, 1, 2, 9, 9, 4, 17, 30])
    logits = kvjax.build_model(PLAIN["gqa"]).apply({"params": params}, tokens[:1, :8], positions[None])
    expected = references.logits(PLAIN["gqa"], params, tokens[0, :8], positions)
    np.testing.assert_allclose(logits[0], expected, atol=invariants.TOLERANCE)


@pytest.mark.parametrize("name", ["gqa", "mla", "kpa"])
def test_attention_alone_is_causal(name):
    layer = kvjax.build_attention(PLAIN[name])
    x = jax.random.normal(jax.random.key(0), (1, 9, PLAIN[name].width))
    params = jax.jit(layer.init)(jax.random.key(1), x)
    influence = jax.jit(jax.jacrev(lambda x: layer.apply(params, x)[0].sum(-1)))(x)[:, 0]
    influence = np.abs(influence).sum(-1)
    assert (influence[np.triu_indices(9, 1)] == 0).all(), "no output depends on a later token"
    assert (influence[np.tril_indices(9)] > 0).all(), "every output depends on itself and every earlier token"


def test_low_precision_gradients_of_frequent_tokens_add_up():
    """In bfloat16 a sum of equal terms stops growing at 256: gradients of the embedding must be added in float32."""
    def embedding_gradient(dtype):
        config = model_config(GQA, dtype=dtype, tie_embeddings=False)
        model, params = kvjax.build_model(config), invariants.random_params(config)
        tokens = jnp.full((8, 512), 3)
        loss = lambda p: jax.nn.log_softmax(model.apply({"params": p}, tokens))[..., 5].sum()
        return jax.jit(jax.grad(loss))(params)["embedding"][3]
    exact = embedding_gradient("float32")
    assert np.linalg.norm(embedding_gradient("bfloat16") - exact) < 0.05 * np.linalg.norm(exact)


def test_norm_scales_are_not_rounded_to_the_compute_type():
    config = model_config(GQA, dtype="bfloat16")
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
        config = PLAIN["kpa"]
        model, params, tokens, full = invariants.full_pass(config)
        step = self.variant(lambda p, t, c: kvjax.decode(model, p, t, c, last_only=True))
        cache = kvjax.init_cache(config, invariants.BATCH, 20)
        _, cache = step(params, tokens[:, :4], cache)
        logits, cache = step(params, tokens[:, 4:8], cache)
        chex.assert_trees_all_close(logits, full[:, 7], atol=invariants.TOLERANCE)


@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_decode_under_vmap_and_grad(name):
    config = PLAIN[name]
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
