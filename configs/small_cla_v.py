"""CLA-V at the quick start's size."""

from configs._small import heads, small
from kvjax.attention import CrossLayerValues

config = small(heads(), CrossLayerValues())
