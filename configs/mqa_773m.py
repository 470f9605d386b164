"""Multi-query attention at 773M, as in the published comparison of KPA."""

from configs._published import mqa

config = mqa("773m")
