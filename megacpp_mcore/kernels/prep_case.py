"""What the cases of mamba3_prep and m2rnn_prep have in common."""

from types import SimpleNamespace

import torch

from megacpp_mcore.kernels.case import Case
from megacpp_mcore.surfaces import mixer_prep
from megacpp_mcore.surfaces.workload import Workload


class PrepCase(Case):
    """Arithmetic around a mixer's kernel: its backends look at the options, not at the sizes."""

    def workload(self, device: str, dtype: torch.dtype) -> Workload:
        return mixer_prep.workload(
            device,
            SimpleNamespace(params_dtype=dtype, deterministic_mode=False, cuda_graph_impl="none"),
        )
