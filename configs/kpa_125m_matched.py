"""Kronecker Product Attention at 125M, heads split 6 x 2, with as many parameters as multi-head attention."""

from configs._published import kpa, matched, mha

config = matched(kpa("125m", h1=6, h2=2), mha("125m"))
