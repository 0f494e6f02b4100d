// How the blocks of a launch exchange values through memory: by counters, or by values tagged with the launch's number.
#pragma once
#include "common.cuh"

static __device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

static __device__ __forceinline__ u64 raise_relaxed(u64* counter) {
    u64 before;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], 1;" : "=l"(before) : "l"(counter) : "memory");
    return before;
}

// Whoever sees the counter raised also sees all that this block wrote before a barrier that this thread has passed.
static __device__ __forceinline__ u64 raise(u64* counter) {
    fence();
    return raise_relaxed(counter);
}

static __device__ __forceinline__ u64 load_acquire(const u64* counter) {
    u64 value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
    return value;
}

// Bypasses the multiprocessor's own cache, which may still hold old values.
static __device__ __forceinline__ float4 load_fresh(const float4* place) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(place) : "memory");
    return v;
}

static __device__ __forceinline__ uint4 load_fresh(const u16* eight) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(eight) : "memory");
    return v;
}

// A value together with the number of the launch that wrote it, in eight bytes: a reader sees in one load whether it
// has been written yet. What an earlier launch left has another number.
static __device__ __forceinline__ u64 flagged(u32 value, u32 launch) { return (u64)launch << 32 | value; }

static __device__ __forceinline__ void store_flagged(u64* place, u32 first, u32 second, u32 launch) {
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};"
        ::"l"(place), "l"(flagged(first, launch)), "l"(flagged(second, launch)) : "memory");
}

static __device__ __forceinline__ ulonglong2 load_flagged(const u64* first, const u64* second) {
    ulonglong2 v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v.x) : "l"(first) : "memory");
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v.y) : "l"(second) : "memory");
    return v;
}

static __device__ __forceinline__ bool is_of(const ulonglong2& two, u32 launch) {
    return (u32)(two.x >> 32) == launch && (u32)(two.y >> 32) == launch;
}
