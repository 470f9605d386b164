"""Kronecker Product Attention from a trained MHA or GQA model. The conversion is poor: see `kvjax.convert.uptrain`."""

from configs._uptrain import uptrain
from kvjax.attention import Kronecker
from kvjax.config import Config, ModelConfig


def config(source: ModelConfig) -> Config:
    heads, width = source.attention.heads, source.attention.head_dim
    d1 = max(n for n in range(1, int(width**0.5) + 1) if width % (2 * n) == 0)
    return uptrain(source, Kronecker(h1=heads, h2=1, d1=d1, d2=width // d1, dense_query=True))
