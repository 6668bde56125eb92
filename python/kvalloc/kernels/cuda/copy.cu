// Whole pages, byte for byte: copies within a tier, gathering into a staging buffer, scattering from one.
//
// Options: INDEX (int or long long, the type of the lists), UNIT (uint4 where addresses and sizes are multiples of
// 16 bytes, else u8).

#define COPY_THREADS 256
#define COPY_UNITS 4  // in flight per thread

// The frame that entry i of a list names; a list that is not there names 0, 1, 2, ...
__device__ inline i64 listed(const INDEX *list, i64 step, i64 i) { return list ? (i64)list[i * step] : i; }

// Page i of the list: `page_bytes` from frame from[i] of `source` to frame to[i] of `target`; a negative entry
// skips the page. Block b copies the slice b % slices of page b / slices.
extern "C" __global__ void __launch_bounds__(COPY_THREADS)
move_pages(const u8 *source, i64 source_frame, const INDEX *from, i64 from_step, u8 *target, i64 target_frame,
           const INDEX *to, i64 to_step, i64 page_bytes, int slices) {
    i64 page = blockIdx.x / slices, slice = blockIdx.x % slices;
    i64 f = listed(from, from_step, page), t = listed(to, to_step, page);
    if (f < 0 || t < 0) return;
    const UNIT *in = (const UNIT *)(source + f * source_frame);
    UNIT *out = (UNIT *)(target + t * target_frame);
    i64 end = page_bytes / (i64)sizeof(UNIT), first = slice * (COPY_THREADS * COPY_UNITS) + threadIdx.x;
    UNIT held[COPY_UNITS];
#pragma unroll
    for (int i = 0; i < COPY_UNITS; i++)
        if (first + i * COPY_THREADS < end) held[i] = in[first + i * COPY_THREADS];
#pragma unroll
    for (int i = 0; i < COPY_UNITS; i++)
        if (first + i * COPY_THREADS < end) out[first + i * COPY_THREADS] = held[i];
}
