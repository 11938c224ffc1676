"""The router's choice: admission of every backend, and what a map must be."""

import admission

test_admission = admission.suite("router_topk", beyond_dispatch=("triton",))
