/* gpu_time - what the CUDA backend takes on this machine; each call prints one JSON object. For tests/gpu.sh.
 *
 *   gpu_time copy MIB                                          a copy within the device: GB/s, read and written
 *   gpu_time attention TYPE_K TYPE_V DEPTH HEADS KV_HEADS SIZE RUNS    decode attention of one row, caches cold
 *   gpu_time select N K ROWS RUNS      the K largest of each row of N logits; beside it, a row's copy to the host
 *   gpu_time model FILE TYPE PROMPT TOKENS CTX                 prefill and decode of a model, cache of that type */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../attention.h"
#include "../select.h"
extern "C" {
#include "../engine.h"
}

static void must(cudaError_t r, const char *what)
{
    if (r == cudaSuccess) return;
    fprintf(stderr, "gpu_time: %s: %s\n", what, cudaGetErrorString(r));
    exit(1);
}
static void must(bool ok, const struct error *e)
{
    if (ok) return;
    fprintf(stderr, "gpu_time: %s\n", e->text);
    exit(1);
}

static kv_type type_of(const char *name)
{
    const char *names[] = { "f32", "f16", "bf16", "fp8", "int8", "int4" };
    for (int i = 0; i < KV_TYPES; i++)
        if (!strcmp(name, names[i])) return (kv_type)i;
    fprintf(stderr, "gpu_time: unknown type %s\n", name);
    exit(2);
}

template <class T> static T *device(size_t n, int fill)
{
    T *p = NULL;
    must(cudaMalloc((void **)&p, n * sizeof(T) + 16), "cudaMalloc");
    must(cudaMemset(p, fill, n * sizeof(T) + 16), "cudaMemset");
    return p;
}
template <class T> static T *on_device(const T *host, size_t n)
{
    T *p = device<T>(n, 0);
    must(cudaMemcpy(p, host, n * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
    return p;
}

/* Seconds of each of `runs` calls of run(i), the shortest and the median. */
struct times { double least, median; };
template <class F> static times measure(int runs, F run)
{
    cudaEvent_t begin, end;
    double *all = (double *)calloc(runs, sizeof *all);
    must(cudaEventCreate(&begin), "cudaEventCreate");
    must(cudaEventCreate(&end), "cudaEventCreate");
    for (int i = -2; i < runs; i++) {
        float ms = 0;
        must(cudaEventRecord(begin, 0), "cudaEventRecord");
        run(i + 2);
        must(cudaEventRecord(end, 0), "cudaEventRecord");
        must(cudaEventSynchronize(end), "cudaEventSynchronize");
        must(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
        if (i >= 0) all[i] = ms / 1000;
    }
    for (int i = 0; i < runs; i++)
        for (int k = i + 1; k < runs; k++)
            if (all[k] < all[i]) {
                double swap = all[i];
                all[i] = all[k], all[k] = swap;
            }
    times t = { all[0], all[runs / 2] };
    free(all);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return t;
}

static int copy(size_t bytes)
{
    unsigned char *a = device<unsigned char>(bytes, 1), *b = device<unsigned char>(bytes, 2);
    times t = measure(10, [&](int) { must(cudaMemcpyAsync(b, a, bytes, cudaMemcpyDeviceToDevice, 0), "cudaMemcpy"); });
    printf("{\"test\": \"copy\", \"bytes\": %zu, \"gb_per_s\": %.1f}\n", bytes, 2 * bytes / t.least / 1e9);
    cudaFree(a);
    cudaFree(b);
    return 0;
}

/* n floats on the device: none is NaN or infinite, and not all are zero. */
static bool sound(const float *device, size_t n)
{
    float *host = (float *)calloc(n, sizeof *host), most = 0;
    must(cudaMemcpy(host, device, n * sizeof *host, cudaMemcpyDeviceToHost), "cudaMemcpy");
    bool finite = true;
    for (size_t i = 0; i < n; i++) {
        finite = finite && isfinite(host[i]);
        most = fmaxf(most, fabsf(host[i]));
    }
    free(host);
    return finite && most > 0;
}

static kv_store store(const kv_shape *s, int pages, int fill)
{
    return { device<unsigned char>(kv_page_bytes(s) * pages, fill), kv_page_bytes(s), kv_layer_bytes(s), s->n_kv, 1,
             (int)kv_k_tile_bytes(s), (int)kv_v_tile_bytes(s), s->type_k, s->type_v, NULL, pages };
}

static int attention_time(kv_type k, kv_type v, int depth, int heads, int n_kv, int size, int runs)
{
    cudaDeviceProp gpu;
    must(cudaGetDeviceProperties(&gpu, 0), "cudaGetDeviceProperties");
    int blocks = (depth + KV_BLOCK - 1) / KV_BLOCK, width = (heads + 2 * n_kv) * size;
    bool sealed = kv_sealed(k) || kv_sealed(v);
    kv_shape main = { 1, n_kv, size, size, k, v, KV_BLOCK };
    kv_shape raw = { 1, n_kv, size, size, kv_raw_type(k), kv_raw_type(v), KV_BLOCK };
    double bytes = (double)kv_page_bytes(&main) * blocks;
    int copies = bytes > 256e6 ? 2 : (int)(256e6 / bytes) + 2;      /* each run reads what is not in the cache */
    if (copies > runs + 2) copies = runs + 2;
    int32_t *pages = (int32_t *)calloc(blocks, sizeof *pages);
    kv_sequence *sequences = (kv_sequence *)calloc(copies, sizeof *sequences);
    int32_t **tables = (int32_t **)calloc(copies, sizeof *tables);
    for (int i = 0; i < copies; i++) {
        for (int b = 0; b < blocks; b++) pages[b] = i * blocks + (int)((b * 7919ll) % blocks);
        if (blocks % 7919 == 0) for (int b = 0; b < blocks; b++) pages[b] = i * blocks + b;
        tables[i] = on_device(pages, blocks);
        sequences[i] = { tables[i], tables[0], blocks, 1, blocks, 0, 0 };
    }
    kv_row row = { 0, 0, depth - 1 };
    attention a = {};
    a.main = store(&main, blocks * copies, 0x2c);
    if (sealed) a.raw = store(&raw, blocks, 0x2c);
    a.n_head = heads, a.n_kv = n_kv, a.head_k = a.head_v = size;
    a.n_rot = size;
    a.scale = 0.1f;
    float *qkv = device<float>(width, 0), *angles = device<float>(size, 0);
    a.qkv = qkv, a.ld = width;
    a.cs = a.sn = a.sink_cs = a.sink_sn = angles;
    kv_row *rows = on_device(&row, 1);
    a.rows = rows;
    a.sequence_stride = 1;
    float *out = device<float>((size_t)heads * size, 0);
    a.out = out;
    a.append = true;
    a.n_splits = attention_splits(n_kv * attention_parts(heads / n_kv, size), gpu.multiProcessorCount, depth);
    a.part = device<float>((size_t)heads * a.n_splits * (size + 2), 0);
    a.arrived = device<unsigned>(n_kv * attention_parts(heads / n_kv, size), 0);
    kv_sequence *all = on_device(sequences, copies);
    attention_launch l = attention_decode(&a, 1, gpu.sharedMemPerBlockOptin);
    must(cudaFuncSetAttribute((const void *)l.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)l.shared),
         l.name);
    times t = measure(runs, [&](int i) {
        cudaLaunchConfig_t config = {};
        config.gridDim = l.grid, config.blockDim = l.block, config.dynamicSmemBytes = l.shared;
        a.sequences = all + i % copies;
        must(cudaLaunchKernelEx(&config, l.kernel, a), l.name);
    });
    bool finite = sound(out, (size_t)heads * size);
    printf("{\"test\": \"attention\", \"k\": %d, \"v\": %d, \"depth\": %d, \"heads\": %d, \"kv_heads\": %d, "
           "\"size\": %d, \"bytes\": %.0f, \"us\": %.2f, \"gb_per_s\": %.1f, \"finite\": %s}\n", k, v, depth, heads,
           n_kv, size, bytes, t.median * 1e6, bytes / t.median / 1e9, finite ? "true" : "false");
    for (int i = 0; i < copies; i++) cudaFree(tables[i]);
    void *made[] = { a.main.base, a.raw.base, qkv, angles, rows, out, a.part, a.arrived, all };
    for (void *p : made) cudaFree(p);
    free(pages), free(sequences), free(tables);
    return 0;
}

static int select_time(int n, int k, int rows, int runs)
{
    float *host, *logits = device<float>((size_t)rows * n + 4, 0);
    selected *out;
    must(cudaMallocHost((void **)&host, sizeof *host * n), "cudaMallocHost");
    must(cudaMallocHost((void **)&out, sizeof *out * rows), "cudaMallocHost");
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < n; i++) host[i] = (float)((i + r) * 2654435761u >> 8) * 1e-6f;
        must(cudaMemcpy(logits + (size_t)r * n, host, sizeof *host * n, cudaMemcpyHostToDevice), "cudaMemcpy");
    }
    int32_t *tops = (int32_t *)calloc(rows, sizeof *tops);
    for (int r = 0; r < rows; r++) tops[r] = k;
    selection s = { logits, n, on_device(tops, rows), device<uint64_t>(rows * select_peaks(n), 0),
                    device<unsigned>(rows, 0), out };
    select_launch l = select_largest(&s, rows);
    times t = measure(runs, [&](int) {
        cudaLaunchConfig_t config = {};
        config.gridDim = l.grid, config.blockDim = l.block, config.dynamicSmemBytes = l.shared;
        must(cudaLaunchKernelEx(&config, l.kernel, s), l.name);
    });
    times copy = measure(runs, [&](int) {
        must(cudaMemcpyAsync(host, logits, sizeof *host * n, cudaMemcpyDeviceToHost, 0), "cudaMemcpyAsync");
    });
    printf("{\"test\": \"select\", \"n\": %d, \"k\": %d, \"rows\": %d, \"us\": %.2f, \"copy_us\": %.2f, "
           "\"found\": %d}\n", n, k, rows, t.median * 1e6, copy.median * 1e6, out[rows - 1].n);
    void *made[] = { logits, (void *)s.top, s.peaks, s.arrived };
    for (void *p : made) cudaFree(p);
    cudaFreeHost(host), cudaFreeHost(out);
    free(tops);
    return 0;
}

static int model_time(const char *file, kv_type type, int prompt, int tokens, int ctx)
{
    struct error e = {};
    struct gguf *g;
    struct model *m;
    struct engine *n;
    struct sequence *s;
    struct model_options mo = {};
    struct engine_options eo = {};
    char remark[200];
    mo.ctx = eo.ctx = ctx;
    eo.threads = 1, eo.max_sequences = 1, eo.page_size = KV_BLOCK, eo.type_k = eo.type_v = type, eo.cache = true;
    eo.backend = BACKEND_CUDA;
    must(gguf_open(&g, file, true, &e), &e);
    double bytes = (double)gguf_file_bytes(g);
    must(model_open(&m, g, &mo, remark, &e) && engine_open(&n, m, &eo, &e) && sequence_open(&s, n, &e), &e);
    int32_t *ids = (int32_t *)calloc(prompt + 1, sizeof *ids), id = 5;
    for (int i = 0; i < prompt; i++) ids[i] = (int32_t)((i * 2654435761u >> 7) % m->n_vocab);
    sequence_want_top(s, 40);          /* as sampling does */
    must(sequence_sync(s, ids, prompt, NULL, NULL, &e), &e);       /* once to warm up */
    must(sequence_cut(s, 0) == 0, &e);
    double begin = now_seconds();
    must(sequence_sync(s, ids, prompt, NULL, NULL, &e), &e);
    double filled = now_seconds();
    must(engine_step(n, &s, &id, 1, &e), &e);                      /* records the step */
    double recorded = now_seconds();
    for (int i = 0; i < tokens; i++) must(engine_step(n, &s, &id, 1, &e), &e);
    double end = now_seconds();
    const float *logits = sequence_logits(s);
    int bad = !logits;
    for (int i = 0; !bad && i < m->n_vocab; i++) bad = !(logits[i] > -1e30f && logits[i] < 1e30f);
    double params = 0;
    for (size_t i = 0; i < gguf_tensor_count(g); i++)
        if (const struct gguf_tensor *t = gguf_tensor_at(g, i); t->n_dims == 2) params += (double)t->ne[0] * t->ne[1];
    double embd = (double)m->n_vocab * m->n_embd;
    bytes *= (params - embd) / params;                             /* the embedding's rows are not read */
    printf("{\"test\": \"model\", \"file\": \"%s\", \"prompt\": %d, \"prefill_tokens_per_s\": %.1f, "
           "\"prefill_tflops\": %.1f, \"decode_tokens_per_s\": %.2f, \"decode_gb_per_s\": %.1f, \"finite\": %s}\n",
           file, prompt, prompt / (filled - begin), 2 * (params - 2 * embd) * prompt / (filled - begin) / 1e12,
           tokens / (end - recorded), bytes * tokens / (end - recorded) / 1e9, bad ? "false" : "true");
    free(ids);
    sequence_close(s);
    engine_close(n);
    model_close(m);
    return bad;
}

int main(int argc, char **argv)
{
    if (argc == 3 && !strcmp(argv[1], "copy")) return copy((size_t)atoi(argv[2]) << 20);
    if (argc == 9 && !strcmp(argv[1], "attention"))
        return attention_time(type_of(argv[2]), type_of(argv[3]), atoi(argv[4]), atoi(argv[5]), atoi(argv[6]),
                              atoi(argv[7]), atoi(argv[8]));
    if (argc == 6 && !strcmp(argv[1], "select"))
        return select_time(atoi(argv[2]), atoi(argv[3]), atoi(argv[4]), atoi(argv[5]));
    if (argc == 7 && !strcmp(argv[1], "model"))
        return model_time(argv[2], type_of(argv[3]), atoi(argv[4]), atoi(argv[5]), atoi(argv[6]));
    fprintf(stderr, "usage: gpu_time copy MIB | attention K V DEPTH HEADS KV_HEADS SIZE RUNS | select N K ROWS RUNS | "
                    "model FILE TYPE PROMPT TOKENS CTX\n");
    return 2;
}
