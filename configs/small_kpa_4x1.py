"""Kronecker Product Attention with heads split 4 x 1 and the bytes of `small_kpa`, at the quick start's size."""

from configs._small import small
from kvjax.attention import Kronecker

config = small(Kronecker(h1=4, h2=1, d1=4, d2=8))
