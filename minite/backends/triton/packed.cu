// D = X @ W.T with W in packed NVFP4 (packed.py lays it out) and X in BF16: sm_90a. Compiled by nvrtc.py.
//
// Each warp owns 16 rows of W and streams their codes; the four warps of a warpgroup together are the 64 rows of the A
// operand, which wgmma takes from registers. X is the B operand, in shared memory with the 128-byte swizzle. So the
// product is D.T, [rows of W, tokens], and the token tile may be as small as 8.
//
// A row's sum runs over K in steps of 16, in order, whatever the tile: no result depends on the tokens beside it.
//
// Given before this text: TOKENS (tile), WARPGROUPS (64 rows of W each), STAGES (slots of 128 columns), OUT_FLOAT, and
// wgmma(d, a0, a1, a2, a3, descriptor) of the shape m64 n TOKENS k16.

using u32 = unsigned;
using u64 = unsigned long long;
struct alignas(16) Words { u32 w[4]; };

constexpr int THREADS = 128 * WARPGROUPS, ROWS = 64 * WARPGROUPS, DEPTH = 128;
constexpr int X_BYTES = TOKENS * DEPTH * 2, CODE_BYTES = ROWS * DEPTH / 2, SCALE_BYTES = ROWS * DEPTH / 16;
constexpr int SLOT = (X_BYTES + CODE_BYTES + SCALE_BYTES + 1023) / 1024 * 1024;
constexpr int PITCH = ROWS + 8;  // of the staged output: 8 more, so that 8 rows lie in different banks

__device__ __forceinline__ void copy_async(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ Words load_shared(u32 at) {
    Words v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 rounded_pair(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// Byte `i` of a word of scales, twice, as BF16: 2^118 times the block scale.
__device__ __forceinline__ u32 scale_pair(u32 word, int i) {
    return __byte_perm(word, 0, 0x4040 + 0x101 * i) * 16 + 0x70007000;
}

// Four pairs of codes of one word times their scales: 2^-126 times a value is what its three bits read at the end of a
// BF16 exponent. The product is 2^-8 of what it stands for; alpha makes up for that. All exact.
__device__ __forceinline__ void dequantize(u32 w, u32 scale, u32 scale_8, u32 (&a)[4]) {
    constexpr u32 BITS = 0x81C081C0;
    a[0] = multiply(w & BITS, scale);
    a[1] = multiply((w << 3) & BITS, scale_8);
    a[2] = multiply((w << 6) & BITS, scale);
    a[3] = multiply(((w << 1) & 0x80008000) | ((w >> 4) & 0x00C000C0) | ((w >> 5) & 0x01000100), scale_8);
}

struct Tile { int expert, row, end; };

// Expert and rows of token tile `index`; expert -1: there are not so many. Each warp finds it for itself, a few experts a
// lane: a table made beforehand would cost a launch.
__device__ Tile find_tile(const long long* rows_E, int E, int index, int lane) {
    const int each = (E + 31) / 32;
    int rows = 0, tiles = 0;
    for (int e = lane * each; e < min(E, (lane + 1) * each); e++) {
        rows += int(rows_E[e]);
        tiles += (int(rows_E[e]) + TOKENS - 1) / TOKENS;
    }
    int row_end = rows, tile_end = tiles;
    for (int step = 1; step < 32; step *= 2) {
        const int r = __shfl_up_sync(~0u, row_end, step), t = __shfl_up_sync(~0u, tile_end, step);
        if (lane >= step) row_end += r, tile_end += t;
    }
    const u32 owners = __ballot_sync(~0u, tile_end > index);
    if (owners == 0) return {-1, 0, 0};
    const int owner = __ffs(owners) - 1;
    int row = __shfl_sync(~0u, row_end - rows, owner), tile = __shfl_sync(~0u, tile_end - tiles, owner);
    for (int e = owner * each;; e++) {
        const int count = int(rows_E[e]), here = (count + TOKENS - 1) / TOKENS;
        if (index < tile + here) return {e, row + (index - tile) * TOKENS, row + count};
        row += count, tile += here;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) packed_gemm(
    const unsigned short* __restrict__ x_RK, const Words* __restrict__ codes, const Words* __restrict__ scales,
    void* __restrict__ out_RN, const float* __restrict__ a_amax, const float* __restrict__ b_amax,
    const long long* __restrict__ rows_E, int E, int R, int N, int K, float alpha) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    Tile tile = {0, int(blockIdx.y) * TOKENS, R};
    if (rows_E) tile = find_tile(rows_E, E, blockIdx.y, lane);
    if (tile.expert < 0) return;
    tile.end = min(tile.end, R);
    const int groups = N / 16, steps = K / DEPTH, first_n = blockIdx.x * ROWS;
    const int group = min(first_n / 16 + warp, groups - 1);  // beyond N: computed, not stored
    const size_t strip = size_t(tile.expert) * groups + group;
    const Words* code_at = codes + strip * (K / 64) * 32 + lane;
    const Words* scale_at = scales + strip * steps * 8 + lane / 4;
    const int x_row = thread / 16, x_chunk = thread % 16;  // 16 bytes of a row, and of the rows THREADS / 16 further on
    const unsigned short* x_at = x_RK + size_t(tile.row + x_row) * K + x_chunk * 8;
    const u32 x_slot = x_chunk / 8 * (TOKENS * 128) + x_row * 128 + ((x_chunk % 8) ^ (x_row % 8)) * 16;
    const u32 base = u32(__cvta_generic_to_shared(shared));

    auto fetch = [&](int step) {
        if (step < steps) {
            const u32 slot = base + step % STAGES * SLOT;
#pragma unroll
            for (int r = 0; r < TOKENS; r += THREADS / 16)  // rows beyond the end hold anything: their columns of D do
                if (r + x_row < min(TOKENS, tile.end - tile.row))
                    copy_async(slot + x_slot + r * 128, x_at + size_t(r) * K + step * DEPTH);
            copy_async(slot + X_BYTES + thread * 16, code_at + step * 64);
            copy_async(slot + X_BYTES + CODE_BYTES / 2 + thread * 16, code_at + step * 64 + 32);
            if (lane % 4 == 0)
                copy_async(slot + X_BYTES + CODE_BYTES + warp * 128 + lane * 4, scale_at + step * 8);
        }
        commit_copies();
    };

    float acc[TOKENS / 2] = {};
    u32 a[2][4][4];
#pragma unroll
    for (int step = 0; step < STAGES - 2; step++) fetch(step);
    for (int step = 0; step < steps; step++) {
        wait_copies<STAGES - 3>();
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads X through the other proxy
        __syncthreads();
        fetch(step + STAGES - 2);  // into the slot of step - 2, whose products are done
        const u32 slot = base + step % STAGES * SLOT;
        const Words scale = load_shared(slot + X_BYTES + CODE_BYTES + warp * 128 + lane / 4 * 16);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const Words code = load_shared(slot + X_BYTES + half * (CODE_BYTES / 2) + thread * 16);
            wait_products<1>();  // those of the other half may still run; a[half] is free
#pragma unroll
            for (int b = 0; b < 4; b++) {
                const u32 word = scale.w[2 * half + b / 2];
                dequantize(code.w[b], scale_pair(word, b % 2 * 2), scale_pair(word, b % 2 * 2 + 1), a[half][b]);
            }
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            // start address, 1024 bytes from one group of 8 tokens to the next, 128-byte swizzle
            const u64 descriptor = ((slot + half * TOKENS * 128) & 0x3FFFF) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
#pragma unroll
            for (int b = 0; b < 4; b++)
                wgmma(acc, a[half][b][0], a[half][b][1], a[half][b][2], a[half][b][3], descriptor + 2 * b);
            commit_products();
        }
    }
    wait_products<0>();
    wait_copies<0>();
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) asm volatile("" : "+f"(acc[i])::"memory");

    const float outer_b = b_amax ? b_amax[tile.expert] : 1.0f;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) {  // in the order of backends/reference.py
        const int token = tile.row + i / 4 * 8 + lane % 4 * 2 + i % 2;
        const float outer_a = a_amax && token < tile.end ? a_amax[token] : 1.0f;
        acc[i] = acc[i] * alpha * (outer_a * outer_b);
    }
    if (OUT_FLOAT) {
        float* out = static_cast<float*>(out_RN);
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) {
            const int token = tile.row + i / 4 * 8 + lane % 4 * 2 + i % 2;
            const int n = first_n + warp * 16 + lane / 4 + i % 4 / 2 * 8;
            if (token < tile.end && n < N) out[size_t(token) * N + n] = acc[i];
        }
        return;
    }
    __syncthreads();  // the slots become the staged output [TOKENS, PITCH]
    const u32 corner = base + ((lane % 8) * PITCH + warp * 16 + lane / 8 % 2 * 8) * 2;
#pragma unroll
    for (int c = 0; c < TOKENS / 8; c++)
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(corner + c * 8 * PITCH * 2),
                     "r"(rounded_pair(acc[4 * c], acc[4 * c + 1])), "r"(rounded_pair(acc[4 * c + 2], acc[4 * c + 3]))
                     : "memory");
    __syncthreads();
    unsigned short* out = static_cast<unsigned short*>(out_RN);
    for (int i = thread; i < TOKENS * (ROWS / 8); i += THREADS) {
        const int r = i / (ROWS / 8), n = i % (ROWS / 8) * 8;
        if (tile.row + r < tile.end && first_n + n < N)
            *reinterpret_cast<Words*>(out + size_t(tile.row + r) * N + first_n + n) =
                load_shared(base + (r * PITCH + n) * 2);
    }
}
