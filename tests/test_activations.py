"""The inputs of all layers, from a plain function of the parameters, are those that the model's own layers see."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from invariants import random_params
from variants import VOCAB, model_config

import kvjax
from kvjax.attention import DenseFormer, GroupedQuery, PathResidual, ResFormer, Yoco, make_attention
from kvjax.model.activations import layer_inputs

GQA = GroupedQuery(heads=4, kv_heads=2, head_dim=8)
CONFIGS = {
    "gqa": model_config(GroupedQuery(heads=4, kv_heads=2, head_dim=8, qk_norm=True), window=3),
    "gpt2": model_config(GroupedQuery(heads=4, kv_heads=4, head_dim=8, qkv_bias=True, output_bias=True), norm="layer",
                         positions="learned", feed_forward="gelu", feed_forward_bias=True),
    "resformer": model_config(GQA, sharing=ResFormer()),
    "denseformer": model_config(GQA, sharing=DenseFormer()),
    "residual": model_config(GQA, layers=4, sharing=PathResidual(layers=2, delta=2)),
    "yoco": model_config(GQA, layers=4, sharing=Yoco(window=3)),
}


def seen_by_the_model(config, params, tokens, monkeypatch):
    """Inputs of the layers of the model itself: it hands out the rows that a layer makes, so the input joins them."""
    attention, cache = type(make_attention(config)), kvjax.init_cache(config, *tokens.shape)
    rows = attention.rows
    with monkeypatch.context() as patched:
        patched.setattr(attention, "rows", lambda self, layer, weights, x, *rest: {
            **rows(self, layer, weights, x, *rest), "layer_input": x})
        extend = jax.jit(partial(kvjax.build_model(config).apply, method="extend"))
        made = extend({"params": params}, tokens, cache)[1]["layer_input"]
    lower = config.layers // 2
    return jnp.delete(made, lower, axis=0) if isinstance(config.sharing, Yoco) else made  # YOCO's source is no layer


@pytest.mark.parametrize("name", CONFIGS)
def test_layer_inputs_are_those_of_the_model(name, monkeypatch):
    config = CONFIGS[name]
    params = random_params(config)
    tokens = jax.random.randint(jax.random.key(1), (2, 7), 0, VOCAB)
    found = layer_inputs(config, params, tokens)
    assert found.shape == (config.layers, 2, 7, config.width) and found.dtype == jnp.float32
    np.testing.assert_allclose(found, seen_by_the_model(config, params, tokens, monkeypatch), atol=2e-5)
    assert np.abs(found[1:] - found[:-1]).mean() > 0.1


def test_documents_of_a_packed_row_do_not_see_each_other():
    config = CONFIGS["gqa"]
    params, ids = random_params(config), jnp.array([[1, 1, 1, 2, 2, 2, 2]])
    tokens = jax.random.randint(jax.random.key(1), (1, 7), 0, VOCAB)
    packed = layer_inputs(config, params, tokens, ids)
    apart = [layer_inputs(config, params, tokens[:, part]) for part in (slice(0, 3), slice(3, 7))]
    np.testing.assert_allclose(packed, jnp.concatenate(apart, axis=2), atol=1e-5)
    assert np.abs(packed - layer_inputs(config, params, tokens)).max() > 0.1


def test_unknown_tokens_are_not_silently_others():
    config = CONFIGS["gqa"]
    for unknown in (VOCAB, -1):
        found = layer_inputs(config, random_params(config), jnp.array([[1, 2, unknown, 3]]))
        assert np.isfinite(found[:, :, :2]).all() and np.isnan(found[:, :, 2:]).all()
