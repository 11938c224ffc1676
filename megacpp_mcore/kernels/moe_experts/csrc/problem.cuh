// What a grouped product is given, its tiles, and a block's shared memory.
#pragma once
#include "hopper.cuh"

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

// Where A's rows come from, and how C is written.
enum Form {
  kSorted,      // A is sorted
  kGathered,    // A's row r is row source[r] of tokens
  kTransposed,  // the same, and C[e] is written as (N, M)
};

constexpr int kThreads = 3 * 128;

struct Problem {
  const int* ends;  // where each expert's rows end: multiples of 64
  int experts;
  int m, n, k;  // m: of the weight gradients; k: of the others
  int64_t rows;
  // Where A is gathered: its row r is row source[r] of tokens, or zeros if that is negative.
  const uint8_t* tokens;
  const int* source;
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

}  // namespace grouped
