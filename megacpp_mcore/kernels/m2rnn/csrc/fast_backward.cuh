// Backward for 16-bit inputs and K = 64. As backward.cuh, but a stage is undone in halves of eight
// steps, so that two blocks' states fit into a multiprocessor's shared memory. dq and dk of eight
// steps are one tensor core tile each: a step's dy, or v, is the tile's column of that step, and
// zeros are the others.
#pragma once

#include "backward.cuh"
#include "fast.cuh"

namespace m2rnn {

template <typename T>
struct FastBackwardShared {
  FastInputs<T> in;
  alignas(16) float starts[2 * kMaxStages][kTileFloats];  // the state before each half of a chunk
  alignas(16) float h[kHalf][kTileFloats];                // the state before each step
  alignas(16) float a[kHalf][kTileFloats];  // z, then the gradient of tanh's argument, rows first
  float df[kHalf][kThreads / 32];
};

// W^T as the right operand of a W^T, to 11 bits.
struct FastTransposed {
  float b[2][2][2];

  __device__ explicit FastTransposed(const float* W) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          b[j][n][i] = rounded(W[column_of(n, g) * kColumns + 4 * t + 2 * j + i]);
  }
};

// Eight steps forward. kKeep: with their states and candidates left in shared memory.
template <bool kKeep, typename T>
__device__ void run_half(FastBackwardShared<T>& shared, const FastWeight& w, int half, Tile& h) {
  const int row = own_row(), column = own_column();
  Given given;
  float2 decay[kHalf];
  uint32_t packed[4];
  given.load(shared.in, half * kHalf, row, column);
  load_decay(decay, &shared.in.decay[half * kHalf]);
  pack_tile<__half>(packed, h);
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const Given now = given;
    Tile z;
    if (i + 1 < kHalf) given.load(shared.in, half * kHalf + i + 1, row, column);
    if constexpr (kKeep)
      for (int n = 0; n < 2; ++n) store4(&shared.h[i][own_slot(n)], h[n]);
    fast_step(h, z, packed, w, now, decay[i]);
    if constexpr (kKeep)
      for (int n = 0; n < 2; ++n) store4(&shared.a[i][own_slot(n)], z[n]);
  }
}

// What a thread carries backwards.
struct Carried {
  Tile dh;
  float dW[2][4];
};

// What a step backwards takes from shared memory, read one step ahead.
struct Made {
  Tile before, z;  // the state before the step, and its candidate
  float dy[4];
  float own_v[4];  // v and dy of the step in its own column of dk's and dq's right operand, else 0
  uint2 own_dy;
  float2 q, decay;

  template <typename T>
  __device__ void load(const FastBackwardShared<T>& shared, int half, int i) {
    const int g = threadIdx.x % 32 / 4, column = own_column(), s = half * kHalf + i;
    decay = shared.in.decay[s];
    decay.y *= kUncut;  // all of a
    q = *reinterpret_cast<const float2*>(&shared.in.q[s][own_row()]);
    load4(dy, &shared.in.dy[s][column]);
    load4(own_v, g == i ? &shared.in.v[s][column] : shared.in.zeros);
    own_dy = *reinterpret_cast<const uint2*>(
        g == i ? reinterpret_cast<const char*>(&shared.in.raw_dy[s][column])
               : reinterpret_cast<const char*>(shared.in.zeros));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      load4(before[n], &shared.h[i][own_slot(n)]);
      load4(z[n], &shared.a[i][own_slot(n)]);
    }
  }
};

// Step i of a half backwards; `after` is the packed state behind it, and then the one before it.
// Returns the thread's share of df.
template <typename T, bool kClamp>
__device__ float undo_step(FastBackwardShared<T>& shared, const Problem& p,
                           const FastTransposed& w, int half, int i, Made& made, Tile& dh,
                           uint32_t (&after)[4], float (&dq)[4], float (&dk)[4]) {
  float df = 0.f;
  Tile a, passed;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float x = dh[n][e];
      // A NaN stays one: it compares false with either limit.
      if constexpr (kClamp) x = x > p.clamp ? p.clamp : x < -p.clamp ? -p.clamp : x;
      const float z = made.z[n][e];
      const float gradient = fmaf(e < 2 ? made.q.x : made.q.y, made.dy[2 * n + e % 2], x);
      a[n][e % 2 * 2 + e / 2] = gradient * (made.decay.y * fmaf(-z, z, 1.f));
      passed[n][e] = made.decay.x * gradient;
      df = fmaf(gradient, made.before[n][e] - z, df);
    }
  mma16<T>(dq, after, {made.own_dy.x, made.own_dy.y});
  pack_tile<T>(after, made.before);
  const float own_v[4] = {made.own_v[0], made.own_v[1], made.own_v[2], made.own_v[3]};
  if (i > 0) made.load(shared, half, i - 1);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int n = 0; n < 2; ++n) mma(passed[n], a[j], w.b[j][n]);
    mma(dk, a[j], {own_v[2 * j], own_v[2 * j + 1]});
    store4(&shared.a[i][own_slot(j)], a[j]);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) dh[n][e] = passed[n][e];
  return df;
}

// dW += h^T a over the warp's rows: a sum's index is a row, g with g + 8 beside it.
template <typename T>
__device__ void fast_weight_gradient(float (&dW)[2][4], const FastBackwardShared<T>& shared) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32;
  // Four chains, since each sum waits for the one before. A tensor core cuts its sums, too: few
  // terms each, then additions that round.
  float sum[4][2][4] = {};
#pragma unroll
  for (int i = 0; i < kHalf; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int slot = fast_slot(warp, t + 4 * j, g / 2, g % 2);
      float h[4], a[4];
      load4(h, &shared.h[i][slot]);
      load4(a, &shared.a[i][slot]);
      float(&chain)[2][4] = sum[i % 2 * 2 + j];
      mma(chain[0], h, {a[0], a[1]});
      mma(chain[1], h, {a[2], a[3]});
    }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      dW[n][e] += (sum[0][n][e] + sum[1][n][e]) + (sum[2][n][e] + sum[3][n][e]);
}

// dq, dk of the half's steps 2 t, 2 t + 1 and rows g, g + 8.
__device__ inline void write_key_gradients(const Problem& p, const Place& at, int t0,
                                           const float (&dq)[4], const float (&dk)[4]) {
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = t0 + threadIdx.x % 4 * 2 + i;
    if (t >= at.length) continue;
    const int64_t out = (at.token(p, t) * p.heads + at.head) * kFastRows + row;
    p.dq_parts[out] = dq[i];
    p.dq_parts[out + 8] = dq[2 + i];
    p.dk_parts[out] = dk[i];
    p.dk_parts[out + 8] = dk[2 + i];
  }
}

// dv and df of the half's steps, after a barrier. Of dv, 16 threads have a step: two columns of every
// second pair of warps' rows each.
template <typename T>
__device__ void write_half(const FastBackwardShared<T>& shared, const Problem& p, const Place& at,
                           int half, int t0) {
  const int i = threadIdx.x / 16, pair = threadIdx.x % 8, first = threadIdx.x / 8 % 2 * 2;
  float2 dv = {};
#pragma unroll
  for (int warp = first; warp < first + 2; ++warp) {
#pragma unroll
    for (int g = 0; g < 8; ++g) {
      const float2 k = *reinterpret_cast<const float2*>(
          &shared.in.k[half * kHalf + i][warp * 16 + 2 * g]);
      float a[4];
      load4(a, &shared.a[i][fast_slot(warp, g, pair / 2, pair % 2)]);
      dv.x = fmaf(k.x, a[0], fmaf(k.y, a[1], dv.x));
      dv.y = fmaf(k.x, a[2], fmaf(k.y, a[3], dv.y));
    }
  }
  dv.x = (dv.x + __shfl_xor_sync(0xffffffffu, dv.x, 8)) * (1.f / kUncut);
  dv.y = (dv.y + __shfl_xor_sync(0xffffffffu, dv.y, 8)) * (1.f / kUncut);
  if (first == 0 && t0 + i < at.length)
    store_pair<T>(p.dv, (at.token(p, t0 + i) * p.heads + at.head) * kColumns + 2 * pair, dv);
  if (threadIdx.x < kHalf && t0 + threadIdx.x < at.length) {
    const float* df = shared.df[threadIdx.x];
    p.df[at.token(p, t0 + threadIdx.x) * p.heads + at.head] = (df[0] + df[1]) + (df[2] + df[3]);
  }
}

// Eight steps backwards, after run_half<true>; h: the state behind them. t0: their first token.
template <typename T, bool kClamp>
__device__ void undo_half(FastBackwardShared<T>& shared, const Problem& p, const Place& at,
                          const FastTransposed& w, int half, int t0, const Tile& h,
                          Carried& carried) {
  uint32_t after[4];
  pack_tile<T>(after, h);
  float dq[4] = {}, dk[4] = {};
  Made made;
  made.load(shared, half, kHalf - 1);
#pragma unroll
  for (int i0 = kHalf - 4; i0 >= 0; i0 -= 4) {
    float df[4];
#pragma unroll
    for (int i = 3; i >= 0; --i)
      df[i] = undo_step<T, kClamp>(shared, p, w, half, i0 + i, made, carried.dh, after, dq, dk);
    float own = sum_of_own_step(df);
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) own += __shfl_xor_sync(0xffffffffu, own, lanes);
    if (threadIdx.x % 32 < 4) shared.df[i0 + threadIdx.x % 4][threadIdx.x / 32] = own;
  }
  write_key_gradients(p, at, t0, dq, dk);
  __syncthreads();
  fast_weight_gradient(carried.dW, shared);
  write_half(shared, p, at, half, t0);
}

template <typename T, bool kClamp>
__global__ void __launch_bounds__(kThreads, 2) fast_backward(const __grid_constant__ Problem p) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<FastBackwardShared<T>*>(memory);
  const Place at(p, kFastRows);
  const int64_t state = static_cast<int64_t>(at.head) * kTileFloats + fast_state_offset();
  const FastWeight w(p.W + at.head * kColumns * kColumns);
  const FastTransposed transposed(p.W + at.head * kColumns * kColumns);
  Carried carried = {};
  Tile h, checkpoint;
  if (p.d_final) load_state(carried.dh, p.d_final + at.chain * state_size(p) + state);
  const auto start = [&](int half) -> float* { return &shared.starts[half][threadIdx.x * 4]; };
  const auto keep = [&](int half) {
    store4(start(half), h[0]);
    store4(start(half) + kThreads * 4, h[1]);
  };
  const auto resume = [&](int half) {
    load4(h[0], start(half));
    load4(h[1], start(half) + kThreads * 4);
  };

  const float* checkpoints = p.checkpoints + at.first_chunk * state_size(p) + state;
  FastStage<T> next;
  Job job{};
  job.enter(p, at, Place::ceil_div(at.length, kSteps * p.stages) - 1);
  int entered = -1;
  if (job.chunk >= 0) {
    next.load(p, at, job.first_token(p));
    load_state(checkpoint, checkpoints + job.chunk * state_size(p));
  }
  while (job.chunk >= 0) {
    __syncthreads();  // the sums of the job before are made
    next.store(shared.in);
    __syncthreads();
    const Job now = job;
    job.advance(p, at);
    if (job.chunk >= 0) next.load(p, at, job.first_token(p));
    if (now.chunk != entered) {
      entered = now.chunk;
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) h[n][e] = checkpoint[n][e];
      keep(0);
      if (entered > 0) load_state(checkpoint, checkpoints + (entered - 1) * state_size(p));
    }
    const int first = 2 * now.stage;
    if (now.replay || now.stage == Job::stages_of(p, at, now.chunk) - 1) {
      // Forward order: h is the state before the stage.
      run_half<false>(shared, w, 0, h);
      keep(first + 1);
    }
    if (now.replay) {
      run_half<false>(shared, w, 1, h);
      keep(first + 2);
      continue;
    }
#pragma unroll 1
    for (int half = 1; half >= 0; --half) {
      resume(first + half);
      run_half<true>(shared, w, half, h);
      undo_half<T, kClamp>(shared, p, at, transposed, half, now.first_token(p) + half * kHalf, h,
                           carried);
      if (half == 1) __syncthreads();  // the sums are made
    }
  }
  store_state(p.d_initial + at.chain * state_size(p) + state, carried.dh);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) carried.dW[n][e] *= kUncut;  // for h
  __syncthreads();
  write_weight_gradient(shared.h[0], p, at, carried.dW);
}

}  // namespace m2rnn
