// Attention of queries over pages: decode rows (one query token each), prefill chunks (more than one), mixed in one
// batch.
//
// Options: Q (kind of queries and output), KV (kind of the pages), SMALL (kind of compressed pages, -1: none),
// K_DIM, V_DIM, SHARED_KV (1: V is the first V_DIM values of K), PAGE_TOKENS, GROUP (query heads per KV head),
// HEAD_TILE (those of them that a block works on), VECTOR (rows of pages are aligned for vector loads), UNROLL
// (keys in flight per lane group, decode), ROW_TILE (rows per thread, prefill).
//
// The query of position p sees the keys from first_key(p) to p. Keys that no query of a block sees are not loaded,
// whatever the pages hold there: NaN in freed pages goes nowhere. A block table entry e < 0 names frame ~e of the
// compressed class; 0 is a page that was given up, whose keys no query sees. Scores are kept times log2(e), so that
// exp2 does.

#define THREADS 128
#define LOG2E 1.4426950408889634f
#define NONE __uint_as_float(0xff800000u)  // minus infinity: the score of a key that is not seen, the maximum of none

constexpr int HEAD_TILES = ceil_div(GROUP, HEAD_TILE);


struct Keys {
    Rows k, v, k_scale, v_scale;
};

#define KEYS_ARGS(name) ROWS_ARGS(name##k), ROWS_ARGS(name##v), ROWS_ARGS(name##k_scale), ROWS_ARGS(name##v_scale)
#define KEYS(name) Keys{ROWS(name##k), ROWS(name##v), ROWS(name##k_scale), ROWS(name##v_scale)}

constexpr int KV_WORDS = piece_words<KV>();
constexpr int SMALL_WORDS = SMALL < 0 ? 0 : piece_words<SMALL < 0 ? KV : SMALL>();
constexpr int WORDS = KV_WORDS > SMALL_WORDS ? KV_WORDS : SMALL_WORDS;

// One key of a row: where it lies. `seen` is false for a key that must not be touched.
struct Key {
    i64 frame;
    int offset;
    bool seen, small;
};

__device__ inline Key find_key(const int *table_row, int position, bool seen) {
    Key key{0, position % PAGE_TOKENS, seen, false};
    int entry = seen ? table_row[position / PAGE_TOKENS] : 0;
    key.seen = entry != 0;
    if (entry < 0) {
        key.small = true;
        key.seen = SMALL >= 0;
        entry = ~entry;
    }
    key.frame = entry;
    return key;
}

// Piece p of a key's row of DIM values, as it lies in memory; zeros where the key is not seen.
template <int DIM>
__device__ inline void load_key(u32 *words, const Rows &rows, const Rows &small, const Key &key, int head, int p) {
    int count = key.seen ? piece_count<DIM>(p) : 0;
    if constexpr (SMALL >= 0)
        if (key.small) {
            load_piece<SMALL, VECTOR>(words, small.data, small.at(key.frame, key.offset, head) + p * PIECE, count);
            return;
        }
    load_piece<KV, VECTOR>(words, rows.data, rows.at(key.frame, key.offset, head) + p * PIECE, count);
}

__device__ inline float key_value(const u32 *words, const Key &key, int i) {
    if constexpr (SMALL >= 0)
        if (key.small) return unpack<SMALL>(words, i);
    return unpack<KV>(words, i);
}

// What the values of a key's row are multiples of.
__device__ inline float key_scale(const Rows &scales, const Rows &small, const Key &key, int head) {
    if constexpr (SMALL == I8)
        if (key.seen && key.small)
            return half_to_float(((const u16 *)small.data)[small.at(key.frame, key.offset, head)]);
    if constexpr (KV == I8)
        if (key.seen && !key.small)
            return half_to_float(((const u16 *)scales.data)[scales.at(key.frame, key.offset, head)]);
    return 1.0f;
}

// The first key that the query at `position` sees. A window or chunk of 0 is none.
__device__ inline int first_key(int position, int window, int chunk) {
    int by_window = window > 0 ? position - window + 1 : 0;
    int by_chunk = chunk > 0 ? position / chunk * chunk : 0;
    int first = by_window > by_chunk ? by_window : by_chunk;
    return first > 0 ? first : 0;
}

// A score from the product of query and key, times log2(e). Queries were scaled by query_factor.
__device__ inline float score(float product, float soft_cap) {
    return soft_cap > 0.0f ? soft_cap * LOG2E * tanhf(product) : product;
}

__device__ inline float query_factor(float scale, float soft_cap) {
    return soft_cap > 0.0f ? scale / soft_cap : scale * LOG2E;
}

// exp2(x - top) where top is the maximum so far, which is NONE as long as no key was seen.
__device__ inline float weight(float x, float top) { return exp2f(x - (top == NONE ? 0.0f : top)); }

// ---- decode ----
//
// A block has one row of the batch, HEAD_TILE query heads of one KV head, and one of `splits` shares of the keys.
// Each lane group takes keys of its own, with a running maximum and sum of its own: the loop has no barrier. Groups
// are merged at the end, shares by merge_splits.

constexpr int LANES = lanes_for(K_DIM > V_DIM ? K_DIM : V_DIM);
constexpr int LANE_GROUPS = THREADS / LANES;
constexpr int K_PIECES = ceil_div(ceil_div(K_DIM, PIECE), LANES);
constexpr int V_PIECES = ceil_div(ceil_div(V_DIM, PIECE), LANES);
constexpr int V_LOADED = SHARED_KV ? 1 : V_PIECES;  // an array has one element at least
constexpr int V_PADDED = V_PIECES * LANES * PIECE;

extern "C" __global__ void __launch_bounds__(THREADS)
paged_decode(const void *q, i64 q_token, i64 q_head, KEYS_ARGS(), KEYS_ARGS(small_), const int *block_table,
             i64 table_row,
             const int *seq_lens, const int *query_start_loc, float scale, int window, int chunk, float soft_cap,
             const float *sinks, void *out, i64 out_token, i64 out_head, float *partial, float *partial_top,
             int splits) {
    int row = blockIdx.x, split = blockIdx.z;
    int token = query_start_loc[row];
    if (query_start_loc[row + 1] - token != 1) return;
    int kv_head = blockIdx.y / HEAD_TILES, in_group = blockIdx.y % HEAD_TILES * HEAD_TILE;
    int head = kv_head * GROUP + in_group, heads = gridDim.y / HEAD_TILES * GROUP;
    int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    Keys full = KEYS(), small = KEYS(small_);
    const int *table = block_table + row * table_row;

    int length = seq_lens[row], first = length > 0 ? first_key(length - 1, window, chunk) : 0;
    int share = ceil_div(ceil_div(length - first, splits), LANE_GROUPS * UNROLL) * (LANE_GROUPS * UNROLL);
    i64 begin = first + (i64)split * share;
    int end = begin + share < length ? (int)(begin + share) : length;

    float query[HEAD_TILE][K_PIECES][PIECE];
    float factor = query_factor(scale, soft_cap);
#pragma unroll
    for (int h = 0; h < HEAD_TILE; h++)
#pragma unroll
        for (int c = 0; c < K_PIECES; c++)
#pragma unroll
            for (int i = 0; i < PIECE; i++) {
                int d = (c * LANES + lane) * PIECE + i;
                bool there = d < K_DIM && in_group + h < GROUP;
                query[h][c][i] = there ? load_value<Q>(q, token * q_token + (head + h) * q_head + d) * factor : 0.0f;
            }

    float top[HEAD_TILE], sum[HEAD_TILE], acc[HEAD_TILE][V_PIECES][PIECE];
#pragma unroll
    for (int h = 0; h < HEAD_TILE; h++) {
        top[h] = NONE, sum[h] = 0.0f;
#pragma unroll
        for (int c = 0; c < V_PIECES; c++)
#pragma unroll
            for (int i = 0; i < PIECE; i++) acc[h][c][i] = 0.0f;
    }

    for (i64 base = begin; base < end; base += LANE_GROUPS * UNROLL) {
        // All loads of the round first: they are in flight together.
        Key key[UNROLL];
        u32 k_words[UNROLL][K_PIECES][WORDS], v_words[UNROLL][V_LOADED][WORDS];
        float k_factor[UNROLL], v_factor[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            int position = (int)base + u * LANE_GROUPS + group;
            key[u] = find_key(table, position, position < end);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
#pragma unroll
            for (int c = 0; c < K_PIECES; c++)
                load_key<K_DIM>(k_words[u][c], full.k, small.k, key[u], kv_head, c * LANES + lane);
            k_factor[u] = key_scale(full.k_scale, small.k_scale, key[u], kv_head);
            if constexpr (SHARED_KV) {
                v_factor[u] = k_factor[u];
            } else {
#pragma unroll
                for (int c = 0; c < V_PIECES; c++)
                    load_key<V_DIM>(v_words[u][c], full.v, small.v, key[u], kv_head, c * LANES + lane);
                v_factor[u] = key_scale(full.v_scale, small.v_scale, key[u], kv_head);
            }
        }

        float p[UNROLL][HEAD_TILE];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
#pragma unroll
            for (int h = 0; h < HEAD_TILE; h++) p[u][h] = 0.0f;
#pragma unroll
            for (int c = 0; c < K_PIECES; c++)
#pragma unroll
                for (int i = 0; i < PIECE; i++) {
                    float k_value = key_value(k_words[u][c], key[u], i);
#pragma unroll
                    for (int h = 0; h < HEAD_TILE; h++) p[u][h] += query[h][c][i] * k_value;
                }
#pragma unroll
            for (int h = 0; h < HEAD_TILE; h++) {
                float product = sum_over_lanes<LANES>(p[u][h]) * k_factor[u];
                p[u][h] = key[u].seen ? score(product, soft_cap) : NONE;
            }
        }

#pragma unroll
        for (int h = 0; h < HEAD_TILE; h++) {
            float new_top = top[h];
#pragma unroll
            for (int u = 0; u < UNROLL; u++) new_top = fmaxf(new_top, p[u][h]);
            float shrink = weight(top[h], new_top);
            top[h] = new_top;
            sum[h] *= shrink;
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                float w = weight(p[u][h], new_top);
                sum[h] += w;
                p[u][h] = w * v_factor[u];
            }
#pragma unroll
            for (int c = 0; c < V_PIECES; c++)
#pragma unroll
                for (int i = 0; i < PIECE; i++) acc[h][c][i] *= shrink;
        }

#pragma unroll
        for (int u = 0; u < UNROLL; u++)
#pragma unroll
            for (int c = 0; c < V_PIECES; c++)
#pragma unroll
                for (int i = 0; i < PIECE; i++) {
                    float v_value = key_value(SHARED_KV ? k_words[u][c] : v_words[u][SHARED_KV ? 0 : c], key[u], i);
#pragma unroll
                    for (int h = 0; h < HEAD_TILE; h++) acc[h][c][i] += p[u][h] * v_value;
                }
    }

    // Merge the lane groups: those of a warp by shuffles, the warps through shared memory.
    constexpr int WARPS = THREADS / WARP;
    __shared__ float tops[WARPS][HEAD_TILE], sums[WARPS][HEAD_TILE], accs[WARPS][HEAD_TILE][V_PADDED];
    int warp = threadIdx.x / WARP;
#pragma unroll
    for (int h = 0; h < HEAD_TILE; h++) {
        float warp_top = top[h];
#pragma unroll
        for (int apart = LANES; apart < WARP; apart *= 2)
            warp_top = fmaxf(warp_top, __shfl_xor_sync(ALL_LANES, warp_top, apart));
        float shrink = weight(top[h], warp_top), warp_sum = sum[h] * shrink;
#pragma unroll
        for (int apart = LANES; apart < WARP; apart *= 2) warp_sum += __shfl_xor_sync(ALL_LANES, warp_sum, apart);
        if (threadIdx.x % WARP == 0) tops[warp][h] = warp_top, sums[warp][h] = warp_sum;
#pragma unroll
        for (int c = 0; c < V_PIECES; c++)
#pragma unroll
            for (int i = 0; i < PIECE; i++) {
                float x = acc[h][c][i] * shrink;
#pragma unroll
                for (int apart = LANES; apart < WARP; apart *= 2) x += __shfl_xor_sync(ALL_LANES, x, apart);
                if (threadIdx.x % WARP < LANES) accs[warp][h][(c * LANES + lane) * PIECE + i] = x;
            }
    }
    __syncthreads();
    for (int item = threadIdx.x; item < HEAD_TILE * V_DIM; item += THREADS) {
        int h = item / V_DIM, d = item % V_DIM;
        if (in_group + h >= GROUP) break;
        bool whole = splits == 1;
        float sink = whole && sinks ? sinks[head + h] * LOG2E : NONE, all_top = sink;
        for (int w = 0; w < WARPS; w++) all_top = fmaxf(all_top, tops[w][h]);
        float all_sum = weight(sink, all_top), value = 0.0f;
        for (int w = 0; w < WARPS; w++) {
            float shrink = weight(tops[w][h], all_top);
            all_sum += sums[w][h] * shrink;
            value += accs[w][h][d] * shrink;
        }
        if (all_sum != 0.0f) value /= all_sum;
        if (whole) {
            store_value<Q>(out, token * out_token + (head + h) * out_head + d, value);
        } else {
            i64 at = ((i64)row * heads + head + h) * splits + split;
            partial[at * V_DIM + d] = value;
            if (d == 0) partial_top[at] = all_sum == 0.0f ? NONE : all_top + log2f(all_sum);
        }
    }
}

// Merge a decode row's shares, each known by its result and the log2 of its sum of exponentials; one head per
// block.
extern "C" __global__ void __launch_bounds__(THREADS)
merge_splits(const float *partial, const float *partial_top, int splits, const int *query_start_loc,
             const float *sinks, void *out, i64 out_token, i64 out_head) {
    int row = blockIdx.x, head = blockIdx.y, token = query_start_loc[row];
    if (query_start_loc[row + 1] - token != 1) return;
    i64 at = ((i64)row * gridDim.y + head) * splits;
    float sink = sinks ? sinks[head] * LOG2E : NONE, top = sink;
    for (int s = 0; s < splits; s++) top = fmaxf(top, partial_top[at + s]);
    for (int d = threadIdx.x; d < V_DIM; d += THREADS) {
        float sum = weight(sink, top), value = 0.0f;
        for (int s = 0; s < splits; s++) {
            if (partial_top[at + s] == NONE) continue;
            float w = weight(partial_top[at + s], top);
            sum += w;
            value += w * partial[(at + s) * V_DIM + d];
        }
        store_value<Q>(out, token * out_token + head * out_head + d, sum != 0.0f ? value / sum : 0.0f);
    }
}

// ---- prefill ----
//
// A block has TILE_ROWS rows, each a query token with one of HEAD_TILE heads of a KV head, and goes over the keys
// that any of them sees, TILE_KEYS at a time, through shared memory. Eight neighbouring threads share ROW_TILE
// rows: thread x of them has the keys x, x + 8, ... of the scores, and the columns 4x to 4x + 3, 4x + 32, ... of
// the output.

#define TILE_KEYS 32

constexpr int TILE_ROWS = THREADS / 8 * ROW_TILE;
constexpr int TILE_TOKENS = TILE_ROWS / HEAD_TILE;
constexpr int COLUMNS = K_DIM % 64 == 0 && V_DIM % 64 == 0 ? 64 : 32;  // of K or V in shared memory at a time
constexpr int K_COLUMNS = ceil_div(K_DIM, COLUMNS) * COLUMNS;
constexpr int V_COLUMNS = ceil_div(V_DIM, COLUMNS) * COLUMNS;
constexpr int QUADS = COLUMNS / 32;  // of columns per thread and V tile

// Columns from..from + COLUMNS of the keys of a tile, as floats; zeros where a key is not seen or a row has ended.
template <int DIM>
__device__ inline void load_tile(float (*tile)[COLUMNS + 4], const Rows &rows, const Rows &small, const Rows &scales,
                                 const Rows &small_scales, const int *table, int base, int first, int end,
                                 int kv_head, int from) {
    constexpr int ROW_PIECES = COLUMNS / PIECE;
    for (int item = threadIdx.x; item < TILE_KEYS * ROW_PIECES; item += THREADS) {
        int j = item / ROW_PIECES, p = item % ROW_PIECES, position = base + j;
        Key key = find_key(table, position, position >= first && position < end);
        u32 words[WORDS];
        load_key<DIM>(words, rows, small, key, kv_head, from / PIECE + p);
        float factor = key_scale(scales, small_scales, key, kv_head);
#pragma unroll
        for (int i = 0; i < PIECE; i++) tile[j][p * PIECE + i] = key_value(words, key, i) * factor;
    }
}

// Three blocks per processor is what shared memory allows at its fullest: registers up to that, rather than spills.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
paged_prefill(const void *q, i64 q_token, i64 q_head, KEYS_ARGS(), KEYS_ARGS(small_), const int *block_table,
              i64 table_row,
              const int *seq_lens, const int *query_start_loc, float scale, int window, int chunk, float soft_cap,
              const float *sinks, void *out, i64 out_token, i64 out_head, int rows) {
    // Row i of the batch begins at tile query_start_loc[i] / TILE_TOKENS + i, which leaves it tiles enough.
    int row = 0;
    for (int above = rows; above - row > 1;) {
        int middle = (row + above) / 2;
        if (query_start_loc[middle] / TILE_TOKENS + middle <= (int)blockIdx.x) row = middle;
        else above = middle;
    }
    int row_token = query_start_loc[row], tokens = query_start_loc[row + 1] - row_token;
    int tile_token = ((int)blockIdx.x - row_token / TILE_TOKENS - row) * TILE_TOKENS;
    if (tokens <= 1 || tile_token >= tokens) return;
    int kv_head = blockIdx.y / HEAD_TILES, in_group = blockIdx.y % HEAD_TILES * HEAD_TILE;
    int past = seq_lens[row] - tokens;  // the position of the row's first query
    int last_token = tile_token + TILE_TOKENS < tokens ? tile_token + TILE_TOKENS : tokens;
    int end = past + last_token, first = first_key(past + tile_token, window, chunk);
    const int *table = block_table + row * table_row;
    Keys full = KEYS(), small = KEYS(small_);
    int x = threadIdx.x % 8, y = threadIdx.x / 8;

    __shared__ __align__(16) float queries[TILE_ROWS][K_COLUMNS + 4], tile[TILE_KEYS][COLUMNS + 4];
    __shared__ float weights[TILE_ROWS][TILE_KEYS + 1];
    float factor = query_factor(scale, soft_cap);
    for (int item = threadIdx.x; item < TILE_ROWS * K_COLUMNS; item += THREADS) {
        int r = item / K_COLUMNS, d = item % K_COLUMNS, t = tile_token + r / HEAD_TILE, g = in_group + r % HEAD_TILE;
        bool there = r < TILE_TOKENS * HEAD_TILE && t < tokens && g < GROUP && d < K_DIM;
        i64 at = (row_token + t) * q_token + (kv_head * GROUP + g) * q_head + d;
        queries[r][d] = there ? load_value<Q>(q, at) * factor : 0.0f;
    }

    float top[ROW_TILE], sum[ROW_TILE], acc[ROW_TILE][V_COLUMNS / 32][4];
    int row_first[ROW_TILE], row_end[ROW_TILE];
#pragma unroll
    for (int i = 0; i < ROW_TILE; i++) {
        int r = y + 16 * i, t = tile_token + r / HEAD_TILE;
        bool there = r < TILE_TOKENS * HEAD_TILE && t < tokens;
        row_first[i] = there ? first_key(past + t, window, chunk) : 0;
        row_end[i] = there ? past + t + 1 : 0;
        top[i] = NONE, sum[i] = 0.0f;
#pragma unroll
        for (int c = 0; c < V_COLUMNS / 32; c++) acc[i][c][0] = acc[i][c][1] = acc[i][c][2] = acc[i][c][3] = 0.0f;
    }

    for (int base = first / TILE_KEYS * TILE_KEYS; base < end; base += TILE_KEYS) {
        bool there[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int position = base + x + 8 * j;
            there[j] = find_key(table, position, position >= first && position < end).seen;
        }
        float s[ROW_TILE][4];
#pragma unroll
        for (int i = 0; i < ROW_TILE; i++) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.0f;
        for (int from = 0; from < K_COLUMNS; from += COLUMNS) {
            __syncthreads();
            load_tile<K_DIM>(tile, full.k, small.k, full.k_scale, small.k_scale, table, base, first, end, kv_head, from);
            __syncthreads();
#pragma unroll 4
            for (int d = 0; d < COLUMNS; d += 4)
#pragma unroll
                for (int i = 0; i < ROW_TILE; i++) {
                    const float *a = &queries[y + 16 * i][from + d];
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const float *b = &tile[x + 8 * j][d];
                        s[i][j] += a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3];
                    }
                }
        }
#pragma unroll
        for (int i = 0; i < ROW_TILE; i++) {
            float new_top = top[i], added = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int position = base + x + 8 * j;
                bool seen = there[j] && position >= row_first[i] && position < row_end[i];
                s[i][j] = seen ? score(s[i][j], soft_cap) : NONE;
                new_top = fmaxf(new_top, s[i][j]);
            }
            new_top = max_over_lanes<8>(new_top);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float w = weight(s[i][j], new_top);
                added += w;
                weights[y + 16 * i][x + 8 * j] = w;
            }
            float shrink = weight(top[i], new_top);
            sum[i] = sum[i] * shrink + sum_over_lanes<8>(added);
            top[i] = new_top;
#pragma unroll
            for (int c = 0; c < V_COLUMNS / 32; c++)
#pragma unroll
                for (int e = 0; e < 4; e++) acc[i][c][e] *= shrink;
        }
#pragma unroll
        for (int part = 0; part < V_COLUMNS / COLUMNS; part++) {
            __syncthreads();
            if constexpr (SHARED_KV)
                load_tile<V_DIM>(tile, full.k, small.k, full.k_scale, small.k_scale, table, base, first, end, kv_head,
                                 part * COLUMNS);
            else
                load_tile<V_DIM>(tile, full.v, small.v, full.v_scale, small.v_scale, table, base, first, end, kv_head,
                                 part * COLUMNS);
            __syncthreads();
#pragma unroll 4
            for (int j = 0; j < TILE_KEYS; j++)
#pragma unroll
                for (int i = 0; i < ROW_TILE; i++) {
                    float w = weights[y + 16 * i][j];
#pragma unroll
                    for (int c = 0; c < QUADS; c++)
#pragma unroll
                        for (int e = 0; e < 4; e++) acc[i][part * QUADS + c][e] += w * tile[j][4 * x + 32 * c + e];
                }
        }
    }

#pragma unroll
    for (int i = 0; i < ROW_TILE; i++) {
        int r = y + 16 * i, t = tile_token + r / HEAD_TILE, g = in_group + r % HEAD_TILE;
        if (r >= TILE_TOKENS * HEAD_TILE || t >= tokens || g >= GROUP) continue;
        float sink = sinks ? sinks[kv_head * GROUP + g] * LOG2E : NONE, all_top = fmaxf(top[i], sink);
        float shrink = weight(top[i], all_top), all_sum = sum[i] * shrink + weight(sink, all_top);
        float inverse = all_sum != 0.0f ? shrink / all_sum : 0.0f;
        i64 at = (row_token + t) * out_token + (kv_head * GROUP + g) * out_head;
#pragma unroll
        for (int c = 0; c < V_COLUMNS / 32; c++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int d = 32 * c + 4 * x + e;
                if (d < V_DIM) store_value<Q>(out, at + d, acc[i][c][e] * inverse);
            }
    }
}
