// What the kernels of this folder share: bfloat16, tensor-core products, asynchronous copies, clusters, and the handing
// over of results from the first blocks of a launch to the later ones. Compiled by NVRTC, without the CUDA headers.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

#define HANDOVER_SLOTS 16

static __device__ __forceinline__ u32 fma_bf16x2(u32 a, u32 b) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
    return d;
}

static __device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Sixteen bytes to shared memory, asynchronously; `bytes` 0 writes zeros instead.
static __device__ __forceinline__ void copy_16(u32 target, const void* source, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes));
}

static __device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
static __device__ __forceinline__ void wait_for_all_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// The compiler leaves loads above this where they are, so that all are under way before the first is used. To the card
// it says that a later launch which asked to start early may; such a launch waits by itself for this one's results.
static __device__ __forceinline__ void keep_order() { asm volatile("griddepcontrol.launch_dependents;"); }

static __device__ __forceinline__ u32 load_u32(const u16* p) { return *reinterpret_cast<const u32*>(p); }

static __device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

static __device__ __forceinline__ u16 to_bf16(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

static __device__ __forceinline__ float from_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }

static __device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

static __device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

static __device__ __forceinline__ float load_peer(const float* own, u32 rank) {
    const u32 address = (u32)__cvta_generic_to_shared(own);
    u32 peer;
    float value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(peer));
    return value;
}

// Handing over inside a launch: blocks that produce come first in the grid, and the card starts blocks in the order of
// their index, so those that wait never keep a producer from running. A value travels with the launch's tag beside it,
// in one 8-byte word, so that whoever finds the tag has the value.
struct __align__(16) TwoTagged {
    float value_0;
    u32 tag_0;
    float value_1;
    u32 tag_1;
};

// Every block of a launch draws one ticket; `slot` is the counter's number, its own for each number of blocks. No two
// launches have the same tag, and none has 0, until a slot has had 2^28 of them. Launches that share counters may not
// overlap.
static __device__ __forceinline__ u64 draw_ticket(u64* counters, u32 slot) {
    u64 ticket;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], 1;" : "=l"(ticket) : "l"(counters + slot) : "memory");
    return ticket;
}

static __device__ __forceinline__ u32 launch_tag(u64 ticket, u32 slot) {
    return (u32)(ticket / (gridDim.x * gridDim.y) + 1) * HANDOVER_SLOTS + slot;
}

static __device__ __forceinline__ void hand_over(u64* place, float value, u32 tag) {
    const u64 word = (u64)tag << 32 | __float_as_uint(value);
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(place), "l"(word) : "memory");
}

static __device__ __forceinline__ TwoTagged load_tagged(const u64* place) {
    u64 first, second;
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(place) : "memory");
    return {__uint_as_float((u32)first), (u32)(first >> 32), __uint_as_float((u32)second), (u32)(second >> 32)};
}
