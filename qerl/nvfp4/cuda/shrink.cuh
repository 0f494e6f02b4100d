// h[m, r] = sum_k x[m, k] a[r, k], for the first blocks of a launch, which hand h over to the later ones.
#pragma once
#include "common.cuh"

// One cluster (1, cluster, 1) of 32 * BLOCK_WARPS threads makes 16 ranks of 8 * GROUP_TILES tokens. `shared`: at least
// BLOCK_WARPS * GROUP_TILES * 640 + GROUP_TILES * 512 bytes. The sum over k has a fixed order.
template <int GROUP_TILES, int BLOCK_WARPS, int BATCH>
static __device__ void shrink(const u16* __restrict__ x, const u16* __restrict__ a, u16* h, u32* counters, float* shared,
                              int tokens, int columns, int ranks, int slab, int token_group) {
    constexpr int GROUP_TOKENS = 8 * GROUP_TILES;
    float* total = shared + BLOCK_WARPS * GROUP_TOKENS * 20;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, hi = lane >> 2, lo = lane & 3;
    const int cluster = gridDim.y, rank = cluster == 1 ? 0 : cluster_rank();
    const int first_token = token_group * GROUP_TOKENS, row = slab * 16 + hi;
    float acc[GROUP_TILES][4];
#pragma unroll
    for (int t = 0; t < GROUP_TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[t][i] = 0.0f;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const int step = 32 * BLOCK_WARPS * cluster;
    for (int start = 32 * (rank * BLOCK_WARPS + warp) + 8 * lo; start - 8 * lo < columns; start += BATCH * step) {
        uint4 low[BATCH], high[BATCH], v[BATCH][GROUP_TILES];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int column = start + i * step;
            const bool inside = column < columns;
            const u16* source = a + (long long)row * columns + column;
            low[i] = inside ? __ldg(reinterpret_cast<const uint4*>(source)) : zero;
            high[i] = inside ? __ldg(reinterpret_cast<const uint4*>(source + 8ll * columns)) : zero;
#pragma unroll
            for (int t = 0; t < GROUP_TILES; ++t) {
                const int token = first_token + 8 * t + hi;
                v[i][t] = inside && token < tokens
                    ? __ldg(reinterpret_cast<const uint4*>(x + (long long)token * columns + column)) : zero;
            }
        }
        keep_order();
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
#pragma unroll
            for (int t = 0; t < GROUP_TILES; ++t) {
                mma(acc[t], low[i].x, high[i].x, low[i].y, high[i].y, v[i][t].x, v[i][t].y);  // both permute k alike
                mma(acc[t], low[i].z, high[i].z, low[i].w, high[i].w, v[i][t].z, v[i][t].w);
            }
    }
#pragma unroll
    for (int t = 0; t < GROUP_TILES; ++t) {
        float* place = shared + (warp * GROUP_TOKENS + 8 * t + 2 * lo) * 20 + hi;
        place[0] = acc[t][0];
        place[20] = acc[t][1];
        place[8] = acc[t][2];
        place[28] = acc[t][3];
    }
    __syncthreads();
    for (int index = threadIdx.x; index < 16 * GROUP_TOKENS; index += 32 * BLOCK_WARPS) {
        float value = 0.0f;
#pragma unroll
        for (int w = 0; w < BLOCK_WARPS; ++w) value += shared[(w * GROUP_TOKENS + index / 16) * 20 + index % 16];
        total[index] = value;
    }
    if (cluster == 1) __syncthreads(); else cluster_sync();
    if (rank == 0) {
        for (int index = threadIdx.x; index < 16 * GROUP_TOKENS; index += 32 * BLOCK_WARPS) {
            const int token = first_token + index / 16;
            float value = 0.0f;
            for (int peer = 0; peer < cluster; ++peer)
                value += cluster == 1 ? total[index] : load_peer(total + index, peer);
            if (token < tokens) h[(long long)token * ranks + slab * 16 + index % 16] = to_bf16(value);
        }
        __syncthreads();
        if (threadIdx.x == 0) hand_over(counters);
    }
    if (cluster > 1) cluster_sync();  // no block may leave while others read its sums
}
