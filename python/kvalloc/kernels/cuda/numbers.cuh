// Number formats, and how eight values at a time go between memory and registers.
//
// Read in front of every .cu file of this folder. It includes nothing, so that NVRTC needs no header, and a C++
// compiler takes the same text once a shim has said what a thread is: that is how the numerics are tested without a
// GPU.
//
// Work on a row of values (a head of K or V of one token) is done by a group of LANES neighbouring threads of a
// warp. A row is cut into pieces of eight values; lane i has the pieces i, i + LANES, ... Pieces are loaded as
// vectors (16 bytes, 8 for one-byte kinds) where VECTOR says that rows are aligned for it, else value by value.

typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#define F32 0
#define F16 1
#define BF16 2
#define I8 3
#define F8 4

#define PIECE 8
#define WARP 32
#define ALL_LANES 0xffffffffu

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Lanes for rows of up to `dim` values: the power of two that holds their pieces, a warp at most.
__device__ constexpr int lanes_for(int dim) {
    int lanes = 1;
    while (lanes < ceil_div(dim, PIECE) && lanes < WARP) lanes *= 2;
    return lanes;
}

template <int KIND> __device__ constexpr int value_bytes() { return KIND == F32 ? 4 : KIND == F16 || KIND == BF16 ? 2 : 1; }
template <int KIND> __device__ constexpr int piece_words() { return PIECE * value_bytes<KIND>() / 4; }

// A K, V or scale array of a page class: frames apart by `frame` elements, and so on; values of a row are adjacent.
struct Rows {
    const void *data;
    i64 frame, token, head;

    __device__ i64 at(i64 f, int t, int h) const { return f * frame + t * token + h * head; }
};

#define ROWS_ARGS(name) const void *name, i64 name##_frame, i64 name##_token, i64 name##_head
#define ROWS(name) Rows{name, name##_frame, name##_token, name##_head}

// ---- one value ----

__device__ inline float half_to_float(u32 h) {
#ifdef __CUDA_ARCH__
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)h));
    return f;
#else
    // The exponent is off by 127 - 15 once its bits lie in place; a product puts that right, also for subnormals.
    float f = __uint_as_float((h & 0x7fffu) << 13) * 5.192296858534828e33f;
    u32 bits = (h & 0x7c00u) == 0x7c00u ? 0x7f800000u | (h & 0x3ffu) << 13 : __float_as_uint(f);
    return __uint_as_float(bits | (h & 0x8000u) << 16);
#endif
}

__device__ inline u32 float_to_half(float f) {
#ifdef __CUDA_ARCH__
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
#else
    u32 bits = __float_as_uint(f), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7e00u;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65,520 and above round to infinity
    if (magnitude < 0x38800000u) return sign | (u32)rintf(__uint_as_float(magnitude) * 16777216.0f);
    return sign | (((magnitude + 0xfffu + (magnitude >> 13 & 1u)) >> 13) - (112u << 10));
#endif
}

__device__ inline u32 float_to_bfloat16(float f) {
    u32 bits = __float_as_uint(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40u;
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

// float8 e4m3fn: no infinity, one NaN (0x7f), largest 448.
__device__ inline float float8_to_float(u32 b) {
    float f = __uint_as_float((b & 0x7fu) << 20) * 1.329227995784916e36f;  // 2^(127 - 7)
    u32 bits = (b & 0x7fu) == 0x7fu ? 0x7fc00000u : __float_as_uint(f);
    return __uint_as_float(bits | (b & 0x80u) << 24);
}

// Values beyond 448 become 448, as caches in this format are written everywhere; NaN stays NaN.
__device__ inline u32 float_to_float8(float f) {
    u32 bits = __float_as_uint(f), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7fu;
    if (magnitude >= 0x43e00000u) return sign | 0x7eu;
    if (magnitude < 0x3c800000u) return sign | (u32)rintf(__uint_as_float(magnitude) * 512.0f);
    return sign | (((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3));
}

template <int KIND> __device__ inline float load_value(const void *data, i64 at) {
    if constexpr (KIND == F32) return ((const float *)data)[at];
    if constexpr (KIND == F16) return half_to_float(((const u16 *)data)[at]);
    if constexpr (KIND == BF16) return __uint_as_float((u32)((const u16 *)data)[at] << 16);
    if constexpr (KIND == I8) return (float)((const signed char *)data)[at];
    if constexpr (KIND == F8) return float8_to_float(((const u8 *)data)[at]);
}

template <int KIND> __device__ inline void store_value(void *data, i64 at, float value) {
    if constexpr (KIND == F32) ((float *)data)[at] = value;
    if constexpr (KIND == F16) ((u16 *)data)[at] = (u16)float_to_half(value);
    if constexpr (KIND == BF16) ((u16 *)data)[at] = (u16)float_to_bfloat16(value);
}

// ---- eight values ----

// The i-th value of a piece as it lies in memory.
template <int KIND> __device__ inline float unpack(const u32 *words, int i) {
    if constexpr (KIND == F32) return __uint_as_float(words[i]);
    if constexpr (KIND == F16) return half_to_float(words[i / 2] >> 16 * (i % 2) & 0xffffu);
    if constexpr (KIND == BF16) return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
    if constexpr (KIND == I8) return (float)(signed char)(words[i / 4] >> 8 * (i % 4) & 0xffu);
    if constexpr (KIND == F8) return float8_to_float(words[i / 4] >> 8 * (i % 4) & 0xffu);
}

// Put eight values in the form they have in memory. For int8 they are multiples of the row's scale already.
template <int KIND> __device__ inline void pack(u32 *words, const float *values) {
#pragma unroll
    for (int w = 0; w < piece_words<KIND>(); w++) words[w] = 0;
#pragma unroll
    for (int i = 0; i < PIECE; i++) {
        if constexpr (KIND == F32) words[i] = __float_as_uint(values[i]);
        if constexpr (KIND == F16) words[i / 2] |= float_to_half(values[i]) << 16 * (i % 2);
        if constexpr (KIND == BF16) words[i / 2] |= float_to_bfloat16(values[i]) << 16 * (i % 2);
        if constexpr (KIND == I8) {
            int q = (int)rintf(fminf(fmaxf(values[i], -127.0f), 127.0f));
            words[i / 4] |= (u32)(q & 0xff) << 8 * (i % 4);
        }
        if constexpr (KIND == F8) words[i / 4] |= float_to_float8(values[i]) << 8 * (i % 4);
    }
}

// Load `count` values (0 to 8) from element `at`; the others read as zero, and nothing of theirs is touched.
template <int KIND, bool WIDE> __device__ inline void load_piece(u32 *words, const void *data, i64 at, int count) {
#pragma unroll
    for (int w = 0; w < piece_words<KIND>(); w++) words[w] = 0;
    if (count <= 0) return;
    if constexpr (WIDE) {
        if constexpr (piece_words<KIND>() == 2) {
            uint2 x = *(const uint2 *)((const u8 *)data + at);
            words[0] = x.x, words[1] = x.y;
        } else {
#pragma unroll
            for (int w = 0; w < piece_words<KIND>(); w += 4) {
                uint4 x = ((const uint4 *)((const u8 *)data + at * value_bytes<KIND>()))[w / 4];
                words[w] = x.x, words[w + 1] = x.y, words[w + 2] = x.z, words[w + 3] = x.w;
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < PIECE; i++)
            if (i < count) {
                if constexpr (value_bytes<KIND>() == 4) words[i] = ((const u32 *)data)[at + i];
                if constexpr (value_bytes<KIND>() == 2) words[i / 2] |= (u32)((const u16 *)data)[at + i] << 16 * (i % 2);
                if constexpr (value_bytes<KIND>() == 1) words[i / 4] |= (u32)((const u8 *)data)[at + i] << 8 * (i % 4);
            }
    }
}

template <int KIND, bool WIDE> __device__ inline void store_piece(const u32 *words, void *data, i64 at, int count) {
    if (count <= 0) return;
    if constexpr (WIDE) {
        if constexpr (piece_words<KIND>() == 2) {
            *(uint2 *)((u8 *)data + at) = uint2{words[0], words[1]};
        } else {
#pragma unroll
            for (int w = 0; w < piece_words<KIND>(); w += 4)
                ((uint4 *)((u8 *)data + at * value_bytes<KIND>()))[w / 4] =
                    uint4{words[w], words[w + 1], words[w + 2], words[w + 3]};
        }
    } else {
#pragma unroll
        for (int i = 0; i < PIECE; i++)
            if (i < count) {
                if constexpr (value_bytes<KIND>() == 4) ((u32 *)data)[at + i] = words[i];
                if constexpr (value_bytes<KIND>() == 2) ((u16 *)data)[at + i] = (u16)(words[i / 2] >> 16 * (i % 2));
                if constexpr (value_bytes<KIND>() == 1) ((u8 *)data)[at + i] = (u8)(words[i / 4] >> 8 * (i % 4));
            }
    }
}

// How many values of a row of DIM the piece number p has.
template <int DIM> __device__ inline int piece_count(int p) {
    int left = DIM - p * PIECE;
    return left > PIECE ? PIECE : left;
}

// ---- lanes ----

template <int LANES> __device__ inline float sum_over_lanes(float x) {
#pragma unroll
    for (int apart = LANES / 2; apart > 0; apart /= 2) x += __shfl_xor_sync(ALL_LANES, x, apart);
    return x;
}

template <int LANES> __device__ inline float max_over_lanes(float x) {
#pragma unroll
    for (int apart = LANES / 2; apart > 0; apart /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, apart));
    return x;
}
