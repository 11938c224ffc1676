import admission

test_admission = admission.suite("norm")
