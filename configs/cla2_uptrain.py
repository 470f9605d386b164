"""Cross-layer attention, two layers a group, from a trained MHA or GQA model."""

from configs._uptrain import uptrain
from kvjax.attention import CrossLayer
from kvjax.config import Config, ModelConfig


def config(source: ModelConfig) -> Config:
    return uptrain(source, sharing=CrossLayer(2))
