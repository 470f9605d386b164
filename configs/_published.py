"""The published settings of KPA (arXiv:2610.12657) and of its baselines as T6 (arXiv:2501.06425) sizes them.

Widths and depths are GPT-2's; query rank 6, 50 304 words, betas (0.9, 0.95), clip 1.0, a final learning rate of 10 %
and initial values are this project's assumptions where the papers are silent. Baselines have more heads than GPT-2, so
that their parameters agree with multi-head attention; KPA is published at GPT-2's heads, which leaves it smaller:
`matched` widens its feed-forward layers until the totals agree. Latent attention is taken at the heads and latents that
are published for it, which leaves it larger than its scale's name above 125M.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvjax.attention import Attention, GroupedQuery, Kronecker, Latent, Sharing
from kvjax.config import CheckpointConfig, Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, TrainConfig
from kvjax.model import parameter_count

HEAD_DIM = 64


@dataclass(frozen=True)
class Scale:
    """One size of the published comparison."""

    width: int
    layers: int
    heads: int
    peak_lr: float
    tpa_heads: int
    mqa_heads: int
    gqa_heads: int
    mla_heads: int
    latent: int
    query_latent: int


SCALES = {
    "125m": Scale(768, 12, 12, 6e-4, 34, 23, 22, 12, 256, 512),
    "353m": Scale(1024, 24, 16, 6e-4, 47, 31, 30, 23, 512, 1024),
    "773m": Scale(1280, 36, 20, 3e-4, 61, 39, 38, 34, 512, 1024),
    "1500m": Scale(1600, 48, 25, 3e-4, 78, 49, 48, 49, 512, 1024),
}


def published(scale: str, attention: Attention, sharing: Sharing | None = None) -> Config:
    """The published training run at one scale with some attention: 50 000 steps of about a million tokens."""
    sizes = SCALES[scale]
    model = ModelConfig(attention=attention, sharing=sharing, vocab_size=50_304, layers=sizes.layers,
                        width=sizes.width, feed_forward_width=int(8 * sizes.width / 3), context_length=1024,
                        remat="none" if scale == "125m" else "dots")
    return Config(
        model=model,
        train=TrainConfig(steps=50_000, batch_size=1024, accumulation=16, accelerator=True),
        data=DataConfig(source="tokens:data/fineweb_edu", tokenizer="gpt2", workers=2),
        optimizer=OptimizerConfig(peak_lr=sizes.peak_lr, warmup_steps=2000, weight_decay=0.1, clip_norm=1.0),
        checkpoint=CheckpointConfig(every_steps=1000, keep_every=10_000),
        mesh=MeshConfig() if sizes.width < 1280 else MeshConfig(data=1, fsdp=-1),
    )


def mha(scale: str, sharing: Sharing | None = None) -> Config:
    """Multi-head attention."""
    heads = SCALES[scale].heads
    return published(scale, GroupedQuery(heads=heads, kv_heads=heads, head_dim=HEAD_DIM), sharing)


def gqa(scale: str) -> Config:
    """Grouped-query attention with two key-value heads."""
    return published(scale, GroupedQuery(heads=SCALES[scale].gqa_heads, kv_heads=2, head_dim=HEAD_DIM))


def mqa(scale: str) -> Config:
    """Multi-query attention."""
    return published(scale, GroupedQuery(heads=SCALES[scale].mqa_heads, kv_heads=1, head_dim=HEAD_DIM))


def mla(scale: str, sharing: Sharing | None = None) -> Config:
    """Multi-head latent attention with a query latent; 32 rotated features beside 64 that are not."""
    sizes = SCALES[scale]
    return published(scale, Latent(heads=sizes.mla_heads, latent_dim=sizes.latent, rope_dim=32, nope_dim=64,
                                   value_dim=64, query_latent_dim=sizes.query_latent), sharing)


def tpa(scale: str) -> Config:
    """Tensor Product Attention: the degenerate Kronecker split."""
    return published(scale, Kronecker(h1=SCALES[scale].tpa_heads, h2=1, d1=1, d2=HEAD_DIM))


def kpa(scale: str, h1: int, h2: int) -> Config:
    """Kronecker Product Attention with heads split h1 x h2."""
    return published(scale, Kronecker(h1=h1, h2=h2, d1=8, d2=8))


def matched(config: Config, target: Config) -> Config:
    """`config` with feed-forward layers so wide that its parameters agree with those of `target` (well within 1 %)."""
    missing = parameter_count(target.model) - parameter_count(config.model)
    per_feature = 3 * config.model.width * config.model.layers
    features = config.model.feed_forward_width + round(missing / per_feature / 8) * 8
    return dataclasses.replace(config, model=dataclasses.replace(config.model, feed_forward_width=features))
