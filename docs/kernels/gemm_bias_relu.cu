// GEMM + bias + ReLU with WMMA: how tensor cores are fed by hand. See docs/kernels.md.
//
//   C (M x N, fp32) = relu(A (M x K, fp16, row by row) @ B (K x N, fp16, row by row) + bias (N))
//
// A block of 8 warps makes a tile of 128 x 128 of C; a warp makes 64 x 32 of it as 4 x 2 fragments of
// 16 x 16. Steps of 32 along K are brought to shared memory first: each value of A is then used by 4
// warps and each of B by 2, without going to the L2 cache again.
//
// M, N and K may be any positive numbers: what lies outside is read as zero and not written. K and N
// must be multiples of 8, for rows of A and B are read 16 bytes at a time.

#include <cuda_fp16.h>
#include <mma.h>

using namespace nvcuda;

constexpr int TILE_M = 128, TILE_N = 128, TILE_K = 32;
constexpr int FRAGMENT = 16;
constexpr int WARPS_M = 2, WARPS_N = 4, THREADS = 32 * WARPS_M * WARPS_N;
constexpr int ROWS = TILE_M / WARPS_M / FRAGMENT;     // 4 fragments of a warp, one below the other
constexpr int COLUMNS = TILE_N / WARPS_N / FRAGMENT;  // 2 beside one another
constexpr int VECTOR = 8;                             // halves in 16 bytes
// Rows in shared memory are 16 bytes longer than needed: neighbours start in other banks.
constexpr int STRIDE_A = TILE_K + VECTOR, STRIDE_B = TILE_N + VECTOR;

__device__ int4 eight(const half* matrix, int row, int column, int rows, int columns) {
    if (row >= rows || column >= columns) return make_int4(0, 0, 0, 0);
    return *reinterpret_cast<const int4*>(matrix + (long long)row * columns + column);
}

extern "C" __global__ void __launch_bounds__(THREADS) gemm_bias_relu(
    const half* a, const half* b, const float* bias, float* c, int m, int n, int k) {
    __shared__ __align__(128) half tile_a[TILE_M * STRIDE_A];
    __shared__ __align__(128) half tile_b[TILE_K * STRIDE_B];
    __shared__ __align__(128) float out[WARPS_M * WARPS_N][FRAGMENT * FRAGMENT];

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_row = blockIdx.y * TILE_M, first_column = blockIdx.x * TILE_N;
    const int warp_row = warp / WARPS_N * ROWS * FRAGMENT;
    const int warp_column = warp % WARPS_N * COLUMNS * FRAGMENT;

    // One accumulator for each 16 x 16 of the warp's 64 x 32. With a single fragment for a tile of
    // 128 x 128, as many short examples have it, one 64th of the tile would be computed.
    wmma::fragment<wmma::accumulator, FRAGMENT, FRAGMENT, FRAGMENT, float> sums[ROWS][COLUMNS];
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < COLUMNS; ++j) wmma::fill_fragment(sums[i][j], 0.0f);

    for (int step = 0; step < k; step += TILE_K) {
        for (int at = threadIdx.x * VECTOR; at < TILE_M * TILE_K; at += THREADS * VECTOR) {
            const int row = at / TILE_K, column = at % TILE_K;
            *reinterpret_cast<int4*>(tile_a + row * STRIDE_A + column) =
                eight(a, first_row + row, step + column, m, k);
        }
        for (int at = threadIdx.x * VECTOR; at < TILE_K * TILE_N; at += THREADS * VECTOR) {
            const int row = at / TILE_N, column = at % TILE_N;
            *reinterpret_cast<int4*>(tile_b + row * STRIDE_B + column) =
                eight(b, step + row, first_column + column, k, n);
        }
        __syncthreads();
        for (int inner = 0; inner < TILE_K; inner += FRAGMENT) {
            wmma::fragment<wmma::matrix_a, FRAGMENT, FRAGMENT, FRAGMENT, half, wmma::row_major>
                left[ROWS];
            wmma::fragment<wmma::matrix_b, FRAGMENT, FRAGMENT, FRAGMENT, half, wmma::row_major>
                right[COLUMNS];
            for (int i = 0; i < ROWS; ++i)
                wmma::load_matrix_sync(
                    left[i], tile_a + (warp_row + i * FRAGMENT) * STRIDE_A + inner, STRIDE_A);
            for (int j = 0; j < COLUMNS; ++j)
                wmma::load_matrix_sync(
                    right[j], tile_b + inner * STRIDE_B + warp_column + j * FRAGMENT, STRIDE_B);
            for (int i = 0; i < ROWS; ++i)
                for (int j = 0; j < COLUMNS; ++j)
                    wmma::mma_sync(sums[i][j], left[i], right[j], sums[i][j]);
        }
        __syncthreads();
    }

    // Which element of a fragment a thread holds is not specified, so bias needs a detour: each warp
    // puts a fragment into shared memory, where rows and columns are known again.
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < COLUMNS; ++j) {
            wmma::store_matrix_sync(out[warp], sums[i][j], FRAGMENT, wmma::mem_row_major);
            __syncwarp();
            for (int at = lane; at < FRAGMENT * FRAGMENT; at += 32) {
                const int row = first_row + warp_row + i * FRAGMENT + at / FRAGMENT;
                const int column = first_column + warp_column + j * FRAGMENT + at % FRAGMENT;
                if (row < m && column < n)
                    c[(long long)row * n + column] = fmaxf(out[warp][at] + bias[column], 0.0f);
            }
            __syncwarp();
        }
}
