"""The cache report's numbers, worked out by hand."""

import pytest
from rich.console import Console

from kvjax import ConfigError, ModelConfig
from kvjax.attention import (
    CrossLayer,
    CrossLayerValues,
    GroupedQuery,
    Kronecker,
    Latent,
    PathConcat,
    PathResidual,
    ResFormer,
    SkipV1,
    SkipV1Yoco,
    Yoco,
    YocoValues,
    make_plan,
)
from kvjax.config import Config, TrainConfig, save
from kvjax.evaluation import cache_report


def config(attention, **settings):
    sizes = dict(vocab_size=64, layers=12, width=768, feed_forward_width=2048, context_length=1024, dtype="bfloat16")
    return ModelConfig(attention, **sizes | settings)


def test_published_kpa_keeps_a_sixth():
    result = cache_report.report(config(Kronecker(h1=6, h2=2)))
    assert [(row.name, row.features, row.slots) for row in result.components] == [
        ("k_a", (2, 6, 8), 12), ("k_b", (2, 2, 8), 12), ("v_a", (2, 6, 8), 12), ("v_b", (2, 2, 8), 12)]
    assert [row.bytes_per_token for row in result.components] == [2304, 768, 2304, 768]
    assert result.measured == result.formula == 256 * 12 * 2
    assert result.multi_head == 1536 * 12 * 2
    assert result.factor == 6


@pytest.mark.parametrize("kv_heads, factor", [(12, 1), (4, 3), (1, 12)])
def test_grouped_query_keeps_its_share(kv_heads, factor):
    result = cache_report.report(config(GroupedQuery(12, kv_heads, 64)), dtype="float32")
    assert result.measured == result.formula == 2 * kv_heads * 64 * 12 * 4
    assert result.factor == factor and result.dtype == "float32"


def test_a_length_is_rounded_up_to_what_is_allocated():
    result = cache_report.report(config(GroupedQuery(2, 1, 4), layers=2), length=100)
    assert result.length == 128 and result.measured == 2 * 4 * 2 * 2


G, D, L = 12, 64, 12  # heads, their width and layers of what follows
HEADS = GroupedQuery(G, G, D)
MLA = Latent(heads=12, latent_dim=256, rope_dim=32, nope_dim=64, value_dim=64)


def elements_read_by_layer(sharing, attention=HEADS, **settings):
    plan = make_plan(config(attention, sharing=sharing, **settings))
    return [sum(plan.component(name).size * count for name, count in layer.items() if plan.component(name).cached)
            for layer in plan.reads()]


@pytest.mark.parametrize("sharing", [None, PathConcat(4, 16), SkipV1(), SkipV1(0.25), CrossLayer(3),
                                     CrossLayerValues(), YocoValues(), SkipV1Yoco(), ResFormer()])
def test_layers_that_share_read_as_much_as_layers_that_do_not(sharing):
    assert elements_read_by_layer(sharing) == [2 * G * D] * L


def test_a_concat_layer_reads_alpha_and_its_delta():
    d_alpha, d_delta = 48, 16
    result = cache_report.report(config(HEADS, sharing=PathConcat(4, d_delta)), dtype="float16")
    assert result.measured == 2 * G * (d_alpha + 4 * d_delta) * (L // 4) * 2
    assert result.read == 2 * G * (d_alpha + d_delta) * L * 2
    assert {row.name: (row.slots, row.reads) for row in result.components} == {
        "k_alpha": (3, 12), "k_delta": (12, 12), "v_alpha": (3, 12), "v_delta": (12, 12)}


def test_a_residual_layer_reads_all_corrections_so_far():
    d_delta = 16
    assert elements_read_by_layer(PathResidual(4, d_delta)) == [
        2 * G * (D + (layer % 4) * d_delta) for layer in range(L)]
    result = cache_report.report(config(HEADS, sharing=PathResidual(4, d_delta)))
    assert result.measured == 2 * G * (D + 3 * d_delta) * 3 * 2
    assert result.read == 2 * G * (4 * D + 6 * d_delta) * 3 * 2
    assert result.read_factor < 1 < result.factor, "it holds less than multi-head attention, and reads more"


@pytest.mark.parametrize(("layers", "saved"), [(8, 21.875), (12, 22.917), (24, 23.958)])
def test_skipv1_saves_what_its_formula_says(layers, saved):
    result = cache_report.report(config(HEADS, sharing=SkipV1(), layers=layers))
    assert 100 * (1 - 1 / result.factor) == pytest.approx(saved, abs=1e-3)
    assert result.read == result.multi_head


def test_a_shared_latent_is_read_whole():
    result = cache_report.report(config(MLA, sharing=SkipV1()))
    assert result.measured == (L * (128 + 32) + 128) * 2
    assert result.read == L * (256 + 32) * 2


@pytest.mark.parametrize("length", [128, 1024, 4096])
def test_yoco_reads_a_window_below_and_everything_above(length):
    result = cache_report.report(config(HEADS, sharing=Yoco(window=256)), length)
    near = min(256, length)
    assert result.length == length
    assert result.measured * length == 2 * G * D * (L // 2 * near + length) * 2
    assert result.read * length == 2 * G * D * (L // 2 * near + L // 2 * length) * 2


def test_a_window_limits_what_is_read():
    result = cache_report.report(config(GroupedQuery(12, 3, 64), window=256))
    assert result.read == result.measured == result.multi_head / 4 * 256 / 1024


@pytest.mark.parametrize("attention", [GroupedQuery(12, 3, 64), Kronecker(h1=6, h2=2), MLA])
def test_without_sharing_a_step_reads_what_is_held(attention):
    result = cache_report.report(config(attention))
    assert result.read == result.measured and result.read_factor == result.factor


def test_a_quantised_cache_is_counted_with_its_scales():
    result = cache_report.report(config(HEADS, sharing=CrossLayer(2)), dtype="int8")
    assert result.measured == result.formula == 2 * G * (D + 2) * L // 2
    assert result.read == 2 * G * (D + 2) * L
    assert result.multi_head == 2 * G * (D + 2) * L, "multi-head attention's cache would have scales as well"


def test_a_model_is_found_by_name_and_in_a_runs_folder(tmp_path):
    wanted = config(HEADS)
    save(Config(wanted, TrainConfig(steps=1, batch_size=1)), tmp_path / "config.json")
    assert cache_report.find_model(tmp_path) == wanted
    assert cache_report.find_model("quickstart").width == 128
    with pytest.raises(ConfigError, match="there is no configuration 'mha_125'"):
        cache_report.find_model("mha_125")


def test_the_table_shows_the_numbers():
    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    console.print(cache_report.table(cache_report.report(config(Kronecker(h1=6, h2=2), sharing=CrossLayer(2)))))
    text = console.export_text()
    for shown in ("bfloat16", "1,024", "k_a", "2 x 6 x 8", "1,152", "2,304", "3,072", "6,144", "36,864", "12.00"):
        assert shown in text
