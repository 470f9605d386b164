"""SkipV1Former with YOCO's sharing of keys at the quick start's size."""

from configs._small import heads, small
from kvjax.attention import SkipV1Yoco

config = small(heads(), SkipV1Yoco())
