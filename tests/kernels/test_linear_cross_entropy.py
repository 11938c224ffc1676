import admission

test_admission = admission.suite("linear_cross_entropy")
