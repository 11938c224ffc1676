// What fast_backward.cuh does forward: the states of a chunk, made again from its checkpoint.
#pragma once

#include "fast.cuh"

namespace m2rnn {

// What is kept of a step of a warp's tile, in fp16: of the state h before it four 8 x 8 matrices,
// row by row; and z, what tanh returned, each lane's own elements.
constexpr int kZ = 512, kSlotBytes = 2 * kZ;
struct Slot {
  uint4 h[32], z[32];
};

// Row of a tile that lane group g has as row g + 8 r of the products: so lane t has four in a row.
__device__ inline int row_of(int r, int g) { return column_of(r, g); }

// Loads that stay where they are: the compiler moves others close to their use. Where not valid, x
// is left as it is.
__device__ inline void load_here(uint32_t& x, const void* from, bool valid) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.nc.b32 %0, [%1]; }"
               : "+r"(x)
               : "l"(from), "r"(static_cast<uint32_t>(valid)));
}
__device__ inline void load_here(uint2& x, const void* from, bool valid) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.nc.v2.b32 {%0, %1}, [%2]; }"
               : "+r"(x.x), "+r"(x.y)
               : "l"(from), "r"(static_cast<uint32_t>(valid)));
}
// One of a chain's inputs as thread 4 g + t reads it: of a unit's step g, elements 4 t .. 4 t + 3,
// or the one that there is.
struct Input {
  const char* first;  // of the chain's first unit
  int token;          // bytes

  template <typename X>
  __device__ Input(const X* x, int64_t token, int element)
      : first(reinterpret_cast<const char*>(x + (lane_g() * token + element))),
        token(static_cast<int>(token) * static_cast<int>(sizeof(X))) {}
  // t: the unit's first token. (The compiler would make it a product of 64-bit numbers.)
  __device__ const void* at(int t) const {
    const auto from = reinterpret_cast<uint64_t>(first);
    uint64_t to;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(to) : "r"(t), "r"(token), "l"(from));
    return reinterpret_cast<const void*>(to);
  }
  template <typename X>
  __device__ void load(X& x, int t, bool valid) const {
    load_here(x, at(t), valid);
  }
  // To the second cache.
  __device__ void prefetch(int t) const {
    asm volatile("prefetch.global.L2 [%0];" : : "l"(at(t)));
  }
};
// rows: of q and k, the warp's first.
template <typename T>
struct LaneInputs {
  Input q, k, v, dy, f;

  __device__ LaneInputs(const Problem& p, const Place& at, int rows)
      : q(q_of<T>(p, at).x, p.q_token, rows + 4 * lane_t()),
        k(k_of<T>(p, at).x, p.k_token, rows + 4 * lane_t()),
        v(v_of<T>(p, at).x, p.v_token, 4 * lane_t()),
        dy(dy_of<T>(p, at).x, p.heads * kColumns, 4 * lane_t()),
        f(p.f + at.batch * p.f_batch + at.start * p.f_token + at.head * p.f_head, p.f_token, 0) {}
};
// Has the chain a lane's step of the unit whose first is t?
__device__ inline bool has_step(int t, const Place& at) {
  const int step = t + lane_g() - at.first;
  return static_cast<unsigned>(step) < static_cast<unsigned>(at.length - at.first);
}

// All of `threads` wait for each other.
__device__ inline void meet(int number, int threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(number), "r"(threads) : "memory");
}
// As `meet`, but this thread does not wait.
__device__ inline void pass(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" : : "r"(number), "r"(threads) : "memory");
}
// Where a lane's rows of its step of the chain's first unit lie in dq_parts and dk_parts.
__device__ inline int64_t rows_place(const Problem& p, const Place& at, int row) {
  return (at.token(p, lane_g()) * p.heads + at.head) * p.k_dim + at.row0 + row + 4 * lane_t();
}
// Rows (or columns) by steps, from a product, as thread 4 g + t stores them: four of step g.
template <typename T>
__device__ void store_steps(T* to, const float (&x)[4], bool valid) {
  const uint32_t low = transposed(pack<T>(x[0], x[1])), high = transposed(pack<T>(x[2], x[3]));
  if (valid) *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
}

// The unit in which fp16 holds a warp's elements: the power of two that is at most their greatest,
// which is below two of it then. What is 0, infinite or nearly so has 2^-126 or 2^126. NaNs do not
// count.
template <typename T>
__device__ float unit_of(uint2 x) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  constexpr uint32_t kSigns = 0x80008000u, kLeast = kHalf ? 0x00010001u : 0x00800080u,
                     kMost = kHalf ? 0x7bffffffu : 0x7effffffu;
  const uint32_t pair = __vimax3_u16x2(x.x & ~kSigns, x.y & ~kSigns, kLeast);
  const uint32_t both = min(__vmaxu2(pair, pair >> 16 | pair << 16), kMost);
  const float greatest = unpacked<T>(__reduce_max_sync(kAll, both)).y;
  return __uint_as_float(__float_as_uint(greatest) & 0x7f800000u);
}
__device__ inline float inverse(float unit) {
  return __uint_as_float(0x7f000000u - __float_as_uint(unit));
}
__device__ inline int exponent(float unit) { return (__float_as_uint(unit) >> 23) - 127; }
template <typename T>
__device__ uint32_t in_units(uint32_t x, float inverse) {
  const float2 pair = unpacked<T>(x);
  return pack<__half>(pair.x * inverse, pair.y * inverse);
}
template <typename T>
__device__ uint2 in_units(uint2 x, float inverse) {
  return make_uint2(in_units<T>(x.x, inverse), in_units<T>(x.y, inverse));
}
__device__ inline uint2 transposed(uint2 x) {
  return make_uint2(transposed(x.x), transposed(x.y));
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

// Forwards, from a chunk's checkpoint to its end, the last chunk first; one unit's inputs ahead.
// Steps behind the chain's last are made of what was loaded before: they do no harm. tanh is the
// GPU's own, also where forward was told to be exact: what it is off by lasts to the next
// checkpoint, and z is kept in fp16 here.
template <typename T>
struct Remake {
  uint32_t w[2][2];
  const StepMasks masks;
  const LaneInputs<T>& in;
  Tile h;
  Packed packed;  // h in fp16
  float dq[4];    // of the unit
  struct {
    uint2 k, v, dy;
    uint32_t f;
  } next;
  uint2 k, v, dy;
  uint32_t f;
  float dy_unit;

  const uint2* checkpoint;
  uint2 low, high;     // of the chunk that comes
  int t, chunk, units;  // t: first token of the unit that is sent for; units: of a chunk

  // chunk: the first to be made, none if it is -1.
  __device__ Remake(const Problem& p, const Place& at, const LaneInputs<T>& in, int row, int chunk)
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
                           row_of(0, lane_g())) * kColumns;
    checkpoint = static_cast<const uint2*>(p.checkpoints) +
                 ((at.first_chunk + chunk) * state_size(p) + state) / 4 + lane_t();
    t = chunk * units * kUnit;
    load_checkpoint(p);
    load(p, at);
  }
  __device__ void load_checkpoint(const Problem& p) {
    load_here(low, checkpoint, chunk >= 0);
    load_here(high, checkpoint + 2 * kColumns / 4, chunk >= 0);
    checkpoint -= state_size(p) / 4;
    --chunk;
  }
  __device__ void load(const Problem& p, const Place& at) {
    const bool valid = has_step(t, at);
    in.k.load(next.k, t, valid);
    in.v.load(next.v, t, valid);
    in.dy.load(next.dy, t, valid && p.dy != nullptr);
    in.f.load(next.f, t, valid);
  }
  // reserve: for how many bits the chunk's states are above 1, which they do not leave.
  __device__ void enter_chunk(const Problem& p, int* reserve) {
    packed[0] = low.x, packed[1] = high.x, packed[2] = low.y, packed[3] = high.y;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 x = unpacked<__half>(packed[j]);
      h[j / 2][j % 2 * 2] = x.x, h[j / 2][j % 2 * 2 + 1] = x.y;
    }
    *reserve = max(1 + max(exponent(unit_of<__half>(low)), exponent(unit_of<__half>(high))), 0);
    load_checkpoint(p);
    // From memory a load takes longer than a unit's steps, and so, then, does all else that is
    // waited for with its scoreboard.
    if (chunk >= 0) {
      asm volatile("prefetch.global.L2 [%0];" : : "l"(checkpoint));
      asm volatile("prefetch.global.L2 [%0];" : : "l"(checkpoint + 2 * kColumns / 4));
    }
    if (chunk >= -1) {
      // A step a lane; two lanes, where there are fewer.
      const int step = threadIdx.x % 32 % static_cast<unsigned>(units * kUnit);
      const int t = (chunk + 1) * units * kUnit + step - lane_g();
      in.k.prefetch(t), in.v.prefetch(t), in.f.prefetch(t);
      if (p.dy != nullptr) in.dy.prefetch(t);
    }
  }
  // Unit u of the chunk.
  __device__ void enter(const Problem& p, const Place& at, int u) {
    k = transposed(next.k), v = transposed(next.v), f = next.f;
    dy_unit = unit_of<T>(next.dy);
    dy = in_units<T>(next.dy, inverse(dy_unit));
    t += u + 1 < units ? kUnit : kUnit - 2 * units * kUnit;
    load(p, at);
#pragma unroll
    for (int e = 0; e < 4; ++e) dq[e] = 0.f;
  }
  // Step i of the unit; slot: where the lane's elements of the step's are in shared memory.
  __device__ void step(int i, uint32_t slot) {
    const uint32_t mask = masks.pair(i);
    const float decay = __shfl_sync(kAll, __uint_as_float(f), 4 * i);
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
    store_words<kZ>(slot, packed_z);
    mma16<__half>(dq, packed, dy.x & masks.g[i], dy.y & masks.g[i]);
  }
  __device__ void end_unit() {
#pragma unroll
    for (int e = 0; e < 4; ++e) dq[e] *= dy_unit;
  }
};

}  // namespace m2rnn
