// Floating point, small types, parameter structs, constant and global variables; compiled by nvcc.
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// One column per function; out is [n, 12].
extern "C" __global__ void float_math(const float* x, const float* y, float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float a = x[i], b = y[i];
    float* row = out + 12 * i;
    row[0] = sqrtf(a);
    row[1] = a / b;
    row[2] = fmaf(a, b, -1.0f);
    row[3] = expf(b);
    row[4] = __expf(b);
    row[5] = logf(a);
    row[6] = rsqrtf(a);
    row[7] = fminf(fabsf(b), floorf(a));
    row[8] = sinf(b);
    row[9] = tanhf(b);
    row[10] = (float)(int)rintf(b * 10.0f) + (float)(unsigned)a;
    row[11] = copysignf(truncf(a), b) + __fdividef(a, b + 3.0f);
}

// Double precision; out is [n, 4].
extern "C" __global__ void double_math(const double* x, double* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    double a = x[i];
    out[4 * i] = sqrt(a) + 1.0 / a;
    out[4 * i + 1] = fma(a, a, -a);
    out[4 * i + 2] = (double)(long long)(a * 1e6) + (double)(float)a;
    out[4 * i + 3] = a > 1.5 ? floor(a) : ceil(-a);
}

// FP16 and BF16 scalars and pairs; out_half is [n, 4], out_bf16 [n, 3].
extern "C" __global__ void half_math(const __half* h, const __nv_bfloat16* b, __half* out_half, __nv_bfloat16* out_bf16) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    __half x = h[2 * i], y = h[2 * i + 1];
    __half2 pair = __hfma2(__halves2half2(x, y), __halves2half2(y, x), __float2half2_rn(0.5f));
    out_half[4 * i] = __hadd(x, y);
    out_half[4 * i + 1] = __float2half(__half2float(x) * 3.0f);
    out_half[4 * i + 2] = __low2half(pair);
    out_half[4 * i + 3] = __hgt(x, y) ? x : __hneg(y);
    __nv_bfloat16 u = b[2 * i], v = b[2 * i + 1];
    __nv_bfloat162 packed = __floats2bfloat162_rn(__bfloat162float(u) + 1.0f, __bfloat162float(v) * 1.25f);
    out_bf16[3 * i] = packed.x;
    out_bf16[3 * i + 1] = packed.y;
    out_bf16[3 * i + 2] = __hmul(u, v);
}

// Bytes and 16-bit words: sign extension, packing, byte permutation.
extern "C" __global__ void bytes(const int8_t* s, const uint8_t* u, const int16_t* h, uint32_t* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    char4 v = ((const char4*)s)[i];
    int dot = v.x * u[4 * i] + v.y * u[4 * i + 1] + v.z * u[4 * i + 2] + v.w * u[4 * i + 3];
    uint32_t word = ((const uint32_t*)u)[i];
    out[4 * i] = (uint32_t)dot;
    out[4 * i + 1] = __byte_perm(word, (uint32_t)dot, 0x3715);
    out[4 * i + 2] = (uint32_t)(h[i] * 3) + (uint16_t)(h[i] >> 2);
    ((uint8_t*)out)[16 * i + 12] = (uint8_t)(dot >> 3);
    ((int8_t*)out)[16 * i + 13] = (int8_t)(v.x + v.y);
    ((uint16_t*)out)[8 * i + 7] = (uint16_t)(word >> 9);
}

struct Affine {
    float scale;
    float shift;
    int stride;
    short skip[3];
    double* sum;
};

// A struct by value: 32 bytes of parameter space, read at offsets.
extern "C" __global__ void struct_param(const float* x, Affine f, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    bool skipped = i == f.skip[0] || i == f.skip[1] || i == f.skip[2];
    out[i * f.stride] = skipped ? -1.0f : x[i] * f.scale + f.shift;
    if (i == 0) *f.sum = (double)f.scale + f.shift;
}

__constant__ float weights[5] = {0.0625f, 0.25f, 0.375f, 0.25f, 0.0625f};
__device__ int permutation[8] = {3, 1, 4, 0, 5, 2, 7, 6};
__device__ float scratch[256];

// A five-point filter with constant weights; results pass through a global array in another order.
extern "C" __global__ void filter(const float* x, float* out, int n) {
    int i = threadIdx.x;
    float sum = 0.0f;
    for (int j = 0; j < 5; ++j) {
        int k = min(max(i + j - 2, 0), n - 1);
        sum += weights[j] * x[k];
    }
    scratch[(i & ~7) | permutation[i & 7]] = sum;
    __syncthreads();
    out[i] = scratch[i];
}

// Vector loads and stores, and a grid-stride loop.
extern "C" __global__ void axpy4(const float4* x, const float4* y, float4* out, float a, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        float4 u = x[i], v = __ldg(&y[i]);
        out[i] = make_float4(a * u.x + v.x, a * u.y + v.y, a * u.z + v.z, a * u.w + v.w);
    }
}
