// nvfp4_gemm:  out[m, n] = alpha * sum_k x[m, k] code[n, k] scale[n, k / 16] + bias[n] + sum_r h[m, r] b[n, r],
// with h[m, r] = sum_k x[m, k] a[r, k] rounded to bfloat16.
//
// A block has GROUPS warpgroups, which multiply ROWS rows by all tokens, and one more warpgroup, in which one warp
// fills a ring of STAGES units in shared memory with the weight and another fills it with x. A unit is 64 columns:
// codes and block scales as they are stored (slabs.cuh), and x. The warps decode codes in registers, from which the
// tensor cores read them, by wgmma, or by mma for few tokens, with the tokens as columns.
//
// A "block of rows" is ROWS rows of the weight. Each block of the launch does an equal number of them completely. Those
// left over are divided along K into equal ranges: every block that has a range of such a block of rows leaves its sums
// in `sums`, and then each of them adds up a share of the results. All sums have a fixed order, so a call repeats to
// the bit.
//
// h is computed while the ring fills: each block has at most one task at a time, of 16 ranks and SHRINK_TOKENS tokens
// over a range of K. The block that finishes the last task for the same ranks and tokens adds up the ranges.
// Where a block of rows is not divided, h b^T is added by further units of 16 ranks each, with b in place of the codes
// and h in place of x. Where it is divided, it is either added in the same way by the block with the last range, which
// is shorter to make up for it (IN_LOOP), or while the results are added up, from values of h that are stored together
// with the launch's number.
//
// All blocks have to be on the card at the same time. Counters are never cleared: each launch raises a counter by the
// same amount, so its value tells a block which launch it belongs to. The launch may start early: it waits for what the
// launch before it wrote, and fills the ring with the weight until then. It lets the next launch start as soon as all of
// its blocks have raised the counters that a launch raises first; earlier, the next launch could be taken for this one.
//
// With CLUSTER, the sharers of a block of rows are a cluster of that many blocks. Each sends its sums into the shared
// memory of the block that adds them up, and no counter in memory is waited for.
//
// Macros: TOKENS (8, 16, 32, 64, 96, 128, 192, 256), SLABS (of 16 rows that a warp works on: 1, 2), STAGES, BATCH (loads
// that a warp has in flight for h), IN_LOOP (0, 1), CLUSTER (0, 2 to 8), MAX_PARTS, MAX_HEAPS (limits of the tasks for h).

#define GROUPS 2
#define ROWS (64 * GROUPS * SLABS)
#define WARPS (4 * GROUPS)
#define UNIT 64
#define LAID_ROWS 256  // rows that are stored together, see slab_layout.py
#define X_BYTES (TOKENS * 2 * UNIT)
#define CODE_BYTES (ROWS * UNIT / 2)
#define WEIGHT_BYTES (CODE_BYTES + ROWS * UNIT / 16)
#define FRAGMENTS (SLABS * TOKENS / 8)  // fragments of 16 rows x 8 tokens per warp
#define SMALL (TOKENS <= 16)            // each warp multiplies by itself: mma, not wgmma
#define GATED (TOKENS >= 32)            // the ring waits for h, because its copies would delay the loads for h
#define SHRINK_TILES (TOKENS <= 8 ? 1 : TOKENS <= 64 ? 2 : 4)
#define SHRINK_TOKENS (8 * SHRINK_TILES)
#define SHRINK_COLUMNS (32 * WARPS * BATCH)
#define ITEMS (TOKENS <= 32 ? 1 : 4)   // fragments that a warp adds up together
#define AT_ONCE (ITEMS == 1 ? 10 : 4)  // sums of sharers that are loaded together
#define PARTS_AT_ONCE 8                // parts of h that are loaded together
#define ALL_ITEMS (FRAGMENTS * WARPS)  // fragments of a block of rows, which its sharers add up
#define SHARERS (CLUSTER ? CLUSTER : 1)
#define MOST_ITEMS ((ALL_ITEMS + SHARERS - 1) / SHARERS)  // that one block of a cluster adds up

#include "exchange.cuh"
#include "plan.cuh"
#include "shrink.cuh"
#include "slabs.cuh"
#include "wgmma.cuh"

// Barriers between the multiplying warpgroups and one more warp. They say that this block's sums are written (1), those
// of all sharers are (2), a task is done (4), its sums have been read (5), and the launch's number is known (7; for the
// warp that adds up h: 6).
static __device__ __forceinline__ void meet(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(32 * WARPS + 32) : "memory");
}

// Where a cluster's block number `share` begins to add up.
static __device__ __forceinline__ int first_item(int share) { return ALL_ITEMS * share / SHARERS; }

static __device__ __forceinline__ void warpgroups_sync() {
    asm volatile("bar.sync 3, %0;" ::"n"(32 * WARPS) : "memory");
}

static __device__ __forceinline__ void signal(int barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(32 * WARPS + 32) : "memory");
}

extern "C" __global__ void __launch_bounds__(128 + 128 * GROUPS, 1)
nvfp4_gemm(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap hidden_map,
           const __grid_constant__ TensorMap b_map, const u8* codes, const u8* scales, const u16* x,
           const u16* __restrict__ a, const u16* __restrict__ b, const u16* __restrict__ bias, u16* __restrict__ out,
           u16* hidden, u64* flagged_hidden, float* hidden_parts, float4* sums, u64* counters, int tokens, int rows,
           int columns, float alpha, int ranks, int part_rank, int part_end_0, int part_end_1) {
    extern __shared__ u8 dynamic[];
    __shared__ u64 barriers[2 * STAGES + 2];
    __shared__ u32 launch_number;  // the tag of flagged values
    __shared__ volatile int has_ticket;
    const Parts parts{ranks, part_rank, part_end_0, part_end_1};
    const Plan plan(columns, (rows + ROWS - 1) / ROWS, IN_LOOP && ranks ? (part_rank / 16 + 1) / 2 : 0);
    const Shrink shrink(tokens, columns, ranks);
    u64* const sums_out = counters + plan.sharers * gridDim.x;
    u64* const heap_done = counters + gridDim.x * (gridDim.x + 1) + shrink.parts * MAX_HEAPS;
    u64* const launch_count = counters + gridDim.x * (gridDim.x + 1) + MAX_PARTS * MAX_HEAPS + 4 * MAX_HEAPS;
    u64* const launches = counters + gridDim.x * (gridDim.x + 1) + MAX_PARTS * MAX_HEAPS + 2 * shrink.heaps;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, hi = lane >> 2, lo = lane & 3;
    const u32 x_ring = keep((shared_address(dynamic) + 1023) & ~1023u), weight_ring = x_ring + STAGES * X_BYTES;
    const u32 full = keep(shared_address(barriers)), empty = full + 8 * STAGES, made = empty + 8 * STAGES;
    const u32 arrived = made + 8, given = weight_ring + STAGES * WEIGHT_BYTES + WARPS * SHRINK_TOKENS * SUM_STRIDE * 4;
    if (threadIdx.x == 32 * WARPS) {
        prefetch_map(x_map);
        has_ticket = !ranks;
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, WARPS);
        }
        barrier_init(made, WARPS);
#if CLUSTER
        const int share = cluster_rank();
        barrier_init(arrived, 1);
        barrier_expect(arrived, CLUSTER * (first_item(share + 1) - first_item(share)) * 512);
#endif
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
#if CLUSTER
    __syncwarp();
    cluster_arrive();
#endif
    int stage = 0;
    u32 phase = 0;
    auto advance = [&] {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    };
    auto adapter_units = [&](const Segment& segment, auto each) {
        const int first = segment.rows_block * ROWS, past = first + ROWS < rows ? first + ROWS : rows;
        const int end = segment.sharers == 1 || (IN_LOOP && segment.ends) ? parts.end(past - 1) : 0;
        for (int rank = parts.begin(first); rank < end; rank += 16) each(rank);
    };
    auto wait_for_hidden = [&](u64 ticket) {
        while (load_acquire(launches + 1) < (ticket / gridDim.x + 1) * shrink.heaps) {}
    };

    if (warp >= WARPS) {
        if (TOKENS > 64) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        __syncthreads();
        if (warp == WARPS && lane == 0) {  // fills the ring with the weight, which was written long before this launch
            plan.for_each_segment([&](const Segment& segment) {
                const int row = segment.rows_block * ROWS;
                const long long lines = (long long)(row / LAID_ROWS) * plan.units + segment.first;
                const u8* code = codes + (lines * LAID_ROWS + row % LAID_ROWS) * (UNIT / 2);
                const u8* scale = scales + (lines * LAID_ROWS + row % LAID_ROWS) * (UNIT / 16);
#pragma unroll 1
                for (int unit = segment.first; unit < segment.last; ++unit) {
                    const u32 barrier = full + 8 * stage, target = weight_ring + stage * WEIGHT_BYTES;
                    if (GATED && ranks && stage == 1) barrier_wait(made, 0);
                    barrier_wait(empty + 8 * stage, phase ^ 1);
                    barrier_expect(barrier, WEIGHT_BYTES + X_BYTES);
                    copy_bytes(target, code, CODE_BYTES, barrier);
                    copy_bytes(target + CODE_BYTES, scale, ROWS * UNIT / 16, barrier);
                    code += LAID_ROWS * UNIT / 2;
                    scale += LAID_ROWS * UNIT / 16;
                    advance();
                }
                adapter_units(segment, [&](int rank) {
                    const u32 barrier = full + 8 * stage;
                    wait_for_launch_before();  // it may have written b
                    barrier_wait(empty + 8 * stage, phase ^ 1);
                    barrier_expect(barrier, ROWS * 32 + X_BYTES);
                    copy_tile(weight_ring + stage * WEIGHT_BYTES, b_map, rank, row, barrier);
                    advance();
                });
            });
        } else if (warp == WARPS + 3 && lane == 0) {  // fills the ring with x, then with h
            const u64 ticket = ranks ? raise_relaxed(launches) : 0;
            if (ticket != ~0ull) has_ticket = 1;  // once the counter is raised
            wait_for_launch_before();
            plan.for_each_segment([&](const Segment& segment) {
#pragma unroll 1
                for (int unit = segment.first; unit < segment.last; ++unit) {
                    if (GATED && ranks && stage == 1) barrier_wait(made, 0);
                    barrier_wait(empty + 8 * stage, phase ^ 1);
                    copy_tile(x_ring + stage * X_BYTES, x_map, UNIT * unit, 0, full + 8 * stage);
                    advance();
                }
                adapter_units(segment, [&](int rank) {
                    barrier_wait(empty + 8 * stage, phase ^ 1);
                    wait_for_hidden(ticket);
                    fence_for_copies();
                    copy_tile(x_ring + stage * X_BYTES, hidden_map, rank, 0, full + 8 * stage);
                    advance();
                });
            });
        } else if (warp == WARPS + 1) {  // synchronizes with the blocks that share rows
            if (lane == 0)  // never 0, which memory holds where nothing has been written yet
                launch_number = (u32)(raise_relaxed(launch_count) / gridDim.x % 0xFFFFFFFFu) + 1;
            __syncwarp();
            asm volatile("bar.arrive 6, 64;" ::: "memory");
            while (!has_ticket) {}
            let_next_launch_start();
            if (!plan.cuts() || plan.sharers == 1) return;
            if (ranks && !IN_LOOP) signal(7);
            const int first_row = (plan.whole * gridDim.x + plan.cut_row()) * ROWS;
            if (ranks && !IN_LOOP)
                for (int row = first_row + lane; row < min(first_row + ROWS, rows); row += 32)
                    prefetch(b + (long long)row * ranks + parts.begin(row));
            if (CLUSTER) return;
            meet(1);
            if (lane == 0) {
                u64* counter = sums_out + plan.cut_row();
                const u64 all = (raise(counter) / plan.sharers + 1) * plan.sharers;
                while (load_acquire(counter) < all) {}
            }
            __syncwarp();
            signal(2);
        } else if (warp == WARPS + 2) {  // adds up the hidden values whose last task this block has done
            asm volatile("bar.sync 6, 64;" ::: "memory");
            for (int task = blockIdx.x; task < shrink.tasks(); task += gridDim.x) {
                const int heap = task % shrink.heaps;
                meet(4);
                if (task + gridDim.x < shrink.tasks()) signal(5);
                int last = 0;
                if (lane == 0) last = (int)(raise(heap_done + heap) % shrink.parts) == shrink.parts - 1;
                last = __shfl_sync(~0u, last, 0);
                if (!last) continue;
                fence();
                const float4* source = reinterpret_cast<const float4*>(hidden_parts) +
                                       (long long)heap * shrink.parts * (SHRINK_TOKENS * 4) + lane;
#pragma unroll
                for (int i = 0; i < SHRINK_TILES; ++i) {
                    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    for (int part = 0; part < shrink.parts; part += PARTS_AT_ONCE) {
                        float4 one[PARTS_AT_ONCE];
#pragma unroll
                        for (int j = 0; j < PARTS_AT_ONCE; ++j) {
                            one[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                            if (part + j < shrink.parts)
                                one[j] = load_fresh(source + (part + j) * (SHRINK_TOKENS * 4) + 32 * i);
                        }
#pragma unroll
                        for (int j = 0; j < PARTS_AT_ONCE; ++j) {
                            sum.x += one[j].x;
                            sum.y += one[j].y;
                            sum.z += one[j].z;
                            sum.w += one[j].w;
                        }
                    }
                    const int token = shrink.first_token(heap) + 8 * i + hi;
                    uint2 four = make_uint2(two_bf16(sum.x, sum.y), two_bf16(sum.z, sum.w));
                    const int place = token * ranks + shrink.first_rank(heap) + 4 * lo;
                    if (token >= tokens) continue;
                    if (!IN_LOOP) store_flagged(flagged_hidden + place / 2, four.x, four.y, launch_number);
                    *reinterpret_cast<uint2*>(hidden + place) = four;
                }
                fence_for_copies();
                __syncwarp();
                if (lane == 0) raise(launches + 1);
            }
        }
        return;
    }

    if (TOKENS > 64) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");

    // The tasks of this block for h. The loads of the first one are issued before those of the weight.
    const uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 low[BATCH], high[BATCH], v[BATCH][SHRINK_TILES];
    auto load_task = [&](int task, auto between) {
        const int heap = task % max(shrink.heaps, 1), begin = task / max(shrink.heaps, 1) * SHRINK_COLUMNS;
        const int end = task < shrink.tasks() ? min(begin + SHRINK_COLUMNS, columns) : 0;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int column = begin + 32 * (i * WARPS + warp) + 8 * lo;
            const u16* source = a + (long long)(shrink.first_rank(heap) + hi) * columns + column;
            low[i] = column < end ? __ldg(reinterpret_cast<const uint4*>(source)) : zero;
            high[i] = column < end ? __ldg(reinterpret_cast<const uint4*>(source + 8ll * columns)) : zero;
        }
        between();
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
#pragma unroll
            for (int t = 0; t < SHRINK_TILES; ++t) {
                const int token = shrink.first_token(heap) + 8 * t + hi;
                const int column = begin + 32 * (i * WARPS + warp) + 8 * lo;
                v[i][t] = column < end && token < tokens ? load_fresh(x + (long long)token * columns + column) : zero;
            }
    };
    load_task(blockIdx.x, [] {
        __syncthreads();  // the ring's barriers are initialized
        wait_for_launch_before();
    });
    for (int task = blockIdx.x; task < shrink.tasks(); task += gridDim.x) {
        if (task != blockIdx.x) {
            meet(5);  // the sums of the previous task have been read
            load_task(task, [] {});
        }
        float acc[SHRINK_TILES][4];
#pragma unroll
        for (int i = 0; i < SHRINK_TILES * 4; ++i) acc[i / 4][i % 4] = 0.0f;
        add_products(low, high, v, acc);
        const u32 behind_ring = weight_ring + STAGES * WEIGHT_BYTES - shared_address(dynamic);
        float* scratch = reinterpret_cast<float*>(dynamic + behind_ring);
        leave_sums(acc, scratch, warp, hi, lo);
        warpgroups_sync();
        const int heap = task % shrink.heaps, part = task / shrink.heaps;
        float* target = hidden_parts + ((long long)heap * shrink.parts + part) * (SHRINK_TOKENS * 16);
        for (int index = threadIdx.x; index < SHRINK_TOKENS * 16; index += 32 * WARPS)
            target[index] = sum_of_warps<SHRINK_TOKENS, WARPS>(scratch, index);
        signal(4);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(made);

    const int local_row = 16 * SLABS * warp + hi;  // and the rows 8, 16 and 24 below
    const u32 code_place = keep(512 * SLABS * warp + 16 * lane);
    const u32 scale_place = keep(CODE_BYTES + 64 * SLABS * warp + 8 * hi);
    const u32 scale_mask = SCALE_BITS | (u32)tokens >> 31;  // not known to the compiler, so that it is in a register
    float acc[SLABS][TOKENS / 2];
    const u32 x_place = keep((lane & 7) * 128 + (((lane >> 3) ^ (lane & 7)) << 4));
    // Keep the compiler from moving reads of the sums past this point.
    auto settle = [&] {
#pragma unroll
        for (int i = 0; i < SLABS * TOKENS / 2; ++i)
            asm volatile("" : "+f"(acc[i / (TOKENS / 2)][i % (TOKENS / 2)])::"memory");
    };
    auto release = [&](int used) {
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * used);
    };
    // Write the sums of 16 rows x 8 tokens, a fragment of the warp, to `out`.
    auto store = [&](int row, int token, float4 sum) {
        const float low = bias && row < rows ? from_bf16(bias[row]) : 0.0f;
        const float high = bias && row + 8 < rows ? from_bf16(bias[row + 8]) : 0.0f;
        const u32 first = transposed(two_bf16(sum.x + low, sum.y + low));
        const u32 second = transposed(two_bf16(sum.z + high, sum.w + high));
        const int target_token = token + hi, target_row = row - hi + 2 * lo;
        u16* place = out + (long long)target_token * rows + target_row;
        if (target_token < tokens) {
            if (target_row < rows) *reinterpret_cast<u32*>(place) = first;
            if (target_row + 8 < rows) *reinterpret_cast<u32*>(place + 8) = second;
        }
    };

    plan.for_each_segment([&](const Segment& segment) {
#pragma unroll
        for (int i = 0; i < SLABS * TOKENS / 2; ++i) acc[i / (TOKENS / 2)][i % (TOKENS / 2)] = 0.0f;
        settle();
        int before = -1;  // the stage whose products may still be running
        for (int unit = segment.first; unit < segment.last; ++unit) {
            barrier_wait(full + 8 * stage, phase);
            const u32 weight = weight_ring + stage * WEIGHT_BYTES;
            if constexpr (SMALL) {
                u32 words[SLABS][4], bytes[SLABS][2], v[TOKENS / 8][2][4];
#pragma unroll
                for (int i = 0; i < SLABS; ++i) {
                    load_shared_4(weight + code_place + 512 * i, words[i]);
                    load_shared_2(weight + scale_place + 64 * i, bytes[i]);
                }
#pragma unroll
                for (int t = 0; t < TOKENS / 8; ++t) {
                    load_matrices(x_ring + stage * X_BYTES + 1024 * t + x_place, v[t][0]);
                    load_matrices(x_ring + stage * X_BYTES + 1024 * t + (x_place ^ 64), v[t][1]);
                }
                release(stage);
                advance();
#pragma unroll
                for (int k = 0; k < 4; ++k)
#pragma unroll
                    for (int i = 0; i < SLABS; ++i) {
                        u32 operand[4];
                        operands(words[i][k], two_scales(bytes[i][k / 2], k % 2, scale_mask), operand);
#pragma unroll
                        for (int t = 0; t < TOKENS / 8; ++t)
                            mma(acc[i] + 4 * t, operand, v[t][k / 2][k % 2 * 2], v[t][k / 2][k % 2 * 2 + 1]);
                    }
                continue;
            }
            const u64 x_operand = swizzled_operand(__shfl_sync(~0u, x_ring + stage * X_BYTES, 0));
            u32 words[SLABS][4], bytes[SLABS][2];
#pragma unroll
            for (int i = 0; i < SLABS; ++i) {
                load_shared_4(weight + code_place + 512 * i, words[i]);
                load_shared_2(weight + scale_place + 64 * i, bytes[i]);
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                u32 operand[SLABS][4];
#pragma unroll
                for (int i = 0; i < SLABS; ++i)
                    operands(words[i][k], two_scales(bytes[i][k / 2], k % 2, scale_mask), operand[i]);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < SLABS; ++i) wgmma<TOKENS>(acc[i], operand[i], x_operand + 2 * k);
                wgmma_commit();
                wgmma_wait<1>();
                if (k == 0 && before >= 0) release(before);
            }
            before = stage;
            advance();
        }
        if (!SMALL) wgmma_wait<0>();
        settle();
        if (before >= 0) release(before);
#pragma unroll
        for (int i = 0; i < SLABS * TOKENS / 2; ++i) acc[i / (TOKENS / 2)][i % (TOKENS / 2)] *= alpha;

        const int row = segment.rows_block * ROWS + local_row;
        adapter_units(segment, [&](int) {
            barrier_wait(full + 8 * stage, phase);
            const u64 operand = swizzled_operand(__shfl_sync(~0u, x_ring + stage * X_BYTES, 0));
            const u32 place = weight_ring + stage * WEIGHT_BYTES + local_row * 32 + 4 * lo;
            u32 factors[SLABS][4];
#pragma unroll
            for (int i = 0; i < 4 * SLABS; ++i)
                factors[i / 4][i % 4] = load_shared(place + 512 * (i / 4) + 256 * (i & 1) + 16 * (i / 2 & 1));
            if constexpr (SMALL) {
#pragma unroll
                for (int t = 0; t < TOKENS / 8; ++t) {
                    u32 v[4];  // for 32 ranks, of which the second 16 belong to another unit
                    load_matrices(x_ring + stage * X_BYTES + 1024 * t + x_place, v);
#pragma unroll
                    for (int i = 0; i < SLABS; ++i) mma(acc[i] + 4 * t, factors[i], v[0], v[1]);
                }
            } else {
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < SLABS; ++i) wgmma<TOKENS>(acc[i], factors[i], operand);
                wgmma_commit();
                wgmma_wait<0>();
                settle();
            }
            release(stage);
            advance();
        });

        if (segment.sharers == 1) {
#pragma unroll
            for (int i = 0; i < FRAGMENTS; ++i) {
                const int word = i / (FRAGMENTS / SLABS), t = i % (FRAGMENTS / SLABS);
                const float* c = acc[word] + 4 * t;
                store(row + 16 * word, 8 * t, make_float4(c[0], c[1], c[2], c[3]));
            }
        } else if constexpr (CLUSTER) {  // to the block that adds them up
            const int share = cluster_rank();
            cluster_wait();
#pragma unroll
            for (int i = 0; i < FRAGMENTS; ++i) {
                const int item = i * WARPS + warp, to = ((item + 1) * CLUSTER - 1) / ALL_ITEMS;
                const u32 slot = share * MOST_ITEMS + item - first_item(to);
                const float* c = acc[i / (FRAGMENTS / SLABS)] + i % (FRAGMENTS / SLABS) * 4;
                give(in_peer(given + slot * 512 + lane * 16, to), c, in_peer(arrived, to));
            }
        } else {
            float4* place = sums + (long long)blockIdx.x * FRAGMENTS * WARPS * 32 + warp * 32 + lane;
#pragma unroll
            for (int i = 0; i < FRAGMENTS; ++i) {
                const float* c = acc[i / (FRAGMENTS / SLABS)] + i % (FRAGMENTS / SLABS) * 4;
                place[i * WARPS * 32] = make_float4(c[0], c[1], c[2], c[3]);
            }
            signal(1);
        }
    });

    if (!plan.cuts() || plan.sharers == 1) return;
    const int sharers = plan.sharers, share = blockIdx.x % sharers, items = ALL_ITEMS;
    const int first_row = (plan.whole * gridDim.x + plan.cut_row()) * ROWS, last = items * (share + 1) / sharers;
    const float4* parts_of = sums + (long long)(blockIdx.x - share) * items * 32 + lane;
    auto row_of = [&](int item) {
        return first_row + 16 * SLABS * (item % WARPS) + 16 * (item / WARPS / (FRAGMENTS / SLABS)) + hi;
    };
    auto token_of = [&](int item) { return item / WARPS % (FRAGMENTS / SLABS) * 8; };
    // total += h b^T for the items, 32 ranks at a time; all their loads are issued together.
    auto add_adapter = [&](int item, float (&total)[ITEMS][4]) {
        const int more = min(ITEMS - 1, (last - 1 - item) / WARPS);
        const int past = min(row_of(item + more * WARPS) - hi + 15, rows - 1);
#pragma unroll 1
        for (int rank = parts.begin(row_of(item) - hi) + 2 * lo; rank < parts.end(past); rank += 32) {
            u32 factors[ITEMS][2][4];
            ulonglong2 values[ITEMS][2];
            bool there;
#pragma unroll
            for (int i = 0; i < ITEMS * 8; ++i) {
                const int line = row_of(item + i / 8 * WARPS) + 8 * (i & 1), column = rank + 8 * (i % 8 >> 1);
                const bool inside = item + i / 8 * WARPS < last && line < rows && column < ranks;
                factors[i / 8][i / 4 % 2][i % 4] = inside ? load_u32(b + (long long)line * ranks + column) : 0;
            }
            do {
                there = true;
#pragma unroll
                for (int i = 0; i < ITEMS * 2; ++i) {
                    const int of = item + i / 2 * WARPS, token = token_of(of) + hi, column = rank + i % 2 * 16;
                    const bool inside = of < last && token < tokens && column < ranks;
                    const u64* place = flagged_hidden + (token * ranks + column) / 2;
                    values[i / 2][i % 2] = make_ulonglong2(flagged(0, launch_number), flagged(0, launch_number));
                    if (inside) values[i / 2][i % 2] = load_flagged(place, place + 4);
                }
#pragma unroll
                for (int i = 0; i < ITEMS * 2; ++i) there = there && is_of(values[i / 2][i % 2], launch_number);
            } while (!there);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < ITEMS * 2; ++i)
                mma(total[i / 2], factors[i / 2][i % 2], (u32)values[i / 2][i % 2].x, (u32)values[i / 2][i % 2].y);
        }
    };
    auto sums_of = [&](int sharer, int item) {
        if constexpr (!CLUSTER) return load_fresh(parts_of + (sharer * items + item) * 32);
        const u32 slot = sharer * MOST_ITEMS + item - items * share / sharers;
        return load_shared_float4(given + slot * 512 + lane * 16);
    };
    bool met = false;
    if (ranks && !IN_LOOP) meet(7);
#pragma unroll 1
    for (int item = items * share / sharers + warp; item < last; item += ITEMS * WARPS) {
        float total[ITEMS][4];
#pragma unroll
        for (int i = 0; i < 4 * ITEMS; ++i) total[i / 4][i % 4] = 0.0f;
        if (ranks && !IN_LOOP) add_adapter(item, total);
        if (!met && CLUSTER) barrier_wait(arrived, 0);
        if (!met && !CLUSTER) meet(2);
        met = true;
        for (int from = 0; from < sharers; from += AT_ONCE) {
            float4 part[ITEMS][AT_ONCE];
#pragma unroll
            for (int i = 0; i < ITEMS * AT_ONCE; ++i) {
                const int which = i / AT_ONCE, sharer = from + i % AT_ONCE, of = item + which * WARPS;
                part[which][i % AT_ONCE] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (sharer < sharers && of < last)
                    part[which][i % AT_ONCE] = sums_of(sharer, of);
            }
#pragma unroll
            for (int i = 0; i < ITEMS * AT_ONCE; ++i) {
                const float4& one = part[i / AT_ONCE][i % AT_ONCE];
                float (&sum)[4] = total[i / AT_ONCE];
                sum[0] += one.x;
                sum[1] += one.y;
                sum[2] += one.z;
                sum[3] += one.w;
            }
        }
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int of = item + i * WARPS;
            if (of < last)
                store(row_of(of), token_of(of), make_float4(total[i][0], total[i][1], total[i][2], total[i][3]));
        }
    }
    if (!met && !CLUSTER) meet(2);
}
