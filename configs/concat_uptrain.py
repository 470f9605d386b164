"""KVPath-Concat, two layers a path, half of each head shared, from a trained MHA or GQA model."""

from configs._uptrain import uptrain
from kvjax.attention import PathConcat
from kvjax.config import Config, ModelConfig


def config(source: ModelConfig) -> Config:
    return uptrain(source, sharing=PathConcat(layers=2, delta=source.attention.head_dim // 2))
