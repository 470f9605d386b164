"""The configurations in configs/: published sizes, parameters and caches, whether each can run, and the page of all."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.attention import make_plan
from kvjax.config_files import load_config
from kvjax.evaluation import config_table
from kvjax.model import abstract_parameters

ROOT = Path(__file__).parents[1]
ALL_NAMES = sorted(path.stem for path in (ROOT / "configs").glob("[!_]*.py"))
NAMES = [name for name in ALL_NAMES if not name.endswith(config_table.UPTRAIN)]
PAGE = (ROOT / "docs" / "configurations.md").read_text()

ELEMENTS = {
    "kpa_125m": 256, "kpa_125m_4x3": 224, "kpa_353m": 320, "kpa_353m_4x4": 256,
    "kpa_773m": 384, "kpa_773m_5x4": 288, "kpa_1500m": 320,
    "mha_125m": 1536, "mha_353m": 2048, "mha_773m": 2560, "mha_1500m": 3200,
}
"""Cached elements per token and layer, as the KPA paper's table prints them."""


@pytest.mark.parametrize("name", ELEMENTS)
def test_published_cache_sizes(name):
    model = load_config(name).model
    assert kvjax.cache_bytes_per_token(model, "bfloat16") == ELEMENTS[name] * model.layers * 2


@pytest.mark.parametrize(("name", "dtype", "total"), [
    ("llama_1b_gqa", "float32", 98_304), ("llama_1b_gqa_skipv1", "float32", 74_752),
    ("llama_1b_mla", "bfloat16", 13_824), ("llama_1b_mla_skipv1", "bfloat16", 7_680 + 128 * 2),
])
def test_caches_that_skipv1former_prints(name, dtype, total):
    """The last is printed as 7 680, which leaves out that layer 1 keeps the other half of its latent too."""
    assert kvjax.cache_bytes_per_token(load_config(name).model, dtype) == total


def gpt2_size(d, layers):
    """Tied embeddings, positions; four projections and two four times as wide, with biases; LayerNorms."""
    return 50_304 * d + 1024 * d + layers * (12 * d * d + 9 * d + 4 * d) + 2 * d


def llama_size(d, hidden, layers):
    """Embeddings twice; four projections and three of the feed-forward layer; RMSNorms."""
    return 2 * 32_000 * d + layers * (4 * d * d + 3 * d * hidden + 2 * d) + d


def mla_size(d, layers, heads, dc, rq):
    """Tied embeddings; query and latent projections with their norms, expansions, output; SwiGLU; RMSNorms."""
    attention = d * rq + rq + rq * heads * 96 + d * dc + dc + d * 32 + 2 * dc * heads * 64 + heads * 64 * d
    return 50_304 * d + layers * (attention + 3 * d * (8 * d // 3) + 2 * d) + d


@pytest.mark.parametrize(("name", "size"), [
    ("gpt2_125m", gpt2_size(768, 12)), ("gpt2_200m", gpt2_size(1024, 12)), ("gpt2_355m", gpt2_size(1024, 24)),
    ("gpt2_550m", gpt2_size(1200, 28)),
    ("llama_60m", llama_size(512, 1376, 8)), ("llama_130m", llama_size(768, 2048, 12)),
    ("llama_350m", llama_size(1024, 2736, 24)), ("llama_1b", llama_size(2048, 5461, 24)),
    ("llama_3b", llama_size(2560, 6848, 32)),
    ("mla_125m", mla_size(768, 12, 12, 256, 512)), ("mla_353m", mla_size(1024, 24, 23, 512, 1024)),
    ("mla_773m", mla_size(1280, 36, 34, 512, 1024)), ("mla_1500m", mla_size(1600, 48, 49, 512, 1024)),
])
def test_parameters_of_published_sizes(name, size):
    assert kvjax.parameter_count(load_config(name).model) == size


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith("_matched") or n.startswith(("tpa", "gqa", "mqa"))])
def test_baselines_and_matched_configurations_have_as_many_parameters_as_multi_head_attention(name):
    target = kvjax.parameter_count(load_config(f"mha_{name.split('_')[1]}").model)
    assert abs(kvjax.parameter_count(load_config(name).model) / target - 1) < 0.01


def source_of(name):
    """The trained model of a configuration that starts from one."""
    return load_config(config_table.SOURCE).model if name.endswith(config_table.UPTRAIN) else None


@pytest.mark.parametrize("name", ALL_NAMES)
def test_every_configuration_trains_as_far_as_shapes_tell(name):
    """Without allocating anything: the plan fits, and the forward pass with dropout makes logits."""
    model = load_config(name, source_of(name)).model
    assert sum(segment.depth for segment in make_plan(model).segments) == model.layers

    def forward(params, tokens, key):
        return kvjax.build_model(model).apply({"params": params}, tokens, rngs={"dropout": key})
    logits = jax.eval_shape(forward, abstract_parameters(model), jnp.zeros((2, 16), int), jax.random.key(0))
    assert logits.shape == (2, 16, model.vocab_size) and logits.dtype == jnp.float32


SMALL = [name for name in NAMES if name.startswith("small_")]


@pytest.mark.parametrize("name", SMALL)
def test_small_configurations_differ_in_attention_and_sharing_only(name):
    changed = kvjax.config.differences(load_config("small_mha"), load_config(name))
    assert all(setting.startswith(("model.attention", "model.sharing")) for setting in changed)
    assert bool(changed) == (name != "small_mha")


@pytest.mark.parametrize("name", ALL_NAMES)
def test_the_page_shows_the_configuration_as_it_is(name):
    assert f"\n{config_table.row(name, source_of(name))}\n" in PAGE, \
        "run python -m kvjax.evaluation.config_table > docs/configurations.md"


def test_the_page_shows_what_is_there_and_nothing_else():
    tables = PAGE.split("## Sizes in names")[0]
    shown = [line.split("`")[1] for line in tables.splitlines() if line.startswith("| `")]
    sections = config_table.sections(NAMES)
    assert "Others" not in sections
    assert shown == [*(name for members in sections.values() for name in members),
                     *(name for name in ALL_NAMES if name not in NAMES)]
    names = [name for members in sections.values() for name in members]
    for part in (config_table.INTRODUCTION, config_table.sizes_in_names(names), config_table.printed_table()):
        assert part in PAGE


def test_only_one_printed_cache_differs_from_the_true_one():
    lines = config_table.printed_table().splitlines()[2:]
    assert [line for line in lines if not line.endswith("agrees |")] == [lines[-1]]
    assert "7,680 | 7,936" in lines[-1]
