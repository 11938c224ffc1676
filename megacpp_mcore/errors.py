"""The base class of all errors that this package raises on purpose."""


class MegacppError(ValueError):
    """A request that cannot be carried out as asked.

    The message names the value, what is allowed and what to do. The command line prints it on
    stderr and exits with `exit_status`. Takes one string, because Megatron's `build_module`
    re-raises an exception as `type(error)(message)`.
    """

    exit_status = 2  # refused before anything was changed; 1: failed on the way
