"""The cache report's numbers, worked out by hand."""

import pytest
from rich.console import Console

from kvjax import ModelConfig
from kvjax.attention.grouped_query import GroupedQuery
from kvjax.attention.kronecker import Kronecker
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


def test_the_table_shows_the_numbers():
    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    console.print(cache_report.table(cache_report.report(config(Kronecker(h1=6, h2=2)))))
    text = console.export_text()
    for shown in ("k_a", "2 x 6 x 8", "2,304", "6,144", "36,864", "6.00"):
        assert shown in text
