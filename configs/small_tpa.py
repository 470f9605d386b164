"""Tensor Product Attention at the quick start's size."""

from configs._small import HEAD_DIM, HEADS, small
from kvjax.attention import Kronecker

config = small(Kronecker(h1=HEADS, h2=1, d1=1, d2=HEAD_DIM))
