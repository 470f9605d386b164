"""The Hugging Face format: logits of outside models, and every weight and setting in and out."""

import dataclasses
import json
import math
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax import ConfigError, ModelConfig
from kvjax.attention import (
    CrossLayer,
    GroupedQuery,
    Kronecker,
    Latent,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)
from kvjax.convert import from_huggingface, to_huggingface
from kvjax.convert.architectures import read_config, write_config
from kvjax.convert.rope import read_rope, write_rope
from kvjax.convert.settings import Settings

DATA = Path(__file__).parents[1] / "data"
GOLDEN = ("hf_llama_gqa", "hf_llama_mha_untied", "hf_qwen3", "hf_gpt2", "hf_deepseek_v3_mla_interleave",
          "hf_deepseek_v3_mla_half")


def assert_same(a, b):
    """Bit-identical trees of parameters."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert left.dtype == right.dtype == jnp.float32
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


def changed(name, folder, weights=None, **settings):
    """A copy of a golden model in `folder`, with other settings, and weights {name: array, or None to remove it}."""
    shutil.copytree(DATA / name, folder)
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    if weights:
        tensors = load_file(folder / "model.safetensors") | weights
        save_file({n: np.ascontiguousarray(t) for n, t in tensors.items() if t is not None},
                  folder / "model.safetensors")
    return folder


def random_params(config, seed=0):
    """Random values in every leaf."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: rng.standard_normal(p.shape, np.float32), kvjax.model.parameters(config))


@pytest.mark.parametrize("name", GOLDEN)
def test_logits_equal_the_reference_and_weights_go_out_and_in_again_unchanged(name, tmp_path):
    config, params = from_huggingface(DATA / name)
    golden = np.load(DATA / name / "expected.npz")
    logits = jax.jit(kvjax.build_model(config).apply)({"params": params}, golden["input_ids"])
    assert golden["logits"].std() > 0.3
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-4)
    to_huggingface(config, params, tmp_path / "out")
    again = from_huggingface(tmp_path / "out")
    assert again[0] == config
    assert_same(again[1], params)
    before, after = load_file(DATA / name / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        np.testing.assert_array_equal(after[key], tensor, err_msg=key)


@pytest.mark.parametrize("name", ["hf_llama_gqa", "hf_deepseek_v3_mla_interleave"])
def test_decoding_through_the_cache_gives_the_reference_logits(name):
    config, params = from_huggingface(DATA / name)
    golden, model = np.load(DATA / name / "expected.npz"), kvjax.build_model(config)
    tokens, cache = jnp.asarray(golden["input_ids"]), kvjax.init_cache(config, batch=2, max_length=64)
    step, logits = jax.jit(partial(kvjax.decode, model)), []
    for start in range(0, 48, 12):
        part, cache = step(params, tokens[:, start:start + 12], cache)
        logits.append(part)
    np.testing.assert_allclose(jnp.concatenate(logits, axis=1), golden["logits"], atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_weights_are_exact(dtype, tmp_path):
    halves = {name: tensor.astype(dtype)
              for name, tensor in load_file(DATA / "hf_qwen3" / "model.safetensors").items()}
    folder = changed("hf_qwen3", tmp_path / "half", halves, dtype=None, torch_dtype=dtype)
    config, params = from_huggingface(folder)
    assert config.dtype == dtype
    embedding = halves["model.embed_tokens.weight"].astype(np.float32)
    assert np.asarray(params["embedding"]).tobytes() == embedding.tobytes()
    if dtype == "bfloat16":
        to_huggingface(config, params, tmp_path / "out", dtype="bfloat16")
        with safetensors.safe_open(tmp_path / "out" / "model.safetensors", framework="numpy") as file:
            assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}
    else:
        to_huggingface(config, params, tmp_path / "out")
    again = from_huggingface(tmp_path / "out")
    assert_same(again[1], params)
    assert again[0] == (config if dtype == "bfloat16" else dataclasses.replace(config, dtype="float32"))


def test_float32_weights_are_rounded_to_the_nearest_bfloat16(tmp_path):
    config, params = from_huggingface(DATA / "hf_gpt2")
    to_huggingface(config, params, tmp_path / "out", dtype="bfloat16")
    _, rounded = from_huggingface(tmp_path / "out")
    assert_same(rounded, jax.tree.map(lambda x: jnp.asarray(np.asarray(x).astype(ml_dtypes.bfloat16), jnp.float32),
                                      params))


def test_large_models_are_split_over_files(tmp_path):
    config, params = from_huggingface(DATA / "hf_llama_mha_untied")
    out = tmp_path / "out"
    to_huggingface(config, params, out, shard_bytes=100_000)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    sizes = [sum(tensor.nbytes for tensor in load_file(out / name).values()) for name in files]
    assert max(sizes) <= 100_000 and sum(sizes) == index["metadata"]["total_size"]
    assert index["weight_map"] == {name: file for file in files for name in load_file(out / file)}
    assert_same(from_huggingface(out)[1], params)
    (out / files[1]).unlink()
    with pytest.raises(ConfigError, match=f"lacks {files[1]}"):
        from_huggingface(out)


def test_a_tensor_in_two_files_is_refused_with_both(tmp_path):
    config, params = from_huggingface(DATA / "hf_llama_mha_untied")
    to_huggingface(config, params, tmp_path / "out", shard_bytes=200_000)
    first, second = sorted((tmp_path / "out").glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor + 1}, second)
    with pytest.raises(ConfigError, match=f"{name} is in {first.name} and in {second.name}"):
        from_huggingface(tmp_path / "out")


@pytest.mark.parametrize("index", [
    [], "x", None, 3, *({"weight_map": files} for files in (
        None, [], {}, {"a": 1}, {"a": None}, {"a": ["b"]}, {"a": 1, "b": "model.safetensors"}))], ids=json.dumps)
def test_an_index_that_names_no_files_is_refused(index, tmp_path):
    folder = changed("hf_llama_gqa", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="index.json names no files: its weight_map must say"):
        from_huggingface(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ConfigError, match="index.json is not valid JSON"):
        from_huggingface(folder)


def test_names_without_prefix_buffers_and_copies_of_tied_weights_are_understood(tmp_path):
    tensors = load_file(DATA / "hf_gpt2" / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    masks = {f"h.{i}.attn.{name}": np.zeros((1, 1, 4, 4), np.float32) for i in range(3)
             for name in ("bias", "masked_bias")}
    head = {"lm_head.weight": bare["wte.weight"]}
    folder = changed("hf_gpt2", tmp_path / "bare", dict.fromkeys(tensors) | bare | masks | head)
    assert_same(from_huggingface(folder)[1], from_huggingface(DATA / "hf_gpt2")[1])


def test_rotary_tables_and_layers_of_multi_token_prediction_are_ignored(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
             "model.layers.3.eh_proj.weight": np.zeros((64, 128), np.float32),
             "model.layers.3.mlp.experts.0.up_proj.weight": np.zeros((16, 64), np.float32)}
    name = "hf_deepseek_v3_mla_interleave"
    folder = changed(name, tmp_path / "extra", extra)
    assert_same(from_huggingface(folder)[1], from_huggingface(DATA / name)[1])
    without = changed(name, tmp_path / "unknown", extra, num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match=r"unknown: model.layers.3.eh_proj.weight \[64, 128\]"):
        from_huggingface(without)


def test_everything_wrong_with_the_weights_is_in_one_error(tmp_path):
    folder = changed("hf_llama_gqa", tmp_path / "wrong", {
        "model.layers.1.self_attn.q_proj.weight": None, "score.weight": np.zeros((2, 64), np.float32),
        "model.norm.weight": np.zeros(63, np.float32), "norm.weight": np.zeros(64, np.float32),
        "model.layers.0.mlp.up_proj.weight": np.zeros((112, 64), np.int8)})
    with pytest.raises(ConfigError) as error:
        from_huggingface(folder)
    for line in (r"missing: model.layers.1.self_attn.q_proj.weight [64, 64]", "unknown: model.score.weight [2, 64]",
                 "twice: model.norm.weight", "of type I8: model.layers.0.mlp.up_proj.weight"):
        assert line in str(error.value)
    folder = changed("hf_llama_gqa", tmp_path / "size", intermediate_size=100)
    with pytest.raises(ConfigError, match=r"misshapen: model.layers.2.mlp.down_proj.weight is \[64, 112\], should be "
                                          r"\[64, 100\]"):
        from_huggingface(folder)


def test_a_head_that_is_not_the_embedding_it_is_said_to_be_is_refused(tmp_path):
    folder = changed("hf_llama_gqa", tmp_path / "head", {"lm_head.weight": np.ones((128, 64), np.float32)})
    with pytest.raises(ConfigError, match="tie_word_embeddings is true, and lm_head.weight is not the embedding"):
        from_huggingface(folder)


REFUSED = [
    ("hf_llama_gqa", {"model_type": "gemma3"}, "model_type is 'gemma3'"),
    ("hf_llama_gqa", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("hf_llama_gqa", {"hidden_size": None}, "config.json has no hidden_size"),
    ("hf_llama_gqa", {"model_type": ["llama"]}, "model_type is ['llama']"),
    ("hf_llama_gqa", {"model_type": {"a": 1}}, "model_type is {'a': 1}"),
    ("hf_llama_gqa", {"num_hidden_layers": "3"}, "num_hidden_layers is '3'"),
    ("hf_llama_gqa", {"num_hidden_layers": 10**5 + 1},
     "num_hidden_layers is 100001: it must be a whole number from 1 to 100,000"),
    ("hf_qwen3", {"num_hidden_layers": 10**30, "layer_types": None}, f"num_hidden_layers is {10**30}: it must be"),
    ("hf_llama_gqa", {"vocab_size": 10**9 + 1}, "vocab_size is 1000000001"),
    ("hf_llama_gqa", {"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    ("hf_llama_gqa", {"rms_norm_eps": math.inf}, "rms_norm_eps is inf: it must be a number above 0, and at most 1e+38"),
    ("hf_llama_gqa", {"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
    ("hf_llama_gqa", {"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
    ("hf_gpt2", {"layer_norm_epsilon": math.inf}, "layer_norm_epsilon is inf"),
    ("hf_llama_gqa", {"is_encoder_decoder": 0}, "is_encoder_decoder is 0"),
    ("hf_llama_gqa", {"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers is '1'"),
    ("hf_llama_gqa", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    ("hf_llama_gqa", {"num_key_value_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
    ("hf_llama_gqa", {"num_attention_heads": 6}, "hidden_size 64 is not a multiple of num_attention_heads 6"),
    ("hf_llama_gqa", {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}: quantised weights"),
    ("hf_llama_gqa", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("hf_llama_gqa", {"dtype": "float64"}, "dtype is 'float64'"),
    ("hf_llama_gqa", {"model_type": "mistral", "layer_types": ["full_attention"] * 3}, "sliding_window is 4096"),
    *(("hf_llama_gqa", {"model_type": "mistral", "sliding_window": value}, f"sliding_window is {value!r}: it must be a "
       "whole number from 1") for value in ("abc", [1], 4.5, True, 0, -3)),
    ("hf_llama_gqa", {"model_type": "mistral", "layer_types": ["sliding_attention"] * 2},
     "layer_types is ['sliding_attention', 'sliding_attention']: it must be a list of 3 names"),
    *(("hf_qwen3", {"layer_types": value}, f"layer_types is {value!r}: it must be a list of 3 names")
      for value in (3, True, "full", [["full_attention"]] * 3)),
    ("hf_qwen3", {"max_window_layers": "1"}, "max_window_layers is '1'"),
    ("hf_qwen3", {"use_sliding_window": True, "sliding_window": "8"}, "sliding_window is '8'"),
    ("hf_qwen3", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8, "layer_types": None},
     "max_window_layers is 1"),
    ("hf_qwen3", {"use_sliding_window": True, "sliding_window": 8,
                  "layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types is"),
    ("hf_qwen3", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
    ("hf_gpt2", {"activation_function": "relu"}, "activation_function is 'relu'"),
    ("hf_gpt2", {"activation_function": "gelu"}, "activation_function is 'gelu'"),
    ("hf_gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ("hf_gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False"),
    ("hf_gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
    ("hf_gpt2", {"n_head": 5}, "n_embd 48 is not a multiple of n_head 5"),
    ("hf_deepseek_v3_mla_half", {"first_k_dense_replace": 2}, "n_routed_experts is 4 and first_k_dense_replace is 2"),
    ("hf_deepseek_v3_mla_half", {"first_k_dense_replace": "3"},
     "first_k_dense_replace is '3': it must be a whole number from 0"),
    ("hf_deepseek_v3_mla_half", {"q_lora_rank": "8"}, "q_lora_rank is '8'"),
    ("hf_deepseek_v3_mla_half", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
    ("hf_deepseek_v3_mla_half", {"attention_bias": True}, "attention_bias is True"),
    ("hf_deepseek_v3_mla_half", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
    ("hf_deepseek_v3_mla_half", {"model_type": "deepseek_v2"}, "rope_interleave is False"),
]


@pytest.mark.parametrize(("name", "settings", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_settings_of_models_that_do_not_exist_here_are_refused(name, settings, message, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(message)):
        from_huggingface(changed(name, tmp_path / "model", **settings))


def test_folders_that_hold_no_model_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="meta/llama is not a folder"):
        from_huggingface("meta/llama")
    with pytest.raises(ConfigError, match="config.json does not exist"):
        from_huggingface(tmp_path)
    folder = changed("hf_qwen3", tmp_path / "model")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ConfigError, match="model.safetensors cannot be read"):
        from_huggingface(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds neither model.safetensors nor"):
        from_huggingface(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        from_huggingface(folder)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ConfigError, match="pip install safetensors"):
        from_huggingface(DATA / "hf_gpt2")


YARN = {"factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3 = YARN | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
NOT_NUMBERS = (math.inf, -math.inf, math.nan, -1, "8", ["a"], False, True, 10**400)
ROPE = [
    ({"rope_theta": 5e5}, 5e5, None),
    ({}, 10_000.0, None),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}, 2e4, None),
    ({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4}}, 1e6, LinearScaling(4)),
    ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}}, 1e6, LinearScaling(4)),
    ({"rope_theta": 5e5, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0,
        "original_max_position_embeddings": 64}}, 5e5, Llama3Scaling(8.0, 64, 1.5, 3.0)),
    ({"rope_scaling": {"type": "yarn", **YARN}}, 1e4, YarnScaling(8.0, 32)),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, 1e4, YarnScaling(8.0, 256)),
    ({"rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}}, 1e4,
     YarnScaling(4.0, 64)),
    ({"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 3e4, **YARN, "beta_fast": 16, "beta_slow": 2, "attention_factor": 0.5,
        "truncate": False}}, 3e4, YarnScaling(8.0, 32, 16, 2, attention_factor=0.5, truncate=False)),
    ({"rope_scaling": {"type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 0.9}}, 1e4,
     YarnScaling(8.0, 32, mscale=0.7, mscale_all_dim=0.9)),
    ({"rope_scaling": {"type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 0}}, 1e4,
     YarnScaling(8.0, 32, mscale=1.0)),
]


@pytest.mark.parametrize(("values", "base", "scaling"), ROPE)
def test_both_styles_of_rotary_settings_are_read_and_the_older_is_written(values, base, scaling):
    length = {"max_position_embeddings": 256}
    assert read_rope(Settings(values | length)) == (base, scaling)
    written = write_rope(base, scaling)
    assert written.keys() <= {"rope_theta", "rope_scaling"}
    assert read_rope(Settings(written | length)) == (base, scaling)


@pytest.mark.parametrize(("values", "message"), [
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
    ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "rope_type is 'longrope'"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}, "'mrope_section': [1]"),
    ({"rope_scaling": {"type": ["yarn"], **YARN}}, "rope_type is ['yarn']"),
    ({"rope_scaling": {"type": "linear"}}, "config.json has no factor"),
    ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ by layer (full_attention)"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
    ({"partial_rotary_factor": True}, "partial_rotary_factor is True"),
    ({"rope_scaling": {"type": "yarn", **YARN, "truncate": "no"}}, "truncate is 'no': it must be true or false"),
    ({"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 0}}, "low_freq_factor is 0"),
    *(({"rope_theta": value}, f"rope_theta is {value!r}") for value in NOT_NUMBERS),
    *(({"rope_parameters": {"rope_theta": value}}, f"rope_theta is {value!r}") for value in NOT_NUMBERS),
    *(({"rope_scaling": {"type": "linear", "factor": value}}, f"factor is {value!r}") for value in NOT_NUMBERS),
    *(({"rope_scaling": {"type": "llama3", **LLAMA3, name: value}}, f"{name} is {value!r}")
      for name in ("factor", "low_freq_factor", "high_freq_factor") for value in NOT_NUMBERS),
    *(({"rope_scaling": {"type": "yarn", **YARN, name: value}}, f"{name} is {value!r}: it must be a number above 0")
      for name in ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
      for value in NOT_NUMBERS),
    *(({"rope_scaling": {"type": kind, **scaling, "original_max_position_embeddings": value}},
       f"original_max_position_embeddings is {value!r}: it must be a whole number")
      for kind, scaling in (("llama3", LLAMA3), ("yarn", YARN)) for value in (*NOT_NUMBERS, 0, 4.5, "")),
    *(({name: value}, f"rotary settings are {value!r}")
      for name in ("rope_scaling", "rope_parameters") for value in ("linear", "", [], 0, False)),
], ids=lambda x: str(x)[:80])
def test_other_rotary_settings_are_refused(values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_rope(Settings(values | {"max_position_embeddings": 256}))


def grouped(**options):
    return GroupedQuery(heads=4, kv_heads=2, head_dim=8, **options)


def model(attention, **settings):
    sizes = dict(vocab_size=37, layers=2, width=32, feed_forward_width=40, context_length=64, dtype="float32")
    return ModelConfig(attention, **(sizes | settings))


def gpt2(**settings):
    attention = GroupedQuery(heads=4, kv_heads=4, head_dim=8, qkv_bias=True, output_bias=True)
    return model(attention, **(dict(positions="learned", norm="layer", norm_eps=1e-5, feed_forward="gelu",
                                    feed_forward_bias=True) | settings))


def latent(**options):
    return Latent(**(dict(heads=4, latent_dim=12, rope_dim=4, nope_dim=6, value_dim=10) | options))


EXPRESSED = [
    ("llama", model(grouped())),
    ("llama", model(grouped(), tie_embeddings=False, rope_base=5e5, norm_eps=1e-5)),
    ("llama", model(grouped(qkv_bias=True, output_bias=True), feed_forward_bias=True)),
    ("llama", model(grouped(), rope_scaling=Llama3Scaling(4.0, 16), dropout=0.1, remat="full", output_init=1.0)),
    ("mistral", model(grouped(), window=8)),
    ("mistral", model(grouped(), width=30)),
    ("qwen2", model(grouped(qkv_bias=True))),
    ("qwen2", model(grouped(qkv_bias=True), window=8)),
    ("qwen3", model(grouped(qk_norm=True))),
    ("qwen3", model(grouped(qk_norm=True, qkv_bias=True, output_bias=True), window=8, tie_embeddings=False)),
    ("gpt2", gpt2()),
    ("gpt2", gpt2(tie_embeddings=False, rope_base=123.0)),
    ("deepseek_v3", model(latent(), tie_embeddings=False)),
    ("deepseek_v3", model(latent(query_latent_dim=14, interleaved=True), rope_scaling=YarnScaling(
        4.0, 16, mscale=0.7, mscale_all_dim=0.9, truncate=False))),
]


@pytest.mark.parametrize(("kind", "config"), EXPRESSED, ids=lambda x: x if isinstance(x, str) else "")
def test_a_model_is_written_as_the_architecture_that_it_fits(kind, config, tmp_path):
    params = random_params(config)
    to_huggingface(config, params, tmp_path / "out", eos_id=5)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["model_type"] == kind and values["eos_token_id"] == 5 and values["dtype"] == "float32"
    again, weights = from_huggingface(tmp_path / "out")
    trained = dict(dropout=0.0, remat="none", output_init=0.0)
    if config.positions == "learned":
        trained["rope_base"] = 10_000.0
    assert again == dataclasses.replace(config, **trained)
    assert_same(weights, jax.tree.map(jnp.asarray, params))


def test_an_imported_deepseek_v2_is_written_as_the_same_model_of_version_3():
    _, values = write_config(model(latent(interleaved=True)))
    as_v2 = {name: value for name, value in values.items() if name != "rope_interleave"} | {"model_type": "deepseek_v2"}
    assert read_config(Settings(as_v2))[1] == model(latent(interleaved=True))
    for dense in ({"n_routed_experts": None}, {"first_k_dense_replace": 2}):
        read_config(Settings(as_v2 | {"first_k_dense_replace": None} | dense))
    with pytest.raises(ConfigError, match="n_routed_experts is not given and first_k_dense_replace is 0 of 2"):
        read_config(Settings(as_v2 | {"first_k_dense_replace": None}))
    with pytest.raises(ConfigError, match="no q_lora_rank"):
        read_config(Settings({name: value for name, value in as_v2.items() if name != "q_lora_rank"}))


def test_settings_that_older_files_leave_out_have_the_values_of_their_time():
    sizes = {"vocab_size": 37, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 40,
             "num_attention_heads": 4, "max_position_embeddings": 64}
    read = lambda **values: read_config(Settings(sizes | values))[1]
    assert read(model_type="llama") == model(GroupedQuery(4, 4, 8), tie_embeddings=False)
    assert read(model_type="mistral", num_key_value_heads=2) == model(grouped(), tie_embeddings=False, window=4096)
    assert read(model_type="mistral", num_key_value_heads=2, sliding_window=None).window is None
    assert read(model_type="qwen2").attention == GroupedQuery(4, 4, 8, qkv_bias=True)
    assert read(model_type="qwen3").attention == GroupedQuery(4, 4, 128, qk_norm=True)
    windowed = dict(model_type="qwen2", use_sliding_window=True, sliding_window=16)
    assert read(**windowed, max_window_layers=0).window == 16
    assert read(**windowed, max_window_layers=2).window is None
    sizes = {"vocab_size": 37, "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64}
    assert read(model_type="gpt2") == gpt2(feed_forward_width=128)


class Stretched(RopeScaling):
    """A scaling that has no rope type."""


UNEXPRESSED = [
    (model(Kronecker(2, 2, 2, 4)), "attention is Kronecker"),
    (model(grouped(), sharing=CrossLayer(2)), "sharing is CrossLayer"),
    (model(grouped(), logit_softcap=30.0), "llama: logit_softcap is 30.0, there None"),
    (model(grouped(), positions="none"), "mistral: positions is 'none', there 'rotary'"),
    (model(grouped(output_bias=True)), "llama: attention.output_bias is True, there False"),
    (model(grouped(qkv_bias=True, output_bias=True), window=8), "llama: window is 8, there None"),
    (model(grouped(qk_norm=True), feed_forward_bias=True), "qwen3: feed_forward_bias is True, there False"),
    (model(grouped(), rope_scaling=Stretched()), "it has no rope type"),
    (gpt2(window=8), "gpt2: window is 8, there None"),
    (gpt2(width=48), "gpt2: attention.head_dim is 8, there 12"),
    (model(latent(), norm_eps=1e-5), "deepseek_v3: rms_norm_eps is 1e-05"),
    (model(latent(), window=8), "deepseek_v3: window is 8, there None"),
]


@pytest.mark.parametrize(("config", "message"), UNEXPRESSED, ids=[message for _, message in UNEXPRESSED])
def test_models_that_no_architecture_expresses_are_refused_with_the_reason(config, message, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(message)):
        to_huggingface(config, {}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_and_only_the_models_own_weights_are_written(tmp_path):
    config = model(grouped())
    params = random_params(config)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not an empty folder"):
        to_huggingface(config, params, tmp_path)
    with pytest.raises(ConfigError, match="file/out cannot be made: Not a directory; choose another"):
        to_huggingface(config, params, tmp_path / "file" / "out")
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        to_huggingface(config, params, tmp_path / "out", dtype="int8")
    params["embedding"] = params["embedding"][:-1]
    del params["segment_0"]["layer_0"]["feed_forward"]["gate"]
    params["extra"] = np.zeros(3)
    with pytest.raises(ConfigError) as error:
        to_huggingface(config, params, tmp_path / "out")
    for line in ("misshapen: embedding is [36, 32], should be [37, 32]", "unknown: extra [3]",
                 "missing: segment_0/layer_0/feed_forward/gate [2, 32, 40]"):
        assert line in str(error.value)
    assert not (tmp_path / "out").exists()
