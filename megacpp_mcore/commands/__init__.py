"""One module a command, each with `register(subparsers)`; none imports torch at the top."""
