// nvfp4_decode_slabs:  dense[n, k] = code[n, k] scale[n, k / 16], exact in bfloat16, from qerl's own layout.
#include "slabs.cuh"

#define LAID_SLABS 16  // slabs of 16 rows that are stored together, see slab_layout.py
#define WARPS 4
#define SLABS 2  // slabs that a warp decodes
#define UNITS 4  // units of 64 columns that a warp decodes
#define STRIDE (UNITS * 128 + 16)  // bytes between rows in shared memory, chosen to avoid bank conflicts

// grid (ceil(units / (UNITS * WARPS)), slabs / SLABS), 32 * WARPS threads. Writes `rows` rows of the weight, from
// row_start on, as dense bfloat16 without the factor alpha. `columns` is a multiple of 16; the padding up to a whole
// unit is not written.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
nvfp4_decode_slabs(const uint4* __restrict__ words, const u8* __restrict__ scales, u16* __restrict__ out, int row_start,
                   int rows, int columns) {
    __shared__ __align__(16) u8 buffer[WARPS][16 * STRIDE];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, hi = lane >> 2, lo = lane & 3;
    const int units = (columns + 63) / 64, first = (blockIdx.x * WARPS + warp) * UNITS;
    const int first_slab = row_start / 16 + blockIdx.y * SLABS, past_slab = (row_start + rows + 15) / 16;
    if (first >= units) return;
    uint4 word[SLABS][UNITS];
    uint2 bytes[SLABS][UNITS];
#pragma unroll
    for (int s = 0; s < SLABS; ++s)
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
            if (first + u < units && first_slab + s < past_slab) {
                const int slab = first_slab + s;
                const long long unit = (long long)(slab / LAID_SLABS) * units + first + u;
                const long long place = unit * LAID_SLABS + slab % LAID_SLABS;
                word[s][u] = load_stream(words + place * 32 + lane);
                bytes[s][u] = __ldg(reinterpret_cast<const uint2*>(scales + place * 64 + 8 * hi));
            }
    u8* mine = buffer[warp];
    const u32 back = 0x49004900u;  // 2^19, exact
#pragma unroll
    for (int s = 0; s < SLABS; ++s) {
        if (first_slab + s >= past_slab) break;
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                if (first + u >= units) break;
                const u32 of_two = b < 2 ? bytes[s][u].x : bytes[s][u].y, four = b == 0 ? word[s][u].x
                    : b == 1 ? word[s][u].y : b == 2 ? word[s][u].z : word[s][u].w;
                u32 a[4];
                operands(four, two_scales(of_two, b % 2, SCALE_BITS), a);
#pragma unroll
                for (int i = 0; i < 4; ++i) {  // a[i]: rows hi + 8 * (i & 1), columns 8 * (i >> 1) + 2 * lo
                    u8* place = mine + (hi + 8 * (i & 1)) * STRIDE + 128 * u + 32 * b + 16 * (i >> 1) + 4 * lo;
                    *reinterpret_cast<u32*>(place) = fma_bf16x2(a[i], back);
                }
            }
        __syncwarp();
        const int column = 64 * first + 8 * lane;  // 8 columns per lane: one row of the warp's units at a time
#pragma unroll 4
        for (int local = 0; local < 16; ++local) {
            const int row = 16 * (first_slab + s) + local - row_start;
            if (column < columns && row >= 0 && row < rows) {
                const uint4 value = *reinterpret_cast<uint4*>(mine + local * STRIDE + 16 * lane);
                *reinterpret_cast<uint4*>(out + (long long)row * columns + column) = value;
            }
        }
        __syncwarp();
    }
}
