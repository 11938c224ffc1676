// The products, from the host. Each width of a tile, and rows and weights by their form, is a unit of
// its own, so that nvcc compiles them at once.
#pragma once

#include <cuda_runtime.h>

#include "problem.cuh"

namespace grouped {

// kForward and kInputGradient.
template <int kTileN>
cudaError_t run_rows(int kind, const void* a, const void* b, void* c, const Problem& p,
                     cudaStream_t stream);

// The weight gradients, of gathered tokens: A.
template <int kTileN, int kForm>
cudaError_t run_weights(int kind, const void* b, void* c, const Problem& p, cudaStream_t stream);

}  // namespace grouped
