"""Settings of all tests: nothing depends on the clock, the load, the network or earlier runs."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Before torch is imported: two workers on two cores must not start four threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile(
    "project",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("project")
