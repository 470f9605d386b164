"""Kronecker Product Attention at 353M, heads split 8 x 2, with as many parameters as multi-head attention."""

from configs._published import kpa, matched, mha

config = matched(kpa("353m", h1=8, h2=2), mha("353m"))
