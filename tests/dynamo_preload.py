"""What Megatron imports of others but Inductor, and nothing of Megatron's."""

import torch._dynamo
import torch.distributed._tensor
import torch.distributed.checkpoint  # noqa: F401
