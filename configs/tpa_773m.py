"""Tensor Product Attention at 773M, as in the published comparison of KPA."""

from configs._published import tpa

config = tpa("773m")
