import admission

test_mamba3_scan = admission.suite("mamba3_scan")
test_m2rnn = admission.suite("m2rnn")
