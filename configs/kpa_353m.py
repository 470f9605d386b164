"""Kronecker Product Attention at 353M, heads split 8 x 2, as published."""

from configs._published import kpa

config = kpa("353m", h1=8, h2=2)
