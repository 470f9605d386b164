"""YOCO, a window of 32 tokens in its lower half, at the quick start's size."""

from configs._small import heads, small
from kvjax.attention import Yoco

config = small(heads(), Yoco(window=32))
