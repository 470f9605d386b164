"""Multi-head attention at the quick start's size."""

from configs._small import heads, small

config = small(heads())
