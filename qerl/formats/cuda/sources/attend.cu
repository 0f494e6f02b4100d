// attend:  out[s, h] = softmax(scale * q[s, h] . K[s])  V[s],  for one new token per sequence, over its pages of the KV
// cache and the new token's key and value, which are also written to their slot in the cache.
//
// The tiles of TILE tokens of all sequences and key heads, in that order, are divided into equal ranges, one per block
// (by `attend_plan`, once for all layers of a step). A block works through the key heads of its range one at a time,
// each with the at most GROUP query heads that share it. Its warps load tiles from memory straight into the registers
// from which the tensor cores read them. Both products have tokens or values as rows and heads as columns: S = K Q^T,
// then O = V^T P^T. If several blocks share a head, each leaves its sums in `parts`, and the block that finishes last
// adds them up. All sums have a fixed order, so a call repeats to the bit.
//
// The kernel waits for the results of the launch before it (q, the new key and value), but reads tokens of earlier
// steps before that. None of those is a token that another sequence writes in this launch: sequences share a block only
// when it is full, and a prompt whose last token fills a block is read by longer steps than these.
//
// With `angles` (positions x HEAD_DIM: cosines, then sines, bfloat16) the query and the new key are rotated first, which
// takes 16-bit caches and heads of 64 or 128, where a lane holds both values of each pair.
//
// Macros: HEAD_DIM (32, 64, 128), KV_BITS (16, 8), WARPS, BLOCKS (per multiprocessor), MAX_SEQUENCES.

#include "exchange.cuh"
#include "kv_cache.cuh"

#define GROUP 8                                     // most query heads per key head: the columns of a product
#define TILE 16                                     // tokens that a warp handles at a time
#define NONE -1e30f                                 // lower than any score
#define AT_ONCE 8                                   // parts that are loaded together

static __device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ float max_of_rows(float x) {  // over the lanes with the same lane % 4
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}

static __device__ __forceinline__ float sum_of_rows(float x) {
    x += __shfl_xor_sync(~0u, x, 4);
    x += __shfl_xor_sync(~0u, x, 8);
    return x + __shfl_xor_sync(~0u, x, 16);
}

// Write, for each block of `attend`: the first item of its range (sequence * key heads + head, or -1 for none), the
// tile at which it starts, the tokens of that sequence, and the tiles of a range. One more entry follows: the number of
// items, and whether every item is padded to whole ranges. They are padded if ranges at most `slack` tiles longer than
// needed suffice for that, since then no block works on two items. A sequence without tokens counts as one tile, whose
// result is 0. The two blocks of this launch write one plan each, the second behind the first: for first_blocks or
// second_blocks blocks, and ranges of at least first_least or second_least tiles. One thread per sequence.
extern "C" __global__ void __launch_bounds__(MAX_SEQUENCES)
attend_plan(int4* plan, u32* done, const int* __restrict__ lengths, int sequences, int key_heads, int first_blocks,
            int first_least, int second_blocks, int second_least, int max_sharers, int slack) {
    // Each launch of `attend` leaves the counters at 0, but the memory may not be that of the step before.
    for (int i = blockIdx.x * MAX_SEQUENCES + threadIdx.x; i < sequences * key_heads; i += 2 * MAX_SEQUENCES)
        done[i] = 0;
    const int blocks = blockIdx.x ? second_blocks : first_blocks, fewest = blockIdx.x ? second_least : first_least;
    if (blockIdx.x) plan += first_blocks + 1;
    __shared__ int ends[MAX_SEQUENCES];  // running sum of the sequences' tiles
    __shared__ int of_warps[MAX_SEQUENCES / 32], all, longest, filled;
    const int sequence = threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int length = sequence < sequences ? lengths[sequence] : 0;
    const int tiles = sequence < sequences ? max(1, (length + TILE - 1) / TILE) : 0;
    if (threadIdx.x == 0) all = longest = 0;
    __syncthreads();
    const int of_warp = __reduce_add_sync(~0u, tiles), longest_of_warp = __reduce_max_sync(~0u, tiles);
    if (lane == 0) {
        atomicAdd(&all, of_warp);
        atomicMax(&longest, longest_of_warp);
    }
    __syncthreads();
    const int least = max(max((all * key_heads + blocks - 1) / blocks, fewest), (longest + max_sharers - 1) / max_sharers);
    int range = least;
    bool fill = false;
    for (int candidate = least; candidate <= least + slack && !fill; ++candidate) {
        if (threadIdx.x == 0) filled = 0;
        __syncthreads();
        const int ranges = __reduce_add_sync(~0u, (tiles + candidate - 1) / candidate);
        if (lane == 0) atomicAdd(&filled, ranges);
        __syncthreads();
        fill = filled * key_heads <= blocks;
        if (fill) range = candidate;
        __syncthreads();
    }
    int end = fill ? (tiles + range - 1) / range * range : tiles;
    for (int i = 1; i < 32; i *= 2) {
        const int other = __shfl_up_sync(~0u, end, i);
        if (lane >= i) end += other;
    }
    if (lane == 31) of_warps[warp] = end;
    __syncthreads();
    for (int i = 0; i < warp; ++i) end += of_warps[i];
    ends[sequence] = end;
    __syncthreads();
    for (int block = threadIdx.x; block < blocks; block += MAX_SEQUENCES) {
        const long long first = (long long)block * range;
        int4 mine = make_int4(-1, 0, 0, range);
        if (first < (long long)ends[sequences - 1] * key_heads) {
            int low = 0, high = sequences - 1;  // search the first sequence that ends after `first`
            while (low < high) {
                const int middle = (low + high) / 2;
                if ((long long)ends[middle] * key_heads > first) high = middle;
                else low = middle + 1;
            }
            const int begin = low ? ends[low - 1] : 0, size = ends[low] - begin, rest = (int)first - begin * key_heads;
            mine = make_int4(low * key_heads + rest / size, rest % size, lengths[low], range);
        }
        plan[block] = mine;
    }
    if (threadIdx.x == 0) plan[blocks] = make_int4(sequences * key_heads, fill, 0, 0);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
attend(const u16* query, const u16* new_key, const u16* new_value, Element* key_cache, Element* value_cache, u16* out,
       const float* key_scale_of_layer, const float* value_scale_of_layer, const int* __restrict__ pages,
       const int* __restrict__ lengths, const long long* slots, const int4* __restrict__ plan, float4* parts,
       float2* part_scales, u32* done, int query_stride, int key_stride, int value_stride, int pages_stride,
       int page_tokens, int page_stride, int token_stride, int head_stride, int key_heads, int group, float scale,
       const u16* __restrict__ angles) {
    __shared__ float sums[WARPS][GROUP][HEAD_DIM];
    __shared__ float2 scales[WARPS][GROUP];  // maximum and sum of each warp
    __shared__ u32 before;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, hi = lane >> 2, lo = lane & 3;
    const int4 mine = plan[blockIdx.x];
    const int range = mine.w, items = plan[gridDim.x].x, fill = plan[gridDim.x].y;
    const float key_scale = KV_BITS == 8 ? *key_scale_of_layer : 1.0f;
    const float value_scale = KV_BITS == 8 ? *value_scale_of_layer : 1.0f, score_scale = scale * key_scale;
    const float key_inverse = 1.0f / key_scale, value_inverse = 1.0f / value_scale;  // exact for powers of two

    if (mine.x < 0) return;
    int item = mine.x, sequence = item / key_heads, head = item % key_heads, length = mine.z, begin = mine.y;
    auto tiles_of = [&](int tokens) { return max(1, (tokens + TILE - 1) / TILE); };
    int left = range, tiles = tiles_of(length);
    // A page holds whole tiles, so the page of a tile and its place there are found once for all of its tokens.
    auto page_of = [&](int of, int tile) {
        const int number = tile * TILE / page_tokens;
        return make_int2(pages[(long long)of * pages_stride + number], tile * TILE - number * page_tokens);
    };
    int2 page = make_int2(0, 0);  // and the first of the tile's tokens in it
    auto place_in = [&](int row) {
        return (long long)page.x * page_stride + (page.y + row) * token_stride + (long long)head * head_stride;
    };
    auto now = [&](const u16* fresh, int stride) { return fresh + (long long)sequence * stride + head * HEAD_DIM; };
    auto rotate = [&](u32* words) {
#if KV_BITS == 16 && HEAD_DIM >= 64
        if (angles) rotate_words(words, angles + (long long)max(length - 1, 0) * HEAD_DIM, lo);
#endif
    };
    u32 key[2][KEY_WORDS];  // keys of tokens hi and hi + 8
    auto load_keys = [&](int tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = 8 * i + hi, token = tile * TILE + row;
            const u16* fresh = now(new_key, key_stride);
#pragma unroll
            for (int w = 0; w < KEY_WORDS; ++w) key[i][w] = 0;
            if (token < length) load_key(source_of(key_cache + place_in(row), fresh, token == length - 1), lo, key[i]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (tile == tiles - 1 && tile * TILE + 8 * i + hi == length - 1) {
                rotate(key[i]);
                round_key(now(new_key, key_stride), lo, key_inverse, key[i]);
            }
    };
    u32 q[2 * STEPS];  // the query of head hi, as columns of Q^T
    auto load_query = [&] {
        const u16* place = query + (long long)sequence * query_stride + (head * group + hi) * HEAD_DIM;
#pragma unroll
        for (int w = 0; w < 2 * STEPS; ++w) q[w] = 0;
        if (hi < group)
#pragma unroll
            for (int i = 0; i < RUNS; ++i) load_words<RUN / 2>(place + 4 * RUN * i + RUN * lo, q + RUN / 2 * i);
        rotate(q);
#pragma unroll
        for (int w = 0; w < 2 * STEPS; ++w) q[w] = query_word(q[w]);
    };
    int end = min(tiles, begin + left), tile = begin + warp;
    if (tile < end) page = page_of(sequence, tile);
    const bool has_new = tile == tiles - 1;
    if (tile < end && !has_new) load_keys(tile);
    wait_for_launch_before();
    keep_order();  // which also lets the next launch start
    if (tile < end && has_new) load_keys(tile);
    load_query();

    while (true) {
        // Which blocks share this item: those whose ranges overlap it.
        const int start = blockIdx.x * range + range - left - begin;
        const int size = fill ? (tiles + range - 1) / range * range : tiles, of_item = item;
        const int first_sharer = start / range, sharers = (start + size - 1) / range - first_sharer + 1;
        left -= min(size, begin + left) - begin;
        const bool more = left > 0 && item + 1 < items;
        const int next_sequence = more && head + 1 == key_heads ? sequence + 1 : sequence;
        const int next_length = more ? lengths[next_sequence] : 0;
        const bool has_first = more && warp < tiles_of(next_length);
        const int2 next_first_page = has_first ? page_of(next_sequence, warp) : make_int2(0, 0);

        float acc[WORDS][4], top[2] = {NONE, NONE}, sum[2] = {0.0f, 0.0f};  // for heads 2 lo and 2 lo + 1
#pragma unroll
        for (int i = 0; i < WORDS * 4; ++i) acc[i / 4][i % 4] = 0.0f;

        for (; tile < end; tile += WARPS) {
            u32 value[4][VALUE_WORDS];  // values of tokens 2 lo, 2 lo + 1, 2 lo + 8 and 2 lo + 9
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = 8 * (i / 2) + 2 * lo + i % 2, token = tile * TILE + row;
                const u16* fresh = now(new_value, value_stride);
#pragma unroll
                for (int w = 0; w < VALUE_WORDS; ++w) value[i][w] = 0;
                if (token < length)
                    load_value(source_of(value_cache + place_in(row), fresh, token == length - 1), hi, value[i]);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (tile == tiles - 1 && tile * TILE + 8 * (i / 2) + 2 * lo + i % 2 == length - 1)
                    round_value(now(new_value, value_stride), hi, value_inverse, value[i]);
            const int2 next_page = tile + WARPS < end ? page_of(sequence, tile + WARPS) : make_int2(0, 0);
            float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                const uint2 first = step_of(key[0], i), second = step_of(key[1], i);
                product(s, first.x, second.x, first.y, second.y, q[2 * i], q[2 * i + 1]);
            }
            if (tile == tiles - 1 && length) {  // write the new token's key and value to the cache
                const long long slot = slots[sequence];
                const int row = (length - 1) % TILE;
                Element* to = key_cache + slot / page_tokens * page_stride + slot % page_tokens * token_stride;
                to += (long long)head * head_stride;
                if (slot >= 0)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (row == 8 * i + hi) store_key(to, lo, key[i]);
                to += value_cache - key_cache;
                if (slot >= 0)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (row == 8 * (i / 2) + 2 * lo + i % 2) store_value(to, hi, value[i]);
            }
            const int tokens = length - tile * TILE;
#pragma unroll
            for (int i = 0; i < 4; ++i) s[i] = hi + 8 * (i / 2) < tokens ? s[i] * score_scale : NONE;
            page = next_page;
            if (tile + WARPS < end) load_keys(tile + WARPS);
            float higher[2], weight[4];
#pragma unroll
            for (int i = 0; i < 2; ++i) higher[i] = fmaxf(top[i], max_of_rows(fmaxf(s[i], s[i + 2])));
            if (__any_sync(~0u, higher[0] > top[0] || higher[1] > top[1])) {  // soon it seldom is
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float shrunk = exp2_fast(top[i] - higher[i]);
                    top[i] = higher[i];
                    sum[i] *= shrunk;
#pragma unroll
                    for (int w = 0; w < WORDS; ++w) {
                        acc[w][i] *= shrunk;
                        acc[w][i + 2] *= shrunk;
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) weight[i] = exp2_fast(s[i] - top[i % 2]);
#pragma unroll
            for (int i = 0; i < 2; ++i) sum[i] = sum[i] + weight[i] + weight[i + 2];
            const u32 low = transposed(weight_word(weight[0], weight[1]));
            const u32 high = transposed(weight_word(weight[2], weight[3]));
#pragma unroll
            for (int w = 0; w < WORDS; ++w) {
                const uint2 first = paired(value[0], value[1], w), second = paired(value[2], value[3], w);
                product(acc[w], first.x, first.y, second.x, second.y, low, high);
            }
        }

        if (more) {  // start the first loads of the next item while the sums of this one are added up
            ++item;
            if (++head == key_heads) head = 0;
            sequence = next_sequence, length = next_length, page = next_first_page;
            tiles = tiles_of(length), begin = 0, end = min(tiles, left), tile = warp;
            if (tile < end) load_keys(tile);
            load_query();
        }

        // Add up each value over the warps of the block, in the order of the warps.
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float whole = sum_of_rows(sum[i]);
            if (hi == 0) scales[warp][2 * lo + i] = make_float2(top[i], whole);
#pragma unroll
            for (int w = 0; w < WORDS; ++w)
                *reinterpret_cast<float2*>(&sums[warp][2 * lo + i][dim_of(w, hi)]) =
                    make_float2(acc[w][i], acc[w][i + 2]);
        }
        __syncthreads();
        auto write = [&](int index, float4 total, float whole) {
            const float inverse = whole > 0.0f ? value_scale / whole : 0.0f;
            const uint2 four = make_uint2(two_bf16(total.x * inverse, total.y * inverse),
                                          two_bf16(total.z * inverse, total.w * inverse));
            u16* to = out + (long long)of_item * group * HEAD_DIM + 4 * index;
            if (index / (HEAD_DIM / 4) < group) *reinterpret_cast<uint2*>(to) = four;
        };
        // A block shares at most two items with others, where its range begins and where it ends: two places suffice.
        auto place_of = [&](int sharer) { return 2 * sharer + (sharer == first_sharer ? 1 : 0); };
        float4* const own = parts + (long long)place_of(blockIdx.x) * (GROUP * HEAD_DIM / 4);
        for (int index = threadIdx.x; index < GROUP * HEAD_DIM / 4; index += 32 * WARPS) {
            const int h = index / (HEAD_DIM / 4), d = index % (HEAD_DIM / 4) * 4;
            float highest = NONE, whole = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, scales[w][h].x);
            float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float factor = exp2_fast(scales[w][h].x - highest);
                const float4 one = *reinterpret_cast<const float4*>(&sums[w][h][d]);
                whole += factor * scales[w][h].y;
                total.x += factor * one.x, total.y += factor * one.y;
                total.z += factor * one.z, total.w += factor * one.w;
            }
            if (sharers == 1) {
                write(index, total, whole);
            } else {
                own[index] = total;
                if (d == 0) part_scales[place_of(blockIdx.x) * GROUP + h] = make_float2(highest, whole);
            }
        }
        __syncthreads();

        // The block that finishes last adds up the sums of all sharers, in their order.
        if (sharers > 1) {
            if (threadIdx.x == 0) {
            fence();
            asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
                : "=r"(before) : "l"(done + of_item), "r"(sharers - 1) : "memory");
            fence();
            }
            __syncthreads();
        }
        const bool adds_up = sharers > 1 && before == sharers - 1;
        for (int index = adds_up ? threadIdx.x : GROUP * HEAD_DIM; index < GROUP * HEAD_DIM / 4; index += 32 * WARPS) {
            const int h = index / (HEAD_DIM / 4);
            float highest = NONE, whole = 0.0f;
            float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            for (int from = 0; from < sharers; from += AT_ONCE) {
                float4 one[AT_ONCE];
                float2 its[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    its[i] = make_float2(NONE, 0.0f);
                    one[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    if (from + i < sharers) {
                        const int place = place_of(first_sharer + from + i);
                        its[i] = __ldcg(part_scales + place * GROUP + h);
                        one[i] = load_fresh(parts + (long long)place * (GROUP * HEAD_DIM / 4) + index);
                    }
                }
                float higher = highest;
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) higher = fmaxf(higher, its[i].x);
                const float shrunk = exp2_fast(highest - higher);
                highest = higher;
                whole *= shrunk;
                total.x *= shrunk, total.y *= shrunk, total.z *= shrunk, total.w *= shrunk;
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    const float factor = exp2_fast(its[i].x - highest);
                    whole += factor * its[i].y;
                    total.x += factor * one[i].x, total.y += factor * one[i].y;
                    total.z += factor * one[i].z, total.w += factor * one[i].w;
                }
            }
            write(index, total, whole);
        }
        if (!more) return;
    }
}
