"""DenseFormer on GPT-2 125M, as in the published comparison of SkipV1Former."""

from configs._skipv1 import gpt2
from kvjax.attention import DenseFormer

config = gpt2("125m", DenseFormer())
