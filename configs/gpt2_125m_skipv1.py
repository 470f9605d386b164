"""SkipV1Former, GPT-2 125M."""

from configs._skipv1 import gpt2
from kvjax.attention import SkipV1

config = gpt2("125m", SkipV1())
