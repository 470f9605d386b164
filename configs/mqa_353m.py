"""Multi-query attention at 353M, as in the published comparison of KPA."""

from configs._published import mqa

config = mqa("353m")
