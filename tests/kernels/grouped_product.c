/* grouped.cu's entry points on a CPU: the same interface, the products by their definition.

   Rows of A and C beyond an expert's, and C where nothing is to be written, are left alone. */

#include <stdint.h>
#include <string.h>

enum { FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, ADDED_WEIGHT_GRADIENT };

static float wide(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static uint16_t narrow(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static void rows_times_weights(int transposed, const uint16_t* a, const int* source,
                               const uint16_t* b, uint16_t* c, int begin, int end, int n, int k) {
  for (int r = begin; r < end; ++r) {
    const int from = source ? source[r] : r;
    for (int j = 0; j < n; ++j) {
      float sum = 0;
      for (int i = 0; i < k && from >= 0; ++i)
        sum += wide(a[(int64_t)from * k + i]) * wide(transposed ? b[j * k + i] : b[i * n + j]);
      c[(int64_t)r * n + j] = narrow(sum);
    }
  }
}

int grouped_product(int kind, int tile, const void* a, const int* source, const void* b, void* c,
                    const int* ends, int64_t rows, int experts, int m, int n, int k, void* stream) {
  const uint16_t *left = a, *right = b;
  if ((tile != 224 && tile != 256) || stream || experts > 256 || (source && kind != FORWARD)) return 1;
  for (int e = 0; e < experts; ++e) {
    const int begin = e ? ends[e - 1] : 0;
    if (begin % 128 || ends[e] > rows) return 1;
    if (kind == FORWARD || kind == INPUT_GRADIENT) {
      rows_times_weights(kind == FORWARD, left, source, right + (int64_t)e * n * k, c, begin, ends[e],
                         n, k);
      continue;
    }
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        float sum = 0;
        for (int r = begin; r < ends[e]; ++r)
          sum += wide(left[(int64_t)r * m + i]) * wide(right[(int64_t)r * n + j]);
        const int64_t at = ((int64_t)e * m + i) * n + j;
        if (kind == ADDED_WEIGHT_GRADIENT)
          ((float*)c)[at] += sum;
        else
          ((uint16_t*)c)[at] = narrow(sum);
      }
    }
  }
  return 0;
}

const char* grouped_error(int error) { return error ? "refused" : "none"; }
