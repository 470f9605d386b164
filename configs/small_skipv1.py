"""SkipV1Former at the quick start's size."""

from configs._small import heads, small
from kvjax.attention import SkipV1

config = small(heads(), SkipV1())
