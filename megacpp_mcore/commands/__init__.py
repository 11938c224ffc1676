"""One module per command, each with `register(subparsers)`; none imports torch at the top."""
