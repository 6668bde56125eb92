// What CUDA C needs to be C++: threads of a block are fibres, switched at barriers and shuffles, one block after the other.
//
// A fibre runs until it waits; the scheduler goes round the block's fibres in one order or the other (`backwards`), so a
// kernel that relies on an order, for want of a barrier, gives different results. Shared memory is a static variable: it holds
// the last block's values until it is written. A barrier that some threads never reach ends the process with a message.
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Index { unsigned x, y, z; };

static Index threadIdx, blockIdx, blockDim, gridDim;

inline float __uint_as_float(unsigned u) { float f; std::memcpy(&f, &u, 4); return f; }
inline unsigned __float_as_uint(float f) { unsigned u; std::memcpy(&u, &f, 4); return u; }

namespace fibres {

struct Fibre {
    jmp_buf place;
    ucontext_t context;
    bool started, done;
    unsigned block_waits, warp_waits;  // barriers this fibre has arrived at
    float slot[2];                     // what it hands to others in a shuffle, by parity of the shuffle
    std::vector<char> stack;
};

static std::vector<Fibre> all;
static unsigned current, count;
static jmp_buf scheduler;
static ucontext_t scheduler_context;
static void (*body)(void *);
static void *body_arg;
static bool backwards;

static void entry() {
    body(body_arg);
    all[current].done = true;
    _longjmp(scheduler, 1);
}

static void yield() {
    if (_setjmp(all[current].place) == 0) _longjmp(scheduler, 1);
}

static void resume(unsigned i) {
    Fibre &f = all[i];
    current = i;
    threadIdx = Index{i, 0, 0};
    if (_setjmp(scheduler) != 0) return;
    if (f.started) _longjmp(f.place, 1);
    f.started = true;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    f.context.uc_link = nullptr;
    makecontext(&f.context, entry, 0);
    swapcontext(&scheduler_context, &f.context);
}

static void run_block(unsigned threads, void (*what)(void *), void *arg) {
    count = threads;
    if (all.size() < threads) all.resize(threads);
    body = what, body_arg = arg;
    for (unsigned i = 0; i < threads; i++) {
        Fibre &f = all[i];
        f.started = f.done = false;
        f.block_waits = f.warp_waits = 0;
        if (f.stack.empty()) f.stack.resize(256 * 1024);
    }
    for (unsigned left = threads, idle = 0; left > 0;) {
        unsigned before = left;
        unsigned long long waits = 0, after = 0;
        for (unsigned i = 0; i < threads; i++) waits += all[i].block_waits + all[i].warp_waits;
        for (unsigned n = 0; n < threads; n++) {
            unsigned i = backwards ? threads - 1 - n : n;
            if (all[i].done) continue;
            resume(i);
            left -= all[i].done;
        }
        for (unsigned i = 0; i < threads; i++) after += all[i].block_waits + all[i].warp_waits;
        idle = left == before && after == waits ? idle + 1 : 0;
        if (idle > 2) {
            std::fprintf(stderr, "deadlock: %u threads wait at a barrier that the others don't reach\n", left);
            std::abort();
        }
    }
}

// Wait until threads first..last have all arrived at as many barriers as this one.
static void wait(unsigned Fibre::*waits, unsigned first, unsigned last) {
    unsigned mine = ++(all[current].*waits), self = current;
    for (;;) {
        bool arrived = true;
        for (unsigned i = first; i < last && arrived; i++) arrived = all[i].*waits >= mine;
        if (arrived) return;
        yield();
        current = self;
    }
}

}  // namespace fibres

inline void __syncthreads() { fibres::wait(&fibres::Fibre::block_waits, 0, fibres::count); }

// One barrier is enough: a slot is written again two shuffles on, and by then everybody has read it.
inline float __shfl_xor_sync(unsigned, float value, int apart) {
    fibres::Fibre &me = fibres::all[fibres::current];
    unsigned parity = me.warp_waits % 2, lane = fibres::current % 32, first = fibres::current - lane;
    unsigned last = first + 32 < fibres::count ? first + 32 : fibres::count;
    me.slot[parity] = value;
    unsigned other = first + (lane ^ (unsigned)apart);
    fibres::wait(&fibres::Fibre::warp_waits, first, last);
    return fibres::all[other].slot[parity];
}

template <class... A, std::size_t... I>
void launch(void (*kernel)(A...), const unsigned *grid, unsigned threads, void **args, std::index_sequence<I...>) {
    auto call = [&] { kernel(*(A *)args[I]...); };
    gridDim = Index{grid[0], grid[1], grid[2]}, blockDim = Index{threads, 1, 1};
    for (unsigned z = 0; z < grid[2]; z++)
        for (unsigned y = 0; y < grid[1]; y++)
            for (unsigned x = 0; x < grid[0]; x++) {
                blockIdx = Index{x, y, z};
                fibres::run_block(threads, [](void *f) { (*(decltype(call) *)f)(); }, &call);
            }
}

template <class... A>
void launch(void (*kernel)(A...), const unsigned *grid, unsigned threads, void **args) {
    launch(kernel, grid, threads, args, std::index_sequence_for<A...>());
}

#define LAUNCHER(kernel)                                                                                              \
    extern "C" void launch_##kernel(const unsigned *grid, unsigned threads, void **args, int backwards) {             \
        fibres::backwards = backwards;                                                                                \
        launch(kernel, grid, threads, args);                                                                          \
    }
