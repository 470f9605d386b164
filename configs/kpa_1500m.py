"""Kronecker Product Attention at 1.5B, heads split 5 x 5, as published."""

from configs._published import kpa

config = kpa("1500m", h1=5, h2=5)
