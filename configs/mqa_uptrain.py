"""Multi-query attention from a trained MHA or GQA model: key and value heads become their mean."""

import dataclasses

from configs._uptrain import uptrain
from kvjax.config import Config, ModelConfig


def config(source: ModelConfig) -> Config:
    return uptrain(source, dataclasses.replace(source.attention, kv_heads=1))
