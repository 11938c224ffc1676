// Forward for 16-bit inputs: a warp has eight rows of a chain from its first step to its last, a
// block 64 (or 32), and nothing is exchanged but, once in eight steps, the warps' parts of y.
//
// The state is kept transposed, h^T: thread 4 g + t has columns g, g + 8 of rows 2 t, 2 t + 1. That
// is how m16n8k16 returns W^T h^T, and the left operand of y^T += h^T q. As the right operand of
// the next step's product it goes, in fp16, through two `movmatrix`. A unit's inputs, eight steps
// of them, are read one unit ahead; of k or q one step's, and zeros for the others, are the right
// operand of v^T k and h^T q.
#pragma once

#include "fast.cuh"

namespace m2rnn {

constexpr int kStripRows = 8;  // of a warp
constexpr int kUnitValues = kUnit * kColumns;

// Parts of y of a unit: warp by warp, [column][step].
template <int kWarps>
struct FastForwardShared {
  float y[2][kWarps][kUnitValues];
};

// A unit's inputs as thread 4 g + t reads them: step g; rows 2 t, 2 t + 1; columns 2 t, 2 t + 1 and,
// 8 on, two more. Steps behind the chain's last have f = 1 and zeros: they leave the state as it is.
template <typename T>
struct ForwardStage {
  const T *q_at, *k_at, *v_at;
  const float* f_at;
  int left;  // steps of the chain from the next unit on
  uint32_t q, k, v[2];
  float f;

  __device__ ForwardStage(const Problem& p, const Place& at, int row) : left(at.length) {
    const int g = lane_g(), t = lane_t();
    const Source<T> of_q = q_of<T>(p, at), of_k = k_of<T>(p, at), of_v = v_of<T>(p, at);
    q_at = of_q.x + g * of_q.token + row + 2 * t;
    k_at = of_k.x + g * of_k.token + row + 2 * t;
    v_at = of_v.x + g * of_v.token + 2 * t;
    f_at = p.f + at.batch * p.f_batch + (at.start + g) * p.f_token + at.head * p.f_head;
  }
  __device__ void load(const Problem& p) {
    const bool valid = lane_g() < left;
    q = valid ? load_here(q_at) : 0;
    k = valid ? load_here(k_at) : 0;
    v[0] = valid ? load_here(v_at) : 0;
    v[1] = valid ? load_here(v_at + 8) : 0;
    f = valid ? __uint_as_float(load_here(f_at)) : 1.f;
    q_at += kUnit * p.q_token, k_at += kUnit * p.k_token, v_at += kUnit * p.v_token;
    f_at += kUnit * p.f_token;
    left -= kUnit;
  }
};

// q: a right operand, columns are steps. k: one too, rows are steps, and v, the left one, has its
// columns for steps: thread 4 g + t has steps 2 t, 2 t + 1.
struct ForwardUnit {
  uint32_t q, k, v[2];
  float f;

  template <typename T>
  __device__ void take(const ForwardStage<T>& from) {
    q = from.q, f = from.f;
    k = transposed(from.k);
    v[0] = transposed(from.v[0]), v[1] = transposed(from.v[1]);
  }
};

// W^T as the left operand: off the diagonal in fp16, the diagonal apart in fp32.
struct ForwardWeight {
  uint32_t a[4];
  float diagonal[2];  // of columns g, g + 8

  __device__ explicit ForwardWeight(const float* W) {
    const int g = lane_g(), t = lane_t();
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int to = g + e % 2 * 8, from = 2 * t + e / 2 * 8;
      a[e] = pack<__half>(from == to ? 0.f : W[from * kColumns + to],
                          from + 1 == to ? 0.f : W[(from + 1) * kColumns + to]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) diagonal[r] = W[(g + 8 * r) * (kColumns + 1)];
  }
};

// What goes from step to step; element 2 r + i is column g + 8 r of row 2 t + i.
template <typename T, bool kExact>
struct ForwardState {
  float h[4], y[4];
  float given[4];      // k v^T of the next step
  uint32_t packed[2];  // h in fp16, as it lies in h

  __device__ void pack_h() {
#pragma unroll
    for (int r = 0; r < 2; ++r) packed[r] = pack<__half>(h[2 * r], h[2 * r + 1]);
  }
  // k v^T of a step of `unit`. mask: the step's bits in the thread's two of them.
  __device__ void give(const ForwardUnit& unit, uint32_t mask) {
#pragma unroll
    for (int e = 0; e < 4; ++e) given[e] = 0.f;
    mma8<T>(given, unit.v[0], unit.v[1], unit.k & mask);
  }
  // y of the step that h is of. q: zeros in lanes of other steps.
  __device__ void add_y(uint32_t q) {
    mma8<T>(y, pack<T>(h[0], h[1]), pack<T>(h[2], h[3]), q);
  }
  // One step. q: of the step before. unit, mask: of the next.
  __device__ void step(const ForwardWeight& w, float f, uint32_t q, const ForwardUnit& unit,
                       uint32_t mask) {
    float z[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) z[e] = fmaf(h[e], w.diagonal[e / 2], given[e]);
    mma16<__half>(z, w.a, transposed(packed[0]), transposed(packed[1]));
    give(unit, mask);
    add_y(q);
    tanh_of<kExact>(z);
#pragma unroll
    for (int e = 0; e < 4; ++e) h[e] = fmaf(1.f - f, z[e], f * h[e]);
    pack_h();
  }
  __device__ void put_y(float* to) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      *reinterpret_cast<float2*>(to + r * (kUnitValues / 2)) = make_float2(y[2 * r], y[2 * r + 1]);
      y[2 * r] = y[2 * r + 1] = 0.f;
    }
  }
  __device__ void load(const float* state) {
#pragma unroll
    for (int e = 0; e < 4; ++e) h[e] = state[e % 2 * kColumns + e / 2 * 8];
  }
  template <typename State>
  __device__ void store(State* state) const {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      state[e % 2 * kColumns + e / 2 * 8] = static_cast<State>(h[e]);
  }
};

// Adds up the warps' parts of y and stores it: a unit the first four warps, the next unit the last
// four. A thread has one column of one step.
template <typename T, int kWarps>
struct ForwardSum {
  int place, left;  // left: of the chain, from the thread's step of the next unit on
  T* y;
  float* parts;

  __device__ ForwardSum(const Problem& p, const Place& at) {
    const int step = threadIdx.x % kUnitValues / kColumns, column = threadIdx.x % kColumns;
    place = column * kUnit + step;
    left = at.length - step;
    const int64_t to = (at.token(p, step) * p.heads + at.head) * kColumns + column;
    y = static_cast<T*>(p.y) + to;
    parts = p.y_parts ? p.y_parts + to + at.group * (static_cast<int64_t>(p.batch) * p.tokens) *
                                            p.heads * kColumns
                      : nullptr;
  }
  __device__ void store(const Problem& p, const float (&from)[kWarps][kUnitValues], int unit) {
    if (kWarps == 4 || threadIdx.x / kUnitValues == unit % 2) {
      float sum = from[0][place];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) sum += from[w][place];
      if (left > 0 && parts) *parts = sum;
      if (left > 0 && !parts) *y = static_cast<T>(sum);
    }
    const int64_t unit_of_y = static_cast<int64_t>(p.heads) * kColumns * kUnit;
    y += unit_of_y, parts += parts ? unit_of_y : 0;
    left -= kUnit;
  }
};

template <typename T, bool kExact, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 16 / kWarps)
fast_forward(const __grid_constant__ Problem p) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<FastForwardShared<kWarps>*>(memory);
  const int warp = threadIdx.x / 32, g = lane_g(), t = lane_t();
  const Place at(p, kWarps * kStripRows);
  const int64_t state =
      (static_cast<int64_t>(at.head) * p.k_dim + at.row0 + warp * kStripRows + 2 * t) * kColumns + g;
  const ForwardWeight w(p.W + at.head * kColumns * kColumns);
  ForwardSum<T, kWarps> sum(p, at);
  auto* checkpoint =
      static_cast<__half*>(p.checkpoints) + at.first_chunk * state_size(p) + state;
  float* part = shared.y[0][warp] + g * kUnit + 2 * t;
  int flip = kWarps * kUnitValues, in_chunk = 0;
  const int units = Place::ceil_div(at.length, kUnit), units_a_chunk = 2 * p.stages;

  ForwardState<T, kExact> x = {};
  if (p.initial) x.load(p.initial + at.chain * state_size(p) + state);
  x.pack_h();
  ForwardStage<T> next(p, at, warp * kStripRows);
  next.load(p);
  ForwardUnit now;
  now.take(next);
  const uint32_t low = 0xffffu, high = 0xffff0000u;
  x.give(now, t == 0 ? low : 0);
  uint32_t q = 0;  // of the unit whose y is being made, which is one step behind h
  for (int unit = 0; unit < units; ++unit) {
    next.load(p);
    if (in_chunk == 0) {
      x.store(checkpoint);
      checkpoint += state_size(p);
    }
    if (++in_chunk == units_a_chunk) in_chunk = 0;
    x.step(w, __shfl_sync(kAll, now.f, 0), g == kUnit - 1 ? q : 0, now, t == 0 ? high : 0);
    x.put_y(part);
    part += flip, flip = -flip;
    q = now.q;
#pragma unroll
    for (int i = 1; i < kUnit - 1; i += 2) {
      const bool own = t == (i + 1) / 2;
      x.step(w, __shfl_sync(kAll, now.f, 4 * i), g == i - 1 ? q : 0, now, own ? low : 0);
      x.step(w, __shfl_sync(kAll, now.f, 4 * i + 4), g == i ? q : 0, now, own ? high : 0);
    }
    const float f = __shfl_sync(kAll, now.f, 4 * (kUnit - 1));
    now.take(next);
    x.step(w, f, g == kUnit - 2 ? q : 0, now, t == 0 ? low : 0);
    __syncthreads();
    if (unit > 0) sum.store(p, shared.y[unit % 2], unit);
  }
  if (units > 0) {
    x.add_y(g == kUnit - 1 ? q : 0);
    x.put_y(part);
    __syncthreads();
    sum.store(p, shared.y[units % 2], units);
  }
  x.store(p.final_state + at.chain * state_size(p) + state);
}

}  // namespace m2rnn
