"""Checkpoints on disk, for both lanes: which are complete, their checksums, and how one replaces
another. Imports neither torch nor Megatron, except for `writer`."""
