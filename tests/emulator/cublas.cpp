/* cublas.cpp - matrix products by three loops, with float sums. */
#include "cublas_v2.h"
#include "emulator.h"

using namespace emulator;

struct emulator_cublas { cudaStream_t stream; };

static size_t bytes_of(cudaDataType t) { return t == CUDA_R_32F || t == CUDA_R_32I ? 4 : t == CUDA_R_8I ? 1 : 2; }

static float get(const void *p, size_t i, cudaDataType t)
{
    switch (t) {
    case CUDA_R_32F: return ((const float *)p)[i];
    case CUDA_R_32I: return (float)((const int32_t *)p)[i];
    case CUDA_R_16F: return half_to_float(((const uint16_t *)p)[i]);
    case CUDA_R_16BF: return bf16_to_float(((const uint16_t *)p)[i]);
    case CUDA_R_8I: return ((const int8_t *)p)[i];
    }
    die("cuBLAS: an element type the emulator does not know");
}
static void put(void *p, size_t i, cudaDataType t, float v)
{
    switch (t) {
    case CUDA_R_32F: ((float *)p)[i] = v; return;
    case CUDA_R_16F: ((uint16_t *)p)[i] = float_to_half(v); return;
    case CUDA_R_16BF: ((uint16_t *)p)[i] = float_to_bf16(v); return;
    default: die("cuBLAS: a result type the emulator does not know");
    }
}

struct matrix { const void *p; cudaDataType type; size_t ld; bool trans; };
/* op(x) with `rows` rows and `columns` columns as an array of its own, row after row. */
static std::vector<float> opened(const matrix &x, size_t rows, size_t columns)
{
    std::vector<float> r(rows * columns);
    size_t across = x.trans ? rows : columns, down = x.trans ? columns : rows;
    if (x.ld < down) die("cuBLAS: a leading dimension of %zu for %zu rows", x.ld, down);
    check_device(x.p, (x.ld * (across - 1) + down) * bytes_of(x.type), "a matrix of cuBLAS");
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < columns; j++)
            r[i * columns + j] = get(x.p, x.trans ? i * x.ld + j : j * x.ld + i, x.type);
    return r;
}

static void multiply(matrix a, matrix b, size_t m, size_t n, size_t k, float alpha, float beta, void *c, cudaDataType t,
                     size_t ldc)
{
    if (!m || !n) return;
    std::vector<float> x = opened(a, m, k), y = opened({ b.p, b.type, b.ld, !b.trans }, n, k);
    if (ldc < m) die("cuBLAS: a leading dimension of %zu for %zu rows", ldc, m);
    check_device(c, (ldc * (n - 1) + m) * bytes_of(t), "a result of cuBLAS");
    for (size_t j = 0; j < n; j++)
        for (size_t i = 0; i < m; i++) {
            float sum = 0;
            for (size_t l = 0; l < k; l++) sum += x[i * k + l] * y[j * k + l];
            put(c, j * ldc + i, t, alpha * sum + (beta != 0 ? beta * get(c, j * ldc + i, t) : 0));
        }
    first_in_flight = launch_number + 1;
    records["cuBLAS"].launches++;
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n,
                                          int k, const void *alpha, const void *a, cudaDataType type_a, int lda,
                                          long long stride_a, const void *b, cudaDataType type_b, int ldb,
                                          long long stride_b, const void *beta, void *c, cudaDataType type_c, int ldc,
                                          long long stride_c, int count, cublasComputeType_t compute, cublasGemmAlgo_t)
{
    if (fails()) return CUBLAS_STATUS_EXECUTION_FAILED;
    if (m < 0 || n < 0 || k < 0 || count < 0) return CUBLAS_STATUS_INVALID_VALUE;
    if (compute == CUBLAS_COMPUTE_16F || compute == CUBLAS_COMPUTE_32I) die("cuBLAS: only sums in float are emulated");
    float x = *(const float *)alpha, y = *(const float *)beta;
    enqueue(h->stream, [=] {
        for (int i = 0; i < count; i++) {
            const char *pa = (const char *)a + i * stride_a * (long long)bytes_of(type_a);
            const char *pb = (const char *)b + i * stride_b * (long long)bytes_of(type_b);
            char *pc = (char *)c + i * stride_c * (long long)bytes_of(type_c);
            multiply({ pa, type_a, (size_t)lda, ta != CUBLAS_OP_N }, { pb, type_b, (size_t)ldb, tb != CUBLAS_OP_N },
                     (size_t)m, (size_t)n, (size_t)k, x, y, pc, type_c, (size_t)ldc);
        }
    });
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                            const void *alpha, const void *a, cudaDataType type_a, int lda, const void *b,
                            cudaDataType type_b, int ldb, const void *beta, void *c, cudaDataType type_c, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t algo)
{
    return cublasGemmStridedBatchedEx(h, ta, tb, m, n, k, alpha, a, type_a, lda, 0, b, type_b, ldb, 0, beta, c, type_c,
                                      ldc, 0, 1, compute, algo);
}

cublasStatus_t cublasCreate(cublasHandle_t *h)
{
    if (fails()) return CUBLAS_STATUS_NOT_INITIALIZED;
    *h = new emulator_cublas{ nullptr };
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy(cublasHandle_t h)
{
    delete h;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream(cublasHandle_t h, cudaStream_t s)
{
    h->stream = s;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetWorkspace(cublasHandle_t, void *p, size_t bytes)
{
    if (bytes) check_device(p, bytes, "cuBLAS's workspace");
    return CUBLAS_STATUS_SUCCESS;
}
const char *cublasGetStatusString(cublasStatus_t s)
{
    switch (s) {
    case CUBLAS_STATUS_SUCCESS: return "success";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "the library was not initialized";
    case CUBLAS_STATUS_ALLOC_FAILED: return "the resource allocation failed";
    case CUBLAS_STATUS_INVALID_VALUE: return "an invalid value was passed";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "the program failed to execute";
    case CUBLAS_STATUS_INTERNAL_ERROR: return "an internal operation failed";
    }
    return "unknown";
}
const char *cublasGetStatusName(cublasStatus_t s) { return cublasGetStatusString(s); }
