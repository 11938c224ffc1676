// What of A and B a step multiplies, from memory into a stage.
#pragma once
#include "problem.cuh"

namespace grouped {

// B of one step, by one thread: this block's half of it, to both blocks.
template <int kKind, int kTileN>
__device__ __forceinline__ void load_b(uint32_t b, const CUtensorMap* map_b, uint32_t full,
                                       const Tile& tiles, uint32_t rank, int k) {
  b += rank * kHalfB<kKind, kTileN>;
  if constexpr (kKind == kForward) {
    const int column = tiles.column + static_cast<int>(rank) * (kTileN / 2);
    load_3d_both(b, map_b, full, k, column, tiles.expert);
  } else {
    const int column = tiles.column + static_cast<int>(rank) * 128;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if constexpr (kOfWeights<kKind>) {
        load_2d_both(b + part * kGroup, map_b, full, column + 64 * part, tiles.begin + k);
      } else {
        load_3d_both(b + part * kGroup, map_b, full, column + 64 * part, k, tiles.expert);
      }
    }
  }
}

// The same, where nothing else of the stage comes by the copy engine.
template <int kKind, int kTileN>
__device__ __forceinline__ void load_all_of_b(Shared& shared, int stage, const CUtensorMap* map_b,
                                              const Tile& tiles, uint32_t rank, int k) {
  const uint32_t full = address(&shared.full[stage]);
  barrier_expect(full, 2 * kHalfB<kKind, kTileN>);
  load_b<kKind, kTileN>(address(shared.b[stage]), map_b, full, tiles, rank, k);
}

// Where a thread of a warpgroup copies 16 bytes of a row of 64 values, and of the rows kApart below.
struct Place {
  static constexpr int kApart = 16;
  const int thread = threadIdx.x, chunk = thread % 8, first = thread / 8;
  const uint32_t offset = first * 128 + ((chunk ^ (first & 7)) << 4);  // as the copy engine swizzles
};

// By one thread: A's rows of a sorted matrix, and B.
template <int kKind, int kTileN>
__device__ void load(Shared& shared, const Problem& p, const CUtensorMap* map_a,
                     const CUtensorMap* map_b) {
  const uint32_t rank = cluster_rank();
  Tiles<kKind, kTileN> tiles(p, shared.ends);
  Ring ring{1};
  while (tiles.next()) {
    const int steps = tiles.steps(p.k);
    const int row = tiles.row + static_cast<int>(rank) * kTileM;
    for (int step = 0; step < steps; ++step, ring.advance()) {
      const uint32_t full = address(&shared.full[ring.stage]);
      barrier_wait(address(&shared.empty[ring.stage]), ring.phase);
      barrier_expect(full, kBytesA + 2 * kHalfB<kKind, kTileN>);
      const uint32_t a = address(shared.a[ring.stage]);
      const int k = step * kTileK;
      load_2d(a, map_a, full, k, row);
      load_b<kKind, kTileN>(address(shared.b[ring.stage]), map_b, full, tiles, rank, k);
    }
  }
}

// As `load`, by all threads of a warpgroup: they copy A's rows from where `source` says. A step has 64
// columns of a tile's rows.
template <int kKind, int kTileN>
__device__ void load_gathered(Shared& shared, const Problem& p, const CUtensorMap* map_b) {
  constexpr int kApart = Place::kApart, kRows = kTileM / kApart;
  const uint32_t rank = cluster_rank();
  const Place place;
  const int width = p.k / 8;  // chunks of 16 bytes in a token
  Tiles<kKind, kTileN> tiles(p, shared.ends);
  Ring ring{1};
  while (tiles.next()) {
    int from[kRows];  // chunks before a row's, negative where it is zero
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = tiles.row + static_cast<int>(rank) * kTileM + place.first + i * kApart;
      from[i] = row < tiles.end ? __ldg(p.source + row) * width : -width;
    }
    const int steps = tiles.steps(p.k);
    for (int step = 0; step < steps; ++step, ring.advance()) {
      const uint32_t full = address(&shared.full[ring.stage]);
      const uint32_t a = address(shared.a[ring.stage]) + place.offset;
      const int column = step * 8 + place.chunk;
      barrier_wait(address(&shared.empty[ring.stage]), ring.phase);
      if (place.thread == 0) {
        load_all_of_b<kKind, kTileN>(shared, ring.stage, map_b, tiles, rank, step * kTileK);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const bool valid = from[i] >= 0 && column < width;
        const int at = valid ? from[i] + column : 0;
        copy_16(a + i * kApart * 128, p.tokens + static_cast<int64_t>(at) * 16, valid);
      }
      barrier_arrive_after_copies(full);
    }
  }
}

// The same for a weight gradient, where a step has a tile's columns of 64 rows.
template <int kKind, int kTileN>
__device__ void load_gathered_steps(Shared& shared, const Problem& p, const CUtensorMap* map_b) {
  constexpr int kApart = Place::kApart, kRows = kTileK / kApart;
  const uint32_t rank = cluster_rank();
  const Place place;
  const int width = p.m / 8;
  Tiles<kKind, kTileN> tiles(p, shared.ends);
  Ring ring{1};
  while (tiles.next()) {
    const int steps = tiles.steps(p.k);
    const int column = (tiles.row + static_cast<int>(rank) * kTileM) / 8 + place.chunk;
    const int* source = p.source + tiles.begin + place.first;
    int from[kRows];  // the tokens of this step; those of the next are read meanwhile
    if (steps > 0) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) from[i] = __ldg(source + i * kApart);
    }
    for (int step = 0; step < steps; ++step, ring.advance()) {
      int next[kRows] = {};
      source += kTileK;
      if (step + 1 < steps) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) next[i] = __ldg(source + i * kApart);
      }
      const uint32_t full = address(&shared.full[ring.stage]);
      const uint32_t a = address(shared.a[ring.stage]) + place.offset;
      barrier_wait(address(&shared.empty[ring.stage]), ring.phase);
      if (place.thread == 0) {
        load_all_of_b<kKind, kTileN>(shared, ring.stage, map_b, tiles, rank, step * kTileK);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // of 64 columns
          const bool valid = from[i] >= 0 && column + 8 * half < width;
          const int64_t at = valid ? static_cast<int64_t>(from[i]) * width + column + 8 * half : 0;
          copy_16(a + half * kGroup + i * kApart * 128, p.tokens + at * 16, valid);
        }
        from[i] = next[i];
      }
      barrier_arrive_after_copies(full);
    }
  }
}

}  // namespace grouped
