// Backward for float32 inputs, from the last chunk to the first. The state before each stage of a
// chunk is recomputed from the chunk's checkpoint. Then, from the last stage to the first, a stage
// is recomputed with the states of all its steps, and its gradients are computed.
#pragma once

#include "common_fp32.cuh"

namespace m2rnn {

struct BackwardFp32Shared {
  Inputs in;
  float h[kSteps][kRows * kColumns];  // the state before each step
  float a[kSteps][kRows * kColumns];  // gates of `step`, then the gradient of tanh's argument
  float df[kSteps][kThreads / 32];
};

// The stage to run next; replay: forward only, for the state at its end.
struct StageJob {
  int chunk, stage;
  bool replay;

  __device__ int first_token(const Params& p) const {
    return (chunk * p.stages + stage) * kSteps;
  }
  __device__ static int stages_of(const Params& p, const Place& at, int chunk) {
    const int left = Place::ceil_div(at.length, kSteps) - chunk * p.stages;
    return left < p.stages ? left : p.stages;
  }
  __device__ void enter(const Params& p, const Place& at, int new_chunk) {
    chunk = new_chunk;
    if (chunk < 0) return;
    const int stages = stages_of(p, at, chunk);
    replay = stages > 1;
    stage = 0;
  }
  __device__ void advance(const Params& p, const Place& at) {
    if (replay) {
      ++stage;
      replay = stage < stages_of(p, at, chunk) - 1;
    } else if (stage > 0) {
      --stage;
    } else {
      enter(p, at, chunk - 1);
    }
  }
};

// Sums of x[j] (step j of four) over the four lanes of a row; lane t returns that of x[t].
__device__ inline float sum_of_own_step(const float (&x)[4]) {
  const bool odd = threadIdx.x & 1, upper_pair = threadIdx.x & 2;
  const float low = (odd ? x[1] : x[0]) + __shfl_xor_sync(0xffffffffu, odd ? x[0] : x[1], 1);
  const float high = (odd ? x[3] : x[2]) + __shfl_xor_sync(0xffffffffu, odd ? x[2] : x[3], 1);
  return (upper_pair ? high : low) + __shfl_xor_sync(0xffffffffu, upper_pair ? low : high, 2);
}

// dW += h^T a, summed over the warp's 8 rows of every step. dW's rows and columns are numbered so
// that two neighbouring columns of h or a are one operand each.
__device__ inline void add_weight_gradient(float (&dW)[2][4], const BackwardFp32Shared& shared) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp_row = threadIdx.x / 32 * 8;
  const int first = slot_of(warp_row + t, g / 2) + g % 2 * 2;
  float sum[2][4] = {};  // a tensor core truncates its sums: few terms, then a rounded addition
#pragma unroll 4
  for (int s = 0; s < kSteps; ++s) {
    const float2 h0 = *reinterpret_cast<const float2*>(&shared.h[s][first]);
    const float2 h1 = *reinterpret_cast<const float2*>(&shared.h[s][first + 64]);
    const float2 a0 = *reinterpret_cast<const float2*>(&shared.a[s][first]);
    const float2 a1 = *reinterpret_cast<const float2*>(&shared.a[s][first + 64]);
    const float h[4] = {h0.x, h0.y, h1.x, h1.y};
    const float a[2][2] = {{a0.x, a1.x}, {a0.y, a1.y}};
    float h_high[4], h_low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) h_high[i] = upper(h[i]), h_low[i] = h[i] - h_high[i];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float high[2] = {upper(a[n][0]), upper(a[n][1])};
      const float low[2] = {a[n][0] - high[0], a[n][1] - high[1]};
      mma(sum[n], h_high, high);
      mma(sum[n], h_low, high);
      mma(sum[n], h_high, low);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) dW[n][e] += sum[n][e];
}

// One stage backwards, last step first. dh: gradient of the state; h: state after the last step.
template <bool kClamp>
__device__ void backward_stage(BackwardFp32Shared& shared, const Params& p, const Place& at,
                           const Weight& transposed, int t0, float (&h)[4], float (&dh)[4]) {
  const int row = threadIdx.x / 4, place = row_place(row), column = threadIdx.x % 4 * 4;
#pragma unroll 1
  for (int s0 = kSteps - 4; s0 >= 0; s0 -= 4) {
    float dq[4], dk[4], df[4];
#pragma unroll
    for (int j = 3; j >= 0; --j) {
      const int s = s0 + j;
      const float2 decay = shared.in.decay[s];
      const float q = shared.in.q[s][place];
      float before[4], gates[4], v[4], dy[4], a[4], g[4];
      load4(before, &shared.h[s][slot()]);
      load4(gates, &shared.a[s][slot()]);
      load4(v, &shared.in.v[s][column]);
      load4(dy, &shared.in.dy[s][column]);
      dq[j] = dk[j] = df[j] = 0.f;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if constexpr (kClamp) {
          // NaN stays NaN: it compares false with either limit.
          dh[e] = dh[e] > p.clamp ? p.clamp : dh[e] < -p.clamp ? -p.clamp : dh[e];
        }
        g[e] = fmaf(q, dy[e], dh[e]);
        const Gate gate{gates[e]};
        a[e] = g[e] * (decay.y * gate.slope());
        df[j] = fmaf(g[e], before[e] - gate.z(), df[j]);
        dq[j] = fmaf(h[e], dy[e], dq[j]);
        dk[j] = fmaf(a[e], v[e], dk[j]);
        h[e] = before[e];
      }
      store4(&shared.a[s][slot()], a);
      float main[2][4], rest[2][4];
      product(main, rest, a, transposed);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int n = e / 2, i = e % 2;
        dh[e] = (main[n][i] + main[n][2 + i]) + fmaf(decay.x, g[e], rest[n][i]);
      }
    }
    const int s = s0 + threadIdx.x % 4;
    const float own_dq = sum_of_own_step(dq), own_dk = sum_of_own_step(dk);
    if (t0 + s < at.length) {
      const int64_t out = (at.token(p, t0 + s) * p.heads + at.head) * p.k_dim + at.row0 + row;
      static_cast<float*>(p.dq_parts)[out] = own_dq;
      static_cast<float*>(p.dk_parts)[out] = own_dk;
    }
    float own_df = sum_of_own_step(df);
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2)
      own_df += __shfl_xor_sync(0xffffffffu, own_df, lanes);
    if (threadIdx.x % 32 < 4) shared.df[s][threadIdx.x / 32] = own_df;
  }
}

// Partial dv and df of the stage, summed over the block's rows; call it after a barrier.
__device__ inline void write_sums(const BackwardFp32Shared& shared, const Params& p,
                                  const Place& at, int t0) {
  const int64_t parts = at.row_block * (static_cast<int64_t>(p.batch) * p.tokens);
  float4 dv = rows_sum(shared.a, shared.in.k);
  if (holds_sum() && t0 + summed_step() < at.length) {
    const int64_t out = (parts + at.token(p, t0 + summed_step())) * p.heads + at.head;
    constexpr float kScale = 1.f / kTwoLog2E;
    dv = make_float4(dv.x * kScale, dv.y * kScale, dv.z * kScale, dv.w * kScale);
    *reinterpret_cast<float4*>(static_cast<float*>(p.dv_parts) + out * kColumns +
                               summed_column()) = dv;
  }
  if (threadIdx.x < kSteps && t0 + threadIdx.x < at.length) {
    const float* df = shared.df[threadIdx.x];
    p.df_parts[(parts + at.token(p, t0 + threadIdx.x)) * p.heads + at.head] =
        (df[0] + df[1]) + (df[2] + df[3]);
  }
}

// The block's dW, summed over its warps in `free`, 1024 floats that are no longer read.
__device__ inline void write_weight_gradient(float* free, const Params& p, const Place& at,
                                             const float (&dW)[2][4]) {
  constexpr int kSize = kColumns * kColumns;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float* own = free + threadIdx.x / 32 * kSize;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float values[4] = {dW[0][2 * i], dW[1][2 * i], dW[0][2 * i + 1], dW[1][2 * i + 1]};
    store4(own + (2 * g + i) * kColumns + 4 * t, values);
  }
  __syncthreads();
  // dW_parts of a head: by chain, then by row block.
  const int64_t block = static_cast<int64_t>(at.chain) * at.row_blocks + at.row_block;
  float* out = p.dW_parts + (block * p.heads + at.head) * kSize;
  for (int i = threadIdx.x; i < kSize; i += kThreads)
    out[i] = (free[i] + free[kSize + i]) + (free[2 * kSize + i] + free[3 * kSize + i]);
}

template <bool kClamp>
__global__ void __launch_bounds__(kThreads, 3) backward_fp32(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  BackwardFp32Shared& shared = *reinterpret_cast<BackwardFp32Shared*>(memory);
  const Place at(p, kRows);
  const int row = row_place(threadIdx.x / 4), column = threadIdx.x % 4 * 4;
  Weight w, transposed;
  w.load(p.W + at.head * kColumns * kColumns, kColumns, 1, kTwoLog2E);
  transposed.load(p.W + at.head * kColumns * kColumns, 1, kColumns, 1.f);
  float dh[4] = {}, dW[2][4] = {}, h[4], gates[4];
  float starts[kMaxStages][4];  // the state before each stage of the chunk
  if (p.d_final) load4(dh, p.d_final + at.chain * state_size(p) + at.state);

  const float* checkpoint =
      static_cast<const float*>(p.checkpoints) + at.first_chunk * state_size(p) + at.state;
  Stage next;
  StageJob job{};
  job.enter(p, at, Place::ceil_div(at.length, kSteps * p.stages) - 1);
  if (job.chunk >= 0) {
    next.load(p, at, job.first_token(p));
    load4(starts[0], checkpoint + job.chunk * state_size(p));
  }
  while (job.chunk >= 0) {
    __syncthreads();  // the sums of the previous stage are done
    next.store(shared.in);
    __syncthreads();
    const StageJob now = job;
    job.advance(p, at);
    if (job.chunk >= 0) next.load(p, at, job.first_token(p));
#pragma unroll
    for (int stage = 0; stage < kMaxStages; ++stage)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (now.stage == stage) h[e] = starts[stage][e];
    if (job.chunk >= 0 && job.chunk != now.chunk)
      load4(starts[0], checkpoint + job.chunk * state_size(p));
#pragma unroll 4
    for (int s = 0; s < kSteps; ++s) {
      float v[4];
      load4(v, &shared.in.v[s][column]);
      if (!now.replay) store4(&shared.h[s][slot()], h);
      step(h, gates, w, shared.in.k[s][row], v, shared.in.decay[s]);
      if (!now.replay) store4(&shared.a[s][slot()], gates);
    }
    if (now.replay) {
#pragma unroll
      for (int stage = 1; stage < kMaxStages; ++stage)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (now.stage + 1 == stage) starts[stage][e] = h[e];
      continue;
    }
    const int t0 = now.first_token(p);
    backward_stage<kClamp>(shared, p, at, transposed, t0, h, dh);
    __syncthreads();
    add_weight_gradient(dW, shared);
    write_sums(shared, p, at, t0);
  }
  store4(p.d_initial + at.chain * state_size(p) + at.state, dh);
  __syncthreads();
  write_weight_gradient(shared.h[0], p, at, dW);
}

}  // namespace m2rnn
