"""Kronecker Product Attention at 773M, heads split 5 x 4, as published."""

from configs._published import kpa

config = kpa("773m", h1=5, h2=4)
