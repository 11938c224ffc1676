/* grouped.cu's entry points on a CPU: the same interface, the products by their definition.

   Rows of A and C beyond an expert's, and C where nothing is to be written, are left alone. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, WIDE_WEIGHT_GRADIENT, ADDED_WEIGHT_GRADIENT };

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

static int refused(const int* ends, int64_t rows, int experts) {
  if (experts > 256) return 1;
  for (int e = 0; e < experts; ++e) {
    if ((e ? ends[e - 1] : 0) % 64 || ends[e] > rows) return 1;
  }
  return 0;
}

int grouped_product(int kind, int tile, int transposed, const void* a, const int* source,
                    const void* b, void* c, const int* ends, int64_t rows, int first, int experts,
                    int idle, int m, int n, int k, void* stream) {
  const uint16_t *left = a, *right = b;
  const int of_weights = kind > INPUT_GRADIENT;
  if ((tile != 224 && tile != 256) || stream || (of_weights ? !source : transposed)) return 1;
  if (refused(ends, rows, experts) || first < 0 || first >= experts || idle < 0) return 1;
  for (int e = first; e < experts; ++e) {
    const int begin = e ? ends[e - 1] : 0;
    if (!of_weights) {
      rows_times_weights(kind == FORWARD, left, source, right + (int64_t)e * n * k, c, begin, ends[e],
                         n, k);
      continue;
    }
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        float sum = 0;
        for (int r = begin; r < ends[e]; ++r) {
          const float value = source[r] < 0 ? 0 : wide(left[(int64_t)source[r] * m + i]);
          sum += value * wide(right[(int64_t)r * n + j]);
        }
        const int64_t at = (int64_t)e * m * n + (transposed ? (int64_t)j * m + i : (int64_t)i * n + j);
        if (kind == ADDED_WEIGHT_GRADIENT)
          ((float*)c)[at] += sum;
        else if (kind == WIDE_WEIGHT_GRADIENT)
          ((float*)c)[at] = sum;
        else
          ((uint16_t*)c)[at] = narrow(sum);
      }
    }
  }
  return 0;
}

int norm_and_logits(const uint16_t* x, const uint16_t* weight, const uint16_t* gate,
                    uint16_t* normed, float* rstd, float* logits, float eps, int count, int width,
                    int experts, int blocks, void* stream) {
  if (stream || width % 8 || width > 3840 || experts > 16 || blocks < 1) return 1;
  if (blocks > (count + 7) / 8) return 1;
  for (int t = 0; t < count; ++t) {
    const int64_t at = (int64_t)t * width;
    float mean = 0;
    for (int i = 0; i < width; ++i) mean += wide(x[at + i]) * wide(x[at + i]) / width;
    rstd[t] = 1 / sqrtf(mean + eps);
    for (int i = 0; i < width; ++i) normed[at + i] = narrow(wide(x[at + i]) * rstd[t] * wide(weight[i]));
    for (int e = 0; e < experts; ++e) {
      float sum = 0;
      for (int i = 0; i < width; ++i) sum += wide(normed[at + i]) * wide(gate[e * width + i]);
      logits[t * experts + e] = sum;
    }
  }
  return 0;
}

/* partial, of which a GPU's blocks need a row each, is only written. */
int tokens_gradient(const uint16_t* y, const int* rows, const uint16_t* shared,
                    const float* d_logits, const uint16_t* gate, const uint16_t* x,
                    const uint16_t* d_residual, const uint16_t* weight, const float* rstd,
                    uint16_t* dx, float* partial, uint16_t* d_weight, int count, int width,
                    int experts, int topk, int blocks, void* stream) {
  float g[4096], total[4096] = {0};
  if (stream || width % 8 || width > 3840 || experts > 16 || blocks < 1 || blocks > count) return 1;
  for (int t = 0; t < count; ++t) {
    const int64_t at = (int64_t)t * width;
    float mean = 0;
    for (int i = 0; i < width; ++i) {
      g[i] = shared ? wide(shared[at + i]) : 0;
      for (int k = 0; k < topk; ++k) {
        const int row = rows[t * topk + k];
        if (row >= 0) g[i] += wide(y[(int64_t)row * width + i]);
      }
      for (int e = 0; e < experts; ++e)
        g[i] += d_logits[t * experts + e] * wide(gate[e * width + i]);
      const float normed = wide(x[at + i]) * rstd[t];
      total[i] += g[i] * normed;
      mean += g[i] * wide(weight[i]) * normed / width;
    }
    for (int i = 0; i < width; ++i) {
      const float normed = wide(x[at + i]) * rstd[t];
      const float through = rstd[t] * (g[i] * wide(weight[i]) - normed * mean);
      dx[at + i] = narrow(through + wide(d_residual[at + i]));
    }
  }
  for (int i = 0; i < width; ++i) {
    d_weight[i] = narrow(total[i]);
    for (int b = 0; b < blocks; ++b) partial[(int64_t)b * width + i] = total[i];
  }
  return 0;
}

const char* grouped_error(int error) { return error ? "refused" : "none"; }
