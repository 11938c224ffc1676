// Forward for 16-bit inputs. A warp has 8 rows of a chain and a block 32 rows, of one head or of
// three heads that share q and k. Four helper warps of the block load the inputs of the next group
// of 32 steps and sum y of the last one.
//
// A warp holds h^T: thread 4 g + t has columns g, g + 8 of rows 2 t, 2 t + 1. That is the layout
// of the result of (W - I)^T h^T by m16n8k16 and, for two steps, of the left operand of
// y^T += h^T q. Two `movmatrix` make the fp16 copy of h^T the right operand of the next step's
// product, which is accumulated onto h^T in fp32 (the I of W). The right operands of v^T k and
// h^T q hold the k and q of a unit's 8 steps, masked to one step.
#pragma once

#include "fwd_helpers.cuh"

namespace m2rnn {

// A unit's inputs as a warp's operands. q is a right operand, whose columns are steps; k a right
// operand, whose rows are steps; v a left operand, whose columns are steps.
struct ForwardUnit {
  uint32_t q, k, v[2];

  // own_q, own_v: the thread's words of the unit. k and v need `transpose` before their use.
  __device__ void load(const uint32_t* own_q, const uint32_t* own_v) {
    q = own_q[0], k = own_q[row_offset(kUnit)];
    v[0] = own_v[0], v[1] = own_v[4];
  }
  __device__ void transpose() {
    k = transposed(k), v[0] = transposed(v[0]), v[1] = transposed(v[1]);
  }
};

// (W - I)^T as the left operand, in two fp16 parts: an error of W is the same at every step and
// would accumulate.
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

// The recurrence's registers; element 2 r + i is column g + 8 r of row 2 t + i.
template <typename T, bool kExact>
struct ForwardState {
  float h[4], y[4];
  float z[4], rest[4];  // tanh's argument is z + rest: h W with W's high part; its low part, k v^T
  uint32_t packed[4];   // h in fp16, in h's layout, after an even step and after an odd one

  template <bool kOdd>
  __device__ void pack_h() {
#pragma unroll
    for (int r = 0; r < 2; ++r) packed[2 * kOdd + r] = pack<__half>(h[2 * r], h[2 * r + 1]);
  }
  // First half of a step: the products. mask: selects the step in the words of `unit`.
  template <bool kOdd>
  __device__ void begin(const ForwardWeight& w, const ForwardUnit& unit, uint32_t mask) {
    const uint32_t h0 = transposed(packed[2 * !kOdd]), h1 = transposed(packed[2 * !kOdd + 1]);
#pragma unroll
    for (int e = 0; e < 4; ++e) z[e] = h[e], rest[e] = 0.f;
    mma8<T>(rest, unit.v[0], unit.v[1], unit.k & mask);
    // Two accumulators, so that neither product waits for the other.
    mma16<__half>(z, w.high, h0, h1);
    mma16<__half>(rest, w.low, h0, h1);
  }
  // Second half of a step: tanh and the new state.
  template <bool kOdd>
  __device__ void end(float2 decay) {
#pragma unroll
    for (int e = 0; e < 4; ++e) z[e] += rest[e];
    tanh_of<kExact>(z);
#pragma unroll
    for (int e = 0; e < 4; ++e) h[e] = fmaf(decay.y, z[e], decay.x * h[e]);
    pack_h<kOdd>();
  }
  // Adds y of an even step and of the odd step after it. q: masked to the step.
  __device__ void add_y(uint32_t even_q, uint32_t odd_q) {
    mma16<__half>(y, packed, even_q, odd_q);
  }
  // Writes y and clears it. to: the thread's column of the first of its two steps.
  __device__ void flush_y(float* to) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      to[8 * r] = y[2 * r], to[8 * r + y_offset(1)] = y[2 * r + 1];
      y[2 * r] = y[2 * r + 1] = 0.f;
    }
  }
  // Not through L1, as another block may have written the state.
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
__device__ void forward_recurrence(ForwardShared<kHeads>& shared, const Params& p,
                                   const BundlePart<kHeads>& at) {
  const int warp = threadIdx.x / 32 % kForwardWarps, g = lane_g(), t = lane_t();
  const int block_head = threadIdx.x / 32 / kForwardWarps, head = at.head_of(block_head);
  const bool has_head = block_head < at.heads;
  const int row = at.row0 + warp * kWarpRows + 2 * t;
  const int64_t state = (static_cast<int64_t>(head) * p.k_dim + row) * kColumns + g;
  const ForwardWeight w(p.W + head * kColumns * kColumns);
  const StepMasks masks;
  const int units = Place::ceil_div(at.length, kUnit), units_a_chunk = 2 * p.stages;
  auto* checkpoint = static_cast<__half*>(p.checkpoints) + at.first_chunk * state_size(p) + state;
  ForwardState<T, kExact> x = {};
  float* const final_state = p.final_state + at.chain * state_size(p) + state;
  const int strip = (at.chain * p.heads + head) * at.row_blocks + at.row_block;
  int32_t* const state_ready = p.state_ready + strip * kForwardWarps + warp;
  if (at.from > 0) {
    while (load_acquire(state_ready) == 0) {}
    __threadfence();
    x.load(final_state);
  } else if (p.initial) {
    x.load(p.initial + at.chain * state_size(p) + state);
  }
  x.template pack_h<true>();
  const float2* decay = shared.in[0].decay[block_head];
  const uint32_t* own_q = shared.in[0].q + row_offset(g) + warp * 4 + t;
  const uint32_t* own_v = shared.in[0].v[block_head] + column_offset(g) + t;
  float* y = shared.y[block_head][0][0][warp] + y_offset(2 * t) + g;
  constexpr int kWords = kInputWords<kHeads>;
  int due = 1;     // units until the next checkpoint
  int buffer = 0;  // 0 or 1
  ForwardUnit now, next;
  __syncthreads();
  for (int unit = 0; unit < units; unit += kGroupUnits) {
    now.load(own_q, own_v);
    now.transpose();
    x.template begin<false>(w, now, masks.pair(0));
#pragma unroll 1
    for (int u = unit; u < unit + kGroupUnits; ++u) {
      if (--due == 0) {
        due = units_a_chunk;
        if (u < units) {
          if (has_head) x.store(checkpoint);
          checkpoint += state_size(p);
        }
      }
      x.flush_y(y);  // of the previous unit; a group's first flush goes to the dummy
      const uint32_t q = now.q;
#pragma unroll
      for (int i = 0; i < kUnit; i += 2) {
        const float4 two = *reinterpret_cast<const float4*>(decay + i);
        if (i == 2) next.load(own_q + kWords, own_v + kWords);
        x.template end<false>(make_float2(two.x, two.y));
        x.template begin<true>(w, now, masks.pair(i + 1));
        if (i == kUnit - 2) {  // after a group's last unit loaded again when it has arrived
          now = next;
          now.transpose();
        }
        x.template end<true>(make_float2(two.z, two.w));
        x.template begin<false>(w, now, masks.pair((i + 2) % kUnit));
        x.add_y(q & masks.g[i], q & masks.g[i + 1]);
      }
      own_q += kWords, own_v += kWords, decay += kWords / 2, y += kUnitY;
    }
    x.flush_y(y);
    const int back = buffer * 2 * kGroupUnits;
    own_q -= back * kWords, own_v -= back * kWords, decay -= back * (kWords / 2);
    y += kUnitY - buffer * kHeadY;
    buffer ^= 1;
    __syncthreads();
  }
  if (has_head) x.store(final_state);
  if (!at.ends) {
    __threadfence();
    __syncwarp();
    if (has_head && threadIdx.x % 32 == 0) atomicAdd(state_ready, 1);
  }
}

template <typename T, bool kExact, int kHeads>
__global__ void __launch_bounds__(kForwardThreads<kHeads>, kHeads == 1 ? 2 : 1)
forward_16bit(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<ForwardShared<kHeads>*>(memory);
  const int number = block_number(p.state_ready + state_size(p) / (kWarpRows * kColumns) * p.chains,
                                  memory);
  // Chains are cut only where both a group and a chunk begin.
  int granule = p.stages * kSteps;
  while (granule % kGroup != 0) granule += p.stages * kSteps;
  const int chain = max(1, Place::ceil_div(p.tokens, granule));
  const int64_t all =
      static_cast<int64_t>(p.chains) * Place::ceil_div(p.heads, kHeads) * chain;
  const int64_t slot = (all + p.slots - 1) / p.slots;
  int64_t position = (p.slots - 1 - number / p.row_blocks) * slot;
  const int64_t end = min(position + slot, all);
  while (position < end) {
    const int64_t left = chain - position % chain;
    const int own = static_cast<int>(min(left, end - position));
    const BundlePart<kHeads> at(p, number % p.row_blocks, position, chain, own, granule);
    if (threadIdx.x < kForwardThreads<kHeads> - kHelperThreads)
      forward_recurrence<T, kExact, kHeads>(shared, p, at);
    else
      forward_helpers<T, kHeads>(shared, p, at);
    position += own;
  }
}

}  // namespace m2rnn
