// Backward for 16-bit inputs. A block has 32 rows of a chain, and two warps for each tile of 16
// rows, both of which go from the last chunk to the first: the recompute warp (bwd_recompute.cuh)
// makes the states of a chunk from its checkpoint while the gradient warp (bwd_state.cuh) consumes
// those of the chunk after it.
//
// The two warps share the slots of one chunk plus kStride: as many are read as are written at any
// time. The slots are traversed end to end, then back for the next chunk, and the warps synchronise
// every kStride steps, so that no slot is overwritten before it is read. To load multiprocessors
// evenly a chain is cut into segments: a block continues where another one has ended.
#pragma once

#include "bwd_sums.cuh"

namespace m2rnn {

// A warp's position among its tile's slots; `step` is the signed distance between slots in bytes.
struct SlotCursor {
  int step, last;
  uint32_t write_at;  // shared-memory address of the lane's part of the slot

  __device__ SlotCursor(const Slot* slots, int chunk) : last(chunk + kStride - 1) {
    step = static_cast<int>(opaque(kSlotBytes));
    write_at = static_cast<uint32_t>(__cvta_generic_to_shared(slots)) + threadIdx.x % 32 * 16;
  }
  __device__ uint32_t read_at() const { return write_at + kStride * step; }
  // At the end of a chunk: changes direction.
  __device__ void reverse() {
    write_at += last * step;
    step = -step;
  }
};

// Synchronises a tile's two warps at the end of stride 0 or 1 of a unit; even and odd units have
// barriers of their own. The gradient warp waits only after odd units, except where a chunk has two
// units: there it reads, before its end, what the recompute warp writes at the chunk's start.
template <bool kGradientWarp>
__device__ void end_stride(int tile, int units, int unit, int stride) {
  const int number = 1 + tile * kTileBarriers + unit % 2u * 2 + stride;
  if (kGradientWarp && units > 2 && (stride == 0 || unit % 2u == 0))
    barrier_arrive(number, 64);
  else
    barrier_sync(number, 64);
}
// The barriers of units that only the tile's other warp processes.
template <bool kGradientWarp>
__device__ void skip_units(int tile, int units, int from, int to) {
#pragma unroll 1
  for (int unit = from; unit < to; ++unit) {
    end_stride<kGradientWarp>(tile, units, unit, 0);
    end_stride<kGradientWarp>(tile, units, unit, 1);
  }
}

template <typename T>
__device__ void recompute_chain(BackwardTile& own, const Params& p, const Place& at, int tile,
                                int chunks, int first_chunk) {
  const int row = tile * kTileRows;
  const LaneInputs<T> in(p, at, row);
  Recompute<T> recompute(p, at, in, row, chunks - 1);
  const int units = recompute.units;
  SlotCursor cursor(own.slots, units * kUnit);
  const int64_t unit = static_cast<int64_t>(kUnit) * p.heads * p.k_dim;
  T* dq = static_cast<T*>(p.dq_parts) + key_offset(p, at, row) + (chunks - 1) * units * unit;
  for (int chunk = chunks - 1; chunk >= first_chunk; --chunk) {
    recompute.enter_chunk(p, &own.headroom);
    uint32_t slot = cursor.write_at;
#pragma unroll 1
    for (int u = 0; u < units; ++u) {
      recompute.enter(p, at, u);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        recompute.step(i, slot);
        slot += cursor.step;
        if (i % kStride == kStride - 1) end_stride<false>(tile, units, u, i / kStride);
      }
      recompute.end_unit();
      store_steps(dq, recompute.dq, has_step((chunk * units + u) * kUnit, at));
      dq += unit;
    }
    dq -= 2 * units * unit;
    cursor.reverse();
  }
  skip_units<false>(tile, units, 0, units);
}

template <typename T, bool kClamp>
__device__ void gradient_chain(BackwardShared& shared, const Params& p, const Place& at, int tile,
                               int chunks, int first_chunk, bool is_last) {
  const int row = tile * kTileRows, lane = threadIdx.x % 32, units = p.stages * kSteps / kUnit;
  const LaneInputs<T> in(p, at, row);
  const int64_t state = at.chain * state_size(p) + 4 * lane_t() +
                        (static_cast<int64_t>(at.head) * p.k_dim + at.row0 + row +
                         tile_row(0, lane_g())) * kColumns;
  int t = (chunks * units - 1) * kUnit;
  StateGradient<T, kClamp> gradient(p, at, in, is_last ? p.d_final : p.d_initial, state, t);
  SumsOut<T> out(p, at, t, row);
  auto& own = shared.tiles[tile];
  SlotCursor cursor(own.slots, units * kUnit);
  // The recompute warp writes `headroom` at the start of a chunk, and overwrites it after its end.
  skip_units<true>(tile, units, 0, units - 1);
  int headroom = own.headroom;
  skip_units<true>(tile, units, units - 1, units);
  cursor.reverse();
  gradient.prepare(own.decay[0] + lane_g(), headroom);
  for (int chunk = chunks - 1; chunk >= first_chunk; --chunk) {
    uint32_t slot = cursor.read_at();
#pragma unroll 1
    for (int u = 0; u < units; ++u) {
      gradient.enter(p, at);
      if (u + 1 == units) headroom = own.headroom;  // of the chunk to come
      const auto steps = [&](auto clamps) {
#pragma unroll
        for (int i = kUnit - 1; i >= 0; --i) {
          if (i == 1) gradient.prepare(own.decay[(u + 1) % 2u] + lane_g(), headroom);
          gradient.template step<clamps.value>(i, slot, own.decay[u % 2u]);
          slot += cursor.step;
          if (i % kStride == 0) end_stride<true>(tile, units, u, 1 - i / kStride);
        }
      };
      if (kClamp && gradient.clamps)
        steps(std::bool_constant<kClamp>{});
      else
        steps(std::false_type{});
      const float scale = gradient.end_unit();
      out.store(at, t, gradient.dk, gradient.dv, gradient.df, scale);
      t -= kUnit;
    }
    cursor.reverse();
  }
  gradient.store(p.d_initial + state);
  write_weight_sum(shared, p, at, gradient.dW, tile * 32 + lane, is_last);
}

template <typename T, bool kClamp>
__global__ void __launch_bounds__(kBackwardThreads, 3)
backward_16bit(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<BackwardShared*>(memory);
  const int blocks = p.chains * p.heads * p.row_blocks;
  const int number = block_number(p.segments_done + blocks, memory);
  const int segment = number / blocks, block = number % blocks;
  Place at(p, kTiles * kTileRows, block / p.row_blocks, block % p.row_blocks);
  const int chunk = p.stages * kSteps;
  const int tokens = Place::ceil_div(Place::ceil_div(at.length, p.segments), chunk) * chunk;
  const int segments = tokens > 0 ? Place::ceil_div(at.length, tokens) : 1;
  if (segment >= segments) return;
  at.first = (segments - 1 - segment) * tokens;
  if (segment > 0) {
    if (threadIdx.x == 0)
      while (load_acquire(p.segments_done + block) < segment) __nanosleep(100);
    at.length = at.first + tokens;
  }
  // A warp's number determines its scheduler. Blocks that are likely to share one of the 132
  // multiprocessors of an H100 or H200 swap roles, so that each scheduler has both kinds of warps.
  const int swapped = block / 132 % 2 * kTiles;
  const int warp = threadIdx.x / 32 ^ swapped, tile = warp % kTiles;
  __syncthreads();
  const int chunks = Place::ceil_div(at.length, chunk), first_chunk = at.first / chunk;
  if (warp < kTiles)
    gradient_chain<T, kClamp>(shared, p, at, tile, chunks, first_chunk, segment == 0);
  else
    recompute_chain<T>(shared.tiles[tile], p, at, tile, chunks, first_chunk);
  if (segment + 1 == segments) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(p.segments_done + block, 1);
  }
}

}  // namespace m2rnn
