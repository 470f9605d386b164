"""The published settings of SkipV1Former and of the baselines that it is compared with.

GPT-2: LayerNorm, learned positions, GELU layers four times as wide, biases everywhere, tied embeddings, dropout;
OpenWebText2. LLaMA: RMSNorm, rotary positions, SwiGLU, untied embeddings; C4.

Where the paper is silent, assumed: GPT-2's vocabulary padded to 50 304, with LLaMA's warm-up and final learning rate
and a clip of 1.0; for LLaMA 32 000 words of a byte-level BPE and untied embeddings (with which parameters agree with
the names of the sizes); betas (0.9, 0.95), bfloat16, and this project's initial values. Dropout acts on the embedded
tokens and on what each sub-layer adds, not on attention weights.

The sizes of its GQA and MLA models are found from the bytes that it prints: 24 layers with 8 key-value heads of 64, or
a latent of 256 and 32 rotated features. That these are LLaMA 1B models, and the widths of MLA's heads, are this
project's choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.attention import Attention, GroupedQuery, Latent, Sharing
from kvjax.config import CheckpointConfig, Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, TrainConfig

CONTEXT = 1024


@dataclass(frozen=True)
class Gpt2:
    """One GPT-2 model."""

    width: int
    heads: int
    layers: int
    peak_lr: float = 1e-3


@dataclass(frozen=True)
class Llama:
    """One LLaMA model and its training run."""

    width: int
    feed_forward_width: int
    heads: int
    layers: int
    steps: int
    peak_lr: float
    regularised: bool = False
    """Trained with weight decay and clipped gradients."""


GPT2 = {
    "125m": Gpt2(768, 12, 12),
    "200m": Gpt2(1024, 16, 12),
    "355m": Gpt2(1024, 16, 24),
    "550m": Gpt2(1200, 20, 28, peak_lr=6e-4),
}
LLAMA = {
    "60m": Llama(512, 1376, 8, 8, 2500, 2e-3),
    "130m": Llama(768, 2048, 12, 12, 5000, 2e-3),
    "350m": Llama(1024, 2736, 16, 24, 15_000, 2e-3),
    "1b": Llama(2048, 5461, 32, 24, 25_000, 1e-3, regularised=True),
    "3b": Llama(2560, 6848, 32, 32, 30_000, 5e-4, regularised=True),
}


def gpt2(size: str, sharing: Sharing | None = None) -> Config:
    """GPT-2 on OpenWebText2: 40 000 steps of 120 sequences."""
    sizes = GPT2[size]
    attention = GroupedQuery(heads=sizes.heads, kv_heads=sizes.heads, head_dim=sizes.width // sizes.heads,
                             qkv_bias=True, output_bias=True)
    model = ModelConfig(attention=attention, sharing=sharing, vocab_size=50_304, layers=sizes.layers,
                        width=sizes.width, feed_forward_width=4 * sizes.width, context_length=CONTEXT,
                        positions="learned", norm="layer", norm_eps=1e-5, feed_forward="gelu",
                        feed_forward_bias=True, dropout=0.2, remat="none" if sizes.layers == 12 else "dots")
    return _run(model, "openwebtext2", "gpt2", TrainConfig(steps=40_000, batch_size=120, accumulation=5,
                                                           accelerator=True),
                OptimizerConfig(peak_lr=sizes.peak_lr, warmup_steps=4000, weight_decay=0.1, clip_norm=1.0))


def llama(size: str, sharing: Sharing | None = None, attention: Attention | None = None) -> Config:
    """LLaMA on C4, batches of 512 sequences; multi-head attention unless another is given."""
    sizes = LLAMA[size]
    plain = GroupedQuery(heads=sizes.heads, kv_heads=sizes.heads, head_dim=sizes.width // sizes.heads)
    model = ModelConfig(attention=attention or plain, sharing=sharing, vocab_size=32_000, layers=sizes.layers,
                        width=sizes.width, feed_forward_width=sizes.feed_forward_width, context_length=CONTEXT,
                        tie_embeddings=False, remat="none" if sizes.layers <= 12 else "dots")
    return _run(model, "c4", "bpe:32000",
                TrainConfig(steps=sizes.steps, batch_size=512, accumulation=8, accelerator=True),
                OptimizerConfig(peak_lr=sizes.peak_lr, warmup_steps=sizes.steps // 10,
                                weight_decay=0.1 if sizes.regularised else 0.0,
                                clip_norm=1.0 if sizes.regularised else None))


def llama_1b_gqa(sharing: Sharing | None = None) -> Config:
    """LLaMA 1B with 8 key-value heads."""
    return llama("1b", sharing, GroupedQuery(heads=32, kv_heads=8, head_dim=64))


def llama_1b_mla(sharing: Sharing | None = None) -> Config:
    """LLaMA 1B with latent attention."""
    return llama("1b", sharing, Latent(heads=32, latent_dim=256, rope_dim=32, nope_dim=64, value_dim=64))


def _run(model: ModelConfig, folder: str, tokenizer: str, train: TrainConfig, optimizer: OptimizerConfig) -> Config:
    """A run on tokens in data/FOLDER, prepared with `tokenizer`."""
    return Config(model=model, train=train, optimizer=optimizer,
                  data=DataConfig(source=f"tokens:data/{folder}", tokenizer=tokenizer, workers=2),
                  checkpoint=CheckpointConfig(every_steps=500, keep_every=5000),
                  mesh=MeshConfig() if model.width < 1280 else MeshConfig(data=1, fsdp=-1))
