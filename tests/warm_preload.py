"""What the server of `warm.python()` imports: what `megacpp train` and a rank of it import."""

from megacpp_mcore.stack import bridges

bridges.before_megatron()

import megatron.training.training  # noqa: E402, F401
import triton.language  # noqa: E402, F401

import megacpp_mcore.training.cpu.train  # noqa: E402, F401
