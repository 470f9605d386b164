"""SkipV1Former with latent attention, LLaMA 1B (other sizes than the cache's are this project's choice)."""

from configs._skipv1 import llama_1b_mla
from kvjax.attention import SkipV1

config = llama_1b_mla(SkipV1())
