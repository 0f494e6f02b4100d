// lora_shrink:   h[m, r] = sum_k x[m, k] a[r, k], rounded to bfloat16.
//
// Macros: TILES (8 tokens each), WARPS, BATCH (loads of 32 columns that a warp has in flight).
#include "shrink.cuh"

#define TOKENS (8 * TILES)

// grid (ranks / 16, cluster, token groups), cluster (1, cluster, 1), 32 * WARPS threads. `columns` is a multiple of 8.
// The sum has a fixed order.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
lora_shrink(const u16* __restrict__ x, const u16* __restrict__ a, u16* __restrict__ h, int tokens, int columns,
            int ranks) {
    __shared__ float shared[WARPS * TOKENS * SUM_STRIDE + 16 * TOKENS];
    float* total = shared + WARPS * TOKENS * SUM_STRIDE;
    const int first_token = TOKENS * blockIdx.z, first_rank = 16 * blockIdx.x;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, hi = lane >> 2, lo = lane & 3;
    const int cluster = gridDim.y, rank = cluster == 1 ? 0 : cluster_rank();
    float acc[TILES][4];
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[t][i] = 0.0f;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const int step = 32 * WARPS * cluster;
    for (int start = 32 * (rank * WARPS + warp); start < columns; start += BATCH * step) {
        uint4 low[BATCH], high[BATCH], v[BATCH][TILES];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int column = start + 8 * lo + i * step;
            const bool inside = column < columns;
            const u16* source = a + (long long)(first_rank + hi) * columns + column;
            low[i] = inside ? __ldg(reinterpret_cast<const uint4*>(source)) : zero;
            high[i] = inside ? __ldg(reinterpret_cast<const uint4*>(source + 8ll * columns)) : zero;
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                const int token = first_token + 8 * t + hi;
                v[i][t] = inside && token < tokens
                    ? __ldg(reinterpret_cast<const uint4*>(x + (long long)token * columns + column)) : zero;
            }
        }
        keep_order();
        add_products(low, high, v, acc);
    }
    leave_sums(acc, shared, warp, hi, lo);
    __syncthreads();
    for (int index = threadIdx.x; index < 16 * TOKENS; index += 32 * WARPS)
        total[index] = sum_of_warps<TOKENS, WARPS>(shared, index);
    if (cluster == 1) __syncthreads(); else cluster_sync();
    if (rank == 0)
        for (int index = threadIdx.x; index < 16 * TOKENS; index += 32 * WARPS) {
            const int token = first_token + index / 16;
            float value = 0.0f;
            for (int peer = 0; peer < cluster; ++peer)
                value += cluster == 1 ? total[index] : load_peer(total + index, peer);
            if (token < tokens) {
                const int column = first_rank + index % 16;
                h[(long long)token * ranks + column] = to_bf16(value);
            }
        }
    if (cluster > 1) cluster_sync();  // no block may exit while others read its sums
}
