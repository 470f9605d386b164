import dataclasses

import jax
import numpy as np
import pytest

from kvjax.config import ConfigError, OptimizerConfig
from kvjax.training.optimizer import decay_mask, learning_rate, make_optimizer


def rates(steps, **settings):
    schedule = learning_rate(OptimizerConfig(peak_lr=1.0, final_lr_fraction=0.1, **settings), steps)
    return np.array([schedule(n) for n in range(steps)])


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warm_up_rises_linearly_to_the_peak(schedule):
    np.testing.assert_allclose(rates(20, schedule=schedule, warmup_steps=4)[:5], [0.25, 0.5, 0.75, 1, 1], atol=0.02)
    np.testing.assert_allclose(rates(20, schedule=schedule, warmup_steps=4)[3], 1)


def test_cosine_ends_at_the_final_value_in_the_last_step():
    values = rates(20, schedule="cosine", warmup_steps=4)
    expected = 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * np.arange(1, 17) / 16))
    np.testing.assert_allclose(values[4:], expected, atol=1e-6)
    np.testing.assert_allclose(values[-1], 0.1, atol=1e-6)


def test_wsd_stays_and_then_falls_linearly():
    values = rates(20, schedule="wsd", warmup_steps=4, decay_fraction=0.25)
    np.testing.assert_allclose(values[3:15], 1)
    np.testing.assert_allclose(values[15:], [0.82, 0.64, 0.46, 0.28, 0.1], atol=1e-6)


def test_constant_without_warm_up():
    np.testing.assert_allclose(rates(5, schedule="constant", warmup_steps=0), 1)


def test_wsd_longer_than_the_run_is_refused():
    with pytest.raises(ConfigError, match="warmup_steps 15 and a decay of 10 steps .* longer than .* 20"):
        learning_rate(OptimizerConfig(schedule="wsd", warmup_steps=15, decay_fraction=0.5), 20)
    with pytest.raises(ConfigError, match="warmup_steps 20 does not end before .* train.steps 20"):
        learning_rate(OptimizerConfig(warmup_steps=20), 20)


def test_decay_applies_to_matrices_only_though_layers_are_stacked(config):
    mask = decay_mask(config.model)
    layer = mask["segment_0"]["layer_0"]
    assert mask["embedding"] and layer["feed_forward"]["gate"] and layer["attention"]["o_proj"]
    assert not mask["final_norm"] and not layer["attention_norm"] and not layer["feed_forward_norm"]


def test_biases_do_not_decay_whatever_their_shape(config):
    heads = dataclasses.replace(config.model.attention, qkv_bias=True, output_bias=True)
    model = dataclasses.replace(config.model, attention=heads, norm="layer", feed_forward_bias=True)
    mask = jax.tree_util.tree_leaves_with_path(decay_mask(model))
    biases = {path[-1].key: decays for path, decays in mask if "bias" in path[-1].key}
    assert {"q_bias", "k_bias", "v_bias", "o_bias", "up_bias", "down_bias", "attention_norm_bias"} <= biases.keys()
    assert not any(biases.values())


def test_only_matrices_shrink_without_gradient(config):
    config = dataclasses.replace(config, optimizer=OptimizerConfig(peak_lr=1e-2, warmup_steps=1, weight_decay=0.5))
    optimizer = make_optimizer(config)
    params = jax.tree.map(lambda m: jax.numpy.ones(3), decay_mask(config.model))
    updates, _ = optimizer.update(jax.tree.map(jax.numpy.zeros_like, params), optimizer.init(params), params)
    np.testing.assert_allclose(updates["embedding"], -0.5e-2)
    np.testing.assert_allclose(updates["segment_0"]["layer_0"]["attention_norm"], 0)
