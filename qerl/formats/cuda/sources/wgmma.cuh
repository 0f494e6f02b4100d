// Hopper's asynchronous instructions: barriers in shared memory, bulk copies, and tensor-core products of a warpgroup.
#pragma once
#include "common.cuh"

static __device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

static __device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{\n.reg .pred done;\nagain:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
        ::"r"(barrier), "r"(parity) : "memory");
}

static __device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive at the barrier, and make it wait for `bytes` bytes of bulk copies.
static __device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// The description of a matrix in memory, made by cuTensorMapEncodeTiled.
struct __align__(64) TensorMap {
    u64 opaque[16];
};

static __device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copy the tile of the matrix that starts at (row, column) to shared memory; the barrier counts its bytes.
static __device__ __forceinline__ void copy_tile(u32 target, const TensorMap& map, int column, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%2, %3}], [%4];" ::"r"(target), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

// Copy `bytes` bytes, a multiple of 16, to shared memory; the barrier counts them.
static __device__ __forceinline__ void copy_bytes(u32 target, const u8* source, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(target), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}

// Write four numbers to another block's shared memory; its barrier counts their 16 bytes.
static __device__ __forceinline__ void give(u32 place, const float* four, u32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
        ::"r"(place), "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3]), "r"(barrier) : "memory");
}

// Make the ordinary stores of this thread, and those it has observed, visible to bulk copies.
static __device__ __forceinline__ void fence_for_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

static __device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

static __device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
static __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The descriptor of an operand in shared memory: rows of 128 bytes (64 columns), whose 16-byte chunks are permuted by
// row % 8; 1024 bytes per 8 rows ("128B swizzle", K-major).
static __device__ __forceinline__ u64 swizzled_operand(u32 address) {
    return (u64)(address >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

#define D_0_3 "%0,%1,%2,%3"
#define D_4_7 ",%4,%5,%6,%7"
#define D_8_15 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define D_16_31 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define D_32_47 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define D_48_63 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define D_64_95                                                                                                       \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"                                                \
    ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define D_96_127                                                                                                      \
    ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"                                    \
    ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define F4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define F8(i) F4(i), F4(i + 4)
#define F16(i) F8(i), F8(i + 8)
#define F32(i) F16(i), F16(i + 16)
#define WGMMA(N, D, A, OPERAND, ...)                                                                                  \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" D "}, {" A "}, " OPERAND ", 1, 1, 1, 0;" \
        : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// c (64 x N, float32) += a (64 x 16, in the warpgroup's registers) b^T (N x 16, in shared memory)
template <int N>
static __device__ __forceinline__ void wgmma(float (&c)[N / 2], const u32 (&a)[4], u64 b) {
    if constexpr (N == 8) WGMMA(8, D_0_3, "%4,%5,%6,%7", "%8", F4(0));
    if constexpr (N == 16) WGMMA(16, D_0_3 D_4_7, "%8,%9,%10,%11", "%12", F8(0));
    if constexpr (N == 32) WGMMA(32, D_0_3 D_4_7 D_8_15, "%16,%17,%18,%19", "%20", F16(0));
    if constexpr (N == 64) WGMMA(64, D_0_3 D_4_7 D_8_15 D_16_31, "%32,%33,%34,%35", "%36", F32(0));
    if constexpr (N == 96)
        WGMMA(96, D_0_3 D_4_7 D_8_15 D_16_31 D_32_47, "%48,%49,%50,%51", "%52", F32(0), F16(32));
    if constexpr (N == 128)
        WGMMA(128, D_0_3 D_4_7 D_8_15 D_16_31 D_32_47 D_48_63, "%64,%65,%66,%67", "%68", F32(0), F32(32));
    if constexpr (N == 192)
        WGMMA(192, D_0_3 D_4_7 D_8_15 D_16_31 D_32_47 D_48_63 D_64_95, "%96,%97,%98,%99", "%100", F32(0), F32(32),
              F32(64));
    if constexpr (N == 256)
        WGMMA(256, D_0_3 D_4_7 D_8_15 D_16_31 D_32_47 D_48_63 D_64_95 D_96_127, "%128,%129,%130,%131", "%132", F32(0),
              F32(32), F32(64), F32(96));
}
