"""Kronecker Product Attention at 773M, heads split 10 x 2, as published."""

from configs._published import kpa

config = kpa("773m", h1=10, h2=2)
