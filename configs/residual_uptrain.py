"""KVPath-Residual, two layers a path, corrections of half the head width, from a trained MHA or GQA model."""

from configs._uptrain import uptrain
from kvjax.attention import PathResidual
from kvjax.config import Config, ModelConfig


def config(source: ModelConfig) -> Config:
    return uptrain(source, sharing=PathResidual(layers=2, delta=source.attention.head_dim // 2))
