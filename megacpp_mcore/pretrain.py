"""Entry point of one rank of a training run on GPUs, in Megatron's own loop.

    torchrun --nproc-per-node N -m megacpp_mcore.pretrain \\
        $(megacpp recipe args RECIPE --with-recipe)

`megacpp train RECIPE --gpus N` starts the same ranks. No Megatron-LM checkout is needed.
"""

import sys

from megacpp_mcore.errors import MegacppError


def main(argv: list[str] | None = None) -> int:
    """Train. Returns the exit status: 0, or that of a MegacppError, which is printed on stderr."""
    from megacpp_mcore.host.processes import end_children_with_this
    from megacpp_mcore.training.gpu.rank_setup import launch

    end_children_with_this()  # where `megacpp train` has not said so: under torchrun
    try:
        launched = launch(sys.argv[1:] if argv is None else argv)
        # Imported late: it imports torch, which reads the environment that `launch` sets.
        from megacpp_mcore.training.gpu.train import train

        train(launched)
    except MegacppError as error:
        print(f"megacpp: {error}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
