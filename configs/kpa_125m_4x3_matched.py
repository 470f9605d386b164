"""Kronecker Product Attention at 125M, heads split 4 x 3, with as many parameters as multi-head attention."""

from configs._published import kpa, matched, mha

config = matched(kpa("125m", h1=4, h2=3), mha("125m"))
