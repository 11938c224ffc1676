// Hopper's instructions that CUDA C++ has no names for: barriers in shared memory, the copy engine
// (TMA), clusters, and the descriptors of wgmma's operands.

#pragma once
#include <cuda.h>
#include <cstdint>

namespace hopper {

__device__ __forceinline__ uint32_t address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::
                   : "memory");
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrive at the barrier of block `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\nbra AGAIN;\nDONE:\n}\n" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

// A warpgroup's own barrier; id 0 is __syncthreads'.
__device__ __forceinline__ void warpgroup_sync(int id) {
  asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}

// `bytes`, a multiple of 16, from where both addresses are multiples of 16.
__device__ __forceinline__ void load_bytes(uint32_t to, const void* from, int bytes,
                                           uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void load_2d(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                        int inner, int outer) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(inner), "r"(outer)
      : "memory");
}

// Into the same place of both blocks of the cluster; each one's barrier counts the bytes.
__device__ __forceinline__ void load_2d_both(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                             int inner, int outer) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(inner), "r"(outer), "h"(static_cast<uint16_t>(3))
      : "memory");
}

__device__ __forceinline__ void load_3d_both(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                             int inner, int middle, int outer) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(inner), "r"(middle), "r"(outer), "h"(static_cast<uint16_t>(3))
      : "memory");
}

__device__ __forceinline__ void store_2d(const CUtensorMap* map, uint32_t from, int inner,
                                         int outer) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(from), "r"(inner), "r"(outer)
      : "memory");
}

__device__ __forceinline__ void store_3d(const CUtensorMap* map, uint32_t from, int inner,
                                         int middle, int outer) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          map),
      "r"(from), "r"(inner), "r"(middle), "r"(outer)
      : "memory");
}

// Memory += shared memory, element by element.
__device__ __forceinline__ void add_3d(const CUtensorMap* map, uint32_t from, int inner, int middle,
                                       int outer) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(from), "r"(inner), "r"(middle), "r"(outer)
      : "memory");
}

__device__ __forceinline__ void store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until this thread's stores, but for those of the last kPending commits, have read shared memory.
template <int kPending>
__device__ __forceinline__ void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// 16 bytes to shared memory, or 16 zeros; `from` is an address in global memory either way.
__device__ __forceinline__ void copy_16(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

// This thread arrives at the barrier once its copies so far are done.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Before the copy engine or wgmma read what ordinary stores or copies of a thread wrote to shared memory.
__device__ __forceinline__ void proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// An operand in shared memory with 128-byte swizzle, groups of 8 rows of 128 bytes one after another.
// Rows along K ("K-major"): 64 values of K a row, a step of 16 is 32 bytes. Rows along M or N: 64
// values of M or N a row, kGroup bytes to the next 64, and a step of K by 16 is 16 rows.
template <int kGroup>
__device__ __forceinline__ uint64_t operand(uint32_t at) {
  constexpr uint64_t kEightRows = 1024 >> 4, kSwizzle128 = 1;
  return (static_cast<uint64_t>(at & 0x3FFFF) >> 4) | (static_cast<uint64_t>(kGroup >> 4) << 16) |
         (kEightRows << 32) | (kSwizzle128 << 62);
}

template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Four 8 x 8 matrices of 16-bit values; lane 8 i + r has the address of row r of matrix i.
__device__ __forceinline__ void store_matrices(uint32_t at, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Its transpose: the lane's address is that of column lane % 8.
__device__ __forceinline__ void store_matrices_transposed(uint32_t at, uint32_t a, uint32_t b,
                                                          uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ void store_one(uint32_t at, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}

__device__ __forceinline__ void store_pair(uint32_t at, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}

}  // namespace hopper
