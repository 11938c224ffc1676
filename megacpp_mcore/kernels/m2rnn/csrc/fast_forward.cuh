// Forward for 16-bit inputs: a warp has eight rows of a chain from its first step to its last, a
// block 64 (or 32) of them, and four more warps that read the inputs ahead and add up y behind, 32
// steps between two barriers.
//
// The state is kept transposed, h^T: thread 4 g + t has columns g, g + 8 of rows 2 t, 2 t + 1. That
// is how m16n8k16 returns W^T h^T, and the left operand of y^T += h^T q. As the right operand of
// the next step's product it goes, in fp16, through two `movmatrix`. Of k and q of eight steps (a
// unit) one step's, and zeros for the others, are the right operands of v^T k and h^T q.
#pragma once

#include "fast.cuh"

namespace m2rnn {

constexpr int kStripRows = 8;  // of a warp
constexpr int kGroupUnits = 4, kGroup = kGroupUnits * kUnit;  // steps between two barriers
constexpr int kUnitValues = kUnit * kColumns;
constexpr int kHelpers = kUnitValues;  // threads

// A unit. Rows and columns in pairs, padded so that eight steps of four pairs meet every bank once.
template <int kWarps>
struct ForwardInputs {
  float2 decay[kUnit];  // f, 1 - f
  uint32_t q[kUnit][kWarps * 4 + 4], k[kUnit][kWarps * 4 + 4], v[kUnit][kColumns / 2 + 4];
};
// y: warp by warp, [column][step] of a unit.
template <int kWarps>
struct FastForwardShared {
  alignas(16) ForwardInputs<kWarps> in[2][kGroupUnits];
  float y[2][kGroupUnits][kWarps][kUnitValues];
};

// All ones in the lanes of one g or t, else zeros. The compiler would make them again at each use,
// were they not shuffled.
struct LaneMasks {
  uint32_t g[kUnit], t[4];

  __device__ LaneMasks() {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) g[i] = kept(lane_g() == i);
#pragma unroll
    for (int i = 0; i < 4; ++i) t[i] = kept(lane_t() == i);
  }
  __device__ static uint32_t kept(bool own) {
    const float bits = __uint_as_float(own ? ~0u : 0u);
    return __float_as_uint(__shfl_sync(kAll, bits, static_cast<int>(threadIdx.x % 32)));
  }
  // Of the step's half of a pair of steps.
  __device__ uint32_t step(int i) const { return t[i / 2] & (i % 2 ? 0xffff0000u : 0xffffu); }
};

// A unit's inputs as a warp's operands. q: a right one, columns are steps. k: another, rows are
// steps, and v, the left one, has its columns for steps: thread 4 g + t has steps 2 t, 2 t + 1.
struct ForwardUnit {
  uint32_t q, k, v[2];

  template <int kWarps>
  __device__ void take(const ForwardInputs<kWarps>& in) {
    const int g = lane_g(), t = lane_t(), row = threadIdx.x / 32 * 4 + t;
    q = in.q[g][row];
    k = transposed(in.k[g][row]);
    v[0] = transposed(in.v[g][t]), v[1] = transposed(in.v[g][t + 4]);
  }
};

// W^T as the left operand: off the diagonal in two fp16 parts, the diagonal apart in fp32. (What W
// is off by is off the same way at every step, so that it adds up.)
struct ForwardWeight {
  uint32_t high[4], low[4];
  float diagonal[2];  // of columns g, g + 8

  __device__ explicit ForwardWeight(const float* W) {
    const int g = lane_g(), t = lane_t();
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int to = g + e % 2 * 8, from = 2 * t + e / 2 * 8;
      const float x = from == to ? 0.f : W[from * kColumns + to];
      const float y = from + 1 == to ? 0.f : W[(from + 1) * kColumns + to];
      high[e] = pack<__half>(x, y);
      const float2 rounded = __half22float2(*reinterpret_cast<const __half2*>(&high[e]));
      low[e] = pack<__half>(x - rounded.x, y - rounded.y);
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
  __device__ void step(const ForwardWeight& w, float2 decay, uint32_t q, const ForwardUnit& unit,
                       uint32_t mask) {
    float z[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) z[e] = fmaf(h[e], w.diagonal[e / 2], given[e]);
    const uint32_t h0 = transposed(packed[0]), h1 = transposed(packed[1]);
    mma16<__half>(z, w.low, h0, h1);
    mma16<__half>(z, w.high, h0, h1);
    give(unit, mask);
    add_y(q);
    tanh_of<kExact>(z);
#pragma unroll
    for (int e = 0; e < 4; ++e) h[e] = fmaf(decay.y, z[e], decay.x * h[e]);
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
    for (int e = 0; e < 4; ++e) state[e % 2 * kColumns + e / 2 * 8] = static_cast<State>(h[e]);
  }
};

template <typename T, bool kExact, int kWarps>
__device__ void forward_recurrence(FastForwardShared<kWarps>& shared, const Problem& p,
                                   const Place& at) {
  const int warp = threadIdx.x / 32, g = lane_g(), t = lane_t();
  const int row = at.row0 + warp * kStripRows + 2 * t;
  const int64_t state = (static_cast<int64_t>(at.head) * p.k_dim + row) * kColumns + g;
  const ForwardWeight w(p.W + at.head * kColumns * kColumns);
  const LaneMasks masks;
  const int units = Place::ceil_div(at.length, kUnit), units_a_chunk = 2 * p.stages;
  auto* checkpoint = static_cast<__half*>(p.checkpoints) + at.first_chunk * state_size(p) + state;
  ForwardState<T, kExact> x = {};
  if (p.initial) x.load(p.initial + at.chain * state_size(p) + state);
  x.pack_h();
  const ForwardInputs<kWarps>* in = shared.in[0];
  float* y = shared.y[0][0][warp] + g * kUnit + 2 * t;
  int in_chunk = 0, group = 1;
  ForwardUnit now;
  uint32_t q = 0;  // of the unit whose y is being made, which is one step behind h
  __syncthreads();
  now.take(*in);
  x.give(now, masks.step(0));
  for (int unit = 0; unit < units; unit += kGroupUnits, group = -group) {
#pragma unroll 1
    for (int u = unit; u < unit + kGroupUnits; ++u) {
      if (in_chunk == 0 && u < units) {
        x.store(checkpoint);
        checkpoint += state_size(p);
      }
      if (++in_chunk == units_a_chunk) in_chunk = 0;
      const float2* decay = in->decay;
      x.step(w, decay[0], q & masks.g[kUnit - 1], now, masks.step(1));
      x.put_y(y);
      q = now.q;
#pragma unroll
      for (int i = 1; i < kUnit - 1; ++i)
        x.step(w, decay[i], q & masks.g[i - 1], now, masks.step(i + 1));
      now.take(in[u + 1 < unit + kGroupUnits]);  // the next group is taken behind the barrier
      x.step(w, decay[kUnit - 1], q & masks.g[kUnit - 2], now, masks.step(0));
      ++in, y += kWarps * kUnitValues;
    }
    if (group < 0) in -= 2 * kGroupUnits, y -= 2 * kGroupUnits * kWarps * kUnitValues;
    __syncthreads();
    now.take(*in);
    x.give(now, masks.step(0));
  }
  x.add_y(q & masks.g[kUnit - 1]);
  x.put_y(y);
  __syncthreads();
  x.store(p.final_state + at.chain * state_size(p) + state);
}

// A helper's part of a group's inputs: four rows of every kEvery-th step, four columns of one, f of
// one. Steps behind the chain's last have f = 1 and zeros: they leave the state as it is.
template <typename T, int kWarps>
struct ForwardStage {
  static constexpr int kEvery = kHelpers / (kWarps * 2), kCount = kGroup / kEvery;
  const T *q_at, *k_at, *v_at;
  const float* f_at;
  int step, quad, v_step, left;  // left: of the chain, from the next group on
  uint2 q[kCount], k[kCount], v;
  float f;

  __device__ ForwardStage(const Problem& p, const Place& at, int thread)
      : step(thread / (kWarps * 2)), quad(thread % (kWarps * 2)), v_step(thread / 4),
        left(at.length) {
    const Source<T> of_q = q_of<T>(p, at), of_k = k_of<T>(p, at), of_v = v_of<T>(p, at);
    q_at = of_q.x + step * of_q.token + quad * 4;
    k_at = of_k.x + step * of_k.token + quad * 4;
    v_at = of_v.x + v_step * of_v.token + thread % 4 * 4;
    f_at = p.f + at.batch * p.f_batch + (at.start + thread % kGroup) * p.f_token +
           at.head * p.f_head;
  }
  __device__ void load(const Problem& p, int thread) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const bool valid = step + j * kEvery < left;
      q[j] = load_unit(q_at + j * kEvery * p.q_token, valid);
      k[j] = load_unit(k_at + j * kEvery * p.k_token, valid);
    }
    v = load_unit(v_at, v_step < left);
    f = thread < kGroup && thread < left ? __ldg(f_at) : 1.f;
    q_at += kGroup * p.q_token, k_at += kGroup * p.k_token, v_at += kGroup * p.v_token;
    f_at += kGroup * p.f_token;
    left -= kGroup;
  }
  __device__ void store(ForwardInputs<kWarps> (&to)[kGroupUnits], int thread) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int i = step + j * kEvery;
      *reinterpret_cast<uint2*>(&to[i / kUnit].q[i % kUnit][quad * 2]) = q[j];
      *reinterpret_cast<uint2*>(&to[i / kUnit].k[i % kUnit][quad * 2]) = k[j];
    }
    *reinterpret_cast<uint2*>(&to[v_step / kUnit].v[v_step % kUnit][thread % 4 * 2]) = v;
    if (thread < kGroup) to[thread / kUnit].decay[thread % kUnit] = make_float2(f, 1.f - f);
  }
};

// Adds up the warps' parts of y. The first unit that is written in a group is the last of the group
// before: y is one step behind the state.
template <typename T, int kWarps>
struct ForwardSum {
  int place, left;  // left: of the chain, from the thread's step of the next unit on
  int64_t to, unit_of_y;

  __device__ ForwardSum(const Problem& p, const Place& at, int thread)
      : unit_of_y(static_cast<int64_t>(p.heads) * kColumns * kUnit) {
    const int step = thread / kColumns, column = thread % kColumns;
    place = column * kUnit + step;
    left = at.length - step + kUnit;
    to = (at.token(p, step) * p.heads + at.head) * kColumns + column - unit_of_y;
    if (p.y_parts)
      to += at.group * (static_cast<int64_t>(p.batch) * p.tokens) * p.heads * kColumns;
  }
  __device__ void store(const Problem& p, const float (&from)[kWarps][kUnitValues], bool valid) {
    float sum = from[0][place];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum += from[w][place];
    if (valid && left > 0) {
      if (p.y_parts)
        p.y_parts[to] = sum;
      else
        static_cast<T*>(p.y)[to] = static_cast<T>(sum);
    }
    to += unit_of_y;
    left -= kUnit;
  }
};

template <typename T, int kWarps>
__device__ void forward_help(FastForwardShared<kWarps>& shared, const Problem& p, const Place& at) {
  const int thread = threadIdx.x - kWarps * 32, groups = Place::ceil_div(at.length, kGroup);
  ForwardStage<T, kWarps> next(p, at, thread);
  ForwardSum<T, kWarps> sum(p, at, thread);
  next.load(p, thread);
  next.store(shared.in[0], thread);
  next.load(p, thread);
  __syncthreads();
  for (int group = 0; group <= groups; ++group) {
    if (group < groups) {
      next.store(shared.in[1 - group % 2], thread);
      next.load(p, thread);
    }
    if (group > 0)
      for (int u = 0; u < kGroupUnits; ++u)
        sum.store(p, shared.y[1 - group % 2][u], group > 1 || u > 0);
    __syncthreads();
  }
  sum.store(p, shared.y[groups % 2][0], groups > 0);
}

template <typename T, bool kExact, int kWarps>
__global__ void __launch_bounds__(kWarps * 32 + kHelpers, kWarps == 8 ? 2 : 3)
fast_forward(const __grid_constant__ Problem p) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<FastForwardShared<kWarps>*>(memory);
  const Place at(p, kWarps * kStripRows);
  if (threadIdx.x < kWarps * 32)
    forward_recurrence<T, kExact>(shared, p, at);
  else
    forward_help<T>(shared, p, at);
}

}  // namespace m2rnn
