"""The default MoE token dispatcher must work on a CPU: same output and gradient as all-gather's."""

from _common import (
    DEFECT,
    RIGHT,
    asks_for_cuda,
    first_line,
    hide_gpu,
    one_process,
    place_on_cpu,
    report,
    run,
    tiny_config,
)


def main() -> int:
    hide_gpu()
    import torch
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    one_process()
    place_on_cpu()
    hidden = torch.randn(8, 2, 32)
    outputs, gradients = [], []
    for dispatcher in ("allgather", "alltoall"):
        config = tiny_config(moe_token_dispatcher_type=dispatcher, moe_aux_loss_coeff=0.0)
        torch.manual_seed(0)
        tokens = hidden.clone().requires_grad_()
        try:
            layer = get_moe_module_spec(use_te=False, num_experts=4)(config=config, layer_number=1)
            output, _ = layer(tokens)
        except (AssertionError, RuntimeError) as error:
            if dispatcher == "allgather" or not asks_for_cuda(error):
                raise
            return report(DEFECT, f"{dispatcher} dispatcher: {first_line(error)}")
        output.square().sum().backward()
        outputs.append(output.detach())
        gradients.append(tokens.grad)
    for name, (gathered, exchanged) in (("output", outputs), ("gradient", gradients)):
        # The results of two experts are added in a different order: one rounding of the sum.
        bound = 8 * torch.finfo(torch.float32).eps * gathered.abs().max()
        difference = (gathered - exchanged).abs().max()
        assert difference <= bound, f"{name} differs from all-gather's by {difference}"
    return report(RIGHT, f"all-to-all gives all-gather's output and gradient on {hidden.device}")


run(main)
