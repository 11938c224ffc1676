// The tiles of a cluster of the grouped products, as csrc/tiles.cuh has them, for a host.
#define __device__
#define __forceinline__ inline

#include "tiles.cuh"

namespace {

template <int kKind>
int walk(const int* ends, int first, int experts, int m, int n, int cluster, int clusters, int* out) {
  grouped::Tiles<kKind, 256> tiles(ends, first, experts, m, n, cluster, clusters);
  int count = 0;
  for (; tiles.next(); ++count, out += 6) {
    out[0] = tiles.expert, out[1] = tiles.column;
    for (int block = 0; block < grouped::kBlocks; ++block) {
      out[2 + 2 * block] = tiles.row_of(block), out[3 + 2 * block] = tiles.rows_end(block);
    }
  }
  return count;
}

}  // namespace

// Six numbers for each pair of tiles: expert, column, and first row and end of each block's rows.
extern "C" int tiles_of_rows(const int* ends, int experts, int n, int cluster, int clusters, int* out) {
  return walk<grouped::kForward>(ends, 0, experts, 0, n, cluster, clusters, out);
}

extern "C" int tiles_of_weights(const int* ends, int first, int experts, int m, int n, int cluster,
                                int clusters, int* out) {
  return walk<grouped::kWeightGradient>(ends, first, experts, m, n, cluster, clusters, out);
}
