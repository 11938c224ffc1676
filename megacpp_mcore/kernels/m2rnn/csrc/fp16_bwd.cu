#include "run_bwd.cuh"

template cudaError_t m2rnn::run_backward<__half>(const m2rnn::Params& p, cudaStream_t stream);
