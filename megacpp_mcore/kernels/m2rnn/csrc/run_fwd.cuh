// Forward for 16-bit inputs, from the host.
#pragma once

#include "fwd.cuh"
#include "run.cuh"

namespace m2rnn {

template <typename T, bool kExact, int kHeads>
cudaError_t launch_bundles(const Params& p, cudaStream_t stream) {
  const unsigned grid = static_cast<unsigned>(p.slots) * p.row_blocks;
  return launch(forward_16bit<T, kExact, kHeads>, p, grid, kForwardThreads<kHeads>,
                sizeof(ForwardShared<kHeads>), stream);
}

template <typename T, bool kExact>
cudaError_t launch_forward(const Params& p, cudaStream_t stream) {
  return p.bundle == 1 ? launch_bundles<T, kExact, 1>(p, stream)
                       : launch_bundles<T, kExact, 3>(p, stream);
}

template <typename T>
cudaError_t run_forward(const Params& p, cudaStream_t stream) {
  return p.exact_tanh ? launch_forward<T, true>(p, stream) : launch_forward<T, false>(p, stream);
}

}  // namespace m2rnn
