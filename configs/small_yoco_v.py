"""YOCO-V at the quick start's size."""

from configs._small import heads, small
from kvjax.attention import YocoValues

config = small(heads(), YocoValues())
