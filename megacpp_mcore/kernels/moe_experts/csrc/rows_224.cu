#include "run_rows.cuh"

template cudaError_t grouped::run_rows<224>(int, const void*, const void*, void*,
                                            const grouped::Problem&, cudaStream_t);
