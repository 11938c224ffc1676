"""What reproducers of Megatron's defects import of the tree under test."""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parent.parent / "patches" / "reproducers"))

from _common import hide_gpu

hide_gpu()

import megatron.core.extensions.transformer_engine  # noqa: E402
import megatron.core.models.gpt.moe_module_specs  # noqa: E402
import megatron.core.models.hybrid.hybrid_model  # noqa: E402
import megatron.training.training  # noqa: E402, F401
