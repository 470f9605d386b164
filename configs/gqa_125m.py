"""Grouped-query attention (two key-value heads) at 125M, as in the published comparison of KPA."""

from configs._published import gqa

config = gqa("125m")
