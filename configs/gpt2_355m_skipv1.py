"""SkipV1Former, GPT-2 355M."""

from configs._skipv1 import gpt2
from kvjax.attention import SkipV1

config = gpt2("355m", SkipV1())
