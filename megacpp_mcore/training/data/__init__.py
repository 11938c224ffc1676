"""Datasets: built from text, checked to the byte, read through Megatron's GPTDataset."""
