"""The M block: Mamba-3 as the mixer of Megatron's MambaLayer (math: `kernels.mamba3`).

Tensor parallelism: heads are split over the ranks, and every weight is split along its first axis.
The rows of in_proj are eight parts, `[z, x, B, C, dt, A, trap, angle]`, each split into equal
slices, and padding. A rank's slices of z, x, dt, A and trap belong to its own heads. The angles,
and B and C if the groups do not divide by the ranks, are all-gathered in the forward pass and
reduce-scattered in the backward pass, which sums the gradients of all heads. No projection weight
is replicated, the sequence is gathered once, and checkpoints do not depend on the number of ranks.
Only the two norm weights are replicated; their gradients are summed over the ranks in the backward
pass.

Differences from upstream's module: the rows of B and C are ordered (group, rank, state), not (rank,
group, state), and SISO's B_bias and C_bias have no rank axis.
"""

import math

import torch
from megatron.core.tensor_parallel import (
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
    get_cuda_rng_tracker,
    set_tensor_model_parallel_attributes,
)
from megatron.core.utils import deprecate_inference_params
from torch import Tensor

from megacpp_mcore import dispatch
from megacpp_mcore.hybrid.block_settings import Mamba3Settings
from megacpp_mcore.hybrid.mamba3_layout import IN_PROJ_PARTS, Mamba3Layout, Mamba3MixerError
from megacpp_mcore.kernels.mamba3 import mamba3_step
from megacpp_mcore.kernels.mamba3_core.prep import mamba3_prep
from megacpp_mcore.layers.documents import document_offsets
from megacpp_mcore.layers.inference_state import check_context, entry_of
from megacpp_mcore.layers.mixer import MixerSubmodules, RecurrentMixer
from megacpp_mcore.layers.param_gather import wait_for_param_gather
from megacpp_mcore.layers.settings import PluginSettings, plugin_settings
from megacpp_mcore.surfaces import mamba3_core as mamba3_core_surface
from megacpp_mcore.surfaces import mamba3_scan as mamba3_scan_surface
from megacpp_mcore.surfaces.backend import REFERENCE
from megacpp_mcore.surfaces.workload import current_device

_NORM_EPS = 1e-5  # of the B and C norms, as in upstream's module; not configurable there either


class Mamba3Mixer(RecurrentMixer):
    """Mamba-3, [s, b, h] in and out; under sequence parallelism s is the rank's part.

    Sizes are config.mamba_num_heads, mamba_head_dim, mamba_state_dim and mamba_num_groups.
    settings: by default those of `plugin_settings(config)`. Parameters of the recurrence (dt_bias,
    D, B_bias, C_bias, mimo_*) stay float32 under `bfloat16()` and `half()`.

    Raises Mamba3MixerError for sizes that do not divide over the ranks and for context parallelism.
    """

    def __init__(
        self,
        config,
        submodules: MixerSubmodules,
        d_model: int,
        layer_number: int | None = None,
        pg_collection=None,
        pp_layer_offset: int = 0,
        name: str | None = None,
        settings: Mamba3Settings | None = None,
    ) -> None:
        plugin = plugin_settings(config) if settings is None else PluginSettings(mamba3=settings)
        super().__init__(config, pg_collection, plugin.recompute.mamba3)
        self.settings = settings = plugin.mamba3
        self.chunk_size = settings.chunk_size
        self.layer_number = layer_number
        self.layout = Mamba3Layout.of(config, settings, pg_collection)
        parts = dict(zip(IN_PROJ_PARTS, self.layout.in_proj, strict=True))
        self._add_in_proj(submodules.in_proj, d_model, parts, name, self.layout.padding)
        self._add_parameters()
        inner = self.layout.heads * self.layout.head_dim
        self._add_out_proj(submodules.out_proj, inner, d_model, name)
        self._choose_backends(plugin)

    def _add_parameters(self) -> None:
        """Upstream's initial values; dt_bias makes the initial dt log-uniform."""
        layout, config = self.layout, self.config
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        ranks = (layout.rank,) if self.settings.variant == "mimo" else ()

        def add(name: str, value: Tensor) -> None:
            parameter = torch.nn.Parameter(value)
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
            self.register_parameter(name, parameter)

        def ones(*shape: int) -> Tensor:
            return torch.ones(layout.local_heads, *shape, dtype=torch.float32, device=device)

        add("dt_bias", self._initial_dt_bias(device))
        add("D", ones())
        add("B_bias", ones(*ranks, layout.state_dim))
        add("C_bias", ones(*ranks, layout.state_dim))
        if ranks:
            add("mimo_x", ones(*ranks, layout.head_dim) / layout.rank)
            add("mimo_z", ones(*ranks, layout.head_dim))
            add("mimo_o", ones(*ranks, layout.head_dim) / layout.rank)
        self.fp32_params = tuple(self._parameters)
        if not layout.groups_are_split:
            groups = torch.tensor(layout.local_head_groups, device=device)
            self.register_buffer("head_groups", groups, persistent=False)
        norm = {"eps": _NORM_EPS, "device": device, "dtype": config.params_dtype}
        self.B_norm = torch.nn.RMSNorm(layout.state_dim, **norm)
        self.C_norm = torch.nn.RMSNorm(layout.state_dim, **norm)

    def _initial_dt_bias(self, device) -> Tensor:
        """(local heads,) the inverse softplus of dt, log-uniform in [dt_min, dt_max]."""
        layout, settings = self.layout, self.settings
        if self.config.use_cpu_initialization:
            # As Megatron's linears on a CPU: draw all heads, keep this rank's slice.
            uniform = torch.rand(layout.heads, dtype=torch.float32)
            uniform = uniform[layout.first_head : layout.first_head + layout.local_heads]
        else:
            with get_cuda_rng_tracker().fork():
                uniform = torch.rand(layout.local_heads, dtype=torch.float32, device=device)
        low, high = math.log(settings.dt_min), math.log(settings.dt_max)
        dt = torch.exp(low + (high - low) * uniform).clamp(min=settings.dt_init_floor)
        return dt + torch.log(-torch.expm1(-dt))

    def _choose_backends(self, plugin: PluginSettings) -> None:
        """One operator between the projections, or else plain torch around the scan."""
        device, requests = current_device(), plugin.backends
        sizes = self.config, self.layout, self.settings
        self.fused = None
        if self.settings.variant == "siso":
            workload = mamba3_core_surface.workload(device, *sizes, requests)
            core = dispatch.decide("mamba3_core", workload, requests)
            if core.observed != REFERENCE:
                self.fused = core.load()
                return
        workload = mamba3_scan_surface.workload(device, *sizes)
        self.scan = dispatch.decide("mamba3_scan", workload, requests).load()

    def forward(
        self,
        hidden_states: Tensor,
        inference_context=None,
        *,
        inference_params=None,
        packed_seq_params=None,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [s, b, h] -> (output [s, b, h], None).

        packed_seq_params: THD documents packed into one row (b = 1); each starts from a zero state.
        inference_context: static batching only; it keeps the state between calls. Raises
        InferenceStateError for dynamic batching, and for inference with packed documents.
        """
        inference_context = deprecate_inference_params(inference_context, inference_params)
        if inference_context is not None:
            projected, _ = self.in_proj(hidden_states)
            return self.out_proj(self._infer(projected, inference_context, packed_seq_params))
        offsets = document_offsets(packed_seq_params)
        return self._maybe_recompute("mixer", self._mixer, hidden_states, offsets)

    def _mixer(self, hidden_states: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor | None]:
        projected, _ = self.in_proj(hidden_states)
        return self.out_proj(self._maybe_recompute("core", self._core, projected, offsets))

    def _core(self, projected: Tensor, offsets: Tensor | None) -> Tensor:
        """Everything between the projections: [s, b, in_proj rows] -> [s, b, heads * P]."""
        if self.fused is not None:
            return self._fused(projected, offsets)
        tokens, parameters = self._scan_arguments(projected.transpose(0, 1))
        y = self.scan(**tokens, **parameters, chunk_size=self.chunk_size, cu_seqlens=offsets)
        return y.transpose(0, 1).flatten(2)

    def _fused(self, projected: Tensor, offsets: Tensor | None, **state):
        layout, settings = self.layout, self.settings
        return self.fused(
            projected, self.dt_bias, self._norm_weight(self.B_norm), self._norm_weight(self.C_norm),
            self.B_bias, self.C_bias, self.D, heads=layout.local_heads, head_dim=layout.head_dim,
            groups=layout.scan_groups, state_dim=layout.state_dim, angles=layout.angles,
            decay=settings.decay, decay_floor=settings.decay_floor, eps=_NORM_EPS,
            cu_seqlens=offsets, **state,
        )  # fmt: skip

    def _scan_arguments(self, projected: Tensor) -> tuple[dict, dict]:
        """projected (b, s, in_proj rows) -> the scan's per-token tensors and its parameters."""
        layout, settings = self.layout, self.settings
        columns = projected.split((*layout.in_proj, layout.padding), dim=-1)
        z, x, B, C, dd_dt, dd_A, trap, angle, _ = columns
        if layout.groups_are_split:
            (angle,) = self._gather(angle)
        else:
            B, C, angle = self._gather(B, C, angle)
        inputs = mamba3_prep(
            B, C, dd_dt, dd_A, self.dt_bias, self._norm_weight(self.B_norm),
            self._norm_weight(self.C_norm), None if layout.groups_are_split else self.head_groups,
            variant=settings.variant, rank=layout.rank, decay=settings.decay,
            decay_floor=settings.decay_floor, eps=_NORM_EPS,
        )  # fmt: skip
        tokens = {
            **inputs._asdict(),
            "v": x.unflatten(-1, (layout.local_heads, layout.head_dim)),
            "z": z.unflatten(-1, (layout.local_heads, layout.head_dim)),
            "trap": trap,
            "angles": angle.unsqueeze(2),
        }
        parameters = {"q_bias": self.C_bias, "k_bias": self.B_bias, "D": self.D}
        if self.settings.variant == "mimo":
            parameters |= {"mimo_v": self.mimo_x, "mimo_z": self.mimo_z, "mimo_out": self.mimo_o}
        return tokens, parameters

    def _norm_weight(self, norm: torch.nn.RMSNorm) -> Tensor:
        """The weight in float32; its gradient is summed over the ranks, whose heads all use it."""
        weight = wait_for_param_gather(norm).weight
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        return copy_to_tensor_model_parallel_region(weight, group=self.tp_group)

    def _gather(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """All-gather parts whose last dim is split over the ranks, in one collective."""
        if self.layout.tp == 1:
            return parts
        widths = [part.shape[-1] for part in parts]
        whole = all_gather_last_dim_from_tensor_parallel_region(
            torch.cat(parts, dim=-1), group=self.tp_group
        )
        pieces = whole.unflatten(-1, (self.layout.tp, -1)).split(widths, dim=-1)
        return tuple(piece.flatten(-2) for piece in pieces)

    def _infer(self, projected: Tensor, context, packed_seq_params) -> Tensor:
        """`_core`, from the state that the static inference context keeps for this layer."""
        check_context(context, packed_seq_params)
        states, state = context.key_value_memory_dict, entry_of(context, self.layer_number)
        carried = {"initial_state": state, "return_final_state": True}
        if self.fused is not None and (state is None or projected.shape[0] > 1):
            y, states[self.layer_number] = self._fused(projected, None, **carried)
            return y
        tokens, parameters = self._scan_arguments(projected.transpose(0, 1))
        if state is not None and projected.shape[0] == 1:
            token = {key: tensor.squeeze(1) for key, tensor in tokens.items()}
            y, state = mamba3_step(**token, **parameters, state=state)
            y = y.unsqueeze(1)
        else:
            y, state = self.scan(**tokens, **parameters, chunk_size=self.chunk_size, **carried)
        states[self.layer_number] = state
        return y.transpose(0, 1).flatten(2)

    def mamba_state_shapes_per_request(self):
        """Refused. Megatron's dynamic engine calls this to allocate a conv and an SSM state."""
        raise Mamba3MixerError(
            "Megatron's dynamic inference engine stores a conv and an SSM state, but Mamba-3 has "
            "four others (angle, ssm, k, v); use a StaticInferenceContext"
        )
