"""SkipV1Former, LLaMA 350M."""

from configs._skipv1 import llama
from kvjax.attention import SkipV1

config = llama("350m", SkipV1())
