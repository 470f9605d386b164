"""Tensor Product Attention at 125M, as in the published comparison of KPA."""

from configs._published import tpa

config = tpa("125m")
