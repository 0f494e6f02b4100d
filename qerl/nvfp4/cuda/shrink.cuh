// sum_k x[m, k] a[r, k] over a range of k, by one cluster (1, cluster, 1) of 32 * WARPS threads.
#pragma once
#include "common.cuh"

// For 16 ranks from `first_rank` and 8 * GROUP_TILES tokens from `first_token`: block 0 of the cluster calls
// emit(token, rank, sum) for each; before() is called by all threads when their loads are back. `columns` is a multiple
// of 8. A warp has GROUP_BATCH loads of 32 columns under way at once; `shared` holds at least
// GROUP_WARPS * GROUP_TILES * 640 + GROUP_TILES * 512 bytes. The sum has a fixed order.
template <int GROUP_TILES, int GROUP_WARPS, int GROUP_BATCH, class Before, class Emit>
static __device__ __forceinline__ void shrink(const u16* __restrict__ x, const u16* __restrict__ a, float* shared,
                                              int tokens, int columns, int first_token, int first_rank, int begin,
                                              int end, Before before, Emit emit) {
    constexpr int GROUP_TOKENS = 8 * GROUP_TILES;
    float* total = shared + GROUP_WARPS * GROUP_TOKENS * 20;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, hi = lane >> 2, lo = lane & 3;
    const int cluster = gridDim.y, rank = cluster == 1 ? 0 : cluster_rank();
    float acc[GROUP_TILES][4];
#pragma unroll
    for (int t = 0; t < GROUP_TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[t][i] = 0.0f;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const int step = 32 * GROUP_WARPS * cluster;
    for (int start = begin + 32 * (rank * GROUP_WARPS + warp); start < end; start += GROUP_BATCH * step) {
        uint4 low[GROUP_BATCH], high[GROUP_BATCH], v[GROUP_BATCH][GROUP_TILES];
#pragma unroll
        for (int i = 0; i < GROUP_BATCH; ++i) {
            const int column = start + 8 * lo + i * step;
            const bool inside = column < end;
            const u16* source = a + (long long)(first_rank + hi) * columns + column;
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
        for (int i = 0; i < GROUP_BATCH; ++i)
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
    before();
    __syncthreads();
    for (int index = threadIdx.x; index < 16 * GROUP_TOKENS; index += 32 * GROUP_WARPS) {
        float value = 0.0f;
#pragma unroll
        for (int w = 0; w < GROUP_WARPS; ++w) value += shared[(w * GROUP_TOKENS + index / 16) * 20 + index % 16];
        total[index] = value;
    }
    if (cluster == 1) __syncthreads(); else cluster_sync();
    if (rank == 0)
        for (int index = threadIdx.x; index < 16 * GROUP_TOKENS; index += 32 * GROUP_WARPS) {
            const int token = first_token + index / 16;
            float value = 0.0f;
            for (int peer = 0; peer < cluster; ++peer)
                value += cluster == 1 ? total[index] : load_peer(total + index, peer);
            if (token < tokens) emit(token, first_rank + index % 16, value);
        }
    if (cluster > 1) cluster_sync();  // no block may leave while others read its sums
}
