import admission

test_admission = admission.suite("core_attention", beyond_dispatch=("sdpa_flash",))
