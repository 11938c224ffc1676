"""The one base class of every refusal this package makes."""


class MegacppError(ValueError):
    """A request that cannot be served as asked.

    The message names the value, what is allowed and what to do. The command line prints it on
    stderr and exits with 2; nothing has been changed when it is raised. Takes one string, because
    Megatron's `build_module` re-raises an exception as `type(error)(message)`.
    """
