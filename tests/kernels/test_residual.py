import admission

test_admission = admission.suite("residual", beyond_dispatch=("megatron",))
