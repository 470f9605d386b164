"""Grouped-query attention (two key-value heads) at 1.5B, as in the published comparison of KPA."""

from configs._published import gqa

config = gqa("1500m")
