// Threads that work together: shared memory, barriers, shuffles, votes, atomics; compiled by nvcc.
#include <cstdint>

// Tree reduction in static shared memory, one barrier per level. 256 threads.
extern "C" __global__ void block_sum(const float* x, float* out, int n) {
    __shared__ float tile[256];
    int t = threadIdx.x, i = blockIdx.x * 256 + t;
    tile[t] = i < n ? x[i] : 0.0f;
    __syncthreads();
    for (int half = 128; half > 0; half >>= 1) {
        if (t < half) tile[t] += tile[t + half];
        __syncthreads();
    }
    if (t == 0) out[blockIdx.x] = tile[0];
}

// Padded 32 x 32 transpose in dynamic shared memory, 32 x 8 threads.
extern "C" __global__ void transpose(const float* x, float* out, int rows, int columns) {
    extern __shared__ float tile[];
    int c = blockIdx.x * 32 + threadIdx.x;
    for (int y = threadIdx.y; y < 32; y += 8) {
        int r = blockIdx.y * 32 + y;
        if (r < rows && c < columns) tile[y * 33 + threadIdx.x] = x[r * columns + c];
    }
    __syncthreads();
    int r = blockIdx.y * 32 + threadIdx.x;
    for (int y = threadIdx.y; y < 32; y += 8) {
        int column = blockIdx.x * 32 + y;
        if (r < rows && column < columns) out[column * rows + r] = tile[threadIdx.x * 33 + y];
    }
}

// Static and dynamic shared memory in one kernel: an inclusive scan with double buffering.
extern "C" __global__ void block_scan(const int* x, int* out) {
    extern __shared__ int buffers[];
    __shared__ int total;
    int t = threadIdx.x, n = blockDim.x, from = 0;
    buffers[t] = x[blockIdx.x * n + t];
    __syncthreads();
    for (int step = 1; step < n; step <<= 1) {
        int to = from ^ 1;
        int v = buffers[from * n + t];
        if (t >= step) v += buffers[from * n + t - step];
        buffers[to * n + t] = v;
        from = to;
        __syncthreads();
    }
    if (t == n - 1) total = buffers[from * n + t];
    __syncthreads();
    out[blockIdx.x * n + t] = buffers[from * n + t] * 1000 + total % 1000;
}

// All four shuffles, also within 8-lane segments, and one from a lane chosen by data.
extern "C" __global__ void shuffles(const int* x, int* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int v = x[i];
    int* row = out + 6 * i;
    row[0] = __shfl_up_sync(0xffffffffu, v, 3);
    row[1] = __shfl_down_sync(0xffffffffu, v, 5);
    row[2] = __shfl_xor_sync(0xffffffffu, v, 9);
    row[3] = __shfl_sync(0xffffffffu, v, v & 31);
    row[4] = __shfl_down_sync(0xffffffffu, v, 2, 8);
    int sum = v;
    for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    row[5] = sum;
}

// Votes, and a branch whose lanes ballot among themselves.
extern "C" __global__ void votes(const int* x, uint32_t* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int v = x[i];
    uint32_t* row = out + 5 * i;
    uint32_t odd = __ballot_sync(0xffffffffu, v & 1);
    row[0] = odd;
    row[1] = __any_sync(0xffffffffu, v > 95);
    row[2] = __all_sync(0xffffffffu, v < 99);
    row[3] = __popc(odd & ((1u << (threadIdx.x & 31)) - 1u));
    if (v & 1) {
        row[4] = __ballot_sync(odd, v > 50) | (__activemask() & ~odd);  // no even lane can be active here
    } else {
        row[4] = __reduce_add_sync(~odd, (unsigned)v) + __match_any_sync(~odd, v & 6);
    }
}

// Histogram: shared-memory atomics, then one global atomic per bin. 64 bins.
extern "C" __global__ void histogram(const uint8_t* x, int* bins, int n) {
    __shared__ int local[64];
    if (threadIdx.x < 64) local[threadIdx.x] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        atomicAdd(&local[x[i] >> 2], 1);
    }
    __syncthreads();
    if (threadIdx.x < 64) atomicAdd(&bins[threadIdx.x], local[threadIdx.x]);
}

// Global atomics with and without a use for the old value.
extern "C" __global__ void atomics(const int* x, int* counters, float* sum, unsigned long long* wide, uint32_t* order) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int v = x[i];
    atomicAdd(&counters[0], v);
    atomicMax(&counters[1], v);
    atomicMin(&counters[2], v);
    atomicOr(&counters[3], 1 << (v & 31));
    atomicXor(&counters[4], v);
    atomicAnd(&counters[5], ~(1 << (i & 7)));
    atomicSub(&counters[6], 1);
    atomicInc((unsigned*)&counters[7], 9u);
    atomicAdd(sum, 0.25f * (float)(v & 15));
    atomicAdd(wide, (unsigned long long)v << 32);
    order[atomicAdd(&counters[8], 1)] = i;
    atomicExch(&counters[9], 5);
}

// Compare-and-swap loops: a product modulo 65521, and a maximum of floats.
extern "C" __global__ void cas_loops(const int* x, const float* y, unsigned* product, float* largest) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned old = *(volatile unsigned*)product, seen;
    do {
        seen = old;
        old = atomicCAS(product, seen, (unsigned)(((unsigned long long)seen * (unsigned)x[i]) % 65521u));
    } while (old != seen);
    int* bits = (int*)largest;
    int current = *(volatile int*)bits;
    while (__int_as_float(current) < y[i]) {
        int before = atomicCAS(bits, current, __float_as_int(y[i]));
        if (before == current) break;
        current = before;
    }
}

// The last block to finish sums the blocks' results (threadFenceReduction of the CUDA samples, in small).
__device__ unsigned finished = 0;
extern "C" __global__ void last_block_sum(const int* x, int* partial, int* out) {
    __shared__ bool last;
    int sum = x[blockIdx.x * blockDim.x + threadIdx.x];
    for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_down_sync(0xffffffffu, sum, offset);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = sum;
        __threadfence();
        last = atomicAdd(&finished, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        __threadfence();
        int total = 0;
        for (int b = 0; b < gridDim.x; ++b) total += *(volatile int*)&partial[b];
        *out = total;
    }
}
