// Codes and block scales of an NVFP4 weight in qerl's own layout, as bfloat16 operands of the tensor cores.
//
// 16 rows x 64 columns, one unit of a slab, are 16 bytes per lane: one word per 16 columns, which is the A operand of a
// product with the tokens as columns. The bits of a word are arranged so that few instructions move them into place
// (BITS in slab_layout.py), which gives a code's value times 2^-126, subnormals included. A block scale has 5 bits of
// exponent and 3 of mantissa; with three more bits set above them it is its value times 2^107. The product of code and
// scale is exact, since they have 2 and 4 significant bits.
#pragma once
#include "common.cuh"

#define CODE_BITS 0x81C081C0u

#define SCALE_BITS 0x0FF00FF0u

// The scales of a lane's rows hi (low half) and hi + 8 (high half), in the first or second (odd) of two neighbouring
// blocks of 16 columns. `mask` is SCALE_BITS in a register: an instruction has room for one constant only.
static __device__ __forceinline__ u32 two_scales(u32 bytes, int odd, u32 mask) {
    u32 scales;  // by one instruction, in which the compiler would not keep the mask in a register
    asm("lop3.b32 %0, %1, %2, 0x70007000, 0xEA;" : "=r"(scales) : "r"(odd ? bytes >> 4 : bytes << 4), "r"(mask));
    return scales;
}

static __device__ __forceinline__ void operands(u32 word, u32 scales, u32 (&a)[4]) {
    const u32 low = twice<0>(scales), high = twice<1>(scales);
    a[0] = fma_bf16x2(word & CODE_BITS, low);
    a[1] = fma_bf16x2(__funnelshift_l(word, word, 10) & CODE_BITS, high);
    a[2] = fma_bf16x2((word << 6) & CODE_BITS, low);
    a[3] = fma_bf16x2(((word << 4) & 0x81808180u) | ((word >> 4) & 0x00400040u), high);
}
