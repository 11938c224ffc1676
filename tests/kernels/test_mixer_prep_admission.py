import admission

# Nothing is compiled on a CPU of the suite; tests/kernels/test_mixer_prep.py has Inductor on one.
test_mamba3_prep = admission.suite("mamba3_prep", beyond_dispatch=("inductor",))
test_m2rnn_prep = admission.suite("m2rnn_prep", beyond_dispatch=("inductor",))
