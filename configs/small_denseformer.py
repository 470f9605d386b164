"""DenseFormer at the quick start's size."""

from configs._small import heads, small
from kvjax.attention import DenseFormer

config = small(heads(), DenseFormer())
