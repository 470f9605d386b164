"""Weights & Biases gets the metrics that the run's folder gets, and a resumed run goes on there."""

import json
import sys
from types import SimpleNamespace

import pytest

from kvjax.config import ConfigError, TrainConfig
from kvjax.training import run_folder
from kvjax.training.loop import train
from kvjax.training.metrics import MetricsFiles


@pytest.fixture
def wandb(monkeypatch):
    """The package, of which calls are kept: `opened` settings, `logged` (step, values) and `ended` exit codes."""
    calls = SimpleNamespace(opened=[], logged=[], ended=[])
    run = SimpleNamespace(log=lambda values, step: calls.logged.append((step, values)),
                          finish=lambda exit_code: calls.ended.append(exit_code))
    calls.init = lambda **settings: calls.opened.append(settings) or run
    monkeypatch.setitem(sys.modules, "wandb", calls)
    return calls


def test_a_run_reports_and_goes_on_there_when_it_is_resumed(wandb, config, changed, one_device, tmp_path):
    first, later = changed(config, train=dict(wandb="small")), changed(config, train=dict(wandb="small", log_every=1))
    train(first, tmp_path / "run", devices=one_device, stop_after=4)
    train(later, tmp_path / "run", devices=one_device)
    before, after = wandb.opened
    assert before["id"] == after["id"] == (tmp_path / "run" / run_folder.WANDB_ID).read_text()
    assert (before["project"], before["name"], before["resume"]) == ("small", "run", "allow")
    assert before["config"]["train"]["steps"] == 8 and before["dir"] == str(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [{"step": step} | values for step, values in wandb.logged] == lines and wandb.ended == [0, 0]


def test_another_project_or_none_does_not_stop_a_resume(wandb, config, changed, tmp_path):
    run_folder.refuse_differences(config, changed(config, train=dict(wandb="small")), tmp_path)
    with MetricsFiles(tmp_path, 0, config) as files:
        files.write(1, {"loss": 1.0})
    assert not wandb.opened and not (tmp_path / run_folder.WANDB_ID).exists()


def test_a_failure_is_told_there(wandb, config, changed, tmp_path):
    with pytest.raises(FloatingPointError), MetricsFiles(tmp_path, 0, changed(config, train=dict(wandb="small"))):
        raise FloatingPointError
    assert wandb.ended == [1]


def test_a_missing_package_is_told_before_anything_is_done(monkeypatch, config, changed, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="train.wandb is 'small'.*pip install wandb"):
        train(changed(config, train=dict(wandb="small")), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="wandb is ''"):
        TrainConfig(steps=1, batch_size=1, wandb="")
