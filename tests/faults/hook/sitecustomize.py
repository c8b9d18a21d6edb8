"""Python imports this by itself where the folder is on PYTHONPATH: it disturbs the process as its environment says."""

import disturb

disturb.from_environment()
