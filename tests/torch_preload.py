"""What Megatron imports of others, and nothing of Megatron's."""

import einops  # noqa: F401
import torch._dynamo
import torch._inductor.standalone_compile
import torch.distributed._tensor
import torch.distributed.checkpoint
import torch.distributed.elastic.multiprocessing
import torch.distributed.fsdp  # noqa: F401
import yaml  # noqa: F401
