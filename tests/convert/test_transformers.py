"""Tiny random models of the transformers library against kvjax's, there and back: logits, and what configs mean.

Needs requirements-torch.txt; without it the file is skipped.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch  # noqa: E402
import transformers  # noqa: E402

import kvjax  # noqa: E402
from kvjax.attention import GroupedQuery, Latent  # noqa: E402
from kvjax.convert import from_huggingface, to_huggingface  # noqa: E402

pytestmark = pytest.mark.torch
LENGTH = 48

SIZES = dict(vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128)
LATENT = SIZES | dict(num_key_value_heads=4, kv_lora_rank=20, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10,
                      first_k_dense_replace=3, moe_intermediate_size=8)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=16)
MSCALE = YARN | dict(mscale=0.707, mscale_all_dim=1.2)

CASES = {
    "llama": ("Llama", SIZES),
    "llama_biases_head_dim": ("Llama", SIZES | dict(attention_bias=True, mlp_bias=True, head_dim=16)),
    "llama_linear": ("Llama", SIZES | dict(rope_scaling=dict(rope_type="linear", factor=4.0), rope_theta=5e4)),
    "llama_llama3": ("Llama", SIZES | dict(rope_scaling=LLAMA3, rope_theta=5e5, tie_word_embeddings=True)),
    "llama_yarn": ("Llama", SIZES | dict(rope_scaling=YARN)),
    "llama_yarn_mscale": ("Llama", SIZES | dict(rope_scaling=MSCALE)),
    "llama_yarn_all": ("Llama", SIZES | dict(rope_scaling=YARN | dict(
        attention_factor=1.3, beta_fast=8.0, beta_slow=2.0, truncate=False), rope_theta=1e3)),
    "mistral_window": ("Mistral", SIZES | dict(sliding_window=8)),
    "mistral_no_window": ("Mistral", SIZES | dict(sliding_window=None, head_dim=20)),
    "qwen2": ("Qwen2", SIZES | dict(tie_word_embeddings=True)),
    "qwen2_window": ("Qwen2", SIZES | dict(use_sliding_window=True, sliding_window=8, max_window_layers=0)),
    "qwen3": ("Qwen3", SIZES | dict(head_dim=16, rms_norm_eps=1e-5)),
    "qwen3_biases_window": ("Qwen3", SIZES | dict(
        head_dim=16, attention_bias=True, use_sliding_window=True, sliding_window=8, max_window_layers=0)),
    "gpt2": ("GPT2", dict(vocab_size=96, n_embd=48, n_layer=3, n_head=4, n_positions=64)),
    "gpt2_untied": ("GPT2", dict(vocab_size=96, n_embd=48, n_layer=3, n_head=4, n_positions=64, n_inner=72,
                                 tie_word_embeddings=False, layer_norm_epsilon=1e-3)),
    "deepseek_v2": ("DeepseekV2", LATENT | dict(q_lora_rank=24)),
    "deepseek_v2_yarn": ("DeepseekV2", LATENT | dict(q_lora_rank=None, rope_scaling=MSCALE)),
    "deepseek_v3": ("DeepseekV3", LATENT | dict(q_lora_rank=24, tie_word_embeddings=True)),
    "deepseek_v3_halves": ("DeepseekV3", LATENT | dict(q_lora_rank=None, rope_interleave=False)),
    "deepseek_v3_yarn": ("DeepseekV3", LATENT | dict(q_lora_rank=24, rope_scaling=MSCALE)),
    "deepseek_v3_yarn_equal_mscale": ("DeepseekV3", LATENT | dict(
        q_lora_rank=None, rope_interleave=False, rope_scaling=YARN | dict(mscale=1.0, mscale_all_dim=1.0))),
}


def make(name):
    """A transformers model whose every weight, norms and biases included, is random."""
    kind, settings = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**settings)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight), alpha=0.2)
            else:
                weight.copy_(torch.randn_like(weight) * 1.5 * weight.shape[-1] ** -0.5)
    return model


def tokens():
    return np.random.default_rng(0).integers(0, 96, (2, LENGTH))


def theirs(model):
    with torch.no_grad():
        return model(torch.tensor(tokens())).logits.float().numpy()


def ours(config, params):
    return np.asarray(kvjax.build_model(config).apply({"params": params}, jnp.asarray(tokens())))


def load(folder, dtype=torch.float32):
    """What transformers makes of a folder, and that it found all weights and no others."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers_in_both_directions(name, tmp_path):
    model = make(name)
    model.save_pretrained(tmp_path / "theirs")
    config, params = from_huggingface(tmp_path / "theirs")
    wanted, found = theirs(model), ours(config, params)
    assert wanted.std() > 0.5
    to_huggingface(config, params, tmp_path / "ours")
    back = theirs(load(tmp_path / "ours"))
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    np.testing.assert_allclose(back, found, atol=1e-4)


@pytest.mark.parametrize(("attention", "kind"), [
    (GroupedQuery(heads=5, kv_heads=1, head_dim=8), transformers.MistralForCausalLM),
    (Latent(heads=5, latent_dim=16, rope_dim=4, nope_dim=8, value_dim=6), transformers.DeepseekV3ForCausalLM),
], ids=lambda x: type(x).__name__)
def test_models_made_here_have_the_same_logits_in_transformers(attention, kind, tmp_path):
    config = kvjax.ModelConfig(attention, vocab_size=96, layers=2, width=48, feed_forward_width=64,
                               context_length=LENGTH, dtype="float32", output_init=1.0)
    params = kvjax.build_model(config).init(jax.random.key(0), jnp.asarray(tokens()))["params"]
    to_huggingface(config, params, tmp_path / "ours")
    model = load(tmp_path / "ours")
    assert type(model) is kind
    np.testing.assert_allclose(theirs(model), ours(config, params), atol=1e-4)


@pytest.mark.parametrize("changes", [
    {"rope_scaling": None}, {"sliding_window": None}, {"rope_scaling": YARN}, {"attention_bias": False}], ids=str)
def test_the_comparison_would_notice(changes, tmp_path):
    """Each of the settings that the cases set changes the logits by far more than the tolerance."""
    name = {"sliding_window": "mistral_window", "attention_bias": "llama_biases_head_dim",
            "rope_scaling": "deepseek_v3_yarn"}[next(iter(changes))]
    model = make(name)
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    values = {key: value for key, value in json.loads(path.read_text()).items() if key != "rope_parameters"}
    path.write_text(json.dumps(values | changes))
    if "attention_bias" in changes:
        with pytest.raises(kvjax.ConfigError, match="unknown: model.layers.0.self_attn.q_proj.bias"):
            from_huggingface(tmp_path / "model")
        return
    assert np.abs(ours(*from_huggingface(tmp_path / "model")) - theirs(model)).max() > 0.05


def test_bfloat16_shards_are_read_by_transformers(tmp_path):
    make("qwen3").save_pretrained(tmp_path / "theirs")
    config, params = from_huggingface(tmp_path / "theirs")
    to_huggingface(config, params, tmp_path / "ours", dtype="bfloat16", shard_bytes=50_000)
    model = load(tmp_path / "ours", dtype="auto")
    assert model.dtype == torch.bfloat16 and len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    again, rounded = from_huggingface(tmp_path / "ours")
    assert again.dtype == "bfloat16"
    np.testing.assert_allclose(ours(config, rounded), theirs(model.float()), atol=1e-4)


def test_bfloat16_checkpoints_of_transformers_are_exact(tmp_path):
    model = make("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    config, params = from_huggingface(tmp_path / "theirs")
    assert config.dtype == "bfloat16"
    embedding = model.get_input_embeddings().weight.detach().float().numpy()
    np.testing.assert_array_equal(np.asarray(params["embedding"]), embedding)
