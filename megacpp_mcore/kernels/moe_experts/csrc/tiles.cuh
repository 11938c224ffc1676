// Which tiles of the result a cluster computes, and in which order. No instructions of the GPU's
// own, so that a host compiles it, too.
//
// A cluster's two blocks compute two tiles of kTileM rows, one above the other: a pair. An expert
// with an odd number of tiles of rows has one left over: its blocks compute 64 rows each, in half
// the time of a pair. These are taken last, first by the clusters that have had a pair less.

#pragma once

namespace grouped {

constexpr int kTileM = 128, kBlocks = 2;

enum Kind {
  kForward,        // C[r] = A[r] B[e]^T    A (R, K), B (E, N, K), C (R, N), row r of expert e
  kInputGradient,  // C[r] = A[r] B[e]      A (R, K), B (E, K, N), C (R, N)
  kWeightGradient,  // C[e] = A[rows of e]^T B[rows of e]    A (R, M), B (R, N), C (E, M, N)
  kWideWeightGradient,   // the same, float32
  kAddedWeightGradient,  // the same, float32, added to what C holds
};

template <int kKind>
constexpr bool kOfWeights = kKind >= kWeightGradient;

// The two tiles of a cluster, of kTileM rows each, or of 64 where `halved`.
struct Tile {
  int expert;
  int row, column;  // of the first block's tile
  int begin, end;   // of the expert's rows: multiples of kTileM
  bool halved = false;

  __device__ __forceinline__ int row_of(int block) const {
    return row + block * (halved ? kTileM / 2 : kTileM);
  }
  // Where the rows of a block's tile end; those of weights end with C.
  __device__ __forceinline__ int rows_end(int block) const {
    const int last = row_of(block) + (halved ? kTileM / 2 : kTileM);
    return last < end ? last : end;
  }
};

// Experts first to experts - 1; n columns; of weights m rows. Cluster number `cluster` of `clusters`.
template <int kKind, int kTileN>
struct Tiles : Tile {
  const int* ends;
  int first, experts, across, down, cluster, clusters;
  int place;        // of the cluster's next tile, among pairs, later among halved ones
  int before = 0;   // of these, those of the experts before this one
  int behind = 0;   // the first cluster that has had a pair less, or 0: none has
  int turn = 0;     // halved ones that were taken

  __device__ Tiles(const int* expert_ends, int first_expert, int last, int m, int n, int number,
                   int all)
      : Tile{first_expert},
        ends(expert_ends),
        first(first_expert),
        experts(last),
        across((n + kTileN - 1) / kTileN),
        down((m + 2 * kTileM - 1) / (2 * kTileM)),
        cluster(number),
        clusters(all),
        place(number) {}

  __device__ __forceinline__ bool next() {
    for (;;) {
      for (; expert < experts; ++expert) {
        begin = expert ? ends[expert - 1] : 0;
        end = ends[expert];
        const int rows = end - begin;
        const int height = kOfWeights<kKind> ? down
                           : halved ? rows / kTileM % 2 : rows / (2 * kTileM);
        const int at = place - before;
        if (at < height * across) {
          row = kOfWeights<kKind> ? 0 : halved ? end - kTileM : begin;
          row += at / across * 2 * kTileM;
          column = at % across * kTileN;
          place = halved ? next_halved() : place + clusters;
          return true;
        }
        before += height * across;
      }
      if (kOfWeights<kKind> || halved) return false;
      halved = true;
      behind = before % clusters;
      before = 0;
      expert = first;
      place = next_halved();
    }
  }

  __device__ __forceinline__ int next_halved() {
    const int lacking = behind ? clusters - behind : 0;
    int k = turn++;
    if (lacking && cluster >= behind) {
      if (k < 2) return cluster - behind + lacking * k;
      k -= 2;
    }
    return 2 * lacking + cluster + clusters * k;
  }

  __device__ __forceinline__ int steps(int k, int length) const {
    return ((kOfWeights<kKind> ? end - begin : k) + length - 1) / length;
  }
};

}  // namespace grouped
