import admission

test_admission = admission.suite("moe_experts", beyond_dispatch=("grouped_mm",))
