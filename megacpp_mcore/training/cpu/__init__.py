"""Runs on a machine without a GPU: one process, Megatron's classes, torch's AdamW."""
