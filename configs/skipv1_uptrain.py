"""SkipV1Former from a trained MHA or GQA model: pairs of value heads are pooled, half come from layer 1."""

from configs._uptrain import uptrain
from kvjax.attention import SkipV1
from kvjax.config import Config, ModelConfig


def config(source: ModelConfig) -> Config:
    return uptrain(source, sharing=SkipV1())
