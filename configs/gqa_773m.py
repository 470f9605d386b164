"""Grouped-query attention (two key-value heads) at 773M, as in the published comparison of KPA."""

from configs._published import gqa

config = gqa("773m")
