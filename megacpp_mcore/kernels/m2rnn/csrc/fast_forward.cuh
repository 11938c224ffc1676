// Forward for 16-bit inputs and K = 64: a block has a whole head, so y is whole, too. Four warps run
// the recurrence, eight steps between two barriers; four more read the inputs ahead of them and sum
// y behind them.
#pragma once

#include "fast.cuh"

namespace m2rnn {

template <typename T>
struct FastForwardShared {
  FastInputs<T> in[2];
  uint4 h[2][kHalf][kThreads];  // packed, behind each step
};

template <typename T>
__device__ void forward_recurrence(FastForwardShared<T>& shared, const Problem& p,
                                   const Place& at) {
  const int64_t state = static_cast<int64_t>(at.head) * kTileFloats + fast_state_offset();
  const FastWeight w(p.W + at.head * kColumns * kColumns);
  const int row = own_row(), column = own_column();
  Tile h = {}, z;
  if (p.initial) load_state(h, p.initial + at.chain * state_size(p) + state);
  uint32_t packed[4];
  pack_tile<__half>(packed, h);
  __syncthreads();
  const int halves = Place::ceil_div(at.length, kHalf), halves_a_chunk = 2 * p.stages;
  for (int half = 0; half < halves; ++half) {
    const FastInputs<T>& in = shared.in[half / 2 % 2];
    if (half % halves_a_chunk == 0)
      store_state(p.checkpoints + (at.first_chunk + half / halves_a_chunk) * state_size(p) + state,
                  h);
    const int s0 = half % 2 * kHalf;
    Given given;
    float2 decay[kHalf];
    given.load(in, s0, row, column);
    load_decay(decay, &in.decay[s0]);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const Given now = given;
      if (i + 1 < kHalf) given.load(in, s0 + i + 1, row, column);
      fast_step(h, z, packed, w, now, decay[i]);
      shared.h[half % 2][i][threadIdx.x] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
    __syncthreads();
  }
  store_state(p.final_state + at.chain * state_size(p) + state, h);
}

// y of a half's steps: 16 threads a step, each four columns of one warp's rows.
template <typename T>
__device__ void write_y(const uint4 (*h)[kThreads], const float (*q)[kFastRows], const Problem& p,
                        const Place& at, int t0) {
  const int i = threadIdx.x % kThreads / 16, warp = threadIdx.x / 4 % 4, quad = threadIdx.x % 4;
  float y[4] = {};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int g = j ^ (warp & 1);  // two warps' rows at once: the one's even, the other's odd
    const uint4 rows = h[i][warp * 32 + g * 4 + quad];
    const float2 weight = *reinterpret_cast<const float2*>(&q[i][warp * 16 + 2 * g]);
    const float4 low = widen(make_uint2(rows.x, rows.z), static_cast<const __half*>(nullptr));
    const float4 high = widen(make_uint2(rows.y, rows.w), static_cast<const __half*>(nullptr));
    y[0] = fmaf(weight.x, low.x, fmaf(weight.y, high.x, y[0]));
    y[1] = fmaf(weight.x, low.y, fmaf(weight.y, high.y, y[1]));
    y[2] = fmaf(weight.x, low.z, fmaf(weight.y, high.z, y[2]));
    y[3] = fmaf(weight.x, low.w, fmaf(weight.y, high.w, y[3]));
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    y[e] += __shfl_xor_sync(0xffffffffu, y[e], 4);
    y[e] += __shfl_xor_sync(0xffffffffu, y[e], 8);
  }
  if (warp == 0 && t0 + i < at.length) {
    const int64_t out = (at.token(p, t0 + i) * p.heads + at.head) * kColumns + 4 * quad;
    *reinterpret_cast<uint2*>(static_cast<T*>(p.y) + out) =
        make_uint2(pack<T>(y[0], y[1]), pack<T>(y[2], y[3]));
  }
}

template <typename T>
__device__ void forward_surroundings(FastForwardShared<T>& shared, const Problem& p,
                                     const Place& at) {
  FastStage<T> next;
  next.load(p, at, 0);
  next.store(shared.in[0]);
  next.load(p, at, kSteps);
  __syncthreads();
  const int halves = Place::ceil_div(at.length, kHalf);
  for (int half = 0; half <= halves; ++half) {
    if (half % 2 == 1) {
      // The inputs there were last read, for y, before the last barrier.
      next.store(shared.in[(half / 2 + 1) % 2]);
      next.load(p, at, (half / 2 + 2) * kSteps);
    }
    if (half > 0) {
      const int behind = half - 1;
      write_y<T>(shared.h[behind % 2], &shared.in[behind / 2 % 2].q[behind % 2 * kHalf], p, at,
                 behind * kHalf);
    }
    if (half < halves) __syncthreads();
  }
}

template <typename T>
__global__ void __launch_bounds__(2 * kThreads, 2) fast_forward(const __grid_constant__ Problem p) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<FastForwardShared<T>*>(memory);
  const Place at(p, kFastRows);
  if (threadIdx.x < kThreads)
    forward_recurrence(shared, p, at);
  else
    forward_surroundings(shared, p, at);
}

}  // namespace m2rnn
