"""kvjax as a library: the promises of its public functions."""

import subprocess
import sys

import invariants
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import CASES, VOCAB, model_config

import kvjax


def test_attention_module_alone_has_the_weights_of_the_method():
    layer = kvjax.build_attention(model_config(CASES["kpa"].attention))
    x = jnp.ones((2, 5, 32))
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x)["params"]["layer_0"]
    assert {name: w.shape for name, w in shapes.items()} == {
        "q_a": (32, 3, 4, 2), "q_b": (32, 3, 2, 4), "k_a": (32, 2, 4, 2), "k_b": (32, 2, 2, 4),
        "v_a": (32, 2, 4, 2), "v_b": (32, 2, 2, 4), "o_proj": (8, 8, 32)}
    with pytest.raises(kvjax.ConfigError, match="segments 0 to 0"):
        kvjax.build_attention(model_config(CASES["kpa"].attention), segment=1)


def test_tokens_outside_the_vocabulary_are_not_silently_others():
    model, params, tokens, _ = invariants.full_pass(model_config(CASES["kpa"].attention))
    for unknown in (VOCAB, -1):
        logits = model.apply({"params": params}, tokens.at[0, 3].set(unknown))
        assert np.isnan(logits[0, 3:]).all() and np.isfinite(logits[0, :3]).all() and np.isfinite(logits[1]).all()


def test_logit_softcap_bounds_logits():
    config = model_config(CASES["gqa"].attention, logit_softcap=0.5)
    _, _, _, capped = invariants.full_pass(config)
    _, _, _, free = invariants.full_pass(model_config(CASES["gqa"].attention))
    np.testing.assert_allclose(capped, 0.5 * np.tanh(free / 0.5), atol=1e-5)


def test_dropout_is_active_only_with_a_key():
    config = model_config(CASES["gqa"].attention, dropout=0.5)
    model, params, tokens, full = invariants.full_pass(config)
    plain = invariants.full_pass(model_config(CASES["gqa"].attention))[3]
    np.testing.assert_array_equal(full, plain)
    one, other = (model.apply({"params": params}, tokens, rngs={"dropout": jax.random.key(i)}) for i in (0, 1))
    assert np.abs(one - full).max() > 0.1 and np.abs(one - other).max() > 0.1


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_rematerialisation_changes_no_gradient(remat):
    def gradient(config):
        model, params, tokens, _ = invariants.full_pass(config)
        return jax.jit(jax.grad(lambda p: jax.nn.log_softmax(model.apply({"params": p}, tokens))[..., 3].sum()))(params)
    kept, again = (gradient(model_config(CASES["kpa"].attention, remat=how)) for how in ("none", remat))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), kept, again)


def test_importing_the_library_needs_no_training_packages():
    code = """
import sys
for name in ("grain", "tensorflow_datasets", "tyro", "tokenizers", "tensorboardX"):
    sys.modules[name] = None
import kvjax, kvjax.config_files, kvjax.sharding, kvjax.flops
print(kvjax.__version__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_published_flops_are_six_per_weight_and_attention():
    from kvjax.flops import keys_seen, training_flops_per_token
    config = model_config(CASES["mha"].attention)
    weights = config.layers * (4 * 32 * 32 + 3 * 32 * 48) + config.vocab_size * 32
    assert training_flops_per_token(config, 9) == 6 * weights + 3 * config.layers * 4 * 32 * 5
    assert keys_seen(4, None) == 2.5 and keys_seen(4, 2) == 1.75
