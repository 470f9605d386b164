"""Kronecker Product Attention at 353M, heads split 4 x 4, with as many parameters as multi-head attention."""

from configs._published import kpa, matched, mha

config = matched(kpa("353m", h1=4, h2=4), mha("353m"))
