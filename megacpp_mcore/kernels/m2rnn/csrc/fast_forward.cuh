// Forward for 16-bit inputs and K = 64: a block has a whole head, so y is whole, too. Four warps
// run the recurrence, a tile each; four more sum y, a unit behind them.
#pragma once

#include "fast.cuh"

namespace m2rnn {

constexpr int kForwardRows = 64;
constexpr int kForwardTiles = kForwardRows / kTileRows;
constexpr int kForwardThreads = 2 * kForwardTiles * 32;

struct FastForwardShared {
  alignas(16) char h[2][kUnit][kForwardTiles][kTileBytes];  // behind each step
  WarpInputs in[kForwardTiles];
};

template <typename T>
__device__ void forward_recurrence(FastForwardShared& shared, const Problem& p, const Place& at) {
  const int warp = threadIdx.x / 32, own = own_offset();
  const int64_t state = static_cast<int64_t>(at.head) * kForwardRows * kColumns +
                        tile_state_offset(warp * kTileRows);
  const TileWeight w(p.W + at.head * kColumns * kColumns);
  WarpInputs& in = shared.in[warp];
  WarpStage<T> next(p, at, k_of<T>(p, at), warp * kTileRows, v_of<T>(p, at), 0);
  next.load();
  Tile h = {}, r;
  Packed packed;
  if (p.initial) load_state(h, p.initial + at.chain * state_size(p) + state);
  pack_tile<__half>(packed, h);
  const int units = Place::ceil_div(at.length, kUnit), units_a_chunk = 2 * p.stages;
  int in_chunk = 0;
  float* checkpoint = p.checkpoints + at.first_chunk * state_size(p) + state;
  for (int unit = 0; unit < units; ++unit) {
    next.store(in, kTwoLog2E);
    next.move(1);
    next.load();
    if (in_chunk == 0) {
      store_state(checkpoint, h);
      checkpoint += state_size(p);
    }
    if (++in_chunk == units_a_chunk) in_chunk = 0;
    Outer given;
    given.load(in, 0);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      const Outer now = given;
      given.load(in, (i + 1) % kUnit);
      tile_step(h, r, packed, w, now);
      Packed out;
      pack_tile<T>(out, h);
      store_tile(shared.h[unit % 2][i][warp], own, out);
    }
    __syncthreads();
  }
  store_state(p.final_state + at.chain * state_size(p) + state, h);
}

// y = q^T h of a unit's steps, columns by steps: q of a step is in that step's column of the
// right operand, and zeros in the others. A warp has two steps.
template <typename T>
__device__ void forward_sums(FastForwardShared& shared, const Problem& p, const Place& at) {
  constexpr int kStepBytes = kForwardTiles * kTileBytes;
  const int warp = threadIdx.x / 32 % kForwardTiles, g = lane_g(), t = lane_t();
  const bool has_step = g / 2 == warp;
  const Source<T> source = q_of<T>(p, at);
  const T* from = source.x + g * source.token + 2 * t;
  const int64_t token = static_cast<int64_t>(p.heads) * kColumns;
  T* to = static_cast<T*>(p.y) + at.token(p, 2 * warp) * token + at.head * kColumns + g;
  uint32_t h_at = shared_address(shared.h) + 2 * warp * kStepBytes + columns_offset();
  uint32_t q[kForwardTiles][2], next[kForwardTiles][2];
  const auto load = [&](int left) {
#pragma unroll
    for (int tile = 0; tile < kForwardTiles; ++tile)
      load_pairs(next[tile], from + tile * kTileRows, has_step && g < left);
  };
  int left = at.length;
  load(left);
  for (int flip = kUnit * kStepBytes; left > 0; left -= kUnit, flip = -flip) {
#pragma unroll
    for (int tile = 0; tile < kForwardTiles; ++tile) {
      q[tile][0] = next[tile][0];
      q[tile][1] = next[tile][1];
    }
    __syncthreads();
    from += kUnit * source.token;
    load(left - kUnit);
    float y[2][4] = {};
#pragma unroll
    for (int tile = 0; tile < kForwardTiles; ++tile)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        Packed h;
        load_columns(h, h_at + j * kStepBytes + tile * kTileBytes);
        const bool own = g % 2 == j;  // of those that have a step
        mma16<T>(y[j], h, own ? q[tile][0] : 0, own ? q[tile][1] : 0);
      }
    if (t == warp) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (2 * warp + j >= left) continue;
        to[j * token] = static_cast<T>(y[j][j]);
        to[j * token + 8] = static_cast<T>(y[j][2 + j]);
      }
    }
    to += kUnit * token;
    h_at += flip;
  }
}

template <typename T>
__global__ void __launch_bounds__(kForwardThreads, 2)
fast_forward(const __grid_constant__ Problem p) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<FastForwardShared*>(memory);
  const Place at(p, kForwardRows);
  if (threadIdx.x < kForwardThreads / 2)
    forward_recurrence<T>(shared, p, at);
  else
    forward_sums<T>(shared, p, at);
}

}  // namespace m2rnn
