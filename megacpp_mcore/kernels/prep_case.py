"""What the cases of mamba3_prep and m2rnn_prep have in common."""

from types import SimpleNamespace

import torch

from megacpp_mcore.kernels.case import Case
from megacpp_mcore.surfaces import problems
from megacpp_mcore.surfaces.backend import Problem


class PrepCase(Case):
    """Arithmetic around a mixer's kernel: its backends look at the options, not at the sizes."""

    def problem(self, device: str, dtype: torch.dtype) -> Problem:
        return problems.mixer_prep(
            device,
            SimpleNamespace(params_dtype=dtype, deterministic_mode=False, cuda_graph_impl="none"),
        )
