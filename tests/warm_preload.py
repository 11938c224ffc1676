"""What the server of `warm.python()` imports: what `megacpp train` and a rank of it import."""

import argparse
import os
import queue

from megacpp_mcore.stack import bridges

bridges.before_megatron()

import interpreter  # noqa: E402
import jsonschema  # noqa: E402, F401
import megacpp_mcore.specs.nam56r  # noqa: E402
import megatron.core.models.mimo.optimizer  # noqa: E402
import megatron.training.training  # noqa: E402
import megatron_parser  # noqa: E402
import share_storage  # noqa: E402
import torch._dynamo.trace_rules  # noqa: E402
import triton.language  # noqa: E402, F401
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402

import megacpp_mcore.kernels.core_attention.varlen  # noqa: E402
import megacpp_mcore.layers.blocks  # noqa: E402
import megacpp_mcore.layers.loss  # noqa: E402
import megacpp_mcore.receipts.lane  # noqa: E402
import megacpp_mcore.training.cpu.train  # noqa: E402
import megacpp_mcore.training.gpu.model  # noqa: E402

# Megatron makes a process for this queue at a program's first save, which imports torch to take in
# one message; all of a save that is not asynchronous happens in the program itself.
filesystem_async._results_queue = queue.Queue()

megatron_parser.parse_once()
share_storage.compile_quickly()
torch._dynamo.trace_rules.get_torch_obj_rule_map()  # kept; dynamo asks for it at its first frame
megatron.training.arguments.add_megatron_arguments(argparse.ArgumentParser())
megacpp_mcore.receipts.lane.code()  # the hashes of the package's files, which it keeps

if os.environ.get("TRITON_INTERPRET") == "1":
    interpreter.search_once()
