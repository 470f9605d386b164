"""SkipV1Former with YOCO's sharing of keys, GPT-2 125M (the size is this project's choice)."""

from configs._skipv1 import gpt2
from kvjax.attention import SkipV1Yoco

config = gpt2("125m", SkipV1Yoco())
