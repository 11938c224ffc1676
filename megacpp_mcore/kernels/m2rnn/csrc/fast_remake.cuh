// What fast_backward.cuh does forward: the states of 16 steps, a part, made again from a
// checkpoint.
#pragma once

#include "fast.cuh"

namespace m2rnn {

constexpr int kPartUnits = kSteps / kUnit;

// What is kept of a step of a warp's tile: of the state h before it four 8 x 8 matrices, row by
// row, in the inputs' dtype T; and, each lane's own elements, 1 - z^2, in fp16, and h - z, in T; z
// is what tanh returned.
constexpr int kSlope = 512, kGap = 2 * kSlope, kSlotBytes = 3 * kSlope;
struct Slot {
  uint4 before[32], slope[32], gap[32];
};

// Loads, where valid, that stay where they are: the compiler moves others close to their use.
__device__ inline uint32_t load_here(const uint32_t* from, bool valid, uint32_t otherwise) {
  uint32_t x;
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %2, 0; mov.b32 %0, %3; @p ld.global.nc.b32 %0, [%1]; }"
      : "=&r"(x)
      : "l"(from), "r"(static_cast<uint32_t>(valid)), "r"(otherwise));
  return x;
}
__device__ inline uint2 load_here(const uint2* from, bool valid) {
  uint2 x;
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0; "
      "@p ld.global.nc.v2.b32 {%0, %1}, [%2]; }"
      : "=&r"(x.x), "=&r"(x.y)
      : "l"(from), "r"(static_cast<uint32_t>(valid)));
  return x;
}
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
  // t: the unit's first token. (The compiler would make it a product of 64-bit numbers.)
  template <typename X>
  __device__ const X* at(int t) const {
    const auto from = reinterpret_cast<uint64_t>(first);
    uint64_t to;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(to) : "r"(t), "r"(token), "l"(from));
    return reinterpret_cast<const X*>(to);
  }
  __device__ void load(uint32_t (&to)[2], int t, bool valid) const {
    const auto* pair = at<uint32_t>(t);
    to[0] = load_here(pair, valid, 0u);
    to[1] = load_here(pair + 4, valid, 0u);
  }
  __device__ uint2 load(int t, bool valid) const { return load_here(at<uint2>(t), valid); }
  __device__ float load_f(int t, bool valid) const {
    return __uint_as_float(load_here(at<uint32_t>(t), valid, __float_as_uint(1.f)));
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
  const int step = t + lane_g() - at.first;
  return static_cast<unsigned>(step) < static_cast<unsigned>(at.length - at.first);
}

__device__ inline uint32_t pair_mask(int i) {
  return lane_t() == i / 2 ? (i % 2 ? 0xffff0000u : 0xffffu) : 0u;
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

// Four words of each lane to and from shared memory, 16 bytes a lane; and as the four 8 x 8
// matrices of products, which lie row by row then.
template <int kOffset>
__device__ void store_words(uint32_t to, const Packed& x) {
  asm volatile("st.shared.v4.b32 [%0 + %5], {%1,%2,%3,%4};"
               :
               : "r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "n"(kOffset));
}
template <int kOffset>
__device__ void load_words(Packed& x, uint32_t from) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4 + %5];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from), "n"(kOffset));
}
__device__ inline void store_matrices(uint32_t to, const Packed& x) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
               :
               : "r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]));
}
__device__ inline void load_transposed(Packed& x, uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from));
}

__device__ inline uint32_t one_minus_square(uint32_t z) {
  const __half2 x = as_pair<__half>(z), y = __hfma2(__hneg2(x), x, __float2half2_rn(1.f));
  return *reinterpret_cast<const uint32_t*>(&y);
}
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
  // From where `packed` says.
  __device__ void start() {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&packed[j]));
      h[j / 2][j % 2 * 2] = x.x, h[j / 2][j % 2 * 2 + 1] = x.y;
    }
  }
  // A step of the unit, whose pair mask it is: z is what tanh returns.
  __device__ void look(Tile& z, const uint32_t (&w)[2][2], uint32_t mask) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) z[n][e] = 0.f;
      mma8<T>(z[n], now.k[0], now.k[1], (n ? now.v.y : now.v.x) & mask);
      mma16<__half>(z[n], packed, w[n][0], w[n][1]);
      tanh_of<false>(z[n]);
    }
  }
  // Step i of the unit. gap: h - z.
  __device__ void go(const Tile& z, Tile& gap, int i) {
    const float f = __shfl_sync(kAll, now.f, 4 * i);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        gap[n][e] = h[n][e] - z[n][e];
        h[n][e] = fmaf(f, gap[n][e], z[n][e]);
      }
    pack_tile<__half>(packed, h);
  }
};

// Of each part of a chain, the last first, its steps (`own`); and beside them those that lead from
// a checkpoint to the part before (`lead`), where that is not a chunk's first.
template <typename T>
struct Remake {
  uint32_t w[2][2];
  const StepMasks masks;
  const LaneInputs<T>& in;
  Forwards<T> own, lead;
  Packed behind;    // own.h in T
  uint2 next_dy, dy;
  float dq[4];      // of the unit

  const uint2* checkpoint;
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
    lead_t = t - (part_in_chunk > 0 ? part_in_chunk : p.stages) * kSteps;
    lead.load(in, at, lead_t);
    own.load(in, at, t);
    next_dy = in.dy.load(t, has_step(t, at) && p.dy != nullptr);
  }
  // To the part before. What is read here is not needed before the lead's first step, or its end.
  __device__ void begin_lead(const Problem& p) {
    const uint2 low = load_here(checkpoint, part >= 0),
                high = load_here(checkpoint + 8 * kColumns / 4, part >= 0);
    lead.packed[0] = low.x, lead.packed[1] = high.x, lead.packed[2] = low.y,
    lead.packed[3] = high.y;
    left = leads = part > 0 ? part_in_chunk * kPartUnits : 0;
    --part;
    if (--part_in_chunk < 0) {
      part_in_chunk = p.stages - 1;
      checkpoint -= state_size(p) / 4;
      if (part > 0) asm volatile("prefetch.global.L2 [%0];" : : "l"(checkpoint));
    }
  }
  __device__ void enter_lead(const Problem& p, const Place& at) {
    if (left == leads) lead.start();
    lead.take();
    lead_t += kUnit;
    if (--left == 0) {
      lead_t -= leads * kUnit;
      if (leads == kPartUnits) lead_t -= p.stages * kSteps;
    }
    lead.load(in, at, lead_t);
  }
  __device__ void step_lead(int i, uint32_t mask) {
    Tile z, gap;
    lead.look(z, w, mask);
    lead.go(z, gap, i);
  }
  __device__ void end_lead() {
    if (leads == 0) lead.start();
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
  // Step i of the unit; slot: where the lane's elements of the step's are in shared memory.
  __device__ void step(int i, uint32_t slot) {
    Tile z;
    own.look(z, w, masks.pair(i));
    store_matrices(slot, behind);
    Tile gap;
    own.go(z, gap, i);
    Packed packed;
    pack_tile<__half>(packed, z);
#pragma unroll
    for (int j = 0; j < 4; ++j) packed[j] = one_minus_square(packed[j]);
    store_words<kSlope>(slot, packed);
    pack_tile<T>(packed, gap);
    store_words<kGap>(slot, packed);
    pack_tile<T>(behind, own.h);
    mma16<T>(dq, behind, dy.x & masks.g[i], dy.y & masks.g[i]);
  }
};

}  // namespace m2rnn
