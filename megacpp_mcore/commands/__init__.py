"""One module a command, each with `register(subparsers)`; nothing here may import torch at the top."""
