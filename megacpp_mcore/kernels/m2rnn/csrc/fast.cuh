// The kernels for 16-bit inputs: what forward and backward share.
//
// A warp has a tile of 16 rows. Thread 4 g + t holds columns 4 t .. 4 t + 3 of rows 2 g, 2 g + 1, in
// fp32: tile[n][2 r + i] is row 2 g + r, column 4 t + 2 n + i. Numbered so, a tile is both what
// m16n8k16 returns and, in fp16, what it takes. Of h W the diagonal of W is multiplied in fp32, the
// rest in fp16, h to 11 bits and W in two parts of 11. tanh is 1 - 2 / (1 + e^2x) to 2^-21. The
// state and all that is carried on are fp32.
//
// For sums over rows, columns and steps, tiles go through shared memory in the inputs' dtype T.
#pragma once

#include "common.cuh"

namespace m2rnn {

constexpr int kUnit = 8;             // steps between two barriers
constexpr int kTileRows = 16;
constexpr int kTileValues = kTileRows * kColumns;
constexpr int kTileBytes = kTileValues * 2;
constexpr unsigned kAll = 0xffffffffu;
using Tile = float[2][4];
using Packed = uint32_t[4];  // [2 n + r]: columns 4 t + 2 n, 4 t + 2 n + 1 of row 2 g + r

__device__ inline int lane_g() { return threadIdx.x % 32 / 4; }
__device__ inline int lane_t() { return threadIdx.x % 4; }

template <typename T>
__device__ uint32_t pack(float low, float high);
template <>
__device__ inline uint32_t pack<__half>(float low, float high) {
  const __half2 x = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&x);
}
template <>
__device__ inline uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&x);
}

template <typename T>
__device__ inline void pack_tile(Packed& packed, const Tile& x) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 2; ++r) packed[2 * n + r] = pack<T>(x[n][2 * r], x[n][2 * r + 1]);
}

template <typename T>
__device__ void mma16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Column of W that lane group g has in column tile n.
__device__ inline int column_of(int n, int g) { return 4 * (g / 2) + 2 * n + g % 2; }

// A tile in the inputs' dtype in shared memory: rows of two 16-byte chunks, kept apart so that
// neither `store_tile` nor any of the reads of eight chunks below meets a bank twice.
__device__ inline int chunk_offset(int row, int half) {
  const int low = row & 1, high = row >> 3;
  return ((row >> 1 & 3) | (low ^ high ^ half) << 2 | low << 3 | high << 4) * 16;
}
__device__ inline int own_offset() {
  return chunk_offset(2 * lane_g(), lane_t() / 2) + lane_t() % 2 * 8;
}
constexpr int kNextRow = 0xc0;  // own_offset() ^ kNextRow: the thread's other row

__device__ inline void store_tile(char* tile, int own, const Packed& x) {
  *reinterpret_cast<uint2*>(tile + own) = make_uint2(x[0], x[2]);
  *reinterpret_cast<uint2*>(tile + (own ^ kNextRow)) = make_uint2(x[1], x[3]);
}
__device__ inline void load_tile(Packed& x, const char* tile, int own) {
  const uint2 low = *reinterpret_cast<const uint2*>(tile + own);
  const uint2 high = *reinterpret_cast<const uint2*>(tile + (own ^ kNextRow));
  x[0] = low.x, x[1] = high.x, x[2] = low.y, x[3] = high.y;
}

// Where a lane points ldmatrix. Rows: the tile as a left operand whose rows g, g + 8 are the tile's
// 2 g, 2 g + 1. Columns: its transpose as a left operand. Halves: the tile as two right operands,
// of columns 0 - 7 and 8 - 15; read as columns are.
__device__ inline int rows_offset() {
  const int lane = threadIdx.x % 32;
  return chunk_offset(2 * (lane % 8) + (lane / 8 & 1), lane / 16);
}
__device__ inline int columns_offset() {
  const int lane = threadIdx.x % 32;
  return chunk_offset(lane % 8 + lane / 16 * 8, lane / 8 & 1);
}
__device__ inline int halves_offset() {
  const int lane = threadIdx.x % 32;
  return chunk_offset(lane % 16, lane / 16);
}
// from: an address in shared memory.
__device__ inline void load_rows(Packed& x, uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from));
}
__device__ inline void load_columns(Packed& x, uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from));
}
__device__ inline uint32_t shared_address(const void* x) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(x));
}

// A warp's inputs of a unit's steps: what is one value a row (k or q), and one a column (v or dy).
struct WarpInputs {
  float rows[kUnit][kTileRows], columns[kUnit][kColumns];
  float4 decay[kUnit];  // f, 1 - f, -2 (1 - f), .
};

// A tensor of a chain: its first token, and the elements from token to token.
template <typename T>
struct Source {
  const T* x;
  int64_t token;
};
template <typename T>
__device__ Source<T> rows_of(const void* x, const Place& at, int64_t batch, int64_t token,
                             int64_t head, int heads) {
  return {static_cast<const T*>(x) + at.batch * batch + at.start * token +
              (heads == 1 ? 0 : at.head * head) + at.row0, token};
}
template <typename T>
__device__ Source<T> q_of(const Problem& p, const Place& at) {
  return rows_of<T>(p.q, at, p.q_batch, p.q_token, p.q_head, p.q_heads);
}
template <typename T>
__device__ Source<T> k_of(const Problem& p, const Place& at) {
  return rows_of<T>(p.k, at, p.k_batch, p.k_token, p.k_head, p.k_heads);
}
template <typename T>
__device__ Source<T> v_of(const Problem& p, const Place& at) {
  return {static_cast<const T*>(p.v) + at.batch * p.v_batch + at.start * p.v_token +
              at.head * p.v_head, p.v_token};
}
// None without a gradient of y.
template <typename T>
__device__ Source<T> dy_of(const Problem& p, const Place& at) {
  if (p.dy == nullptr) return {nullptr, 0};
  const int64_t token = static_cast<int64_t>(p.heads) * kColumns;
  return {static_cast<const T*>(p.dy) + at.token(p, 0) * token + at.head * kColumns, token};
}

// A unit's inputs on their way through registers, and where the next lie. Steps behind the chain's
// last have f = 1 and zeros: they leave state and gradients as they are.
template <typename T>
struct WarpStage {
  const T *rows_at, *columns_at;
  const float* decay_at;
  int64_t rows_step, columns_step, decay_step;  // from unit to unit
  int t, length;                                // the lane's step
  bool has_columns;
  uint2 rows, columns;
  float f;

  // row: the tile's first. t0: the first unit's first step.
  __device__ WarpStage(const Problem& p, const Place& at, const Source<T>& of_rows, int row,
                       const Source<T>& of_columns, int t0)
      : rows_step(of_rows.token * kUnit), columns_step(of_columns.token * kUnit),
        decay_step(p.f_token * kUnit), length(at.length), has_columns(of_columns.x != nullptr) {
    const int lane = threadIdx.x % 32, quad = lane % 4 * 4;
    t = t0 + lane / 4;
    rows_at = of_rows.x + t * of_rows.token + row + quad;
    columns_at = of_columns.x + t * of_columns.token + quad;
    decay_at = p.f + at.batch * p.f_batch + (at.start + t) * p.f_token + at.head * p.f_head;
  }
  __device__ void load() {
    const bool valid = static_cast<unsigned>(t) < static_cast<unsigned>(length);
    rows = load_unit(rows_at, valid);
    columns = load_unit(columns_at, valid && has_columns);
    f = valid ? __ldg(decay_at) : 1.f;
  }
  __device__ void move(int units) {
    rows_at += units * rows_step;
    columns_at += units * columns_step;
    decay_at += units * decay_step;
    t += units * kUnit;
  }
  __device__ void store(WarpInputs& to, float scale) const {
    const int lane = threadIdx.x % 32, quad = lane % 4 * 4;
    const T* type = nullptr;
    const float4 x = widen(rows, type);
    __syncwarp();
    *reinterpret_cast<float4*>(&to.rows[lane / 4][quad]) =
        make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale);
    *reinterpret_cast<float4*>(&to.columns[lane / 4][quad]) = widen(columns, type);
    if (lane % 4 == 0) {
      const float rest = 1.f - f;
      to.decay[lane / 4] = make_float4(f, rest, -2.f * rest, 0.f);
    }
    __syncwarp();
  }
};

// Right operands of a unit's steps, two values of one step a lane and, 8 elements on, two more.
template <typename T>
__device__ inline void load_pairs(uint32_t (&to)[2], const T* from, bool valid) {
  const auto* pair = reinterpret_cast<const uint32_t*>(from);
  to[0] = valid ? __ldg(pair) : 0;
  to[1] = valid ? __ldg(pair + 4) : 0;
}

// W, times 2 log2(e), as the right operand of h W: its diagonal apart, in fp32, the rest in two
// parts.
struct TileWeight {
  uint32_t high[2][2], low[2][2];
  float diagonal[4];

  __device__ explicit TileWeight(const float* W) {
    const int g = lane_g(), t = lane_t();
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int from = 4 * t + 2 * i, to = column_of(n, g);
        const float x = from == to ? 0.f : kTwoLog2E * W[from * kColumns + to];
        const float y = from + 1 == to ? 0.f : kTwoLog2E * W[(from + 1) * kColumns + to];
        high[n][i] = pack<__half>(x, y);
        const float2 rounded = __half22float2(*reinterpret_cast<const __half2*>(&high[n][i]));
        low[n][i] = pack<__half>(x - rounded.x, y - rounded.y);
      }
#pragma unroll
    for (int j = 0; j < 4; ++j) diagonal[j] = kTwoLog2E * W[(4 * t + j) * (kColumns + 1)];
  }
  // c += h W in column tile n, but for the diagonal.
  __device__ void multiply(float (&c)[4], const Packed& h, int n) const {
    mma16<__half>(c, h, low[n][0], low[n][1]);
    mma16<__half>(c, h, high[n][0], high[n][1]);
  }
};

// k v^T of the thread's elements. Made one step ahead, it costs the chain of steps nothing.
struct Outer {
  Tile x;
  float4 decay;

  __device__ void load(const WarpInputs& in, int i) {
    float v[4];
    load4(v, &in.columns[i][4 * lane_t()]);
    const float2 k = *reinterpret_cast<const float2*>(&in.rows[i][2 * lane_g()]);
    decay = in.decay[i];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] = (e < 2 ? k.x : k.y) * v[2 * n + e % 2];
  }
};

__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// h <- f h + (1 - f) z, z = tanh(h W + k v^T) = 1 - 2 r; packed is h in fp16.
__device__ inline void tile_step(Tile& h, Tile& r, Packed& packed, const TileWeight& w,
                                 const Outer& given) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      r[n][e] = fmaf(h[n][e], w.diagonal[2 * n + e % 2], given.x[n][e]);
    w.multiply(r[n], packed, n);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      r[n][e] = reciprocal(1.f + exp2_of(r[n][e]));
      h[n][e] = fmaf(given.decay.z, r[n][e], fmaf(given.decay.x, h[n][e], given.decay.y));
    }
  pack_tile<__half>(packed, h);
}

// Offset of a thread's first row in a (K, V) state; the second row is kColumns on.
__device__ inline int tile_state_offset(int row) {
  return (row + 2 * lane_g()) * kColumns + 4 * lane_t();
}
__device__ inline void load_state(Tile& h, const float* state) {
  float low[4], high[4];
  load4(low, state);
  load4(high, state + kColumns);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) h[n][i] = low[2 * n + i], h[n][2 + i] = high[2 * n + i];
}
__device__ inline void store_state(float* state, const Tile& h) {
  const float low[4] = {h[0][0], h[0][1], h[1][0], h[1][1]};
  const float high[4] = {h[0][2], h[0][3], h[1][2], h[1][3]};
  store4(state, low);
  store4(state + kColumns, high);
}

}  // namespace m2rnn
