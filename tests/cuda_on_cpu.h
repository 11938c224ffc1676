// What our CUDA C++ needs to run on a CPU, one thread of a block at a time: see cuda_on_cpu.py.
//
// A thread is a fiber that runs until it waits: at a barrier for its block, at a warp instruction
// for its warp. Who goes on is drawn at random, so that a missing barrier shows as another result
// under another seed. Shared memory starts as NaNs. What a GPU would fault on or hang in fails the
// launch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <driver_types.h>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

extern "C" void cpu_switch(void** from, void* to);
asm(R"(
.text
.globl cpu_switch
cpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace cpu {

constexpr size_t kStack = 1 << 17, kMaxThreads = 1024, kMaxShared = 227 * 1024;

struct Index {
  unsigned x, y, z;
};
struct Fiber {
  void* top;  // of the stack, where it waits
  char* stack;
  Index index;
  bool is_done;
};
struct Warp {
  int arrived, kind;
  void* arguments[32];
  Fiber* fibers[32];
};

inline std::vector<Fiber> fibers;
inline std::vector<Fiber*> ready;
inline Fiber* current;
inline void* scheduler;
inline std::vector<Fiber*> barriers[16];
inline Warp warps[kMaxThreads / 32];
inline Index block, threads;
inline char* shared;
inline size_t shared_size;
inline uint32_t seed = 1;
inline bool from_last;  // whether the blocks run in the reverse order of their indices
inline std::string failure;
inline cudaError_t launched;  // what the last launch came to
inline std::function<void()> body;

inline void wait() { cpu_switch(&current->top, scheduler); }

inline void fail(const std::string& what) {
  if (failure.empty())
    failure = what + ", in block " + std::to_string(block.x) + " thread " +
              std::to_string(current->index.x);
  wait();
}

// waits: or only says that it is here.
inline void barrier(int number, unsigned count, bool waits = true) {
  auto& here = barriers[number];
  here.push_back(waits ? current : nullptr);
  if (here.size() >= count) {
    for (Fiber* fiber : here)
      if (fiber != nullptr && fiber != current) ready.push_back(fiber);
    here.clear();
  } else if (waits) {
    wait();
  }
}

// `operation` on the arguments of all 32 lanes, once the last of them is here.
template <typename Operation>
void together(int kind, void* argument, Operation operation) {
  Warp& warp = warps[current->index.x / 32];
  const int lane = current->index.x % 32;
  if (warp.arrived > 0 && warp.kind != kind) fail("a warp's lanes are at different instructions");
  warp.kind = kind;
  warp.arguments[lane] = argument;
  warp.fibers[lane] = current;
  if (++warp.arrived < 32) return wait();
  operation(warp.arguments);
  warp.arrived = 0;
  for (int i = 0; i < 32; ++i)
    if (i != lane) ready.push_back(warp.fibers[i]);
}

inline void enter() {
  body();
  current->is_done = true;
  wait();
}

inline void start(unsigned count) {
  while (fibers.size() < count)
    fibers.push_back({nullptr, static_cast<char*>(std::aligned_alloc(64, kStack)), {}, false});
  ready.clear();
  for (auto& waiting : barriers) waiting.clear();
  for (Warp& warp : warps) warp.arrived = 0;
  for (unsigned i = 0; i < count; ++i) {
    void** top = reinterpret_cast<void**>(fibers[i].stack + kStack) - 2;
    *top = reinterpret_cast<void*>(enter);  // where the first switch returns to, past 6 registers
    fibers[i].top = top - 6;
    fibers[i].index = {i, 0, 0};
    fibers[i].is_done = false;
    ready.push_back(&fibers[i]);
  }
}

// One block; false when it failed.
inline bool run_block(unsigned count) {
  start(count);
  for (unsigned left = count; left > 0;) {
    if (ready.empty()) {
      failure = "block " + std::to_string(block.x) + " waits for ever";
      return false;
    }
    seed = seed * 1664525u + 1013904223u;
    const size_t next = (seed >> 8) % ready.size();
    current = ready[next];
    ready[next] = ready.back();
    ready.pop_back();
    cpu_switch(&scheduler, current->top);
    if (!failure.empty()) return false;
    left -= current->is_done;
  }
  return true;
}

template <typename Kernel, typename Argument>
cudaError_t launch(Kernel kernel, unsigned grid, unsigned count, size_t bytes,
                   const Argument& argument) {
  failure.clear();
  if (count > kMaxThreads || bytes > kMaxShared) {
    failure = std::to_string(count) + " threads with " + std::to_string(bytes) + " shared bytes";
    return cudaErrorInvalidConfiguration;
  }
  if (shared == nullptr) shared = static_cast<char*>(std::aligned_alloc(1024, kMaxShared));
  shared_size = bytes;
  threads = {count, 1, 1};
  body = [&] { kernel(argument); };
  for (unsigned i = 0; i < grid; ++i) {
    block = {from_last ? grid - 1 - i : i, 0, 0};
    std::memset(shared, 0xff, kMaxShared);
    if (!run_block(count)) return cudaErrorLaunchFailure;
  }
  return cudaSuccess;
}

// A load in a loop that waits for another block. Blocks run one after the other, so what a block
// does not find at once it never does.
inline int32_t acquire(const int32_t* from) {
  static int loads;
  loads = *from == 0 ? loads + 1 : 0;
  if (loads > 1 << 20) loads = 0, fail("a wait for a block that has not run");
  return *from;
}

// The warp instructions, by the layouts that PTX gives their operands.

inline float upper_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits &= 0xffffe000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

template <typename T>
float element(uint32_t pair, int i) {
  const uint16_t bits = pair >> 16 * i;
  T x;
  std::memcpy(&x, &bits, 2);
  return static_cast<float>(x);
}

struct Product {
  float* c;
  const void *a, *b;
};

// c += a b, 16 x k by k x 8. fill: writes a lane's elements of a and b.
template <int kDepth, typename Fill>
void multiply(void** lanes, Fill fill) {
  static float a[16][kDepth], b[kDepth][8];
  for (int lane = 0; lane < 32; ++lane)
    fill(*static_cast<Product*>(lanes[lane]), lane / 4, lane % 4, a, b);
  for (int lane = 0; lane < 32; ++lane) {
    float* c = static_cast<Product*>(lanes[lane])->c;
    for (int e = 0; e < 4; ++e) {
      double sum = c[e];
      for (int k = 0; k < kDepth; ++k)
        sum += static_cast<double>(a[lane / 4 + e / 2 * 8][k]) * b[k][lane % 4 * 2 + e % 2];
      c[e] = static_cast<float>(sum);
    }
  }
}

inline void mma_tf32(float* c, const float* a, const float* b) {
  Product own{c, a, b};
  together(1, &own, [](void** lanes) {
    multiply<8>(lanes, [](const Product& p, int g, int t, auto& a, auto& b) {
      const auto *x = static_cast<const float*>(p.a), *y = static_cast<const float*>(p.b);
      for (int e = 0; e < 4; ++e) a[g + e % 2 * 8][t + e / 2 * 4] = upper_bits(x[e]);
      for (int e = 0; e < 2; ++e) b[t + 4 * e][g] = upper_bits(y[e]);
    });
  });
}

template <typename T>
void mma_16(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  const uint32_t right[2] = {b0, b1};
  Product own{c, a, right};
  together(std::is_same_v<T, __half> ? 2 : 3, &own, [](void** lanes) {
    multiply<16>(lanes, [](const Product& p, int g, int t, auto& a, auto& b) {
      const auto *x = static_cast<const uint32_t*>(p.a), *y = static_cast<const uint32_t*>(p.b);
      for (int i = 0; i < 2; ++i) {
        for (int e = 0; e < 4; ++e) a[g + e % 2 * 8][2 * t + i + e / 2 * 8] = element<T>(x[e], i);
        for (int e = 0; e < 2; ++e) b[2 * t + i + 8 * e][g] = element<T>(y[e], i);
      }
    });
  });
}

template <typename T>
void mma_8(float* c, uint32_t a0, uint32_t a1, uint32_t b) {
  const uint32_t left[2] = {a0, a1};
  Product own{c, left, &b};
  together(std::is_same_v<T, __half> ? 7 : 8, &own, [](void** lanes) {
    multiply<8>(lanes, [](const Product& p, int g, int t, auto& a, auto& b) {
      const auto *x = static_cast<const uint32_t*>(p.a), *y = static_cast<const uint32_t*>(p.b);
      for (int i = 0; i < 2; ++i) {
        for (int e = 0; e < 2; ++e) a[g + e * 8][2 * t + i] = element<T>(x[e], i);
        b[2 * t + i][g] = element<T>(*y, i);
      }
    });
  });
}

inline uint32_t movmatrix(uint32_t x) {
  uint32_t own = x;
  together(9, &own, [](void** lanes) {
    uint16_t m[8][8];
    for (int lane = 0; lane < 32; ++lane) std::memcpy(&m[lane / 4][lane % 4 * 2], lanes[lane], 4);
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4 * 2;
      *static_cast<uint32_t*>(lanes[lane]) = m[t][g] | static_cast<uint32_t>(m[t + 1][g]) << 16;
    }
  });
  return own;
}

struct Matrices {
  uint32_t *x, from;
};

template <bool kTransposed>
void ldmatrix(uint32_t* x, uint32_t from) {
  if (from % 16 != 0 || from + 16 > shared_size) fail("ldmatrix reads at " + std::to_string(from));
  Matrices own{x, from};
  together(kTransposed ? 5 : 4, &own, [](void** lanes) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t m[8][8];
      for (int row = 0; row < 8; ++row)
        std::memcpy(m[row], shared + static_cast<Matrices*>(lanes[matrix * 8 + row])->from, 16);
      for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4 * 2;
        const uint16_t low = kTransposed ? m[t][g] : m[g][t];
        const uint16_t high = kTransposed ? m[t + 1][g] : m[g][t + 1];
        static_cast<Matrices*>(lanes[lane])->x[matrix] = low | static_cast<uint32_t>(high) << 16;
      }
    }
  });
}

inline void stmatrix(const uint32_t* x, uint32_t to) {
  if (to % 16 != 0 || to + 16 > shared_size) fail("stmatrix writes at " + std::to_string(to));
  uint32_t words[5] = {to, x[0], x[1], x[2], x[3]};
  together(11, words, [](void** lanes) {
    for (int lane = 0; lane < 32; ++lane)
      for (int matrix = 0; matrix < 4; ++matrix) {
        const uint32_t row = static_cast<uint32_t*>(lanes[matrix * 8 + lane / 4])[0];
        const auto word = static_cast<uint32_t*>(lanes[lane])[1 + matrix];
        std::memcpy(shared + row + lane % 4 * 4, &word, 4);
      }
  });
}

inline char* four_words(uint32_t at) {
  if (at % 16 != 0 || at + 16 > shared_size) fail("four words at " + std::to_string(at));
  return shared + at;
}
inline void store_words(uint32_t to, const uint32_t* x) { std::memcpy(four_words(to), x, 16); }
inline void load_words(uint32_t* x, uint32_t from) { std::memcpy(x, four_words(from), 16); }

struct Shuffle {
  float given, taken;
  int lanes;
};

inline float shuffle_xor(float x, int lanes) {
  Shuffle own{x, 0.f, lanes};
  together(6, &own, [](void** all) {
    for (int lane = 0; lane < 32; ++lane) {
      auto* shuffle = static_cast<Shuffle*>(all[lane]);
      shuffle->taken = static_cast<Shuffle*>(all[lane ^ shuffle->lanes])->given;
    }
  });
  return own.taken;
}

inline float shuffle(float x, int lane) {
  Shuffle own{x, 0.f, lane};
  together(10, &own, [](void** all) {
    for (int lane = 0; lane < 32; ++lane) {
      auto* shuffle = static_cast<Shuffle*>(all[lane]);
      shuffle->taken = static_cast<Shuffle*>(all[shuffle->lanes])->given;
    }
  });
  return own.taken;
}

inline uint32_t greatest(uint32_t x) {
  uint32_t own = x;
  together(12, &own, [](void** all) {
    uint32_t most = 0;
    for (int lane = 0; lane < 32; ++lane) most = std::max(most, *static_cast<uint32_t*>(all[lane]));
    for (int lane = 0; lane < 32; ++lane) *static_cast<uint32_t*>(all[lane]) = most;
  });
  return own;
}

inline int total(int x) {
  int own = x;
  together(13, &own, [](void** all) {
    int sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += *static_cast<int*>(all[lane]);
    for (int lane = 0; lane < 32; ++lane) *static_cast<int*>(all[lane]) = sum;
  });
  return own;
}

inline uint32_t rounded_tf32(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7f800000u) != 0x7f800000u) bits += 0x1000u;
  return bits & 0xffffe000u;
}

// As far off as PTX lets it be: to 11 bits.
inline float approximate_tanh(float x) {
  return static_cast<float>(static_cast<__half>(std::tanh(x)));
}

inline float least_or_nan(float x, float y) { return std::isnan(x) ? x : x < y ? x : y; }

inline __half2 multiply_add(__half2 x, __half2 y, __half2 z) {
  const float2 a = __half22float2(x), b = __half22float2(y), c = __half22float2(z);
  return __floats2half2_rn(std::fmaf(a.x, b.x, c.x), std::fmaf(a.y, b.y, c.y));
}

inline __nv_bfloat162 multiply_add(__nv_bfloat162 x, __nv_bfloat162 y, __nv_bfloat162 z) {
  const float2 a = __bfloat1622float2(x), b = __bfloat1622float2(y), c = __bfloat1622float2(z);
  return __floats2bfloat162_rn(std::fmaf(a.x, b.x, c.x), std::fmaf(a.y, b.y, c.y));
}

inline uint32_t greatest_pairs(uint32_t x, uint32_t y) {
  const uint32_t low = std::max(x & 0xffff, y & 0xffff), high = std::max(x >> 16, y >> 16);
  return high << 16 | low;
}

template <typename T>
T load(const T* from) {
  if (reinterpret_cast<size_t>(from) % sizeof(T)) fail("a load that is not aligned");
  return *from;
}

inline uint2 load_pair(const void* from) {
  if (reinterpret_cast<size_t>(from) % sizeof(uint2)) fail("a load that is not aligned");
  return *static_cast<const uint2*>(from);
}

inline int add(int* to, int x) {
  const int before = *to;
  *to += x;
  return before;
}

template <typename To, typename From>
To bits_as(From x) {
  To y;
  std::memcpy(&y, &x, sizeof(To));
  return y;
}

}  // namespace cpu

using std::max;
using std::min;

#define threadIdx (cpu::current->index)
#define blockIdx cpu::block
#define blockDim cpu::threads
#define __syncthreads() cpu::barrier(0, cpu::threads.x)
#define __syncwarp() cpu::together(0, nullptr, [](void**) {})
#define __shfl_xor_sync(mask, x, lanes) cpu::shuffle_xor(x, lanes)
#define __shfl_sync(mask, x, lane) cpu::shuffle(x, lane)
#define __cvta_generic_to_shared(x) \
  static_cast<uint32_t>(reinterpret_cast<const char*>(x) - cpu::shared)
#define __hfma2(x, y, z) cpu::multiply_add(x, y, z)
#define __vmaxu2(x, y) cpu::greatest_pairs(x, y)
#define __vimax3_u16x2(x, y, z) cpu::greatest_pairs(cpu::greatest_pairs(x, y), z)
#define __ldg(x) cpu::load(x)
#define __ldcg(x) cpu::load(x)
#define __nanosleep(x)
#define __reduce_max_sync(mask, x) cpu::greatest(x)
#define __reduce_add_sync(mask, x) cpu::total(x)
#define __threadfence()
#define atomicAdd(to, x) cpu::add(to, x)
#define __float_as_int(x) cpu::bits_as<int>(static_cast<float>(x))
#define __int_as_float(x) cpu::bits_as<float>(static_cast<int>(x))
#define __float_as_uint(x) cpu::bits_as<uint32_t>(static_cast<float>(x))
#define __uint_as_float(x) cpu::bits_as<float>(static_cast<uint32_t>(x))

extern "C" void cpu_seed(uint32_t seed) { cpu::seed = seed; }
extern "C" void cpu_from_last(int on) { cpu::from_last = on; }
