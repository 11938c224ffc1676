#include "run_weights.cuh"

template cudaError_t grouped::run_weights<224, grouped::kGathered>(
    int, const void*, void*, const grouped::Problem&, cudaStream_t);
