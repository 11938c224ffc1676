// Forward for 16-bit inputs: a warp has eight rows of a chain, a block 32, and two more warps that
// read the inputs ahead and add up y behind, 32 steps (a group) at a time.
//
// The state is kept transposed, h^T: thread 4 g + t has columns g, g + 8 of rows 2 t, 2 t + 1. That
// is how m16n8k16 returns (W - 1)^T h^T, and, of two steps, the left operand of y^T += h^T q. As
// the right operand of the next step's product it goes, in fp16, through two `movmatrix`; what it
// is multiplied with beyond that, 1, it is in fp32, as what that product is added to. Of k and q of
// eight steps (a unit) one step's, and zeros for the others, are the right operands of v^T k and
// h^T q.
#pragma once

#include "fast_forward_help.cuh"

namespace m2rnn {

// A unit's inputs as a warp's operands. q: a right one, columns are steps. k: another, rows are
// steps, and v, the left one, has its columns for steps: thread 4 g + t has steps 2 t, 2 t + 1.
struct ForwardUnit {
  uint32_t q, k, v[2];

  // own_q, own_v: the thread's own pairs of the unit.
  __device__ void take(const uint32_t* own_q, const uint32_t* own_v) {
    q = *own_q;
    k = transposed(own_q[kUnit * ForwardInputs::kRowPairs]);
    v[0] = transposed(own_v[0]), v[1] = transposed(own_v[4]);
  }
};

// (W - 1)^T as the left operand, in two fp16 parts. (What W is off by is off the same way at every
// step, so that it adds up.)
struct ForwardWeight {
  uint32_t high[4], low[4];

  __device__ explicit ForwardWeight(const float* W) {
    const int g = lane_g(), t = lane_t();
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int to = g + e % 2 * 8, from = 2 * t + e / 2 * 8;
      const float x = W[from * kColumns + to] - (from == to ? 1.f : 0.f);
      const float y = W[(from + 1) * kColumns + to] - (from + 1 == to ? 1.f : 0.f);
      high[e] = pack<__half>(x, y);
      const float2 rounded = __half22float2(*reinterpret_cast<const __half2*>(&high[e]));
      low[e] = pack<__half>(x - rounded.x, y - rounded.y);
    }
  }
};

// What goes from step to step; element 2 r + i is column g + 8 r of row 2 t + i.
template <typename T, bool kExact>
struct ForwardState {
  float h[4], y[4];
  float given[4];      // k v^T of the next step
  uint32_t packed[4];  // h in fp16, as it lies in h: after an even step, after an odd one

  template <bool kOdd>
  __device__ void pack_h() {
#pragma unroll
    for (int r = 0; r < 2; ++r) packed[2 * kOdd + r] = pack<__half>(h[2 * r], h[2 * r + 1]);
  }
  // k v^T for a step of `unit`. mask: the step's bits in the thread's two of them.
  __device__ void give(const ForwardUnit& unit, uint32_t mask) {
#pragma unroll
    for (int e = 0; e < 4; ++e) given[e] = 0.f;
    mma8<T>(given, unit.v[0], unit.v[1], unit.k & mask);
  }
  // y of the last even step and of the odd one after it. q: zeros in lanes of other steps.
  __device__ void add_y(uint32_t even_q, uint32_t odd_q) {
    mma16<__half>(y, packed, even_q, odd_q);
  }
  // One step. even_q, odd_q: of the two steps before an even one. unit, mask: of the next.
  template <bool kOdd>
  __device__ void step(const ForwardWeight& w, float2 decay, uint32_t even_q, uint32_t odd_q,
                       const ForwardUnit& unit, uint32_t mask) {
    const uint32_t h0 = transposed(packed[2 * !kOdd]), h1 = transposed(packed[2 * !kOdd + 1]);
    // Side by side: neither product waits for the other.
    float z[4] = {h[0], h[1], h[2], h[3]};
    mma16<__half>(z, w.high, h0, h1);
    mma16<__half>(given, w.low, h0, h1);
    if (!kOdd) add_y(even_q, odd_q);
#pragma unroll
    for (int e = 0; e < 4; ++e) z[e] += given[e];
    give(unit, mask);
    tanh_of<kExact>(z);
#pragma unroll
    for (int e = 0; e < 4; ++e) h[e] = fmaf(decay.y, z[e], decay.x * h[e]);
    pack_h<kOdd>();
  }
  // To the thread's column of the first of its two steps.
  __device__ void put_y(float* to) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      to[8 * r] = y[2 * r], to[8 * r + kColumns + 4] = y[2 * r + 1];
      y[2 * r] = y[2 * r + 1] = 0.f;
    }
  }
  // Another block may have written it.
  __device__ void load(const float* state) {
#pragma unroll
    for (int e = 0; e < 4; ++e) h[e] = __ldcg(state + e % 2 * kColumns + e / 2 * 8);
  }
  template <typename State>
  __device__ void store(State* state) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) state[e % 2 * kColumns + e / 2 * 8] = static_cast<State>(h[e]);
  }
};

template <typename T, bool kExact>
__device__ void forward_recurrence(FastForwardShared& shared, const Problem& p,
                                   const Stretch& at) {
  const int warp = threadIdx.x / 32, g = lane_g(), t = lane_t();
  const int row = at.row0 + warp * kStripRows + 2 * t;
  const int64_t state = (static_cast<int64_t>(at.head) * p.k_dim + row) * kColumns + g;
  const ForwardWeight w(p.W + at.head * kColumns * kColumns);
  const StepMasks masks;
  const int units = Place::ceil_div(at.length, kUnit), units_a_chunk = 2 * p.stages;
  auto* checkpoint = static_cast<__half*>(p.checkpoints) + at.first_chunk * state_size(p) + state;
  ForwardState<T, kExact> x = {};
  float* const final_state = p.final_state + at.chain * state_size(p) + state;
  int32_t* const carried = p.carried + (at.job * at.groups + at.group) * kForwardWarps + warp;
  if (at.from > 0) {
    while (load_now(carried) == 0) {}
    __threadfence();
    x.load(final_state);
  } else if (p.initial) {
    x.load(p.initial + at.chain * state_size(p) + state);
  }
  x.template pack_h<true>();
  const float2* decay = shared.in[0].decay;
  const uint32_t* own_q = &shared.in[0].q[g][warp * 4 + t];
  const uint32_t* own_v = &shared.in[0].v[g][t];
  float* y = shared.y[0][0][warp][2 * t] + g;
  int due = 1;   // units to the next checkpoint
  int back = 0;  // units to the even groups' first
  ForwardUnit now;
  uint32_t q = 0;  // of the unit whose y is being made, which is one step behind h
  __syncthreads();
  for (int unit = 0; unit < units; unit += kGroupUnits) {
    now.take(own_q, own_v);
    x.give(now, masks.pair(0));
#pragma unroll 1
    for (int u = unit; u < unit + kGroupUnits; ++u) {
      if (--due == 0) {
        due = units_a_chunk;
        if (u < units) {
          x.store(checkpoint);
          checkpoint += state_size(p);
        }
      }
      x.template step<false>(w, decay[0], q & masks.g[kUnit - 2], q & masks.g[kUnit - 1], now,
                             masks.pair(1));
      x.put_y(y);
      q = now.q;
#pragma unroll
      for (int i = 1; i < kUnit - 1; i += 2) {
        x.template step<true>(w, decay[i], 0, 0, now, masks.pair(i + 1));
        x.template step<false>(w, decay[i + 1], q & masks.g[i - 1], q & masks.g[i], now,
                               masks.pair(i + 2));
      }
      const float2 last = decay[kUnit - 1];
      own_q += kInputs, own_v += kInputs, decay += kInputs / 2, y += kUnitOfY;
      now.take(own_q, own_v);  // of the next group: again, when it is there
      x.template step<true>(w, last, 0, 0, now, masks.pair(0));
    }
    own_q -= back * kInputs, own_v -= back * kInputs, decay -= back * (kInputs / 2);
    y -= back * kUnitOfY;
    back = 2 * kGroupUnits - back;
    __syncthreads();
  }
  x.add_y(q & masks.g[kUnit - 2], q & masks.g[kUnit - 1]);
  x.put_y(y);
  __syncthreads();
  x.store(final_state);
  if (!at.ends) {
    __threadfence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) atomicAdd(carried, 1);
  }
}

template <typename T, bool kExact>
__global__ void __launch_bounds__(kForwardThreads + kHelpers, 3)
fast_forward(const __grid_constant__ Problem p) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<FastForwardShared*>(memory);
  // Chains are cut where a group and a chunk begin.
  int granule = p.stages * kSteps;
  while (granule % kGroup != 0) granule += p.stages * kSteps;
  const int chain = max(1, Place::ceil_div(p.tokens, granule));
  const int64_t all = static_cast<int64_t>(p.chains) * p.heads * chain;
  const int64_t slot = (all + p.slots - 1) / p.slots;
  int64_t position = (p.slots - 1 - blockIdx.x / p.groups) * slot;
  const int64_t end = min(position + slot, all);
  while (position < end) {
    const int64_t left = chain - position % chain;
    const int own = static_cast<int>(min(left, end - position));
    const Stretch at(p, position, chain, own, granule);
    if (threadIdx.x < kForwardThreads)
      forward_recurrence<T, kExact>(shared, p, at);
    else
      forward_help<T>(shared, p, at);
    position += own;
  }
}

}  // namespace m2rnn
