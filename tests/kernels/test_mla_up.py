"""MLA's up-projections with RoPE: admission of every backend."""

import admission

test_admission = admission.suite("mla_up", beyond_dispatch=("triton",))
