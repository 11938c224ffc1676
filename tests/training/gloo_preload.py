"""What the server of `gloo_ranks` has imported before it forks a rank."""

from megacpp_mcore.stack import bridges

bridges.before_megatron()

import gloo_ranks  # noqa: E402, F401
