"""SkipV1Former, LLaMA 130M."""

from configs._skipv1 import llama
from kvjax.attention import SkipV1

config = llama("130m", SkipV1())
