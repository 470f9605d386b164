"""eval.py on a tiny trained run, from its folder alone."""

import importlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from programs import xla_flags

from kvjax.attention import Kronecker
from kvjax.config import (
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from kvjax.convert.folder import save_model
from kvjax.data.pipeline import token_splits
from kvjax.data.tokenizers import ByteTokenizer
from kvjax.evaluation import run
from kvjax.training.loop import train

ROOT = Path(__file__).resolve().parents[2]
evaluation = importlib.import_module("eval")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of four steps with checkpoints of steps 2 and 4, and non-ASCII text."""
    text, folder = tmp_path_factory.mktemp("text"), tmp_path_factory.mktemp("runs") / "tiny"
    words = random.Random(0)
    for i in range(12):
        (text / f"{i}.txt").write_text(" ".join(words.choices(["naïve", "café", "fox", "🦜"], k=40)), encoding="utf-8")
    config = Config(
        model=ModelConfig(Kronecker(2, 2, 2, 4, q_rank=2), vocab_size=256, layers=1, width=16, feed_forward_width=24,
                          context_length=32, dtype="float32"),
        train=TrainConfig(steps=4, batch_size=4, eval_batches=1, sample_tokens=0, accelerator=False),
        data=DataConfig(source=f"text:{text}", validation_fraction=0.3),
        optimizer=OptimizerConfig(warmup_steps=1),
        checkpoint=CheckpointConfig(every_steps=2),
    )
    train(config, folder, devices=jax.devices()[:1])
    return folder


@pytest.mark.parametrize(("named", "restored"), [("tpu", "auto"), ("gpu", "auto"), ("reference", "reference")])
def test_kernels_of_other_devices_are_not_asked_for(run_dir, tmp_path, named, restored):
    folder = shutil.copytree(run_dir, tmp_path / "elsewhere")
    settings = json.loads((folder / "config.json").read_text())
    settings["model"]["kernel"] = named
    (folder / "config.json").write_text(json.dumps(settings))
    assert run.restore(folder).model.config.kernel == restored


@pytest.fixture
def eval_py(capsys):
    """eval_py(*arguments) runs the command here, on eight devices, and returns what it printed."""
    def run(*arguments):
        capsys.readouterr()
        evaluation.main([str(argument) for argument in arguments])
        return capsys.readouterr().out
    return run


def test_evaluates_and_continues_prompts_from_another_folder_on_one_device(run_dir, tmp_path):
    environment = os.environ | {"XLA_FLAGS": xla_flags(1)}
    command = [sys.executable, ROOT / "eval.py", run_dir, "--prompt", "café ", "--prompt", "a longer naïve prompt ",
               "--samples", "2", "--max-new-tokens", "20", "--top-k", "5"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=tmp_path, timeout=300,
                          env=environment | {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"})
    assert done.returncode == 0, done.stderr
    for shown in ("step 4", "bits per byte", "perplexity", "k_a", "times smaller"):
        assert shown in done.stdout
    assert done.stdout.count("\ncafé ") == 2 and done.stdout.count("\na longer naïve prompt ") == 2

    results = json.loads((run_dir / "eval" / "4.json").read_text())
    data = DataConfig(**json.loads((run_dir / "config.json").read_text())["data"])
    assert results["bytes"] == token_splits(data, ByteTokenizer()).validation.text_bytes
    nats = results["loss"] * results["tokens"]
    assert results["bits_per_byte"] == pytest.approx(nats / results["bytes"] / math.log(2))
    trained = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert results["loss"] == pytest.approx(trained[-1]["validation_loss"], rel=1e-5)
    assert results["cache"]["measured"] == results["cache"]["formula"] == 4 * (2 + 2) * (2 * 2 + 2 * 4)


def test_an_earlier_step_is_written_beside_the_newest(run_dir, eval_py):
    newest = run_dir / "eval" / "4.json"
    newest.parent.mkdir(exist_ok=True)
    newest.write_text("{}")
    assert "step 2" in eval_py(run_dir, "--step", 2, "--batches", 1)
    assert json.loads((run_dir / "eval" / "2_of_1_batches.json").read_text())["step"] == 2
    assert "other results" in eval_py(run_dir).replace("\n", " ")
    assert newest.read_text() == "{}"
    eval_py(run_dir, "--overwrite")
    assert json.loads(newest.read_text())["step"] == 4


def test_text_alone(run_dir, eval_py):
    out = eval_py(run_dir, "--batches", 0, "--prompt", "", "--max-new-tokens", 5, "--temperature", 0)
    assert "perplexity" not in out and "k_a" in out


@pytest.mark.parametrize("arguments, words", [
    (["--step", 3], "step 3"), (["--prompt", "a", "--top-p", 2], "top_p is 2"), (["--samples", 0], "samples is 0"),
    (["--max-new-tokens", 0], "max_new_tokens is 0"), (["--batches", -1], "batches is -1"),
    (["--seed", 10**20], "seed is 1000"), (["--validation-fraction", 2], "validation_fraction is 2"),
    (["--cache-report", "--step", 7, "--prompt", "a"], "leave out --step, --prompt"),
])
def test_bad_arguments_are_named(run_dir, eval_py, arguments, words):
    with pytest.raises(ConfigError, match=words):
        eval_py(run_dir, *arguments)


def test_misspelt_options_get_the_nearest_name(run_dir, eval_py, capsys):
    with pytest.raises(SystemExit):
        eval_py(run_dir, "--temprature", 1)
    assert "--temperature" in capsys.readouterr().err


def test_folders_that_hold_no_run_are_named(run_dir, eval_py, tmp_path):
    with pytest.raises(ConfigError, match="missing/config.json does not exist"):
        eval_py(tmp_path / "missing")
    shutil.copy(run_dir / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="no checkpoint"):
        eval_py(tmp_path)


def test_errors_are_one_line_and_exit_with_two(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "eval.py", tmp_path], capture_output=True, encoding="utf-8")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_quantised_cache_is_measured_and_generated_from(run_dir, eval_py):
    out = eval_py(run_dir, "--cache-dtype", "int8", "--batches", 1, "--prompt", "fox", "--max-new-tokens", 5)
    results = json.loads((run_dir / "eval" / "4_of_1_batches_int8_cache.json").read_text())
    assert "k_a_scale" in out and "\nfox" in out
    assert results["cache"]["measured"] == results["cache"]["formula"] == (2 + 2) * (2 * 2 + 2 * 4) + 4 * 2 * 2
    assert results["cache_loss_difference"] == results["cache_loss"] - results["cache_loss_unquantised"]
    assert abs(results["cache_loss_unquantised"] - results["loss"]) < 0.5


def test_a_cache_report_needs_no_run(eval_py):
    assert "12.50" in eval_py("gqa_1500m", "--cache-report"), "times smaller than multi-head attention"
    assert "float32" in eval_py("gqa_1500m", "--cache-report", "--dtype", "float32")


def test_what_is_no_folder_of_a_run_says_what_it_is(eval_py, tmp_path):
    (tmp_path / "config.py").write_text("")
    for name, words in (("gqa_1500m", "gqa_1500m is a configuration: train it first, or add --cache-report"),
                        (tmp_path / "config.py", "is a file: name a folder"), (tmp_path / "no", "does not exist")):
        with pytest.raises(ConfigError, match=words):
            eval_py(name)


def test_all_of_a_text_can_be_measured(run_dir, eval_py):
    data = DataConfig(**json.loads((run_dir / "config.json").read_text())["data"])
    splits = token_splits(data, ByteTokenizer())
    out = eval_py(run_dir, "--validation-fraction", 1)
    assert f"the held-out part of {data.source} (100.00% of its documents)" in out
    assert f"bytes           {splits.train.text_bytes + splits.validation.text_bytes:,}" in out


def test_a_converted_model_is_evaluated_on_given_text(run_dir, eval_py, tmp_path):
    restored = run.restore(run_dir)
    save_model(tmp_path / "model", restored.config.model, jax.device_get(restored.params), restored.tokenizer)
    text = restored.config.data.source
    out = eval_py(tmp_path / "model", "--data", text, "--prompt", "fox", "--max-new-tokens", 3, "--context-length", 16)
    other = run.adjusted(run.restore(tmp_path / "model"), {"source": text}, context_length=16)
    expected = run.validation_loss(other)["loss"]
    assert f"{expected:.4f}" in out and "\nfox" in out and not (tmp_path / "model" / "eval").exists()
    with pytest.raises(ConfigError, match="step 4: .* is a single model"):
        run.restore(tmp_path / "model", 4)


def test_tasks_are_scored_and_kept(run_dir, tmp_path, capsys):
    folder = shutil.copytree(run_dir, tmp_path / "run")
    rows = [{"query": "a", "choices": ["b", "c"], "gold": 0}, {"query": "d", "choices": ["e", "f"], "gold": 1}]
    (tmp_path / "piqa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ask = [str(folder), "--tasks", "piqa", "--task-data", str(tmp_path), "--task-limit", "1"]
    evaluation.main(ask)
    path = folder / "eval" / "4_piqa_first_1.json"
    found = json.loads(path.read_text())
    assert found["settings"]["tasks"] == ["piqa"] and {one["metric"] for one in found["scores"]} == {"acc", "acc_norm"}
    assert found["mean"] in (0, 1) and f"written to {path}" in " ".join(capsys.readouterr().out.split())
    path.write_text("{}")
    evaluation.main(ask)
    assert path.read_text() == "{}" and "was left as it is" in " ".join(capsys.readouterr().out.split())
    evaluation.main([*ask, "--task-results", str(tmp_path / "elsewhere.json")])
    assert json.loads((tmp_path / "elsewhere.json").read_text()) == found
