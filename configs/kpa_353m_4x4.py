"""Kronecker Product Attention at 353M, heads split 4 x 4, as published."""

from configs._published import kpa

config = kpa("353m", h1=4, h2=4)
