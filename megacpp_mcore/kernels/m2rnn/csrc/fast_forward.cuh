// Forward for 16-bit inputs: a warp has eight rows of a chain, a block 32, of one head or of three
// that share q and k, and four more warps that read the inputs ahead and add up y behind, 32 steps
// (a group) at a time.
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

  // own_q, own_v: the thread's own pairs of the unit. k and v are still to be turned.
  __device__ void load(const uint32_t* own_q, const uint32_t* own_v) {
    q = own_q[0], k = own_q[rows_at(kUnit)];
    v[0] = own_v[0], v[1] = own_v[4];
  }
  __device__ void turn() { k = transposed(k), v[0] = transposed(v[0]), v[1] = transposed(v[1]); }
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
      const float2 rounded = unpacked<__half>(high[e]);
      low[e] = pack<__half>(x - rounded.x, y - rounded.y);
    }
  }
};

// What goes from step to step; element 2 r + i is column g + 8 r of row 2 t + i.
template <typename T, bool kExact>
struct ForwardState {
  float h[4], y[4];
  float z[4], given[4];  // tanh's argument of the step begun: h W's larger part, the rest and k v^T
  uint32_t packed[4];    // h in fp16, as it lies in h: after an even step, after an odd one

  template <bool kOdd>
  __device__ void pack_h() {
#pragma unroll
    for (int r = 0; r < 2; ++r) packed[2 * kOdd + r] = pack<__half>(h[2 * r], h[2 * r + 1]);
  }
  // A step begins. mask: the step's bits in the thread's two of `unit`.
  template <bool kOdd>
  __device__ void begin(const ForwardWeight& w, const ForwardUnit& unit, uint32_t mask) {
    const uint32_t h0 = transposed(packed[2 * !kOdd]), h1 = transposed(packed[2 * !kOdd + 1]);
#pragma unroll
    for (int e = 0; e < 4; ++e) z[e] = h[e], given[e] = 0.f;
    mma8<T>(given, unit.v[0], unit.v[1], unit.k & mask);
    // Side by side: neither product waits for the other.
    mma16<__half>(z, w.high, h0, h1);
    mma16<__half>(given, w.low, h0, h1);
  }
  // And ends.
  template <bool kOdd>
  __device__ void end(float2 decay) {
#pragma unroll
    for (int e = 0; e < 4; ++e) z[e] += given[e];
    tanh_of<kExact>(z);
#pragma unroll
    for (int e = 0; e < 4; ++e) h[e] = fmaf(decay.y, z[e], decay.x * h[e]);
    pack_h<kOdd>();
  }
  // y of an even step and of the odd one after it. q: zeros in lanes of other steps.
  __device__ void add_y(uint32_t even_q, uint32_t odd_q) {
    mma16<__half>(y, packed, even_q, odd_q);
  }
  // To the thread's column of the first of its two steps.
  __device__ void put_y(float* to) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      to[8 * r] = y[2 * r], to[8 * r + y_at(1)] = y[2 * r + 1];
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

template <typename T, bool kExact, int kHeads>
__device__ void forward_recurrence(FastForwardShared<kHeads>& shared, const Problem& p,
                                   const Stretch<kHeads>& at) {
  const int warp = threadIdx.x / 32 % kForwardWarps, g = lane_g(), t = lane_t();
  const int of_block = threadIdx.x / 32 / kForwardWarps, head = at.head_of(of_block);
  const bool is_there = of_block < at.heads;
  const int row = at.row0 + warp * kStripRows + 2 * t;
  const int64_t state = (static_cast<int64_t>(head) * p.k_dim + row) * kColumns + g;
  const ForwardWeight w(p.W + head * kColumns * kColumns);
  const StepMasks masks;
  const int units = Place::ceil_div(at.length, kUnit), units_a_chunk = 2 * p.stages;
  auto* checkpoint = static_cast<__half*>(p.checkpoints) + at.first_chunk * state_size(p) + state;
  ForwardState<T, kExact> x = {};
  float* const final_state = p.final_state + at.chain * state_size(p) + state;
  int32_t* const carried =
      p.carried + ((at.chain * p.heads + head) * at.groups + at.group) * kForwardWarps + warp;
  if (at.from > 0) {
    while (load_now(carried) == 0) {}
    __threadfence();
    x.load(final_state);
  } else if (p.initial) {
    x.load(p.initial + at.chain * state_size(p) + state);
  }
  x.template pack_h<true>();
  const float2* decay = shared.in[0].decay[of_block];
  const uint32_t* own_q = shared.in[0].q + rows_at(g) + warp * 4 + t;
  const uint32_t* own_v = shared.in[0].v[of_block] + columns_at(g) + t;
  float* y = shared.y[of_block][0][0][warp] + y_at(2 * t) + g;
  constexpr int kOn = kInputs<kHeads>;
  int due = 1;     // units to the next checkpoint
  int buffer = 0;  // of two
  ForwardUnit now, next;
  __syncthreads();
  for (int unit = 0; unit < units; unit += kGroupUnits) {
    now.load(own_q, own_v);
    now.turn();
    x.template begin<false>(w, now, masks.pair(0));
#pragma unroll 1
    for (int u = unit; u < unit + kGroupUnits; ++u) {
      if (--due == 0) {
        due = units_a_chunk;
        if (u < units) {
          if (is_there) x.store(checkpoint);
          checkpoint += state_size(p);
        }
      }
      x.put_y(y);  // of the unit before; a group's first to where nobody reads
      const uint32_t q = now.q;
#pragma unroll
      for (int i = 0; i < kUnit; i += 2) {
        const float4 two = *reinterpret_cast<const float4*>(decay + i);
        if (i == 2) next.load(own_q + kOn, own_v + kOn);
        x.template end<false>(make_float2(two.x, two.y));
        x.template begin<true>(w, now, masks.pair(i + 1));
        if (i == kUnit - 2) {  // behind a group's last unit: again, when it is there
          now = next;
          now.turn();
        }
        x.template end<true>(make_float2(two.z, two.w));
        x.template begin<false>(w, now, masks.pair((i + 2) % kUnit));
        x.add_y(q & masks.g[i], q & masks.g[i + 1]);
      }
      own_q += kOn, own_v += kOn, decay += kOn / 2, y += kUnitOfY;
    }
    x.put_y(y);
    const int back = buffer * 2 * kGroupUnits;
    own_q -= back * kOn, own_v -= back * kOn, decay -= back * (kOn / 2);
    y += kUnitOfY - buffer * kHeadOfY;
    buffer ^= 1;
    __syncthreads();
  }
  if (is_there) x.store(final_state);
  if (!at.ends) {
    __threadfence();
    __syncwarp();
    if (is_there && threadIdx.x % 32 == 0) atomicAdd(carried, 1);
  }
}

template <typename T, bool kExact, int kHeads>
__global__ void __launch_bounds__(kForwardThreads<kHeads>, kHeads == 1 ? 2 : 1)
fast_forward(const __grid_constant__ Problem p) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<FastForwardShared<kHeads>*>(memory);
  // Chains are cut where a group and a chunk begin.
  int granule = p.stages * kSteps;
  while (granule % kGroup != 0) granule += p.stages * kSteps;
  const int chain = max(1, Place::ceil_div(p.tokens, granule));
  const int64_t all =
      static_cast<int64_t>(p.chains) * Place::ceil_div(p.heads, kHeads) * chain;
  const int64_t slot = (all + p.slots - 1) / p.slots;
  int64_t position = (p.slots - 1 - blockIdx.x / p.groups) * slot;
  const int64_t end = min(position + slot, all);
  while (position < end) {
    const int64_t left = chain - position % chain;
    const int own = static_cast<int>(min(left, end - position));
    const Stretch<kHeads> at(p, position, chain, own, granule);
    if (threadIdx.x < kForwardThreads<kHeads> - kHelpers)
      forward_recurrence<T, kExact, kHeads>(shared, p, at);
    else
      forward_help<T, kHeads>(shared, p, at);
    position += own;
  }
}

}  // namespace m2rnn
