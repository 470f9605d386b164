"""SkipV1Former, LLaMA 3B."""

from configs._skipv1 import llama
from kvjax.attention import SkipV1

config = llama("3b", SkipV1())
