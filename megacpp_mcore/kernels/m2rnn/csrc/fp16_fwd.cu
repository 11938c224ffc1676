#include "run_fwd.cuh"

template cudaError_t m2rnn::run_forward<__half>(const m2rnn::Params& p, cudaStream_t stream);
