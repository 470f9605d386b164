"""ResFormer at the quick start's size."""

from configs._small import heads, small
from kvjax.attention import ResFormer

config = small(heads(), ResFormer())
