"""LLaMA 60M, the base model of SkipV1Former."""

from configs._skipv1 import llama

config = llama("60m")
