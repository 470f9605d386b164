"""Tensor Product Attention at 1.5B, as in the published comparison of KPA."""

from configs._published import tpa

config = tpa("1500m")
