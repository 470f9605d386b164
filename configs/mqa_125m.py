"""Multi-query attention at 125M, as in the published comparison of KPA."""

from configs._published import mqa

config = mqa("125m")
