"""Runs on GPUs, inside Megatron's own training loop."""
