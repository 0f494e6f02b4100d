// How `attend` reads and writes a KV cache, by the macro KV_BITS: 16 for bfloat16, 8 for e4m3 codes, which stand for
// code * scale, with one scale for the keys of a layer and one for its values. Codes are decoded to float16 in registers,
// which represents each of them exactly; the query and the weights of the softmax are then float16 as well.
//
// A product takes 16 values of a key in a step. Of these a lane holds four neighbours, as two words of two values. Its
// part of a key is RUNS stretches of RUN neighbouring values; its part of a value is stretches of WIDE.
#pragma once
#include "common.cuh"

#define STEPS (HEAD_DIM / 16)                           // of the product of keys and query
#define WORDS (HEAD_DIM / 16)                           // words of 2 dimensions that a lane holds of a value
#if KV_BITS == 16
typedef u16 Element;
#define RUN 8
#define WIDE (HEAD_DIM / 8 < 8 ? HEAD_DIM / 8 : 8)
#else
typedef u8 Element;
#define RUN (HEAD_DIM / 4 < 16 ? HEAD_DIM / 4 : 16)
#define WIDE (HEAD_DIM / 8)
#endif
#define RUNS (HEAD_DIM / 4 / RUN)
#define RUN_WORDS (RUN * KV_BITS / 32)
#define KEY_WORDS (RUNS * RUN_WORDS)                    // registers for a lane's part of a key
#define WIDE_WORDS (WIDE * KV_BITS / 32)
#define VALUE_WORDS (WORDS * KV_BITS / 16)              // and of a value

// Copy COUNT words between registers and memory, 16 bytes at a time if there are as many.
template <int COUNT>
static __device__ __forceinline__ void load_words(const void* place, u32* words) {
    static_assert(COUNT == 1 || COUNT == 2 || COUNT % 4 == 0, "1, 2 or a multiple of 4");
    if constexpr (COUNT >= 4) {
#pragma unroll
        for (int i = 0; i < COUNT / 4; ++i) {
            const uint4 four = static_cast<const uint4*>(place)[i];
            words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
        }
    } else if constexpr (COUNT == 2) {
        const uint2 two = *static_cast<const uint2*>(place);
        words[0] = two.x, words[1] = two.y;
    } else {
        words[0] = *static_cast<const u32*>(place);
    }
}

template <int COUNT>
static __device__ __forceinline__ void store_words(void* place, const u32* words) {
    if constexpr (COUNT >= 4) {
#pragma unroll
        for (int i = 0; i < COUNT / 4; ++i)
            static_cast<uint4*>(place)[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) static_cast<u32*>(place)[i] = words[i];
    }
}

// The index in the head of word i of a lane's part of a value.
static __device__ __forceinline__ int dim_of(int i, int hi) {
    return i / (WIDE / 2) * (8 * WIDE) + hi * WIDE + 2 * (i % (WIDE / 2));
}

#if KV_BITS == 16

static __device__ __forceinline__ u32 query_word(u32 two) { return two; }

static __device__ __forceinline__ u32 weight_word(float low, float high) { return two_bf16(low, high); }

static __device__ __forceinline__ void product(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma(c, a0, a1, a2, a3, b0, b1);
}

// The two words of a step of a lane's key.
static __device__ __forceinline__ uint2 step_of(const u32* key, int step) {
    return make_uint2(key[2 * step], key[2 * step + 1]);
}

// For two tokens' words of dimensions d and d + 1: the tokens' values of d, and those of d + 1.
static __device__ __forceinline__ uint2 paired(const u32* first, const u32* second, int word) {
    return make_uint2(__byte_perm(first[word], second[word], 0x5410), __byte_perm(first[word], second[word], 0x7632));
}

// Where to load a token from: the new one is not in the cache yet.
static __device__ __forceinline__ const u16* source_of(const u16* cached, const u16* fresh, bool is_new) {
    return is_new ? fresh : cached;
}

static __device__ __forceinline__ void round_key(const u16*, int, float, u32*) {}
static __device__ __forceinline__ void round_value(const u16*, int, float, u32*) {}

#else

static __device__ __forceinline__ u32 two_f16(float low, float high) {
    u32 two;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    return two;
}

// Within what float16 holds, as every query that a model computes is; NaN stays NaN.
static __device__ __forceinline__ float clamped(float value) {
    const float most = 65504.0f;
    return value > most ? most : value < -most ? -most : value;
}

static __device__ __forceinline__ u32 query_word(u32 two) {
    return two_f16(clamped(from_bf16((u16)two)), clamped(from_bf16((u16)(two >> 16))));
}

static __device__ __forceinline__ u32 weight_word(float low, float high) { return two_f16(low, high); }

// c (16 x 8, float32) += a (16 x 16) b (16 x 8), by a warp
static __device__ __forceinline__ void product(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The low two codes of `four` and the high two, as float16.
static __device__ __forceinline__ uint2 decoded(u32 four) {
    uint2 words;
    asm("{.reg .b16 low, high;\n mov.b32 {low, high}, %2;\n cvt.rn.f16x2.e4m3x2 %0, low;\n cvt.rn.f16x2.e4m3x2 %1, high;}"
        : "=r"(words.x), "=r"(words.y) : "r"(four));
    return words;
}

static __device__ __forceinline__ uint2 step_of(const u32* key, int step) { return decoded(key[step]); }

static __device__ __forceinline__ uint2 paired(const u32* first, const u32* second, int word) {
    return decoded(__byte_perm(first[word / 2], second[word / 2], word % 2 ? 0x7362 : 0x5140));
}

// The codes of four bfloat16 values times `inverse` (of the scale), to nearest, ties to even; 448 is the largest.
static __device__ __forceinline__ u32 rounded(uint2 four, float inverse) {
    u32 codes;
    asm("{.reg .b16 low, high;\n cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        " mov.b32 %0, {low, high};}"
        : "=r"(codes)
        : "f"(from_bf16((u16)four.x) * inverse), "f"(from_bf16((u16)(four.x >> 16)) * inverse),
          "f"(from_bf16((u16)four.y) * inverse), "f"(from_bf16((u16)(four.y >> 16)) * inverse));
    return codes;
}

// Round COUNT x 4 neighbouring values.
template <int COUNT>
static __device__ __forceinline__ void round_words(const u16* fresh, float inverse, u32* words) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) words[i] = rounded(reinterpret_cast<const uint2*>(fresh)[i], inverse);
}

// What the cache has in the place of the new token is loaded like any other; `round_key` and `round_value` replace it.
static __device__ __forceinline__ const u8* source_of(const u8* cached, const u16*, bool) { return cached; }

static __device__ __forceinline__ void round_key(const u16* fresh, int lo, float inverse, u32* key) {
#pragma unroll
    for (int i = 0; i < RUNS; ++i) round_words<RUN_WORDS>(fresh + 4 * RUN * i + RUN * lo, inverse, key + RUN_WORDS * i);
}

static __device__ __forceinline__ void round_value(const u16* fresh, int hi, float inverse, u32* value) {
    round_words<VALUE_WORDS>(fresh + WIDE * hi, inverse, value);
}

#endif

// A lane's part of one token's key or value.
static __device__ __forceinline__ void load_key(const Element* place, int lo, u32* key) {
#pragma unroll
    for (int i = 0; i < RUNS; ++i) load_words<RUN_WORDS>(place + 4 * RUN * i + RUN * lo, key + RUN_WORDS * i);
}

static __device__ __forceinline__ void load_value(const Element* place, int hi, u32* value) {
#pragma unroll
    for (int i = 0; i < VALUE_WORDS / WIDE_WORDS; ++i)
        load_words<WIDE_WORDS>(place + 8 * WIDE * i + WIDE * hi, value + WIDE_WORDS * i);
}

static __device__ __forceinline__ void store_key(Element* place, int lo, const u32* key) {
#pragma unroll
    for (int i = 0; i < RUNS; ++i) store_words<RUN_WORDS>(place + 4 * RUN * i + RUN * lo, key + RUN_WORDS * i);
}

static __device__ __forceinline__ void store_value(Element* place, int hi, const u32* value) {
#pragma unroll
    for (int i = 0; i < VALUE_WORDS / WIDE_WORDS; ++i)
        store_words<WIDE_WORDS>(place + 8 * WIDE * i + WIDE * hi, value + WIDE_WORDS * i);
}

// Rotate a lane's part of a query or key in bfloat16: value d of the head with value d + HEAD_DIM / 2, by the angle d.
static __device__ __forceinline__ void rotate_words(u32* words, const u16* angles, int lo) {
#pragma unroll
    for (int i = 0; i < RUNS / 2; ++i) {
#pragma unroll
        for (int w = 0; w < RUN / 2; ++w) {  // word by word, for registers are scarce
            const u16* place = angles + 4 * RUN * i + RUN * lo + 2 * w;
            u32 cosine, sine;
            asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(cosine) : "l"(place));
            asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(sine) : "l"(place + HEAD_DIM / 2));
            u32 &first = words[RUN / 2 * i + w], &second = words[RUN / 2 * (i + RUNS / 2) + w];
            float low[2], high[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float a = from_bf16((u16)(first >> 16 * half)), b = from_bf16((u16)(second >> 16 * half));
                const float c = from_bf16((u16)(cosine >> 16 * half)), s = from_bf16((u16)(sine >> 16 * half));
                low[half] = a * c - b * s, high[half] = b * c + a * s;
            }
            first = two_bf16(low[0], low[1]), second = two_bf16(high[0], high[1]);
        }
    }
}
