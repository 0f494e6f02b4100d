// nvfp4_gemm:  out[m, n] = alpha * sum_k x[m, k] code[n, k] scale[n, k / 16] + bias[n] + sum_r h[m, r] b[n, r],
// with h[m, r] = sum_k x[m, k] a[r, k] rounded to bfloat16.
//
// A block has GROUPS warpgroups of 128 rows each, with the tokens as columns of wgmma, and one more, of which a warp
// fills a ring of STAGES units in shared memory. A unit is 64 columns: the codes and block scales as they lie in memory
// (codes.cuh), and x. The warpgroups decode codes in registers, where wgmma takes them.
//
// As many blocks of rows as there are blocks in the launch are done whole, by one block each. The rest is cut along K
// into equal ranges: who has a part of such a block of rows leaves its sums in `sums`, and all that have parts of it
// add up a share of the results each. All sums have a fixed order, so a call repeats to the bit.
//
// h is made while the ring fills: each block has a task or none, 16 ranks and SHRINK_TOKENS tokens over a range of K.
// Who ends the last task of the same ranks and tokens adds up the ranges. h b^T is added where results are added up,
// and in whole blocks of rows by more units, 16 ranks each: b in place of the codes, h in place of x.
//
// All blocks have to be on the card at once. Counters are never cleared: each launch raises a counter by the same
// number, so what a block finds there says which launch it is of. The launch may start early: what the one before wrote
// is waited for, and until then the ring fills with the weight.
//
// Defines: TOKENS (8, 16, 32, 64, 128), STAGES, BATCH (loads a warp has under way for h), MAX_PARTS, MAX_HEAPS
// (of the tasks for h), TRANSPOSED, MARLIN.
#include "slabs.cuh"
#include "shrink.cuh"
#include "wgmma.cuh"

#ifndef GROUPS
#define GROUPS 2
#endif
#ifndef SLABS
#define SLABS (TOKENS <= 128 ? 2 : 1)  // of 16 rows, that a warp works on
#endif
#define ROWS (64 * GROUPS * SLABS)
#define WARPS (4 * GROUPS)
#define UNIT 64
#define LAID_ROWS 256  // that lie together in memory, see layout.cuh
#define X_BYTES (TOKENS * 2 * UNIT)
#define CODE_BYTES (ROWS * UNIT / 2)
#define WEIGHT_BYTES (CODE_BYTES + ROWS * UNIT / 16)
#define FRAGMENTS (SLABS * TOKENS / 8)  // of 16 rows x 8 tokens, of a warp
#define SHRINK_TILES (TOKENS <= 8 ? 1 : TOKENS <= 64 ? 2 : 4)
#define SHRINK_TOKENS (8 * SHRINK_TILES)
#define SHRINK_COLUMNS (32 * WARPS * BATCH)
#define AT_ONCE (TOKENS <= 16 ? 4 : 8)  // sharers' sums that are asked for together

// Of a fused linear, whose adapter's B is a block diagonal: the ranks begin ... end concern the rows first ... last.
struct Parts {
    int ranks, part_rank, part_end_0, part_end_1;

    __device__ __forceinline__ int part(int row) const { return row < part_end_0 ? 0 : row < part_end_1 ? 1 : 2; }
    __device__ __forceinline__ int begin(int first) const { return part(first) * part_rank; }
    __device__ __forceinline__ int end(int last) const { return ranks ? (part(last) + 1) * part_rank : 0; }
};

// The units first ... last of one block of rows, which `sharers` blocks share.
struct Segment {
    int rows_block, first, last, sharers;
};

// What a launch does in which order.
struct Plan {
    int units, whole, rest, sharers;  // of a block of rows; such blocks done whole by each; cut ones, and by how many

    __device__ __forceinline__ Plan(int columns, int row_blocks)
        : units((columns + UNIT - 1) / UNIT), whole(row_blocks / (int)gridDim.x), rest(row_blocks % (int)gridDim.x),
          sharers(rest ? min((int)gridDim.x / rest, units) : 0) {}
    __device__ __forceinline__ bool cuts() const { return (int)blockIdx.x < rest * sharers; }
    __device__ __forceinline__ int cut_row() const { return blockIdx.x / sharers; }  // among the cut ones

    // What is shared comes first, so that the others' sums are there when this block has done the rest.
    template <class Do>
    __device__ __forceinline__ void for_each_segment(Do each) const {
        const bool shared = cuts() && sharers > 1, own = cuts() && sharers == 1;
        for (int i = shared ? -1 : 0; i < whole + own; ++i) {
            const int share = i < 0 ? blockIdx.x % sharers : 0, of = i < 0 ? sharers : 1;
            const int rows_block = i < 0 || i == whole ? whole * gridDim.x + cut_row() : i * gridDim.x + blockIdx.x;
            each(Segment{rows_block, share * units / of, (share + 1) * units / of, of});
        }
    }
};

// The tasks that make h: heaps of 16 ranks and SHRINK_TOKENS tokens, in parts of SHRINK_COLUMNS columns.
struct Shrink {
    int slabs, heaps, parts;

    __device__ __forceinline__ Shrink(int tokens, int columns, int ranks)
        : slabs(ranks / 16), heaps(ranks / 16 * ((tokens + SHRINK_TOKENS - 1) / SHRINK_TOKENS)),
          parts((columns + SHRINK_COLUMNS - 1) / SHRINK_COLUMNS) {}
    __device__ __forceinline__ int tasks() const { return heaps * parts; }
    __device__ __forceinline__ int first_rank(int heap) const { return heap % max(slabs, 1) * 16; }
    __device__ __forceinline__ int first_token(int heap) const { return heap / max(slabs, 1) * SHRINK_TOKENS; }
};

static __device__ __forceinline__ u32 two_bf16(float low, float high) {
    u32 two;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    return two;
}

static __device__ __forceinline__ u32 transposed(u32 two) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(two));
    return result;
}

// Barriers between the warpgroups and one more warp: the sums are out (1), all are there (2), a task is done (4), its
// sums have been read (5).
static __device__ __forceinline__ void meet(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(32 * WARPS + 32) : "memory");
}

static __device__ __forceinline__ void warpgroups_sync() {
    asm volatile("bar.sync 3, %0;" ::"n"(32 * WARPS) : "memory");
}

static __device__ __forceinline__ void signal(int barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(32 * WARPS + 32) : "memory");
}

static __device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

static __device__ __forceinline__ u64 raise_relaxed(u64* counter) {
    u64 before;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], 1;" : "=l"(before) : "l"(counter) : "memory");
    return before;
}

// What this block wrote before a barrier that this thread has passed is there for whoever finds the counter raised.
static __device__ __forceinline__ u64 raise(u64* counter) {
    fence();
    return raise_relaxed(counter);
}

static __device__ __forceinline__ u64 load_acquire(const u64* counter) {
    u64 value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
    return value;
}

// Past this processor's own cache, which may hold what was there before.
static __device__ __forceinline__ float4 load_fresh(const float4* place) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(place) : "memory");
    return v;
}

static __device__ __forceinline__ u32 load_two(const u16* two) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(two) : "memory");
    return value;
}

static __device__ __forceinline__ uint4 load_fresh(const u16* eight) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(eight) : "memory");
    return v;
}

extern "C" __global__ void __launch_bounds__(128 + 128 * GROUPS, 1)
nvfp4_gemm(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap hidden_map,
           const __grid_constant__ TensorMap b_map, const u8* codes, const u8* scales, const u16* x, const u16* __restrict__ a,
           const u16* __restrict__ b, const u16* __restrict__ bias, u16* __restrict__ out, u16* hidden,
           float* hidden_parts, float4* sums, u64* counters, int tokens, int rows, int columns, float alpha,
           int ranks, int part_rank, int part_end_0, int part_end_1) {
    extern __shared__ u8 dynamic[];
    __shared__ u64 barriers[2 * STAGES];
    const Parts parts{ranks, part_rank, part_end_0, part_end_1};
    const Plan plan(columns, (rows + ROWS - 1) / ROWS);
    const Shrink shrink(tokens, columns, ranks);
    u64* const sums_out = counters + plan.sharers * gridDim.x;
    u64* const heap_done = counters + gridDim.x * (gridDim.x + 1) + shrink.parts * MAX_HEAPS;
    u64* const launches = counters + gridDim.x * (gridDim.x + 1) + MAX_PARTS * MAX_HEAPS + 2 * shrink.heaps;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, hi = lane >> 2, lo = lane & 3;
    const u32 x_ring = keep((shared_address(dynamic) + 1023) & ~1023u), weight_ring = x_ring + STAGES * X_BYTES;
    const u32 full = keep(shared_address(barriers)), empty = full + 8 * STAGES;
    if (threadIdx.x == 32 * WARPS) {
        prefetch_map(x_map);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
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
        const int end = segment.sharers == 1 ? parts.end(past - 1) : 0;
        for (int rank = parts.begin(first); rank < end; rank += 16) each(rank);
    };
    auto wait_for_hidden = [&](u64 ticket) {
        while (load_acquire(launches + 1) < (ticket / gridDim.x + 1) * shrink.heaps) {}
    };

    if (warp >= WARPS) {
        if (TOKENS >= 128) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        __syncthreads();
        if (warp == WARPS && lane == 0) {  // fills the ring
            u64 ticket = ranks ? raise_relaxed(launches) : 0;
            bool waited = false;  // for x: the weight is there before the launch before this one has ended
            plan.for_each_segment([&](const Segment& segment) {
                const int ahead = waited ? segment.first : min(segment.first + STAGES, segment.last);
                auto copy_weight = [&](int unit, int to) {
                    const u32 barrier = full + 8 * to, target = weight_ring + to * WEIGHT_BYTES;
                    barrier_expect(barrier, WEIGHT_BYTES + X_BYTES);
                    const int row = segment.rows_block * ROWS;
                    const long long place = ((long long)(row / LAID_ROWS) * plan.units + unit) * LAID_ROWS + row % LAID_ROWS;
                    copy_bytes(target, codes + place * (UNIT / 2), CODE_BYTES, barrier);
                    copy_bytes(target + CODE_BYTES, scales + place * (UNIT / 16), ROWS * UNIT / 16, barrier);
                };
                for (int unit = segment.first; unit < ahead; ++unit) copy_weight(unit, unit - segment.first);
                if (!waited) wait_for_launch_before();
                waited = true;
                for (int unit = segment.first; unit < segment.last; ++unit) {
                    if (unit >= ahead) {
                        barrier_wait(empty + 8 * stage, phase ^ 1);
                        copy_weight(unit, stage);
                    }
                    copy_tile(x_ring + stage * X_BYTES, x_map, UNIT * unit, 0, full + 8 * stage);
                    advance();
                }
                adapter_units(segment, [&](int rank) {
                    const u32 barrier = full + 8 * stage;
                    barrier_wait(empty + 8 * stage, phase ^ 1);
                    barrier_expect(barrier, ROWS * 32 + X_BYTES);
                    copy_tile(weight_ring + stage * WEIGHT_BYTES, b_map, rank, segment.rows_block * ROWS, barrier);
                    wait_for_hidden(ticket);
                    fence_for_copies();
                    copy_tile(x_ring + stage * X_BYTES, hidden_map, rank, 0, barrier);
                    advance();
                });
            });
        } else if (warp == WARPS + 1) {  // speaks with those that share rows
            const u64 ticket = ranks && lane == 0 ? raise_relaxed(launches + 2 * MAX_HEAPS) : 0;
            if (!plan.cuts() || plan.sharers == 1) return;
            const int first_row = (plan.whole * gridDim.x + plan.cut_row()) * ROWS;
            if (ranks)
                for (int row = first_row + lane; row < min(first_row + ROWS, rows); row += 32)
                    prefetch(b + (long long)row * ranks + parts.begin(row));
            meet(1);
            if (lane == 0) {
                u64* counter = sums_out + plan.cut_row();
                const u64 all = (raise(counter) / plan.sharers + 1) * plan.sharers;
                if (ranks) wait_for_hidden(ticket);
                while (load_acquire(counter) < all) {}
            }
            __syncwarp();
            signal(2);
        } else if (warp == WARPS + 2) {  // adds up the hidden values that a task of this block was the last to make
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
#pragma unroll 4
                    for (int part = 0; part < shrink.parts; ++part) {
                        const float4 one = load_fresh(source + part * (SHRINK_TOKENS * 4) + 32 * i);
                        sum.x += one.x;
                        sum.y += one.y;
                        sum.z += one.z;
                        sum.w += one.w;
                    }
                    const int token = shrink.first_token(heap) + 8 * i + hi;
                    uint2 four = make_uint2(two_bf16(sum.x, sum.y), two_bf16(sum.z, sum.w));
                    if (token < tokens)
                        *reinterpret_cast<uint2*>(hidden + token * ranks + shrink.first_rank(heap) + 4 * lo) = four;
                }
                fence_for_copies();
                __syncwarp();
                if (lane == 0) raise(launches + 1);
            }
        }
        return;
    }

    if (TOKENS >= 128) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");

    // The tasks of this block for h. What the first one loads is asked for before the weight is.
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
        __syncthreads();  // the ring's barriers are there
        wait_for_launch_before();
    });
    for (int task = blockIdx.x; task < shrink.tasks(); task += gridDim.x) {
        if (task != blockIdx.x) {
            meet(5);  // the sums of the task before have been read
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

    const int local_row = 16 * SLABS * warp + hi;  // and 8, 16, 24 rows on
    const u32 code_place = keep(512 * SLABS * warp + 16 * lane);
    const u32 scale_place = keep(CODE_BYTES + 64 * SLABS * warp + 8 * hi);
    float acc[SLABS][TOKENS / 2];
    auto release = [&](int used) {
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * used);
    };
    // Sums of 16 rows x 8 tokens, a fragment of the warp, to `out`.
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
        int before = -1;  // the stage whose products may still run
        for (int unit = segment.first; unit < segment.last; ++unit) {
            barrier_wait(full + 8 * stage, phase);
            const u32 weight = weight_ring + stage * WEIGHT_BYTES;
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
                    operands(words[i][k], k % 2 ? odd_scales(bytes[i][k / 2]) : even_scales(bytes[i][k / 2]), operand[i]);
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
        wgmma_wait<0>();
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
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < SLABS; ++i) wgmma<TOKENS>(acc[i], factors[i], operand);
            wgmma_commit();
            wgmma_wait<0>();
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
    meet(2);
    const int sharers = plan.sharers, share = blockIdx.x % sharers, items = FRAGMENTS * WARPS;
    const int first_row = (plan.whole * gridDim.x + plan.cut_row()) * ROWS, last = items * (share + 1) / sharers;
    const float4* parts_of = sums + (long long)(blockIdx.x - share) * items * 32 + lane;
    for (int item = items * share / sharers + warp; item < last; item += 2 * WARPS) {
        float4 sum[2] = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
        for (int from = 0; from < sharers; from += AT_ONCE) {
            float4 part[2][AT_ONCE];
#pragma unroll
            for (int i = 0; i < 2 * AT_ONCE; ++i) {
                const int which = i / AT_ONCE, sharer = from + i % AT_ONCE, of = item + which * WARPS;
                part[which][i % AT_ONCE] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (sharer < sharers && of < last)
                    part[which][i % AT_ONCE] = load_fresh(parts_of + (sharer * items + of) * 32);
            }
#pragma unroll
            for (int i = 0; i < 2 * AT_ONCE; ++i) {
                const float4& one = part[i / AT_ONCE][i % AT_ONCE];
                float4& total = sum[i / AT_ONCE];
                total.x += one.x;
                total.y += one.y;
                total.z += one.z;
                total.w += one.w;
            }
        }
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int of = item + which * WARPS, fragment = of / WARPS, of_warp = of % WARPS;
            const int word = fragment / (FRAGMENTS / SLABS), token = fragment % (FRAGMENTS / SLABS) * 8;
            const int row = first_row + 16 * SLABS * of_warp + 16 * word + hi;
            if (of >= last) continue;
            float total[4] = {sum[which].x, sum[which].y, sum[which].z, sum[which].w};
            const int end = parts.end(min(row - hi + 15, rows - 1));
#pragma unroll 2
            for (int rank = parts.begin(row - hi) + 2 * lo; rank < end; rank += 16) {
                u32 factors[4], values[2];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int line = row + 8 * (i & 1);
                    factors[i] = line < rows ? load_u32(b + (long long)line * ranks + rank + 8 * (i >> 1)) : 0;
                }
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    values[i] = token + hi < tokens ? load_two(hidden + (token + hi) * ranks + rank + 8 * i) : 0;
                mma(total, factors[0], factors[1], factors[2], factors[3], values[0], values[1]);
            }
            store(row, token, make_float4(total[0], total[1], total[2], total[3]));
        }
    }
}
