// The role of fast_backward.cuh that carries the gradient of the state back.
#pragma once

#include "backward.cuh"
#include "fast_replay.cuh"

namespace m2rnn {

// W^T as the right operand of a W^T, to the 11 bits that a tensor core reads of it. It cuts what a
// has beyond these, which takes 0.72 of 2^-11 off it on average: that is given back here.
struct TransposedWeight {
  float b[2][2][2];

  __device__ explicit TransposedWeight(const float* W) {
    constexpr float kUncut = 1.f + 0.72135f / 2048.f;
    const int g = lane_g(), t = lane_t();
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float x = kUncut * W[column_of(n, g) * kColumns + 4 * t + 2 * j + i];
          uint32_t bits;
          asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
          b[j][n][i] = __uint_as_float(bits);
        }
  }
};

// What a step backwards takes from shared memory, read one step ahead.
struct Made {
  Packed before, z;
  float dy[4];
  float2 q, decay;

  __device__ void load(const UnitTiles& from, const WarpInputs& in, int i, int tile, int own) {
    load_tile(z, from.a[i][tile], own);
    load_tile(before, from.before[i][tile], own);
    load4(dy, &in.columns[i][4 * lane_t()]);
    q = *reinterpret_cast<const float2*>(&in.rows[i][2 * lane_g()]);
    decay = *reinterpret_cast<const float2*>(&in.decay[i]);
  }
};

__device__ inline float2 widen_pair(uint32_t x, const __half*) {
  return __half22float2(*reinterpret_cast<__half2*>(&x));
}
__device__ inline float2 widen_pair(uint32_t x, const __nv_bfloat16*) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}

// One step backwards; leaves a, the gradient of tanh's argument, packed, and returns the thread's
// share of df.
template <typename T, bool kClamp>
__device__ inline float undo_step(const Made& made, const TransposedWeight& w, float clamp,
                                  Tile& dh, Packed& packed) {
  float df = 0.f;
  Tile a;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 z = widen_pair(made.z[2 * n + r], static_cast<const __half*>(nullptr));
      const float2 before = widen_pair(made.before[2 * n + r], static_cast<const T*>(nullptr));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int e = 2 * r + i;
        float x = dh[n][e];
        // A NaN stays one: it compares false with either limit.
        if constexpr (kClamp) x = x > clamp ? clamp : x < -clamp ? -clamp : x;
        const float own_z = i ? z.y : z.x;
        const float gradient = fmaf(r ? made.q.y : made.q.x, made.dy[2 * n + i], x);
        a[n][e] = gradient * (made.decay.y * fmaf(-own_z, own_z, 1.f));
        df = fmaf(gradient, (i ? before.y : before.x) - own_z, df);
        dh[n][e] = made.decay.x * gradient;
      }
    }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float operand[4] = {a[j][0], a[j][2], a[j][1], a[j][3]};
#pragma unroll
    for (int n = 0; n < 2; ++n) mma(dh[n], operand, w.b[j][n]);
  }
  pack_tile<T>(packed, a);
  return df;
}

template <typename T, bool kClamp>
__device__ void undo(FastBackwardShared& shared, const Problem& p, const Place& at, int tile) {
  const Periods periods(p, at);
  const TransposedWeight w(p.W + at.head * kColumns * kColumns);
  const int64_t state = at.chain * state_size(p) +
                        (static_cast<int64_t>(at.head) * p.k_dim + at.row0) * kColumns +
                        tile_state_offset(tile * kTileRows);
  WarpInputs& in = shared.in[2 * kBlockTiles + tile];
  const int own = own_offset(), late = periods.units + 1;
  int t0 = periods.last_unit(), kept = 0;
  WarpStage<T> next(p, at, q_of<T>(p, at), tile * kTileRows, dy_of<T>(p, at), t0);
  next.load();
  Tile dh = {};
  if (p.d_final) load_state(dh, p.d_final + state);
  for (int period = 0; period < periods.count; ++period) {
    if (period >= late && t0 >= 0) {
      next.store(in, 1.f);
      next.move(-1);
      next.load();
      if (t0 < at.length) {
        UnitTiles& tiles = shared.units[kept];
        Made made;
        made.load(tiles, in, kUnit - 1, tile, own);
#pragma unroll kUnrolledUndo
        for (int i0 = kUnit - 4; i0 >= 0; i0 -= 4) {
          float df[4];
#pragma unroll
          for (int j = 3; j >= 0; --j) {
            const Made now = made;
            made.load(tiles, in, (i0 + j + kUnit - 1) % kUnit, tile, own);
            Packed a;
            df[j] = undo_step<T, kClamp>(now, w, p.clamp, dh, a);
            store_tile(tiles.a[i0 + j][tile], own, a);
          }
          float sum = sum_of_own_step(df);
#pragma unroll
          for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(kAll, sum, lanes);
          if (threadIdx.x % 32 < 4) shared.df[period % 2][i0 + threadIdx.x % 4][tile] = sum;
        }
      }
      t0 -= kUnit;
      if (++kept == kUnitsKept) kept = 0;
    }
    __syncthreads();
  }
  store_state(p.d_initial + state, dh);
}

}  // namespace m2rnn
