// Control flow and integer arithmetic, compiled by nvcc: what a thread does depends on its own data.
#include <cstdint>

// Steps until the Collatz sequence of `start[i]` reaches 1: every thread leaves the loop on its own.
extern "C" __global__ void collatz(const uint32_t* start, uint32_t* steps, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    uint32_t x = start[i];
    uint32_t count = 0;
    while (x != 1u) {
        x = (x & 1u) ? 3u * x + 1u : x >> 1;
        ++count;
    }
    steps[i] = count;
}

// Four kinds of rows: two return early at different depths, two go on to a loop of their own length.
extern "C" __global__ void nested_divergence(const int* x, int* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int v = x[i];
    if (v < 0) {
        if (v < -100) {
            out[i] = -1;
            return;
        }
        v = -v;
    } else if (v % 3 == 0) {
        out[i] = v / 3;
        return;
    }
    int sum = 0;
    for (int j = 0; j < v; ++j) {
        if (j % 5 == 4) continue;
        if (sum > 1000) break;
        sum += j ^ v;
    }
    out[i] = sum;
}

// Sixteen dense cases compile to a jump table (brx.idx); the work differs per case, three cases loop.
extern "C" __global__ void switch_table(const int* op, const int* a, const int* b, int* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int x = a[i], y = b[i], r = 0;
    switch (op[i]) {
        case 0: r = x + y; break;
        case 1: r = x - y * 3; break;
        case 2: for (int j = 0; j < (y & 7); ++j) r += x ^ j; break;
        case 3: r = __popc(x) + __clz(y | 1); break;
        case 4: r = out[i] * 2 + x; break;
        case 5: r = (int)(__brev((unsigned)x) >> (y & 15)); break;
        case 6: r = x; while (r > y && r > 0) r -= (y & 255) + 1; break;
        case 7: r = min(x, y) * max(x & 15, 2); break;
        case 8: r = x & ~y; break;
        case 9: r = __ffs(x); break;
        case 10: r = abs(y - x); break;
        case 11: r = __mulhi(x, y); break;
        case 12: for (r = 1; r < (x & 1023); r <<= 1) {} break;
        case 13: r = (int)__funnelshift_l((unsigned)x, (unsigned)y, 7); break;
        case 14: r = x < y ? x : 2 * y; break;
        case 15: r = (x >> 4) | (y << 28); break;
        default: r = -7;
    }
    out[i] = r;
}

// Division and remainder, signed and unsigned, 32 and 64 bits, by variables and by constants.
extern "C" __global__ void divisions(const int* a, const int* b, const int64_t* c, const int64_t* d, int64_t* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int64_t* row = out + 8 * i;
    row[0] = a[i] / b[i];
    row[1] = a[i] % b[i];
    row[2] = (uint32_t)a[i] / (uint32_t)b[i];
    row[3] = (uint32_t)a[i] % (uint32_t)b[i];
    row[4] = c[i] / d[i];
    row[5] = c[i] % d[i];
    row[6] = a[i] / 7;
    row[7] = (int64_t)((uint64_t)c[i] % 1000003ull);
}

// 64-bit words: xorshift, high halves of products, variable shifts, comparisons, carries.
extern "C" __global__ void wide_integers(const uint64_t* seed, uint64_t* out, int rounds) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    uint64_t x = seed[i], low = 0, high = 0;
    for (int r = 0; r < rounds; ++r) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        uint64_t p = x * 0x9E3779B97F4A7C15ull;
        high += __umul64hi(x, p);
        uint64_t before = low;
        low += p >> (x & 63);
        high += low < before;
    }
    out[4 * i] = x;
    out[4 * i + 1] = low;
    out[4 * i + 2] = high;
    out[4 * i + 3] = (uint64_t)((int64_t)x >> 5) ^ (uint64_t)__popcll(x) ^ ((uint64_t)__clzll(low | 1) << 8);
}

// An array indexed by data lives in local memory: insertion sort of 12 values per thread.
extern "C" __global__ void local_sort(const int* x, int* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int key[12];
    for (int j = 0; j < 12; ++j) key[j] = x[12 * i + j];
    for (int j = 1; j < 12; ++j) {
        int v = key[j], h = j;
        while (h > 0 && key[h - 1] > v) {
            key[h] = key[h - 1];
            --h;
        }
        key[h] = v;
    }
    for (int j = 0; j < 12; ++j) out[12 * i + j] = key[j];
}
