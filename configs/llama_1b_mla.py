"""LLaMA 1B with latent attention (its cache is published, its other sizes are this project's choice)."""

from configs._skipv1 import llama_1b_mla

config = llama_1b_mla()
