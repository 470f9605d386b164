"""GPT-2 125M, the base model of SkipV1Former."""

from configs._skipv1 import gpt2

config = gpt2("125m")
