"""Kronecker Product Attention at 1.5B, heads split 5 x 5, with as many parameters as multi-head attention."""

from configs._published import kpa, matched, mha

config = matched(kpa("1500m", h1=5, h2=5), mha("1500m"))
