// nvfp4_portable:  out[m, n] = alpha * sum_k x[m, k] code[n, k] scale[n, k / 16] + bias[n] + sum_r h[m, r] b[n, r],
// with h[m, r] = sum_k x[m, k] a[r, k] rounded to bfloat16.
//
// gemm.cu for cards without Hopper's copy engine and wgmma, from sm_80 on: the same layout, the same division of the work
// among blocks (plan.cuh), and the same exchange of sums (but for clusters) and of h; read its description first. These
// are different:
//
// Each of WARPS warps multiplies 16 * SLABS rows by TOKENS / SPLIT tokens, by mma. All of them fill the ring of STAGES
// units, by cp.async, and meet once per unit. One more warp adds up h and waits for other blocks, unless that would leave
// the others too few registers (BESIDE). A launch does not start early. With OCCUPANCY blocks on a multiprocessor, a
// launch has that many times more blocks.
//
// Macros: TOKENS, SPLIT (1, 2), WARPS (4, 8, 16), SLABS (1, 2), STAGES, BATCH (loads that a warp has in flight for h),
// OCCUPANCY, BESIDE (0, 1), IN_LOOP (0, 1), MAX_PARTS, MAX_HEAPS (limits of the tasks for h).

#define THREADS (32 * WARPS)
#define ALL_THREADS (THREADS + 32 * BESIDE)
#define ROW_WARPS (WARPS / SPLIT)
#define ROWS (16 * SLABS * ROW_WARPS)
#define TILES (TOKENS / SPLIT / 8)  // tiles of 8 tokens per warp
#define UNIT 64
#define LAID_ROWS 256  // rows that are stored together, see slab_layout.py
#define X_BYTES (TOKENS * 2 * UNIT)
#define CODE_BYTES (ROWS * UNIT / 2)
#define UNIT_BYTES (X_BYTES + CODE_BYTES + ROWS * UNIT / 16)
#define FRAGMENTS (SLABS * TILES)  // fragments of 16 rows x 8 tokens per warp
#define SHRINK_TILES (TOKENS <= 8 ? 1 : TOKENS <= 64 ? 2 : 4)
#define SHRINK_TOKENS (8 * SHRINK_TILES)
#define SHRINK_COLUMNS (32 * WARPS * BATCH)
#define ITEMS (TOKENS <= 32 ? 1 : 4)   // fragments that a warp adds up together
#define AT_ONCE (ITEMS == 1 ? 10 : 4)  // sums of sharers that are loaded together
#define PARTS_AT_ONCE 8                // parts of h that are loaded together

#include "exchange.cuh"
#define CLUSTER 0
#include "plan.cuh"
#include "shrink.cuh"
#include "slabs.cuh"

// Barriers between the multiplying warps and the one beside them. They say that this block's sums are written (1), those
// of all sharers are (2), a task is done (4), its sums have been read (5), and the launch's numbers are known (6).
static __device__ __forceinline__ void meet(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(ALL_THREADS) : "memory");
}

static __device__ __forceinline__ void signal(int barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(ALL_THREADS) : "memory");
}

static __device__ __forceinline__ void multiplying_warps_sync() {
    asm volatile("bar.sync 3, %0;" ::"n"(THREADS) : "memory");
}

// Copy 16 bytes to shared memory, or write 16 zeros there.
static __device__ __forceinline__ void copy_16(u32 target, const void* source, bool inside = true) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
        ::"r"(target), "l"(source), "r"(inside ? 16 : 0) : "memory");
}

static __device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
static __device__ __forceinline__ void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

extern "C" __global__ void __launch_bounds__(ALL_THREADS, OCCUPANCY)
nvfp4_portable(const u8* codes, const u8* scales, const u16* x, const u16* __restrict__ a, const u16* __restrict__ b,
               const u16* __restrict__ bias, u16* __restrict__ out, u16* hidden, u64* flagged_hidden,
               float* hidden_parts, float4* sums, u64* counters, int tokens, int rows, int columns, float alpha,
               int ranks, int part_rank, int part_end_0, int part_end_1) {
    extern __shared__ __align__(128) u8 dynamic[];
    __shared__ volatile u32 launch_number;  // the tag of flagged values
    __shared__ volatile u64 all_sums;       // what their counter reaches when the sums of all sharers are there
    __shared__ volatile u64 hidden_target;  // what the counter of finished heaps of h reaches in this launch
    const Parts parts{ranks, part_rank, part_end_0, part_end_1};
    const Plan plan(columns, (rows + ROWS - 1) / ROWS, IN_LOOP && ranks ? (part_rank / 16 + 1) / 2 : 0);
    const Shrink shrink(tokens, columns, ranks);
    // Places in `counters`: of the sums of shared rows, of the tasks of each heap, and of launches.
    const int sums_out = plan.sharers * gridDim.x + (plan.cuts() ? plan.cut_row() : 0);
    const int heap_done = gridDim.x * (gridDim.x + 1) + shrink.parts * MAX_HEAPS;
    const int launches = gridDim.x * (gridDim.x + 1) + MAX_PARTS * MAX_HEAPS + 2 * shrink.heaps;
    const int launch_count = gridDim.x * (gridDim.x + 1) + MAX_PARTS * MAX_HEAPS + 4 * MAX_HEAPS;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, hi = lane >> 2, lo = lane & 3;

    // These are done by the warp beside the others, or by the first warp.
    auto begin_launch = [&] {
        if (lane == 0) {
            const u64 launch = raise_relaxed(counters + launch_count), ticket = raise_relaxed(counters + launches);
            launch_number = (u32)(launch / gridDim.x % 0xFFFFFFFFu) + 1;  // never 0: memory holds that at first
            hidden_target = (ticket / gridDim.x + 1) * shrink.heaps;
        }
        __syncwarp();
    };
    auto end_task = [&](int heap) {  // adds up h if it was the last task for these ranks and tokens
        int last = 0;
        if (lane == 0) last = (int)(raise(counters + heap_done + heap) % shrink.parts) == shrink.parts - 1;
        last = __shfl_sync(~0u, last, 0);
        if (!last) return;
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
                    if (part + j < shrink.parts) one[j] = load_fresh(source + (part + j) * (SHRINK_TOKENS * 4) + 32 * i);
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
            const uint2 four = make_uint2(two_bf16(sum.x, sum.y), two_bf16(sum.z, sum.w));
            const int place = token * ranks + shrink.first_rank(heap) + 4 * lo;
            if (token >= tokens) continue;
            if (!IN_LOOP) store_flagged(flagged_hidden + place / 2, four.x, four.y, launch_number);
            *reinterpret_cast<uint2*>(hidden + place) = four;
        }
        __syncwarp();
        if (lane == 0) raise(counters + launches + 1);
    };
    auto count_sums = [&] {
        if (lane == 0) all_sums = (raise(counters + sums_out) / plan.sharers + 1) * plan.sharers;
    };
    auto wait_for_sums = [&] {
        if (lane == 0)
            while (load_acquire(counters + sums_out) < all_sums) {}
        __syncwarp();
    };

    if (BESIDE && warp == WARPS) {
        if (ranks) {
            begin_launch();
            signal(6);
        }
        for (int task = blockIdx.x; task < shrink.tasks(); task += gridDim.x) {
            meet(4);
            if (task + gridDim.x < shrink.tasks()) signal(5);
            end_task(task % shrink.heaps);
        }
        if (!plan.cuts() || plan.sharers == 1) return;
        const int first_row = (plan.whole * gridDim.x + plan.cut_row()) * ROWS;
        if (ranks && !IN_LOOP)
            for (int row = first_row + lane; row < min(first_row + ROWS, rows); row += 32)
                prefetch(b + (long long)row * ranks + parts.begin(row));
        meet(1);
        count_sums();
        wait_for_sums();
        signal(2);
        return;
    }

    // The ring. `fetch` starts the copies of the next unit: of the weight and x, or of 16 ranks of b and h.
    const u32 ring = keep(shared_address(dynamic));
    const int x_thread = (threadIdx.x - ROWS / 4) & (THREADS - 1);  // the threads before it copy scales
    const int x_token = x_thread >> 3, x_column = 8 * (x_thread & 7);
    const u32 x_target = 128 * x_token + (((x_thread & 7) ^ (x_token & 7)) << 4);
    int fetched_segment = plan.first(), fetched_row, free_stage = 0, started = 0;
    int unit_to_fetch = 0, last_unit = 0, rank_to_fetch = 0, last_rank = 0;
    bool hidden_is_there = false;
    int line = 0;  // of the stored weight: a row of a unit
    auto ranks_of = [&](const Segment& segment, int& begin, int& end) {  // that are further units of the segment
        const int first = segment.rows_block * ROWS, past = min(first + ROWS, rows);
        begin = parts.begin(first);
        end = segment.sharers == 1 || (IN_LOOP && segment.ends) ? parts.end(past - 1) : 0;
    };
    auto begin_segment = [&] {
        if (fetched_segment >= plan.past()) return;
        const Segment segment = plan.segment(fetched_segment);
        fetched_row = segment.rows_block * ROWS;
        unit_to_fetch = segment.first;
        last_unit = segment.last;
        ranks_of(segment, rank_to_fetch, last_rank);
        line = (fetched_row / LAID_ROWS * plan.units + segment.first) * LAID_ROWS + fetched_row % LAID_ROWS;
    };
    begin_segment();
    auto fetch = [&] {
        if (fetched_segment < plan.past()) {
            const u32 target = ring + free_stage * UNIT_BYTES, weight = target + X_BYTES + 16 * threadIdx.x;
            if (unit_to_fetch < last_unit) {
#pragma unroll
                for (int i = 0; i < (2 * ROWS + THREADS - 1) / THREADS; ++i)
                    if (2 * ROWS % THREADS == 0 || threadIdx.x + i * THREADS < 2 * ROWS)
                        copy_16(weight + 16 * i * THREADS, codes + (u32)(2 * line + threadIdx.x) * 16ull + 16 * i * THREADS);
                if (threadIdx.x < ROWS / 4) copy_16(weight + CODE_BYTES, scales + (u32)(line / 4 + threadIdx.x) * 16ull);
                const int column = UNIT * unit_to_fetch + x_column;
#pragma unroll
                for (int i = 0; i < (8 * TOKENS + THREADS - 1) / THREADS; ++i)
                    if (8 * TOKENS % THREADS == 0 || x_thread + i * THREADS < 8 * TOKENS) {
                        const int token = x_token + i * (THREADS / 8);
                        const bool inside = token < tokens && column < columns;
                        const u16* source = x + (inside ? (long long)token * columns + column : 0);
                        copy_16(target + x_target + 16 * i * THREADS, source, inside);
                    }
                line += LAID_ROWS;
                ++unit_to_fetch;
            } else {
                while (!hidden_is_there) hidden_is_there = load_acquire(counters + launches + 1) >= hidden_target;
                for (int index = threadIdx.x; index < 2 * ROWS; index += THREADS) {
                    const int row = fetched_row + index / 2;
                    const u16* source = b + (row < rows ? (long long)row * ranks + rank_to_fetch + 8 * (index & 1) : 0);
                    copy_16(target + X_BYTES + 16 * index, source, row < rows);
                }
                for (int index = threadIdx.x; index < 2 * TOKENS; index += THREADS) {
                    const int token = index / 2, half = index & 1;
                    const u16* source = hidden + (token < tokens ? token * ranks + rank_to_fetch + 8 * half : 0);
                    copy_16(target + 128 * token + ((half ^ (token & 7)) << 4), source, token < tokens);
                }
                rank_to_fetch += 16;
            }
            if (++free_stage == STAGES) free_stage = 0;
            if (unit_to_fetch >= last_unit && rank_to_fetch >= last_rank) {
                ++fetched_segment;
                begin_segment();
            }
        }
        end_group();
    };
    // Fill the ring. Before this block's tasks are done it must not wait for h.
    auto fill = [&](bool may_wait) {
        for (; started < STAGES - 1 && (may_wait || unit_to_fetch < last_unit); ++started) fetch();
    };

    if (!BESIDE && ranks && warp == 0) begin_launch();
    // The tasks of this block for h. The first one's loads are issued together with the first copies.
    const uint4 zero = make_uint4(0, 0, 0, 0);
    for (int task = blockIdx.x; task < shrink.tasks(); task += gridDim.x) {
        const int heap = task % shrink.heaps, part = task / shrink.heaps;
        const int begin = part * SHRINK_COLUMNS, end = min(begin + SHRINK_COLUMNS, columns);
        uint4 low[BATCH], high[BATCH], v[BATCH][SHRINK_TILES];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int column = begin + 32 * (i * WARPS + warp) + 8 * lo;
            const u16* source = a + (long long)(shrink.first_rank(heap) + hi) * columns + column;
            low[i] = column < end ? __ldg(reinterpret_cast<const uint4*>(source)) : zero;
            high[i] = column < end ? __ldg(reinterpret_cast<const uint4*>(source + 8ll * columns)) : zero;
#pragma unroll
            for (int t = 0; t < SHRINK_TILES; ++t) {
                const int token = shrink.first_token(heap) + 8 * t + hi;
                const bool inside = column < end && token < tokens;
                v[i][t] = inside ? __ldg(reinterpret_cast<const uint4*>(x + (long long)token * columns + column)) : zero;
            }
        }
        if (task == blockIdx.x) fill(false);
        else if (BESIDE) meet(5);  // the sums of the previous task have been read
        else multiplying_warps_sync();
        float acc[SHRINK_TILES][4];
#pragma unroll
        for (int i = 0; i < SHRINK_TILES * 4; ++i) acc[i / 4][i % 4] = 0.0f;
        add_products(low, high, v, acc);
        float* scratch = reinterpret_cast<float*>(dynamic + (STAGES - 1) * UNIT_BYTES);  // nothing is copied there yet
        leave_sums(acc, scratch, warp, hi, lo);
        multiplying_warps_sync();
        float* target = hidden_parts + ((long long)heap * shrink.parts + part) * (SHRINK_TOKENS * 16);
        for (int index = threadIdx.x; index < SHRINK_TOKENS * 16; index += THREADS)
            target[index] = sum_of_warps<SHRINK_TOKENS, WARPS>(scratch, index);
        if (BESIDE) {
            signal(4);
        } else {
            multiplying_warps_sync();
            if (warp == 0) end_task(heap);
        }
    }
    if (ranks) {
        if (BESIDE) meet(6);
        else multiplying_warps_sync();
    }
    fill(true);

    const int row_warp = warp % ROW_WARPS, first_token = warp / ROW_WARPS * (8 * TILES);
    const int local_row = 16 * SLABS * row_warp + hi;  // and the rows 8, 16 and 24 below
    const u32 code_place = ring + X_BYTES + 512 * SLABS * row_warp + 16 * lane;
    const u32 scale_place = ring + X_BYTES + CODE_BYTES + 64 * SLABS * row_warp + 8 * hi;
    const u32 b_place = ring + X_BYTES + local_row * 32 + 4 * lo;
    // Of x, four matrices of 8 tokens x 8 columns are loaded at once: 16 columns of two tiles, or 32 columns of one.
    const int matrix_token = (TILES > 1 ? lane >> 4 << 3 : 0) + (lane & 7), matrix = TILES > 1 ? lane >> 3 & 1 : lane >> 3;
    const u32 x_place = ring + 128 * (first_token + matrix_token) + ((matrix ^ (lane & 7)) << 4);
    const u32 scale_mask = SCALE_BITS | (u32)tokens >> 31;  // not known to the compiler, so that it is in a register
    float acc[SLABS][4 * TILES];
    u32 stage = 0;  // its place in the ring
    auto next_unit = [&] {
        wait_for_groups<STAGES - 2>();
        multiplying_warps_sync();  // everyone's copies are there, and everyone has read the unit before
        fetch();
    };
    auto advance = [&] {
        stage += UNIT_BYTES;
        if (stage == STAGES * UNIT_BYTES) stage = 0;
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

    for (int which = plan.first(); which < plan.past(); ++which) {
        const Segment segment = plan.segment(which);
#pragma unroll
        for (int i = 0; i < 4 * FRAGMENTS; ++i) acc[i / (4 * TILES)][i % (4 * TILES)] = 0.0f;
#pragma unroll 1
        for (int unit = segment.first; unit < segment.last; ++unit) {
            next_unit();
            u32 words[SLABS][4], bytes[SLABS][2];
#pragma unroll
            for (int i = 0; i < SLABS; ++i) {
                load_shared_4(stage + code_place + 512 * i, words[i]);
                load_shared_2(stage + scale_place + 64 * i, bytes[i]);
            }
            u32 v[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                u32 operand[SLABS][4];
#pragma unroll
                for (int i = 0; i < SLABS; ++i)
                    operands(words[i][k], two_scales(bytes[i][k / 2], k % 2, scale_mask), operand[i]);
                if (TILES == 1) {
                    if (k % 2 == 0) load_matrices((stage + x_place) ^ (32 * k), v);
#pragma unroll
                    for (int i = 0; i < SLABS; ++i) mma(acc[i], operand[i], v[k % 2 * 2], v[k % 2 * 2 + 1]);
                }
#pragma unroll
                for (int t = 0; t < TILES - 1; t += 2) {
                    load_matrices(((stage + x_place) ^ (32 * k)) + 1024 * t, v);
#pragma unroll
                    for (int j = 0; j < 2; ++j)
#pragma unroll
                        for (int i = 0; i < SLABS; ++i) mma(acc[i] + 4 * (t + j), operand[i], v[2 * j], v[2 * j + 1]);
                }
            }
            advance();
        }
#pragma unroll
        for (int i = 0; i < 4 * FRAGMENTS; ++i) acc[i / (4 * TILES)][i % (4 * TILES)] *= alpha;

        int rank, past_rank;
        ranks_of(segment, rank, past_rank);
#pragma unroll 1
        for (; rank < past_rank; rank += 16) {
            next_unit();
            u32 factors[SLABS][4];
#pragma unroll
            for (int i = 0; i < 4 * SLABS; ++i)
                factors[i / 4][i % 4] = load_shared(stage + b_place + 512 * (i / 4) + 256 * (i & 1) + 16 * (i / 2 & 1));
#pragma unroll
            for (int t = 0; t < TILES; t += 2) {
                u32 v[4];  // of a single tile, the second two belong to another unit
                load_matrices(stage + x_place + 1024 * t, v);
#pragma unroll
                for (int j = 0; j < 2 && t + j < TILES; ++j)
#pragma unroll
                    for (int i = 0; i < SLABS; ++i) mma(acc[i] + 4 * (t + j), factors[i], v[2 * j], v[2 * j + 1]);
            }
            advance();
        }

        if (segment.sharers == 1) {
#pragma unroll
            for (int i = 0; i < FRAGMENTS; ++i) {
                const float* c = acc[i / TILES] + 4 * (i % TILES);
                store(segment.rows_block * ROWS + local_row + 16 * (i / TILES), first_token + 8 * (i % TILES),
                      make_float4(c[0], c[1], c[2], c[3]));
            }
        } else {
            float4* place = sums + (long long)blockIdx.x * FRAGMENTS * THREADS + threadIdx.x;
#pragma unroll
            for (int i = 0; i < FRAGMENTS; ++i) {
                const float* c = acc[i / TILES] + 4 * (i % TILES);
                place[i * THREADS] = make_float4(c[0], c[1], c[2], c[3]);
            }
            if (BESIDE) {
                signal(1);
            } else {
                multiplying_warps_sync();
                if (warp == 0) count_sums();
            }
        }
    }
    wait_for_groups<0>();

    if (!plan.cuts() || plan.sharers == 1) return;
    const int sharers = plan.sharers, share = blockIdx.x % sharers, items = FRAGMENTS * WARPS;
    const int first_row = (plan.whole * gridDim.x + plan.cut_row()) * ROWS, last = items * (share + 1) / sharers;
    const float4* parts_of = sums + (long long)(blockIdx.x - share) * items * 32 + lane;
    auto row_of = [&](int item) {
        return first_row + 16 * SLABS * (item % WARPS % ROW_WARPS) + 16 * (item / WARPS / TILES) + hi;
    };
    auto token_of = [&](int item) { return item % WARPS / ROW_WARPS * (8 * TILES) + item / WARPS % TILES * 8; };
    const u32 number = launch_number;
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
                    values[i / 2][i % 2] = make_ulonglong2(flagged(0, number), flagged(0, number));
                    if (inside) values[i / 2][i % 2] = load_flagged(place, place + 4);
                }
#pragma unroll
                for (int i = 0; i < ITEMS * 2; ++i) there = there && is_of(values[i / 2][i % 2], number);
            } while (!there);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < ITEMS * 2; ++i)
                mma(total[i / 2], factors[i / 2][i % 2], (u32)values[i / 2][i % 2].x, (u32)values[i / 2][i % 2].y);
        }
    };
    auto wait_for_sharers = [&] {
        if (BESIDE) {
            meet(2);
        } else {
            if (warp == 0) wait_for_sums();
            multiplying_warps_sync();
        }
    };
    bool met = false;
#pragma unroll 1
    for (int item = items * share / sharers + warp; item < last; item += ITEMS * WARPS) {
        float total[ITEMS][4];
#pragma unroll
        for (int i = 0; i < 4 * ITEMS; ++i) total[i / 4][i % 4] = 0.0f;
        if (ranks && !IN_LOOP) add_adapter(item, total);
        if (!met) wait_for_sharers();
        met = true;
        for (int from = 0; from < sharers; from += AT_ONCE) {
            float4 part[ITEMS][AT_ONCE];
#pragma unroll
            for (int i = 0; i < ITEMS * AT_ONCE; ++i) {
                const int which = i / AT_ONCE, sharer = from + i % AT_ONCE, of = item + which * WARPS;
                part[which][i % AT_ONCE] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (sharer < sharers && of < last)
                    part[which][i % AT_ONCE] = load_fresh(parts_of + (sharer * items + of) * 32);
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
    if (!met) wait_for_sharers();
}
