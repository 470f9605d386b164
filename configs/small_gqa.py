"""Grouped-query attention, two key-value heads, at the quick start's size."""

from configs._small import heads, small

config = small(heads(kv_heads=2))
