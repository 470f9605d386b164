"""SkipV1Former, LLaMA 1B."""

from configs._skipv1 import llama
from kvjax.attention import SkipV1

config = llama("1b", SkipV1())
