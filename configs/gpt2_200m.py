"""GPT-2 200M, the base model of SkipV1Former."""

from configs._skipv1 import gpt2

config = gpt2("200m")
