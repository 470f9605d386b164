"""Tensor Product Attention at 353M, as in the published comparison of KPA."""

from configs._published import tpa

config = tpa("353m")
