"""The variants that every invariant is tested on, each with its published size formula."""

from dataclasses import dataclass

from kvjax import ModelConfig
from kvjax.attention import Attention, GroupedQuery, Kronecker

LAYERS, WIDTH, VOCAB = 3, 32, 61


@dataclass(frozen=True)
class Case:
    attention: Attention
    elements: int
    """Cached elements per token and layer, as the method's definition counts them."""


CASES = {
    "mha": Case(GroupedQuery(heads=4, kv_heads=4, head_dim=8), 2 * 4 * 8),
    "gqa": Case(GroupedQuery(heads=4, kv_heads=2, head_dim=8), 2 * 2 * 8),
    "gqa_qk_norm": Case(GroupedQuery(heads=4, kv_heads=2, head_dim=8, qk_norm=True), 2 * 2 * 8),
    "mqa": Case(GroupedQuery(heads=4, kv_heads=1, head_dim=8), 2 * 8),
    "kpa": Case(Kronecker(h1=4, h2=2, d1=2, d2=4, q_rank=3), (2 + 2) * (4 * 2 + 2 * 4)),
    "kpa_uneven": Case(Kronecker(h1=3, h2=5, d1=3, d2=2, q_rank=2, k_rank=1, v_rank=3), (1 + 3) * (3 * 3 + 5 * 2)),
    "kpa_dense_query": Case(Kronecker(h1=2, h2=3, d1=2, d2=4, dense_query=True), (2 + 2) * (2 * 2 + 3 * 4)),
    "tpa": Case(Kronecker(h1=4, h2=1, d1=1, d2=8), (2 + 2) * (4 + 8)),
}


def model_config(attention: Attention, **changes) -> ModelConfig:
    """A tiny model whose attention does something from the start."""
    sizes = dict(vocab_size=VOCAB, layers=LAYERS, width=WIDTH, feed_forward_width=48, context_length=64,
                 dtype="float32", output_init=1.0)
    return ModelConfig(attention=attention, **(sizes | changes))
