// Rows of K and V into pages: new tokens by slot mapping, and pages between a class and its compressed one.
//
// Options: SOURCE and TARGET (kinds), K_DIM, V_DIM, PAGE_TOKENS, VECTOR (all rows aligned, both sides).
//
// int8 rows have a float16 scale each: the row's largest magnitude / 127. A NaN in the row makes the scale NaN, so
// that it shows in what is read later. Other kinds have no scales.

#define WRITE_THREADS 128

constexpr int LANES = lanes_for(K_DIM > V_DIM ? K_DIM : V_DIM);
constexpr int GROUPS = WRITE_THREADS / LANES;

// Convert one row by a group of lanes; `live` is false for a group that has no row but must take part in the
// shuffles.
template <int DIM>
__device__ inline void convert_row(const void *source, i64 at, const u16 *scale, i64 scale_at, void *target, i64 to,
                                   u16 *new_scale, i64 new_scale_at, int lane, bool live) {
    constexpr int PIECES = ceil_div(ceil_div(DIM, PIECE), LANES);
    u32 words[PIECES][piece_words<SOURCE>()];
#pragma unroll
    for (int c = 0; c < PIECES; c++) {
        int p = c * LANES + lane;
        load_piece<SOURCE, VECTOR>(words[c], source, at + p * PIECE, live ? piece_count<DIM>(p) : 0);
    }
    if constexpr (SOURCE == TARGET && SOURCE != I8) {
#pragma unroll
        for (int c = 0; c < PIECES; c++) {
            int p = c * LANES + lane;
            store_piece<TARGET, VECTOR>(words[c], target, to + p * PIECE, live ? piece_count<DIM>(p) : 0);
        }
    } else {
        float old_scale = SOURCE == I8 && live ? half_to_float(scale[scale_at]) : 1.0f, most = 0.0f, bad = 0.0f;
        float values[PIECES][PIECE];
#pragma unroll
        for (int c = 0; c < PIECES; c++)
#pragma unroll
            for (int i = 0; i < PIECE; i++) {
                values[c][i] = unpack<SOURCE>(words[c], i) * old_scale;
                most = fmaxf(most, fabsf(values[c][i]));
                bad += values[c][i] != values[c][i] ? 1.0f : 0.0f;
            }
        if constexpr (TARGET == I8) {
            most = max_over_lanes<LANES>(most);
            bad = sum_over_lanes<LANES>(bad);
            // Rounded first, so that the quotients fit the scale that is read back; a scale that vanishes makes the
            // row zero.
            u32 rounded = bad > 0.0f ? 0x7e00u : float_to_half(fminf(most / 127.0f, 65504.0f));
            float s = half_to_float(rounded), inverse = s > 0.0f ? 1.0f / s : 0.0f;
            if (live && lane == 0) new_scale[new_scale_at] = (u16)rounded;
#pragma unroll
            for (int c = 0; c < PIECES; c++)
#pragma unroll
                for (int i = 0; i < PIECE; i++) values[c][i] = inverse > 0.0f ? values[c][i] * inverse : 0.0f;
        }
#pragma unroll
        for (int c = 0; c < PIECES; c++) {
            int p = c * LANES + lane;
            u32 packed[piece_words<TARGET>()];
            pack<TARGET>(packed, values[c]);
            store_piece<TARGET, VECTOR>(packed, target, to + p * PIECE, live ? piece_count<DIM>(p) : 0);
        }
    }
}

// New rows of all tokens into the slots (frame x PAGE_TOKENS + offset) of the mapping; -1 skips a token.
// Block row 0 writes K, block row 1 (if any) V.
extern "C" __global__ void __launch_bounds__(WRITE_THREADS)
write_kv(const void *new_k, i64 new_k_token, i64 new_k_head, const void *new_v, i64 new_v_token, i64 new_v_head,
         ROWS_ARGS(k),
         ROWS_ARGS(v), ROWS_ARGS(k_scale), ROWS_ARGS(v_scale), const i64 *slot_mapping, i64 tokens, int heads) {
    int lane = threadIdx.x % LANES;
    i64 item = (i64)blockIdx.x * GROUPS + threadIdx.x / LANES, token = item / heads;
    int head = (int)(item % heads);
    i64 slot = token < tokens ? slot_mapping[token] : -1;
    bool live = slot >= 0, is_v = blockIdx.y == 1;
    i64 frame = live ? slot / PAGE_TOKENS : 0;
    int offset = live ? (int)(slot % PAGE_TOKENS) : 0;
    if (!live) token = 0;
    Rows target = is_v ? ROWS(v) : ROWS(k), scales = is_v ? ROWS(v_scale) : ROWS(k_scale);
    i64 to = target.at(frame, offset, head), scale_to = scales.at(frame, offset, head);
    if (is_v)
        convert_row<V_DIM>(new_v, token * new_v_token + head * new_v_head, 0, 0, (void *)target.data, to,
                           (u16 *)scales.data, scale_to, lane, live);
    else
        convert_row<K_DIM>(new_k, token * new_k_token + head * new_k_head, 0, 0, (void *)target.data, to,
                           (u16 *)scales.data, scale_to, lane, live);
}

// All rows of page from[i] of one class into page to[i] of another, of one layer; a negative entry skips the page.
extern "C" __global__ void __launch_bounds__(WRITE_THREADS)
convert_pages(ROWS_ARGS(k), ROWS_ARGS(v), ROWS_ARGS(k_scale), ROWS_ARGS(v_scale), const INDEX *from, i64 from_step,
              ROWS_ARGS(new_k), ROWS_ARGS(new_v), ROWS_ARGS(new_k_scale), ROWS_ARGS(new_v_scale), const INDEX *to,
              i64 to_step, i64 pages, int heads) {
    int lane = threadIdx.x % LANES;
    i64 item = (i64)blockIdx.x * GROUPS + threadIdx.x / LANES, page = item / ((i64)PAGE_TOKENS * heads);
    int token = (int)(item / heads % PAGE_TOKENS), head = (int)(item % heads);
    i64 f = page < pages ? (i64)from[page * from_step] : -1, t = page < pages ? (i64)to[page * to_step] : -1;
    bool live = f >= 0 && t >= 0, is_v = blockIdx.y == 1;
    if (!live) f = t = 0;
    Rows source = is_v ? ROWS(v) : ROWS(k), scale = is_v ? ROWS(v_scale) : ROWS(k_scale);
    Rows target = is_v ? ROWS(new_v) : ROWS(new_k), new_scale = is_v ? ROWS(new_v_scale) : ROWS(new_k_scale);
    i64 at = source.at(f, token, head), scale_at = scale.at(f, token, head);
    i64 to_at = target.at(t, token, head), new_scale_at = new_scale.at(t, token, head);
    if (is_v)
        convert_row<V_DIM>(source.data, at, (const u16 *)scale.data, scale_at, (void *)target.data, to_at,
                           (u16 *)new_scale.data, new_scale_at, lane, live);
    else
        convert_row<K_DIM>(source.data, at, (const u16 *)scale.data, scale_at, (void *)target.data, to_at,
                           (u16 *)new_scale.data, new_scale_at, lane, live);
}
