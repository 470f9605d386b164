"""Folders of converted models, `load_model` on every form of a trained model, and the command line."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from kvjax.attention import Kronecker
from kvjax.config import CheckpointConfig, Config, ConfigError, ModelConfig, TrainConfig, save
from kvjax.convert import from_huggingface
from kvjax.convert.__main__ import main
from kvjax.convert.folder import load_model, save_model
from kvjax.data.tokenizers import ByteTokenizer, load_tokenizer
from kvjax.model import parameters
from kvjax.training.checkpoint import Checkpoints
from kvjax.training.state import TrainState

GOLDEN = Path(__file__).parents[1] / "data" / "hf_llama_gqa"
KPA = ModelConfig(Kronecker(2, 2, 2, 4, q_rank=2), vocab_size=256, layers=1, width=16, feed_forward_width=24,
                  context_length=32, dtype="float32")


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture
def huggingface(tmp_path):
    """A Hugging Face folder with a tokenizer of three words."""
    folder = tmp_path / "llama"
    folder.mkdir()
    for file in ("config.json", "model.safetensors"):
        (folder / file).write_bytes((GOLDEN / file).read_bytes())
    tokenizer = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1, "b": 2}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def kpa_params():
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda p: rng.standard_normal(p.shape, np.float32), parameters(KPA))


def test_a_model_is_saved_with_its_tokenizer_and_loaded_again(tmp_path, huggingface):
    params = kpa_params()
    save_model(tmp_path / "kpa", KPA, params, load_tokenizer(huggingface))
    config, loaded, tokenizer = load_model(tmp_path / "kpa")
    assert config == KPA
    assert_same(loaded, params)
    assert tokenizer.encode("b a") == [2, 1]
    save_model(tmp_path / "bare", KPA, params)
    assert load_model(str(tmp_path / "bare"))[2] is None


def test_nothing_is_overwritten_and_only_the_models_own_weights_are_saved(tmp_path):
    params = kpa_params()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(ConfigError, match="full is not an empty folder"):
        save_model(tmp_path / "full", KPA, params)
    for folder in (tmp_path / "full" / "file" / "out", tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match="cannot be made: .*choose another folder"):
            save_model(folder, KPA, params)
    del params["embedding"]
    with pytest.raises(ConfigError, match=r"missing: embedding \[256, 16\]"):
        save_model(tmp_path / "other", KPA, params)


def test_a_run_is_loaded_from_its_newest_checkpoint(tmp_path):
    run, params = tmp_path / "run", jax.tree.map(jnp.asarray, kpa_params())
    (run / "checkpoints").mkdir(parents=True)
    save(Config(model=KPA, train=TrainConfig(steps=2, batch_size=2)), run / "config.json")
    ByteTokenizer().save(run / "tokenizer")
    data = iter(grain.MapDataset.range(9).to_iter_dataset())
    with Checkpoints(run, CheckpointConfig()) as checkpoints:
        for step, scale in ((1, 0.5), (2, 1.0)):
            weights = jax.tree.map(lambda x, s=scale: s * x, params)
            checkpoints.save(step, TrainState(jnp.int32(step), weights, jnp.zeros(1), jax.random.key(0)), data)
    model, loaded, tokenizer = load_model(run)
    assert model == KPA and isinstance(tokenizer, ByteTokenizer)
    assert_same(loaded, params)
    main([str(run), str(tmp_path / "converted")])
    again = load_model(tmp_path / "converted")
    assert again[0] == KPA and isinstance(again[2], ByteTokenizer)
    assert_same(again[1], params)


def test_the_command_line_goes_there_and_back(tmp_path, huggingface, capsys):
    main([str(huggingface), str(tmp_path / "converted")])
    main([str(tmp_path / "converted"), str(tmp_path / "back"), "--huggingface"])
    lines = capsys.readouterr().out.splitlines()
    said = "110,016 parameters in float32, GroupedQuery(heads=4, kv_heads=2, head_dim=16"
    assert lines[0].startswith(f"written to {tmp_path / 'converted'}: a model of kvjax's own, {said}")
    assert lines[1].startswith(f"written to {tmp_path / 'back'}: llama, {said}")
    before, after = (load_file(folder / "model.safetensors") for folder in (huggingface, tmp_path / "back"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor, err_msg=name)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == 0
    config, params, tokenizer = load_model(tmp_path / "back")
    assert config == from_huggingface(GOLDEN)[0] and tokenizer.encode("a b") == [1, 2]
    main([str(huggingface), str(tmp_path / "half"), "--huggingface", "--dtype", "bfloat16"])
    assert load_model(tmp_path / "half")[0].dtype == "bfloat16"
    assert "110,016 parameters in bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize(("options", "message"), [
    (["--dtype", "banana"], "dtype is 'banana': choose one of float32, bfloat16"),
    (["--dtype", "bfloat16"], "--dtype bfloat16 says nothing without --huggingface"),
    (["--dtype", "float32"], "--dtype float32 says nothing without --huggingface"),
    (["--huggingface", "--dtype", "int8"], "dtype is 'int8'"),
])
def test_options_that_mean_nothing_are_refused_before_the_model_is_looked_for(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        main([str(tmp_path / "absent"), str(tmp_path / "out"), *options])


def test_the_help_names_both_folders(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "SOURCE OUT" in capsys.readouterr().out


def test_gguf_files_are_left_to_their_reader(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvjax.convert.gguf", SimpleNamespace(from_gguf=lambda path: ("read", path)))
    assert load_model(tmp_path / "model.gguf") == ("read", tmp_path / "model.gguf")


def test_folders_that_hold_no_model_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="nothing is not a folder"):
        load_model(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="config.json does not exist"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no model's"):
        load_model(tmp_path)


def test_weights_that_do_not_fit_or_are_not_there_are_noticed(tmp_path):
    save_model(tmp_path / "kpa", KPA, kpa_params())
    text = (tmp_path / "kpa" / "config.json").read_text()
    (tmp_path / "kpa" / "config.json").write_text(text.replace('"vocab_size": 256', '"vocab_size": 255'))
    with pytest.raises(ConfigError, match=r"misshapen: embedding is \[256, 16\], should be \[255, 16\]"):
        load_model(tmp_path / "kpa")
    (tmp_path / "kpa" / "config.json").write_text(text)
    shutil.rmtree(tmp_path / "kpa" / "params")
    with pytest.raises(ConfigError, match="params cannot be read"):
        load_model(tmp_path / "kpa")
