#include "run_bwd.cuh"

template cudaError_t m2rnn::run_backward<__nv_bfloat16>(const m2rnn::Params& p, cudaStream_t stream);
