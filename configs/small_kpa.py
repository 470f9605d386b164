"""Kronecker Product Attention (the quick start's) at the quick start's size."""

from configs._small import small
from kvjax.attention import Kronecker

config = small(Kronecker(h1=2, h2=2, d1=4, d2=8))
