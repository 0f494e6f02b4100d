// nvfp4_pack: codes and block scales of a float32 or bfloat16 weight, in qerl's own layout (slab_layout.py), and how
// many of its blocks hold inf or NaN, and how many of its block scales saturate.
//
// The bits are those of qerl/formats/nvfp4/reference.py. So every division is rounded to nearest, amax / 6 once more to the
// weight's own dtype, and nothing else is contracted to a fused multiply-add.
//
// A warp takes a unit: 16 rows x 64 columns. Lane 4 * hi + lo holds the numbers of the four words that it writes, which
// are those of rows hi and hi + 8 and columns 2 * lo, 2 * lo + 1, 8 + 2 * lo and 9 + 2 * lo of each block. It computes
// the scales of block lo in both rows, and gets the others from its neighbours.
#include "common.cuh"

#define LAID_SLABS 16  // slabs of 16 rows that are stored together
#define WARPS 4
#define CODE_MAX 6.0f
#define SCALE_MAX 448.0f
#define SATURATED 464.0f   // the midpoint between 448 and what would come next in e4m3
#define ZERO_SCALE 0.125f  // stands for a block scale that rounds to zero
#define INF_BITS 0x7F800000u
#ifdef MASTER_BF16
typedef u16 Number;
static __device__ __forceinline__ float2 load_two(const u16* p) {
    const u32 two = __ldg(reinterpret_cast<const u32*>(p));
    return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xFFFF0000u));
}
static __device__ __forceinline__ float rounded(float value) { return from_bf16(to_bf16(value)); }
#else
typedef float Number;
static __device__ __forceinline__ float2 load_two(const float* p) { return __ldg(reinterpret_cast<const float2*>(p)); }
static __device__ __forceinline__ float rounded(float value) { return value; }
#endif

// The lane's numbers of one unit, [row hi or hi + 8][block][left or right]. Zeros stand for what lies outside.
static __device__ __forceinline__ void load_unit(float2 (&v)[2][4][2], const Number* matrix, int row, int column,
                                                 int rows, int columns) {
    const Number* first = matrix + (long long)row * columns + column;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int block = 0; block < 4; ++block)
#pragma unroll
            for (int right = 0; right < 2; ++right) {
                const bool inside = row + 8 * half < rows && column + 16 * block < columns;
                const Number* place = first + (long long)(8 * half) * columns + 16 * block + 8 * right;
                v[half][block][right] = inside ? load_two(place) : make_float2(0.0f, 0.0f);
            }
}

static __device__ __forceinline__ u32 size_bits(float value) { return __float_as_uint(value) & 0x7FFFFFFFu; }

// The bits of the largest magnitude in block lo of one row. They are INF_BITS or more if it has inf or NaN.
static __device__ __forceinline__ u32 own_amax(const float2 (&v)[4][2], int lo) {
    u32 own = 0;
#pragma unroll
    for (int block = 0; block < 4; ++block) {
        const float2 left = v[block][0], right = v[block][1];
        u32 amax = max(max(size_bits(left.x), size_bits(left.y)), max(size_bits(right.x), size_bits(right.y)));
        amax = max(amax, __shfl_xor_sync(~0u, amax, 1));
        amax = max(amax, __shfl_xor_sync(~0u, amax, 2));
        own = block == lo ? amax : own;
    }
    return own;
}

// The block scale before it is rounded to e4m3.
static __device__ __forceinline__ float exact_scale(u32 amax, float global_scale) {
    return __fmul_rn(rounded(__fdiv_rn(__uint_as_float(amax), CODE_MAX)), global_scale);
}

// The nearest e4m3 value, ties to even. Subnormals are multiples of 2^-9, as is the last bit of 2^14.
static __device__ __forceinline__ float to_e4m3(float value) {
    value = fminf(value, SCALE_MAX);
    const u32 bits = __float_as_uint(value);
    const float normal = __uint_as_float((bits + 0x7FFFFu + (bits >> 20 & 1)) & 0xFFF00000u);
    return value < 0.015625f ? __fadd_rn(__fadd_rn(value, 16384.0f), -16384.0f) : normal;
}

// Where the layout keeps a block scale: its exponent with bias 10 and its mantissa.
static __device__ __forceinline__ u8 scale_byte(float scale) { return (__float_as_uint(scale) >> 20) - (117u << 3); }

// The nearest e2m1 code of a magnitude, ties to even. Below 1 they are multiples of 0.5, as is the last bit of 2^22.
static __device__ __forceinline__ u32 to_e2m1(float size) {
    const u32 bits = __float_as_uint(size);
    const u32 small = __float_as_uint(__fadd_rn(size, 4194304.0f)) & 3;
    const u32 large = min((bits + 0x1FFFFFu + (bits >> 22 & 1)) >> 22, 259u) - 252;
    return size < 1.0f ? small : large;
}

// The code of value / step. `inverse` is 1 / step, rounded to nearest, if 2^-60 <= step <= 1, and otherwise 0.
//
// The two corrections of value * inverse give the quotient rounded to nearest (Markstein, 1990), as long as no
// intermediate result is subnormal. That can happen only far below 0.25, where every quotient has code 0.
static __device__ __forceinline__ u32 code_of(float value, float step, float inverse) {
    if (inverse == 0.0f) {
        const float quotient = __fdiv_rn(value, step);
        return to_e2m1(fabsf(quotient)) | (quotient < 0.0f ? 8 : 0);
    }
    const float size = fminf(fabsf(value), 8.0f * step);  // everything above 5 has the last code
    float quotient = __fmul_rn(size, inverse);
    quotient = __fmaf_rn(__fmaf_rn(-step, quotient, size), inverse, quotient);
    quotient = __fmaf_rn(__fmaf_rn(-step, quotient, size), inverse, quotient);
    return to_e2m1(quotient) | (value < 0.0f ? 8 : 0);
}

// The codes of two neighbouring columns, the second in the upper half.
static __device__ __forceinline__ u32 two_codes(float2 values, float step, float inverse) {
    return code_of(values.x, step, inverse) | code_of(values.y, step, inverse) << 16;
}

// A word from the codes of rows hi and hi + 8, left and right in the block: the places BITS of slab_layout.py.
static __device__ __forceinline__ u32 word_of(u32 left, u32 left_below, u32 right, u32 right_below) {
    const u32 size = 0x00070007u, sign = 0x00080008u, turned = left_below & size;
    return (left & size) << 6 | (left & sign) << 12 | __funnelshift_l(turned, turned, 28) | (left_below & sign) << 2 |
           (right & size) | (right & sign) << 6 | (right_below & 0x00010001u) << 10 | (right_below & 0x00060006u) << 2 |
           (right_below & sign) << 8;
}

// grid (ceil(units / WARPS), slabs), 32 * WARPS threads. `matrix` (rows, columns) becomes the rows of the weight from
// slab `first_slab` on. Columns are a multiple of 16. What is left of the last unit and of the last slab becomes zero.
// The blocks that hold inf or NaN, whose codes mean nothing, are added to counts[0], and the block scales that saturate
// to counts[1].
extern "C" __global__ void __launch_bounds__(32 * WARPS)
nvfp4_pack(const Number* __restrict__ matrix, uint4* __restrict__ words, u8* __restrict__ scales,
           int* __restrict__ counts, int first_slab, int rows, int columns, float global_scale) {
    const int lane = threadIdx.x & 31, hi = lane >> 2, lo = lane & 3;
    const int units = (columns + 63) / 64, unit = blockIdx.x * WARPS + (threadIdx.x >> 5);
    if (unit >= units) return;
    const int row = 16 * blockIdx.y + hi, column = 64 * unit, slab = first_slab + blockIdx.y;
    const long long place = ((long long)(slab / LAID_SLABS) * units + unit) * LAID_SLABS + slab % LAID_SLABS;
    float2 v[2][4][2];
    load_unit(v, matrix, row, column + 2 * lo, rows, columns);
    float own_step[2], own_inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u32 amax = own_amax(v[half], lo);
        const float exact = exact_scale(amax, global_scale), nearest = to_e4m3(exact);
        if (amax >= INF_BITS) atomicAdd(counts, 1);
        else if (exact > SATURATED) atomicAdd(counts + 1, 1);
        const float scale = nearest == 0.0f ? ZERO_SCALE : nearest;
        const bool inside = row + 8 * half < rows && column + 16 * lo < columns;
        scales[place * 64 + 8 * hi + 4 * (lo / 2) + 2 * half + lo % 2] = inside ? scale_byte(scale) : 0;
        own_step[half] = __fdiv_rn(scale, global_scale);
        own_inverse[half] = own_step[half] >= 0x1p-60f && own_step[half] <= 1.0f ? __frcp_rn(own_step[half]) : 0.0f;
    }
    u32 word[4];
#pragma unroll
    for (int block = 0; block < 4; ++block) {
        u32 codes[2][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float step = __shfl_sync(~0u, own_step[half], block, 4);
            const float inverse = __shfl_sync(~0u, own_inverse[half], block, 4);
#pragma unroll
            for (int right = 0; right < 2; ++right) codes[right][half] = two_codes(v[half][block][right], step, inverse);
        }
        word[block] = word_of(codes[0][0], codes[0][1], codes[1][0], codes[1][1]);
    }
    words[place * 32 + lane] = make_uint4(word[0], word[1], word[2], word[3]);
}
