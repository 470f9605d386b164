"""Kronecker Product Attention at 773M, heads split 10 x 2, with as many parameters as multi-head attention."""

from configs._published import kpa, matched, mha

config = matched(kpa("773m", h1=10, h2=2), mha("773m"))
