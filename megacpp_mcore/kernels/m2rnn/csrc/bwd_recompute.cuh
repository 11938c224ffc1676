// The recompute warp of bwd.cuh: the states of a chunk from its checkpoint, and dq.
#pragma once

#include "common_16bit.cuh"

namespace m2rnn {

// What the gradient warp needs of a step of a tile, in fp16: the state h before the step, as four
// 8 x 8 matrices in rows, and z, the result of tanh, as each lane's own elements.
constexpr int kZOffset = 512, kSlotBytes = 2 * kZOffset;
struct Slot {
  uint4 h[32], z[32];
};

// The tile's row that is row g + 8 r of the products, chosen so that lane t has four neighbours.
__device__ inline int tile_row(int r, int g) { return column_of(r, g); }

// Loads that the compiler does not move towards their use. Where not valid, x is unchanged.
__device__ inline void load_ordered(uint32_t& x, const void* from, bool valid) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.nc.b32 %0, [%1]; }"
               : "+r"(x)
               : "l"(from), "r"(static_cast<uint32_t>(valid)));
}
__device__ inline void load_ordered(uint2& x, const void* from, bool valid) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.nc.v2.b32 {%0, %1}, [%2]; }"
               : "+r"(x.x), "+r"(x.y)
               : "l"(from), "r"(static_cast<uint32_t>(valid)));
}
// One of a chain's inputs as thread 4 g + t reads it: of step g of a unit, elements 4 t .. 4 t + 3,
// or the only element.
struct LaneInput {
  const char* first;  // the lane's elements of the chain's first unit
  int token;          // stride between tokens in bytes

  template <typename X>
  __device__ LaneInput(const X* x, int64_t token, int element)
      : first(reinterpret_cast<const char*>(x + (lane_g() * token + element))),
        token(static_cast<int>(token) * static_cast<int>(sizeof(X))) {}
  // t: the unit's first token. In PTX, as the compiler would multiply 64-bit numbers.
  __device__ const void* at(int t) const {
    const auto from = reinterpret_cast<uint64_t>(first);
    uint64_t to;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(to) : "r"(t), "r"(token), "l"(from));
    return reinterpret_cast<const void*>(to);
  }
  template <typename X>
  __device__ void load(X& x, int t, bool valid) const {
    load_ordered(x, at(t), valid);
  }
  // Into L2.
  __device__ void prefetch(int t) const {
    asm volatile("prefetch.global.L2 [%0];" : : "l"(at(t)));
  }
};
// rows: the warp's first row of q and k.
template <typename T>
struct LaneInputs {
  LaneInput q, k, v, dy, f;

  __device__ LaneInputs(const Params& p, const Place& at, int rows)
      : q(q_of<T>(p, at).x, p.q_token, rows + 4 * lane_t()),
        k(k_of<T>(p, at).x, p.k_token, rows + 4 * lane_t()),
        v(v_of<T>(p, at).x, p.v_token, 4 * lane_t()),
        dy(dy_of<T>(p, at).x, p.heads * kColumns, 4 * lane_t()),
        f(p.f + at.batch * p.f_batch + at.start * p.f_token + at.head * p.f_head, p.f_token, 0) {}
};
// Whether the lane's step of the unit that starts at t is one of the segment's.
__device__ inline bool has_step(int t, const Place& at) {
  const int step = t + lane_g() - at.first;
  return static_cast<unsigned>(step) < static_cast<unsigned>(at.length - at.first);
}

// Barrier `number` of `threads` threads, which wait for each other.
__device__ inline void barrier_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(number), "r"(threads) : "memory");
}
// As `barrier_sync`, but this thread does not wait.
__device__ inline void barrier_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" : : "r"(number), "r"(threads) : "memory");
}
// Offset in dq_parts and dk_parts of a lane's rows of its step of the chain's first unit.
__device__ inline int64_t key_offset(const Params& p, const Place& at, int row) {
  return (at.token(p, lane_g()) * p.heads + at.head) * p.k_dim + at.row0 + row + 4 * lane_t();
}
// Stores a product's result, rows (or columns) by steps: thread 4 g + t stores four of step g.
template <typename T>
__device__ void store_steps(T* to, const float (&x)[4], bool valid) {
  const uint32_t low = transposed(pack<T>(x[0], x[1])), high = transposed(pack<T>(x[2], x[3]));
  if (valid) *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
}

// The power of two by which a warp's elements are divided before they become fp16: the largest of
// them is then in [1, 2). Limited to [2^-126, 2^126] (0 and infinity have such a scale); NaNs are
// ignored.
template <typename T>
__device__ float scale_of(uint2 x) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  constexpr uint32_t kSigns = 0x80008000u, kLeast = kHalf ? 0x00010001u : 0x00800080u,
                     kMost = kHalf ? 0x7bffffffu : 0x7effffffu;
  const uint32_t pair = __vimax3_u16x2(x.x & ~kSigns, x.y & ~kSigns, kLeast);
  const uint32_t both = min(__vmaxu2(pair, pair >> 16 | pair << 16), kMost);
  const float greatest = unpacked<T>(__reduce_max_sync(kFullMask, both)).y;
  return __uint_as_float(__float_as_uint(greatest) & 0x7f800000u);
}
__device__ inline float inverse(float unit) {
  return __uint_as_float(0x7f000000u - __float_as_uint(unit));
}
__device__ inline int exponent(float unit) { return (__float_as_uint(unit) >> 23) - 127; }
template <typename T>
__device__ uint32_t scaled(uint32_t x, float inverse) {
  const float2 pair = unpacked<T>(x);
  return pack<__half>(pair.x * inverse, pair.y * inverse);
}
template <typename T>
__device__ uint2 scaled(uint2 x, float inverse) {
  return make_uint2(scaled<T>(x.x, inverse), scaled<T>(x.y, inverse));
}
__device__ inline uint2 transposed(uint2 x) {
  return make_uint2(transposed(x.x), transposed(x.y));
}

// Four words of each lane to and from shared memory: 16 bytes a lane (words), or as the four 8 x 8
// matrices of an operand in rows (matrices).
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
__device__ inline void load_matrices(Packed& x, uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from));
}
__device__ inline void load_transposed(Packed& x, uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from));
}

// Runs each chunk forward from its checkpoint, the last chunk first; inputs are loaded one unit
// ahead. Steps after the chain's last use stale inputs, and their results are not used. tanh is
// the GPU's instruction even where the forward pass was exact: z is rounded to fp16 here, and the
// error ends with the chunk.
template <typename T>
struct Recompute {
  uint32_t w[2][2];
  const StepMasks masks;
  const LaneInputs<T>& in;
  Tile h;
  Packed packed;  // h in fp16
  float dq[4];    // dq of the unit, divided by dy_scale
  struct {
    uint2 k, v, dy;
    uint32_t f;
  } next;
  uint2 k, v, dy;
  uint32_t f;
  float dy_scale;

  const uint2* checkpoint;
  uint2 low, high;      // the checkpoint of the chunk to come
  int t, chunk, units;  // t: first token of the unit in `next`; units: of a chunk

  // chunk: the first to recompute, the chain's last; -1: none.
  __device__ Recompute(const Params& p, const Place& at, const LaneInputs<T>& in, int row,
                       int chunk)
      : in(in), next{}, low{}, high{}, chunk(chunk), units(p.stages * kSteps / kUnit) {
    const float* W = p.W + at.head * kColumns * kColumns;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int from = 4 * lane_t() + 2 * i, to = column_of(n, lane_g());
        w[n][i] = pack<__half>(W[from * kColumns + to], W[(from + 1) * kColumns + to]);
      }
    const int64_t state = (static_cast<int64_t>(at.head) * p.k_dim + at.row0 + row +
                           tile_row(0, lane_g())) * kColumns;
    checkpoint = static_cast<const uint2*>(p.checkpoints) +
                 ((at.first_chunk + chunk) * state_size(p) + state) / 4 + lane_t();
    t = chunk * units * kUnit;
    load_checkpoint(p);
    load(p, at);
  }
  __device__ void load_checkpoint(const Params& p) {
    load_ordered(low, checkpoint, chunk >= 0);
    load_ordered(high, checkpoint + 2 * kColumns / 4, chunk >= 0);
    checkpoint -= state_size(p) / 4;
    --chunk;
  }
  __device__ void load(const Params& p, const Place& at) {
    const bool valid = has_step(t, at);
    in.k.load(next.k, t, valid);
    in.v.load(next.v, t, valid);
    in.dy.load(next.dy, t, valid && p.dy != nullptr);
    in.f.load(next.f, t, valid);
  }
  // headroom: n such that the chunk's states are below 2^n, at least 0.
  __device__ void enter_chunk(const Params& p, int* headroom) {
    packed[0] = low.x, packed[1] = high.x, packed[2] = low.y, packed[3] = high.y;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 x = unpacked<__half>(packed[j]);
      h[j / 2][j % 2 * 2] = x.x, h[j / 2][j % 2 * 2 + 1] = x.y;
    }
    *headroom = max(1 + max(exponent(scale_of<__half>(low)), exponent(scale_of<__half>(high))), 0);
    load_checkpoint(p);
    // A load from DRAM takes longer than a unit's steps and would delay everything that shares its
    // scoreboard, so the next chunk's inputs are brought to L2 now.
    if (chunk >= 0) {
      asm volatile("prefetch.global.L2 [%0];" : : "l"(checkpoint));
      asm volatile("prefetch.global.L2 [%0];" : : "l"(checkpoint + 2 * kColumns / 4));
    }
    if (chunk >= -1) {
      // A step a lane; two lanes a step where a chunk has 16.
      const int step = threadIdx.x % 32 % static_cast<unsigned>(units * kUnit);
      const int t = (chunk + 1) * units * kUnit + step - lane_g();
      in.k.prefetch(t), in.v.prefetch(t), in.f.prefetch(t);
      if (p.dy != nullptr) in.dy.prefetch(t);
    }
  }
  // Starts unit u of the chunk.
  __device__ void enter(const Params& p, const Place& at, int u) {
    k = transposed(next.k), v = transposed(next.v), f = next.f;
    dy_scale = scale_of<T>(next.dy);
    dy = scaled<T>(next.dy, inverse(dy_scale));
    t += u + 1 < units ? kUnit : kUnit - 2 * units * kUnit;
    load(p, at);
#pragma unroll
    for (int e = 0; e < 4; ++e) dq[e] = 0.f;
  }
  // Step i of the unit. slot: shared-memory address of the lane's part of the step's slot.
  __device__ void step(int i, uint32_t slot) {
    const uint32_t mask = masks.pair(i);
    const float decay = __shfl_sync(kFullMask, __uint_as_float(f), 4 * i);
    Tile z;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) z[n][e] = 0.f;
      mma8<T>(z[n], k.x, k.y, (n ? v.y : v.x) & mask);
      mma16<__half>(z[n], packed, w[n][0], w[n][1]);
    }
    store_matrices(slot, packed);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      tanh_of<false>(z[n]);
#pragma unroll
      for (int e = 0; e < 4; ++e) h[n][e] = fmaf(decay, h[n][e] - z[n][e], z[n][e]);
    }
    pack_tile<__half>(packed, h);
    Packed packed_z;
    pack_tile<__half>(packed_z, z);
    store_words<kZOffset>(slot, packed_z);
    mma16<__half>(dq, packed, dy.x & masks.g[i], dy.y & masks.g[i]);
  }
  __device__ void end_unit() {
#pragma unroll
    for (int e = 0; e < 4; ++e) dq[e] *= dy_scale;
  }
};

}  // namespace m2rnn
