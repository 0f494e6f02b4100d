// lora_add:  out[m, n] += sum_r h[m, r] b[n, r], h[m, r] = sum_k x[m, k] a[r, k] rounded to bfloat16, in one launch: the
// first blocks make h while the others fetch what they will add it to.
//
// Defines: SPAN (a warp adds to 16 * SPAN tokens x 32 rows), SHRINK_TILES, SHRINK_BATCH.
#include "shrink.cuh"

#define WARPS 8

static __device__ __forceinline__ u32 add_two(u32 two, float low, float high) {
    return (u32)to_bf16(from_bf16(two) + low) | (u32)to_bf16(from_bf16(two >> 16) + high) << 16;
}

// grid (shrink_groups + ..., cluster), cluster (1, cluster, 1), 32 * WARPS threads; `rows` in steps of 8.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
lora_add(const u16* __restrict__ x, const u16* __restrict__ a, const u16* __restrict__ b, u16* h, u32* counters,
         u16* __restrict__ out, int tokens, int rows, int columns, int shrink_groups, int ranks, int part_rank,
         int part_end_0, int part_end_1) {
    __shared__ float shared[SHRINK_TILES * (WARPS * 160 + 128)];
    if ((int)blockIdx.x < shrink_groups) {
        shrink<SHRINK_TILES, WARPS, SHRINK_BATCH>(x, a, h, counters, shared, tokens, columns, ranks,
                                                  blockIdx.x % (ranks >> 4), blockIdx.x / (ranks >> 4));
        return;
    }
    const int lane = threadIdx.x & 31, hi = lane >> 2, lo = lane & 3;
    const int block = (blockIdx.x - shrink_groups) * gridDim.y + blockIdx.y;
    const int unit = block * WARPS + (threadIdx.x >> 5), row_units = (rows + 31) >> 5;
    const int row = 32 * (unit % row_units), first_token = 16 * SPAN * (unit / row_units);
    if (first_token < tokens) {
        const int own_row = row + 8 * lo;  // a lane has 8 rows of 2 * SPAN tokens
        const bool has_rows = own_row < rows;
        uint4 old[SPAN][2];
#pragma unroll
        for (int s = 0; s < SPAN; ++s)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int token = first_token + 16 * s + 8 * i + hi;
                if (has_rows && token < tokens)
                    old[s][i] = *reinterpret_cast<const uint4*>(out + (long long)token * rows + own_row);
            }
        float acc[SPAN][4][4];
#pragma unroll
        for (int s = 0; s < SPAN; ++s)
#pragma unroll
            for (int t = 0; t < 4; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[s][t][i] = 0.0f;
        const int last_row = (row + 31 < rows ? row + 31 : rows - 1);
        const int first_part = (row >= part_end_0) + (row >= part_end_1);
        const int last_part = (last_row >= part_end_0) + (last_row >= part_end_1);
        const int end = (last_part + 1) * part_rank;
        for (int column = first_part * part_rank; column < end; column += 16) {
            // Column j of tile t is row 8 * (j / 2) + 2 * t + j % 2, so that a lane's results are neighbours; k is permuted
            // alike in both operands: a lane has four neighbours.
            uint2 factor[4];
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const int line = row + 8 * (hi >> 1) + 2 * t + (hi & 1);
                factor[t] = line < rows
                    ? __ldg(reinterpret_cast<const uint2*>(b + (long long)line * ranks + column + 4 * lo)) : make_uint2(0, 0);
            }
            if (column == first_part * part_rank) wait_for(counters, shrink_groups);
#pragma unroll
            for (int s = 0; s < SPAN; ++s) {
                uint2 hidden[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int token = first_token + 16 * s + 8 * i + hi;
                    hidden[i] = token < tokens
                        ? __ldcg(reinterpret_cast<const uint2*>(h + (long long)token * ranks + column + 4 * lo))
                        : make_uint2(0, 0);
                }
#pragma unroll
                for (int t = 0; t < 4; ++t)
                    mma(acc[s][t], hidden[0].x, hidden[1].x, hidden[0].y, hidden[1].y, factor[t].x, factor[t].y);
            }
        }
#pragma unroll
        for (int s = 0; s < SPAN; ++s)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int token = first_token + 16 * s + 8 * i + hi;
                if (!has_rows || token >= tokens) continue;
                const uint4 was = old[s][i];
                *reinterpret_cast<uint4*>(out + (long long)token * rows + own_row) =
                    make_uint4(add_two(was.x, acc[s][0][2 * i], acc[s][0][2 * i + 1]),
                               add_two(was.y, acc[s][1][2 * i], acc[s][1][2 * i + 1]),
                               add_two(was.z, acc[s][2][2 * i], acc[s][2][2 * i + 1]),
                               add_two(was.w, acc[s][3][2 * i], acc[s][3][2 * i + 1]));
            }
    }
    __syncthreads();
    if (threadIdx.x == 0) leave(counters, (gridDim.x - shrink_groups) * gridDim.y);
}
