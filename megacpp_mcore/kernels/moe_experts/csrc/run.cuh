// The products, from the host. Each width of a tile, and rows and weights apart, is a unit of its
// own, so that nvcc compiles them at once.
#pragma once

#include <cuda_runtime.h>

#include "grouped.cuh"

namespace grouped {

// kForward and kInputGradient. kept: where A's gathered rows (rows, k) are left, or null.
template <int kTileN>
cudaError_t run_rows(int kind, const void* a, const void* b, void* c, void* kept, const Problem& p,
                     cudaStream_t stream);

// The weight gradients.
template <int kTileN>
cudaError_t run_weights(int kind, const void* a, const void* b, void* c, const Problem& p,
                        cudaStream_t stream);

}  // namespace grouped
