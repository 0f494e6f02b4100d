// Products of an NVFP4 weight, in the order in which Humming or Marlin keep it, with a few tokens; and the adapter's.
//
// nvfp4_linear:  out[m, n] = alpha * sum_k x[m, k] code[n, k] scale[n, k / 16] + bias[n] + sum_r h[m, r] b[n, r]
// lora_shrink:   h[m, r] = sum_k x[m, k] a[r, k]
// nvfp4_decode:  dense[n, k] = code[n, k] scale[n, k / 16]
//
// A tile of 64 rows x 16 columns lies in memory as the fragments of mma.m16n8k16 (see kernel_layout.py): a lane's 16
// bytes are its A operands for four mma, with the tokens as columns. So a weight goes from memory to the tensor core
// through registers alone. A code becomes bfloat16 by moving its bits (its value times 2^-126, subnormals included), and
// the product with the block scale times 2^100 is exact: 2 and 4 significant bits. Sums are float32, over the slices of
// K in a fixed order (warps, then the blocks of a cluster through distributed shared memory): a call repeats to the bit.
//
// Defines: TILES (8 tokens each), WARPS_N (64 rows each), WARPS_K, UNROLL, TRANSPOSED, MARLIN; for lora_shrink TILES and
// WARPS. Compiled by NVRTC without headers.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

#ifndef TILES
#define TILES 1
#endif
#ifndef WARPS_N
#define WARPS_N 4
#endif
#ifndef WARPS_K
#define WARPS_K 2
#endif
#ifndef UNROLL
#define UNROLL 4
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef TRANSPOSED
#define TRANSPOSED 1
#endif
#ifndef MARLIN
#define MARLIN 0
#endif
#ifndef WARPS
#define WARPS 8
#endif

#ifndef BATCH
#define BATCH 5
#endif

#define TOKENS (8 * TILES)
#define ROWS (64 * WARPS_N)
#define RED_STRIDE (ROWS + 4)
#define SLOT (UNROLL * 576)

static __device__ __forceinline__ u32 fma_bf16x2(u32 a, u32 b) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
    return d;
}

static __device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two codes (nibble J of each half word) as bfloat16 times 2^-126.
template <int J>
static __device__ __forceinline__ u32 two_codes(u32 word) {
    const u32 top = J == 3 ? word : word << (12 - 4 * J);
    return (top & 0x80008000u) | ((top >> 6) & 0x01C001C0u);
}

template <int HALF>
static __device__ __forceinline__ u32 twice(u32 two) {
    u32 d;
    if (HALF) asm("{.reg .b16 low, high;\n mov.b32 {low, high}, %1;\n mov.b32 %0, {high, high};}" : "=r"(d) : "r"(two));
    else asm("{.reg .b16 low, high;\n mov.b32 {low, high}, %1;\n mov.b32 %0, {low, low};}" : "=r"(d) : "r"(two));
    return d;
}

// The eight block scales of a lane's rows (8 * group + lane / 4), each twice in a register, times 2^100.
static __device__ __forceinline__ void block_scales(uint2 bytes, u32 (&scale)[8]) {
    // e4m3 shifted into bfloat16's fields is 2^-120 of itself; Marlin's unsigned e5m3 (bias 22) is 2^-105 of itself.
    const u32 unbias = MARLIN ? 0x74007400u : 0x7B807B80u;  // 2^105, 2^120
    const u32 lift = 0x71807180u;                           // 2^100
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        const u32 source = pair < 2 ? bytes.x : bytes.y;
        u32 two = (pair & 1) ? __byte_perm(source, 0, 0x4342) : __byte_perm(source, 0, 0x4140);
        two = fma_bf16x2(fma_bf16x2(two << 4, unbias), lift);
        const u32 low = twice<0>(two), high = twice<1>(two);
        if (MARLIN) {  // stored in the order 0 2 1 3 of each four
            const int base = pair < 2 ? 0 : 4, even = pair & 1;
            scale[base + even] = low;
            scale[base + even + 2] = high;
        } else {
            scale[2 * pair] = low;
            scale[2 * pair + 1] = high;
        }
    }
}

// The A operands of rows 16 * w ... of a tile.
static __device__ __forceinline__ void operands(u32 word, u32 low, u32 high, u32 (&a)[4]) {
    a[0] = fma_bf16x2(two_codes<0>(word), low);
    a[1] = fma_bf16x2(TRANSPOSED ? two_codes<1>(word) : two_codes<2>(word), high);
    a[2] = fma_bf16x2(TRANSPOSED ? two_codes<2>(word) : two_codes<1>(word), low);
    a[3] = fma_bf16x2(two_codes<3>(word), high);
}

static __device__ __forceinline__ uint4 load_stream(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// Sixteen bytes to shared memory, asynchronously; `bytes` 0 writes zeros instead.
static __device__ __forceinline__ void copy_16(u32 target, const void* source, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes));
}

static __device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
static __device__ __forceinline__ void wait_for_all_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// The compiler leaves loads above this where they are, so that all are under way before the first is used.
static __device__ __forceinline__ void keep_order() { asm volatile("griddepcontrol.launch_dependents;"); }

static __device__ __forceinline__ u32 load_u32(const u16* p) { return *reinterpret_cast<const u32*>(p); }

static __device__ __forceinline__ u16 to_bf16(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

static __device__ __forceinline__ float from_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }

static __device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

static __device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

static __device__ __forceinline__ float load_peer(const float* own, u32 rank) {
    const u32 address = (u32)__cvta_generic_to_shared(own);
    u32 peer;
    float value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(peer));
    return value;
}

// grid (row groups, cluster), cluster (1, cluster, 1), 32 * WARPS_N * WARPS_K threads.
// Shared memory: the block's slice of x (TOKENS rows), the warps' rings; at last, over both, the partial sums.
extern "C" __global__ void __launch_bounds__(32 * WARPS_N * WARPS_K)
nvfp4_linear(const u16* __restrict__ x, const uint4* __restrict__ words, const u8* __restrict__ scales,
             const u16* __restrict__ bias, const u16* h, const u16* __restrict__ b, u16* __restrict__ out,
             int tokens, int rows, int columns, int padded_rows, float alpha, int ranks, int part_rank,
             int part_end_0, int part_end_1) {
    extern __shared__ __align__(16) u8 shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int warp_n = warp % WARPS_N, warp_k = warp / WARPS_N;
    const int cluster = gridDim.y, rank = cluster == 1 ? 0 : cluster_rank();
    const int blocks = columns >> 4;
    const int first = (int)((long long)rank * blocks / cluster), last = (int)((long long)(rank + 1) * blocks / cluster);
    const int tile = blockIdx.x * WARPS_N + warp_n, tiles = padded_rows >> 6;
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
            if (active && block + u < end) copy_16(slot + 512 * u + 16 * lane, tile_words + (block + u) * word_stride, 16);
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

    if (ranks) {  // the adapter's 16-wide slices of the rank go round the warps, while the first weights are under way
        const float inverse = 1.0f / alpha;
        const int row = tile * 64 + (lane >> 2), workers = cluster * WARPS_K, me = rank * WARPS_K + warp_k;
        for (int slab = me; active && 16 * slab < ranks; slab += workers) {
            const int part = 16 * slab / part_rank;
            const int part_begin = part == 0 ? 0 : part == 1 ? part_end_0 : part_end_1;
            const int part_end = part == 0 ? part_end_0 : part == 1 ? part_end_1 : rows;
            if (tile * 64 >= part_end || tile * 64 + 64 <= part_begin) continue;
            const int column = 16 * slab + 2 * (lane & 3);
            u32 hidden[TILES][2];
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                const int token = 8 * t + (lane >> 2);
                const u16* source = h + (long long)token * ranks + column;
                hidden[t][0] = token < tokens ? __ldcg(reinterpret_cast<const u32*>(source)) : 0;
                hidden[t][1] = token < tokens ? __ldcg(reinterpret_cast<const u32*>(source + 8)) : 0;
            }
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const int low = row + 16 * w, high = low + 8;
                const u16* source = b + (long long)low * ranks + column;
                const u32 a0 = low < rows ? load_u32(source) : 0, a2 = low < rows ? load_u32(source + 8) : 0;
                source += 8ll * ranks;
                const u32 a1 = high < rows ? load_u32(source) : 0, a3 = high < rows ? load_u32(source + 8) : 0;
#pragma unroll
                for (int t = 0; t < TILES; ++t) mma(acc[w][t], a0, a1, a2, a3, hidden[t][0], hidden[t][1]);
            }
        }
#pragma unroll
        for (int w = 0; w < 4; ++w)
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[w][t][i] *= inverse;  // alpha multiplies everything at the end
    }

    wait_for_all_but<STAGES - 1>();  // x is there
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

    wait_for_all_but<0>();
    __syncthreads();  // x and the rings have been read: their place now takes the partial sums, (WARPS_K, TOKENS, ROWS)
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

    const int group = blockIdx.x * ROWS, share = ROWS / cluster;
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

// grid (ranks / 16, cluster, token groups), cluster (1, cluster, 1), 32 * WARPS threads.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
lora_shrink(const u16* __restrict__ x, const u16* __restrict__ a, u16* __restrict__ h, int tokens, int columns,
            int ranks) {
    __shared__ float sums[WARPS][TOKENS][20];
    __shared__ float total[TOKENS][16];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, hi = lane >> 2, lo = lane & 3;
    const int cluster = gridDim.y, rank = cluster == 1 ? 0 : cluster_rank();
    const int first_token = blockIdx.z * TOKENS, row = blockIdx.x * 16 + hi;
    float acc[TILES][4];
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[t][i] = 0.0f;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const int step = 32 * WARPS * cluster;
    for (int start = 32 * (rank * WARPS + warp) + 8 * lo; start - 8 * lo < columns; start += BATCH * step) {
        uint4 low[BATCH], high[BATCH], v[BATCH][TILES];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int column = start + i * step;
            const bool inside = column < columns;
            const u16* source = a + (long long)row * columns + column;
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
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                mma(acc[t], low[i].x, high[i].x, low[i].y, high[i].y, v[i][t].x, v[i][t].y);  // both permute k alike
                mma(acc[t], low[i].z, high[i].z, low[i].w, high[i].w, v[i][t].z, v[i][t].w);
            }
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        sums[warp][8 * t + 2 * lo][hi] = acc[t][0];
        sums[warp][8 * t + 2 * lo + 1][hi] = acc[t][1];
        sums[warp][8 * t + 2 * lo][hi + 8] = acc[t][2];
        sums[warp][8 * t + 2 * lo + 1][hi + 8] = acc[t][3];
    }
    __syncthreads();
    for (int index = threadIdx.x; index < 16 * TOKENS; index += blockDim.x) {
        float value = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) value += sums[w][index / 16][index % 16];
        total[index / 16][index % 16] = value;
    }
    if (cluster == 1) __syncthreads(); else cluster_sync();
    if (rank == 0)
        for (int index = threadIdx.x; index < 16 * TOKENS; index += blockDim.x) {
            const int token = first_token + index / 16;
            float value = 0.0f;
            for (int peer = 0; peer < cluster; ++peer) {
                const float* place = &total[index / 16][index % 16];
                value += cluster == 1 ? *place : load_peer(place, peer);
            }
            if (token < tokens) h[(long long)token * ranks + blockIdx.x * 16 + index % 16] = to_bf16(value);
        }
    if (cluster > 1) cluster_sync();
}

#define DECODE_BLOCKS 8
#define DECODE_WARPS 4
#define DECODE_STRIDE (DECODE_BLOCKS * 32 + 16)

// grid (ceil(blocks / (DECODE_BLOCKS * DECODE_WARPS)), tiles), 32 * DECODE_WARPS threads. Rows row_start ... of the weight,
// `rows` of them, dense bfloat16 without the factor alpha.
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
            bytes[u] = __ldg(reinterpret_cast<const uint2*>(scales + (long long)(first + u) * padded_rows + tile * 64 + 8 * hi));
        }
    u8* mine = buffer[warp];
    const u32 back = 0x4C804C80u;  // 2^26, exact
#pragma unroll
    for (int w = 0; w < 4; ++w) {
#pragma unroll
        for (int u = 0; u < DECODE_BLOCKS; ++u)
            if (u < count) {
                u32 scale[8], a[4];
                block_scales(bytes[u], scale);
                operands(w == 0 ? word[u].x : w == 1 ? word[u].y : w == 2 ? word[u].z : word[u].w, scale[2 * w],
                         scale[2 * w + 1], a);
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
