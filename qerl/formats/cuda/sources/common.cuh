// What the kernels of this folder share: bfloat16 arithmetic, tensor-core products, clusters. NVRTC compiles them
// without the CUDA headers.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

static __device__ __forceinline__ u32 fma_bf16x2(u32 a, u32 b) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
    return d;
}

// c (16 x 8, float32) += a (16 x 16) b (16 x 8), by a warp
static __device__ __forceinline__ void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ void mma(float* c, const u32 (&a)[4], u32 b0, u32 b1) {
    mma(c, a[0], a[1], a[2], a[3], b0, b1);
}

// A word with the low (0) or high (1) half of `two` in both halves.
template <int HALF>
static __device__ __forceinline__ u32 twice(u32 two) {
    u32 d;
    if (HALF) asm("{.reg .b16 low, high;\n mov.b32 {low, high}, %1;\n mov.b32 %0, {high, high};}" : "=r"(d) : "r"(two));
    else asm("{.reg .b16 low, high;\n mov.b32 {low, high}, %1;\n mov.b32 %0, {low, low};}" : "=r"(d) : "r"(two));
    return d;
}

// The compiler does not move loads past this, so all those above it are in flight before the first result is used. For
// the card it also means that the next launch may start, if it asked to start early; such a launch (gemm.cu) waits for
// the results of this one by itself. Cards before Hopper have no early start.
static __device__ __forceinline__ void keep_order() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#else
    asm volatile("");
#endif
}

static __device__ __forceinline__ void let_next_launch_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// For a launch that may start early: wait until all launches before this one have ended and their results are visible.
static __device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Return the value, and make the compiler keep it in a register instead of computing it again.
static __device__ __forceinline__ u32 keep(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

// For data that is read only once.
static __device__ __forceinline__ uint4 load_stream(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

static __device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

static __device__ __forceinline__ u32 load_shared(u32 address) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}

static __device__ __forceinline__ void load_shared_2(u32 address, u32 (&v)[2]) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(address));
}

static __device__ __forceinline__ float4 load_shared_float4(u32 address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
    return v;
}

static __device__ __forceinline__ void load_shared_4(u32 address, u32 (&v)[4]) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(address));
}

// Load four matrices of 8 rows x 16 bytes; lane i gives the address of row i % 8 of matrix i / 8.
static __device__ __forceinline__ void load_matrices(u32 address, u32 (&v)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(address));
}

static __device__ __forceinline__ u32 load_u32(const u16* p) { return *reinterpret_cast<const u32*>(p); }

static __device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

static __device__ __forceinline__ u16 to_bf16(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

static __device__ __forceinline__ u32 two_bf16(float low, float high) {
    u32 two;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    return two;
}

// Transpose an 8 x 8 matrix held by a warp, in which a lane holds two neighbours of row lane / 4.
static __device__ __forceinline__ u32 transposed(u32 two) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(two));
    return result;
}

static __device__ __forceinline__ float from_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }

static __device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

static __device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }

static __device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

static __device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// The same place in the shared memory of the cluster's block `rank`.
static __device__ __forceinline__ u32 in_peer(u32 address, u32 rank) {
    u32 peer;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
    return peer;
}

static __device__ __forceinline__ float load_peer(const float* own, u32 rank) {
    float value;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(in_peer(shared_address(own), rank)));
    return value;
}
