// Forward for float32 inputs: a partial y for every 32 rows, the final state, and a checkpoint of
// the state before every chunk.
#pragma once

#include "common_fp32.cuh"

namespace m2rnn {

struct ForwardFp32Shared {
  Inputs in;
  float h[kSteps][kRows * kColumns];
};

__global__ void __launch_bounds__(kThreads, 4) forward_fp32(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  ForwardFp32Shared& shared = *reinterpret_cast<ForwardFp32Shared*>(memory);
  const Place at(p, kRows);
  const int row = row_place(threadIdx.x / 4), column = threadIdx.x % 4 * 4;
  const int64_t parts = at.row_block * (static_cast<int64_t>(p.batch) * p.tokens);
  float* const y_at = p.y_parts ? p.y_parts : static_cast<float*>(p.y);
  float* checkpoints =
      static_cast<float*>(p.checkpoints) + at.first_chunk * state_size(p) + at.state;
  Weight w;
  w.load(p.W + at.head * kColumns * kColumns, kColumns, 1, kTwoLog2E);
  float h[4] = {}, gates[4];
  if (p.initial) load4(h, p.initial + at.chain * state_size(p) + at.state);

  Stage next;
  next.load(p, at, 0);
  for (int t0 = 0; t0 < at.length; t0 += kSteps) {
    __syncthreads();  // the sums of the previous stage are done
    next.store(shared.in);
    __syncthreads();
    if (t0 + kSteps < at.length) next.load(p, at, t0 + kSteps);
    const int stage = t0 / kSteps;
    if (stage % p.stages == 0)
      store4(checkpoints + stage / p.stages * state_size(p), h);
#pragma unroll 4
    for (int s = 0; s < kSteps; ++s) {
      float v[4];
      load4(v, &shared.in.v[s][column]);
      step(h, gates, w, shared.in.k[s][row], v, shared.in.decay[s]);
      store4(&shared.h[s][slot()], h);
    }
    __syncthreads();
    const float4 y = rows_sum(shared.h, shared.in.q);
    if (holds_sum() && t0 + summed_step() < at.length) {
      const int64_t out = (parts + at.token(p, t0 + summed_step())) * p.heads + at.head;
      *reinterpret_cast<float4*>(y_at + out * kColumns + summed_column()) = y;
    }
  }
  store4(p.final_state + at.chain * state_size(p) + at.state, h);
}

}  // namespace m2rnn
