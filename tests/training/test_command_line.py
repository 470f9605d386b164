"""train.py as a program, and what it does with signals and with several processes."""

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from programs import xla_flags

from kvjax.attention import CrossLayer
from kvjax.config import ConfigError, save
from kvjax.config_files import load_config
from kvjax.training.checkpoint import restore_params
from kvjax.training.loop import train

SCRIPT = Path(__file__).resolve().parents[2] / "train.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_script"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def config_file(tmp_path, config):
    """config_file(config) -> path of a Python file that holds it."""
    def write(config=config):
        save(config, tmp_path / "tiny.json")
        path = tmp_path / "tiny.py"
        path.write_text("from kvjax.config import Config, load\n"
                        f"config = load(Config, {str(tmp_path / 'tiny.json')!r})\n")
        return str(path)
    return write


@pytest.fixture
def start(compile_once):
    """start(*arguments, devices=1) -> a running train.py."""
    environment = {name.upper(): str(value) for name, value in compile_once.items()}
    running = []

    def run(*arguments, devices=1):
        running.append(subprocess.Popen(
            [sys.executable, str(SCRIPT), *map(str, arguments)], text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env=os.environ | environment | {"XLA_FLAGS": xla_flags(devices)}))
        return running[-1]
    yield run
    for process in running:
        process.kill()


def losses(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_typed_overrides(script, config_file, config):
    args = script.parse([config_file(), "--optimizer.peak-lr", "3e-4", "--model.attention.kv-heads", "1",
                         "--model.window", "8", "--data.pack", "False", "--overwrite"])
    assert args.config.optimizer.peak_lr == 3e-4 and args.config.model.attention.kv_heads == 1
    assert args.config.model.window == 8 and not args.config.data.pack and args.overwrite
    assert args.config.train == config.train


@pytest.mark.parametrize("arguments, told", [
    (["--optimizer.peek-lr", "1"], "--optimizer.peak-lr"),
    (["--optimizer.peak-lr", "fast"], "could not convert string to float"),
    (["--overwite"], "--overwrite"),
    (["--train.batch-size", "0"], "batch_size is 0: it must be above 0"),
])
def test_what_is_misspelt_or_ill_typed_is_refused(script, config_file, capsys, arguments, told):
    with pytest.raises(SystemExit) as caught:
        script.parse([config_file(), *arguments])
    captured = capsys.readouterr()
    assert caught.value.code == 2 and told in re.sub(r"\s*│\n│\s*", " ", captured.out + captured.err)


def test_settings_that_do_not_fit_together_are_refused(script, config_file, capsys):
    with pytest.raises(SystemExit):
        script.parse([config_file(), "--train.accumulation", "3"])
    assert "batch_size 8 is not a multiple of" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    (["--process-id", "0", "--process-count", "2"], "only with --distributed"),
    (["--topology", "v5e:2x2"], "only with --dry-run"),
])
def test_options_that_need_another_are_not_ignored(script, config_file, arguments, message):
    with pytest.raises(ConfigError, match=message):
        script.main([config_file(), *arguments])


def test_the_name_comes_first(script, config_file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    Path(config_file()).rename(tmp_path / "configs" / "quickstart.py")
    assert script.parse([]).name == "quickstart"
    with pytest.raises(ConfigError, match="put the configuration's name first"):
        script.parse(["--overwrite", "other"])


def test_configurations_that_do_not_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny_model.py").write_text("config = 3\n")
    with pytest.raises(ConfigError, match="no configuration 'tiny_modle'.*did you mean tiny_model"):
        load_config("tiny_modle")
    with pytest.raises(ConfigError, match="no configuration 'nowhere/x.py'"):
        load_config("nowhere/x.py")
    with pytest.raises(ConfigError, match=r"holds no `config = Config\(...\)`"):
        load_config("tiny_model")


def test_a_configuration_for_accelerators_needs_leave_to_run_on_the_cpu(
        script, config_file, config, changed, tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr("kvjax.training.loop.train",
                        lambda config, folder, overwrite, source: runs.append((folder, overwrite)))
    path = config_file(changed(config, train=dict(accelerator=True)))
    with pytest.raises(ConfigError, match="meant for a TPU or GPU.*--allow-cpu"):
        script.main([path])
    script.main([path, "--allow-cpu"])
    script.main([path, "--allow-cpu", "--overwrite", "--run-dir", str(tmp_path / "run")])
    assert runs == [(Path("runs/tiny"), False), (tmp_path / "run", True)]


def test_sigterm_saves_and_the_same_command_resumes(start, config_file, config, changed, tmp_path, one_device):
    config = changed(config, train=dict(steps=20_000, log_every=1), checkpoint=dict(every_steps=10_000))
    command = (config_file(config), "--run-dir", tmp_path / "run")
    process = start(*command)
    while not (tmp_path / "run" / "metrics.jsonl").exists() or len(losses(tmp_path / "run")) < 3:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    step = int(re.search(r"stopped and saved after step (\d+): the same command resumes", output)[1])
    assert "model:      attention=grouped_query(heads=2" in output
    assert restore_params(tmp_path / "run")[2] == step and max(losses(tmp_path / "run")) == step

    state = train(config, tmp_path / "run", devices=one_device, stop_after=step + 2)
    assert int(state.step) == step + 2 and list(losses(tmp_path / "run")) == list(range(1, step + 3))


@pytest.fixture
def two_processes(start):
    """two_processes(*arguments) -> what both said, after they ended well."""
    def run(*arguments):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        processes = [start(*arguments, "--distributed", "--coordinator", address, "--process-id", i,
                           "--process-count", 2) for i in range(2)]
        outputs = [process.communicate(timeout=240)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
        return outputs
    return run


def test_two_processes_equal_one(two_processes, config_file, config, changed, tmp_path, one_device):
    config = changed(config, train=dict(steps=3, log_every=1, accumulation=2), mesh=dict(data=1, fsdp=2))
    outputs = two_processes(config_file(config), "--run-dir", tmp_path / "two")
    assert "step 3/3" in outputs[0] and "step 3/3" not in outputs[1]

    state = train(changed(config, mesh=dict(fsdp=1)), tmp_path / "one", devices=one_device)
    two, one = losses(tmp_path / "two"), losses(tmp_path / "one")
    np.testing.assert_allclose([two[n] for n in (1, 2, 3)], [one[n] for n in (1, 2, 3)], rtol=1e-5)
    _, params, step = restore_params(tmp_path / "two")
    assert step == 3
    chex.assert_trees_all_close(jax.device_get(params), jax.device_get(state.params), atol=1e-3)


def test_two_processes_start_from_a_trained_model_as_one_does(
        two_processes, script, config_file, config, changed, tmp_path, one_device):
    base = changed(config, model=dict(dropout=0.0), train=dict(steps=1, eval_every=1000),
                   optimizer=dict(warmup_steps=0))
    train(base, tmp_path / "base", devices=one_device)
    target = changed(base, model=dict(sharing=CrossLayer(2)), train=dict(steps=2, log_every=1, batch_size=128))
    arguments = config_file(target), "--init-from", str(tmp_path / "base")
    two_processes(*arguments, "--run-dir", tmp_path / "two", "--mesh.fsdp", "2", "--mesh.data", "1")
    script.main([*arguments, "--run-dir", str(tmp_path / "one"), "--mesh.data", "8"])
    one, two = (json.loads((tmp_path / name / "conversion.json").read_text()) for name in ("one", "two"))
    for loss in ("source_loss", "converted_loss"):
        assert two[loss] == pytest.approx(one[loss], abs=1e-4)
    assert [fit["layer"] for fit in two["fits"]] == [1, 1, 2, 2]
    fitted = [[fit["r_squared"] for fit in told["fits"]] for told in (one, two)]
    np.testing.assert_allclose(*fitted, atol=1e-3)
    np.testing.assert_allclose(list(losses(tmp_path / "two").values()), list(losses(tmp_path / "one").values()),
                               rtol=1e-4)
