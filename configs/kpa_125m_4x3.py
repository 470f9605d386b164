"""Kronecker Product Attention at 125M, heads split 4 x 3, as published."""

from configs._published import kpa

config = kpa("125m", h1=4, h2=3)
