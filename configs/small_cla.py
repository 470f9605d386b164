"""CLA-2 at the quick start's size."""

from configs._small import heads, small
from kvjax.attention import CrossLayer

config = small(heads(), CrossLayer(layers=2))
