"""Kronecker Product Attention at 125M, heads split 6 x 2, as published."""

from configs._published import kpa

config = kpa("125m", h1=6, h2=2)
