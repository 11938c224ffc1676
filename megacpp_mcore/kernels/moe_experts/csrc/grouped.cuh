// The grouped products of the experts on Hopper, bf16 with sums in float32.
//
// A cluster of two blocks computes two tiles of 128 rows and kTileN columns, one above the other.
// Each block loads its own rows of A, and half of the columns of B, which the copy engine writes
// to both. One warp loads; two warpgroups multiply, 64 rows each, and leave their tile to the copy
// engine, which stores it while they multiply the next. Tiles are taken in a fixed order. Two
// warps may copy rows for a later product meanwhile.

#pragma once
#include "bf16.cuh"
#include "hopper.cuh"
#include "wgmma.cuh"

namespace grouped {

using namespace hopper;

constexpr int kTileM = 128, kTileK = 64, kBlocks = 2;
// Of a block's shared memory. More to store from, for fewer or shorter stages, took longer on an H200
// (3 stages and 40 KiB; 4, 5 and 6 stages of half the length, and 64, 48 and 40 KiB).
constexpr int kStages = 4;
constexpr int kStaged = 16384;  // bytes that a warpgroup stores at a time
constexpr int kBytesA = kTileM * kTileK * 2;
constexpr int kBytesB = 256 * kTileK * 2;  // of a stage; narrower tiles use less
constexpr int kGroup = 64 * 128;           // 64 rows of 64 values
constexpr int kMaxExperts = 256;

enum Kind {
  kForward,        // C[r] = A[r] B[e]^T    A (R, K), B (E, N, K), C (R, N), row r of expert e
  kInputGradient,  // C[r] = A[r] B[e]      A (R, K), B (E, K, N), C (R, N)
  kWeightGradient,  // C[e] = A[rows of e]^T B[rows of e]    A (R, M), B (R, N), C (E, M, N)
  kWideWeightGradient,   // the same, float32
  kAddedWeightGradient,  // the same, float32, added to what C holds
};

// What more a product does.
enum More {
  kNothing,
  kGather,      // loads A's rows from where `source` says
  kGatherKeep,  // and leaves them in memory for a later product
  kCopy,        // copies rows for a later product
};

template <int kMore>
constexpr bool kGathered = kMore == kGather || kMore == kGatherKeep;

constexpr int kThreads = 3 * 128;

// The rows that are copied, of `chunks` times 16 bytes: row r is row source[r] of tokens.
struct Copy {
  const uint8_t* tokens;
  const int* source;
  uint8_t* rows;
  int chunks;
};

struct Problem {
  const int* ends;  // where each expert's rows end: multiples of 128
  int experts;
  int m, n, k;  // m: of the weight gradients; k: of the others
  int64_t rows;
  // Where A is gathered: its row r is row source[r] of tokens (., K), or zeros if that is negative.
  const uint8_t* tokens;
  const int* source;
  Copy copy;
  int first = 0;  // expert of those whose products these are
  int idle = 0;   // multiprocessors left to what runs meanwhile
};

struct Shared {
  alignas(1024) uint8_t a[kStages][kBytesA];
  alignas(1024) uint8_t b[kStages][kBytesB];
  alignas(1024) uint8_t staged[2][kStaged];  // what each warpgroup stores
  alignas(8) uint64_t full[kStages];
  alignas(8) uint64_t empty[kStages];
  int ends[kMaxExperts];
};

template <int kKind>
constexpr bool kOfWeights = kKind >= kWeightGradient;

template <int kKind>
constexpr bool kWide = kKind >= kWideWeightGradient;  // C is float32

template <int kKind>
constexpr bool kAdded = kKind == kAddedWeightGradient;

// Bytes of B that a block loads in a step.
template <int kKind, int kTileN>
constexpr int kHalfB = kKind == kForward ? kTileN / 2 * 128 : 2 * kGroup;

struct Tile {
  int expert = 0;
  int row, column;    // of the pair's first tile
  int begin, end;     // of the expert's rows
  // Of the tiles of the same rows, the one that leaves A's rows: each column in turn, as a cluster may
  // never come to some of them.
  bool keeps;
};

// The tiles of a cluster: every gridDim.x / 2-th of all pairs of tiles, expert by expert, rows by
// rows of tiles.
template <int kKind, int kTileN>
struct Tiles : Tile {
  const int* ends;
  int experts, across, down, pair;
  int before = 0;

  __device__ Tiles(const Problem& p, const int* shared_ends)
      : Tile{p.first},
        ends(shared_ends),
        experts(p.experts),
        across((p.n + kTileN - 1) / kTileN),
        down((p.m + 2 * kTileM - 1) / (2 * kTileM)),
        pair(blockIdx.x / kBlocks) {}

  __device__ __forceinline__ bool next() {
    for (; expert < experts; ++expert) {
      begin = expert ? ends[expert - 1] : 0;
      end = ends[expert];
      const int pairs = kOfWeights<kKind> ? down : (end - begin + 2 * kTileM - 1) / (2 * kTileM);
      const int place = pair - before;
      if (place < pairs * across) {
        row = (place / across) * 2 * kTileM + (kOfWeights<kKind> ? 0 : begin);
        column = (place % across) * kTileN;
        keeps = place / across % across == place % across;
        pair += gridDim.x / kBlocks;
        return true;
      }
      before += pairs * across;
    }
    return false;
  }

  __device__ __forceinline__ int steps(int k) const {
    return ((kOfWeights<kKind> ? end - begin : k) + kTileK - 1) / kTileK;
  }
};

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

// The stages in turn. The producer starts with phase 1, as it finds them all empty.
struct Ring {
  uint32_t phase;
  int stage = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

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
      if constexpr (kOfWeights<kKind>) {
        load_2d(a, map_a, full, row, tiles.begin + k);
        load_2d(a + kGroup, map_a, full, row + 64, tiles.begin + k);
      } else {
        load_2d(a, map_a, full, k, row);
      }
      load_b<kKind, kTileN>(address(shared.b[ring.stage]), map_b, full, tiles, rank, k);
    }
  }
}

// As `load`, by all threads of a warpgroup: they copy A's rows from where `source` says.
template <int kKind, int kTileN>
__device__ void load_gathered(Shared& shared, const Problem& p, const CUtensorMap* map_b) {
  constexpr int kApart = 16, kRows = kTileM / kApart;  // between a thread's rows; rows
  const uint32_t rank = cluster_rank();
  const int thread = threadIdx.x, chunk = thread % 8, first = thread / 8;
  const int width = p.k / 8;  // chunks of 16 bytes in a token
  const uint32_t place = first * 128 + ((chunk ^ (first & 7)) << 4);  // as the copy engine swizzles
  Tiles<kKind, kTileN> tiles(p, shared.ends);
  Ring ring{1};
  while (tiles.next()) {
    int from[kRows];  // chunks before a row's, negative where it is zero
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = tiles.row + static_cast<int>(rank) * kTileM + first + i * kApart;
      from[i] = row < tiles.end ? __ldg(p.source + row) * width : -width;
    }
    const int steps = tiles.steps(p.k);
    for (int step = 0; step < steps; ++step, ring.advance()) {
      const uint32_t full = address(&shared.full[ring.stage]);
      const uint32_t a = address(shared.a[ring.stage]) + place;
      const int column = step * 8 + chunk;
      barrier_wait(address(&shared.empty[ring.stage]), ring.phase);
      if (thread == 0) {
        barrier_expect(full, 2 * kHalfB<kKind, kTileN>);
        load_b<kKind, kTileN>(address(shared.b[ring.stage]), map_b, full, tiles, rank,
                              step * kTileK);
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

// A warpgroup's 64 rows to memory, as many columns at a time as its part of `staged` holds.
template <int kKind, int kTileN>
__device__ __forceinline__ void store(const float (&sums)[kTileN / 2], uint32_t staged, int group,
                                      const CUtensorMap* map_c, const Tile& tile, int row,
                                      bool stored) {
  constexpr int kColumns = kWide<kKind> || kTileN % 64 ? 32 : 64;  // of a box of the copy engine
  constexpr int kRowBytes = kColumns * (kWide<kKind> ? 4 : 2);
  constexpr int kBoxes = kTileN / kColumns, kAtOnce = kStaged / (64 * kRowBytes);
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int first = 0; first < kBoxes; first += kAtOnce) {
    if (thread == 0) store_wait_read<0>();
    warpgroup_sync(1 + group);
#pragma unroll
    for (int box = first; box < first + kAtOnce && box < kBoxes; ++box) {
      const uint32_t at = staged + (box - first) * 64 * kRowBytes;
      if constexpr (kWide<kKind>) {
#pragma unroll
        for (int j = 4 * box; j < 4 * box + 4; ++j) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int r = 16 * warp + 8 * half + lane / 4;
            const int chunk = 2 * (j - 4 * box) + (lane % 4) / 2;
            store_pair(at + r * 128 + ((chunk ^ (r & 7)) << 4) + (lane & 1) * 8,
                       sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
          }
        }
      } else {
        constexpr int kChunks = kColumns / 8;
#pragma unroll
        for (int j = kChunks * box; j < kChunks * (box + 1); j += 2) {
          const int r = 16 * warp + (lane / 8 % 2) * 8 + lane % 8;
          const int chunk = j - kChunks * box + lane / 16;
          const int swizzled = kRowBytes == 128 ? chunk ^ (r & 7) : chunk ^ (r / 2 & 3);
          store_matrices(at + r * kRowBytes + (swizzled << 4),
                         bf16::pack(sums[4 * j], sums[4 * j + 1]),
                         bf16::pack(sums[4 * j + 2], sums[4 * j + 3]),
                         bf16::pack(sums[4 * j + 4], sums[4 * j + 5]),
                         bf16::pack(sums[4 * j + 6], sums[4 * j + 7]));
        }
      }
    }
    proxy_fence();
    warpgroup_sync(1 + group);
    if (thread == 0 && stored) {
#pragma unroll
      for (int box = first; box < first + kAtOnce && box < kBoxes; ++box) {
        const uint32_t from = staged + (box - first) * 64 * kRowBytes;
        const int column = tile.column + box * kColumns;
        if constexpr (kAdded<kKind>) {
          add_3d(map_c, from, column, row, tile.expert);
        } else if constexpr (kOfWeights<kKind>) {
          store_3d(map_c, from, column, row, tile.expert);
        } else {
          store_2d(map_c, from, column, row);
        }
      }
      store_commit();
    }
  }
}

// map_rows: of kGatherKeep, where A's rows are left.
template <int kKind, int kTileN, int kMore>
__device__ void multiply(Shared& shared, const Problem& p, const CUtensorMap* map_c,
                         const CUtensorMap* map_rows, int group) {
  constexpr int kTransposedA = kOfWeights<kKind>, kTransposedB = kKind != kForward;
  constexpr int kStepA = kTransposedA ? 2048 >> 4 : 32 >> 4;
  constexpr int kStepB = kTransposedB ? 2048 >> 4 : 32 >> 4;
  constexpr bool kKept = kMore == kGatherKeep;
  const uint32_t rank = cluster_rank();
  const int thread = threadIdx.x % 128;
  const uint32_t staged = address(shared.staged[group]);
  Tiles<kKind, kTileN> tiles(p, shared.ends);
  float sums[kTileN / 2];
  Ring ring{0};
  bool more = tiles.next();
  while (more) {
    const int steps = tiles.steps(p.k);
    const int row = tiles.row + static_cast<int>(rank) * kTileM + group * 64;
    const bool keeps = kKept && tiles.keeps && row < tiles.end && thread == rank;
    if (!kOfWeights<kKind> && row >= tiles.end) {  // nothing to multiply, for both warpgroups
      for (int step = 0; step < steps; ++step, ring.advance()) {
        barrier_wait(address(&shared.full[ring.stage]), ring.phase);
        if (thread < kBlocks) barrier_arrive(address(&shared.empty[ring.stage]), thread);
      }
      more = tiles.next();
      continue;
    }
    int used = 0;  // the stage that the products before the last ones read
    if (steps == 0) {
#pragma unroll
      for (int i = 0; i < kTileN / 2; ++i) sums[i] = 0.f;
    }
    for (int step = 0; step < steps; ++step, ring.advance()) {
      barrier_wait(address(&shared.full[ring.stage]), ring.phase);
      if constexpr (kGathered<kMore>) proxy_fence();
      const uint32_t from = address(shared.a[ring.stage]) + group * kGroup;
      if constexpr (kKept) {
        if (keeps) {
          store_2d(map_rows, from, step * kTileK, row);
          store_commit();
        }
        __syncwarp();
      }
      const uint64_t a = operand<kGroup>(from);
      const uint64_t b = operand<kGroup>(address(shared.b[ring.stage]));
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTileK / 16; ++i) {
        Wgmma<kTileN, kTransposedA, kTransposedB>::run(sums, a + i * kStepA, b + i * kStepB,
                                                       step > 0 || i > 0);
      }
      wgmma_commit();
      if (step > 0) {
        wgmma_wait<1>();
        if (keeps) store_wait_read<1>();  // of the stage before
        if (thread < kBlocks) barrier_arrive(address(&shared.empty[used]), thread);
      }
      used = ring.stage;
    }
    const Tile done = tiles;
    more = tiles.next();  // while the last products run
    wgmma_wait<0>();
    if (keeps) store_wait_read<0>();
    if (steps > 0 && thread < kBlocks) barrier_arrive(address(&shared.empty[used]), thread);
    const bool inside = kOfWeights<kKind> ? row < p.m : row < done.end;
    const bool stored = inside && !(kAdded<kKind> && steps == 0);
    store<kKind, kTileN>(sums, staged, group, map_c, done, row, stored);
  }
  if (thread < kBlocks) store_wait();
}

// By two warps: rows of tokens, in the order of `source`; zeros where that is negative.
inline __device__ void copy_rows(const Shared& shared, const Problem& p, int warp) {
  constexpr int kWarps = 2, kAtOnce = 14;  // kAtOnce chunks a thread: a row of 3,584 columns
  const Copy& copy = p.copy;
  const int lane = threadIdx.x % 32, apart = gridDim.x * kWarps;
  const int last = shared.ends[p.experts - 1];
  int row = blockIdx.x * kWarps + warp;
  int from = row < last ? __ldg(copy.source + row) : -1;
  for (; row < last; row += apart) {
    const int next = row + apart < last ? __ldg(copy.source + row + apart) : -1;
    const uint4* in =
        reinterpret_cast<const uint4*>(copy.tokens) + static_cast<int64_t>(from) * copy.chunks;
    uint4* out = reinterpret_cast<uint4*>(copy.rows) + static_cast<int64_t>(row) * copy.chunks;
    for (int first = lane; first < copy.chunks; first += 32 * kAtOnce) {
      uint4 found[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int chunk = first + 32 * i;
        found[i] = from >= 0 && chunk < copy.chunks ? __ldg(in + chunk) : uint4{0, 0, 0, 0};
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + 32 * i < copy.chunks) out[first + 32 * i] = found[i];
      }
    }
    from = next;
  }
}

// Registers of a thread that loads or copies, and of one that multiplies. Once these and twice those
// are at most the three times 168 that a block starts with; a block that wants more hangs.
template <int kMore>
constexpr int kLoadRegisters = kMore == kCopy ? 104 : kGathered<kMore> ? 56 : 40;
template <int kMore>
constexpr int kMultiplyRegisters = kMore == kCopy ? 200 : kGathered<kMore> ? 224 : 232;

template <int kKind, int kTileN, int kMore>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    product(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
            const __grid_constant__ CUtensorMap map_c, const __grid_constant__ CUtensorMap map_rows,
            const Problem p) {
  static_assert(kLoadRegisters<kMore> + 2 * kMultiplyRegisters<kMore> <= 3 * 168);
  extern __shared__ uint8_t raw[];
  auto& shared = *reinterpret_cast<Shared*>(
      (reinterpret_cast<uintptr_t>(raw) + 1023) & ~static_cast<uintptr_t>(1023));
  for (int e = threadIdx.x; e < p.experts; e += kThreads) shared.ends[e] = p.ends[e];
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(address(&shared.full[stage]), kGathered<kMore> ? 1 + 128 : 1);  // who loads
      barrier_init(address(&shared.empty[stage]), 2 * kBlocks);  // warpgroups of both blocks
    }
    barrier_fence();
  }
  __syncthreads();
  cluster_sync();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    fewer_registers<kLoadRegisters<kMore>>();
    if constexpr (kGathered<kMore>) {
      load_gathered<kKind, kTileN>(shared, p, &map_b);
    } else if (threadIdx.x < 32) {
      if (threadIdx.x == 0) load<kKind, kTileN>(shared, p, &map_a, &map_b);
    } else if (kMore == kCopy && threadIdx.x >= 64) {
      copy_rows(shared, p, threadIdx.x / 32 - 2);
    }
    __syncwarp();
  } else {
    more_registers<kMultiplyRegisters<kMore>>();
    multiply<kKind, kTileN, kMore>(shared, p, &map_c, &map_rows, warpgroup - 1);
  }
  cluster_sync();  // the other block may still write here, and arrive at these barriers
}

}  // namespace grouped
