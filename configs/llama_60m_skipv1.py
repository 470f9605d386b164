"""SkipV1Former, LLaMA 60M."""

from configs._skipv1 import llama
from kvjax.attention import SkipV1

config = llama("60m", SkipV1())
