"""Runs that start from trained models."""

import dataclasses
import json

import chex
import jax
import numpy as np
import pytest

from kvjax.attention import CrossLayer, SkipV1
from kvjax.config import ConfigError
from kvjax.convert.folder import load_model
from kvjax.evaluation import run as evaluation
from kvjax.model.layers import unstack_layers
from kvjax.training.loop import train
from kvjax.training.start import Source


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return tmp_path_factory.mktemp("base") / "run"


@pytest.fixture
def base(trained, config, one_device):
    """(configuration, folder) of a small run that is done."""
    train(config, trained, devices=one_device)
    return config, trained


def uptrained(config, folder, sharing, **train_settings):
    model = dataclasses.replace(config.model, sharing=sharing, dropout=0.0)
    settings = dataclasses.replace(config.train, init_from=str(folder), **train_settings)
    schedule = dataclasses.replace(config.optimizer, warmup_steps=0)
    return dataclasses.replace(config, model=model, train=settings, optimizer=schedule)


def test_a_run_starts_from_a_converted_model_and_says_what_that_cost(base, tmp_path, one_device, capsys):
    config, folder = base
    source = Source(*load_model(folder))
    target = uptrained(config, folder, SkipV1(), steps=4)
    state = train(target, tmp_path / "run", devices=one_device, source=source, stop_after=1)
    told = json.loads((tmp_path / "run" / "conversion.json").read_text())
    assert f"source {told['source_loss']:.4f}, converted {told['converted_loss']:.4f}" in capsys.readouterr().out
    measured = evaluation.validation_loss(evaluation.restore(folder), config.train.eval_batches)["loss"]
    assert told["source_loss"] == pytest.approx(measured, abs=1e-5)
    assert told["converted_loss"] > told["source_loss"] and told["fits"] == [] and told["surviving_pairs"] is None
    # One small step away from the source's first layer, not from random weights.
    before = unstack_layers(config.model, source.params)[1][0]
    after = unstack_layers(target.model, jax.device_get(state.params))[1][0]
    step = target.optimizer.peak_lr * 2
    chex.assert_trees_all_close(after, jax.tree.map(np.asarray, before), atol=step)
    again = train(target, tmp_path / "run", devices=one_device, source=source)
    assert int(again.step) == 4, "the same command resumes, and converts nothing"
    assert evaluation.restore(tmp_path / "run").config == target


def test_conversions_by_regression_read_the_text_of_the_run(base, tmp_path, one_device, monkeypatch):
    monkeypatch.setattr("kvjax.training.start.CALIBRATION_TOKENS", 1024)
    config, folder = base
    target = uptrained(config, folder, CrossLayer(2), steps=1)
    train(target, tmp_path / "run", devices=one_device, source=Source(*load_model(folder)))
    told = json.loads((tmp_path / "run" / "conversion.json").read_text())
    assert [(fit["layer"], fit["state"]) for fit in told["fits"]] == [(0, "k"), (0, "v"), (1, "k"), (1, "v")]
    assert all(fit["r_squared"] < 1 for fit in told["fits"])


def test_another_source_is_another_run(base, tmp_path, one_device):
    config, folder = base
    source = Source(*load_model(folder))
    target = uptrained(config, folder, SkipV1(), steps=1)
    train(target, tmp_path / "run", devices=one_device, source=source)
    other = dataclasses.replace(target, train=dataclasses.replace(target.train, init_from="elsewhere"))
    with pytest.raises(ConfigError, match="train.init_from"):
        train(other, tmp_path / "run", devices=one_device, source=source)
