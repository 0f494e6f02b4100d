// How a block computes hidden values, x a^T for 16 ranks: each warp multiplies a range of K, then the sums are added.
#pragma once
#include "common.cuh"

#define SUM_STRIDE 20  // floats between the 16 sums of one token and the next, chosen to avoid bank conflicts

// acc (16 ranks x 8 * COUNT tokens) += (low, high) times v. A lane holds, LOADS times, 8 columns of rank lane / 4
// (low), of rank lane / 4 + 8 (high) and of its tokens (v). Both operands permute k in the same way, so the sum is the same.
template <int COUNT, int LOADS>
static __device__ __forceinline__ void add_products(const uint4 (&low)[LOADS], const uint4 (&high)[LOADS],
                                                    const uint4 (&v)[LOADS][COUNT], float (&acc)[COUNT][4]) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
#pragma unroll
        for (int t = 0; t < COUNT; ++t) {
            mma(acc[t], low[i].x, high[i].x, low[i].y, high[i].y, v[i][t].x, v[i][t].y);
            mma(acc[t], low[i].z, high[i].z, low[i].w, high[i].w, v[i][t].z, v[i][t].w);
        }
}

// Write a warp's sums to shared memory (warps, 8 * COUNT tokens, SUM_STRIDE).
template <int COUNT>
static __device__ __forceinline__ void leave_sums(const float (&acc)[COUNT][4], float* shared, int warp, int hi,
                                                  int lo) {
#pragma unroll
    for (int t = 0; t < COUNT; ++t) {
        float* place = shared + (warp * 8 * COUNT + 8 * t + 2 * lo) * SUM_STRIDE + hi;
        place[0] = acc[t][0];
        place[SUM_STRIDE] = acc[t][1];
        place[8] = acc[t][2];
        place[SUM_STRIDE + 8] = acc[t][3];
    }
}

// The sum for one token and rank over the warps, in their order; `index` is 16 * token + rank.
template <int TASK_TOKENS, int WARP_COUNT>
static __device__ __forceinline__ float sum_of_warps(const float* shared, int index) {
    float value = 0.0f;
#pragma unroll
    for (int w = 0; w < WARP_COUNT; ++w) value += shared[(w * TASK_TOKENS + index / 16) * SUM_STRIDE + index % 16];
    return value;
}
