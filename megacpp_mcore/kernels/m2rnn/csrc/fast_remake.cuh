// What fast_backward.cuh does forward: the states of 16 steps, a part, made again from a
// checkpoint.
#pragma once

#include "fast.cuh"

namespace m2rnn {

constexpr int kPartUnits = kSteps / kUnit;

// What is kept of a step of a warp's tile, each lane's own elements: of the state h before it, in
// the inputs' dtype T; and, in fp16, of 1 - z^2 and h - z, z what tanh returned.
struct Slot {
  uint4 before[32], slope[32], gap[32];
};

// One of a chain's inputs as thread 4 g + t reads it: of a unit's step g, elements 2 t, 2 t + 1
// and, 8 on, two more; or 4 t .. 4 t + 3; or the one that there is. Steps that the chain does not
// have are zeros, f is 1: they leave state and gradients as they are.
struct Input {
  const char* first;  // of the chain's first unit
  int token;          // bytes

  template <typename X>
  __device__ Input(const X* x, int64_t token, int element)
      : first(reinterpret_cast<const char*>(x + (lane_g() * token + element))),
        token(static_cast<int>(token) * static_cast<int>(sizeof(X))) {}
  // t: the unit's first token.
  __device__ void load(uint32_t (&to)[2], int t, bool valid) const {
    const auto* pair = reinterpret_cast<const uint32_t*>(first + static_cast<int64_t>(t) * token);
    to[0] = valid ? __ldg(pair) : 0u;
    to[1] = valid ? __ldg(pair + 4) : 0u;
  }
  __device__ uint2 load(int t, bool valid) const {
    const auto* quad = reinterpret_cast<const uint2*>(first + static_cast<int64_t>(t) * token);
    return valid ? __ldg(quad) : uint2{};
  }
  __device__ float load_f(int t, bool valid) const {
    const auto* one = reinterpret_cast<const float*>(first + static_cast<int64_t>(t) * token);
    return valid ? __ldg(one) : 1.f;
  }
};
// rows: of q and k, the warp's first.
template <typename T>
struct LaneInputs {
  Input q, k, v, dy, f;

  __device__ LaneInputs(const Problem& p, const Place& at, int rows)
      : q(q_of<T>(p, at).x, p.q_token, rows + 2 * lane_t()),
        k(k_of<T>(p, at).x, p.k_token, rows + 2 * lane_t()),
        v(v_of<T>(p, at).x, p.v_token, 4 * lane_t()),
        dy(dy_of<T>(p, at).x, p.heads * kColumns, 4 * lane_t()),
        f(p.f + at.batch * p.f_batch + at.start * p.f_token + at.head * p.f_head, p.f_token, 0) {}
};
// Has the chain a lane's step of the unit whose first is t?
__device__ inline bool has_step(int t, const Place& at) {
  return static_cast<unsigned>(t + lane_g()) < static_cast<unsigned>(at.length);
}

// Ones where a pair of steps' elements in lane t have step i.
__device__ inline uint32_t step_mask(int i) {
  return lane_t() == i / 2 ? (i % 2 ? 0xffff0000u : 0xffffu) : 0u;
}
// A right operand whose column i has x and y; the others are zero.
template <typename T>
__device__ void mma_step(float (&c)[4], const uint32_t (&a)[4], uint32_t x, uint32_t y, int i) {
  const bool own = lane_g() == i;
  mma16<T>(c, a, own ? x : 0u, own ? y : 0u);
}
// All of `threads` wait for each other.
__device__ inline void meet(int number, int threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(number), "r"(threads) : "memory");
}
// Where a lane's rows of its step of the chain's first unit lie in dq_parts and dk_parts.
__device__ inline int64_t rows_place(const Problem& p, const Place& at, int row) {
  return (at.token(p, lane_g()) * p.heads + at.head) * p.k_dim + at.row0 + row + 2 * lane_t();
}
// Rows by steps, from a product, stored by thread 4 g + t: rows 2 t, 2 t + 1 of step g; and, 8 rows
// on, two more.
template <typename T>
__device__ void store_rows(T* to, const float (&x)[4], bool valid) {
  const uint32_t low = transposed(pack<T>(x[0], x[1])), high = transposed(pack<T>(x[2], x[3]));
  if (!valid) return;
  auto* pairs = reinterpret_cast<uint32_t*>(to);
  pairs[0] = low;
  pairs[4] = high;
}

__device__ inline uint32_t one_minus_square(uint32_t z) {
  const __half2 x = *reinterpret_cast<const __half2*>(&z);
  const __half2 y = __hfma2(__hneg2(x), x, __float2half2_rn(1.f));
  return *reinterpret_cast<const uint32_t*>(&y);
}
__device__ inline uint32_t difference(uint32_t x, uint32_t y) {
  const __half2 z =
      __hsub2(*reinterpret_cast<const __half2*>(&x), *reinterpret_cast<const __half2*>(&y));
  return *reinterpret_cast<const uint32_t*>(&z);
}
__device__ inline uint4 as_uint4(const Packed& x) { return make_uint4(x[0], x[1], x[2], x[3]); }

// Steps forwards, unit by unit, one unit's inputs ahead. tanh is the GPU's own, also where forward
// was told to be exact: what it is off by lasts to the next checkpoint, and z is kept in fp16 here.
template <typename T>
struct Forwards {
  Tile h;
  Packed packed;  // h in fp16
  struct {
    uint32_t k[2];
    uint2 v;
    float f;
  } next, now;

  __device__ void load(const LaneInputs<T>& in, const Place& at, int t) {
    const bool valid = has_step(t, at);
    in.k.load(next.k, t, valid);
    next.v = in.v.load(t, valid);
    next.f = in.f.load_f(t, valid);
  }
  __device__ void take() {
    now.k[0] = transposed(next.k[0]), now.k[1] = transposed(next.k[1]);
    now.v = make_uint2(transposed(next.v.x), transposed(next.v.y));
    now.f = next.f;
  }
  __device__ void start(const Packed& from) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      packed[j] = from[j];
      const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&packed[j]));
      h[j / 2][j % 2 * 2] = x.x, h[j / 2][j % 2 * 2 + 1] = x.y;
    }
  }
  // Step i of the unit: z is what tanh returns.
  __device__ void look(Tile& z, const uint32_t (&w)[2][2], int i) const {
    const uint32_t mask = step_mask(i);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) z[n][e] = 0.f;
      mma8<T>(z[n], now.k[0], now.k[1], (n ? now.v.y : now.v.x) & mask);
      mma16<__half>(z[n], packed, w[n][0], w[n][1]);
      tanh_of<false>(z[n]);
    }
  }
  __device__ void go(const Tile& z, int i) {
    const float f = __shfl_sync(kAll, now.f, 4 * i), rest = 1.f - f;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) h[n][e] = fmaf(rest, z[n][e], f * h[n][e]);
    pack_tile<__half>(packed, h);
  }
};

// Of each part of a chain, the last first, its steps (`own`); and beside them those that lead from
// a checkpoint to the part before (`lead`), where that is not a chunk's first.
template <typename T>
struct Remake {
  uint32_t w[2][2];
  const LaneInputs<T>& in;
  Forwards<T> own, lead;
  Packed behind;    // own.h in T
  uint2 next_dy, dy;
  float dq[4];      // of the unit

  const uint2* checkpoint;
  Packed start;
  int t, lead_t;          // first tokens of the units that are sent for
  int part, part_in_chunk;  // of the part that `start` is of
  int leads, left;        // units that lead to a part: in all, and left

  __device__ Remake(const Problem& p, const Place& at, const LaneInputs<T>& in, int row, int parts)
      : in(in), t((parts - 1) * kSteps), part(parts - 1),
        part_in_chunk(parts > 0 ? (parts - 1) % p.stages : 0), leads(0), left(0) {
    const float* W = p.W + at.head * kColumns * kColumns;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int from = 4 * lane_t() + 2 * i, to = column_of(n, lane_g());
        w[n][i] = pack<__half>(W[from * kColumns + to], W[(from + 1) * kColumns + to]);
      }
    const int64_t chunk = at.first_chunk + (parts - 1) / p.stages;
    const int64_t state = (static_cast<int64_t>(at.head) * p.k_dim + at.row0 + row + lane_g()) *
                          kColumns;
    checkpoint = static_cast<const uint2*>(p.checkpoints) +
                 (chunk * state_size(p) + state) / 4 + lane_t();
    load_start();
    lead_t = t - (part_in_chunk > 0 ? part_in_chunk : p.stages) * kSteps;
    lead.load(in, at, lead_t);
    own.load(in, at, t);
    next_dy = in.dy.load(t, has_step(t, at) && p.dy != nullptr);
  }
  __device__ void load_start() {
    uint2 low = {}, high = {};
    if (part >= 0) {
      low = __ldg(checkpoint);
      high = __ldg(checkpoint + 8 * kColumns / 4);
    }
    start[0] = low.x, start[1] = high.x, start[2] = low.y, start[3] = high.y;
  }
  // To the part before.
  __device__ void begin_lead(const Problem& p) {
    lead.start(start);
    left = leads = part > 0 ? part_in_chunk * kPartUnits : 0;
    --part;
    if (--part_in_chunk < 0) {
      part_in_chunk = p.stages - 1;
      checkpoint -= state_size(p) / 4;
    }
    load_start();
  }
  __device__ void enter_lead(const Problem& p, const Place& at) {
    lead.take();
    lead_t += kUnit;
    if (--left == 0) {
      lead_t -= leads * kUnit;
      if (leads == kPartUnits) lead_t -= p.stages * kSteps;
    }
    lead.load(in, at, lead_t);
  }
  __device__ void step_lead(int i) {
    Tile z;
    lead.look(z, w, i);
    lead.go(z, i);
  }
  __device__ void end_lead() {
#pragma unroll
    for (int j = 0; j < 4; ++j) own.packed[j] = lead.packed[j];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) own.h[n][e] = lead.h[n][e];
    pack_tile<T>(behind, own.h);
  }
  // Unit u of the part.
  __device__ void enter(const Problem& p, const Place& at, int u) {
    own.take();
    dy = next_dy;
    t += u + 1 < kPartUnits ? kUnit : kUnit - 2 * kSteps;
    own.load(in, at, t);
    next_dy = in.dy.load(t, has_step(t, at) && p.dy != nullptr);
#pragma unroll
    for (int e = 0; e < 4; ++e) dq[e] = 0.f;
  }
  // Step i of the unit; slot: the lane's elements of the step's.
  __device__ void step(int i, uint4* slot) {
    Tile z;
    own.look(z, w, i);
    Packed slope, gap;
    pack_tile<__half>(slope, z);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      gap[j] = difference(own.packed[j], slope[j]);
      slope[j] = one_minus_square(slope[j]);
    }
    slot[0] = as_uint4(behind);
    slot[32] = as_uint4(slope);
    slot[64] = as_uint4(gap);
    own.go(z, i);
    pack_tile<T>(behind, own.h);
    mma_step<T>(dq, behind, dy.x, dy.y, i);
  }
};

}  // namespace m2rnn
