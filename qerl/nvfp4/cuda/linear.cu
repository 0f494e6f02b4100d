// nvfp4_linear:  out[m, n] = alpha * sum_k x[m, k] code[n, k] scale[n, k / 16] + bias[n] + sum_r h[m, r] b[n, r],
// with h[m, r] = sum_k x[m, k] a[r, k] rounded to bfloat16, in one launch: the first blocks make h while the others
// multiply by the weight, which add the adapter's part at their end.
//
// Sums are float32, over the slices of K in a fixed order (warps, then the blocks of a cluster through distributed
// shared memory): a call repeats to the bit. Codes and scales: codes.cuh.
//
// Defines: TILES (8 tokens each), WARPS_N (64 rows each), WARPS_K, UNROLL, STAGES, SHRINK_BATCH, TRANSPOSED, MARLIN.
#include "codes.cuh"
#include "shrink.cuh"

#define TOKENS (8 * TILES)
#define ROWS (64 * WARPS_N)
#define RED_STRIDE (ROWS + 4)
#define SLOT (UNROLL * 576)
#define SHRINK_TILES (TILES == 1 ? 1 : 2)
#define TAKEN (TILES < 2 ? TILES : 2)
#define AT_ONCE (TILES == 1 ? 2 : 1)

// Hidden values of COUNT tiles of tokens as operands of the tensor cores, once all are there: the sums of their parts,
// which lie `stride` words apart and are asked for BATCH together; `place` is the lane's first value.
template <int COUNT, int BATCH>
static __device__ __forceinline__ void take(const u64* place, int stride, int parts, int tokens, int ranks, u32 tag,
                                            u32 (&operand)[COUNT][2]) {
    float sums[COUNT][2][2];
#pragma unroll
    for (int i = 0; i < COUNT * 4; ++i) sums[i / 4][i / 2 % 2][i % 2] = 0.0f;
    for (int part = 0; part < parts; part += BATCH, place += (long long)BATCH * stride) {
        TwoTagged two[BATCH][COUNT][2];
        bool missing;
        do {
            missing = false;
#pragma unroll
            for (int i = 0; i < BATCH * COUNT * 2; ++i) {
                const int p = i / (COUNT * 2), t = i / 2 % COUNT, half = i % 2;
                if (part + p < parts && 8 * t < tokens)
                    two[p][t][half] =
                        load_tagged(place + (long long)p * stride + (long long)(8 * t) * ranks + 8 * half);
                else two[p][t][half] = {0.0f, tag, 0.0f, tag};
            }
#pragma unroll
            for (int i = 0; i < BATCH * COUNT * 2; ++i) {
                const TwoTagged& one = two[i / (COUNT * 2)][i / 2 % COUNT][i % 2];
                missing |= one.tag_0 != tag || one.tag_1 != tag;
            }
        } while (missing);
#pragma unroll
        for (int i = 0; i < BATCH * COUNT * 2; ++i) {
            const TwoTagged& one = two[i / (COUNT * 2)][i / 2 % COUNT][i % 2];
            sums[i / 2 % COUNT][i % 2][0] += one.value_0;
            sums[i / 2 % COUNT][i % 2][1] += one.value_1;
        }
    }
#pragma unroll
    for (int i = 0; i < COUNT * 2; ++i)
        operand[i / 2][i % 2] = (u32)to_bf16(sums[i / 2][i % 2][0]) | (u32)to_bf16(sums[i / 2][i % 2][1]) << 16;
}

// grid (shrink_groups + row groups, cluster), cluster (1, cluster, 1), 32 * WARPS_N * WARPS_K threads. The first
// shrink_groups clusters have 16 ranks, 8 * SHRINK_TILES tokens and a range of K each; `handed` is (parts, tokens,
// ranks). Shared memory: the block's slice of x (TOKENS rows), the warps' rings; at last, over both, the partial sums.
extern "C" __global__ void __launch_bounds__(32 * WARPS_N * WARPS_K)
nvfp4_linear(const u16* __restrict__ x, const uint4* __restrict__ words, const u8* __restrict__ scales,
             const u16* __restrict__ bias, const u16* __restrict__ a, const u16* __restrict__ b, u64* counters,
             u64* handed, u16* __restrict__ out, int tokens, int rows, int columns, int padded_rows, float alpha,
             int shrink_groups, int parts, int slot, int ranks, int part_rank, int part_end_0, int part_end_1) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ u32 tag;  // there after the next barrier
    u64 ticket = 0;
    if (shrink_groups && threadIdx.x == 0) ticket = draw_ticket(counters, slot);
    auto know_tag = [&] {
        if (threadIdx.x == 0) tag = launch_tag(ticket, slot);
    };
    if ((int)blockIdx.x < shrink_groups) {
        const int slabs = ranks >> 4, part = blockIdx.x / slabs % parts;
        const int width = 32 * WARPS_N * WARPS_K * SHRINK_BATCH * gridDim.y, begin = part * width;
        shrink<SHRINK_TILES, WARPS_N * WARPS_K, SHRINK_BATCH>(
            x, a, reinterpret_cast<float*>(shared), tokens, columns, blockIdx.x / slabs / parts * 8 * SHRINK_TILES,
            blockIdx.x % slabs * 16, begin, begin + width < columns ? begin + width : columns, know_tag,
            [&](int token, int rank, float sum) {
                hand_over(handed + ((long long)part * tokens + token) * ranks + rank, sum, tag);
            });
        return;
    }
    const int row_group = blockIdx.x - shrink_groups;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int warp_n = warp % WARPS_N, warp_k = warp / WARPS_N;
    const int cluster = gridDim.y, rank = cluster == 1 ? 0 : cluster_rank();
    const int blocks = columns >> 4;
    const int first = (int)((long long)rank * blocks / cluster), last = (int)((long long)(rank + 1) * blocks / cluster);
    const int tile = row_group * WARPS_N + warp_n, tiles = padded_rows >> 6;
    const int begin = first + (last - first) * warp_k / WARPS_K, end = first + (last - first) * (warp_k + 1) / WARPS_K;
    const bool active = tile < tiles;

    // A ring of STAGES slots for each warp, filled by asynchronous copies: UNROLL blocks of words, then of scales.
    const int slice = (last - first) * 16, stride = slice * 2 + 16, chunks = slice >> 3;
    const u32 x_shared = (u32)__cvta_generic_to_shared(shared);
    const u8* mine = shared + TOKENS * ((blocks + cluster - 1) / cluster * 32 + 16) + warp * STAGES * SLOT;
    const u32 ring = (u32)__cvta_generic_to_shared(mine);
    const uint4* tile_words = words + (long long)tile * 32 + lane;
    const long long word_stride = padded_rows >> 1;  // uint4 a block of columns
    const u8* tile_scales = scales + (long long)tile * 64 + 16 * (lane & 3);
    auto fetch = [&](int turn) {
        const int block = begin + turn * UNROLL;
        const u32 slot = ring + (turn % STAGES) * SLOT;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (active && block + u < end)
                copy_16(slot + 512 * u + 16 * lane, tile_words + (block + u) * word_stride, 16);
        const int u = lane >> 2;
        if (active && u < UNROLL && block + u < end)
            copy_16(slot + 512 * UNROLL + 16 * lane, tile_scales + (long long)(block + u) * padded_rows, 16);
        commit();
    };

    // x, columns 16 * first ... 16 * last, rows padded by 16 bytes so that ldmatrix meets no bank conflict
    for (int index = threadIdx.x; index < TOKENS * chunks; index += blockDim.x) {
        const int token = index / chunks, chunk = index % chunks;
        const u16* source = x + (long long)(token < tokens ? token : 0) * columns + 16 * first + 8 * chunk;
        copy_16(x_shared + token * stride + chunk * 16, source, token < tokens ? 16 : 0);  // the rest becomes zeros
    }
    commit();
#pragma unroll
    for (int turn = 0; turn < STAGES - 1; ++turn) fetch(turn);
    float acc[4][TILES][4];
#pragma unroll
    for (int w = 0; w < 4; ++w)
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[w][t][i] = 0.0f;

    // The adapter's 16-wide slices of the rank go round the warps of a tile; B is a block diagonal of the parts.
    const int row = tile * 64 + (lane >> 2), workers = cluster * WARPS_K, me = rank * WARPS_K + warp_k;
    auto has_work = [&](int slab) {
        const int part = 16 * slab / part_rank;
        const int part_begin = part == 0 ? 0 : part == 1 ? part_end_0 : part_end_1;
        const int part_end = part == 0 ? part_end_0 : part == 1 ? part_end_1 : rows;
        return active && tile * 64 < part_end && tile * 64 + 64 > part_begin;
    };
    for (int slab = me; 16 * slab < ranks; slab += workers)
        if (has_work(slab) && (lane & 3) == 0)
#pragma unroll
            for (int eight = 0; eight < 8; ++eight)
                if (row + 8 * eight < rows) prefetch(b + (long long)(row + 8 * eight) * ranks + 16 * slab);

    wait_for_all_but<STAGES - 1>();  // x is there
    if (shrink_groups) know_tag();
    __syncthreads();

    const u32 x_address = x_shared + (lane & 7) * stride + ((lane >> 3) & 1) * 16 +
                          (TILES > 1 ? (lane >> 4) * 8 * stride : 0);
    auto step = [&](const uint4& four, const uint2& bytes, int block) {
        u32 token_operands[TILES][2];
        const u32 address = x_address + (block - first) * 32;
        if (TILES == 1) {
            asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                : "=r"(token_operands[0][0]), "=r"(token_operands[0][1]) : "r"(address));
        } else {
#pragma unroll
            for (int t = 0; t + 1 < TILES; t += 2)
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                    : "=r"(token_operands[t][0]), "=r"(token_operands[t][1]), "=r"(token_operands[t + 1][0]),
                      "=r"(token_operands[t + 1][1])
                    : "r"(address + t * 8 * stride));
        }
        u32 scale[8];
        block_scales(bytes, scale);
        const u32 each[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            u32 a[4];
            operands(each[w], scale[2 * w], scale[2 * w + 1], a);
#pragma unroll
            for (int t = 0; t < TILES; ++t)
                mma(acc[w][t], a[0], a[1], a[2], a[3], token_operands[t][0], token_operands[t][1]);
        }
    };
    const int turns = (end - begin + UNROLL - 1) / UNROLL;
    for (int turn = 0; turn < turns; ++turn) {
        wait_for_all_but<STAGES - 2>();
        __syncwarp();
        fetch(turn + STAGES - 1);
        const u8* slot = mine + (turn % STAGES) * SLOT;
        const int block = begin + turn * UNROLL;
        auto one = [&](int u) {
            step(*reinterpret_cast<const uint4*>(slot + 512 * u + 16 * lane),
                 *reinterpret_cast<const uint2*>(slot + 512 * UNROLL + 64 * u + 8 * (lane >> 2)), block + u);
        };
        if (!active) continue;
        if (block + UNROLL <= end) {
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) one(u);
        } else {
            for (int u = 0; block + u < end; ++u) one(u);
        }
    }

#pragma unroll
    for (int w = 0; w < 4; ++w)
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[w][t][i] *= alpha;

    for (int slab = me; 16 * slab < ranks; slab += workers) {
        if (!has_work(slab)) continue;
        const int column = 16 * slab + 2 * (lane & 3);
        u32 factor[4][4];
#pragma unroll
        for (int w = 0; w < 4; ++w)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int line = row + 16 * w + 8 * (i & 1);
                factor[w][i] = line < rows ? load_u32(b + (long long)line * ranks + column + 8 * (i >> 1)) : 0;
            }
#pragma unroll
        for (int t = 0; t < TILES; t += TAKEN) {
            u32 hidden[TAKEN][2];
            const int token = 8 * t + (lane >> 2);  // of the first tile; a lane counts its tokens from there
            take<TAKEN, AT_ONCE>(handed + (long long)token * ranks + column, tokens * ranks, parts, tokens - token,
                                 ranks, tag, hidden);
#pragma unroll
            for (int i = 0; i < TAKEN; ++i)
#pragma unroll
                for (int w = 0; w < 4; ++w)
                    mma(acc[w][t + i], factor[w][0], factor[w][1], factor[w][2], factor[w][3], hidden[i][0],
                        hidden[i][1]);
        }
    }

    wait_for_all_but<0>();
    __syncthreads();
    // x and the rings have been read: their place now takes the partial sums, (WARPS_K, TOKENS, ROWS)
    float* sums = reinterpret_cast<float*>(shared);
    float* corner = sums + (long long)warp_k * TOKENS * RED_STRIDE + warp_n * 64 + (lane >> 2);
#pragma unroll
    for (int w = 0; w < 4; ++w)
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            float* place = corner + (8 * t + 2 * (lane & 3)) * RED_STRIDE + 16 * w;
            place[0] = acc[w][t][0];
            place[RED_STRIDE] = acc[w][t][1];
            place[8] = acc[w][t][2];
            place[RED_STRIDE + 8] = acc[w][t][3];
        }
    if (cluster == 1) __syncthreads(); else cluster_sync();

    const int group = row_group * ROWS, share = ROWS / cluster;
    const int used = tokens < TOKENS ? tokens : TOKENS;
    for (int index = threadIdx.x; index < share * used; index += blockDim.x) {
        const int token = index / share, local = rank * share + index % share, row = group + local;
        if (row >= rows) continue;
        float total = bias ? from_bf16(bias[row]) : 0.0f;
        for (int peer = 0; peer < cluster; ++peer)
#pragma unroll
            for (int k = 0; k < WARPS_K; ++k) {
                const float* place = sums + ((long long)k * TOKENS + token) * RED_STRIDE + local;
                total += cluster == 1 ? *place : load_peer(place, peer);
            }
        out[(long long)token * rows + row] = to_bf16(total);
    }
    if (cluster > 1) cluster_sync();  // no block may leave while others read its sums
}
