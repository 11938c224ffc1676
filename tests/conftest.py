"""What every test process needs before the first import of Megatron."""

import os

# One thread a worker: pytest runs a worker per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from megacpp_mcore import bridges

bridges.before_megatron()
