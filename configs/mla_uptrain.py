"""Latent attention from a trained MHA or GQA model: a latent of half the size of its keys and values."""

from configs._uptrain import uptrain
from kvjax.attention import Latent
from kvjax.config import Config, ModelConfig


def config(source: ModelConfig) -> Config:
    heads, width = source.attention.heads, source.attention.head_dim
    rope_dim = width // 2
    latent = Latent(heads, latent_dim=source.attention.kv_heads * width - rope_dim, rope_dim=rope_dim, nope_dim=width,
                    value_dim=width)
    return uptrain(source, latent)
