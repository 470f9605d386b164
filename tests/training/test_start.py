"""Runs that start from trained models."""

import dataclasses
import importlib
import json
import shutil

import chex
import jax
import numpy as np
import pytest

from kvjax.attention import CrossLayer, Kronecker, SkipV1
from kvjax.config import ConfigError, ModelConfig
from kvjax.convert.folder import load_model, save_model
from kvjax.evaluation import run as evaluation
from kvjax.model import parameters
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


@pytest.mark.parametrize("devices", [
    pytest.param(slice(1), id="one", marks=pytest.mark.full), pytest.param(slice(8), id="all"),
    pytest.param(slice(4, 8), id="not the first")])
def test_a_run_starts_from_a_converted_model_and_says_what_that_cost(base, tmp_path, devices, capsys):
    config, folder = base
    source, devices = Source(folder), jax.devices()[devices]
    target = uptrained(config, folder, SkipV1(), steps=4)
    state = train(target, tmp_path / "run", devices=devices, source=source, stop_after=1)
    told = json.loads((tmp_path / "run" / "conversion.json").read_text())
    assert f"source {told['source_loss']:.4f}, converted {told['converted_loss']:.4f}" in capsys.readouterr().out
    measured = evaluation.validation_loss(evaluation.restore(folder), config.train.eval_batches)["loss"]
    assert told["source_loss"] == pytest.approx(measured, abs=1e-5)
    assert told["converted_loss"] > told["source_loss"] and told["fits"] == [] and told["surviving_pairs"] is None
    # One small step away from the source's first layer, not from random weights.
    before = unstack_layers(config.model, load_model(folder)[1])[1][0]
    after = unstack_layers(target.model, jax.device_get(state.params))[1][0]
    step = target.optimizer.peak_lr * 2
    chex.assert_trees_all_close(after, jax.tree.map(np.asarray, before), atol=step)
    again = train(target, tmp_path / "run", devices=devices, source=source)
    assert int(again.step) == 4, "the same command resumes, and converts nothing"
    assert evaluation.restore(tmp_path / "run").config == target


def test_conversions_by_regression_read_the_text_of_the_run(base, tmp_path, one_device, monkeypatch):
    monkeypatch.setattr("kvjax.training.start.CALIBRATION_TOKENS", 1024)
    config, folder = base
    target = uptrained(config, folder, CrossLayer(2), steps=1)
    train(target, tmp_path / "run", devices=one_device, source=Source(folder))
    told = json.loads((tmp_path / "run" / "conversion.json").read_text())
    assert [(fit["layer"], fit["state"]) for fit in told["fits"]] == [(1, "k"), (1, "v"), (2, "k"), (2, "v")]
    assert all(fit["r_squared"] < 1 for fit in told["fits"])


def test_another_source_is_another_run(base, tmp_path, one_device):
    config, folder = base
    source = Source(folder)
    target = uptrained(config, folder, SkipV1(), steps=1)
    train(target, tmp_path / "run", devices=one_device, source=source)
    other = dataclasses.replace(target, train=dataclasses.replace(target.train, init_from="elsewhere"))
    with pytest.raises(ConfigError, match="train.init_from"):
        train(other, tmp_path / "run", devices=one_device, source=source)


def test_what_cannot_start_is_refused_before_the_folder_is_made(base, tmp_path, one_device):
    config, folder = base
    bare = tmp_path / "bare"
    save_model(bare, *load_model(folder)[:2])
    wide = dataclasses.replace(config.model, width=64)
    cases = [
        (uptrained(config, folder, SkipV1(), steps=1), None, "goes with the trained model itself"),
        (config, Source(folder), "goes with the trained model itself"),
        (uptrained(config, folder, SkipV1(0.25), steps=1), Source(folder), "0.25 of the 2 of v"),
        (uptrained(dataclasses.replace(config, model=wide), folder, SkipV1(), steps=1), Source(folder), "model.width"),
        (uptrained(config, bare, SkipV1(), steps=1), Source(bare), "brings no tokenizer"),
    ]
    for target, source, words in cases:
        with pytest.raises(ConfigError, match=words):
            train(target, tmp_path / "run", devices=one_device, source=source)
        assert not (tmp_path / "run").exists()


def test_a_run_does_not_overwrite_the_model_that_it_starts_from(base, tmp_path, one_device):
    config, folder = base
    target = uptrained(config, folder, SkipV1(), steps=1)
    (tmp_path / "link").symlink_to(folder)
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for run_dir in (folder, folder.parent, tmp_path / "link"):
        with pytest.raises(ConfigError, match="lies in the run's folder .*: choose another --run-dir"):
            train(target, run_dir, devices=one_device, source=Source(folder), overwrite=True)
    assert files == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_resumes_without_the_model_that_it_started_from(base, tmp_path, one_device):
    config, folder = base
    copy = tmp_path / "base"
    shutil.copytree(folder, copy)
    target = uptrained(config, copy, SkipV1(), steps=4)
    train(target, tmp_path / "run", devices=one_device, source=Source(copy), stop_after=2)
    shutil.rmtree(copy)
    with pytest.raises(ConfigError, match="is not a folder"):
        Source(copy)
    source = Source(copy, tmp_path / "run")
    assert int(train(target, tmp_path / "run", devices=one_device, source=source).step) == 4


def test_a_source_may_be_used_again(base, tmp_path, one_device):
    config, folder = base
    source = Source(folder)
    target = uptrained(config, folder, SkipV1(), steps=1)
    first, second = (train(target, tmp_path / name, devices=one_device, source=source) for name in ("a", "b"))
    chex.assert_trees_all_equal(first.params, second.params)


def test_the_command_line_starts_from_a_run(base, tmp_path, monkeypatch, capsys):
    config, folder = base
    command = importlib.import_module("train")
    monkeypatch.chdir(tmp_path)
    settings = ["--train.steps", "1", "--optimizer.warmup-steps", "0", "--data.source", config.data.source,
                "--train.sample-tokens", "0", "--train.batch-size", "8"]
    command.main(["mqa_uptrain", "--init_from", str(folder), *settings])
    restored = evaluation.restore(tmp_path / "runs" / "mqa_uptrain")
    assert restored.config.train.init_from == str(folder) and restored.config.model.attention.kv_heads == 1
    assert "converted" in capsys.readouterr().out
    for wrong, words in ((["mqa_uptrain"], "continues a trained model"), (["quickstart", "--train.init-from", "x"],
                                                                          "say --init-from MODEL")):
        with pytest.raises(ConfigError, match=words):
            command.main(wrong)
    with pytest.raises(ConfigError, match="cannot be made of a model"):
        save_model(tmp_path / "kpa", *kpa_model())
        command.main(["mqa_uptrain", "--init-from", str(tmp_path / "kpa")])


def kpa_model():
    model = ModelConfig(Kronecker(2, 2, 2, 4), vocab_size=256, layers=1, width=16, feed_forward_width=16)
    return model, jax.tree.map(lambda p: np.zeros(p.shape, np.float32), parameters(model))
