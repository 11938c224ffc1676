// Backward for 16-bit inputs, from the host.
#pragma once

#include "bwd.cuh"
#include "combine.cuh"
#include "run.cuh"

namespace m2rnn {

template <typename T, bool kClamp>
cudaError_t launch_backward(const Params& p, cudaStream_t stream) {
  return launch(backward_16bit<T, kClamp>, p, blocks(p) * p.segments, kBackwardThreads,
                sizeof(BackwardShared), stream);
}

template <typename T>
cudaError_t run_backward(const Params& p, cudaStream_t stream) {
  const cudaError_t error = p.clamp > 0 ? launch_backward<T, true>(p, stream)
                                        : launch_backward<T, false>(p, stream);
  return error != cudaSuccess ? error : run_combine<T>(p, stream);
}

}  // namespace m2rnn
