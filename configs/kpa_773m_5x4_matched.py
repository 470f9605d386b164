"""Kronecker Product Attention at 773M, heads split 5 x 4, with as many parameters as multi-head attention."""

from configs._published import kpa, matched, mha

config = matched(kpa("773m", h1=5, h2=4), mha("773m"))
