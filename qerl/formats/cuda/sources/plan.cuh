// What the blocks of a launch of gemm.cu do, and in which order.
//
// Macros: UNIT, SHRINK_COLUMNS, SHRINK_TOKENS, CLUSTER (0, or how many blocks share a block of rows).
#pragma once
#include "common.cuh"

// The parts of a fused linear, whose adapter has a block-diagonal B: rows first ... last need the ranks begin ... end.
struct Parts {
    int ranks, part_rank, part_end_0, part_end_1;

    __device__ __forceinline__ int part(int row) const { return row < part_end_0 ? 0 : row < part_end_1 ? 1 : 2; }
    __device__ __forceinline__ int begin(int first) const { return part(first) * part_rank; }
    __device__ __forceinline__ int end(int last) const { return ranks ? (part(last) + 1) * part_rank : 0; }
};

// Units `first` up to `last` of a block of rows that `sharers` blocks share; `ends`: these are its last ones.
struct Segment {
    int rows_block, first, last, sharers;
    bool ends;
};

// What each block of a launch works on. `units`: units of one block of rows. `whole`: how many blocks of rows each
// block does completely. `rest`: how many are left, each divided among `sharers` blocks.
struct Plan {
    int units, whole, rest, sharers;
    int more;  // units by which the last range of a divided one is shorter, as its block also adds the adapter's term

    __device__ __forceinline__ Plan(int columns, int row_blocks, int extra)
        : units((columns + UNIT - 1) / UNIT), whole(row_blocks / (int)gridDim.x), rest(row_blocks % (int)gridDim.x),
          sharers(CLUSTER ? CLUSTER : rest ? min((int)gridDim.x / rest, units) : 0),
          more(sharers && units / sharers > extra ? extra : 0) {}
    __device__ __forceinline__ bool cuts() const { return (int)blockIdx.x < rest * sharers; }
    __device__ __forceinline__ int cut_row() const { return blockIdx.x / sharers; }  // index among the divided ones

    // The segments of this block, first() up to past(). A shared one comes first, so that the other sharers' sums are
    // ready when this block has done the rest.
    __device__ __forceinline__ int first() const { return cuts() && sharers > 1 ? -1 : 0; }
    __device__ __forceinline__ int past() const { return whole + (cuts() && sharers == 1); }
    __device__ __forceinline__ Segment segment(int i) const {
        const int share = i < 0 ? blockIdx.x % sharers : 0, of = i < 0 ? sharers : 1;
        const int rows_block = i < 0 || i == whole ? whole * gridDim.x + cut_row() : i * gridDim.x + blockIdx.x;
        const int all = i < 0 ? units + more : units;
        return {rows_block, share * all / of, min((share + 1) * all / of, units), of, share == of - 1};
    }

    template <class Do>
    __device__ __forceinline__ void for_each_segment(Do each) const {
        for (int i = first(); i < past(); ++i) each(segment(i));
    }
};

// The tasks that compute h: heaps of 16 ranks by SHRINK_TOKENS tokens, each in parts of SHRINK_COLUMNS columns.
struct Shrink {
    int slabs, heaps, parts;

    __device__ __forceinline__ Shrink(int tokens, int columns, int ranks)
        : slabs(ranks / 16), heaps(ranks / 16 * ((tokens + SHRINK_TOKENS - 1) / SHRINK_TOKENS)),
          parts((columns + SHRINK_COLUMNS - 1) / SHRINK_COLUMNS) {}
    __device__ __forceinline__ int tasks() const { return heaps * parts; }
    __device__ __forceinline__ int first_rank(int heap) const { return heap % max(slabs, 1) * 16; }
    __device__ __forceinline__ int first_token(int heap) const { return heap / max(slabs, 1) * SHRINK_TOKENS; }
};
