"""Models of the quick start's size that differ in nothing but attention and sharing, to be compared on a CPU.

    python -m kvjax.evaluation.compare small_mha small_kpa small_concat --out runs/small --seeds 0 1 2
"""

from __future__ import annotations

import dataclasses

from configs.quickstart import config as quickstart
from kvjax.attention import Attention, GroupedQuery, Latent, Sharing
from kvjax.config import CheckpointConfig, Config

HEADS, HEAD_DIM = 4, 32


def small(attention: Attention, sharing: Sharing | None = None) -> Config:
    """The quick start's data, width and depth, in about a minute on two CPU cores."""
    return dataclasses.replace(
        quickstart, model=dataclasses.replace(quickstart.model, attention=attention, sharing=sharing),
        train=dataclasses.replace(quickstart.train, steps=300, eval_every=100),
        checkpoint=CheckpointConfig(every_steps=300))


def heads(kv_heads: int = HEADS) -> GroupedQuery:
    """Multi-head attention, or with fewer key-value heads grouped-query attention."""
    return GroupedQuery(heads=HEADS, kv_heads=kv_heads, head_dim=HEAD_DIM)


def latent() -> Latent:
    """Latent attention with heads of the same width."""
    return Latent(heads=HEADS, latent_dim=64, rope_dim=16, nope_dim=HEAD_DIM, value_dim=HEAD_DIM)
