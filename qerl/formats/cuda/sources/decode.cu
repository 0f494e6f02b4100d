// nvfp4_decode:  dense[n, k] = code[n, k] scale[n, k / 16], exact in bfloat16, from the layouts of Humming and Marlin.
#include "codes.cuh"

#define DECODE_BLOCKS 8
#define DECODE_WARPS 4
#define DECODE_STRIDE (DECODE_BLOCKS * 32 + 16)

// grid (ceil(blocks / (DECODE_BLOCKS * DECODE_WARPS)), tiles), 32 * DECODE_WARPS threads. Writes `rows` rows of the
// weight, from row_start on, as dense bfloat16 without the factor alpha.
extern "C" __global__ void __launch_bounds__(32 * DECODE_WARPS)
nvfp4_decode(const uint4* __restrict__ words, const u8* __restrict__ scales, u16* __restrict__ out, int row_start,
             int rows, int columns, int padded_rows) {
    __shared__ __align__(16) u8 buffer[DECODE_WARPS][16 * DECODE_STRIDE];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, hi = lane >> 2, lo = lane & 3;
    const int blocks = columns >> 4, first = (blockIdx.x * DECODE_WARPS + warp) * DECODE_BLOCKS;
    const int tile = row_start / 64 + blockIdx.y;
    if (first >= blocks) return;
    const int count = blocks - first < DECODE_BLOCKS ? blocks - first : DECODE_BLOCKS;
    uint4 word[DECODE_BLOCKS];
    uint2 bytes[DECODE_BLOCKS];
#pragma unroll
    for (int u = 0; u < DECODE_BLOCKS; ++u)
        if (u < count) {
            word[u] = load_stream(words + (long long)(first + u) * (padded_rows >> 1) + tile * 32 + lane);
            const u8* source = scales + (long long)(first + u) * padded_rows + tile * 64 + 8 * hi;
            bytes[u] = __ldg(reinterpret_cast<const uint2*>(source));
        }
    u8* mine = buffer[warp];
    const u32 back = 0x4C804C80u;  // 2^26, exact
#pragma unroll
    for (int w = 0; w < 4; ++w) {
#pragma unroll
        for (int u = 0; u < DECODE_BLOCKS; ++u)
            if (u < count) {
                u32 scale[4], a[4];
                four_scales(w < 2 ? bytes[u].x : bytes[u].y, scale);
                operands(w == 0 ? word[u].x : w == 1 ? word[u].y : w == 2 ? word[u].z : word[u].w, scale[w % 2 * 2],
                         scale[w % 2 * 2 + 1], a);
#pragma unroll
                for (int i = 0; i < 4; ++i) {  // a[i]: rows hi + 8 * (i & 1), columns 8 * (i >> 1) + 2 * lo
                    u8* place = mine + (hi + 8 * (i & 1)) * DECODE_STRIDE + 32 * u + 16 * (i >> 1) + 4 * lo;
                    *reinterpret_cast<u32*>(place) = fma_bf16x2(a[i], back);
                }
            }
        __syncwarp();
        for (int index = lane; index < 16 * 2 * DECODE_BLOCKS; index += 32) {
            const int local = index / (2 * DECODE_BLOCKS), chunk = index % (2 * DECODE_BLOCKS);
            const int row = tile * 64 + 16 * w + local - row_start;
            if (chunk < 2 * count && row >= 0 && row < rows) {
                const uint4 value = *reinterpret_cast<uint4*>(mine + local * DECODE_STRIDE + 16 * chunk);
                *reinterpret_cast<uint4*>(out + (long long)row * columns + 16 * first + 8 * chunk) = value;
            }
        }
        __syncwarp();
    }
}
