"""A source pattern lowered to Megatron: translation, plan, block settings, FLOPs; no torch."""
