// The role of fast_backward.cuh that makes the gradients that are sums.
#pragma once

#include "fast_replay.cuh"

namespace m2rnn {

// The right operands of a unit: lane 4 g + t has those of step g, and shows them at it only.
template <typename T>
struct Operands {
  const T *dy_at, *v_at, *k_at;
  int64_t dy_step, v_step, k_step;  // from unit to unit
  uint32_t dy[2], v[2], k[kBlockTiles][2];

  __device__ Operands(const Problem& p, const Place& at, int t) {
    const Source<T> of_dy = dy_of<T>(p, at), of_v = v_of<T>(p, at), of_k = k_of<T>(p, at);
    dy_at = of_dy.x + t * of_dy.token + 2 * lane_t(), dy_step = of_dy.token * kUnit;
    v_at = of_v.x + t * of_v.token + 2 * lane_t(), v_step = of_v.token * kUnit;
    k_at = of_k.x + t * of_k.token + 2 * lane_t(), k_step = of_k.token * kUnit;
  }
  __device__ void load(bool valid, bool has_dy) {
    load_pairs(dy, dy_at, valid && has_dy);
    load_pairs(v, v_at, valid);
#pragma unroll
    for (int tile = 0; tile < kBlockTiles; ++tile)
      load_pairs(k[tile], k_at + tile * kTileRows, valid);
  }
  __device__ void move_back() { dy_at -= dy_step, v_at -= v_step, k_at -= k_step; }
};

// Every second step of each unit, those of the warp's own parity. A product's columns are steps:
// q's and k's gradients come as rows by steps, v's as columns by steps.
template <typename T>
__device__ void sums(FastBackwardShared& shared, const Problem& p, const Place& at, int parity) {
  constexpr int kStepBytes = kBlockTiles * kTileBytes, kToA = offsetof(UnitTiles, a);
  const Periods periods(p, at);
  const int g = lane_g(), t = lane_t(), late = periods.units + 2;
  const uint32_t tiles = shared_address(shared.units) + parity * kStepBytes;
  const uint32_t rows = rows_offset(), columns = columns_offset();
  int t0 = periods.last_unit(), kept = 0;
  Operands<T> operands(p, at, t0 + g);
  // What the lane writes: step 2 t + parity of a unit, rows 2 g, 2 g + 1, columns g, g + 8.
  int64_t token = at.token(p, t0 + 2 * t + parity) * p.heads + at.head;
  T* dq = static_cast<T*>(p.dq_parts) + token * p.k_dim + at.row0 + 2 * g;
  T* dk = static_cast<T*>(p.dk_parts) + token * p.k_dim + at.row0 + 2 * g;
  token += static_cast<int64_t>(at.group) * p.batch * p.tokens * p.heads;
  float* dv = p.dv_parts + token * kColumns + g;
  float* df = p.df_parts + token;
  const int64_t step = static_cast<int64_t>(p.heads) * kUnit;  // from unit to unit

  float dW[2][4] = {};
  Packed behind[kBlockTiles];  // the state behind the unit, for its last step's q
  for (int period = 0; period < periods.count; ++period) {
    if (period >= late - 1 && t0 >= 0) {
      if (period >= late && t0 < at.length) {
        const uint32_t unit = tiles + kept * static_cast<uint32_t>(sizeof(UnitTiles));
        if (t0 + kUnit >= at.length)
#pragma unroll
          for (int tile = 0; tile < kBlockTiles; ++tile)
            load_rows(behind[tile], shared_address(shared.last[tile]) + rows);
        float q[kBlockTiles][4] = {}, k[kBlockTiles][4] = {}, v[kBlockTiles][4] = {};
        float sum[2][4] = {};
#pragma unroll
        for (int j = kUnit / 2 - 1; j >= 0; --j) {
          const bool own = g == 2 * j + parity;
#pragma unroll
          for (int tile = 0; tile < kBlockTiles; ++tile) {
            const uint32_t before = unit + 2 * j * kStepBytes + tile * kTileBytes;
            Packed x, a, h;
            if (j == kUnit / 2 - 1 && parity == 1) {
#pragma unroll
              for (int e = 0; e < 4; ++e) x[e] = behind[tile][e];
            } else {
              load_rows(x, before + kStepBytes + rows);
            }
            load_rows(a, before + kToA + rows);
            mma16<T>(q[tile], x, own ? operands.dy[0] : 0, own ? operands.dy[1] : 0);
            mma16<T>(k[tile], a, own ? operands.v[0] : 0, own ? operands.v[1] : 0);
            load_columns(h, before + columns);
            load_columns(a, before + kToA + columns);
            mma16<T>(v[tile], a, own ? operands.k[tile][0] : 0, own ? operands.k[tile][1] : 0);
            mma16<T>(sum[0], h, a[0], a[2]);
            mma16<T>(sum[1], h, a[1], a[3]);
          }
        }
#pragma unroll
        for (int tile = 0; tile < kBlockTiles; ++tile)
          load_rows(behind[tile], unit - parity * kStepBytes + tile * kTileBytes + rows);
        // A tensor core cuts its sums: few terms each, then additions that round.
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) dW[n][e] += sum[n][e];

        if (t0 + 2 * t + parity < at.length) {
#pragma unroll
          for (int c = 0; c < 2; ++c)
            dv[8 * c] = parity ? v[0][2 * c + 1] + v[1][2 * c + 1] : v[0][2 * c] + v[1][2 * c];
#pragma unroll
          for (int tile = 0; tile < kBlockTiles; ++tile) {
            const float(&x)[4] = q[tile], (&y)[4] = k[tile];
            *reinterpret_cast<uint32_t*>(dq + tile * kTileRows) =
                pack<T>(parity ? x[1] : x[0], parity ? x[3] : x[2]);
            *reinterpret_cast<uint32_t*>(dk + tile * kTileRows) =
                pack<T>(parity ? y[1] : y[0], parity ? y[3] : y[2]);
          }
          if (g == 0) {
            const float* parts = shared.df[(period + 1) % 2][2 * t + parity];
            *df = parts[0] + parts[1];
          }
        }
      }
      // In the period before the first, the operands alone.
      if (period >= late) {
        t0 -= kUnit;
        dq -= step * p.k_dim, dk -= step * p.k_dim, dv -= step * kColumns, df -= step;
        operands.move_back();
        if (++kept == kUnitsKept) kept = 0;
      }
      const int t = t0 + g;
      operands.load(g % 2 == parity && t >= 0 && t < at.length, p.dy != nullptr);
    }
    __syncthreads();
  }
  // The block's dW: the two warps', through memory that nobody reads any more.
  float* other = shared.starts[0][0] + threadIdx.x % 32 * 8;
  if (parity == 0) store4(other, dW[0]), store4(other + 4, dW[1]);
  __syncthreads();
  if (parity == 1) {
    // Blocks of a head: its chains', in order, each with its groups of rows.
    const int64_t block = static_cast<int64_t>(at.chain) * at.groups + at.group;
    float* out = p.dW_parts + (block * p.heads + at.head) * kColumns * kColumns;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        out[(g + e / 2 * 8) * kColumns + 8 * n + 2 * t + e % 2] = other[4 * n + e] + dW[n][e];
  }
}

}  // namespace m2rnn
