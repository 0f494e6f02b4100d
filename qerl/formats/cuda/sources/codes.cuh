// Codes and block scales of an NVFP4 weight as bfloat16 operands of the tensor cores.
//
// A tile of 64 rows x 16 columns is stored as the fragments of mma.m16n8k16 (see kernel_layout.py): a lane's 16 bytes
// are its A operands for four mma, with the tokens as columns. So a weight goes from memory to the tensor cores through
// registers alone. A code becomes bfloat16 by moving its bits, which gives its value times 2^-126, subnormals included.
// Its product with the block scale times 2^100 is exact, since they have 2 and 4 significant bits.
//
// Macros: TRANSPOSED, MARLIN, as in kernel_layout.py.
#pragma once
#include "common.cuh"

// Two codes (nibble J of each half word) as bfloat16 times 2^-126.
template <int J>
static __device__ __forceinline__ u32 two_codes(u32 word) {
    const u32 top = J == 3 ? word : word << (12 - 4 * J);
    return (top & 0x80008000u) | ((top >> 6) & 0x01C001C0u);
}

// The four block scales of a lane's rows (8 * group + lane / 4) in four neighbouring groups, times 2^100, each twice in
// a register.
static __device__ __forceinline__ void four_scales(u32 bytes, u32 (&scale)[4]) {
    // Shifted into the fields of bfloat16, e4m3 becomes 2^-120 of its value, Marlin's unsigned e5m3 (bias 22) 2^-105.
    const u32 unbias = MARLIN ? 0x74007400u : 0x7B807B80u;  // 2^105, 2^120
    const u32 lift = 0x71807180u;                           // 2^100
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
        u32 two = __byte_perm(bytes, 0, pair ? 0x4342 : 0x4140);
        two = fma_bf16x2(fma_bf16x2(two << 4, unbias), lift);
        scale[MARLIN ? pair : 2 * pair] = twice<0>(two);  // Marlin's order is 0 2 1 3
        scale[MARLIN ? pair + 2 : 2 * pair + 1] = twice<1>(two);
    }
}

// The A operands of the 16 rows of a tile that `word` holds.
static __device__ __forceinline__ void operands(u32 word, u32 low, u32 high, u32 (&a)[4]) {
    a[0] = fma_bf16x2(two_codes<0>(word), low);
    a[1] = fma_bf16x2(TRANSPOSED ? two_codes<1>(word) : two_codes<2>(word), high);
    a[2] = fma_bf16x2(TRANSPOSED ? two_codes<2>(word) : two_codes<1>(word), low);
    a[3] = fma_bf16x2(two_codes<3>(word), high);
}
