#include "run_weights.cuh"

template cudaError_t grouped::run_weights<256, grouped::kTransposed>(
    int, const void*, void*, const grouped::Problem&, cudaStream_t);
