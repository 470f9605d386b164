"""LLaMA 1B with grouped-query attention (its cache is published, its other sizes are this project's choice)."""

from configs._skipv1 import llama_1b_gqa

config = llama_1b_gqa()
