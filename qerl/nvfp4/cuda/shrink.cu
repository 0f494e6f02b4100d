// lora_shrink:   h[m, r] = sum_k x[m, k] a[r, k], rounded to bfloat16.
//
// Defines: TILES (8 tokens each), WARPS, BATCH.
#include "shrink.cuh"

// grid (ranks / 16, cluster, token groups), cluster (1, cluster, 1), 32 * WARPS threads.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
lora_shrink(const u16* __restrict__ x, const u16* __restrict__ a, u16* __restrict__ h, int tokens, int columns,
            int ranks) {
    __shared__ float shared[TILES * (WARPS * 160 + 128)];
    shrink<TILES, WARPS, BATCH>(
        x, a, shared, tokens, columns, 8 * TILES * blockIdx.z, 16 * blockIdx.x, 0, columns, [] {},
        [=](int token, int rank, float sum) { h[(long long)token * ranks + rank] = to_bf16(sum); });
}
