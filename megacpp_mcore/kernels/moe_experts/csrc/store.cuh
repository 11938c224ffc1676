// A tile of C from a warpgroup's registers into memory.
#pragma once
#include "bf16.cuh"
#include "problem.cuh"

namespace grouped {

// How the copy engine stores C: a box of it at a time, and as many boxes at once as a warpgroup's part
// of `staged` holds. Columns are those of the box's rows in memory.
template <int kKind, int kTileN, int kForm>
struct Boxes {
  static constexpr int kEven = kTileN % 64 ? 32 : 64;
  static constexpr int kColumns = kWide<kKind> ? 32 : kForm == kTransposed ? 64 : kEven;
  static constexpr int kRows = kForm == kTransposed ? kEven : 64;
  static constexpr int kRowBytes = kColumns * (kWide<kKind> ? 4 : 2);
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kAtOnce = kStaged / kBytes;
  static constexpr int kAll = kTileN * 64 / (kRows * kColumns);
  // Of transposed tiles, boxes beside each other: they have the same columns of the product.
  static constexpr int kBeside = kForm == kTransposed ? 64 / kColumns : 1;
};

// A box of a warpgroup's sums to shared memory, as the copy engine swizzles it.
template <int kKind, int kTileN, int kForm>
__device__ __forceinline__ void stage(const float (&sums)[kTileN / 2], uint32_t at, int box) {
  using B = Boxes<kKind, kTileN, kForm>;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  if constexpr (kForm == kTransposed && kWide<kKind>) {
    if (warp / 2 != box % 2) return;  // a box has the rows of two warps
#pragma unroll
    for (int j = 0; j < B::kRows / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 8 * j + 2 * (lane % 4) + i % 2, column = 16 * (warp % 2) + 8 * (i / 2) + lane / 4;
        store_one(at + r * 128 + ((column / 4 ^ (r & 7)) << 4) + column % 4 * 4,
                  sums[4 * (box / 2 * (B::kRows / 8) + j) + i]);
      }
    }
  } else if constexpr (kWide<kKind>) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = 16 * warp + 8 * half + lane / 4, chunk = 2 * j + (lane % 4) / 2;
        store_pair(at + r * 128 + ((chunk ^ (r & 7)) << 4) + (lane & 1) * 8,
                   sums[16 * box + 4 * j + 2 * half], sums[16 * box + 4 * j + 2 * half + 1]);
      }
    }
  } else {
    constexpr int kGroups = kForm == kTransposed ? B::kRows / 8 : B::kColumns / 8;  // of 8 columns
#pragma unroll
    for (int j = 0; j < kGroups; j += 2) {
      const float* s = sums + 4 * (kGroups * box + j);
      const uint32_t low = bf16::pack(s[0], s[1]), below = bf16::pack(s[2], s[3]);
      const uint32_t next = bf16::pack(s[4], s[5]), both = bf16::pack(s[6], s[7]);
      if constexpr (kForm == kTransposed) {
        const int r = 8 * (j + lane / 16) + lane % 8, chunk = 2 * warp + lane / 8 % 2;
        store_matrices_transposed(at + r * 128 + ((chunk ^ (r & 7)) << 4), low, below, next, both);
      } else {
        const int r = 16 * warp + (lane / 8 % 2) * 8 + lane % 8, chunk = j + lane / 16;
        const int swizzled = B::kRowBytes == 128 ? chunk ^ (r & 7) : chunk ^ (r / 2 & 3);
        store_matrices(at + r * B::kRowBytes + (swizzled << 4), low, below, next, both);
      }
    }
  }
}

// A warpgroup's 64 rows to memory.
template <int kKind, int kTileN, int kForm>
__device__ __forceinline__ void store(const float (&sums)[kTileN / 2], uint32_t staged, int group,
                                      const CUtensorMap* map_c, const Tile& tile, int row,
                                      bool stored) {
  using B = Boxes<kKind, kTileN, kForm>;
  const int thread = threadIdx.x % 128;
#pragma unroll
  for (int first = 0; first < B::kAll; first += B::kAtOnce) {
    if (thread == 0) store_wait_read<0>();
    warpgroup_sync(1 + group);
#pragma unroll
    for (int box = first; box < first + B::kAtOnce && box < B::kAll; ++box) {
      stage<kKind, kTileN, kForm>(sums, staged + (box - first) * B::kBytes, box);
    }
    proxy_fence();
    warpgroup_sync(1 + group);
    if (thread == 0 && stored) {
#pragma unroll
      for (int box = first; box < first + B::kAtOnce && box < B::kAll; ++box) {
        const uint32_t from = staged + (box - first) * B::kBytes;
        int inner = tile.column + box * B::kColumns, outer = row;
        if constexpr (kForm == kTransposed) {
          inner = row + box % B::kBeside * B::kColumns;
          outer = tile.column + box / B::kBeside * B::kRows;
        }
        if constexpr (kAdded<kKind>) {
          add_3d(map_c, from, inner, outer, tile.expert);
        } else if constexpr (kOfWeights<kKind>) {
          store_3d(map_c, from, inner, outer, tile.expert);
        } else {
          store_2d(map_c, from, inner, outer);
        }
      }
      store_commit();
    }
  }
}

}  // namespace grouped
