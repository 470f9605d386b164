"""SkipV1Former with grouped-query attention, LLaMA 1B (other sizes than the cache's are this project's choice)."""

from configs._skipv1 import llama_1b_gqa
from kvjax.attention import SkipV1

config = llama_1b_gqa(SkipV1())
