"""LLaMA 130M, the base model of SkipV1Former."""

from configs._skipv1 import llama

config = llama("130m")
