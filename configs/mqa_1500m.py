"""Multi-query attention at 1.5B, as in the published comparison of KPA."""

from configs._published import mqa

config = mqa("1500m")
