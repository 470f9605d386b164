"""LLaMA 1B, the base model of SkipV1Former."""

from configs._skipv1 import llama

config = llama("1b")
