// The role of fast_backward.cuh that makes the gradients that are sums.
#pragma once

#include "fast_replay.cuh"

namespace m2rnn {

// The right operands of a unit: lane 4 g + t has those of step g, and shows them at it only.
struct Operands {
  uint32_t dy[2], v[2], k[2];
};

// The sums of a tile. A product's columns are steps: q's and k's gradients come as rows by steps,
// v's as columns by steps.
template <typename T>
__device__ void sums(FastBackwardShared& shared, const Problem& p, const Place& at, int tile) {
  constexpr int kStepBytes = kBlockTiles * kTileBytes, kToA = offsetof(UnitTiles, a);
  const Periods periods(p, at);
  const int g = lane_g(), t = lane_t(), late = periods.units + 2;
  const uint32_t tiles = shared_address(shared.units) + tile * kTileBytes;
  const uint32_t rows = rows_offset(), columns = columns_offset(), halves = halves_offset();
  int t0 = periods.last_unit(), kept = 0;
  const Source<T> of_dy = dy_of<T>(p, at), of_v = v_of<T>(p, at), of_k = k_of<T>(p, at);
  const T* dy_at = of_dy.x + (t0 + g) * of_dy.token + 2 * t;
  const T* v_at = of_v.x + (t0 + g) * of_v.token + 2 * t;
  const T* k_at = of_k.x + (t0 + g) * of_k.token + tile * kTileRows + 2 * t;
  // What the lane writes: steps 2 t, 2 t + 1 of a unit, rows 2 g, 2 g + 1, columns g, g + 8.
  int64_t token = at.token(p, t0 + 2 * t) * p.heads + at.head;
  int64_t row = token * p.k_dim + at.row0 + tile * kTileRows + 2 * g;
  token += static_cast<int64_t>(at.group) * p.batch * p.tokens * p.heads;
  const int64_t row_step = static_cast<int64_t>(p.heads) * p.k_dim;

  float dW[2][4] = {};  // its transpose
  Packed behind = {};  // the state behind a step, for its q
  Operands operands;
  for (int period = 0; period < periods.count; ++period) {
    if (period >= late - 1 && t0 >= 0) {
      if (period >= late && t0 < at.length) {
        const uint32_t unit = tiles + kept * static_cast<uint32_t>(sizeof(UnitTiles));
        if (t0 + kUnit >= at.length) load_rows(behind, shared_address(shared.last[tile]) + rows);
        float q[4] = {}, k[4] = {}, v[4] = {}, sum[2][4] = {};
#pragma unroll kUnrolledSums
        for (int i = kUnit - 1; i >= 0; --i) {
          const bool own = g == i;
          const uint32_t before = unit + i * kStepBytes;
          Packed a, h;
          mma16<T>(q, behind, own ? operands.dy[0] : 0, own ? operands.dy[1] : 0);
          load_rows(behind, before + rows);
          load_rows(a, before + kToA + rows);
          mma16<T>(k, a, own ? operands.v[0] : 0, own ? operands.v[1] : 0);
          load_columns(h, before + halves);
          load_columns(a, before + kToA + columns);
          mma16<T>(v, a, own ? operands.k[0] : 0, own ? operands.k[1] : 0);
          mma16<T>(sum[0], a, h[0], h[1]);
          mma16<T>(sum[1], a, h[2], h[3]);
        }
        // A tensor core cuts its sums: few terms each, then additions that round.
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) dW[n][e] += sum[n][e];

#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (t0 + 2 * t + j >= at.length) continue;
          const int64_t to = row + j * row_step;
          *reinterpret_cast<uint32_t*>(static_cast<T*>(p.dq_parts) + to) = pack<T>(q[j], q[2 + j]);
          *reinterpret_cast<uint32_t*>(static_cast<T*>(p.dk_parts) + to) = pack<T>(k[j], k[2 + j]);
        }
        // Both tiles' v and f.
        float* const other = shared.dv[threadIdx.x % 32];
        if (tile == 1) store4(other, v);
        asm volatile("bar.sync 1, 64;" : : : "memory");
        if (tile == 0) {
          float more[4];
          load4(more, other);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            if (t0 + 2 * t + j >= at.length) continue;
            const int64_t to = token + j * p.heads;
            p.dv_parts[to * kColumns + g] = v[j] + more[j];
            p.dv_parts[to * kColumns + g + 8] = v[2 + j] + more[2 + j];
            if (g == 0) {
              const float* df = shared.df[(period + 1) % 2][2 * t + j];
              p.df_parts[to] = df[0] + df[1];
            }
          }
        }
      }
      // In the period before the first, the operands alone.
      if (period >= late) {
        t0 -= kUnit;
        row -= kUnit * row_step;
        token -= kUnit * p.heads;
        dy_at -= kUnit * of_dy.token, v_at -= kUnit * of_v.token, k_at -= kUnit * of_k.token;
        if (++kept == kUnitsKept) kept = 0;
      }
      const bool valid = static_cast<unsigned>(t0 + g) < static_cast<unsigned>(at.length);
      load_pairs(operands.dy, dy_at, valid && p.dy != nullptr);
      load_pairs(operands.v, v_at, valid);
      load_pairs(operands.k, k_at, valid);
    }
    __syncthreads();
  }
  // The block's dW: the two warps', through memory that nobody reads any more.
  float* other = shared.starts[0][0] + threadIdx.x % 32 * 8;
  if (tile == 1) store4(other, dW[0]), store4(other + 4, dW[1]);
  __syncthreads();
  if (tile == 0) {
    // Blocks of a head: its chains', in order, each with its groups of rows.
    const int64_t block = static_cast<int64_t>(at.chain) * at.groups + at.group;
    float* out = p.dW_parts + (block * p.heads + at.head) * kColumns * kColumns;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        out[(8 * n + 2 * t + e % 2) * kColumns + g + e / 2 * 8] = dW[n][e] + other[4 * n + e];
  }
}

}  // namespace m2rnn
